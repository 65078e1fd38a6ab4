"""Ports: where an exchange takes values from and where its results go; error feedback is a port around a port.

    sent_t = codec(g_t + r_t);   r_{t+1} = g_t + r_t - sent_t

What a codec loses at one step is added to the next, so nothing is lost over time (Seide et al. 2014; Karimireddy et al.
2019). Residuals are float32 and change only once the exchange is known to be finite on every rank, so a step that a
GradScaler skips leaves them as they were.
"""

from collections.abc import Sequence

import torch

from tensorplay.compression.bucket import GradientSlice
from tensorplay.compression.plan import Block, Segment
from tensorplay.compression.rounds import Scratch

__all__ = [
    "Condition",
    "ErrorFeedback",
    "GradientPort",
    "MeanPort",
    "OwnerErrorFeedback",
    "Port",
    "write_where",
]

Condition = bool | torch.Tensor
"""Whether a step counts: known to the host, or a bool tensor on the device."""


def write_where(condition: Condition, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy `source` to `target` if `condition`; a tensor condition is applied on the device without waiting for it."""
    if isinstance(condition, torch.Tensor):
        torch.where(condition, source, target, out=target)
    elif condition:
        target.copy_(source)


class Port:
    """What an exchange reads a block's values from, and tells what became of them."""

    #: Whether what was not sent is asked for: then every compressed block is parked, and later settled, but those whose
    #: codec does without (see `Codec.settling`).
    remembers = False

    def load(self, block: Block, out: torch.Tensor) -> None:
        """Write the block's values to `out` (block.numel,), zeros in its gaps."""
        raise NotImplementedError

    def in_place(self, block: Block) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Where the block's values lie already, and what belongs to them as a sum; None where `load` must gather them.

        A codec may then work right there: what it leaves behind counts as parked, and nothing is copied.
        """
        return None

    def park(self, block: Block, left: torch.Tensor, scratch: Scratch) -> None:
        """Keep what was not sent of a block until it is known whether the step counts."""

    def settle(self, block: Block, keep: Sequence[Condition]) -> None:
        """Make what was parked the residual of each slice i for which `keep[i]` is true."""


class GradientPort(Port):
    """The gradients of a bucket's slices."""

    def __init__(self, slices: Sequence[GradientSlice]) -> None:
        self.values = [entry.values for entry in slices]

    def load(self, block: Block, out: torch.Tensor) -> None:
        for s in block.segments:
            out[s.at : s.at + s.length].copy_(self.values[s.index][s.start : s.start + s.length])
        for low, high in block.gaps:
            out[low:high].zero_()

    def in_place(self, block: Block) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        s = block.segments[0]
        values = self.values[s.index]
        if not block.is_one_piece or values.dtype != block.dtype:
            return None
        return values[s.start : s.start + s.length], None

    def store(self, block: Block, result: torch.Tensor) -> None:
        """Write a block's result to the gradients."""
        for s in block.segments:
            self.values[s.index][s.start : s.start + s.length].copy_(result[s.at : s.at + s.length])

    def fill(self, block: Block, value: float, indices: set[int] | None = None) -> None:
        """Write one value over a block's gradients, or over those of some slices."""
        for s in block.segments:
            if indices is None or s.index in indices:
                self.values[s.index][s.start : s.start + s.length].fill_(value)


class ErrorFeedback(Port):
    """Adds each slice's residual to what `port` loads, and keeps what was not sent as the next residual.

    Args:
        port: the gradients. residuals: float32 (numel,) a slice, None for slices that travel uncompressed.
    """

    remembers = True

    def __init__(self, port: GradientPort, residuals: Sequence[torch.Tensor | None]) -> None:
        self._port, self._residuals = port, residuals
        self._rooms: dict[int, torch.Tensor] = {}  # of blocks that could not be parked in place

    def load(self, block: Block, out: torch.Tensor) -> None:
        if not block.compressed:
            self._port.load(block, out)
            return
        for s in block.segments:
            target = out[s.at : s.at + s.length]
            values = self._port.values[s.index][s.start : s.start + s.length]
            residual = self._residual(s)
            if values.dtype == torch.float32:
                torch.add(values, residual, out=target)
            else:
                target.copy_(values).add_(residual)
        for low, high in block.gaps:
            out[low:high].zero_()

    def in_place(self, block: Block) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        spot = self._port.in_place(block)
        if spot is None or not block.compressed:
            return spot
        return (spot[0], self._residual(block.segments[0])) if spot[0].dtype == torch.float32 else None

    def park(self, block: Block, left: torch.Tensor, scratch: Scratch) -> None:
        """In the gradients themselves where they are float32: they have been read, and the result replaces them."""
        if self._port.values[block.segments[0].index].dtype == torch.float32:
            self._port.store(block, left)
            return
        # What an exchange parked before stays where it is if the buffer has to grow.
        room = scratch.borrow("parked", block.parked_at + block.numel, block.dtype, left.device)[
            block.parked_at :
        ]
        room.copy_(left)
        self._rooms[id(block)] = room

    def settle(self, block: Block, keep: Sequence[Condition]) -> None:
        room = self._rooms.get(id(block))
        for s in block.segments:
            if room is None:
                left = self._port.values[s.index][s.start : s.start + s.length]
            else:
                left = room[s.at : s.at + s.length]
            write_where(keep[s.index], left, self._residual(s))

    def _residual(self, s: Segment) -> torch.Tensor:
        residual = self._residuals[s.index]
        assert residual is not None
        return residual[s.start : s.start + s.length]


class MeanPort(Port):
    """The means an owner has made, to be encoded a second time."""

    def __init__(self, means: torch.Tensor) -> None:
        self._means = means  # bytes

    def mean(self, block: Block) -> torch.Tensor:
        """The mean of a block, in its dtype."""
        nbytes = block.numel * block.dtype.itemsize
        return self._means[block.mean_offset : block.mean_offset + nbytes].view(block.dtype)

    def load(self, block: Block, out: torch.Tensor) -> None:
        out.copy_(self.mean(block))

    def in_place(self, block: Block) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        return self.mean(block), None


class OwnerErrorFeedback(Port):
    """Error feedback of the second rounding: one residual of the mean, on the rank that owns the chunk.

    A residual here counts `world_size` times, since it is one of the mean and not of a rank's gradient.
    """

    remembers = True

    def __init__(self, port: MeanPort, residuals: Sequence[torch.Tensor | None]) -> None:
        self._port, self._residuals = port, residuals

    def load(self, block: Block, out: torch.Tensor) -> None:
        self._port.load(block, out)
        if block.compressed:
            for s in block.segments:
                out[s.at : s.at + s.length].add_(self._residual(s))

    def in_place(self, block: Block) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        if not block.compressed:
            return self._port.in_place(block)
        if not block.is_one_piece or block.dtype != torch.float32:
            return None
        return self._port.mean(block), self._residual(block.segments[0])

    def park(self, block: Block, left: torch.Tensor, scratch: Scratch) -> None:
        """In place of the mean, which has been read."""
        self._port.mean(block).copy_(left)

    def settle(self, block: Block, keep: Sequence[Condition]) -> None:
        left = self._port.mean(block)
        for s in block.segments:
            write_where(keep[s.index], left[s.at : s.at + s.length], self._residual(s))

    def _residual(self, s: Segment) -> torch.Tensor:
        residual = self._residuals[s.index]
        assert residual is not None
        return residual[s.owned_at : s.owned_at + s.length]
