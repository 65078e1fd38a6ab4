"""The "auto" hook on real ranks: it ends in a choice, alike everywhere, and loses nothing on the way."""

import io
import logging
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tensorplay.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    _auto_choice,
    auto_hook,
    register_ddp_comm_hook,
)
from tensorplay.distributed.algorithms.ddp_comm_hooks.auto_hook import AutoState
from tensorplay.distributed.algorithms.join import Join
from tensorplay.nn.parallel import DistributedDataParallel
from tensorplay.testing import run_ranks
from tests.conformance.suite import same_everywhere

#: Steps until a candidate that is kept is settled: 2 + 1 plain, the one that decides, 2 + 1 on trial, one that decides.
QUICK = {"min_bytes": 1000, "plain_steps": 1, "check_steps": 1}
SETTLED_AFTER = 8


class Wide(nn.Module):
    """Four layers, several buckets."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(4))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def wrapped(model: nn.Module, state: AutoState | None = None, **options: Any) -> tuple[Any, AutoState]:
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.05, **options)
    handle = register_ddp_comm_hook("auto", ddp, state)
    return ddp, handle.state


def steps(ddp: Any, model: nn.Module, rank: int, count: int, first: int = 0) -> torch.Tensor:
    """Train, checking after every step that replicas are equal; returns the sum of all exact means minus results."""
    owed = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dtype = next(model.parameters()).dtype
    for step in range(first, first + count):
        x = torch.randn(4, 96, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)
        twin = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
        exact = torch.cat([g.reshape(-1).double() for g in twin])
        dist.all_reduce(exact)
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        got = torch.cat([p.grad.reshape(-1).double() for p in model.parameters() if p.grad is not None])
        owed += exact / dist.get_world_size() - got
        optimizer.step()
        same_everywhere(list(model.parameters()), f"step {step}")
    return owed


def fixed(predictions: dict[str, float], plain: float = 1.0) -> Any:
    """A stand-in for the measurement, so that a test decides what is chosen."""
    return lambda seen, noted, names, group: _auto_choice.Choice(plain, {n: predictions[n] for n in names})


def real_run(rank: int, world_size: int) -> tuple[str, str, dict[str, float], dict[str, float]]:
    model = Wide()
    ddp, state = wrapped(model, AutoState(**QUICK))
    assert (state.choice, state.is_settled) == ("allreduce", False)
    steps(ddp, model, rank, 20)
    assert state.is_settled
    return state.choice, state.reason, state.predictions, state.measured


@pytest.mark.parametrize("world_size", [2, 3])
def test_it_measures_and_ends_in_one_choice_on_all_ranks(world_size: int) -> None:
    answers = run_ranks(real_run, world_size)
    assert all(answer == answers[0] for answer in answers)
    choice, reason, predictions, measured = answers[0]
    assert choice in ("allreduce", "fp16_compress", "int8", "int4")
    assert sorted(predictions) == ["fp16_compress", "int4", "int8"]
    assert all(seconds > 0 for seconds in [*predictions.values(), *measured.values()])
    assert "allreduce" in measured
    assert "s a step" in reason


def forced(rank: int, world_size: int, dtype: torch.dtype, keeps: bool) -> tuple[str, str, float]:
    """int8 is predicted best; whether it is kept depends on what plain all-reduce is said to have taken."""
    auto_hook.choose = fixed({"int8": 1e-9}, plain=1e9 if keeps else 1e-9 / 0.9)
    try:
        model = Wide(dtype)
        ddp, state = wrapped(model, AutoState(candidates=["int8"], **QUICK))
        owed = steps(ddp, model, rank, 14)
    finally:
        auto_hook.choose = _auto_choice.choose
    left = torch.zeros_like(owed)
    start = 0
    folded = state.fold(state.state_dict())
    for name, parameter in model.named_parameters():
        if name in folded:
            left[start : start + parameter.numel()] = folded[name]["residual"].reshape(-1).double()
        start += parameter.numel()
    dist.all_reduce(left)
    assert state.is_settled
    return state.choice, state.reason, float((owed - left / world_size).abs().max())


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("keeps", [True, False])
def test_nothing_is_lost_when_a_codec_comes_or_goes(keeps: bool, world_size: int) -> None:
    for choice, reason, lost in run_ranks(partial(forced, dtype=torch.float32, keeps=keeps), world_size):
        assert choice == ("int8" if keeps else "allreduce")
        assert ("int8 takes" in reason) if keeps else ("on trial none was 3 % faster" in reason)
        assert lost < 1e-6


def test_a_bfloat16_model_switches_and_stays_equal() -> None:
    for choice, _, _ in run_ranks(partial(forced, dtype=torch.bfloat16, keeps=True), 2):
        assert choice == "int8"


def early(rank: int, world_size: int) -> list[str]:
    reasons = []
    for settings in ({}, {"min_bytes": 0, "max_risk": "safe", "candidates": ["int8"]}):
        model = Wide()
        ddp, state = wrapped(model, AutoState(**settings))
        steps(ddp, model, rank, 3)
        assert state.is_settled
        assert state.choice == "allreduce"
        reasons.append(state.reason)
    return reasons


def test_where_no_codec_can_pay_nothing_is_measured() -> None:
    for reasons in run_ranks(early, 2):
        assert "148992 bytes of gradients are fewer than min_bytes=1000000" in reasons[0]
        assert "no candidate is within max_risk" in reasons[1]
    (reasons,) = run_ranks(early, 1)
    assert "one rank" in reasons[0]


def logged(rank: int, world_size: int) -> list[str]:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.INFO:
                lines.append(record.getMessage())

    logger, handler = logging.getLogger(auto_hook.__name__), Keep()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    auto_hook.choose = fixed({"int8": 2.0, "int4": 1.0}, plain=1e9)
    try:
        model = Wide()
        ddp, _ = wrapped(model, AutoState(candidates=["int8", "int4"], **QUICK))
        steps(ddp, model, rank, SETTLED_AFTER)
    finally:
        auto_hook.choose = _auto_choice.choose
        logger.removeHandler(handler)
        logger.setLevel(level)
    return lines


def test_rank_0_logs_what_and_why() -> None:
    first, second = run_ranks(logged, 2)
    assert second == []
    assert len(first) == 2
    assert "int4 is predicted to take 1.000 s a step" in first[0]
    assert "chose int4" in first[1]


def resumed(rank: int, world_size: int) -> None:
    auto_hook.choose = fixed({"int8": 1e-9}, plain=1e9)
    try:
        model = Wide()
        ddp, state = wrapped(model, AutoState(candidates=["int8"], **QUICK))
        steps(ddp, model, rank, 10)
        saved = io.BytesIO()
        torch.save({"model": model.state_dict(), "hook": state.state_dict()}, saved)
        steps(ddp, model, rank, 4, first=10)
    finally:
        auto_hook.choose = _auto_choice.choose
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    again = Wide()
    ddp, other = wrapped(again, AutoState(candidates=["int8"], **QUICK))
    again.load_state_dict(loaded["model"])
    other.load_state_dict(loaded["hook"])
    assert (other.choice, other.is_settled, other.reason) == ("int8", True, state.reason)
    steps(ddp, again, rank, 4, first=10)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match=rf"rank {rank}'s state is missing"):
        other.load_state_dict({**loaded["hook"], "rank": 1 - rank})
    with pytest.raises(ValueError, match="saved by 3 ranks, this group has 2"):
        other.load_state_dict({**loaded["hook"], "world_size": 3})
    with pytest.raises(ValueError, match="not a state of the auto hook"):
        other.load_state_dict({"format": "other"})


def test_a_resumed_run_keeps_the_choice_and_the_bits() -> None:
    run_ranks(resumed, 2)


def fewer(rank: int, world_size: int) -> None:
    """Three ranks' states come to two: the choice is open again, and what was owed is paid in the first step."""
    states = []
    total = torch.zeros(96 * 96)
    for old in range(3):
        residual = torch.full((96 * 96,), float(old + 1))
        total += residual
        states.append(
            {
                "format": "tensorplay.auto_state/1",
                "rank": old,
                "world_size": 3,
                "choice": "allreduce",
                "is_settled": True,
                "reason": "",
                "predictions": {},
                "measured": {},
                "queue": [],
                "inner": {},
                "tensors": {},
                "owed": {"layers.0.weight": residual},
            }
        )
    model = Wide()
    ddp, state = wrapped(model)
    state.load_state_dict(states)
    assert not state.is_settled
    owed = steps(ddp, model, rank, 1)
    start = 0
    for name, parameter in model.named_parameters():
        part = owed[start : start + parameter.numel()]
        expected = -total.double() / 2 if name == "layers.0.weight" else torch.zeros_like(part)
        torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-5)
        start += parameter.numel()


