"""The hooks that `tensorplay compare` knows: ours by the names of `tensorplay.cli.hooks`, torch's as "torch:NAME".

torch's run on torch's DDP, as torch ships them: some of them fail on gloo, and then their row says so.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from tensorplay.cli.command import UsageError
from tensorplay.cli.hooks import RECIPES, attach, check_hook_names
from tensorplay.nn.parallel import DistributedDataParallel

__all__ = [
    "AUTO",
    "OUR_PLAIN",
    "TORCH",
    "TORCH_PLAIN",
    "Parallel",
    "Rhythm",
    "check_hooks",
    "parallelise",
    "rhythm",
]

TORCH = "torch:"
"""Begins the names of torch's hooks."""
TORCH_PLAIN, OUR_PLAIN = "torch:allreduce", "allreduce"
"""Plain all-reduce: torch's DDP without a hook, and our hook."""
AUTO = "auto"
"""The hook that measures for some steps, then chooses another."""

_LOW_RANK_FROM_STEP = 2  # the least that torch's PowerSGD takes with error feedback
_SETTLED_AFTER = 3  # steps at low rank before all that is allocated once is there
_MOST_AUTO_STEPS = 100
_TORCH_NAMES = (
    "allreduce, fp16, bf16, quantize_per_tensor, quantize_per_channel, power_sgd, power_sgd:RANK, "
    "batched_power_sgd, batched_power_sgd:RANK"
)


@dataclass(frozen=True)
class Rhythm:
    """How a hook's steps are to be counted.

    Attributes:
        warmup: the least number of steps before it works as it will go on.
        period: steps that only together are a fair sample; 1 for hooks that do the same in each step.
        most_until_settled: steps at most until a hook that chooses has chosen; 0: it has nothing to choose.
    """

    warmup: int = 0
    period: int = 1
    most_until_settled: int = 0


def _always() -> bool:
    """Of a hook that has nothing to choose."""
    return True


def _no_choice() -> str | None:
    """Of a hook that has nothing to choose."""
    return None


@dataclass(frozen=True)
class Parallel:
    """A model in DDP with a hook at work.

    Attributes:
        model: the DDP module. optimizer: the one to step.
        finish: to be called on every rank after the last step.
        settled: whether the hook has chosen what it goes on with.
        choice: what that is; None for a hook that doesn't choose.
    """

    model: nn.Module
    optimizer: Optimizer
    finish: Callable[[], None]
    settled: Callable[[], bool] = _always
    choice: Callable[[], str | None] = _no_choice


def check_hooks(names: list[str]) -> None:
    """Raise UsageError for an empty list, a name given twice, or one that `parallelise` would refuse.

    Example:
        >>> check_hooks(["torch:power_sgd:4", "int8", "diloco:period=20"])
    """
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--hooks must name each hook once, got {name} {names.count(name)} times")
        if name.startswith(TORCH):
            _torch_hook(name)
    if not names or (ours := [name for name in names if not name.startswith(TORCH)]):
        check_hook_names(ours if names else names)


def rhythm(name: str) -> Rhythm:
    """How the hook called `name` is to be sampled.

    Local SGD averages once a period: its measured steps are whole periods, after its own warm-up.

    Example:
        >>> rhythm("diloco:period=20,warmup_steps=5")
        Rhythm(warmup=5, period=20, most_until_settled=0)
    """
    base, _, settings = name.partition(":")
    if base in RECIPES:
        read = RECIPES[base].read_settings(base, settings)
        return Rhythm(warmup=read["warmup_steps"], period=read["period"])
    if base == AUTO:
        return Rhythm(most_until_settled=_MOST_AUTO_STEPS)
    if name.startswith(TORCH) and "power_sgd" in name:
        return Rhythm(warmup=_LOW_RANK_FROM_STEP + _SETTLED_AFTER)
    return Rhythm()


def parallelise(name: str, model: nn.Module, optimizer: Optimizer) -> Parallel:
    """Wrap `model` in DDP, ours or torch's, with the hook called `name`. A collective.

    Raises: UsageError: nothing has that name.
    Example:
        >>> parallel = parallelise("torch:fp16", model, optimizer)         # doctest: +SKIP
    """
    if name.startswith(TORCH):
        hook = _torch_hook(name)
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        if hook is not None:
            function, make_state = hook
            ddp.register_comm_hook(make_state(), function)
        return Parallel(ddp, optimizer, _nothing)
    ours = DistributedDataParallel(model)
    attached = attach(name, ours, optimizer)
    if name.partition(":")[0] != AUTO:
        return Parallel(ours, attached.optimizer, attached.finish)
    state = attached.handle.state
    return Parallel(
        ours, attached.optimizer, attached.finish, lambda: bool(state.is_settled), lambda: str(state.choice)
    )


def _nothing() -> None:
    """Nothing to do after the last step."""


def _torch_hook(name: str) -> tuple[Callable[..., Any], Callable[[], Any]] | None:
    """torch's function, and what makes its state; None for DDP without a hook."""
    from torch.distributed.algorithms.ddp_comm_hooks import (
        default_hooks,
        powerSGD_hook,
        quantization_hooks,
    )

    base, _, rank = name.removeprefix(TORCH).partition(":")
    plain: dict[str, tuple[Callable[..., Any], Callable[[], Any]] | None] = {
        "allreduce": None,
        "fp16": (default_hooks.fp16_compress_hook, lambda: None),
        "bf16": (default_hooks.bf16_compress_hook, lambda: None),
        "quantize_per_tensor": (quantization_hooks.quantization_pertensor_hook, lambda: dist.group.WORLD),
        "quantize_per_channel": (quantization_hooks.quantization_perchannel_hook, lambda: dist.group.WORLD),
    }
    low_rank = {
        "power_sgd": powerSGD_hook.powerSGD_hook,
        "batched_power_sgd": powerSGD_hook.batched_powerSGD_hook,
    }
    if base in plain and not rank:
        return plain[base]
    if base not in low_rank:
        raise UsageError(f"no hook of torch's is called {name!r}: known are {TORCH} and {_TORCH_NAMES}")
    if rank and (not rank.isdecimal() or int(rank) < 1):
        raise UsageError(f"the rank of {TORCH}{base} must be an integer >= 1, got {rank!r}")

    def state() -> Any:
        return powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=int(rank or 1), start_powerSGD_iter=_LOW_RANK_FROM_STEP
        )

    return low_rank[base], state
