"""The three routes of a unit: two-shot, gather, and sum. Each is a generator of rounds (see rounds.py).

Bytes a rank sends, with N values of b bits and W ranks:

    gather     N b/8 (W-1)                every rank decodes every payload
    two-shot   N (b + b2)/8 (W-1)/W       each rank averages one chunk and encodes the mean again with b2 bits
    sum        2 N b/8 (W-1)/W            payloads that can be added, by all-reduce

Each message starts with a header: 8 bytes that name the exchange, so that ranks which run different codecs or steps
fail instead of decoding nonsense, and one flag a slice: whether this rank's backward pass gave it a gradient.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tensorplay.compression.codec import Codec, Context, Settling
from tensorplay.compression.error_feedback import Condition, GradientPort, MeanPort, OwnerErrorFeedback, Port
from tensorplay.compression.plan import Block, Chunk, Unit
from tensorplay.compression.rounds import AllReduce, AllToAll, Exchange, Scratch

__all__ = ["ROUTES", "Terms", "choose_route", "exchange_unit", "route_bytes"]

ROUTES = ("auto", "gather", "sum", "two-shot")
"""What `route` may be; "auto" is resolved by `choose_route`."""


@dataclass(frozen=True)
class Terms:
    """What one exchange needs to know besides its unit.

    Args:
        rank, world_size: in the group. divisor: ranks that take part in the mean.
        seed: of the step, equal on all ranks. used: for each slice of the bucket, whether this rank used it.
        label: what all ranks must agree on (codec, step); it is hashed into the header.
    """

    rank: int
    world_size: int
    divisor: int
    seed: int
    used: Sequence[bool]
    label: str


def route_bytes(route: str, first_bytes: float, second_bytes: float, world_size: int) -> float:
    """Bytes a rank sends when the whole gradient encodes to `first_bytes`, and its mean to `second_bytes`.

    >>> route_bytes("gather", 100, 100, 4), route_bytes("two-shot", 100, 100, 4)
    (300, 150.0)
    """
    if route == "gather":
        return first_bytes * (world_size - 1)
    if route == "two-shot":
        return (first_bytes + second_bytes) * (world_size - 1) / world_size
    return 2 * first_bytes * (world_size - 1) / world_size


def choose_route(codec: Codec, second: Codec, world_size: int, device: torch.device, feedback: bool) -> str:
    """The route that sends fewest bytes; the one with a single rounding where two send the same.

    On a device, payloads that can be added go through the backend's all-reduce, unless error feedback asks for the
    exact account that only the other routes keep.
    """
    if device.type != "cpu" and codec.sums_as is not None and not feedback:
        return "sum"
    million = 1 << 20
    first_bytes, second_bytes = codec.wire_bytes(million), second.wire_bytes(million)
    gather = route_bytes("gather", first_bytes, second_bytes, world_size)
    return (
        "gather" if gather <= route_bytes("two-shot", first_bytes, second_bytes, world_size) else "two-shot"
    )


def exchange_unit(
    route: str,
    unit: Unit,
    port: Port,
    gradients: GradientPort,
    owned: Sequence[torch.Tensor | None] | None,
    terms: Terms,
    scratch: Scratch,
) -> Exchange:
    """Average a unit's gradients over the ranks, by one of the routes.

    Args:
        route: "gather", "sum" (both with a unit of one chunk) or "two-shot" (one chunk a rank).
        port: what is encoded. gradients: where results go. owned: second residuals by slice, or None.
    """
    if route == "two-shot":
        return _TwoShot(unit, port, gradients, owned, terms, scratch).rounds()
    if route == "gather":
        return _Gather(unit, port, gradients, terms, scratch).rounds()
    return _Sum(unit, port, gradients, terms, scratch).rounds()


class _Route:
    """What the routes share: encoding into messages, headers, and the end of an exchange."""

    #: Whether every value is divided by the number of ranks before it is encoded.
    divides_all = False

    def __init__(
        self, unit: Unit, port: Port, gradients: GradientPort, terms: Terms, scratch: Scratch
    ) -> None:
        self.unit, self.port, self.gradients, self.terms, self.scratch = unit, port, gradients, terms, scratch
        self.device = gradients.values[0].device if gradients.values else torch.device("cpu")
        self.used = [terms.used[index] for index in unit.indices]
        self.flags: torch.Tensor | None = (
            None  # on a device: their sum over the ranks, never read by the host
        )
        self.fingerprint = zlib.crc32(f"{terms.label}/{[c.message_bytes for c in unit.chunks]}".encode())

    def context(self, block: Block, rank: int) -> Context:
        return Context(self.scratch, self.terms.seed ^ block.seed, rank)

    def second_context(self, block: Block, owner: int) -> Context:
        """Of the second rounding: the same choice of entries as the first (seed), but noise of its own (rank)."""
        return self.context(block, owner + self.terms.world_size)

    def encode(self, chunk: Chunk, message: torch.Tensor) -> None:
        """Write a chunk's header and payloads."""
        self.write_header(message)
        for block in chunk.blocks:
            context = self.context(block, self.terms.rank)
            divides = self.divides_all or block.codec.divide_first
            self.encode_block(
                block, block.codec, self.port, _payload(message, block), context, divides=divides
            )

    def encode_block(
        self,
        block: Block,
        codec: Codec,
        port: Port,
        payload: torch.Tensor,
        context: Context,
        *,
        divides: bool,
    ) -> None:
        """Write one payload; where the port remembers, park what was not sent. In place where that can be."""
        settled = self.settled(block) if port is self.port else None
        if settled is not None:
            settled.codec.encode_sum(settled.values, settled.residual, payload, context)
            return
        remembers = port.remembers and block.compressed
        spot = None if divides else port.in_place(block)
        if spot is None:
            values, addend = self.scratch.borrow("block", block.numel, block.dtype, self.device), None
            port.load(block, values)
        else:
            values, addend = spot
        if divides:
            values.mul_(1.0 / self.terms.divisor)
        if not remembers:
            codec.encode(values, payload, context)
            return
        codec.encode_residual(values, payload, context, addend)
        if divides:
            values.mul_(float(self.terms.divisor))
        if spot is None:
            port.park(block, values, self.scratch)

    def settled(self, block: Block) -> "_Settled | None":
        """Where the codec of a block reads gradient and residual in place and parks nothing; None where it can't."""
        if (
            self.divides_all
            or not (self.port.remembers and block.compressed)
            or block.second is not block.codec
        ):
            return None
        spot = self.port.in_place(block)
        if spot is None or spot[1] is None:
            return None
        codec = block.codec.settling(spot[0])
        return None if codec is None else _Settled(codec, spot[0], spot[1])

    def write_header(self, message: torch.Tensor) -> None:
        header = message[: self.unit.header_bytes]
        stamp = [*self.fingerprint.to_bytes(8, "little"), *([0] * 8), *map(int, self.used)]
        header.copy_(torch.tensor(stamp + [0] * (header.numel() - len(stamp)), dtype=torch.uint8))

    def read_header(self, source: int, message: torch.Tensor) -> None:
        """Check that `source` is at the same exchange and merge its flags."""
        if self.device.type != "cpu":
            flags = message[16 : 16 + len(self.used)].to(torch.int32)
            self.flags = flags if self.flags is None else self.flags + flags
            return
        header = bytes(message[: self.unit.header_bytes].numpy())
        if int.from_bytes(header[:8], "little") != self.fingerprint:
            raise RuntimeError(
                f"rank {source} runs another exchange than rank {self.terms.rank} ({self.terms.label}): all ranks "
                "must use the same hook, settings and number of steps (after a resume: the same checkpoint)"
            )
        self.used = [mine or bool(theirs) for mine, theirs in zip(self.used, header[16:], strict=False)]

    def share(self, block: Block) -> float:
        """What a payload is multiplied by in the mean."""
        return 1.0 if block.codec.divide_first else 1.0 / self.terms.divisor

    def accumulate(self, block: Block, payload: torch.Tensor, source: int, total: torch.Tensor) -> None:
        """total (+)= payload's share of the mean, in rank order; the first rank's replaces."""
        factor, context = self.share(block), self.context(block, source)
        if source:
            block.codec.decode_add(payload, total, factor, context)
        else:
            block.codec.decode_scaled(payload, total, factor, context)

    def conditions(self, finite: Condition) -> dict[int, Condition]:
        """For each slice of the unit, whether this step counts: finite everywhere and used somewhere."""
        if self.flags is not None:
            return {index: finite & (self.flags[at] > 0) for at, index in enumerate(self.unit.indices)}
        return {index: finite and used for index, used in zip(self.unit.indices, self.used, strict=True)}

    def condition(self, finite: torch.Tensor) -> Condition:
        return bool(finite) if self.device.type == "cpu" else finite

    def deliver(
        self,
        block: Block,
        finite: Condition,
        keep: dict[int, Condition],
        mean: "_Mean",
        own: torch.Tensor,
    ) -> None:
        """End a block: its residual, then its result, which `mean` writes, in place where that can be.

        Residuals become what was not sent, where the step counts. The result is the mean, zero where no rank used the
        slice, NaN where the unit isn't finite. `own`: the first payload this rank made of the block.
        """
        settled = self.settled(block)
        if settled is None and self.port.remembers and block.compressed:
            self.port.settle(block, _Table(keep))
        if finite is False:
            self.gradients.fill(block, torch.nan)
            return
        spot = self.gradients.in_place(block) if finite is True else None
        if settled is not None and keep[block.segments[0].index] is True:
            settled.codec.settle_mean(
                settled.values, settled.residual, own, mean.payloads, mean.factor, mean.contexts
            )
        elif spot is not None:
            mean.write(spot[0])
        else:
            result = self.scratch.borrow("block", block.numel, block.dtype, self.device)
            mean.write(result)
            if isinstance(finite, torch.Tensor):
                result = torch.where(finite, result, torch.full_like(result, torch.nan))
            self.gradients.store(block, result)
        if isinstance(finite, torch.Tensor):
            return
        unused = {index for index, counts in keep.items() if counts is False}
        if unused:
            self.gradients.fill(block, 0.0, unused)

    def borrow_bytes(self, name: str, nbytes: int) -> torch.Tensor:
        return self.scratch.borrow(name, nbytes, torch.uint8, self.device)


