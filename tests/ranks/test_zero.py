"""The sharded optimizer and its hooks on real ranks: what must equal the whole optimizer, and at what cost."""

import copy
import gc
import itertools
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

import tensorplay.nn.parallel
from tensorplay.compression.collective import traffic
from tensorplay.compression.driver import lane_for
from tensorplay.distributed.algorithms.ddp_comm_hooks.compressed_hook import (
    CompressedHookState,
    compressed_hook,
)
from tensorplay.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from tensorplay.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from tensorplay.distributed.algorithms.join import Join
from tensorplay.distributed.optim import _zero_exchange
from tensorplay.distributed.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from tensorplay.testing import RankFailure, run_ranks
from tests.ranks.zero import (
    MANY_BUCKETS,
    ONE_BUCKET,
    OPTIMIZERS,
    OwnOptimizer,
    Pair,
    batch,
    largest_difference,
    net,
)

Cell = dict[str, Any]

# Equal to the whole optimizer, bit for bit


def _cells() -> list[Cell]:
    axes = {
        "interleaved": (False, True),
        "shard_buckets": (False, True),
        "ddp": (ONE_BUCKET, MANY_BUCKETS, {"static_graph": True, **MANY_BUCKETS}),
    }
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _equal_at_every_step(rank: int, world_size: int, cells: list[Cell], steps: int) -> int:
    checked = 0
    for cell in cells:
        pair = Pair(**cell)
        for step in range(steps):
            pair.step(batch(rank, step))
            assert pair.difference() == 0.0, (cell, step)
            gradients = zip(pair.plain.parameters(), pair.ddp.parameters(), strict=True)
            assert all(torch.equal(one.grad, other.grad) for one, other in gradients), (cell, step)
            checked += 1
    return checked


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_equal_to_the_whole_optimizer_at_every_step(world_size: int) -> None:
    """Each optimizer meets every pair of option values over the three world sizes."""
    cells = _cells()
    chosen = [
        {"optimizer": name, **cell}
        for place, name in enumerate(OPTIMIZERS)
        for cell in cells[(place + world_size) % 4 :: 4]
    ]
    results = run_ranks(
        partial(_equal_at_every_step, cells=chosen, steps=20), world_size, timeout_seconds=150
    )
    assert results == [len(chosen) * 20] * world_size


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_equal_to_the_whole_optimizer_in_every_cell(world_size: int) -> None:
    updates = ("in_backward", "after_backward")
    cells = [
        {"optimizer": name, "update": update, **cell}
        for name in OPTIMIZERS
        for update in updates
        for cell in _cells()
    ]
    run_ranks(partial(_equal_at_every_step, cells=cells, steps=20), world_size, timeout_seconds=900)


@pytest.mark.parametrize("interleaved", [False, True])
def test_updates_after_backward_are_equal_too(interleaved: bool) -> None:
    cells = [
        {"interleaved": interleaved, "update": "after_backward", "ddp": ddp, "shard_buckets": shard}
        for ddp in (MANY_BUCKETS, {"static_graph": True, **MANY_BUCKETS})
        for shard in (False, True)
    ]
    run_ranks(partial(_equal_at_every_step, cells=cells, steps=6), 2)


def _in_pieces(rank: int, world_size: int) -> list[float]:
    usual = _zero_exchange.PIECE_BYTES
    _zero_exchange.PIECE_BYTES = 2000  # several pieces a bucket, some of one parameter
    try:
        differences = []
        for options in (
            {"interleaved": True},
            {"interleaved": True, "shard_buckets": True, "ddp": {"find_unused_parameters": True}},
            {"shard_buckets": True, "max_grad_norm": 1e6},
            {"update": "after_backward"},
            {"interleaved": True, "shard_buckets": True, "reduce_scatter": True},
            {"reduce_scatter": True},
        ):
            pair = Pair(**options)
            for step in range(4):
                pair.step(batch(rank, step))
            differences.append(pair.difference())
        model = DistributedDataParallel(net())
        optimizer_class, defaults = OPTIMIZERS["adam"]
        zero = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, **defaults)
        whole = Pair()
        for step in range(4):
            whole.step(batch(rank, step))
            zero.zero_grad()
            model(batch(rank, step)).pow(2).sum().backward()
            zero.step()
        return [*differences, largest_difference(whole.plain.parameters(), model.parameters())]
    finally:
        _zero_exchange.PIECE_BYTES = usual


