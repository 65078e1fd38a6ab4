"""The one place where this package hands tensors to torch.distributed.

A `Channel` moves tensors between the ranks of a group. There are two:

* `LaneChannel`, for CPU tensors: a private Gloo group whose transfers are point to point and carry a tag. A message is
  matched by sender and tag, never by the order of calls, so several exchanges may be in flight in several threads and
  neither SyncBatchNorm's collectives nor the user's can get between them.
* `GroupChannel`, for device tensors and for any other backend: the same transfers on the group itself, in call order.

Every byte is counted where it enters a transfer, in `channel.traffic` and in `traffic`, the total of the process.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tensorplay.compression.failures import FailureBoard

__all__ = [
    "Channel",
    "GroupChannel",
    "LaneChannel",
    "Traffic",
    "WireError",
    "all_reduce_sum",
    "group_store",
    "group_timeout",
    "name_missing_ranks",
    "traffic",
]

Produce = Callable[[int], torch.Tensor | None]
Consume = Callable[[int], None]

_MAX_PARTS = 64  # transfers of one round to one peer; a tag is  message * _MAX_PARTS + part
_TAG_SPACE = 1 << 24  # messages that can be told apart; far more than are ever in flight together


class Traffic:
    """Bytes sent and received, counted where tensors enter collectives.

    Example:
        >>> t = Traffic()
        >>> t.add(sent_bytes=8, received_bytes=8)
        >>> t.sent_bytes
        8
    """

    def __init__(self, parent: "Traffic | None" = None) -> None:
        self._parent = parent
        self._lock = threading.Lock()
        self.sent_bytes = 0
        self.received_bytes = 0

    def add(self, sent_bytes: int = 0, received_bytes: int = 0) -> None:
        """Count bytes that enter a transfer, here and in the parent."""
        with self._lock:
            self.sent_bytes += sent_bytes
            self.received_bytes += received_bytes
        if self._parent is not None:
            self._parent.add(sent_bytes, received_bytes)

    def all_reduce(self, tensor: torch.Tensor, world_size: int) -> None:
        """Count an all-reduce by the backend: 2 (W-1)/W of the tensor's bytes each way."""
        each_way = 2 * (world_size - 1) * tensor.numel() * tensor.element_size() // world_size
        self.add(each_way, each_way)


traffic = Traffic()
"""All bytes this process has handed to collectives through this package."""


class Channel(Protocol):
    """What a round needs from the wire. All calls return when the data is usable (CPU) or ordered (device streams)."""

    rank: int
    world_size: int
    traffic: Traffic

    def all_to_all(
        self, message: int, produce: Produce, receives: Sequence[torch.Tensor | None], consume: Consume
    ) -> None:
        """Send `produce(peer)` to every peer, receive into `receives[peer]`, `consume(rank)` in rank order."""

    def all_reduce(self, message: int, tensors: Sequence[torch.Tensor], scratch: "Borrow") -> None:
        """Replace each tensor by its sum over the ranks, bit-identical everywhere."""


Borrow = Callable[[str, int, torch.dtype, torch.device], torch.Tensor]


def group_store(group: dist.ProcessGroup) -> c10d.Store:
    """Return the key-value store the ranks of `group` met on."""
    store: c10d.Store = c10d._get_process_group_store(group)
    return store


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """Return the time limit of the group's operations."""
    try:
        options: Any = group._get_backend(torch.device("cpu")).options
        limit: timedelta = options._timeout
        return limit
    except (RuntimeError, AttributeError):
        return c10d.default_pg_timeout


def all_reduce_sum(
    tensor: torch.Tensor, group: dist.ProcessGroup, counter: Traffic = traffic, async_op: bool = True
) -> Any:
    """Sum `tensor` over `group` in place by the backend's own all-reduce, counted; returns its Work or None."""
    counter.all_reduce(tensor, group.size())
    return dist.all_reduce(tensor, group=group, async_op=async_op)


