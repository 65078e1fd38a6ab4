"""A piece of a bucket on its way through a hook that also makes the optimizer's updates."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tensorplay.compression.bucket import Bucket, GradBucket, GradientSlice, read_bucket
from tensorplay.compression.rounds import AllToAll, Scratch
from tensorplay.distributed.optim._zero_exchange import borrow, chunks_by_size, in_turns
from tensorplay.distributed.optim._zero_shards import Shards

__all__ = ["BucketWork", "after_gradients_are_written", "after_last_node", "gradient_round", "used_round"]

Segment = tuple[int, int]


@dataclass
class BucketWork:
    """Parameters of one bucket that travel together, who updates them, and what has become of it.

    Args:
        read: DDP's bucket. places: for each parameter, its number and its segment of the buffer.
        owners: number -> rank, as of this step. moves: those whose state has yet to go to their new owner.
        used: whether this rank used the parameters, in the order of `places`; then whether any rank did.
        gradient: the wrapped hook's future. result: the averaged gradient, flat or sparse.
        arrived: done when the parameters have arrived. is_whole: nothing else is in the bucket.
    """

    read: Bucket
    places: list[tuple[int, Segment]]
    owners: dict[int, int]
    moves: dict[int, int]
    used: list[bool] | None
    gradient: "torch.futures.Future[Any] | None" = None
    result: torch.Tensor | None = None
    arrived: "torch.futures.Future[BaseException | None]" = field(default_factory=torch.futures.Future)
    is_whole: bool = True

    @staticmethod
    def of(
        bucket: GradBucket,
        shards: Shards,
        one_owner: Callable[[int], int] | None,
        take_used: Callable[[Sequence[torch.Tensor]], list[bool]] | None,
    ) -> list["BucketWork"]:
        """Read DDP's bucket and cut it, at parameter borders, into pieces of about `PIECE_BYTES`.

        Args:
            one_owner: bytes of the bucket's parameters -> the rank that gets them all; None: the optimizer's partition.
            take_used: tells which parameters this rank used; None: all were.
        """
        read = read_bucket(bucket)
        if read.is_sparse:
            parameters, lengths = list(bucket.parameters()), [0]
        else:
            parameters = [piece.key for piece in read.slices if isinstance(piece.key, torch.Tensor)]
            lengths = [piece.values.numel() for piece in read.slices]
        places: list[tuple[int, Segment]] = []
        known: list[torch.Tensor] = []
        start = 0
        for parameter, length in zip(parameters, lengths, strict=True):
            number = shards.number_of(parameter)
            if number is not None:
                places.append((number, (start, start + length)))
                known.append(parameter)
            start += length
        if one_owner is None:
            owners = {number: shards.owners[number] for number, _ in places}
        else:
            owner = one_owner(sum(p.numel() * p.element_size() for p in known))
            owners = {number: owner for number, _ in places}
        used = None if take_used is None else take_used(known)
        devices: Any = [read.buffer.device] if read.buffer.device.type != "cpu" else None
        turns = in_turns([owners[number] for number, _ in places])
        works = []
        for piece in chunks_by_size([known[place] for place in turns]) or [[]]:
            chosen = sorted(turns[place] for place in piece)
            mine = {number: owners[number] for number, _ in (places[place] for place in chosen)}
            works.append(
                BucketWork(
                    read=read,
                    places=[places[place] for place in chosen],
                    owners=mine,
                    moves={n: owner for n, owner in mine.items() if shards.owners[n] != owner},
                    used=None if used is None else [used[place] for place in chosen],
                    arrived=torch.futures.Future(devices=devices),
                    is_whole=len(chosen) == len(parameters),
                )
            )
        return works

    @property
    def device(self) -> torch.device:
        """Where the bucket is."""
        return self.read.buffer.device

    def parts(self, shards: Shards) -> list[list[torch.Tensor]]:
        """The bucket's parameters by owner."""
        parts: list[list[torch.Tensor]] = [[] for _ in range(shards.world_size)]
        for number, _ in self.places:
            parts[self.owners[number]].append(shards.parameters[number])
        return parts

    def segments(self, world_size: int) -> list[list[Segment]]:
        """By owner, the segments of the buffer, in order; neighbours are merged."""
        found: list[list[Segment]] = [[] for _ in range(world_size)]
        for number, (start, stop) in self.places:
            mine = found[self.owners[number]]
            if mine and mine[-1][1] == start:
                mine[-1] = (mine[-1][0], stop)
            elif stop > start:
                mine.append((start, stop))
        return found

    def gradients(self, shards: Shards, rank: int | None = None) -> Iterator[tuple[int, torch.Tensor | None]]:
        """Number and gradient of the parameters that `rank` owns (None: of all).

        What no rank used keeps the gradient it had, None as a rule, which is what an optimizer would find.
        """
        assert self.result is not None
        used = self.used or [True] * len(self.places)
        for (number, (start, stop)), is_used in zip(self.places, used, strict=True):
            if rank is not None and self.owners[number] != rank:
                continue
            parameter = shards.parameters[number]
            if not is_used:
                yield number, parameter.grad
            elif self.result.layout != torch.strided:
                yield number, self.result
            else:
                yield number, _shaped(self.read, parameter, self.result[start:stop])

    def release(self) -> None:
        """Let go of gradients."""
        self.result = self.gradient = None