@dataclass(frozen=True)
class _Mean:
    """factor * the sum of what payloads of one codec decode to, each with its context."""

    codec: Codec
    payloads: Sequence[torch.Tensor]
    factor: float
    contexts: Sequence[Context]

    def write(self, out: torch.Tensor) -> None:
        self.codec.decode_mean(self.payloads, out, self.factor, self.contexts)


@dataclass(frozen=True)
class _Settled:
    """A block whose codec parks nothing, and where its gradient and residual lie."""

    codec: Settling
    values: torch.Tensor
    residual: torch.Tensor


class _Table(Sequence[Condition]):
    """Conditions by slice index."""

    def __init__(self, by_index: dict[int, Condition]) -> None:
        self._by_index = by_index

    def __getitem__(self, index: int) -> Condition:  # type: ignore[override]
        return self._by_index[index]

    def __len__(self) -> int:
        return len(self._by_index)


def _payload(message: torch.Tensor, block: Block) -> torch.Tensor:
    return message[block.offset : block.offset + block.payload_bytes]


def _second_payload(message: torch.Tensor, block: Block) -> torch.Tensor:
    return message[block.second_offset : block.second_offset + block.second_bytes]


class _TwoShot(_Route):
    """Every rank averages one chunk.

    1. Encode each peer's chunk and send it; receive the own chunk from every peer.
    2. Average the own chunk in rank order, in float32.
    3. Encode the mean (its own error feedback added) and send it to every peer.
    4. Check that all is finite, settle the residuals, write the decoded means.
    """

    def __init__(
        self,
        unit: Unit,
        port: Port,
        gradients: GradientPort,
        owned: Sequence[torch.Tensor | None] | None,
        terms: Terms,
        scratch: Scratch,
    ) -> None:
        super().__init__(unit, port, gradients, terms, scratch)
        self.own = unit.chunks[terms.rank]
        self.means = MeanPort(self.borrow_bytes("means", self.own.mean_bytes))
        self.second_port: Port = self.means if owned is None else OwnerErrorFeedback(self.means, owned)

    def rounds(self) -> Exchange:
        """See the class."""
        rank, world_size, chunks = self.terms.rank, self.terms.world_size, self.unit.chunks
        outbox = _split(
            self.borrow_bytes("outbox", sum(c.message_bytes for c in chunks)),
            [c.message_bytes for c in chunks],
        )
        inbox = self._inbox("inbox", [self.own.message_bytes] * world_size)
        inbox[rank] = outbox[rank]

        def produce(peer: int) -> torch.Tensor:
            self.encode(chunks[peer], outbox[peer])
            return outbox[peer]

        def consume(source: int) -> None:
            message = inbox[source]
            assert message is not None
            self.read_header(source, message)
            for block in self.own.blocks:
                self.accumulate(block, _payload(message, block), source, self.means.mean(block))

        yield AllToAll(
            produce, [None if peer == rank else inbox[peer] for peer in range(world_size)], consume
        )

        second = self._inbox("second", [c.second_bytes for c in chunks])
        mine = self.borrow_bytes("second/own", self.own.second_bytes)
        second[rank] = mine
        for block in self.own.blocks:
            payload, context = _second_payload(mine, block), self.second_context(block, rank)
            self.encode_block(block, block.second, self.second_port, payload, context, divides=False)
        yield AllToAll(
            lambda peer: mine,
            [None if peer == rank else second[peer] for peer in range(world_size)],
            lambda source: None,
        )
        return self._finish(outbox, second)

    def _inbox(self, name: str, sizes: list[int]) -> list[torch.Tensor]:
        """One view a rank of one buffer; the own view is empty."""
        sizes = [0 if peer == self.terms.rank else size for peer, size in enumerate(sizes)]
        return _split(self.borrow_bytes(name, sum(sizes)), sizes)

    def _finish(self, outbox: list[torch.Tensor], second: list[torch.Tensor]) -> Condition:
        good = torch.ones((), dtype=torch.bool, device=self.device)
        for owner, chunk in enumerate(self.unit.chunks):
            for block in chunk.blocks:
                payload = _second_payload(second[owner], block)
                good &= block.second.is_finite(payload, block.numel, self.second_context(block, owner))
        finite = self.condition(good)
        keep = self.conditions(finite)
        for owner, chunk in enumerate(self.unit.chunks):
            for block in chunk.blocks:
                payload, context = _second_payload(second[owner], block), self.second_context(block, owner)
                mean = _Mean(block.second, [payload], 1.0, [context])
                self.deliver(block, finite, keep, mean, _payload(outbox[owner], block))
                if owner == self.terms.rank and self.second_port.remembers and block.compressed:
                    self.second_port.settle(block, _Table(keep))
        return finite


