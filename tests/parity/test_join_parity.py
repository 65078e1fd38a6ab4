"""Join against torch's own: the same names, and the same training wherever torch's works."""

import inspect
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.algorithms.join as torch_join
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed.algorithms import join as own_join
from tensorplay.testing import run_ranks
from tests.conformance.uneven import Model, batch, flat, wrap


def parameters_of(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_names_are_torchs() -> None:
    assert sorted(own_join.__all__) == sorted(torch_join.__all__)


@pytest.mark.parametrize(
    "path",
    [
        "Join.__init__",
        "Join.__enter__",
        "Join.__exit__",
        "Join.notify_join_context",
        "JoinHook.main_hook",
        "JoinHook.post_hook",
        "Joinable.__init__",
        "Joinable.join_hook",
    ],
)
def test_arguments_are_torchs(path: str) -> None:
    owner, name = path.split(".")
    own, torchs = getattr(getattr(own_join, owner), name), getattr(getattr(torch_join, owner), name)
    assert parameters_of(own) == parameters_of(torchs)


def test_joinables_and_hooks_are_torchs_too() -> None:
    assert issubclass(own_join.Joinable, torch_join.Joinable)
    assert issubclass(own_join.JoinHook, torch_join.JoinHook)
    assert own_join.Joinable.__abstractmethods__ == torch_join.Joinable.__abstractmethods__


def trained(
    rank: int, world_size: int, batches: tuple[int, ...], variant: str, by_world_size: bool, join: Any
) -> torch.Tensor:
    ddp = wrap(Model(variant), variant)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with join([ddp], divide_by_initial_world_size=by_world_size):
        for iteration in range(batches[rank]):
            ddp(batch(rank, iteration), iteration).backward()
            optimizer.step()
            optimizer.zero_grad()
    return flat([*ddp.module.parameters(), *(b.float() for b in ddp.module.buffers())])


@pytest.mark.parametrize("by_world_size", [True, False])
@pytest.mark.parametrize("variant", ["plain", "batch_norm", "buckets"])
@pytest.mark.parametrize("batches", [(2, 4), (1, 2, 5)], ids=str)
def test_a_ddp_without_a_hook_ends_bit_identical_to_torchs(
    batches: tuple[int, ...], variant: str, by_world_size: bool
) -> None:
    run = partial(trained, batches=batches, variant=variant, by_world_size=by_world_size)
    own = run_ranks(partial(run, join=own_join.Join), len(batches))
    torchs = run_ranks(partial(run, join=torch_join.Join), len(batches))
    for parameters in [*own, *torchs]:
        assert torch.equal(parameters, own[0])


def through_the_method(rank: int, world_size: int) -> tuple[float, bool]:
    """`ddp.join()` stays torch's and works beside ours."""
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    nn.init.zeros_(ddp.module.weight)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    for block in (lambda: own_join.Join([ddp]), lambda: ddp.join(), lambda: own_join.Join([ddp])):
        with block():  # type: ignore[no-untyped-call]
            for _ in range(1 + rank):
                optimizer.zero_grad()
                ddp(torch.ones(1, 1)).sum().backward()
                optimizer.step()
    return ddp.module.weight.item(), ddp._join_config.enable


def test_blocks_of_both_kinds_follow_each_other() -> None:
    assert run_ranks(through_the_method, 2) == [(-4.5, False)] * 2