def _shaped(read: Bucket, parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    stride = next(piece.stride for piece in read.slices if piece.key is parameter)
    gradient = GradientSlice(parameter, values, tuple(parameter.shape), stride).shaped()
    if parameter.is_complex() and not gradient.is_complex():
        gradient = torch.view_as_complex(gradient)
    return gradient


def used_round(work: BucketWork, rank: int, world_size: int) -> AllToAll:
    """Return the round after which `work.used` says what any rank used: a byte a parameter to each peer."""
    assert work.used is not None
    own = torch.tensor(work.used, dtype=torch.uint8, device=work.device)
    others = [None if source == rank else torch.empty_like(own) for source in range(world_size)]
    together = own.clone()

    def consume(source: int) -> None:
        theirs = others[source]
        if theirs is not None:
            together.bitwise_or_(theirs)
        if source == world_size - 1:
            work.used = [bool(flag) for flag in together.tolist()]

    return AllToAll(lambda peer: None if peer == rank else own, others, consume)


def gradient_round(
    work: BucketWork,
    rank: int,
    world_size: int,
    scratch: Scratch,
    wire_dtype: torch.dtype | None,
    share: float,
) -> AllToAll:
    """Return the round that gives each owner the mean of its gradients, and nobody anything else.

        own segments = sum over ranks, in rank order, of gradient * share       (float32 or wider, rounded once)

    With a `wire_dtype` each rank's `gradient * share` is rounded to it, the own one too.
    """
    buffer = work.read.buffer
    segments = work.segments(world_size)
    counts = [sum(stop - start for start, stop in part) for part in segments]
    own = segments[rank]
    dtype = wire_dtype or buffer.dtype
    wide = torch.float32 if buffer.dtype in (torch.float16, torch.bfloat16) else buffer.dtype
    total = borrow(scratch, "total", counts[rank], wide, buffer.device)
    receives = [
        None
        if source == rank or not counts[rank]
        else borrow(scratch, f"from/{source}", counts[rank], dtype, buffer.device)
        for source in range(world_size)
    ]
    if wire_dtype is not None:
        for part in segments:
            for start, stop in part:
                buffer[start:stop].mul_(share)

    def pack(part: Sequence[Segment], room: torch.Tensor) -> torch.Tensor:
        filled = 0
        for start, stop in part:
            room[filled : filled + stop - start].copy_(buffer[start:stop])
            filled += stop - start
        return room

    def produce(peer: int) -> torch.Tensor | None:
        if peer == rank or not counts[peer]:
            return None
        if len(segments[peer]) == 1 and dtype == buffer.dtype:
            start, stop = segments[peer][0]
            return buffer[start:stop]
        return pack(segments[peer], borrow(scratch, f"to/{peer}", counts[peer], dtype, buffer.device))

    def consume(source: int) -> None:
        if not counts[rank]:
            return
        values = receives[source]
        if values is None:
            values = pack(own, borrow(scratch, "own", counts[rank], dtype, buffer.device))
        if source == 0:
            total.copy_(values)
        elif values.dtype == wide:
            total.add_(values)
        else:
            term = borrow(scratch, "term", counts[rank], wide, buffer.device)
            total.add_(term.copy_(values))
        if source == world_size - 1:
            if wire_dtype is None:
                total.mul_(share)
            filled = 0
            for start, stop in own:
                buffer[start:stop].copy_(total[filled : filled + stop - start])
                filled += stop - start

    return AllToAll(produce, receives, consume)


def after_last_node(function: Callable[[], None]) -> None:
    """Call `function` once the running backward has computed everything, before DDP waits for its buckets.

    Without a backward (a rank without data inside Join), or when all is computed (a static graph's first), at once.
    """
    if torch._C._current_autograd_node() is None:
        function()
    else:
        torch.autograd.Variable._execution_engine.queue_callback(function)


def after_gradients_are_written(function: Callable[[], None]) -> None:
    """Call `function` at the very end of the running backward, when DDP has written every `.grad`."""
    queue: Any = torch.autograd.Variable._execution_engine.queue_callback
    try:
        # DDP queues its own last part after the last bucket: what is queued from within a callback comes after it.
        queue(lambda: queue(function))
    except RuntimeError:
        function()  # no backward is running