def test_buckets_travel_in_pieces() -> None:
    for differences in run_ranks(_in_pieces, 3):
        *exact, first_shared, second_shared, outside = differences
        assert [*exact, outside] == [0.0] * 5
        assert max(first_shared, second_shared) < 1e-5


def _on_the_own_ddp(rank: int, world_size: int) -> list[float]:
    differences = []
    for interleaved in (False, True):
        pair = Pair()
        ddp = tensorplay.nn.parallel.DistributedDataParallel(net(), **MANY_BUCKETS)
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=0.01)
        make = hook_with_zero_step_interleaved if interleaved else hook_with_zero_step
        ddp.register_comm_hook(None, make(allreduce_hook, ddp, zero))
        optimizer = torch.optim.Adam(pair.plain.parameters(), lr=0.01)
        for step in range(4):
            for model, stepper in ((pair.plain, optimizer), (ddp, zero)):
                stepper.zero_grad()
                model(batch(rank, step)).pow(2).sum().backward()
                stepper.step()
        differences.append(largest_difference(pair.plain.parameters(), ddp.parameters()))
    return differences


def test_works_on_this_packages_ddp() -> None:
    assert run_ranks(_on_the_own_ddp, 2) == [[0.0, 0.0]] * 2


def _on_a_subgroup(rank: int, world_size: int) -> float | None:
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    models = [DistributedDataParallel(net(), process_group=group, **MANY_BUCKETS) for _ in range(3)]
    optimizer = torch.optim.Adam(models[0].parameters(), lr=0.01)
    in_hook = ZeroRedundancyOptimizer(
        models[1].parameters(), torch.optim.Adam, process_group=group, overlap_with_ddp=True, lr=0.01
    )
    models[1].register_comm_hook(
        group, hook_with_zero_step_interleaved(allreduce_hook, models[1], in_hook, True)
    )
    outside = ZeroRedundancyOptimizer(models[2].parameters(), torch.optim.Adam, process_group=group, lr=0.01)
    for step in range(4):
        for model, stepper in zip(models, (optimizer, in_hook, outside), strict=True):
            stepper.zero_grad()
            model(batch(rank, step)).pow(2).sum().backward()
            stepper.step()
    outside.consolidate_state_dict(to=1)
    assert outside.rank == rank - 1
    return max(largest_difference(models[0].parameters(), model.parameters()) for model in models[1:])


def test_works_on_a_subgroup() -> None:
    assert run_ranks(_on_a_subgroup, 3) == [None, 0.0, 0.0]


def _inline(rank: int, world_size: int) -> list[float]:
    """The path of device tensors, where exchanges run in the caller's thread on the group itself."""
    differences = []
    for options in (
        {"interleaved": True, "shard_buckets": True},
        {"interleaved": True},
        {"update": "after_backward"},
        {"max_grad_norm": 1e6},
        {"reduce_scatter": True},
    ):
        pair = Pair(ddp=MANY_BUCKETS, **options)
        pair.zero.lane = partial(  # type: ignore[method-assign]
            lane_for, pair.zero.process_group, "inline test", inline=True
        )
        for step in range(4):
            pair.step(batch(rank, step))
        differences.append(pair.difference())
    return differences


def test_exchanges_in_the_callers_thread() -> None:
    for differences in run_ranks(_inline, 2):
        assert differences[:4] == [0.0] * 4
        assert differences[4] < 1e-6


# Groups, schedules, accumulation


def _two_groups(model: nn.Sequential) -> list[dict[str, Any]]:
    return [
        {"params": list(model[0].parameters()), "lr": 0.1},
        {"params": [p for layer in list(model)[2:] for p in layer.parameters()], "weight_decay": 0.1},
    ]


