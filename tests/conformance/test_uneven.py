"""The uneven part of the conformance suite: every hook of the registry inside Join.

A new hook joins by being registered.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed.algorithms.ddp_comm_hooks._attach import attach
from tensorplay.testing import run_ranks
from tests.conformance import suite
from tests.conformance.uneven import UNEVEN_BATCHES, VARIANTS, check_uneven, run_uneven, train

HOOKS = suite.hook_names()
Setting = tuple[tuple[int, ...], str, bool]

#: Each value of batches and variant meets some of the others; `make soak` runs them all.
PAIRED: list[Setting] = [
    ((2, 4), "unused", True),
    ((1, 2, 5), "buckets", True),
    ((1, 2, 5), "no_sync", False),
    ((0, 3), "batch_norm", False),
    ((2, 1, 4, 3), "static_graph", False),
]
FULL: list[Setting] = [
    (batches, variant, by_world_size)
    for batches in [*UNEVEN_BATCHES, (2, 1, 4, 3)]
    for variant in VARIANTS
    for by_world_size in (True, False)
]


def name_of(setting: Setting) -> str:
    batches, variant, by_world_size = setting
    return f"{batches}-{variant}-{'world' if by_world_size else 'active'}"


@pytest.mark.parametrize("setting", PAIRED, ids=name_of)
@pytest.mark.parametrize("hook", HOOKS)
def test_idle_ranks_act_as_if_their_gradient_were_zero(hook: str, setting: Setting) -> None:
    run_uneven(hook, *setting)


@pytest.mark.soak
@pytest.mark.parametrize("setting", FULL, ids=name_of)
@pytest.mark.parametrize("hook", HOOKS)
def test_every_setting(hook: str, setting: Setting) -> None:
    run_uneven(hook, *setting)


def attach_power(model: DistributedDataParallel, batched: bool, warm_start: bool) -> Any:
    from tensorplay.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    state = power.PowerSGDState(
        start_powerSGD_iter=1, matrix_approximation_rank=2, min_compression_rate=1.0, warm_start=warm_start
    )
    return attach(model, power.batched_powerSGD_hook if batched else power.powerSGD_hook, state)


@pytest.mark.parametrize("setting", [*PAIRED, ((0, 3), "bucket_view", False)], ids=name_of)
@pytest.mark.parametrize(("batched", "warm_start"), [(False, True), (True, True), (False, False)])
def test_factors_and_residuals_from_the_second_step_on(
    batched: bool, warm_start: bool, setting: Setting
) -> None:
    check_uneven(partial(attach_power, batched=batched, warm_start=warm_start), *setting)


def attach_local(model: DistributedDataParallel, start: int) -> Any:
    from tensorplay.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
        PostLocalSGDState,
        post_localSGD_hook,
    )

    return attach(model, post_localSGD_hook, PostLocalSGDState(None, None, start, group_size=2))


@pytest.mark.parametrize(
    "setting", [((2, 4), "buckets", False), ((2, 1, 4, 3), "no_sync", True)], ids=name_of
)
def test_the_global_phase_of_local_sgd(setting: Setting) -> None:
    check_uneven(partial(attach_local, start=100), *setting)


@pytest.mark.parametrize("batches", [(2, 1, 4, 3), (0, 3, 1, 0)], ids=str)
def test_the_local_phase_of_local_sgd_sees_zeros_of_idle_ranks_in_its_subgroup(
    batches: tuple[int, ...],
) -> None:
    run = partial(train, batches=batches, variant="buckets", attach=partial(attach_local, start=1))
    joined = run_ranks(run, 4)
    zeros = run_ranks(partial(run, mode="zeros"), 4)
    for got, expected in zip(joined, zeros, strict=True):
        assert got["left_over"] == 46
        assert len(got["history"]) == max(batches)
        for gradients, of_zeros in zip(got["history"], expected["history"], strict=True):
            assert torch.equal(gradients, of_zeros)
    assert not torch.equal(joined[0]["history"][-1], joined[2]["history"][-1])  # two subgroups
