"""The advisor without a group: the formula by hand, choices from made-up measurements, and the check of results."""

import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tensorplay.advisor import AdviseSettings
from tensorplay.advisor.advice import Advice, Link, Prediction
from tensorplay.advisor.ranking import best_of, predict_all
from tensorplay.cli.advise_table import show
from tensorplay.cli.main import main
from tensorplay.compression.registry import known_codecs
from tensorplay.distributed.algorithms.ddp_comm_hooks import known_hooks
from tensorplay.distributed.algorithms.ddp_comm_hooks._auto_choice import trace_from
from tensorplay.distributed.algorithms.ddp_comm_hooks._probe import SampleBucket, sample_bytes, sample_shapes
from tensorplay.distributed.algorithms.ddp_comm_hooks._risk import RISKS, caution_of, is_allowed, risk_of
from tensorplay.distributed.algorithms.ddp_comm_hooks._step_clock import Seen, StepClock
from tensorplay.distributed.algorithms.ddp_comm_hooks._step_time import (
    ComputeTrace,
    ExchangeCost,
    contention,
    predict_step,
)

MB = 1_000_000
#: 100 MB in four buckets, ready over the last 0.15 s of a step that computes for 0.25 s.
TRACE = ComputeTrace((0.10, 0.15, 0.20, 0.24), (25 * MB,) * 4, 0.25)


def link_of(bytes_per_second: float) -> dict[str, ExchangeCost]:
    """Costs of hooks whose codecs are as fast as ours on one core, over a link of that speed, two ranks."""
    bits = {
        "allreduce": (32, 0.8e-9),
        "fp16_compress": (16, 1.0e-9),
        "int8": (8.25, 2.2e-9),
        "int4": (4.25, 2.7e-9),
        "sign": (1.1, 2.3e-9),
    }
    return {
        name: ExchangeCost(1e-3, max(b / 32 / bytes_per_second, cpu), cpu, b / 32)
        for name, (b, cpu) in bits.items()
    }


def choice(bytes_per_second: float, max_risk: str = "check", k: float = 1.0) -> str:
    costs = link_of(bytes_per_second)
    return best_of(predict_all(list(costs), TRACE, costs, {}, k, max_risk), 0.03).hook


def test_the_chain_of_the_first_bucket_is_the_links() -> None:
    cost = ExchangeCost(0.5, 2.0, 0.0, 1.0)
    step = predict_step(ComputeTrace((1.0, 2.0, 3.0), (1, 1, 1), 4.0), cost, 1.0)
    assert step.seconds == 1.0 + 3 * 2.0 + 0.5 + 1.0
    assert (step.bound_by, step.exchange_seconds, step.cpu_seconds) == ("link", 6.5, 0.0)


def test_the_chain_of_the_last_bucket_is_the_processors() -> None:
    cost = ExchangeCost(0.0, 1.0, 1.0, 1.0)
    trace = ComputeTrace((1.0, 5.0, 9.0), (1, 1, 1), 10.0)
    step = predict_step(trace, cost, 1.0)
    assert step.seconds == 9.0 + 2 * 1.0 + 1.0 + 1.0
    assert step.bound_by == "processor"
    assert predict_step(trace, cost, 0.0).seconds == 11.0  # cores to spare: only the last exchange is seen
    assert predict_step(trace, cost, 2.0).seconds == 15.0


def test_what_hides_behind_backward_costs_nothing() -> None:
    step = predict_step(ComputeTrace((1.0, 9.0), (99, 1), 10.0), ExchangeCost(0.0, 0.01, 0.0, 1.0), 1.0)
    assert step.seconds == pytest.approx(10.01)
    assert step.bound_by == "compute"


def test_a_step_without_buckets_is_computation() -> None:
    assert predict_step(ComputeTrace((), (), 2.0), ExchangeCost(1.0, 1.0, 1.0, 1.0), 1.0).seconds == 2.0


def test_the_fit_never_goes_below_zero() -> None:
    noisy = ExchangeCost.from_two((100, 400), (2.0, 1.0), 0.4, 400)
    assert (noisy.latency_seconds, noisy.seconds_per_byte) == (1.0, 0.0)
    steep = ExchangeCost.from_two((100, 400), (0.0, 4.0), 0.4, None)
    assert steep.latency_seconds == pytest.approx(0.0)
    assert steep.seconds_per_byte == 0.01
    assert steep.sent_per_byte is None


@pytest.mark.parametrize(
    ("ranks", "threads", "cores", "k"),
    [(1, 1, 2, 0.0), (2, 1, 2, 1.0), (2, 1, 3, 0.5), (4, 1, 2, 2.0), (2, 2, 4, 1.0)],
)
def test_contention_by_hand(ranks: int, threads: int, cores: float, k: float) -> None:
    assert contention(ranks, threads, cores) == k