def test_another_number_of_ranks_shares_out_what_is_owed() -> None:
    run_ranks(fewer, 2)


def without_sync(rank: int, world_size: int) -> str:
    auto_hook.choose = fixed({"int4": 1e-9}, plain=1e9)
    try:
        model = Wide()
        ddp, state = wrapped(model, AutoState(candidates=["int4"], **QUICK), find_unused_parameters=True)
        for step in range(SETTLED_AFTER):
            with ddp.no_sync():
                ddp(torch.ones(2, 96)).square().mean().backward()
            ddp(torch.full((2, 96), float(rank + step))).square().mean().backward()
            same_everywhere([p.grad for p in model.parameters() if p.grad is not None], f"step {step}")
            model.zero_grad()
    finally:
        auto_hook.choose = _auto_choice.choose
    assert state.is_settled
    return state.choice


def test_gradient_accumulation_and_unused_parameters() -> None:
    assert run_ranks(without_sync, 2) == ["int4", "int4"]


def test_it_is_registered_by_member_and_checks_its_settings() -> None:
    assert DDPCommHookType.AUTO.value == "auto"
    for settings, text in (
        ({"max_risk": "bold"}, "max_risk must be one of safe"),
        ({"min_gain": 1.0}, "min_gain must be in"),
        ({"plain_steps": 0}, "plain_steps must be >= 1, got 0"),
        ({"check_steps": 0}, "check_steps must be >= 1, got 0"),
        ({"candidates": ["int9"]}, "int9"),
        ({"candidates": ["auto"]}, "average gradients every step, got 'auto'"),
    ):
        with pytest.raises(ValueError, match=text):
            AutoState(**settings)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="auto_hook needs an AutoState"):
        auto_hook.auto_hook(None, None)  # type: ignore[arg-type]


