"""post_localSGD_hook and PostLocalSGDOptimizer on real ranks."""

import copy
import io
import pickle
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tensorplay.compression.collective import traffic
from tensorplay.distributed.algorithms.ddp_comm_hooks import default_hooks
from tensorplay.distributed.algorithms.ddp_comm_hooks.compressed_hook import (
    CompressedHookState,
    compressed_hook,
)
from tensorplay.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from tensorplay.distributed.algorithms.ddp_comm_hooks.register import register_ddp_comm_hook
from tensorplay.distributed.algorithms.model_averaging import PeriodicModelAverager
from tensorplay.distributed.optim.post_localSGD_optimizer import (
    ModelAveragingOptimizer,
    PostLocalSGDOptimizer,
)
from tensorplay.testing import run_ranks


def _ddp(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), **options)


def _gradient_groups(
    rank: int, world_size: int, make: Any, hook: Any = post_localSGD_hook, bucket_cap_mb: float = 0.0001
) -> list[list[int]]:
    """Return, step by step, the ranks whose gradients were averaged into this rank's: rank r's is 4^r."""
    ddp = DistributedDataParallel(_Sum(), bucket_cap_mb=bucket_cap_mb)
    state = make()
    ddp.register_comm_hook(state, hook)
    seen = []
    for _ in range(5):
        ddp.zero_grad()
        (ddp(torch.ones(1)) * 4.0**rank).backward()
        values = {round(float(v), 3) for p in ddp.parameters() for v in p.grad.flatten()}
        assert len(values) == 1
        value = values.pop()
        for members in ([rank], [0, 1], [2, 3], [0, 1, 2, 3], [0, 2], [1, 3]):
            if rank in members and value == round(sum(4.0**m for m in members) / len(members), 3):
                seen.append(members)
                break
    assert state.iter == 5
    return seen


class _Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(64)) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((x * p).sum() for p in self.parts)


EVERYONE = [0, 1, 2, 3]


def _by_size() -> PostLocalSGDState:
    return PostLocalSGDState(None, None, 2, group_size=2)


def _by_subgroup() -> PostLocalSGDState:
    subgroup, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    return PostLocalSGDState(dist.group.WORLD, subgroup, 2)


def _alone() -> PostLocalSGDState:
    return PostLocalSGDState(None, None, 2, post_local_gradient_allreduce=False)


def _on_two_hosts() -> PostLocalSGDState:
    from tensorplay.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as module

    host = f"host {dist.get_rank() % 2}"
    module.host_identity = lambda: host
    return PostLocalSGDState(None, None, 2)


def _on_one_host() -> PostLocalSGDState:
    return PostLocalSGDState(None, None, 2)


def _with_fp16() -> PostLocalSGDState:
    return PostLocalSGDState(None, None, 2, group_size=2, hook=default_hooks.fp16_compress_hook)


def _from_the_start() -> PostLocalSGDState:
    return PostLocalSGDState(None, None, 0, group_size=2)


@pytest.mark.parametrize(
    ("make", "before", "after"),
    [
        (_by_size, EVERYONE, {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}),
        (_by_subgroup, EVERYONE, {0: [0, 2], 1: [1, 3], 2: [0, 2], 3: [1, 3]}),
        (_on_one_host, EVERYONE, dict.fromkeys(range(4), EVERYONE)),
        (_alone, EVERYONE, {r: [r] for r in range(4)}),
        (_with_fp16, EVERYONE, {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}),
        (_from_the_start, None, {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}),
    ],
)
def test_groups_before_and_after_the_switch(make: Any, before: Any, after: dict[int, list[int]]) -> None:
    runs = run_ranks(partial(_gradient_groups, make=make), 4)
    for rank, run in enumerate(runs):
        first = after[rank] if before is None else before
        assert run == [first, first, after[rank], after[rank], after[rank]]


def _hosts_in_turn(rank: int, world_size: int) -> list[list[int]]:
    from tensorplay.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as module

    found = module.host_identity
    try:
        return _gradient_groups(rank, world_size, _on_two_hosts)
    finally:
        module.host_identity = found


def test_subgroup_none_is_the_ranks_of_each_host() -> None:
    runs = run_ranks(_hosts_in_turn, 4)
    for rank, run in enumerate(runs):
        assert run[2:] == [[rank % 2, rank % 2 + 2]] * 3