def _groups_and_schedules(rank: int, world_size: int, interleaved: bool | None) -> list[float]:
    """`interleaved` None: step() outside of a hook."""
    if interleaved is None:
        plain, shared = DistributedDataParallel(net()), DistributedDataParallel(net())
        optimizer = torch.optim.AdamW(_two_groups(plain.module), lr=0.01)
        zero = ZeroRedundancyOptimizer(_two_groups(shared.module), torch.optim.AdamW, lr=0.01)
    else:
        pair = Pair(optimizer="adamw", groups=_two_groups, interleaved=interleaved, ddp=MANY_BUCKETS)
        plain, shared, optimizer, zero = pair.plain, pair.ddp, pair.optimizer, pair.zero
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(o, [0.2, 0.02], total_steps=8) for o in (optimizer, zero)
    ]
    differences = []
    for step in range(7):
        for model, stepper, scheduler in zip((plain, shared), (optimizer, zero), schedulers, strict=True):
            stepper.zero_grad()
            model(batch(rank, step)).pow(2).sum().backward()
            stepper.step()
            scheduler.step()
        differences.append(largest_difference(plain.parameters(), shared.parameters()))
        kept = ("params",)
        for one, other in zip(optimizer.param_groups, zero.param_groups, strict=True):
            assert {k: v for k, v in one.items() if k not in kept} == {
                k: v for k, v in other.items() if k not in kept
            }
    return differences


@pytest.mark.parametrize("interleaved", [None, False, True])
def test_groups_and_schedules(interleaved: bool | None) -> None:
    assert run_ranks(partial(_groups_and_schedules, interleaved=interleaved), 2) == [[0.0] * 7] * 2


def _accumulation(rank: int, world_size: int, interleaved: bool) -> list[float]:
    pair = Pair(optimizer="momentum", interleaved=interleaved, shard_buckets=True, ddp=MANY_BUCKETS)
    differences = []
    for step in range(5):
        pair.optimizer.zero_grad()
        pair.zero.zero_grad()
        for model in (pair.plain, pair.ddp):
            before = [p.detach().clone() for p in model.parameters()]
            with model.no_sync():
                model(batch(rank, 3 * step)).pow(2).sum().backward()
                model(batch(rank, 3 * step + 1)).pow(2).sum().backward()
            assert largest_difference(before, model.parameters()) == 0.0
            model(batch(rank, 3 * step + 2)).pow(2).sum().backward()
        pair.optimizer.step()
        pair.zero.step()
        differences.append(pair.difference())
    return differences


@pytest.mark.parametrize("interleaved", [False, True])
def test_accumulation_under_no_sync(interleaved: bool) -> None:
    assert run_ranks(partial(_accumulation, interleaved=interleaved), 2) == [[0.0] * 5] * 2


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
        build = _same_linear
    results = run_ranks(partial(_scaling, reduce_scatter=reduce_scatter, build=build), 3)
    assert (
        [row[1:] for row in results[0]] == [row[1:] for row in results[1]] == [row[1:] for row in results[2]]
    )
    for difference, expected_scale, scale in results[0]:
        assert scale == expected_scale
        assert difference <= (1e-6 if reduce_scatter else 0.0)
    assert [scale for _, _, scale in results[0]] == [1024, 1024, 512, 512, 512, 256, 256, 256]


def _same_linear() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(6, 1)


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


# Parameters of every size and kind


class Kinds(nn.Module):
    """0-dim, empty, complex, bfloat16, double, channels_last and frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.spectrum = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.bfloat = nn.Parameter(torch.randn(7, dtype=torch.bfloat16))
        self.float64 = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.image = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        total = (inputs.sum() * self.scalar) ** 2 + self.empty.sum() + self.frozen.sum()
        total = total + (self.spectrum * inputs.sum()).abs().pow(2).sum()
        total = (
            total + (self.bfloat * 2).float().pow(2).sum() * inputs.mean() + self.float64.float().pow(2).sum()
        )
        return (
            total
            + self.image(inputs.view(1, 2, 4, 3).contiguous(memory_format=torch.channels_last)).pow(2).sum()
        )


def _kinds(rank: int, world_size: int, options: Cell) -> list[float]:
    pair = Pair(Kinds, **options)
    differences = []
    for step in range(4):
        pair.step(batch(rank, step), loss=lambda output: output)
        differences.append(pair.difference())
    return differences


@pytest.mark.parametrize("interleaved", [False, True])
def test_every_kind_of_parameter(interleaved: bool) -> None:
    for shard in (False, True):
        options = {"interleaved": interleaved, "shard_buckets": shard, "ddp": MANY_BUCKETS}
        assert run_ranks(partial(_kinds, options=options), 3) == [[0.0] * 4] * 3
    options = {"interleaved": interleaved, "shard_buckets": True, "reduce_scatter": True, "ddp": MANY_BUCKETS}
    for differences in run_ranks(partial(_kinds, options=options), 3):
        assert max(differences) < 1e-2  # one bfloat16 rounding
    assert run_ranks(partial(_kinds_outside_of_a_hook, views=interleaved), 3) == [0.0] * 3


def _kinds_outside_of_a_hook(rank: int, world_size: int, views: bool) -> float:
    plain, shared = DistributedDataParallel(Kinds()), DistributedDataParallel(Kinds())
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    zero = ZeroRedundancyOptimizer(
        shared.parameters(), torch.optim.Adam, parameters_as_bucket_view=views, lr=0.01
    )
    for step in range(4):
        for model, stepper in ((plain, optimizer), (shared, zero)):
            stepper.zero_grad()
            model(batch(rank, step)).backward()
            stepper.step()
    return largest_difference(plain.parameters(), shared.parameters())


class Bag(nn.Module):
    """An embedding with sparse gradients and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.table, self.layer = nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table((inputs.abs() * 10).long() % 20))  # type: ignore[no-any-return]


