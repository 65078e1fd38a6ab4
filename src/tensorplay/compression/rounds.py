"""What an exchange yields: one round on the wire.

An exchange is a generator. It yields rounds, is resumed when a round is done, and returns when the averaged gradient
is in place: with its verdict on whether that is finite, or None. It never calls torch.distributed and doesn't know
whether it runs in a lane's thread or on a device stream.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tensorplay.compression.collective import Channel

__all__ = ["MAX_ROUNDS", "AllReduce", "AllToAll", "Exchange", "Round", "Scratch", "run_exchange"]


class Scratch:
    """Buffers that are allocated once and lent again: one `Scratch` belongs to one worker.

    `borrow(name, numel, dtype, device)` returns the first `numel` elements of the buffer of that name, with whatever
    they held before. A buffer grows when asked for more and never shrinks.

    Example:
        >>> scratch = Scratch()
        >>> a = scratch.borrow("block", 8, torch.float32, torch.device("cpu"))
        >>> b = scratch.borrow("block", 4, torch.float32, torch.device("cpu"))
        >>> a.data_ptr() == b.data_ptr(), b.numel()
        (True, 4)
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def borrow(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a 1-D tensor of `numel` elements; its content is left over from its last use."""
        key = (name, dtype, device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[key] = torch.empty(numel, dtype=dtype, device=device)
        return buffer[:numel]

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())


@dataclass(frozen=True)
class AllToAll:
    """Every rank sends each peer its own message.

    Args:
        produce: called once a rank, the own one last; returns the message (contiguous, any dtype), or None for none.
        receives: where the message of each rank goes; None (the own entry too) where nothing comes.
        consume: called once a rank in rank order, the own one included, when its message has arrived.
    """

    produce: Callable[[int], torch.Tensor | None]
    receives: Sequence[torch.Tensor | None]
    consume: Callable[[int], None]

    def perform(self, channel: Channel, message: int, scratch: Scratch) -> None:
        """Do it."""
        channel.all_to_all(message, self.produce, self.receives, self.consume)


@dataclass(frozen=True)
class AllReduce:
    """Each tensor (contiguous) becomes its sum over the ranks, in place; one message a peer and tensor."""

    tensors: Sequence[torch.Tensor]

    def perform(self, channel: Channel, message: int, scratch: Scratch) -> None:
        """Do it."""
        channel.all_reduce(message, self.tensors, scratch.borrow)


Round = AllReduce | AllToAll
"""One round on the wire."""
Exchange = Generator[Round, None, Any]
"""A generator of rounds. It may return whether its result is finite, where it knows: a bool, or a bool tensor on a
device."""
MAX_ROUNDS = 8
"""Rounds an exchange may have."""


def run_exchange(exchange: Exchange, channel: Channel, first_message: int, scratch: Scratch) -> None:
    """Run an exchange to its end; its rounds are messages `first_message`, `first_message + 1`, …"""
    for number, current in enumerate(exchange):
        if number >= MAX_ROUNDS:
            raise RuntimeError(f"an exchange may have {MAX_ROUNDS} rounds at most")
        current.perform(channel, first_message + number, scratch)
