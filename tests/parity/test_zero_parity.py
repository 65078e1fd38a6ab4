"""The sharded optimizer beside torch's: same arguments, same parameters, states that load into each other."""

import inspect
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook as torch_hooks
from torch.distributed.algorithms.join import Joinable
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
from tensorplay.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from tensorplay.distributed.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from tensorplay.testing import run_ranks
from tests.ranks.zero import OPTIMIZERS, batch, largest_difference, net


def _parameters(function: Any) -> list[tuple[str, Any, Any]]:
    catch_all = inspect.Parameter.VAR_KEYWORD
    return [
        ("" if p.kind is catch_all else p.name, p.kind, p.default)
        for p in inspect.signature(function).parameters.values()
    ]


@pytest.mark.parametrize(
    "name",
    [
        "__init__",
        "step",
        "add_param_group",
        "state_dict",
        "load_state_dict",
        "consolidate_state_dict",
        "join_hook",
    ],
)
def test_methods_take_torchs_arguments(name: str) -> None:
    ours, theirs = getattr(ZeroRedundancyOptimizer, name), getattr(TorchZeroRedundancyOptimizer, name)
    assert _parameters(ours) == _parameters(theirs)


@pytest.mark.parametrize("name", ["hook_with_zero_step", "hook_with_zero_step_interleaved"])
def test_hooks_take_torchs_arguments(name: str) -> None:
    """Positional arguments alike; ours has keywords of its own where torch takes any."""
    ours, theirs = _parameters(getattr(ddp_zero_hook, name)), _parameters(getattr(torch_hooks, name))
    positional = [p for p in theirs if p[1] is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert ours[: len(positional)] == positional
    assert all(p[1] is inspect.Parameter.KEYWORD_ONLY for p in ours[len(positional) :])


def test_is_known_to_frameworks_that_look_for_torchs() -> None:
    assert issubclass(ZeroRedundancyOptimizer, TorchZeroRedundancyOptimizer)
    assert issubclass(ZeroRedundancyOptimizer, Joinable)
    assert issubclass(ZeroRedundancyOptimizer, torch.optim.Optimizer)


def _same_state(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same_state(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same_state, one, other))
    return bool(one == other)


def _beside_torchs(rank: int, world_size: int, name: str, views: bool) -> float:
    optimizer_class, defaults = OPTIMIZERS[name]
    models = [DistributedDataParallel(net()) for _ in range(2)]
    both = [
        kind(
            model.parameters(),
            optimizer_class=optimizer_class,
            parameters_as_bucket_view=views,
            **defaults,
        )
        for kind, model in zip((TorchZeroRedundancyOptimizer, ZeroRedundancyOptimizer), models, strict=True)
    ]
    differences = []
    for stage in range(2):
        for step in range(4):
            for model, zero in zip(models, both, strict=True):
                zero.zero_grad()
                model(batch(rank, step)).pow(2).sum().backward()
                zero.step()
            differences.append(largest_difference(*(model.parameters() for model in models)))
        for zero in both:
            zero.consolidate_state_dict(to=0)
        states: list[Any] = [zero.state_dict() for zero in both] if rank == 0 else [None, None]
        if rank == 0:
            assert _same_state(states[0]["state"], states[1]["state"])
            assert _same_state(states[0]["param_groups"], states[1]["param_groups"])
        if stage == 0:
            dist.broadcast_object_list(states, src=0)
            both[0].load_state_dict(states[1])
            both[1].load_state_dict(states[0])
    return max(differences)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_same_parameters_and_states_as_torchs(name: str, views: bool) -> None:
    assert run_ranks(partial(_beside_torchs, name=name, views=views), 3) == [0.0] * 3


def _refused(rank: int, world_size: int) -> tuple[str, str]:
    ddp = DistributedDataParallel(net())
    theirs = TorchZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(TypeError) as torchs_refused:
        ddp_zero_hook.hook_with_zero_step(allreduce_hook, ddp, theirs)  # type: ignore[arg-type]
    ours = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    with pytest.raises((TypeError, RuntimeError)) as ours_refused:
        torch_hooks.hook_with_zero_step(allreduce_hook, ddp, ours)
    return str(torchs_refused.value), str(ours_refused.value)


def test_torchs_optimizer_and_our_hook_do_not_mix_nor_the_other_way_round() -> None:
    for torchs_refused, ours_refused in run_ranks(_refused, 2):
        assert "tensorplay.distributed.optim.ZeroRedundancyOptimizer" in torchs_refused
        assert "tensorplay" in ours_refused or "gloo" in ours_refused.lower()