def _sparse(rank: int, world_size: int) -> float:
    pair = Pair(Bag, "sgd", interleaved=True)
    for step in range(4):
        pair.step(batch(rank, step))
    return pair.difference()


def test_sparse_gradients() -> None:
    assert run_ranks(_sparse, 2) == [0.0] * 2


def _dominating() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 512), nn.Linear(512, 6), nn.Linear(6, 1))


@pytest.mark.parametrize("shard_buckets", [False, True])
def test_one_tensor_larger_than_all_others_and_fewer_tensors_than_ranks(shard_buckets: bool) -> None:
    cells: list[Cell] = [
        {"build": build, "shard_buckets": shard_buckets, "interleaved": interleaved}
        for build in (_dominating, _same_linear)
        for interleaved in (False, True)
    ]
    run_ranks(partial(_equal_at_every_step, cells=cells, steps=4), 4)


# State


def _consolidated(rank: int, world_size: int, hook: bool, start: Any) -> dict[str, Any] | None:
    """Three more steps from `start`; the plain optimizer's state must be the same."""
    plain, shared = (
        DistributedDataParallel(net(), **MANY_BUCKETS),
        DistributedDataParallel(net(), **MANY_BUCKETS),
    )
    optimizer = torch.optim.Adam(plain.module.named_parameters(), lr=0.01)
    zero = ZeroRedundancyOptimizer(
        shared.module.named_parameters(), torch.optim.Adam, overlap_with_ddp=hook, lr=0.01
    )
    if hook:
        shared.register_comm_hook(None, hook_with_zero_step(allreduce_hook, shared, zero))
    if start is not None:
        model_state, state = start
        plain.load_state_dict(model_state)
        shared.load_state_dict(model_state)
        optimizer.load_state_dict(state)
        zero.load_state_dict(state)
    for step in range(3):
        for model, stepper in ((plain, optimizer), (shared, zero)):
            stepper.zero_grad()
            model(batch(0, step)).pow(
                2
            ).sum().backward()  # the same data on every rank, so for any world size
            stepper.step()
    last = world_size - 1
    zero.consolidate_state_dict(to=last)
    if rank != last:
        with pytest.raises(RuntimeError, match=f"consolidated on rank {last} and this is rank {rank}"):
            zero.state_dict()
        return None
    ours, theirs = zero.state_dict(), optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert list(ours["state"]) == list(theirs["state"])
    for number, entries in theirs["state"].items():
        for name, value in entries.items():
            assert torch.equal(ours["state"][number][name], value)
    torch.optim.Adam(plain.parameters(), lr=1.0).load_state_dict(ours)
    return {"model": shared.state_dict(), "optimizer": ours}


@pytest.mark.parametrize("hook", [False, True])
def test_state_goes_to_a_plain_optimizer_and_back_at_other_world_sizes(hook: bool) -> None:
    saved = run_ranks(partial(_consolidated, hook=hook, start=None), 2)[-1]
    for world_size in (3, 1):
        start = (saved["model"], saved["optimizer"])
        saved = run_ranks(partial(_consolidated, hook=not hook, start=start), world_size)[-1]
    assert float(saved["optimizer"]["state"][0]["step"]) == 9