def test_an_unlimited_link_needs_no_compression() -> None:
    assert choice(10e9) == "allreduce"
    assert choice(10e9, max_risk="risky") == "allreduce"


def test_a_slow_link_takes_the_fewest_bytes_that_are_allowed() -> None:
    assert choice(24e6) == "int4"
    assert choice(24e6, max_risk="usually-safe") == "int8"
    assert choice(24e6, max_risk="safe") == "fp16_compress"
    assert choice(24e6, max_risk="risky") == "sign"


def test_a_crowded_processor_takes_the_cheap_codec() -> None:
    assert choice(60e6, k=0.0) == "int4"
    assert choice(60e6, k=4.0) == "fp16_compress"


def test_a_gain_that_is_too_small_is_not_advised() -> None:
    costs = {
        "allreduce": ExchangeCost(0.0, 4e-9, 0.0, 1.0),
        "fp16_compress": ExchangeCost(0.0, 3.95e-9, 0.0, 0.5),
    }
    ranking = predict_all(list(costs), TRACE, costs, {}, 1.0, "check")
    assert ranking[0].hook == "fp16_compress"
    assert best_of(ranking, 0.03).hook == "allreduce"
    assert best_of(ranking, 0.0).hook == "fp16_compress"


def test_a_hook_that_fails_is_listed_last_and_never_advised() -> None:
    costs = {"allreduce": ExchangeCost(0.0, 4e-9, 0.0, 1.0)}
    ranking = predict_all(["mine", "allreduce"], TRACE, costs, {"mine": "no such dtype"}, 1.0, "risky")
    assert [p.hook for p in ranking] == ["allreduce", "mine"]
    assert math.isnan(ranking[1].step_seconds)
    assert ranking[1].reason == "its exchange failed: no such dtype"
    assert not ranking[1].allowed
    assert best_of(ranking, 0.0).hook == "allreduce"


def test_every_known_hook_has_a_class_and_all_but_exact_ones_a_source() -> None:
    for name in {*known_hooks(), *known_codecs()} - {"auto", "post_localSGD"}:
        assert risk_of(name) in RISKS
        assert "not a hook of this package" not in caution_of(name), name
        if name not in ("allreduce", "fp32", "noop"):
            assert "20" in caution_of(name), f"{name}: a source has a year"
    assert is_allowed("int4", "check")
    assert not is_allowed("power_sgd_rank2", "check")
    assert risk_of("somebody:hook") == "risky"
    with pytest.raises(ValueError, match=r"max_risk must be one of safe, .*, got 'low'"):
        is_allowed("int8", "low")


def test_samples_fit_their_limit_and_keep_shapes() -> None:
    shapes = [(7,), (100, 10), (50, 2)]
    assert sample_shapes(shapes, 4, 4 * 1107) == shapes
    assert sample_shapes(shapes, 4, 4 * 300) == [(7,), (29, 10)]
    assert sample_shapes([(1, 1000)], 4, 400) == [(100,)]
    assert sample_shapes([(0, 3), ()], 4, 400) == [()]
    small, large = sample_bytes(100 << 20, 1 / 24e6)
    assert 4 * small == pytest.approx(large, abs=4)
    assert large / 24e6 == pytest.approx(0.8, rel=0.01)
    bucket = SampleBucket(shapes, torch.float32, torch.device("cpu"), 1)
    before = bucket.buffer().clone()
    bucket.buffer().zero_()
    bucket.refill()
    assert bucket.buffer().equal(before)
    assert [tuple(g.shape) for g in bucket.gradients()] == shapes


def test_the_clock_forgets_warm_up_and_takes_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(
        "tensorplay.distributed.algorithms.ddp_comm_hooks._step_clock.perf_counter", lambda: now[0]
    )
    clock = StepClock()
    for length in (90.0, 50.0, 10.0, 10.0, 30.0, 10.0):
        clock.called(0, 8)
        now[0] += 2
        clock.called(1, 4)
        now[0] += 1
        clock.ended()
        now[0] += length - 3
    clock.called(0, 8)
    clock.called(1, 4)
    assert clock.seen() == Seen(10.0, 7.0, (0.0, 2.0), (8, 4))
    clock.restart()
    assert clock.steps == 0


def test_plain_all_reduces_own_time_is_taken_out_of_what_the_hook_saw() -> None:
    cost = ExchangeCost(0.0, 1.0, 0.25, 1.0)
    trace = trace_from(Seen(20.0, 5.0, (0.0, 4.0, 6.0), (4, 4, 4)), cost, 1.0)
    assert trace.ready_seconds == (5.0, 8.0, 9.0)
    assert predict_step(trace, cost, 1.0).seconds == 5.0 + 12.0