@pytest.mark.parametrize(
    "wrapper", [default_hooks.fp16_compress_wrapper, default_hooks.bf16_compress_wrapper]
)
def test_cast_wrappers_cast_either_phase(wrapper: Any) -> None:
    runs = run_ranks(partial(_wrapped_bytes, wrapper=wrapper), 4)
    assert runs == [[192 * 2 * 2 * 3 // 4] * 2 + [192 * 2] * 2] * 4  # 2 bytes a value, 2 (n - 1) / n of them


def _wrapped_bytes(rank: int, world_size: int, wrapper: Any) -> list[int]:
    ddp = DistributedDataParallel(_Sum())
    ddp.register_comm_hook(_by_size(), wrapper(post_localSGD_hook))
    sent = []
    for _ in range(4):
        before = traffic.sent_bytes
        (ddp(torch.ones(1)) * 2.0).backward()
        sent.append(traffic.sent_bytes - before)
    return sent


def _compressed(rank: int, world_size: int) -> list[list[int]]:
    states: list[CompressedHookState] = []

    def make_hook_state(group: dist.ProcessGroup) -> CompressedHookState:
        states.append(CompressedHookState("int8", process_group=group, min_elements=0))
        return states[-1]

    def make() -> PostLocalSGDState:
        return PostLocalSGDState(
            None, None, 2, group_size=2, hook=compressed_hook, make_hook_state=make_hook_state
        )

    seen = _gradient_groups(rank, world_size, make)
    assert [state.process_group.size() for state in states] == [4, 2]
    return seen


def test_a_compressed_hook_exchanges_inside_either_group() -> None:
    for rank, run in enumerate(run_ranks(_compressed, 4)):
        pair = [0, 1] if rank < 2 else [2, 3]
        assert run == [EVERYONE, EVERYONE, pair, pair, pair]


def _saved_hook_states(rank: int, world_size: int) -> list[bool]:
    def fresh() -> tuple[DistributedDataParallel, PostLocalSGDState]:
        ddp = DistributedDataParallel(_Sum())
        state = PostLocalSGDState(
            None,
            None,
            3,
            group_size=2,
            hook=compressed_hook,
            make_hook_state=partial(CompressedHookState, "int4", min_elements=0),
        )
        register_ddp_comm_hook(post_localSGD_hook, ddp, state)
        return ddp, state

    def gradients(ddp: DistributedDataParallel, steps: range) -> list[torch.Tensor]:
        found = []
        for step in steps:
            ddp.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + rank)
            ddp(torch.randn(64, generator=generator)).backward()
            found.append(torch.cat([p.grad.flatten() for p in ddp.parameters()]).clone())
        return found

    ddp, _ = fresh()
    expected = gradients(ddp, range(8))
    outcomes = []
    for stop in (2, 5):
        ddp, state = fresh()
        gradients(ddp, range(stop))
        stream = io.BytesIO()
        torch.save(state.state_dict(), stream)
        stream.seek(0)
        ddp, state = fresh()
        state.load_state_dict(torch.load(stream, weights_only=True))
        again = gradients(ddp, range(stop, 8))
        outcomes.append(all(torch.equal(a, b) for a, b in zip(again, expected[stop:], strict=True)))
    return outcomes


def test_states_of_a_compressed_hook_are_saved_with_it() -> None:
    assert run_ranks(_saved_hook_states, 4) == [[True, True]] * 4


def _like_ddp_before_the_switch(rank: int, world_size: int) -> bool:
    found = []
    for register in (False, True):
        ddp = _ddp()
        if register:
            ddp.register_comm_hook(PostLocalSGDState(None, None, 100), post_localSGD_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(5):
            optimizer.zero_grad()
            torch.manual_seed(10 * step + rank)
            ddp(torch.randn(8, 4)).square().sum().backward()
            optimizer.step()
        found.append([p.detach().clone() for p in ddp.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_before_the_switch_it_is_ddp_bit_for_bit() -> None:
    assert run_ranks(_like_ddp_before_the_switch, 3) == [True] * 3


def _explicit_steps(rank: int, world_size: int) -> list[int]:
    ddp = _ddp()
    state = PostLocalSGDState(None, None, 100)
    ddp.register_comm_hook(state, post_localSGD_hook)
    counts = []
    for _ in range(3):
        for _ in range(2):
            ddp(torch.ones(1, 4)).sum().backward()
        state.step()
        counts.append(state.iter)
    return counts


def test_steps_may_be_counted_explicitly() -> None:
    assert run_ranks(_explicit_steps, 2) == [[1, 2, 3]] * 2


def _bad_states(rank: int, world_size: int) -> list[str]:
    texts = []
    for error, make in (
        (ValueError, lambda: PostLocalSGDState(None, None, -1)),
        (TypeError, lambda: PostLocalSGDState(None, None, 2.5)),
        (ValueError, lambda: PostLocalSGDState(None, None, 2, group_size=0)),
        (ValueError, lambda: PostLocalSGDState(None, dist.group.WORLD, 2, group_size=1)),
        (TypeError, lambda: PostLocalSGDState(None, None, 2, make_hook_state=lambda group: group)),
        (ValueError, lambda: PostLocalSGDState(None, None, 2, group_size=3).local_group()),
        (TypeError, lambda: PostLocalSGDOptimizer(PeriodicModelAverager(2), PeriodicModelAverager(2))),
        (TypeError, lambda: PostLocalSGDOptimizer(torch.optim.SGD([torch.ones(1)], lr=1.0), None)),
    ):
        with pytest.raises(error) as raised:
            make()
        texts.append(str(raised.value))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with pytest.raises(ValueError, match="other ranks would have to take part"):
        PostLocalSGDState(pairs[rank // 2], None, 2, group_size=1).local_group()
    assert PostLocalSGDState(pairs[rank // 2], None, 2, group_size=2).local_group() is pairs[rank // 2]
    return texts


def test_bad_states_are_named() -> None:
    said = [
        "got -1",
        "2.5",
        "got 0",
        "not both",
        "hook=",
        "divide the 4 ranks",
        "PeriodicModelAverager",
        "NoneType",
    ]
    for text, part in zip(run_ranks(_bad_states, 4)[0], said, strict=True):
        assert part in text


def _optimizer(averager: Any = None, **options: Any) -> tuple[nn.Module, PostLocalSGDOptimizer]:
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})
    return model, PostLocalSGDOptimizer(inner, averager or PeriodicModelAverager(3))


def _contract(rank: int, world_size: int) -> None:
    model, optimizer = _optimizer(PeriodicModelAverager(3, warmup_steps=3), lr=0.01)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is optimizer.optim.param_groups
    assert optimizer.state is optimizer.optim.state
    assert optimizer.defaults is optimizer.optim.defaults
    assert "momentum: 0.9" in repr(optimizer)

    calls = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: calls.append("before"))
    optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append("after"))
    optimizer.optim.register_step_post_hook(lambda o, args, kwargs: calls.append("inner"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 2)).square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert first.item() > optimizer.step(closure).item() > 0
    assert calls == ["before", "inner", "after"] * 2
    assert optimizer.averager.step == 2

    optimizer.zero_grad(set_to_none=False)
    assert model.weight.grad is not None
    assert not model.weight.grad.any()
    optimizer.zero_grad()
    assert model.weight.grad is None

    extra = nn.Parameter(torch.full((2,), float(rank)))
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    assert optimizer.param_groups[1] is optimizer.optim.param_groups[1]
    optimizer.step()
    optimizer.step()  # the fourth call averages, without a gradient as well
    assert extra.tolist() == [(world_size - 1) / 2] * 2

    saved_hooks = []
    optimizer.register_state_dict_pre_hook(lambda o: saved_hooks.append("save"))
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, state: saved_hooks.append(state.pop("extra")))
    optimizer.register_load_state_dict_post_hook(lambda o: saved_hooks.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert saved_hooks == ["save", 1, "loaded"]
    assert ModelAveragingOptimizer is PostLocalSGDOptimizer


def test_the_optimizer_contract() -> None:
    run_ranks(_contract, 2)


def _schedulers(rank: int, world_size: int) -> None:
    _, optimizer = _optimizer()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    rates = []
    for _ in range(9):
        optimizer.step()
        scheduler.step()
        assert optimizer.optim.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        rates.append(optimizer.param_groups[0]["lr"])
    assert max(rates) == pytest.approx(1.0)
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.95)
    inner_scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optim, 1, gamma=0.5)
    before = optimizer.param_groups[0]["lr"]
    optimizer.step()
    inner_scheduler.step()
    assert optimizer.param_groups[0]["lr"] == before / 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, late = _optimizer()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(late, patience=0)
        for loss in (1.0, 1.0, 1.0):
            late.step()
            plateau.step(loss)
    assert late.param_groups[0]["lr"] < 0.1


def test_learning_rate_schedulers() -> None:
    run_ranks(_schedulers, 2)


def _copied(rank: int, world_size: int) -> None:
    model, optimizer = _optimizer()
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    for copied_model, copied in (
        copy.deepcopy((model, optimizer)),
        pickle.loads(pickle.dumps((model, optimizer))),
    ):
        assert copied.param_groups[0]["params"][0] is copied_model.weight
        assert copied.averager is not optimizer.averager
        assert copied.averager.step == 2
        before = model.weight.clone()
        copied_model.weight.grad = torch.ones(1, 2)
        copied.step()
        copied.step()
        assert torch.equal(model.weight, before)
        both = [torch.empty_like(before) for _ in range(world_size)]
        dist.all_gather(both, copied_model.weight.detach())
        assert torch.equal(*both)
    assert optimizer.averager.step == 2


def test_copies_and_pickles_are_independent() -> None:
    run_ranks(_copied, 2)


def _loads_what_others_saved(rank: int, world_size: int) -> list[int]:
    model, optimizer = _optimizer()
    model.weight.grad = torch.ones(1, 2)
    for _ in range(2):
        optimizer.step()
    saved = optimizer.state_dict()
    steps = []
    _, other = _optimizer()
    other.load_state_dict(
        {key: value for key, value in saved.items() if key != "averager"}
    )  # as torch saves it
    steps.append(other.averager.step)
    with pytest.warns(UserWarning, match="starts again at step 0"):
        other.load_state_dict(optimizer.optim.state_dict())
    steps.append(other.averager.step)
    assert "momentum_buffer" in next(iter(other.state.values()))
    return steps


def test_state_dicts_of_torch_and_of_the_bare_optimizer() -> None:
    assert run_ranks(_loads_what_others_saved, 1) == [[2, 0]]


def _clipped(rank: int, world_size: int, unscale: bool) -> float:
    model, optimizer = _optimizer(momentum=0.0, lr=1.0)
    with torch.no_grad():
        model.weight.zero_()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    if unscale:
        scaler.unscale_(optimizer)
        assert model.weight.grad.tolist() == [[1.0, 1.0]]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5 * 3**0.5)
    scaler.step(optimizer)
    scaler.update()
    return model.weight[0, 0].item()


@pytest.mark.parametrize(("unscale", "moved"), [(False, -1.0), (True, -0.5)])
def test_grad_scaler_with_and_without_unscale(unscale: bool, moved: float) -> None:
    assert run_ranks(partial(_clipped, unscale=unscale), 2) == pytest.approx([moved] * 2, rel=1e-5)


def _fused(rank: int, world_size: int) -> list[bool]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    inner = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    optimizer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(2, warmup_steps=10))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    moved = []
    for value in (1.0, float("inf"), 1.0):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale(model(torch.full((1, 2), value)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        moved.append(not torch.equal(before, model.weight))
        assert torch.isfinite(model.weight).all()
    assert scaler.get_scale() == 512.0
    assert optimizer.averager.step == 3
    return moved


def test_grad_scaler_with_a_fused_optimizer() -> None:
    assert run_ranks(_fused, 1) == [[True, False, True]]


def _refusals(rank: int, world_size: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    half = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD([half], lr=0.1), PeriodicModelAverager(2))
    scaler.scale(half.sum()).backward()
    with pytest.raises(ValueError, match="float16 gradients"):
        scaler.step(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    model, optimizer = _optimizer()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    with pytest.raises(RuntimeError, match="closure"):
        scaler.step(optimizer, lambda: None)


def test_what_a_grad_scaler_refuses() -> None:
    run_ranks(_refusals, 1)
