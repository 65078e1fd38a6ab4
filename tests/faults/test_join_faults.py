"""F40 to F44: what users of torch's Join meet, and what ours does instead."""

import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.algorithms.join as torch_join
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tensorplay.compression.participation import divisor
from tensorplay.distributed.algorithms._join_torch import count_for_torch_join, end_of_torch_join
from tensorplay.distributed.algorithms.join import Join
from tensorplay.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from tensorplay.distributed.optim.post_localSGD_optimizer import PostLocalSGDOptimizer
from tensorplay.nn.parallel.distributed import DistributedDataParallel as OwnDistributedDataParallel
from tensorplay.testing import Exited, RankFailure, run_ranks
from tests.conformance.uneven import flat

# F40: settings stay on after the block


def after_the_block(rank: int, world_size: int, ending: str) -> tuple[list[float], list[bool], float, int]:
    """Evaluate on rank 0 alone after the block, then sum 10 and 20; train on with even inputs."""
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1)))
    nn.init.ones_(ddp.module[0].weight)
    throws = ending == "termination"
    try:
        with Join([ddp], throw_on_early_termination=throws, divide_by_initial_world_size=False):
            for iteration in range(2 + rank):
                if ending == "exception" and iteration == 1:
                    raise KeyError("no such sample")
                ddp(torch.ones(2, 1)).sum().backward()
    except (KeyError, RuntimeError):
        pass
    switches = [ddp._join_config.enable, ddp._join_config.is_first_joinable]
    if rank == 0:
        with torch.no_grad():
            ddp.module.eval()(torch.ones(2, 1))
            ddp.require_forward_param_sync = False  # rank 0 alone: without the buffers, as users do it
            ddp(torch.ones(2, 1))
    total = torch.tensor([10.0, 20.0]) * (rank + 1)
    dist.all_reduce(total)
    ddp.train()
    ddp.require_forward_param_sync = True
    plain = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    plain(torch.ones(1, 1)).sum().backward()
    assert plain.module.weight.grad is not None
    return total.tolist(), switches, plain.module.weight.grad.item(), divisor(None)


@pytest.mark.parametrize("ending", ["uneven", "exception", "termination"])
def test_f40_nothing_stays_on_after_the_block(ending: str) -> None:
    for totals, switches, gradient, count in run_ranks(partial(after_the_block, ending=ending), 2):
        assert totals == [30.0, 60.0]
        assert switches == [False, False]
        assert gradient == 1.0
        assert count == 2


def divisor_after_the_block(rank: int, world_size: int) -> list[float]:
    """The reducer must not go on dividing by the last count of the block."""
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    with Join([ddp], divide_by_initial_world_size=False):
        for _ in range((1, 3)[rank]):
            ddp(torch.ones(1, 1)).sum().backward()
    gradients = []
    for value in (2.0, 4.0):
        ddp.zero_grad()
        ddp(torch.tensor([[value * (rank + 1)]])).sum().backward()
        gradients.append(ddp.module.weight.grad.item())
    return gradients


def test_f40_the_mean_after_the_block_is_over_all_ranks_again() -> None:
    assert run_ranks(divisor_after_the_block, 2) == [[3.0, 6.0]] * 2


def settings_of_torch_left_on(rank: int, world_size: int) -> list[float]:
    """A block of ours also clears what a block of torch's left in the model before it."""
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    with torch_join.Join([ddp], divide_by_initial_world_size=False):
        for _ in range((1, 2)[rank]):
            ddp(torch.ones(1, 1)).sum().backward()
    with Join([ddp]):
        for _ in range((1, 2)[rank]):
            ddp(torch.ones(1, 1)).sum().backward()
    ddp.zero_grad()
    ddp(torch.tensor([[2.0 * (rank + 1)]])).sum().backward()
    total = torch.tensor([10.0])
    dist.all_reduce(total)
    return [ddp.module.weight.grad.item(), total.item()]


def test_f40_what_torch_left_on_is_cleared_too() -> None:
    assert run_ranks(settings_of_torch_left_on, 2) == [[3.0, 20.0]] * 2


# F41: the divisor with a hook


def mean_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    count = divisor(None)
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0].div_(count))


def one_and_two_batches(rank: int, world_size: int, hook: Any, by_world_size: bool) -> list[float]:
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    gradients = []
    with Join([ddp], divide_by_initial_world_size=by_world_size):
        for _ in range(1 + rank):
            ddp.zero_grad()
            ddp(torch.ones(1, 1)).sum().backward()
            gradients.append(ddp.module.weight.grad.item())
    return gradients


