"""Hooks that make the optimizer's step: clipping, scaling, uneven inputs, unused parameters, failures, endurance."""

import copy
import gc
import logging
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tensorplay.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from tensorplay.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
)
from tensorplay.distributed.algorithms.join import Join
from tensorplay.distributed.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from tensorplay.testing import RankFailure, run_ranks
from tests.ranks.zero import MANY_BUCKETS, OPTIMIZERS, Pair, batch, largest_difference, linear, net

Cell = dict[str, Any]

# Clipping and loss scaling


def _clipping(rank: int, world_size: int, reduce_scatter: bool, max_grad_norm: float) -> list[float]:
    pair = Pair(
        optimizer="momentum",
        ddp=MANY_BUCKETS,
        shard_buckets=True,
        max_grad_norm=max_grad_norm,
        reduce_scatter=reduce_scatter,
    )
    differences = []
    for step in range(6):
        pair.optimizer.zero_grad()
        pair.zero.zero_grad()
        pair.plain(batch(rank, step)).pow(2).sum().backward()
        torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), max_grad_norm)
        pair.optimizer.step()
        pair.ddp(batch(rank, step)).pow(2).sum().backward()
        differences.append(pair.difference())
        if not reduce_scatter:
            for one, other in zip(pair.plain.parameters(), pair.ddp.parameters(), strict=True):
                assert torch.equal(one.grad, other.grad)
    return differences


@pytest.mark.parametrize("max_grad_norm", [0.5, 1e6])
def test_clipping_is_that_of_clip_grad_norm(max_grad_norm: float) -> None:
    assert (
        run_ranks(partial(_clipping, reduce_scatter=False, max_grad_norm=max_grad_norm), 3) == [[0.0] * 6] * 3
    )


def test_clipping_where_each_rank_has_its_own_gradients_only() -> None:
    for differences in run_ranks(partial(_clipping, reduce_scatter=True, max_grad_norm=0.5), 3):
        assert max(differences) < 1e-6


