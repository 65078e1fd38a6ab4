"""The formula of step time that the advisor and the "auto" hook share. Pure arithmetic, no group needed.

    step = tail + latency + max over buckets i of ( ready_i + k sum_{j<i} cpu_j + sum_{j>=i} exchange_j )

Read it as a chain that starts when bucket i is handed to the hook: from then on its exchange and those of all later
buckets must pass, one after the other. Before that, the processor has computed up to bucket i and, where hooks and
computation share cores (k > 0), encoded and decoded the earlier buckets. The first bucket's chain is the link's bound,
the last one's the processor's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ComputeTrace", "ExchangeCost", "StepTime", "contention", "predict_step"]


@dataclass(frozen=True)
class ComputeTrace:
    """A step with nothing exchanged.

    Args:
        ready_seconds: from the step's beginning until each bucket is handed to the hook, in order.
        bucket_bytes: of each bucket's gradients.
        step_seconds: of the whole step, forward, backward and optimizer.
    """

    ready_seconds: Sequence[float]
    bucket_bytes: Sequence[int]
    step_seconds: float

    @property
    def gradient_bytes(self) -> int:
        """All buckets together."""
        return sum(self.bucket_bytes)


@dataclass(frozen=True)
class ExchangeCost:
    """What a hook's exchange takes when nothing else runs; a byte is a byte of gradient.

    Args:
        latency_seconds: an exchange of nearly nothing, and filling the pipeline. seconds_per_byte: on top of it.
        cpu_seconds_per_byte: of this process' threads, on average over the ranks. sent_per_byte: bytes on the wire.
    """

    latency_seconds: float
    seconds_per_byte: float
    cpu_seconds_per_byte: float
    sent_per_byte: float | None

    @staticmethod
    def from_two(
        nbytes: tuple[int, int], seconds: tuple[float, float], cpu_seconds: float, sent_bytes: float | None
    ) -> "ExchangeCost":
        """Fit seconds = latency + rate x bytes to a small and a large exchange; both terms stay >= 0.

        `cpu_seconds` and `sent_bytes` are the large one's.

        Example:
            >>> ExchangeCost.from_two((100, 300), (3.0, 5.0), 1.5, 600)
            ExchangeCost(latency_seconds=2.0, seconds_per_byte=0.01, cpu_seconds_per_byte=0.005, sent_per_byte=2.0)
        """
        small, large = nbytes
        sent = None if sent_bytes is None else sent_bytes / large
        rate = (seconds[1] - seconds[0]) / (large - small) if large > small else seconds[1] / large
        rate = min(max(rate, 0.0), seconds[1] / large)
        return ExchangeCost(seconds[1] - rate * large, rate, cpu_seconds / large, sent)


@dataclass(frozen=True)
class StepTime:
    """A prediction, and what it consists of.

    Attributes:
        seconds: the step. compute_seconds: the same step with nothing exchanged.
        exchange_seconds, cpu_seconds: of all buckets, if nothing else ran.
        bound_by: "link" where the first bucket's chain is the longest, "processor" where a later one's is, "compute"
            where exchanging adds less than 2 %.
    """

    seconds: float
    compute_seconds: float
    exchange_seconds: float
    cpu_seconds: float
    bound_by: str


def contention(ranks: int, threads: int, cores: float) -> float:
    """k: how many seconds computation on a host loses for a CPU-second of each rank's exchange.

        k = max(1, ranks/cores) x clamp((ranks (threads + 1) - cores) / ranks, 0, 1)

    0 where every rank has a core to spare, 1 where each has just the cores it computes on, 2 where two ranks share one.

    Example:
        >>> contention(2, 1, 4), contention(2, 1, 2), contention(4, 1, 2)
        (0.0, 1.0, 2.0)
    """
    lacking = (ranks * (threads + 1) - cores) / ranks
    return max(1.0, ranks / cores) * min(max(lacking, 0.0), 1.0)


def predict_step(trace: ComputeTrace, cost: ExchangeCost, contention: float) -> StepTime:
    """Apply the formula in the module's docstring.

    Args:
        trace: the step without exchange. cost: of the hook. contention: k, from `contention`.
    Example:
        A step of 10 s hands out two buckets of 1 byte at 4 s and 8 s; an exchange takes 5 s, 1 s of it the processor's:
        4 + 5 + 5 = 14 s against 8 + 1 + 5 = 14 s, and 10 - 8 = 2 s of tail.

        >>> trace = ComputeTrace((4.0, 8.0), (1, 1), 10.0)
        >>> predict_step(trace, ExchangeCost(0.0, 5.0, 1.0, 1.0), 1.0).seconds
        16.0
    """
    total = sum(trace.bucket_bytes)
    exchange = cost.latency_seconds + total * cost.seconds_per_byte if total else 0.0
    if not trace.ready_seconds or not total:
        return StepTime(trace.step_seconds, trace.step_seconds, 0.0, 0.0, "compute")
    chains, before = [], 0
    for ready, nbytes in zip(trace.ready_seconds, trace.bucket_bytes, strict=True):
        chains.append(
            ready + contention * before * cost.cpu_seconds_per_byte + (total - before) * cost.seconds_per_byte
        )
        before += nbytes
    longest = max(chains)
    tail = max(0.0, trace.step_seconds - trace.ready_seconds[-1])
    seconds = tail + cost.latency_seconds + longest
    if seconds <= 1.02 * trace.step_seconds:
        bound = "compute"
    else:
        bound = "link" if chains[0] >= longest * (1 - 1e-9) else "processor"
    return StepTime(seconds, trace.step_seconds, exchange, total * cost.cpu_seconds_per_byte, bound)