@pytest.mark.parametrize("hook", [None, mean_hook], ids=["no hook", "hook"])
def test_f41_the_divisor_flag_holds_with_a_hook(hook: Any) -> None:
    assert run_ranks(partial(one_and_two_batches, hook=hook, by_world_size=False), 2)[1] == [1.0, 1.0]
    assert run_ranks(partial(one_and_two_batches, hook=hook, by_world_size=True), 2)[1] == [1.0, 0.5]


class CountedDDP(OwnDistributedDataParallel):
    """Tells the count of torch's Join to hooks."""

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> Any:
        answer = super()._check_global_requires_backward_grad_sync(is_joined_rank)
        count_for_torch_join(self, has_data=not is_joined_rank)
        return answer

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        end_of_torch_join(self)
        super()._sync_final_model(is_last_joiner)


def inside_torchs_join(
    rank: int, world_size: int, by_world_size: bool, join: Any
) -> tuple[list[float], int, float]:
    ddp = CountedDDP(nn.Linear(1, 1, bias=False))
    ddp.register_comm_hook(None, mean_hook)
    gradients = []
    with join([ddp], divide_by_initial_world_size=by_world_size):
        for _ in range((1, 2, 4)[rank]):
            ddp.zero_grad()
            ddp(torch.ones(1, 1)).sum().backward()
            gradients.append(round(ddp.module.weight.grad.item(), 5))
    total = torch.tensor([10.0])
    dist.all_reduce(total)
    return gradients, divisor(None), total.item()


@pytest.mark.parametrize("join", [torch_join.Join, Join], ids=["torch's Join", "our Join"])
def test_f41_our_ddp_keeps_the_flag_with_a_hook_in_either_join(join: Any) -> None:
    for by_world_size, expected in ((False, [1.0] * 4), (True, [1.0, 0.66667, 0.33333, 0.33333])):
        results = run_ranks(partial(inside_torchs_join, by_world_size=by_world_size, join=join), 3)
        assert results == [(expected[:1], 3, 30.0), (expected[:2], 3, 30.0), (expected, 3, 30.0)]


# F42: an averager or a local-SGD optimizer


def averaged(rank: int, world_size: int, kind: str, steps_along: bool) -> list[float]:
    """Weights after each of this rank's steps, and at the end; gradients are the values themselves."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    ddp = DistributedDataParallel(model)
    optimizer: Any = torch.optim.SGD(ddp.parameters(), lr=1.0)
    averager = PeriodicModelAverager(period=2, module=model)
    joinables: list[Any] = [ddp, averager]
    if kind == "optimizer":
        optimizer = PostLocalSGDOptimizer(optimizer, averager)
        joinables = [ddp, optimizer]
    weights = []
    with Join(joinables) as join:
        if steps_along:
            local = optimizer.optim if kind == "optimizer" else optimizer
            join.shadow(local.step, phase="backward")
        for value in ((2.0, 4.0), (6.0, 8.0, 10.0, 12.0))[rank]:
            optimizer.zero_grad()
            ddp(torch.tensor([[value]])).sum().backward()
            optimizer.step()
            if kind == "averager":
                averager.average_parameters(ddp.parameters())
            weights.append(model.weight.item())
    total = torch.tensor([10.0 + rank])
    dist.all_reduce(total)
    return [*weights, model.weight.item(), float(averager.step), total.item()]


@pytest.mark.parametrize("kind", ["averager", "optimizer"])
def test_f42_idle_ranks_take_part_in_averaging_with_their_last_parameters(kind: str) -> None:
    first, second = run_ranks(partial(averaged, kind=kind, steps_along=False), 2)
    # gradients 4, 6, then 5 and 6 on rank 1 alone; the mean at step 2 is that of -10 (rank 0, idle) and -15
    assert first == [-4.0, -10.0, -18.5, 4.0, 21.0]
    assert second == [-4.0, -10.0, -12.5, -18.5, -18.5, 4.0, 21.0]


@pytest.mark.parametrize("kind", ["averager", "optimizer"])
def test_f42_idle_ranks_that_step_along_change_nothing(kind: str) -> None:
    first, second = run_ranks(partial(averaged, kind=kind, steps_along=True), 2)
    assert first == [-4.0, -10.0, -21.0, 4.0, 21.0]
    assert second == [-4.0, -10.0, -15.0, -21.0, -21.0, 4.0, 21.0]


# F43: a loss that communicates between forward and backward


def loss_with_a_collective(rank: int, world_size: int, batches: tuple[int, ...]) -> tuple[float, list[float]]:
    """Each rank's loss is divided by the number of samples of all ranks."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    samples: list[float] = []
    with Join([ddp]) as join:
        join.shadow(lambda: dist.all_reduce(torch.zeros(1)), phase="forward")
        for _iteration in range(batches[rank]):
            optimizer.zero_grad()
            x = torch.ones(rank + 1, 1)
            output = ddp(x)
            count = torch.tensor([float(len(x))])
            dist.all_reduce(count)
            samples.append(count.item())
            (output.sum() * world_size / count).sum().backward()
            optimizer.step()
    return model.weight.item(), samples


