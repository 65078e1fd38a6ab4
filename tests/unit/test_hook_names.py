"""Hooks by name: what a name with settings makes, and what it refuses."""

import re

import pytest

from tensorplay.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    batched_powerSGD_hook,
    powerSGD_hook,
)
from tensorplay.distributed.algorithms.ddp_comm_hooks.register import make_hook


def test_power_sgd_takes_the_settings_of_its_state() -> None:
    hook, state = make_hook("power_sgd:4,min_compression_rate=1.5")
    assert hook is powerSGD_hook
    assert (state.matrix_approximation_rank, state.min_compression_rate) == (4, 1.5)
    assert (
        state.start_powerSGD_iter == 0
    )  # as for the name alone: it is asked for by name, so it begins at once
    hook, state = make_hook("batched_power_sgd:batched_layout=bucket,warm_start=false,start_powerSGD_iter=7")
    assert hook is batched_powerSGD_hook
    assert (state.matrix_approximation_rank, state.batched_layout) == (1, "bucket")
    assert (state.warm_start, state.start_powerSGD_iter) == (False, 7)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("power_sgd:0", "matrix_approximation_rank must be >= 1, got 0"),
        ("power_sgd:rnk=3", "a parameter of hook 'power_sgd' must be one of matrix_approximation_rank, "),
        ("power_sgd:1,2", "parameters of hook 'power_sgd' must be written name=value, got '2'"),
        ("power_sgd:1,matrix_approximation_rank=2", "must be given once"),
        ("power_sgd_rank2:3", "unknown hook 'power_sgd_rank2:3'"),
        ("allreduce:3", "unknown hook 'allreduce:3'"),
    ],
)
def test_wrong_settings_are_refused(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        make_hook(name)


def test_settings_stand_in_one_place() -> None:
    with pytest.raises(ValueError, match="in the name or in the state, not in both"):
        make_hook("power_sgd:4", PowerSGDState(None))
