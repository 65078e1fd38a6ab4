"""Faults F22 to F24, F30 to F35 and F42: what users met in local SGD elsewhere does not happen here."""

import copy
import io
import pickle
from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from tensorplay.distributed.algorithms.join import Join
from tensorplay.distributed.algorithms.model_averaging import (
    DiLoCoAverager,
    HierarchicalModelAverager,
    PeriodicModelAverager,
)
from tensorplay.distributed.optim.post_localSGD_optimizer import PostLocalSGDOptimizer
from tensorplay.testing import run_ranks


def _same_everywhere(tensors: Any) -> bool:
    flat = torch.cat([t.detach().flatten() for t in tensors])
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    return all(torch.equal(every[0], other) for other in every)


# F22: state serialises, counter goes on


def _step(ddp: nn.Module) -> None:
    ddp.zero_grad()
    ddp(torch.ones(2, 4)).sum().backward()


def _state_round_trip(rank: int, world_size: int, way: str) -> list[int]:
    subgroup, _ = dist.new_subgroups(group_size=2)
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    state = PostLocalSGDState(dist.group.WORLD, subgroup, 2)
    ddp.register_comm_hook(state, post_localSGD_hook)
    for _ in range(5):
        _step(ddp)
    counts = [state.iter]
    stream = io.BytesIO()
    if way == "object":
        torch.save(state, stream)
        stream.seek(0)
        loaded = torch.load(stream, weights_only=False)
        assert loaded.subgroup is None
        assert loaded.start_localSGD_iter == 2
        assert dist.get_process_group_ranks(loaded.local_group()) == dist.get_process_group_ranks(subgroup)
    elif way == "rank 0's object":
        box = [pickle.dumps(state) if rank == 0 else None]
        dist.broadcast_object_list(box)
        loaded = pickle.loads(box[0])
        assert dist.get_process_group_ranks(loaded.local_group()) == dist.get_process_group_ranks(subgroup)
    elif way == "copy":
        loaded = copy.deepcopy(state)
        assert loaded.subgroup is subgroup
    else:
        torch.save(state.state_dict(), stream)
        stream.seek(0)
        loaded = PostLocalSGDState(None, subgroup, 2)
        loaded.load_state_dict(torch.load(stream, weights_only=True))
    again = DistributedDataParallel(nn.Linear(4, 2))
    again.register_comm_hook(loaded, post_localSGD_hook)
    _step(again)
    return [*counts, loaded.iter]


@pytest.mark.parametrize("way", ["object", "rank 0's object", "copy", "state_dict"])
def test_f22_state_with_a_subgroup_serialises_and_goes_on_counting(way: str) -> None:
    assert run_ranks(partial(_state_round_trip, way=way), 4) == [[5, 6]] * 4


def _scattered_subgroup(rank: int, world_size: int) -> None:
    subgroup, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    state = PostLocalSGDState(None, subgroup, 2)
    own = pickle.loads(pickle.dumps(state))
    assert dist.get_process_group_ranks(own.local_group()) == ([0, 3] if rank in (0, 3) else [1, 2])
    box = [pickle.dumps(state) if rank == 0 else None]
    dist.broadcast_object_list(box)
    with pytest.raises(ValueError, match=r"ranks \[1, 2\] know no subgroup"):
        pickle.loads(box[0]).local_group()  # on all ranks, not only on those two


def test_f22_a_subgroup_that_follows_no_rule_belongs_to_its_ranks() -> None:
    run_ranks(_scattered_subgroup, 4)


# F23: one list of parameter groups, also after load_state_dict


def _scheduler_after_load(rank: int, world_size: int) -> list[float]:
    param = nn.Parameter(torch.ones(1))
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD([param], lr=1.0), PeriodicModelAverager(2))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    moved = []
    for _ in range(2):
        before = param.item()
        param.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()
        moved.append(round(before - param.item(), 6))
    return moved


def test_f23_schedulers_work_after_load_state_dict() -> None:
    assert run_ranks(_scheduler_after_load, 2) == [[1.0, 0.1]] * 2


# F24: the whole Optimizer contract


def _optimizer_contract(rank: int, world_size: int) -> None:
    param = nn.Parameter(torch.ones(1))
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD([param], lr=1.0, momentum=0.9), PeriodicModelAverager(2)
    )
    assert optimizer.defaults["momentum"] == 0.9
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=5)
    seen = []
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(o))

    def closure() -> torch.Tensor:
        param.grad = torch.ones(1)
        return param.sum()

    assert optimizer.step(closure).item() == 1.0
    assert seen == [optimizer]
    copied = copy.deepcopy(optimizer)
    assert copied.param_groups[0]["params"][0] is not param
    assert copied.averager.step == 1


def test_f24_defaults_closure_copy_one_cycle_and_hooks() -> None:
    run_ranks(_optimizer_contract, 2)


# F30: a step that GradScaler skips on one rank


