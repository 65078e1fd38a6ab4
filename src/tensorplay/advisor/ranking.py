"""From what was measured to a ranking: the formula for each hook, reasons, and the choice. No group needed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tensorplay.advisor.advice import Prediction
from tensorplay.distributed.algorithms.ddp_comm_hooks._risk import caution_of, is_allowed, risk_of
from tensorplay.distributed.algorithms.ddp_comm_hooks._step_time import (
    ComputeTrace,
    ExchangeCost,
    StepTime,
    predict_step,
)

__all__ = ["PLAIN", "best_of", "predict_all", "ranked"]

PLAIN = "allreduce"
"""The hook that all others are held against."""


def predict_all(
    hooks: Sequence[str],
    trace: ComputeTrace,
    costs: Mapping[str, ExchangeCost],
    failures: Mapping[str, str],
    contention: float,
    max_risk: str,
) -> list[Prediction]:
    """A prediction for each hook, fastest first.

    Args:
        hooks: with "allreduce" among them. trace: a step without exchange. costs: of those that could be measured.
        failures: why the others could not. contention: k of the formula. max_risk: what may be advised.
    Example:
        >>> trace = ComputeTrace((1.0,), (10,), 1.0)
        >>> costs = {"allreduce": ExchangeCost(0.0, 0.3, 0.0, 1.0), "int4": ExchangeCost(0.0, 0.1, 0.0, 0.1)}
        >>> [(p.hook, p.step_seconds, p.gain) for p in predict_all(list(costs), trace, costs, {}, 1.0, "check")]
        [('int4', 2.0, 2.0), ('allreduce', 4.0, 1.0)]
    """
    steps = {name: predict_step(trace, cost, contention) for name, cost in costs.items()}
    return ranked(
        [
            _prediction(name, trace, costs.get(name), steps.get(name), failures.get(name, ""), max_risk)
            for name in hooks
        ]
    )


def _prediction(
    name: str,
    trace: ComputeTrace,
    cost: ExchangeCost | None,
    step: StepTime | None,
    failure: str,
    max_risk: str,
) -> Prediction:
    sent = None
    if cost is not None and cost.sent_per_byte is not None:
        sent = cost.sent_per_byte * trace.gradient_bytes
    return Prediction(
        hook=name,
        formula_seconds=math.nan if step is None else step.seconds,
        tried_seconds=None,
        gain=math.nan,
        sent_bytes=sent,
        risk=risk_of(name),
        allowed=step is not None and is_allowed(name, max_risk),
        reason=f"its exchange failed: {failure}" if step is None else _reason(step, sent),
        caution=caution_of(name),
        cost=cost,
    )


def _reason(step: StepTime, sent_bytes: float | None) -> str:
    """What decides a step's time, in one line."""
    sends = "" if sent_bytes is None else f"sends {sent_bytes / 1e6:.1f} MB; "
    exposed = step.seconds - step.compute_seconds
    if step.bound_by == "compute":
        return f"{sends}the exchange hides behind backward"
    if step.bound_by == "link":
        return (
            f"{sends}the link is busy for {step.exchange_seconds:.3g} s, {exposed:.3g} s of it after backward"
        )
    return (
        f"{sends}the processor is the limit: {step.cpu_seconds:.3g} s of exchange beside "
        f"{step.compute_seconds:.3g} s of computation"
    )


def ranked(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Fastest first, those that could not be predicted last; gains filled in."""
    plain = next(p for p in predictions if p.hook == PLAIN)
    filled = [replace(p, gain=plain.step_seconds / p.step_seconds) for p in predictions]
    return sorted(filled, key=lambda p: (p.step_seconds != p.step_seconds, p.step_seconds))


def best_of(predictions: Sequence[Prediction], min_gain: float) -> Prediction:
    """The fastest allowed hook if it saves enough of plain all-reduce's step, else plain all-reduce."""
    plain = next(p for p in predictions if p.hook == PLAIN)
    for prediction in predictions:
        if prediction.allowed and prediction.step_seconds <= plain.step_seconds * (1 - min_gain):
            return prediction
    return plain