def _memory(rank: int, world_size: int, hook: bool) -> tuple[int, int]:
    """Bytes of this rank's state, and of the whole."""
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Linear(40, 40) for _ in range(24)])
    ddp = DistributedDataParallel(model, **MANY_BUCKETS)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, overlap_with_ddp=hook)
    if hook:
        ddp.register_comm_hook(None, hook_with_zero_step_interleaved(allreduce_hook, ddp, zero, True))
    for step in range(2):
        zero.zero_grad()
        ddp(batch(rank, step, width=40)).sum().backward()
        zero.step()
    own = sum(v.numel() * v.element_size() for state in zero.state.values() for v in state.values())
    return own, sum(2 * 4 * p.numel() + 4 for p in model.parameters())


@pytest.mark.parametrize("hook", [False, True])
def test_memory_is_a_share(hook: bool) -> None:
    results = run_ranks(partial(_memory, hook=hook), 4)
    assert sum(own for own, _ in results) == results[0][1]
    assert max(own for own, _ in results) <= 1.1 * results[0][1] / 4


# Wire


def _wire(rank: int, world_size: int, options: Cell) -> tuple[int, int, int]:
    torch.manual_seed(1)
    ddp = DistributedDataParallel(nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)]), bucket_cap_mb=0.05)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, overlap_with_ddp=True)
    options = dict(options)
    make = hook_with_zero_step_interleaved if options.pop("interleaved") else hook_with_zero_step
    ddp.register_comm_hook(None, make(allreduce_hook, ddp, zero, **options))
    counts = []
    for step in range(3):
        before = traffic.sent_bytes, traffic.received_bytes
        zero.zero_grad()
        ddp(batch(rank, step, width=64)).sum().backward()
        counts.append((traffic.sent_bytes - before[0], traffic.received_bytes - before[1]))
    return (*counts[-1], sum(4 * p.numel() for p in ddp.parameters()))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("reduce_scatter", [False, True])
def test_bytes_are_gradients_plus_parameters(interleaved: bool, reduce_scatter: bool) -> None:
    """All ranks together: a 2 (W-1) all-reduce, or (W-1) to owners, and (W-1) of parameters."""
    options = {"interleaved": interleaved, "reduce_scatter": reduce_scatter, "shard_buckets": True}
    results = run_ranks(partial(_wire, options=options), 4)
    parameter_bytes = results[0][2]
    expected = (2 if reduce_scatter else 3) * 3 * parameter_bytes
    for direction in (0, 1):
        assert sum(result[direction] for result in results) == pytest.approx(expected, rel=0.05)
        share = [result[direction] * 4 / expected for result in results]
        assert max(share) < 1.1, share


# Gradients to their owners only


def _reduce_scatter(rank: int, world_size: int, hook: str, interleaved: bool) -> list[Any]:
    wrapped = {"plain": allreduce_hook, "fp16": fp16_compress_hook, "bf16": bf16_compress_hook}[hook]
    plain = DistributedDataParallel(net(), **MANY_BUCKETS)
    if hook != "plain":
        plain.register_comm_hook(None, wrapped)
    ddp = DistributedDataParallel(net(), **MANY_BUCKETS)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.05)
    make = hook_with_zero_step_interleaved if interleaved else hook_with_zero_step
    ddp.register_comm_hook(None, make(wrapped, ddp, zero, True, reduce_scatter=True))
    worst = 0.0
    for step in range(4):
        optimizer.zero_grad()
        zero.zero_grad()
        plain(batch(rank, step)).pow(2).sum().backward()
        ddp(batch(rank, step)).pow(2).sum().backward()
        optimizer.step()
        for number, parameter in enumerate(zero.shards.parameters):
            assert (parameter.grad is not None) == (zero.shards.owners[number] == rank)
        worst = max(worst, largest_difference(plain.parameters(), ddp.parameters()))
    return [worst, torch.cat([p.detach().flatten() for p in ddp.parameters()])]


