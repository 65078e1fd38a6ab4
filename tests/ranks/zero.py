"""What tests of the sharded optimizer share: small models, and two trainings side by side."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from tensorplay.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from tensorplay.distributed.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer

ONE_BUCKET: dict[str, Any] = {}
MANY_BUCKETS: dict[str, Any] = {"bucket_cap_mb": 0.004}  # 4 kB, once DDP has rebuilt them


class OwnOptimizer(torch.optim.Optimizer):
    """A user's optimizer: sign of a decayed mean, and a count of steps in each parameter's state."""

    def __init__(self, params: Any, lr: float = 0.01, decay: float = 0.7) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                state["steps"] = state.get("steps", 0) + 1
                mean.mul_(group["decay"]).add_(parameter.grad)
                parameter.sub_(mean.sign() + mean, alpha=group["lr"] / state["steps"] ** 0.5)


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "own": (OwnOptimizer, {}),
}


def net(width: int = 24) -> nn.Sequential:
    """About 1,500 parameters in eight tensors, the same on every rank."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 3)
    )


def linear() -> nn.Module:
    """Two parameters, fewer than ranks."""
    torch.manual_seed(3)
    return nn.Linear(6, 1)


def batch(rank: int, step: int, rows: int = 4, width: int = 6) -> torch.Tensor:
    """Different on every rank and step."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1000 * rank + step))


class Pair:
    """The same training twice: plain DDP with the whole optimizer, and DDP with a hook that shares the optimizer out.

    Args:
        build: makes the model. groups: model -> what the optimizer gets. interleaved: which hook.
        ddp: arguments of both DDPs. hook: arguments of the hook (shard_buckets, update, …).
    """

    def __init__(
        self,
        build: Callable[[], nn.Module] = net,
        optimizer: str = "adam",
        interleaved: bool = False,
        groups: Callable[[Any], Any] = nn.Module.parameters,
        ddp: dict[str, Any] | None = None,
        **hook: Any,
    ) -> None:
        optimizer_class, defaults = OPTIMIZERS[optimizer]
        self.plain = DistributedDataParallel(build(), **(ddp or {}))
        self.ddp = DistributedDataParallel(build(), **(ddp or {}))
        self.optimizer = optimizer_class(groups(self.plain.module), **defaults)
        self.zero = ZeroRedundancyOptimizer(
            groups(self.ddp.module), optimizer_class, overlap_with_ddp=True, **defaults
        )
        make = hook_with_zero_step_interleaved if interleaved else hook_with_zero_step
        self.ddp.register_comm_hook(None, make(allreduce_hook, self.ddp, self.zero, **hook))

    def step(self, *inputs: torch.Tensor, loss: Callable[[Any], torch.Tensor] | None = None) -> None:
        """One step of both."""
        measure = loss or (lambda output: output.pow(2).sum())
        self.optimizer.zero_grad()
        self.zero.zero_grad()
        measure(self.plain(*inputs)).backward()
        self.optimizer.step()
        measure(self.ddp(*inputs)).backward()
        self.zero.step()

    def difference(self) -> float:
        """The largest difference between two parameters; 0.0 only when all bits are the same."""
        return largest_difference(self.plain.parameters(), self.ddp.parameters())


def largest_difference(ones: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> float:
    """0.0 only when all bits are the same."""
    largest = 0.0
    for one, other in zip(ones, others, strict=True):
        if not torch.equal(one, other):
            largest = max(largest, float((one - other).detach().abs().max()), 1e-30)
    return largest


def equal_at_every_step(rank: int, world_size: int, cells: list[dict[str, Any]], steps: int) -> int:
    """Check parameters and gradients of each cell, bit for bit, at every step; returns how many steps that was."""
    checked = 0
    for cell in cells:
        pair = Pair(**cell)
        for step in range(steps):
            pair.step(batch(rank, step))
            assert pair.difference() == 0.0, (cell, step)
            gradients = zip(pair.plain.parameters(), pair.ddp.parameters(), strict=True)
            assert all(torch.equal(one.grad, other.grad) for one, other in gradients), (cell, step)
            checked += 1
    return checked
