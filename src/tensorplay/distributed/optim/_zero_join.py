"""A sharded optimizer inside Join: what it does on a rank that has run out of data."""

from collections.abc import Sequence
from typing import Protocol

import torch

from tensorplay.compression.driver import Lane
from tensorplay.compression.rounds import AllToAll, Exchange, Scratch
from tensorplay.distributed.algorithms.join import JoinHook

__all__ = ["StepHook", "Steppable", "refresh_gradients"]


class Steppable(Protocol):
    """What the hook needs of the optimizer."""

    def step_without_data(self) -> None:
        """Repeat a step of the ranks that have data."""


class StepHook(JoinHook):
    """Repeats the step of the ranks that have data, in the iterations that average gradients."""

    def __init__(self, optimizer: Steppable) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """See `JoinHook`."""
        if self.join is None or self.join.synchronizes:
            self._optimizer.step_without_data()


def refresh_gradients(
    lane: Lane, parts: Sequence[Sequence[torch.Tensor]], has_data: bool, device: torch.device
) -> None:
    """Give ranks that have run out of data the averaged gradients of the parameters they own, and wait for it.

    torch's Join leaves the gradients of such a rank as they were in its own last iteration.

    1. Every rank says whether it has data.
    2. The lowest rank that has sends each rank without the gradients of its parameters, with a byte a parameter that
       says whether there is one.

    Args:
        parts: by owner, the parameters that may be updated.
    """
    rank, world_size = lane.rank, lane.world_size

    def exchange(scratch: Scratch) -> Exchange:
        flags = torch.zeros(world_size, dtype=torch.uint8, device=device)
        flags[rank] = int(has_data)
        own = flags[rank : rank + 1].clone()
        yield AllToAll(
            lambda peer: None if peer == rank else own,
            [None if source == rank else flags[source : source + 1] for source in range(world_size)],
            lambda source: None,
        )
        present = [bool(flag) for flag in flags.tolist()]
        if all(present) or not any(present):
            return
        source = present.index(True)
        receives: list[torch.Tensor | None] = [None] * world_size
        if not has_data:
            receives[source] = torch.empty(_size_bytes(parts[rank]), dtype=torch.uint8, device=device)

        def produce(peer: int) -> torch.Tensor | None:
            return _pack(parts[peer], device) if rank == source and not present[peer] else None

        yield AllToAll(produce, receives, lambda source: None)
        room = receives[source]
        if room is not None:
            _unpack(room, parts[rank])

    error = lane.submit(exchange).wait()
    if error is not None:
        raise error


def _size_bytes(parameters: Sequence[torch.Tensor]) -> int:
    return len(parameters) + sum(p.numel() * p.element_size() for p in parameters)


def _pack(parameters: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    presence = [int(parameter.grad is not None) for parameter in parameters]
    pieces = [torch.tensor(presence, dtype=torch.uint8, device=device)]
    for parameter in parameters:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if gradient.layout != torch.strided:
            raise RuntimeError(
                "a rank without data can't be given a sparse gradient inside torch's Join: use "
                "tensorplay.distributed.algorithms.Join"
            )
        pieces.append(gradient.detach().contiguous().view(-1).view(torch.uint8))
    return torch.cat(pieces)


def _unpack(room: torch.Tensor, parameters: Sequence[torch.Tensor]) -> None:
    presence = room[: len(parameters)].tolist()
    start = len(parameters)
    for parameter, there in zip(parameters, presence, strict=True):
        size_bytes = parameter.numel() * parameter.element_size()
        # A clone, since its place may not be aligned for its dtype.
        values = room[start : start + size_bytes].clone().view(parameter.dtype).view(parameter.shape)
        start += size_bytes
        if not there:
            parameter.grad = None
        elif parameter.grad is None:
            parameter.grad = torch.empty_like(parameter).copy_(values)
        else:
            parameter.grad.copy_(values)
