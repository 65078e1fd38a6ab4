"""Times training steps from inside a hook: all it sees are the calls for each bucket and their ends."""

import statistics
from dataclasses import dataclass, field
from time import perf_counter

__all__ = ["Seen", "StepClock"]

WARM_STEPS = 2  # DDP makes its final buckets after the first step; scratch and connections come with the first exchange


@dataclass
class _Step:
    calls: list[float] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    end: float = 0.0


@dataclass(frozen=True)
class Seen:
    """Medians over the timed steps, this rank's own.

    Attributes:
        period_seconds: from one step's first bucket to the next one's.
        gap_seconds: from the end of a step's exchange to the next one's first bucket: optimizer, data, forward and the
            beginning of backward.
        offset_seconds: from the first bucket to each bucket. bucket_bytes: of dense gradients.
    """

    period_seconds: float
    gap_seconds: float
    offset_seconds: tuple[float, ...]
    bucket_bytes: tuple[int, ...]


class StepClock:
    """Notes calls, and tells what it saw. Steps before the last `restart` are forgotten.

    Example:
        >>> clock = StepClock()
        >>> clock.called(0, 8); clock.ended()
        >>> clock.steps
        1
    """

    def __init__(self) -> None:
        self._steps: list[_Step] = []

    @property
    def steps(self) -> int:
        """Steps begun."""
        return len(self._steps)

    def restart(self) -> None:
        """Forget everything: another hook begins."""
        self._steps = []

    def called(self, index: int, nbytes: int) -> None:
        """The hook is called for a bucket."""
        if index == 0 or not self._steps:
            self._steps.append(_Step())
        self._steps[-1].calls.append(perf_counter())
        self._steps[-1].nbytes.append(nbytes)

    def ended(self) -> None:
        """The last bucket's exchange is done; any thread may call it."""
        self._steps[-1].end = perf_counter()

    def bucket_bytes(self) -> tuple[int, ...]:
        """Of the last step."""
        return tuple(self._steps[-1].nbytes) if self._steps else ()

    def seen(self) -> Seen:
        """Medians over the steps after the first two and before the last one, which has not ended."""
        last = self._steps[-1]
        periods, gaps, offsets = [], [], []
        for step, following in zip(self._steps[WARM_STEPS:-1], self._steps[WARM_STEPS + 1 :], strict=True):
            periods.append(following.calls[0] - step.calls[0])
            gaps.append(max(0.0, following.calls[0] - step.end))
            if step.nbytes == last.nbytes:
                offsets.append([call - step.calls[0] for call in step.calls])
        offsets = offsets or [[call - last.calls[0] for call in last.calls]]
        return Seen(
            statistics.median(periods),
            statistics.median(gaps),
            tuple(statistics.median(column) for column in zip(*offsets, strict=True)),
            tuple(last.nbytes),
        )