def _bounds(numel: int, parts: int) -> list[int]:
    """Borders of `parts` nearly equal pieces of `numel` elements."""
    return [numel * i // parts for i in range(parts + 1)]


class WireError(RuntimeError):
    """A transfer failed: a peer is gone, or silent beyond the timeout. Where the fault lies is another question."""


@contextlib.contextmanager
def _wire() -> Iterator[None]:
    """Mark errors of the transport, so that they are told from this rank's own."""
    try:
        yield
    except RuntimeError as error:
        raise WireError(str(error)) from error


def _wait(work: Any) -> None:
    with _wire():
        work.wait()


def _own_connection(store: c10d.Store) -> c10d.Store:
    """The same store through another connection; the store itself where it is of a kind that has no clones."""
    try:
        own: c10d.Store = store.clone()  # type: ignore[attr-defined]  # torch's stub lacks it
    except (AttributeError, NotImplementedError, RuntimeError):
        return store
    return own


class LaneChannel:
    """Tagged point-to-point transfers on a private Gloo group.

    The group meets on a prefix of the base group's store that all members derive alike (`prefix`), never from the
    order in which groups were made.

    Args:
        store: the base group's store. rank, world_size: within the base group. timeout: of every wait.
        prefix: names the lane; equal on all ranks.
    """

    def __init__(
        self, store: c10d.Store, rank: int, world_size: int, timeout: timedelta, prefix: str, counter: Traffic
    ) -> None:
        self.rank, self.world_size, self.traffic = rank, world_size, counter
        # A connection of its own: a client of the store serves one call at a time, and a wait for a late rank would
        # keep every other lane of this process from the store, also the one that the late rank waits for.
        self._store = c10d.PrefixStore(prefix, _own_connection(store))
        self._timeout = timeout
        self.failures = FailureBoard(self._store, rank, world_size, timeout)
        self._gloo: Any = None

    def connect(self) -> None:
        """Meet the other ranks; every rank must come. Raises WireError: one does not within the timeout."""
        with _wire():
            self._gloo = c10d.ProcessGroupGloo(
                c10d.PrefixStore("gloo", self._store), self.rank, self.world_size, self._timeout
            )

    def close(self) -> None:
        """Drop the private group: peers that wait for this rank fail at once."""
        self._gloo = None

    def _group(self) -> Any:
        if self._gloo is None:
            raise WireError(
                "the lane's group is closed after a failure; end the process group and start again"
            )
        return self._gloo

    def _tag(self, message: int, part: int = 0) -> int:
        return (message % _TAG_SPACE) * _MAX_PARTS + part

    def send(self, tensor: torch.Tensor, peer: int, message: int, part: int = 0) -> Any:
        """Start sending a contiguous tensor; the Work must be waited for."""
        self.traffic.add(sent_bytes=tensor.numel() * tensor.element_size())
        with _wire():
            return self._group().send([_plain(tensor)], peer, self._tag(message, part))

    def receive(self, tensor: torch.Tensor, peer: int, message: int, part: int = 0) -> Any:
        """Start receiving into a contiguous tensor; the Work must be waited for."""
        self.traffic.add(received_bytes=tensor.numel() * tensor.element_size())
        with _wire():
            return self._group().recv([_plain(tensor)], peer, self._tag(message, part))

    def _peers(self) -> list[int]:
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def all_to_all(
        self, message: int, produce: Produce, receives: Sequence[torch.Tensor | None], consume: Consume
    ) -> None:
        """See `Channel`.

        1. Post every receive, since a send whose receive is not posted yet waits for a round trip.
        2. Produce and send peer by peer, so that encoding overlaps with the wire.
        3. Wait and consume in rank order: sums then have one order.
        """
        arriving: dict[int, Any] = {}
        for peer in reversed(self._peers()):
            target = receives[peer]
            if target is not None and target.numel():
                arriving[peer] = self.receive(target, peer, message)
        leaving = []
        for peer in self._peers():
            outgoing = produce(peer)
            if outgoing is not None and outgoing.numel():
                leaving.append(self.send(outgoing, peer, message))
        produce(self.rank)
        for source in range(self.world_size):
            if source in arriving:
                _wait(arriving[source])
            consume(source)
        for work in leaving:
            _wait(work)

    def all_reduce(self, message: int, tensors: Sequence[torch.Tensor], scratch: Borrow) -> None:
        """See `Channel`. Each rank sums one piece of each tensor in rank order, in float32 for half types.

        1. Post receives for the own piece from every peer, send every peer its piece.
        2. Sum in rank order, round once to the tensor's dtype.
        3. Send the sum to every peer, receive theirs in place.

        Two ranks send each other everything instead: the same bytes, in one hop.
        """
        if self.world_size == 1:
            return
        if 2 * len(tensors) > _MAX_PARTS:
            raise RuntimeError(f"at most {_MAX_PARTS // 2} tensors an all-reduce, got {len(tensors)}")
        flats = [tensor.view(-1) for tensor in tensors]
        if self.world_size == 2:
            self._all_reduce_pair(message, flats, scratch)
            return
        borders = [_bounds(flat.numel(), self.world_size) for flat in flats]
        own = [flat[b[self.rank] : b[self.rank + 1]] for flat, b in zip(flats, borders, strict=True)]
        peers = self._peers()
        inbox: dict[tuple[int, int], torch.Tensor] = {}
        arriving: dict[tuple[int, int], Any] = {}
        leaving: list[Any] = []
        for part, mine in enumerate(own):
            room = scratch(
                f"all_reduce/{part}", mine.numel() * (self.world_size - 1), mine.dtype, mine.device
            )
            for slot, peer in enumerate(reversed(peers)):
                inbox[part, peer] = room[slot * mine.numel() : (slot + 1) * mine.numel()]
                if mine.numel():
                    arriving[part, peer] = self.receive(inbox[part, peer], peer, message, part)
        for peer in peers:
            for part, (flat, b) in enumerate(zip(flats, borders, strict=True)):
                piece = flat[b[peer] : b[peer + 1]]
                if piece.numel():
                    leaving.append(self.send(piece, peer, message, part))
        gathering: list[Any] = []
        for peer in reversed(peers):
            for part, (flat, b) in enumerate(zip(flats, borders, strict=True)):
                piece = flat[b[peer] : b[peer + 1]]
                if piece.numel():
                    room = scratch(f"gather/{part}/{peer}", piece.numel(), piece.dtype, piece.device)
                    inbox[part, self.world_size + peer] = room
                    gathering.append(self.receive(room, peer, message, len(flats) + part))
        for part, mine in enumerate(own):
            if mine.numel():
                parts = []
                for source in range(self.world_size):
                    if source == self.rank:
                        parts.append(mine)
                    else:
                        _wait(arriving[part, source])
                        parts.append(inbox[part, source])
                _sum_in_order(parts, mine, scratch)
        for work in leaving:
            _wait(work)
        leaving = []
        for peer in peers:
            for part, mine in enumerate(own):
                if mine.numel():
                    leaving.append(self.send(mine, peer, message, len(flats) + part))
        for work in gathering:
            _wait(work)
        for peer in peers:
            for part, (flat, b) in enumerate(zip(flats, borders, strict=True)):
                if b[peer + 1] > b[peer]:
                    flat[b[peer] : b[peer + 1]].copy_(inbox[part, self.world_size + peer])
        for work in leaving:
            _wait(work)

    def _all_reduce_pair(self, message: int, flats: Sequence[torch.Tensor], scratch: Borrow) -> None:
        """`all_reduce` of two ranks. A sum of two is rounded once in any order, and is the same on both."""
        peer = 1 - self.rank
        rooms = [scratch(f"pair/{part}", f.numel(), f.dtype, f.device) for part, f in enumerate(flats)]
        filled = [part for part, flat in enumerate(flats) if flat.numel()]
        arriving = [self.receive(rooms[part], peer, message, part) for part in filled]
        leaving = [self.send(flats[part], peer, message, part) for part in filled]
        for part, work in zip(filled, arriving, strict=True):
            _wait(work)
            rooms[part].add_(flats[part])
        for part, work in zip(filled, leaving, strict=True):
            _wait(work)  # what is being sent may not change
            flats[part].copy_(rooms[part])


class GroupChannel:
    """Transfers on the group itself, in call order; on devices they only order streams.

    Not measured on a GPU yet: the same code runs on Gloo in the tests.
    """

    def __init__(self, group: dist.ProcessGroup, counter: Traffic) -> None:
        self.rank, self.world_size, self.traffic = group.rank(), group.size(), counter
        self._held = weakref.ref(group)  # a lane must not keep its group alive

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._held()
        if group is None:
            raise RuntimeError("the process group of this lane was destroyed")
        return group

    def all_to_all(
        self, message: int, produce: Produce, receives: Sequence[torch.Tensor | None], consume: Consume
    ) -> None:
        """See `Channel`. Receives are posted first; one batch of point-to-point operations."""
        peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        operations: list[Any] = []
        for peer in reversed(peers):
            target = receives[peer]
            if target is not None and target.numel():
                self.traffic.add(received_bytes=target.numel() * target.element_size())
                operations.append(
                    dist.P2POp(dist.irecv, _plain(target), group=self._group, tag=0, group_peer=peer)
                )
        for peer in peers:
            outgoing = produce(peer)
            if outgoing is not None and outgoing.numel():
                self.traffic.add(sent_bytes=outgoing.numel() * outgoing.element_size())
                operations.append(
                    dist.P2POp(dist.isend, _plain(outgoing), group=self._group, tag=0, group_peer=peer)
                )
        produce(self.rank)
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        for source in range(self.world_size):
            consume(source)

    def all_reduce(self, message: int, tensors: Sequence[torch.Tensor], scratch: Borrow) -> None:
        """See `Channel`. The backend's all-reduce, tensor by tensor."""
        for tensor in tensors:
            if tensor.numel():
                all_reduce_sum(tensor, self._group, self.traffic).wait()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A view Gloo and NCCL can move: bytes for dtypes they don't know, real numbers for complex ones."""
    if tensor.dtype.is_complex:
        return torch.view_as_real(tensor)
    if tensor.dtype in (torch.uint8, torch.float32, torch.float64, torch.float16, torch.bfloat16):
        return tensor
    return tensor.view(torch.uint8)


def _sum_in_order(parts: Sequence[torch.Tensor], out: torch.Tensor, scratch: Borrow) -> None:
    """out = parts[0] + parts[1] + …, half types summed in float32 and rounded once; `out` may be one of the parts."""
    wide = torch.float32 if out.dtype in (torch.float16, torch.bfloat16) else out.dtype
    total = scratch("sum", out.numel(), wide, out.device)
    total.copy_(parts[0])
    if wide == out.dtype:
        for part in parts[1:]:
            total.add_(part)
    else:
        term = scratch("sum/term", out.numel(), wide, out.device)
        for part in parts[1:]:
            total.add_(term.copy_(part))
    out.copy_(total)


def name_missing_ranks(group: dist.ProcessGroup, label: str, wait_seconds: float = 5.0) -> list[int]:
    """Roll call after a failed collective: the ranks of `group` that do not answer within `wait_seconds`.

    Every survivor must call it with the same `label` (unique to the failure). Returns group ranks, [] when all
    answered; raises RuntimeError when the store itself is gone (its host has ended).
    """
    store = c10d.PrefixStore(f"tensorplay/rollcall/{label}", group_store(group))
    peers = [peer for peer in range(group.size()) if peer != group.rank()]
    try:
        store.set(str(group.rank()), "1")
    except (RuntimeError, dist.DistError) as error:
        raise RuntimeError(
            "the rendezvous store does not answer: the rank that hosts it (usually 0) has ended"
        ) from error
    try:
        store.wait([str(peer) for peer in peers], timedelta(seconds=wait_seconds))
        return []
    except (RuntimeError, dist.DistError):
        return [peer for peer in peers if not store.check([str(peer)])]
