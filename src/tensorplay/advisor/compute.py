"""Training steps on a copy of the model: with nothing exchanged, and with a hook on trial."""

import copy
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorplay.distributed.algorithms.ddp_comm_hooks._probe import agree
from tensorplay.distributed.algorithms.ddp_comm_hooks._protocol import completed
from tensorplay.distributed.algorithms.ddp_comm_hooks._step_time import ComputeTrace
from tensorplay.distributed.algorithms.ddp_comm_hooks.register import make_hook
from tensorplay.nn.parallel import DistributedDataParallel

__all__ = ["Training"]

Loss = Callable[[nn.Module, Any], torch.Tensor]
_WARM_STEPS = 2  # DDP makes its final buckets after the first


class Training:
    """Steps of a user's model that leave the model, torch's generators and the hook registrations as they were.

    Args:
        model: bare. batches: a few are taken and used in turn. loss: of model and batch.
        optimizer: called with a copy of the model, or None for SGD at a learning rate of 0.
    Raises: ValueError: no batches, or a model without parameters that require gradients. TypeError: the model is
        wrapped in DDP already.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        loss: Loss,
        group: dist.ProcessGroup,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    ) -> None:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise TypeError("model must be the bare module, got a DistributedDataParallel: pass model.module")
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError(
                "the model has no parameter that requires a gradient: there is nothing to exchange"
            )
        self._batches = list(itertools.islice(batches, 4))
        if not self._batches:
            raise ValueError("batches must hold at least one batch, got none")
        self._model, self._loss, self._group = model, loss, group
        self._optimizer = optimizer or (lambda copied: torch.optim.SGD(copied.parameters(), lr=0.0))
        self.device = next(p.device for p in model.parameters() if p.requires_grad)

    def gradient_shapes(self) -> tuple[list[tuple[int, ...]], torch.dtype]:
        """Shapes of the gradients of the dtype that holds most bytes, last parameter first as buckets hold them."""
        by_dtype: dict[torch.dtype, list[tuple[int, ...]]] = {}
        sizes: dict[torch.dtype, int] = {}
        for parameter in reversed([p for p in self._model.parameters() if p.requires_grad]):
            shape = (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)
            dtype = parameter.dtype.to_real() if parameter.is_complex() else parameter.dtype
            by_dtype.setdefault(dtype, []).append(shape)
            sizes[dtype] = sizes.get(dtype, 0) + parameter.numel() * parameter.element_size()
        dtype = max(sizes, key=lambda one: sizes[one])
        return by_dtype[dtype], dtype

    def trace(self, budget_seconds: float) -> ComputeTrace:
        """Time steps that exchange nothing: medians of the slowest rank, all ranks computing at once."""
        seen: list[tuple[float, int]] = []

        def record(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
            buffer = bucket.buffer()
            nbytes = buffer.numel() * buffer.element_size() if buffer.layout == torch.strided else 0
            seen.append((time.perf_counter(), nbytes))
            return completed(buffer)

        ready: list[list[float]] = []

        def one_step(began: float) -> None:
            ready.append([at - began for at, _ in seen])

        seconds = self._steps(record, None, budget_seconds, (5, 9), seen.clear, one_step)
        columns = list(zip(*ready[-len(seconds) :], strict=True))
        numbers = agree(
            [*(statistics.median(column) for column in columns), statistics.median(seconds)],
            self._group,
            self.device,
        )
        return ComputeTrace(tuple(numbers[:-1]), tuple(nbytes for _, nbytes in seen), numbers[-1])

    def try_hook(self, name: str, expected_seconds: float) -> float:
        """A step's measured time under a hook, after two steps to warm up."""
        hook, state = make_hook(name, self._group if name not in ("noop",) else None)
        steps = 3 if expected_seconds > 0.5 else 5
        seconds = self._steps(hook, state, 0.0, (steps, steps))
        return agree([statistics.median(seconds)], self._group, self.device)[0]

    def _steps(
        self,
        hook: Any,
        state: Any,
        budget_seconds: float,
        counts: tuple[int, int],
        before: Callable[[], None] = lambda: None,
        after: Callable[[float], None] = lambda began: None,
    ) -> list[float]:
        """Seconds of at least counts[0] measured steps, of up to counts[1] while they fit into the budget."""
        with torch.random.fork_rng(devices=self._generators()):
            # Sending rank 0's weights to all would take longer than the steps on a slow link; only time counts here.
            ddp = DistributedDataParallel(
                copy.deepcopy(self._model), process_group=self._group, init_sync=False
            )
            ddp.register_comm_hook(state, hook)
            optimizer = self._optimizer(ddp.module)
            seconds: list[float] = []
            spent, number = 0.0, 0
            while number < _WARM_STEPS + counts[0] or (
                number < _WARM_STEPS + counts[1] and spent < budget_seconds
            ):
                batch = self._batches[number % len(self._batches)]
                before()
                (spent,) = agree([sum(seconds)], self._group, self.device)
                began = time.perf_counter()
                optimizer.zero_grad()
                self._loss(ddp, batch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if self.device.type != "cpu":
                    torch.accelerator.synchronize(self.device)
                took = time.perf_counter() - began
                if number >= _WARM_STEPS:
                    seconds.append(took)
                    after(began)
                number += 1
            return seconds

    def _generators(self) -> Sequence[int]:
        return [self.device.index or 0] if self.device.type == "cuda" else []