def test_f43_a_loss_that_communicates_can_join() -> None:
    # 3 samples in the first 2 iterations, 2 in the last 2: each step is the mean over the samples, 1
    results = run_ranks(partial(loss_with_a_collective, batches=(2, 4)), 2)
    assert [samples for _, samples in results] == [[3.0, 3.0], [3.0, 3.0, 2.0, 2.0]]
    assert [weight for weight, _ in results] == pytest.approx([-4.0, -4.0])


# F44: DDP and ZeRO


def torch_zero(*arguments: Any, **options: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(*arguments, **options)


def optimized(rank: int, world_size: int, batches: tuple[int, ...], zero: Any, weights: Any) -> torch.Tensor:
    torch.manual_seed(5)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)))
    if zero is None:
        optimizer: Any = torch.optim.SGD(ddp.parameters(), lr=0.1, **weights)
        joinables: list[Any] = [ddp]
    else:
        optimizer = zero(ddp.parameters(), torch.optim.SGD, lr=0.1, **weights)
        joinables = [ddp, optimizer]
    with Join(joinables) as join:
        if zero is None:
            join.shadow(optimizer.step, phase="backward")
        for iteration in range(batches[rank]):
            optimizer.zero_grad()
            torch.manual_seed(10 * rank + iteration)
            ddp(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
    return flat(ddp.parameters())


def own_zero(*arguments: Any, **options: Any) -> Any:
    from tensorplay.distributed.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(*arguments, **options)


@pytest.mark.parametrize("zero", [torch_zero, own_zero], ids=["torch's", "ours"])
@pytest.mark.parametrize("weights", [{}, {"momentum": 0.9, "weight_decay": 0.1}], ids=["plain", "momentum"])
@pytest.mark.parametrize("batches", [(1, 2), (2, 5, 1)], ids=str)
def test_f44_zero_equals_the_plain_optimizer(batches: tuple[int, ...], weights: Any, zero: Any) -> None:
    plain = run_ranks(partial(optimized, batches=batches, zero=None, weights=weights), len(batches))
    sharded = run_ranks(partial(optimized, batches=batches, zero=zero, weights=weights), len(batches))
    for parameters in [*plain, *sharded]:
        torch.testing.assert_close(parameters, plain[0], rtol=1e-6, atol=1e-6)


# A rank that dies or fails inside the block


def loses_a_rank(rank: int, world_size: int, how: str, batches: tuple[int, ...]) -> None:
    ddp = DistributedDataParallel(nn.Linear(1, 1))
    with Join([ddp]):
        for iteration in range(batches[rank]):
            if rank == world_size - 1 and iteration == 2:
                if how == "ends":
                    os._exit(3)
                raise ValueError("sample 17 is broken")
            ddp(torch.ones(1, 1)).sum().backward()


@pytest.mark.parametrize("batches", [(0, 4), (1, 5, 4)], ids=str)
def test_the_death_of_a_rank_is_told_by_the_others(batches: tuple[int, ...]) -> None:
    last = len(batches) - 1
    with pytest.raises(RankFailure) as caught:
        run_ranks(
            partial(loses_a_rank, how="ends", batches=batches),
            len(batches),
            grace_seconds=15,
            expect_exit=[last],
        )
    for rank in range(last):
        text = str(caught.value.exceptions[rank])
        assert (
            f"rank {rank} lost the other ranks inside a Join block: the process of rank {last} has ended"
            in text
        )


@pytest.mark.parametrize("batches", [(0, 4), (1, 5, 4)], ids=str)
def test_an_error_of_a_rank_is_told_by_the_others(batches: tuple[int, ...]) -> None:
    last = len(batches) - 1
    with pytest.raises(RankFailure) as caught:
        run_ranks(partial(loses_a_rank, how="raises", batches=batches), len(batches), grace_seconds=15)
    assert str(caught.value.exceptions[last]) == "sample 17 is broken"
    for rank in range(last):
        text = str(caught.value.exceptions[rank])
        assert f"rank {last} left the block with ValueError: sample 17 is broken" in text
    assert not any(isinstance(error, Exited) for error in caught.value.exceptions.values())