def aside(options: dict[str, Any], sets_to_none: bool, rank: int, world_size: int) -> None:
    """The same training beside plain DDP, to the same bit, while the hook steps aside, and after it has come back."""
    model, twin = Wide(), Wide()
    ddp, state = wrapped(model, AutoState(min_bytes=10**9), **options)
    plain = DistributedDataParallel(twin, bucket_cap_mb=0.05, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ddp, plain)]

    def train(count: int) -> None:
        for step in range(count):
            for module, optimizer in zip((ddp, plain), optimizers, strict=True):
                optimizer.zero_grad(set_to_none=sets_to_none)
                for part in range(2):
                    x = torch.randn(
                        4, 96, generator=torch.Generator().manual_seed(10 * step + 2 * part + rank)
                    )
                    with module.no_sync() if part == 0 and "static_graph" not in options else nullcontext():
                        module(x).square().mean().backward()
                optimizer.step()
            for one, other in zip(model.parameters(), twin.parameters(), strict=True):
                assert torch.equal(one, other), f"step {step}"
        same_everywhere(list(model.parameters()), "aside")

    train(8)
    assert state.choice == "allreduce"
    assert ddp._comm_hooks == []
    assert not ddp._get_ddp_logging_data().get("comm_hook")
    handle = register_ddp_comm_hook("noop", ddp)
    x = torch.full((4, 96), rank + 1.0)
    ddp.zero_grad()
    ddp(x).square().mean().backward()
    own = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), own, strict=True))  # type: ignore[arg-type]
    handle.replace(auto_hook.auto_hook, state)
    train(4)
    assert ddp._comm_hooks == []
    state.load_state_dict(state.state_dict())
    assert len(ddp._comm_hooks) == 1


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}],
    ids=lambda options: next(iter(options), "default"),
)
def test_where_plain_all_reduce_is_chosen_the_hook_steps_aside(options: dict[str, Any]) -> None:
    for sets_to_none in (True, False):
        run_ranks(partial(aside, options, sets_to_none), 2)


