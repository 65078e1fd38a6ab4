"""Ranks with and without Numba may train together."""

from functools import partial
from unittest import mock

import pytest

from tensorplay.compression import compiled
from tensorplay.testing import run_ranks
from tests.conformance import suite
from tests.conformance.suite import Cell


def train_mixed(rank: int, world_size: int, name: str, many_buckets: bool) -> float:
    """Odd ranks have no compiled loops. `suite.train` compares gradients and parameters, bit by bit."""
    with mock.patch.object(compiled, "is_compiled", return_value=rank % 2 == 0):
        return suite.train(rank, world_size, name, Cell(world_size, many_buckets=many_buckets), steps=6)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "name", ["int8", "int4", "int2", "sign", "uint8", "quantize_per_tensor", "quantize_per_channel"]
)
def test_replicas_stay_equal_where_some_ranks_have_numba(name: str, world_size: int) -> None:
    run_ranks(partial(train_mixed, name=name, many_buckets=world_size == 3), world_size)