class _Gather(_Route):
    """Every rank gets every payload.

    1. Encode the unit and send it to every peer.
    2. Check that all payloads are finite.
    3. Block by block: settle the residual, average in rank order, write.
    """

    def rounds(self) -> Exchange:
        """See the class."""
        rank, world_size, chunk = self.terms.rank, self.terms.world_size, self.unit.chunks[0]
        mine = self.borrow_bytes("outbox", chunk.message_bytes)
        sizes = [0 if peer == rank else chunk.message_bytes for peer in range(world_size)]
        inbox = _split(self.borrow_bytes("inbox", sum(sizes)), sizes)
        messages = [mine if peer == rank else inbox[peer] for peer in range(world_size)]
        encoded = False

        def produce(peer: int) -> torch.Tensor:
            nonlocal encoded
            if not encoded:
                self.encode(chunk, mine)
                encoded = True
            return mine

        def consume(source: int) -> None:
            self.read_header(source, messages[source])

        yield AllToAll(
            produce, [None if peer == rank else inbox[peer] for peer in range(world_size)], consume
        )

        good = torch.ones((), dtype=torch.bool, device=self.device)
        for source, message in enumerate(messages):
            for block in chunk.blocks:
                good &= block.codec.is_finite(
                    _payload(message, block), block.numel, self.context(block, source)
                )
        finite = self.condition(good)
        keep = self.conditions(finite)
        for block in chunk.blocks:
            payloads = [_payload(message, block) for message in messages]
            contexts = [self.context(block, source) for source in range(world_size)]
            mean = _Mean(block.codec, payloads, self.share(block), contexts)
            self.deliver(block, finite, keep, mean, payloads[rank])
        return finite


