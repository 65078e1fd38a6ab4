"""Averagers, hook and optimizer of local SGD against torch's own: the same names, and the same numbers."""

import inspect
from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook as torch_hook
import torch.distributed.algorithms.model_averaging.averagers as torch_averagers
import torch.distributed.algorithms.model_averaging.hierarchical_model_averager as torch_hierarchical
import torch.distributed.algorithms.model_averaging.utils as torch_utils
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as own_hook
from tensorplay.distributed.algorithms.model_averaging import (
    averagers as own_averagers,
    hierarchical_model_averager as own_hierarchical,
    utils as own_utils,
)
from tensorplay.distributed.optim.post_localSGD_optimizer import PostLocalSGDOptimizer
from tensorplay.testing import run_ranks

PAIRS = {
    "average_parameters": (own_utils.average_parameters, torch_utils.average_parameters),
    "average_parameters_or_parameter_groups": (
        own_utils.average_parameters_or_parameter_groups,
        torch_utils.average_parameters_or_parameter_groups,
    ),
    "get_params_to_average": (own_utils.get_params_to_average, torch_utils.get_params_to_average),
    "ModelAverager": (own_averagers.ModelAverager, torch_averagers.ModelAverager),
    "PeriodicModelAverager": (own_averagers.PeriodicModelAverager, torch_averagers.PeriodicModelAverager),
    "PeriodicModelAverager.average_parameters": (
        own_averagers.PeriodicModelAverager.average_parameters,
        torch_averagers.PeriodicModelAverager.average_parameters,
    ),
    "HierarchicalModelAverager": (
        own_hierarchical.HierarchicalModelAverager,
        torch_hierarchical.HierarchicalModelAverager,
    ),
    "PostLocalSGDState": (own_hook.PostLocalSGDState, torch_hook.PostLocalSGDState),
    "post_localSGD_hook": (own_hook.post_localSGD_hook, torch_hook.post_localSGD_hook),
}


@pytest.mark.parametrize("name", PAIRS)
def test_arguments_are_torchs(name: str) -> None:
    """Ours may add keyword-only arguments after torch's."""
    own, torchs = (list(inspect.signature(function).parameters.values()) for function in PAIRS[name])
    assert [(p.name, p.kind, p.default) for p in own[: len(torchs)]] == [
        (p.name, p.kind, p.default) for p in torchs
    ]
    assert all(p.kind is p.KEYWORD_ONLY for p in own[len(torchs) :])


def test_names_are_torchs() -> None:
    assert set(torch_utils.__all__) <= set(own_utils.__all__)
    assert set(torch_averagers.__all__) <= set(own_averagers.__all__)
    assert issubclass(own_hook.PostLocalSGDState, torch_hook.PostLocalSGDState)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def _train(model: nn.Module, optimizer: Any, averager: Any, rank: int) -> list[torch.Tensor]:
    trace = []
    for step in range(14):
        generator = torch.Generator().manual_seed(100 * rank + step)
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=generator)).square().sum().backward()
        optimizer.step()
        if averager is not None:
            averager.average_parameters(model.parameters())
        trace.append(torch.cat([p.detach().flatten() for p in model.parameters()]).clone())
    return trace


def _furthest(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


def _averager_like_torch(rank: int, world_size: int, own: Any, torchs: Any) -> float:
    traces = []
    for make in (own, torchs):
        model = _model()
        averager = make()
        traces.append(_train(model, torch.optim.SGD(model.parameters(), lr=0.01), averager, rank))
        assert averager.step == 14
    return _furthest(*traces)


def _levels() -> "OrderedDict[int, int]":
    return OrderedDict([(2, 2), (6, 4)])


@pytest.mark.parametrize(
    ("own", "torchs"),
    [
        (
            partial(own_averagers.PeriodicModelAverager, 4, 3),
            partial(torch_averagers.PeriodicModelAverager, 4, 3),
        ),
        (
            partial(own_hierarchical.HierarchicalModelAverager, _levels(), 3),
            partial(torch_hierarchical.HierarchicalModelAverager, _levels(), 3),
        ),
    ],
    ids=["periodic", "hierarchical"],
)
def test_averagers_give_torchs_numbers(own: Any, torchs: Any) -> None:
    assert max(run_ranks(partial(_averager_like_torch, own=own, torchs=torchs), 4)) < 1e-6


def _hook_like_torch(rank: int, world_size: int, allreduce: bool) -> bool:
    subgroup, _ = dist.new_subgroups(group_size=2)
    traces = []
    for module in (own_hook, torch_hook):
        ddp = DistributedDataParallel(_model(), bucket_cap_mb=0.0001)
        state = module.PostLocalSGDState(None, subgroup, 5, allreduce)
        ddp.register_comm_hook(state, module.post_localSGD_hook)
        traces.append(_train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), None, rank))
    return all(torch.equal(a, b) for a, b in zip(*traces, strict=True))


@pytest.mark.parametrize("allreduce", [True, False])
def test_the_hook_gives_torchs_numbers(allreduce: bool) -> None:
    assert run_ranks(partial(_hook_like_torch, allreduce=allreduce), 4) == [True] * 4


def _optimizer_like_torch(rank: int, world_size: int) -> tuple[float, bool, int]:
    from torch.distributed.optim import PostLocalSGDOptimizer as TorchOptimizer

    traces, optimizers = [], []
    for make in (PostLocalSGDOptimizer, TorchOptimizer):
        model = _model()
        inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        optimizers.append(make(inner, own_averagers.PeriodicModelAverager(3, 2)))
        traces.append(_train(model, optimizers[-1], None, rank))
    own, torchs = optimizers
    saved = torchs.state_dict()
    assert set(saved) <= set(own.state_dict())
    fresh = PostLocalSGDOptimizer(
        torch.optim.SGD(_model().parameters(), lr=0.5), own_averagers.PeriodicModelAverager(3, 2)
    )
    fresh.load_state_dict(saved)
    torchs.load_state_dict(own.state_dict())
    return _furthest(*traces), fresh.param_groups[0]["lr"] == 0.01, fresh.averager.step


def test_the_optimizer_gives_torchs_numbers_and_loads_its_checkpoints() -> None:
    for apart, loaded_lr, step in run_ranks(_optimizer_like_torch, 2):
        assert apart < 1e-6
        assert loaded_lr
        assert step == 14