def aside_with_uneven_data(rank: int, world_size: int) -> int:
    model = Wide()
    ddp, state = wrapped(model, AutoState(min_bytes=10**9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        ddp(torch.ones(4, 96) * (rank + 1)).square().mean().backward()
        optimizer.step()

    with Join([ddp]):
        for _ in range(5 + 6 * rank):  # settled after two steps: the others would step aside alone
            step()
    assert state.is_settled
    assert len(ddp._comm_hooks) == 1
    step()
    step()
    same_everywhere(list(model.parameters()), "after join")
    return len(ddp._comm_hooks)


def test_nobody_steps_aside_within_join() -> None:
    assert run_ranks(aside_with_uneven_data, 3) == [0, 0, 0]


class TwoParts(nn.Module):
    """`late` may be frozen, or used in some passes only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.late = nn.Linear(96, 96), nn.Linear(96, 96)

    def forward(self, x: torch.Tensor, with_late: bool = True) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.late(x) if with_late else x


def beside_plain_ddp(case: str, rank: int, world_size: int) -> int:
    """Frozen layers and unused ones, to the same bit as DDP without a hook."""
    options = {"find_unused_parameters": True}
    model, twin = TwoParts(), TwoParts()
    ddp, state = wrapped(model, AutoState(min_bytes=10**9), **options)
    plain = DistributedDataParallel(twin, bucket_cap_mb=0.05, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ddp, plain)]
    for step in range(12):
        for module, optimizer in zip((ddp, plain), optimizers, strict=True):
            optimizer.zero_grad()
            x = torch.randn(4, 96, generator=torch.Generator().manual_seed(10 * step + rank))
            if case == "frozen":
                module.module.late.requires_grad_(step >= 8)
                module(x).square().mean().backward()
            elif case == "all frozen":  # as a discriminator is while the generator learns
                module.requires_grad_(False)
                x.requires_grad_(True)
                module(x).square().mean().backward()
                module.requires_grad_(True)
                module(x.detach()).square().mean().backward()
            else:
                with module.no_sync():
                    module(x).square().mean().backward()
                module(x, with_late=False).square().mean().backward()
            optimizer.step()
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(one, other), f"step {step}"
        same_everywhere(list(model.parameters()), f"step {step}")
    assert state.choice == "allreduce"
    return len(ddp._comm_hooks)


@pytest.mark.parametrize(("case", "hooks"), [("frozen", 0), ("all frozen", 1), ("used in no_sync alone", 0)])
def test_stepping_aside_changes_no_bit(case: str, hooks: int) -> None:
    assert run_ranks(partial(beside_plain_ddp, case), 2) == [hooks] * 2


def owed_to_nobody(rank: int, world_size: int) -> int:
    """Ranks of which one owes something for a parameter that is gone step aside together all the same."""
    model = Wide()
    ddp, state = wrapped(model, AutoState(min_bytes=10**9))
    alone = dict(state.state_dict(), world_size=1, rank=0, owed={"gone.weight": torch.ones(3)})
    state.load_state_dict([alone])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(8):
        optimizer.zero_grad()
        ddp(torch.ones(4, 96) * (rank + 1)).square().mean().backward()
        optimizer.step()
        same_everywhere(list(model.parameters()), "owed")
    return len(ddp._comm_hooks)


def test_what_is_owed_on_one_rank_does_not_part_the_ranks() -> None:
    assert run_ranks(owed_to_nobody, 2) == [0, 0]


def fails_half_way(rank: int, world_size: int) -> int:
    """When DDP can't be given a new reducer, the old one and its hook go on."""
    model = Wide()
    ddp, state = wrapped(model, AutoState(min_bytes=10**9))
    real = ddp._ddp_init_helper
    failures = 0

    def out_of_memory(*arguments: Any) -> None:
        raise MemoryError("no room for buckets")

    ddp._ddp_init_helper = out_of_memory
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(12):
        try:
            loss = ddp(torch.ones(4, 96) * (rank + 1)).square().mean()
        except MemoryError:
            failures += 1
            ddp._ddp_init_helper = real
            assert len(ddp._comm_hooks) == 1
            loss = ddp(torch.ones(4, 96) * (rank + 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        same_everywhere(list(model.parameters()), f"step {step}")
    assert state.is_settled
    assert failures == 1
    return len(ddp._comm_hooks)


def test_a_failure_half_way_leaves_the_hook() -> None:
    assert run_ranks(fails_half_way, 2) == [0, 0]
