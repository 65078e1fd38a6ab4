"""Lanes: never crossed, never locked up, and a failure names its rank."""

import os
import signal
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tensorplay.compression.driver import LaneError, lane_for
from tensorplay.compression.rounds import AllReduce, Exchange, Scratch
from tensorplay.testing import Exited, run_ranks

CPU = torch.device("cpu")


def summing(value: float, numel: int, rounds: int, results: list[torch.Tensor]):  # type: ignore[no-untyped-def]
    def start(scratch: Scratch) -> Exchange:
        tensor = torch.full((numel,), value)
        for _ in range(rounds):
            yield AllReduce([tensor])
        results.append(tensor)

    return start


def many_exchanges(rank: int, world_size: int) -> None:
    lane = lane_for(dist.group.WORLD, "many", CPU)
    results: list[torch.Tensor] = []
    done = [lane.submit(summing(rank + 1.0, i * 37 % 501, 2, results)) for i in range(200)]
    for future in done:
        assert future.wait() is None
    expected = world_size * world_size * (world_size + 1) / 2
    for tensor in results:
        assert torch.equal(tensor, torch.full_like(tensor, expected))


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_many_exchanges_of_two_rounds(world_size: int) -> None:
    run_ranks(many_exchanges, world_size)


def opposite_order(rank: int, world_size: int) -> list[float]:
    """Two lanes made in opposite order on two ranks, while ranks have made unequal numbers of groups."""
    for _ in range(rank):
        dist.new_group([rank], use_local_synchronization=True)
    keys = ["a", "b"] if rank == 0 else ["b", "a"]
    results: dict[str, list[torch.Tensor]] = {"a": [], "b": []}
    done = []
    for key in keys:
        lane = lane_for(dist.group.WORLD, key, CPU)
        done.append(lane.submit(summing({"a": 1.0, "b": 10.0}[key], 4, 1, results[key])))
        time.sleep(0.5)  # by now the lane waits at the store for the other rank, which is at the other lane
    for future in done:
        assert future.wait() is None
    return [float(results[key][0][0]) for key in ("a", "b")]


def test_lanes_made_in_opposite_order_are_not_crossed() -> None:
    assert run_ranks(opposite_order, 2) == [[2.0, 20.0], [2.0, 20.0]]


def recreated(rank: int, world_size: int) -> None:
    for _ in range(3):
        group = dist.new_group([0, 1])
        if rank < 2:
            results: list[torch.Tensor] = []
            assert lane_for(group, "again", CPU).submit(summing(1.0, 3, 1, results)).wait() is None
            assert float(results[0][0]) == 2.0
            dist.destroy_process_group(group)


def test_a_lane_on_a_subgroup_can_be_made_again() -> None:
    run_ranks(recreated, 3)


def one_raises(rank: int, world_size: int) -> str:
    lane = lane_for(dist.group.WORLD, "raises", CPU)

    def bad(scratch: Scratch) -> Exchange:
        tensor = torch.ones(5)
        yield AllReduce([tensor])
        if rank == 1:
            raise ValueError("the value was 7")
        yield AllReduce([tensor])

    error = lane.submit(bad).wait()
    assert isinstance(error, LaneError)
    after = lane.submit(summing(1.0, 3, 1, [])).wait()
    assert isinstance(after, LaneError)
    return str(error) + "|" + str(after)


@pytest.mark.parametrize("world_size", [2, 4])
def test_an_error_reaches_every_rank_with_the_rank_that_failed(world_size: int) -> None:
    for text in run_ranks(one_raises, world_size, timeout_seconds=20):
        assert text.count("rank 1 failed: ValueError: the value was 7") == 2


def one_dies(rank: int, world_size: int) -> str:
    lane = lane_for(dist.group.WORLD, "dies", CPU)
    assert lane.submit(summing(1.0, 5, 1, [])).wait() is None
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return str(lane.submit(summing(1.0, 5, 2, [])).wait())


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_killed_rank_is_named(world_size: int) -> None:
    results = run_ranks(one_dies, world_size, timeout_seconds=40, expect_exit={1})
    for rank, result in enumerate(results):
        if rank == 1:
            assert isinstance(result, Exited)
        else:
            assert "rank 1 did not answer" in result


def unequal(rank: int, world_size: int, what: str) -> str:
    import tensorplay as tp
    from tensorplay.distributed.algorithms.ddp_comm_hooks.compressed_hook import (
        CompressedHookState,
        compressed_hook,
    )

    model = torch.nn.Linear(64, 64)
    ddp = tp.nn.parallel.DistributedDataParallel(model)
    state = CompressedHookState("int8")
    if what == "step" and rank == 1:
        state.iteration = 3
    ddp.register_comm_hook(state, compressed_hook)
    try:
        ddp(torch.ones(2, 64)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_ranks_at_different_steps_are_told_so() -> None:
    for text in run_ranks(partial(unequal, what="step"), 2, timeout_seconds=30):
        assert "runs another exchange" in text
        assert "step" in text