def advice_of(bytes_per_second: float) -> Advice:
    costs = link_of(bytes_per_second)
    ranking = predict_all(list(costs), TRACE, costs, {}, 1.0, "check")
    link = Link("group", 1e-4, bytes_per_second)
    return Advice(
        best_of(ranking, 0.03),
        tuple(ranking),
        2,
        1,
        2.0,
        2,
        1,
        1.0,
        (link,),
        TRACE,
        25 * MB,
        100 * MB,
        "check",
        9.0,
    )


def test_the_text_says_what_to_paste_and_why() -> None:
    slow = show(advice_of(24e6), "mlp")
    assert 'register_ddp_comm_hook("int4", model)' in slow
    assert "Caution: 4 bits a value" in slow
    assert "Faster, but above --max-risk check: sign (risky)." in slow
    assert "Karimireddy et al. 2019" in slow
    fast = show(advice_of(10e9), "mlp")
    assert "Advice: no compression." in fast
    assert "register_ddp_comm_hook" not in fast


def test_advice_is_json() -> None:
    advice = advice_of(24e6)
    told = json.loads(json.dumps(advice.to_dict(), allow_nan=False))
    assert told["best"] == "int4"
    assert [p["hook"] for p in told["predictions"]] == [p.hook for p in advice.predictions]
    assert told["predictions"][0]["basis"] == "formula"
    assert told["probed"]["compute"]["bucket_bytes"] == [25 * MB] * 4


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_risk": "none"}, "max_risk must be one of"),
        ({"trials": -1}, "trials must be >= 0, got -1"),
        ({"budget_seconds": 0}, "budget_seconds must be > 0, got 0"),
        ({"min_gain": 1.5}, r"min_gain must be in \[0, 1\), got 1.5"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        AdviseSettings(**settings)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "torchrun ... -m tensorplay.cli.main advise"),
        (["--ranks", "0"], "--ranks must be >= 1, got 0"),
        (["--ranks", "2", "--parameters", "0.5"], "--parameters must be >= 1"),
        (["--ranks", "2", "--model", "mlp", "--parameters", "9"], "exclude each other"),
        (["--ranks", "2", "--model", "gpt:vast"], "gpt:SIZE must have a size"),
        (["--ranks", "2", "--budget", "0"], "--budget must be > 0, got 0.0"),
        (["--ranks", "2", "--hooks", "int9"], "int9"),
        (["--ranks", "2", "--hooks", "int8,noop"], "average gradients every step, got noop"),
    ],
)
def test_mistakes_are_told_in_one_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert main(["advise", *arguments]) == 2
    told = capsys.readouterr().err
    assert text in told
    assert told.count("\n") == 1


def checker() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "check_advisor.py"
    spec = importlib.util.spec_from_file_location("check_advisor", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cell(measured: dict[str, float], best: str, formula: dict[str, float]) -> dict[str, Any]:
    predictions = [
        {"hook": h, "formula_seconds": s, "step_seconds": s, "tried_seconds": None, "allowed": h != "sign"}
        for h, s in formula.items()
    ]
    return {
        "ranks": 2,
        "rate": "1gbit",
        "plain": "allreduce",
        "rows": [{"hook": hook, "step_seconds": seconds} for hook, seconds in measured.items()],
        "advice": {"best": best, "predicted_seconds": formula, "probe": {"predictions": predictions}},
    }


def test_the_check_of_a_comparison_finds_what_is_missed(tmp_path: Path) -> None:
    check = checker()
    good = cell(
        {"allreduce": 1.0, "int8": 0.5, "sign": 0.4, "auto": 1.02},
        "int8",
        {"allreduce": 1.1, "int8": 0.5, "sign": 0.45},
    )
    found = check.summary([check.check_cell(good)])
    assert found["missed"] == []
    assert found["formula_median_error"] == pytest.approx(0.1)  # of 0.1, 0 and 0.125
    assert found["within_10_percent_of_best_allowed"] == 1.0
    assert found["within_10_percent_of_best"] == 1.0
    assert found["auto_worst_over_plain"] == pytest.approx(0.02)
    bad = cell({"allreduce": 1.0, "int8": 0.5, "auto": 1.1}, "allreduce", {"allreduce": 1.3, "int8": 1.3})
    missed = check.summary([check.check_cell(bad)])["missed"]
    words = ["median error", "best allowed in 0%", "best in 0%", "auto"]
    assert [word in line for word, line in zip(words, missed, strict=True)] == [True] * 4
    unasked = {**good, "advice": None}
    assert "not asked" in check.summary([check.check_cell(unasked)])["missed"][0]


def test_a_prediction_says_where_its_seconds_come_from() -> None:
    by_formula = Prediction("int8", 1.0, None, 1.0, 1.0, "usually-safe", True, "", "", None)
    tried = Prediction("int8", 1.0, 0.5, 1.0, 1.0, "usually-safe", True, "", "", None)
    assert (by_formula.step_seconds, by_formula.basis) == (1.0, "formula")
    assert (tried.step_seconds, tried.basis, tried.formula_seconds) == (0.5, "tried", 1.0)