class _Sum(_Route):
    """Payloads that can be added go through an all-reduce; values are divided before they are encoded.

    1. Encode, the residuals being parked.
    2. All-reduce the payloads, a run a dtype, and the flags.
    3. Check, settle, write.
    """

    divides_all = True

    def rounds(self) -> Exchange:
        """See the class."""
        chunk = self.unit.chunks[0]
        message = self.borrow_bytes("outbox", chunk.message_bytes)
        self.encode(chunk, message)
        flags = self.scratch.borrow("sum/flags", len(self.used), torch.float32, self.device)
        flags.copy_(torch.tensor(self.used, dtype=torch.float32))
        yield AllReduce([*self._runs(chunk, message), flags])

        if self.device.type == "cpu":
            self.used = [bool(count) for count in flags.tolist()]
        else:
            self.flags = flags
        good = torch.ones((), dtype=torch.bool, device=self.device)
        for block in chunk.blocks:
            good &= block.codec.is_finite(_payload(message, block), block.numel, self.context(block, 0))
        finite = self.condition(good)
        keep = self.conditions(finite)
        for block in chunk.blocks:
            payload = _payload(message, block)
            mean = _Mean(block.codec, [payload], 1.0, [self.context(block, 0)])
            self.deliver(block, finite, keep, mean, payload)
        return finite

    def _runs(self, chunk: Chunk, message: torch.Tensor) -> list[torch.Tensor]:
        """The payloads as tensors of the dtype they are added in; neighbours of one dtype are one tensor."""
        runs: list[tuple[torch.dtype, int, int]] = []
        for block in chunk.blocks:
            dtype = block.codec.sums_as
            if dtype is None:
                raise ValueError(
                    f"codec {block.codec.name} can't be summed: use route gather, two-shot or auto"
                )
            end = block.offset + block.payload_bytes
            if runs and runs[-1][0] == dtype:
                message[runs[-1][2] : block.offset].zero_()
                runs[-1] = (dtype, runs[-1][1], end)
            else:
                runs.append((dtype, block.offset, end))
        return [message[low:high].view(dtype) for dtype, low, high in runs if high > low]


def _split(buffer: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Neighbouring views of a buffer."""
    views = []
    start = 0
    for size in sizes:
        views.append(buffer[start : start + size])
        start += size
    return views