def _skipped_on_one_rank(rank: int, world_size: int, make: Any, skipped: list[int]) -> list[bool]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), make(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    same = []
    for step in range(9):
        inputs = torch.full((1, 3), rank + 1.0)
        if rank == 0 and step in skipped:
            inputs[0, 1] = float("inf")
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale(model(inputs).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.isfinite(model.weight).all()
        if rank == 0 and step in skipped and step % 4:
            assert torch.equal(before, model.weight)
        same.append(_same_everywhere(model.parameters()))
    assert optimizer.averager.step == 9
    assert scaler.get_scale() == 256.0 / 2 ** (len(skipped) if rank == 0 else 0)
    return same


def _periodic(model: nn.Module) -> PeriodicModelAverager:
    return PeriodicModelAverager(4)


def _diloco(model: nn.Module) -> DiLoCoAverager:
    return DiLoCoAverager(model, period=4)


@pytest.mark.parametrize("skipped", [[1], [4], [0, 4, 5]])
@pytest.mark.parametrize("make", [_periodic, _diloco])
def test_f30_a_skipped_step_does_not_unsettle_the_schedule(make: Any, skipped: list[int]) -> None:
    same = run_ranks(partial(_skipped_on_one_rank, make=make, skipped=skipped), 2)
    assert same == [[step % 4 == 0 for step in range(9)]] * 2


# F31: all ranks average the same set


def _different_unused(rank: int, world_size: int) -> list[float]:
    a, b, frozen = (nn.Parameter(torch.tensor(float(rank))) for _ in range(3))
    frozen.requires_grad_(False)
    (b if rank == 0 else a).grad = torch.tensor(0.0)
    PeriodicModelAverager(2).average_parameters([a, b, frozen])
    return [a.item(), b.item(), frozen.item()]


def test_f31_ranks_with_different_unused_parameters_average_all() -> None:
    assert run_ranks(_different_unused, 2) == [[0.5, 0.5, 0.0], [0.5, 0.5, 1.0]]


def _nothing_to_average(rank: int, world_size: int) -> int:
    averager = PeriodicModelAverager(2)
    averager.average_parameters([])
    averager.average_parameters(nn.ReLU())
    averager.average_parameters([nn.Parameter(torch.ones(1), requires_grad=False)])
    return averager.step


def test_f31_an_empty_set_is_no_fault() -> None:
    assert run_ranks(_nothing_to_average, 2) == [3, 3]


# F32: BatchNorm statistics


def _batch_norm(rank: int, world_size: int, average_buffers: bool) -> list[float]:
    norm = nn.BatchNorm1d(1, momentum=1.0)
    averager = PeriodicModelAverager(2, module=norm, average_buffers=average_buffers)
    norm(torch.tensor([[0.0], [2.0]]) + 10.0 * rank)  # mean 1 and 11, unbiased variance 2 on both
    averager.average_parameters(norm.parameters())
    return [norm.running_mean.item(), norm.running_var.item(), norm.num_batches_tracked.item()]


def test_f32_batch_norm_statistics_are_averaged_on_demand() -> None:
    assert run_ranks(partial(_batch_norm, average_buffers=True), 2) == [[6.0, 2.0, 1]] * 2
    assert run_ranks(partial(_batch_norm, average_buffers=False), 2) == [[1.0, 2.0, 1], [11.0, 2.0, 1]]


# F33: storage and strides


def _storage(rank: int, world_size: int) -> tuple[int, bool, bool]:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(64, 2000)).to(memory_format=torch.channels_last)
    addresses = [p.data_ptr() for p in model.parameters()]
    PeriodicModelAverager(2).average_parameters(model.parameters())
    stream = io.BytesIO()
    torch.save(model[0].bias, stream)
    return (
        len(stream.getvalue()),
        model[0].weight.is_contiguous(memory_format=torch.channels_last),
        addresses == [p.data_ptr() for p in model.parameters()],
    )


def test_f33_averaging_keeps_storage_and_memory_format() -> None:
    for saved_bytes, channels_last, in_place in run_ranks(_storage, 2):
        assert saved_bytes < 5000
        assert channels_last
        assert in_place


# F34: warm-up and levels of the hierarchical averager


def _first_averaging(rank: int, world_size: int, make: Any) -> list[int]:
    averager = make()
    averaged = []
    for step in range(13):
        param = nn.Parameter(torch.tensor(float(rank)))
        averager.average_parameters([param])
        if param.item() == 0.5:
            averaged.append(step)
    return averaged


def test_f34_one_rule_for_both_averagers() -> None:
    periodic = run_ranks(partial(_first_averaging, make=partial(PeriodicModelAverager, 4, 3)), 2)
    make = partial(HierarchicalModelAverager, {4: 2}, 3, phase="warmup")
    assert run_ranks(partial(_first_averaging, make=make), 2) == periodic == [[3, 7, 11]] * 2


def _bad_levels(rank: int, world_size: int) -> list[str]:
    texts = []
    for levels in (
        {},
        {0: 4},
        {2: 0, 4: 4},
        {-2: 4},
        {4: 2, 2: 4},
        {2: 4, 4: 2},
        {2: 3, 4: 4},
        {2: 2},
        {2.0: 4},
        {2: True, 4: 4},
    ):
        with pytest.raises((ValueError, TypeError)) as raised:
            HierarchicalModelAverager(OrderedDict(levels))
        texts.append(str(raised.value))
    for options in ({"phase": "late"}, {"warmup_steps": -1}):
        with pytest.raises(ValueError, match=r"phase|warmup_steps"):
            HierarchicalModelAverager({2: 4}, **options)
    return texts


def test_f34_levels_are_checked_at_construction() -> None:
    texts = run_ranks(_bad_levels, 4)[0]
    said = [
        "empty",
        "got 0",
        "got 0",
        "got -2",
        "ascend",
        "divide",
        "divide",
        "size of process_group",
        "2.0",
        "True",
    ]
    for text, part in zip(texts, said, strict=True):
        assert part in text


# F35: subgroup=None without CUDA


def _default_subgroup(rank: int, world_size: int) -> int:
    ddp = DistributedDataParallel(nn.Linear(4, 2), bucket_cap_mb=0.00001)
    state = PostLocalSGDState(None, None, 1)
    ddp.register_comm_hook(state, post_localSGD_hook)
    for _ in range(3):
        _step(ddp)
    return state.local_group().size()


def test_f35_subgroup_none_works_on_cpu() -> None:
    assert run_ranks(_default_subgroup, 2) == [2, 2]


# F42: inside Join


class _Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(10.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def _joined(rank: int, world_size: int, batches: list[int], kind: str, torch_join: bool) -> list[float]:
    ddp = DistributedDataParallel(_Weight())
    inner = torch.optim.SGD(ddp.parameters(), lr=0.1)
    averager: Any = PeriodicModelAverager(2, module=ddp)
    if kind == "diloco":
        averager = DiLoCoAverager(ddp, partial(torch.optim.SGD, lr=1.0), period=2)
    optimizer = PostLocalSGDOptimizer(inner, averager)
    join = torch.distributed.algorithms.Join if torch_join else Join
    with join([ddp, averager if kind == "averager" else optimizer]):
        for _ in range(batches[rank]):
            optimizer.zero_grad()
            ddp(torch.tensor(rank + 1.0)).backward()
            if kind == "averager":
                inner.step()
                averager.average_parameters(ddp.parameters())
            else:
                optimizer.step()
    total = torch.ones(1)
    dist.all_reduce(total)  # nothing is left on
    assert total.item() == world_size
    return [round(ddp.module.weight.item(), 4), averager.step]


def _expected(batches: list[int]) -> list[float]:
    """Rank r's gradient is r + 1, DDP divides by all ranks; a joined rank averages its last parameter."""
    weights = [10.0] * len(batches)
    for step in range(max(batches)):
        active = [r for r, n in enumerate(batches) if n > step]
        gradient = sum(r + 1.0 for r in active) / len(batches)
        for r in active:
            weights[r] -= 0.1 * gradient
        if step % 2 == 0:
            weights = [sum(weights) / len(weights)] * len(weights)
    last = max(r for r, n in enumerate(batches) if n == max(batches))
    return [round(weights[last], 4), max(batches)]


@pytest.mark.parametrize("torch_join", [False, True], ids=["ours", "torch's"])
@pytest.mark.parametrize("kind", ["averager", "optimizer", "diloco"])
@pytest.mark.parametrize("batches", [[2, 4], [0, 3], [1, 2, 5]], ids=str)
def test_f42_averagers_work_in_join(batches: list[int], kind: str, torch_join: bool) -> None:
    runs = run_ranks(partial(_joined, batches=batches, kind=kind, torch_join=torch_join), len(batches))
    assert runs == [_expected(batches)] * len(batches)


def _unbound(rank: int, world_size: int) -> str:
    averager = PeriodicModelAverager(2)
    with pytest.raises(RuntimeError) as raised:
        averager.join_hook().main_hook()
    return str(raised.value)


def test_f42_a_rank_that_never_stepped_says_what_it_needs() -> None:
    assert "averager.bind(params)" in run_ranks(_unbound, 1)[0]


def _both_in_join(rank: int, world_size: int) -> None:
    model = nn.Linear(1, 1)
    averager = PeriodicModelAverager(2)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    with pytest.raises(ValueError, match="pass the optimizer alone"), Join([optimizer, averager]):
        optimizer.step()


def test_f42_optimizer_and_averager_together_are_refused() -> None:
    run_ranks(_both_in_join, 2)


def _accumulating(rank: int, world_size: int) -> list[float]:
    ddp = DistributedDataParallel(_Weight())
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(ddp.parameters(), lr=0.1), PeriodicModelAverager(2, module=ddp)
    )
    with Join([ddp, optimizer]):
        for _ in range([1, 3][rank]):
            optimizer.zero_grad()
            with ddp.no_sync():
                ddp(torch.tensor(1.0)).backward()
            ddp(torch.tensor(1.0)).backward()
            optimizer.step()
    return [optimizer.averager.step, round(ddp.module.weight.item(), 4)]


def test_f42_accumulation_under_no_sync_counts_as_one_step() -> None:
    # 10 - 0.2 = 9.8; then rank 1 alone: gradient 2 / 2: 9.7; 9.6 averaged with 9.8
    assert run_ranks(_accumulating, 2) == [[3, 9.7]] * 2