@pytest.mark.parametrize(("hook", "limit"), [("plain", 1e-6), ("fp16", 1e-3), ("bf16", 1e-2)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_go_to_their_owner_only(hook: str, limit: float, interleaved: bool) -> None:
    results = run_ranks(partial(_reduce_scatter, hook=hook, interleaved=interleaved), 3)
    assert all(worst < limit for worst, _ in results)
    assert all(torch.equal(parameters, results[0][1]) for _, parameters in results)


def _with_a_codec(rank: int, world_size: int, interleaved: bool) -> float:
    plain, ddp = (DistributedDataParallel(net(), **MANY_BUCKETS) for _ in range(2))
    plain.register_comm_hook(CompressedHookState("int8", min_elements=16), compressed_hook)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=0.01)
    make = hook_with_zero_step_interleaved if interleaved else hook_with_zero_step
    ddp.register_comm_hook(CompressedHookState("int8", min_elements=16), make(compressed_hook, ddp, zero))
    for step in range(6):
        for model, stepper in ((plain, optimizer), (ddp, zero)):
            stepper.zero_grad()
            model(batch(rank, step)).pow(2).sum().backward()
            stepper.step()
    return largest_difference(plain.parameters(), ddp.parameters())


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_codec_on_the_gradient_half(interleaved: bool) -> None:
    assert run_ranks(partial(_with_a_codec, interleaved=interleaved), 3) == [0.0] * 3


# Outside of a hook


def _outside(rank: int, world_size: int, views: bool) -> dict[str, Any]:
    plain, shared = DistributedDataParallel(net()), DistributedDataParallel(net())
    optimizer = OwnOptimizer(plain.parameters())
    zero = ZeroRedundancyOptimizer(shared.parameters(), OwnOptimizer, parameters_as_bucket_view=views)
    calls: list[str] = []
    zero.register_step_pre_hook(lambda *_: calls.append("before"))
    zero.register_step_post_hook(lambda *_: calls.append("after"))
    late = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer.add_param_group({"params": [late[0]], "lr": 0.5})
    zero.add_param_group({"params": [late[1]], "lr": 0.5})
    for step in range(3):
        for model, extra, stepper in ((plain, late[0], optimizer), (shared, late[1], zero)):
            inputs = batch(rank, step)

            def closure(
                model: Any = model, extra: Any = extra, stepper: Any = stepper, inputs: Any = inputs
            ) -> Any:
                stepper.zero_grad()
                loss = model(inputs).pow(2).sum()
                loss.backward()
                extra.grad = torch.full_like(extra, 2.0)
                return loss

            if stepper is zero:
                loss = zero.step(closure)
                assert loss is not None
                assert float(loss.detach()) > 0
            else:
                closure()
                optimizer.step()
    model_copy, zero_copy = copy.deepcopy((shared.module, zero))
    for parameters, stepper in (
        ([*plain.parameters(), late[0]], optimizer),
        ([*shared.parameters(), late[1]], zero),
        (list(model_copy.parameters()), zero_copy),
    ):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.25)
        stepper.step()
    assert torch.equal(*late)
    with pytest.raises(TypeError, match="can't be pickled"):
        zero.__getstate__()
    return {
        "difference": largest_difference(plain.parameters(), shared.parameters()),
        "copy": largest_difference(plain.parameters(), model_copy.parameters()),
        "calls": calls,
    }


@pytest.mark.parametrize("views", [False, True])
def test_the_optimizer_contract_outside_of_a_hook(views: bool) -> None:
    for result in run_ranks(partial(_outside, views=views), 3):
        assert result == {"difference": 0.0, "copy": 0.0, "calls": ["before", "after"] * 4}


def _views(rank: int, world_size: int) -> tuple[int, int]:
    ddp = DistributedDataParallel(net())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, parameters_as_bucket_view=True, lr=0.1)
    first = next(ddp.parameters())
    storages = {p.untyped_storage().data_ptr() for p in ddp.parameters()}
    first.data = first.detach().clone()  # somebody gives a parameter memory of its own
    version = first._version
    ddp(batch(rank, 0)).pow(2).sum().backward()
    zero.step()
    assert first._version > version
    return len(storages), len({p.untyped_storage().data_ptr() for p in ddp.parameters()})


def test_parameters_are_views_of_their_owners_buffer() -> None:
    assert run_ranks(_views, 2) == [(2, 2)] * 2


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