def _scaling(rank: int, world_size: int, reduce_scatter: bool, build: Callable[[], nn.Module]) -> list[Any]:
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3) for _ in range(2)]
    pair = Pair(
        build, ddp=MANY_BUCKETS, shard_buckets=True, reduce_scatter=reduce_scatter, grad_scaler=scalers[1]
    )
    rows = []
    for step in range(8):
        before = [p.detach().clone() for p in pair.ddp.parameters()]
        states = copy.deepcopy([dict(pair.zero.state[p]) for p in pair.zero.state])
        inputs = batch(rank, step)
        if step in (2, 5) and rank == world_size - 1:
            inputs[0, 0] = torch.inf
        for model, optimizer, scaler in zip(
            (pair.plain, pair.ddp), (pair.optimizer, pair.zero), scalers, strict=True
        ):
            optimizer.zero_grad()
            scaler.scale(model(inputs).pow(2).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        skipped = step in (2, 5)
        assert (largest_difference(before, pair.ddp.parameters()) == 0.0) == skipped
        if skipped:
            now = [dict(pair.zero.state[p]) for p in pair.zero.state]
            for old, new in zip(states, now, strict=True):
                assert old.keys() == new.keys()
                assert all(torch.equal(old[key], new[key]) for key in old)
        rows.append((pair.difference(), scalers[0].get_scale(), scalers[1].get_scale()))
    return rows


@pytest.mark.parametrize("reduce_scatter", [False, True])
@pytest.mark.parametrize("build", [net, partial(nn.Linear, 6, 1)])
def test_a_step_that_is_not_finite_is_skipped_on_every_rank(
    reduce_scatter: bool, build: Callable[[], nn.Module]
) -> None:
    """The linear layer has fewer parameters than there are ranks: GradScaler looks for gradients on each."""
    if isinstance(build, partial):
        build = linear
    results = run_ranks(partial(_scaling, reduce_scatter=reduce_scatter, build=build), 3)
    assert (
        [row[1:] for row in results[0]] == [row[1:] for row in results[1]] == [row[1:] for row in results[2]]
    )
    for difference, expected_scale, scale in results[0]:
        assert scale == expected_scale
        assert difference <= (1e-6 if reduce_scatter else 0.0)
    assert [scale for _, _, scale in results[0]] == [1024, 1024, 512, 512, 512, 256, 256, 256]


# Uneven inputs


def _uneven(rank: int, world_size: int, interleaved: bool | None, reduce_scatter: bool) -> float:
    pair = (
        Pair(optimizer="momentum", ddp=MANY_BUCKETS)
        if interleaved is None
        else Pair(
            optimizer="momentum",
            interleaved=bool(interleaved),
            reduce_scatter=reduce_scatter,
            ddp=MANY_BUCKETS,
        )
    )
    shared, zero = pair.ddp, pair.zero
    if interleaved is None:
        shared = DistributedDataParallel(net(), **MANY_BUCKETS)
        optimizer_class, defaults = OPTIMIZERS["momentum"]
        zero = ZeroRedundancyOptimizer(shared.parameters(), optimizer_class, **defaults)
    for step in range(2 * world_size):  # the whole data on a plain DDP, zeros for ranks without
        pair.optimizer.zero_grad()
        scale = 1.0 if step < 2 * rank + 2 else 0.0
        (pair.plain(batch(rank, step)).pow(2).sum() * scale).backward()
        pair.optimizer.step()
    with Join([shared, zero]):
        for step in range(2 * rank + 2):
            zero.zero_grad()
            shared(batch(rank, step)).pow(2).sum().backward()
            zero.step()
    return largest_difference(pair.plain.parameters(), shared.parameters())


@pytest.mark.parametrize(
    ("interleaved", "reduce_scatter"), [(None, False), (False, False), (True, False), (True, True)]
)
def test_uneven_inputs(interleaved: bool | None, reduce_scatter: bool) -> None:
    for difference in run_ranks(partial(_uneven, interleaved=interleaved, reduce_scatter=reduce_scatter), 3):
        assert difference <= 1e-6


# Parameters that a step does not use


class Branches(nn.Module):
    """Uses one of two branches, and never the third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk = nn.Linear(6, 8)
        self.left, self.right, self.never = nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor, branch: str) -> torch.Tensor:
        return getattr(self, branch)(torch.tanh(self.trunk(inputs)))  # type: ignore[no-any-return]


def _unused(
    rank: int, world_size: int, interleaved: bool, reduce_scatter: bool, keep_zeros: bool
) -> list[float]:
    pair = Pair(
        Branches,
        "momentum",
        interleaved,
        ddp={"find_unused_parameters": True, **MANY_BUCKETS},
        shard_buckets=True,
        reduce_scatter=reduce_scatter,
    )
    differences = []
    # On all ranks the left; on one the right; on none the right, which must rest then.
    for step, branches in enumerate(["left left", "left right", "left left", "right left", "left left"]):
        branch = branches.split()[rank % 2]
        for model, optimizer in ((pair.plain, pair.optimizer), (pair.ddp, pair.zero)):
            optimizer.zero_grad(set_to_none=not keep_zeros)
            with model.no_sync():
                model(batch(rank, 10 + step), branch).pow(2).sum().backward()
            model(batch(rank, step), branch).pow(2).sum().backward()
        pair.optimizer.step()
        differences.append(pair.difference())
    never = list(pair.ddp.module.never.parameters())
    assert largest_difference(never, Branches().never.parameters()) == 0.0
    assert all(parameter not in pair.zero.state for parameter in never)
    return differences


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("keep_zeros", [False, True])
def test_a_parameter_that_no_rank_used_is_not_stepped(interleaved: bool, keep_zeros: bool) -> None:
    run = partial(_unused, interleaved=interleaved, reduce_scatter=False, keep_zeros=keep_zeros)
    assert run_ranks(run, 2) == [[0.0] * 5] * 2


def test_unused_parameters_where_each_rank_has_its_own_gradients_only() -> None:
    for differences in run_ranks(
        partial(_unused, interleaved=True, reduce_scatter=True, keep_zeros=False), 2
    ):
        assert max(differences) < 1e-6


def _unused_in_a_static_graph(rank: int, world_size: int, interleaved: bool) -> list[float]:
    pair = Pair(
        Branches, "momentum", interleaved, ddp={"static_graph": True, **MANY_BUCKETS}, shard_buckets=True
    )
    differences = []
    for step in range(4):
        for model, optimizer in ((pair.plain, pair.optimizer), (pair.ddp, pair.zero)):
            optimizer.zero_grad()
            model(batch(rank, step), "left").pow(2).sum().backward()
        pair.optimizer.step()
        differences.append(pair.difference())
    assert all(parameter not in pair.zero.state for parameter in pair.ddp.module.never.parameters())
    return differences


@pytest.mark.parametrize("interleaved", [False, True])
def test_unused_parameters_in_a_static_graph(interleaved: bool) -> None:
    assert run_ranks(partial(_unused_in_a_static_graph, interleaved=interleaved), 2) == [[0.0] * 4] * 2


def _uneven_and_unused(rank: int, world_size: int, interleaved: bool) -> float:
    """Rank 0 runs out first; only the others use the right branch."""
    pair = Pair(
        Branches,
        "momentum",
        interleaved,
        ddp={"find_unused_parameters": True, **MANY_BUCKETS},
        shard_buckets=True,
    )
    branches = ["left", "left", "right", "left", "right"]
    for step, branch in enumerate(branches):
        pair.optimizer.zero_grad()
        loss = pair.plain(batch(rank, step), branch).pow(2).sum()
        (loss * (1.0 if rank or step < 2 else 0.0)).backward()
        pair.optimizer.step()
    with Join([pair.ddp, pair.zero]):
        for step in range(5 if rank else 2):
            pair.zero.zero_grad()
            pair.ddp(batch(rank, step), branches[step]).pow(2).sum().backward()
            pair.zero.step()
    return pair.difference()


@pytest.mark.parametrize("interleaved", [False, True])
def test_uneven_inputs_with_unused_parameters(interleaved: bool) -> None:
    assert max(run_ranks(partial(_uneven_and_unused, interleaved=interleaved), 2)) <= 1e-6


# Modules that backward meets twice


class Shared(nn.Module):
    """One layer three times, in checkpointed segments or not."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.layer, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 2)
        self.way = way

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for _ in range(3):
            if self.way == "shared":
                hidden = torch.tanh(self.layer(hidden))
            else:
                hidden = checkpoint(self._segment, hidden, use_reentrant=self.way == "reentrant")
        return self.last(hidden)  # type: ignore[no-any-return]

    def _segment(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(hidden))


def _shared_modules(rank: int, world_size: int, way: str, interleaved: bool) -> list[float]:
    static = {"static_graph": True} if way != "shared" else {}
    pair = Pair(partial(Shared, way), "momentum", interleaved, ddp={**static, **MANY_BUCKETS})
    differences = []
    for step in range(5):
        pair.step(batch(rank, step))
        differences.append(pair.difference())
    return differences


@pytest.mark.parametrize("way", ["shared", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_shared_and_checkpointed_modules(way: str, interleaved: bool) -> None:
    assert run_ranks(partial(_shared_modules, way=way, interleaved=interleaved), 2) == [[0.0] * 5] * 2


class ReadsLate(nn.Module):
    """Uses a weight detached, before it is used with its gradient: backward reads it last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.layer, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs.clone().requires_grad_()
        first = nn.functional.linear(inputs, self.layer.weight.detach())
        return self.last(self.layer(first))  # type: ignore[no-any-return]


def _reads_late(rank: int, world_size: int, update: str) -> list[float]:
    pair = Pair(ReadsLate, "momentum", update=update)
    differences = []
    for step in range(4):
        pair.step(batch(rank, step))
        differences.append(pair.difference())
    return differences


def test_a_late_read_is_refused_by_name() -> None:
    with pytest.raises(RankFailure, match=r'backward reads layer\.weight .*\n?.*update="after_backward"'):
        run_ranks(partial(_reads_late, update="in_backward"), 2)


def test_a_late_read_is_right_after_backward() -> None:
    assert run_ranks(partial(_reads_late, update="after_backward"), 2) == [[0.0] * 4] * 2


# Contract of the hook's mode


def _contract(rank: int, world_size: int) -> dict[str, Any]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tensorplay.distributed.optim.zero_redundancy_optimizer").addHandler(handler)
    ddp = DistributedDataParallel(net())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    said: dict[str, Any] = {}
    for name, call in {
        "no hook": zero.step,
        "not consolidated": zero.state_dict,
        "no such rank": partial(zero.consolidate_state_dict, 5),
    }.items():
        with pytest.raises((RuntimeError, ValueError)) as raised:
            call()
        said[name] = str(raised.value)
    hook = hook_with_zero_step(allreduce_hook, ddp, zero)
    ddp.register_comm_hook(None, hook)
    for name, call in {
        "closure": partial(zero.step, lambda: 0.0),
        "second hook": partial(hook_with_zero_step, allreduce_hook, ddp, zero),
        "late group": partial(zero.add_param_group, {"params": [nn.Parameter(torch.ones(1))]}),
    }.items():
        with pytest.raises((RuntimeError, ValueError)) as raised:
            call()
        said[name] = str(raised.value)
    for step in range(3):
        ddp(batch(rank, step)).pow(2).sum().backward()
        zero.step()
    zero.consolidate_state_dict()
    ddp(batch(rank, 4)).pow(2).sum().backward()
    with pytest.raises(RuntimeError) as raised:
        zero.state_dict()
    said["out of date"] = str(raised.value)
    return {"said": said, "records": records}


def test_the_contract_of_the_hooks_mode() -> None:
    result = run_ranks(_contract, 2)[0]
    assert len(result["records"]) == 1
    assert "backward makes the updates" in result["records"][0]
    expected = {
        "no hook": "register hook_with_zero_step",
        "not consolidated": "call consolidate_state_dict",
        "no such rank": "0 to 1, got 5",
        "closure": "without a closure",
        "second hook": "one optimizer for each hook",
        "late group": "before the hook is made",
        "out of date": "after the last step",
    }
    for name, text in expected.items():
        assert text in result["said"][name], name


class CountsInGroup(torch.optim.SGD):
    """Keeps its step count in the group."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 0.1 / group["count"]
        super().step()


def _counts(rank: int, world_size: int, update: str) -> float:
    OPTIMIZERS["counts"] = (CountsInGroup, {"lr": 0.1})
    pair = Pair(optimizer="counts", update=update, ddp=MANY_BUCKETS)
    for step in range(4):
        pair.step(batch(rank, step))
    return pair.difference()


def test_an_optimizer_that_counts_in_its_groups() -> None:
    assert run_ranks(partial(_counts, update="after_backward"), 2) == [0.0] * 2
    with pytest.raises(RankFailure, match=r'CountsInGroup.*changes .count.*update="after_backward"'):
        run_ranks(partial(_counts, update="in_backward"), 2)


def _failing_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    if dist.get_rank() == 1 and bucket.index() == 1:
        raise ValueError("no room for the gradient")
    return allreduce_hook(None, bucket)


def _fails(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(net(), **MANY_BUCKETS)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    ddp.register_comm_hook(None, hook_with_zero_step_interleaved(_failing_hook, ddp, zero))
    for step in range(3):
        ddp(batch(rank, step)).pow(2).sum().backward()


def test_an_error_in_the_wrapped_hook_names_the_rank_everywhere() -> None:
    with pytest.raises(RankFailure) as raised:
        run_ranks(_fails, 2, group_timeout_seconds=10)
    assert "no room for the gradient" in str(raised.value)
    assert raised.value.ranks[0] in (0, 1)


class FailsOnRankOne(torch.optim.SGD):
    """Its third update fails, on one rank."""

    updates = 0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.updates += 1
        if self.updates > 2 and dist.get_rank() == 1:
            raise ValueError("the update is not defined here")
        super().step()


def _failing_update(rank: int, world_size: int, options: Cell) -> str:
    ddp = DistributedDataParallel(net(), **MANY_BUCKETS)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), FailsOnRankOne, overlap_with_ddp=True, lr=0.1)
    options = dict(options)
    make = hook_with_zero_step_interleaved if options.pop("interleaved") else hook_with_zero_step
    ddp.register_comm_hook(None, make(allreduce_hook, ddp, zero, True, **options))
    for step in range(4):
        try:
            ddp(batch(rank, step)).pow(2).sum().backward()
        except RuntimeError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize(
    "options",
    [{"interleaved": False}, {"interleaved": True}, {"interleaved": False, "update": "after_backward"}],
)
def test_an_error_in_an_update_names_the_rank_on_every_rank(options: Cell) -> None:
    for text in run_ranks(partial(_failing_update, options=options), 3):
        assert "rank 1 failed: ValueError: the update is not defined here" in text


def _is_forgotten(rank: int, world_size: int, interleaved: bool) -> bool:
    pair = Pair(interleaved=interleaved, ddp=MANY_BUCKETS)
    for step in range(3):
        pair.step(batch(rank, step))
    references = [weakref.ref(pair.ddp), weakref.ref(pair.ddp.module), weakref.ref(pair.zero)]
    del pair
    for _ in range(50):  # a lane's worker lets go of its last exchange a moment after backward has returned
        gc.collect()
        if all(reference() is None for reference in references):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_hook_does_not_keep_the_model(interleaved: bool) -> None:
    assert run_ranks(partial(_is_forgotten, interleaved=interleaved), 2) == [True] * 2


# Endurance


def _long(rank: int, world_size: int, steps: int, interleaved: bool) -> torch.Tensor:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 24), *[nn.Linear(24, 24) for _ in range(5)])
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.002)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=0.001)
    make = hook_with_zero_step_interleaved if interleaved else hook_with_zero_step
    indexes: set[int] = set()

    def counting(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        indexes.add(bucket.index())
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(None, make(counting, ddp, zero))
    for step in range(steps):
        zero.zero_grad()
        ddp(batch(rank, step)).pow(2).sum().backward()
    assert len(indexes) >= 6, indexes
    return torch.cat([p.detach().flatten() for p in ddp.parameters()])


@pytest.mark.parametrize("interleaved", [False, True])
def test_does_not_hang(interleaved: bool) -> None:
    results = run_ranks(partial(_long, steps=60, interleaved=interleaved), 4)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("interleaved", [False, True])
def test_does_not_hang_in_500_steps_20_times(interleaved: bool) -> None:
    for _ in range(20):
        results = run_ranks(partial(_long, steps=500, interleaved=interleaved), 4, timeout_seconds=120)
        assert all(torch.equal(result, results[0]) for result in results)
