"""Measure the parts of a step, predict it for each hook, try the most promising, recommend."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorplay.advisor.advice import Advice, AdviseSettings, Prediction
from tensorplay.advisor.compute import Training
from tensorplay.advisor.network import measure_links
from tensorplay.advisor.ranking import PLAIN, best_of, predict_all, ranked
from tensorplay.compression.participation import resolve_group
from tensorplay.distributed.algorithms.ddp_comm_hooks._probe import (
    SampleBucket,
    agree,
    look_at_hosts,
    measure_cost,
    sample_bytes,
    sample_shapes,
)
from tensorplay.distributed.algorithms.ddp_comm_hooks._step_time import (
    ComputeTrace,
    ExchangeCost,
)
from tensorplay.distributed.algorithms.ddp_comm_hooks.register import make_hook

__all__ = ["DEFAULT_HOOKS", "advise"]

DEFAULT_HOOKS = (
    "allreduce",
    "fp16_compress",
    "bf16_compress",
    "int8",
    "int4",
    "sign",
    "topk:0.01",
    "quantize_per_tensor",
    "power_sgd",
    "power_sgd_rank2",
)
"""The hooks that `advise` looks at unless told otherwise."""
_REPEATS = 3


def _mean_of_squares(model: nn.Module, batch: Any) -> torch.Tensor:
    output: torch.Tensor = model(batch)
    return output if output.dim() == 0 else output.square().mean()


def advise(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    hooks: Sequence[str] | None = None,
    process_group: dist.ProcessGroup | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    settings: AdviseSettings | None = None,
) -> Advice:
    """Say which hook makes a training step fastest here. Collective: every rank calls it, with the same hooks.

    1. Look at the machines, and measure latency and bandwidth of the group and of single pairs.
    2. Time steps that exchange nothing, on a copy of the model, all ranks at once.
    3. Time each hook's exchange of a sample of the model's gradients: seconds, processor seconds, bytes.
    4. Put both into the formula (see `predict_step` and docs/advisor.md).
    5. Try the most promising hooks for a few steps each, while the budget lasts.
    6. Recommend the fastest allowed one; plain all-reduce when none saves `settings.min_gain` of its step.

    The model, its buffers and torch's generators stay as they were; a copy of the model is trained. A few batches are
    taken from `batches`.

    Args:
        model: bare, on the device it trains on.
        batches: of this rank.
        loss: called with the wrapped model and a batch; None: the mean of the squared output.
        hooks: names as for `register_ddp_comm_hook`; None: DEFAULT_HOOKS. Plain all-reduce is always looked at.
        process_group: the ranks; None: the world.
        optimizer: called with the copy, returns its optimizer; None: SGD.
        settings: see `AdviseSettings`.
    Returns: the same `Advice` on every rank.
    Raises:
        ValueError: an unknown hook, no batches, no parameters to train. TypeError: the model is wrapped in DDP.
        RuntimeError: no process group, or the model's own errors.
    Example:
        >>> def choose(model, batches):                     # on every rank
        ...     advice = advise(model, batches)
        ...     return advice.best.hook
    """
    began = time.perf_counter()
    settings = settings or AdviseSettings()
    group = resolve_group(process_group)
    names = list(dict.fromkeys([PLAIN, *(DEFAULT_HOOKS if hooks is None else hooks)]))
    for name in names:
        make_hook(name, group)  # an unknown name is told before anything is measured
    training = Training(model, batches, loss or _mean_of_squares, group, optimizer)
    host, machines = look_at_hosts(group)
    links = measure_links(group, machines, training.device)
    trace = training.trace(settings.budget_seconds / 8)
    speed = links[0].bytes_per_second if links else math.inf
    costs, failures = _costs(names, training, group, trace, speed, began + settings.budget_seconds / 2)
    again = training.trace(settings.budget_seconds / 16)
    trace = min(
        trace, again, key=lambda one: one.step_seconds
    )  # something else may have run beside one of them
    predictions = predict_all(names, trace, costs, failures, host.contention, settings.max_risk)
    if settings.trial and group.size() > 1:
        predictions = ranked(_tried(predictions, training, group, settings, began))
    (seconds,) = agree([time.perf_counter() - began], group, training.device)
    return Advice(
        best=best_of(predictions, settings.min_gain if group.size() > 1 else 1.0),
        predictions=tuple(predictions),
        world_size=group.size(),
        hosts=len(set(machines)),
        cores=host.cores,
        ranks_on_host=host.ranks,
        threads=host.threads,
        contention=host.contention,
        links=links,
        trace=trace,
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        gradient_bytes=trace.gradient_bytes,
        max_risk=settings.max_risk,
        seconds=seconds,
    )


def _costs(
    names: Sequence[str],
    training: Training,
    group: dist.ProcessGroup,
    trace: ComputeTrace,
    speed: float,
    hurry_at: float,
) -> tuple[dict[str, ExchangeCost], dict[str, str]]:
    """What each hook's exchange takes, and why where it can't be told; once each after the time `hurry_at`.

    A hook fails on all ranks or on none here: what it refuses is the group, the dtype or the shapes.
    """
    shapes, dtype = training.gradient_shapes()
    factor = 2 * (group.size() - 1) / group.size()
    sizes = sample_bytes(trace.gradient_bytes, factor / speed if factor else 0.0)
    samples = [
        SampleBucket(sample_shapes(shapes, dtype.itemsize, size), dtype, training.device, group.rank())
        for size in sizes
    ]
    costs: dict[str, ExchangeCost] = {}
    failures: dict[str, str] = {}
    for name in names:
        hook, state = make_hook(name, group)
        (late,) = agree([time.perf_counter() - hurry_at], group, training.device)
        repeats = 1 if late > 0 else _REPEATS
        try:
            costs[name] = measure_cost(hook, state, (samples[0], samples[1]), group, repeats)
        except (RuntimeError, TypeError, ValueError) as error:
            failures[name] = str(error).splitlines()[0]
    return costs, failures


def _tried(
    predictions: Sequence[Prediction],
    training: Training,
    group: dist.ProcessGroup,
    settings: AdviseSettings,
    began: float,
) -> list[Prediction]:
    """Try the fastest allowed hooks, and plain all-reduce, as long as the budget lasts on every rank."""
    allowed = [p.hook for p in predictions if p.allowed and p.hook != PLAIN][: settings.trials]
    measured: dict[str, float] = {}
    by_name = {p.hook: p for p in predictions}
    for name in [*allowed, PLAIN]:
        expected = by_name[name].formula_seconds
        (spent,) = agree([time.perf_counter() - began], group, training.device)
        if not spent + 6 * expected <= settings.budget_seconds:
            continue
        measured[name] = training.try_hook(name, expected)
    return [replace(p, tried_seconds=measured.get(p.hook)) for p in predictions]
