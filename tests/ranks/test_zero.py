"""The sharded optimizer on real ranks: equal to the whole optimizer, its contract, state and memory."""

import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tensorplay.nn.parallel
from tensorplay.compression.driver import lane_for
from tensorplay.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from tensorplay.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
)
from tensorplay.distributed.optim import _zero_exchange
from tensorplay.distributed.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from tensorplay.testing import run_ranks
from tests.ranks.zero import (
    MANY_BUCKETS,
    ONE_BUCKET,
    OPTIMIZERS,
    OwnOptimizer,
    Pair,
    batch,
    equal_at_every_step,
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


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_equal_to_the_whole_optimizer_at_every_step(world_size: int) -> None:
    """Each optimizer meets every pair of option values over the three world sizes."""
    cells = _cells()
    chosen = [
        {"optimizer": name, **cell}
        for place, name in enumerate(OPTIMIZERS)
        for cell in cells[(place + world_size) % 4 :: 4]
    ]
    results = run_ranks(partial(equal_at_every_step, cells=chosen, steps=20), world_size, timeout_seconds=150)
    assert results == [len(chosen) * 20] * world_size


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_equal_to_the_whole_optimizer_in_every_cell(world_size: int) -> None:
    updates = ("in_backward", "after_backward")
    cells = [
        {"optimizer": name, "update": update, **cell}
        for name in OPTIMIZERS
        for update in updates
        for cell in _cells()
    ]
    run_ranks(partial(equal_at_every_step, cells=cells, steps=20), world_size, timeout_seconds=900)


def test_gradients_that_are_views_of_buckets() -> None:
    cells = [
        {
            "interleaved": interleaved,
            "update": update,
            "ddp": {"gradient_as_bucket_view": True, **MANY_BUCKETS},
        }
        for interleaved in (False, True)
        for update in ("in_backward", "after_backward")
    ]
    run_ranks(partial(equal_at_every_step, cells=cells, steps=6), 3)


@pytest.mark.parametrize("interleaved", [False, True])
def test_updates_after_backward_are_equal_too(interleaved: bool) -> None:
    cells = [
        {"interleaved": interleaved, "update": "after_backward", "ddp": ddp, "shard_buckets": shard}
        for ddp in (MANY_BUCKETS, {"static_graph": True, **MANY_BUCKETS})
        for shard in (False, True)
    ]
    run_ranks(partial(equal_at_every_step, cells=cells, steps=6), 2)


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
