"""The decision of the "auto" hook: costs of the candidates on this group, and the formula on what was timed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tensorplay.compression.bucket import GradBucket
from tensorplay.compression.collective import all_reduce_sum
from tensorplay.compression.driver import forget_lane
from tensorplay.distributed.algorithms.ddp_comm_hooks._probe import (
    SMALLEST_SAMPLE_BYTES,
    SampleBucket,
    agree,
    look_at_hosts,
    measure_cost,
    sample_bytes,
    sample_shapes,
)
from tensorplay.distributed.algorithms.ddp_comm_hooks._step_clock import Seen
from tensorplay.distributed.algorithms.ddp_comm_hooks._step_time import (
    ComputeTrace,
    ExchangeCost,
    predict_step,
)

__all__ = ["Candidates", "Choice", "choose", "trace_from"]

_BUDGET_SECONDS = 0.3
_REPEATS = 2
_PLAIN = "allreduce"


@dataclass(frozen=True)
class Choice:
    """What the formula says: a step's seconds by candidate, beside the measured one of plain all-reduce."""

    plain_seconds: float
    predictions: dict[str, float]


class Candidates:
    """Collects the shapes of a step's gradients, by dtype."""

    def __init__(self) -> None:
        self._shapes: dict[torch.dtype, list[tuple[int, ...]]] = {}
        self._device = torch.device("cpu")

    def clear(self) -> None:
        """Forget them."""
        self._shapes.clear()

    def add(self, bucket: GradBucket, first: bool) -> None:
        """Note a dense bucket."""
        if first:
            self.clear()
        buffer = bucket.buffer()
        self._device = buffer.device
        dtype = buffer.dtype.to_real() if buffer.is_complex() else buffer.dtype
        for parameter in bucket.parameters():
            shape = (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)
            self._shapes.setdefault(dtype, []).append(shape)

    @property
    def device(self) -> torch.device:
        """Where the gradients are."""
        return self._device

    def largest(self) -> tuple[list[tuple[int, ...]], torch.dtype]:
        """The shapes of the dtype that holds most bytes."""
        dtype = max(self._shapes, key=lambda one: one.itemsize * sum(map(_numel, self._shapes[one])))
        return self._shapes[dtype], dtype


def _numel(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def choose(seen: Seen, noted: Candidates, names: Sequence[str], group: dist.ProcessGroup) -> Choice:
    """Measure plain all-reduce and the candidates, and predict. Collective; the same result on every rank.

    1. Agree on the slowest rank's times.
    2. Time a small all-reduce, to know how large samples may be; then each hook's exchange.
    3. Take from the timed steps what plain all-reduce's own processor time had added.
    4. Predict; scale by what the formula says of plain all-reduce against what was measured.
    """
    device = noted.device
    agreed = agree([seen.period_seconds, seen.gap_seconds, *seen.offset_seconds], group, device)
    seen = Seen(agreed[0], agreed[1], tuple(agreed[2:]), seen.bucket_bytes)
    costs = _costs([_PLAIN, *names], sum(seen.bucket_bytes), noted, group)
    k = look_at_hosts(group)[0].contention
    trace = trace_from(seen, costs[_PLAIN], k)
    plain = predict_step(trace, costs[_PLAIN], k).seconds
    scale = seen.period_seconds / plain if plain > 0 else 1.0
    predictions = {name: scale * predict_step(trace, costs[name], k).seconds for name in names}
    return Choice(seen.period_seconds, predictions)


def trace_from(seen: Seen, plain: ExchangeCost, contention: float) -> ComputeTrace:
    """The step without exchange, from steps that exchanged by plain all-reduce.

    The step is taken to begin where the exchange of the one before has ended.

    Example:
        Two buckets of 10 bytes, 0.1 s of processor time a byte: what lies between them took 3 s, of which 1 s was the
        first one's exchange.

        >>> trace_from(Seen(9.0, 4.0, (0.0, 3.0), (10, 10)), ExchangeCost(0.0, 0.2, 0.1, 1.0), 1.0).ready_seconds
        (4.0, 6.0)
    """
    ready: list[float] = []
    before = 0
    for offset, nbytes in zip(seen.offset_seconds, seen.bucket_bytes, strict=True):
        at = seen.gap_seconds + offset - contention * before * plain.cpu_seconds_per_byte
        ready.append(max(at, ready[-1] if ready else 0.0))
        before += nbytes
    return ComputeTrace(tuple(ready), seen.bucket_bytes, ready[-1])


def _costs(
    names: Sequence[str], total_bytes: int, noted: Candidates, group: dist.ProcessGroup
) -> dict[str, ExchangeCost]:
    from tensorplay.distributed.algorithms.ddp_comm_hooks.register import make_hook

    shapes, dtype = noted.largest()
    speed = _all_reduce_seconds_per_byte(group, noted.device)
    samples = [
        SampleBucket(sample_shapes(shapes, dtype.itemsize, size), dtype, noted.device, group.rank())
        for size in sample_bytes(total_bytes, speed, _BUDGET_SECONDS)
    ]
    costs = {}
    for name in names:
        hook, state = make_hook(name, group)
        costs[name] = measure_cost(hook, state, (samples[0], samples[1]), group, _REPEATS)
        lane: Any = getattr(state, "_lane", None)
        if lane is not None:
            forget_lane(lane[2])  # its threads, connections and scratch go; the chosen hook makes its own
    return costs


def _all_reduce_seconds_per_byte(group: dist.ProcessGroup, device: torch.device) -> float:
    tensor = torch.zeros(SMALLEST_SAMPLE_BYTES // 8, device=device)
    agree([0.0], group, device)
    began = time.perf_counter()
    all_reduce_sum(tensor, group).wait()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    (seconds,) = agree([time.perf_counter() - began], group, device)
    return seconds / (tensor.numel() * tensor.element_size())
