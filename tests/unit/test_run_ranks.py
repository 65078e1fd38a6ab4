"""`run_ranks`: results, failures, hangs, deaths, and that one call leaves nothing for the next."""

import os
import signal
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tensorplay.testing import Exited, RankFailure, run_ranks


def all_reduced(rank: int, world_size: int, scale: float = 1.0) -> torch.Tensor:
    value = torch.full((3,), scale * (rank + 1))
    dist.all_reduce(value)
    return value


def raising(rank: int, world_size: int, failing: int) -> None:
    if rank == failing:
        raise ValueError(f"no gradient on {rank}")
    dist.barrier()


def hanging(rank: int, world_size: int) -> None:
    print("before the wait", rank)
    if rank == 1:
        time.sleep(1000)


def dying(rank: int, world_size: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_back_by_rank(world_size: int) -> None:
    results = run_ranks(partial(all_reduced, scale=2.0), world_size)
    for result in results:
        assert torch.equal(result, torch.full((3,), world_size * (world_size + 1.0)))


def test_a_failure_shows_the_rank_and_its_traceback() -> None:
    with pytest.raises(RankFailure) as raised:
        run_ranks(partial(raising, failing=1), 2)
    print(raised.value)
    assert raised.value.ranks[0] == 1
    assert run_ranks(all_reduced, 2)[0][0] == 3


def test_a_hang_says_where() -> None:
    with pytest.raises(RankFailure) as raised:
        run_ranks(hanging, 2, timeout_seconds=1)
    print(raised.value)
    assert raised.value.ranks == (1,)
    assert run_ranks(all_reduced, 2)[0][0] == 3


def test_an_expected_death() -> None:
    assert run_ranks(dying, 2, expect_exit={1}) == ["alive", Exited(1, None, 9)]
    with pytest.raises(RankFailure, match="rank 1 exited with signal 9"):
        run_ranks(dying, 2)
