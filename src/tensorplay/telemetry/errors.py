"""What an exchange loses, parameter by parameter, against the exact mean.

    relative error = |result - mean| / |mean|;   cosine = <result, mean> / (|result| |mean|)

The exact mean costs one more all-reduce, in float32 or wider, on a lane of its own whose bytes are counted apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tensorplay.compression.bucket import Key
from tensorplay.compression.driver import Lane, LaneError
from tensorplay.compression.rounds import AllReduce, Exchange, Scratch
from tensorplay.telemetry.sinks import Record

__all__ = ["Sample", "half_range", "measure_errors", "take_values"]


@dataclass
class Sample:
    """One bucket at a step whose error is measured.

    Args:
        keys, sizes: the parameters and their numbers of values, in order.
        own: (n,) this rank's gradient before the exchange, float32 or wider; becomes the exact mean.
        divisor: of the mean. result: (n,) what the exchange made of it, once it is known.
    """

    keys: Sequence[Key]
    sizes: Sequence[int]
    own: torch.Tensor
    divisor: int
    result: torch.Tensor | None = None


def take_values(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of the parts one after another, half types as float32."""
    joined = torch.cat([part.detach().reshape(-1) for part in parts])
    return joined.float() if joined.dtype in (torch.float16, torch.bfloat16) else joined


def half_range(values: torch.Tensor) -> tuple[int, int]:
    """How many values become 0 in float16 without being 0, and how many become infinite without being so.

    Example:
        >>> half_range(torch.tensor([1e-8, 1e6, 0.0, 1.0]))
        (1, 1)
    """
    real = torch.view_as_real(values) if values.is_complex() else values
    half = real.half()
    underflows = int(torch.count_nonzero((half == 0) & (real != 0)))
    overflows = int(torch.count_nonzero(half.isinf() & real.isfinite()))
    return underflows, overflows


def measure_errors(
    samples: Sequence[Sample],
    lane: Lane,
    name_of: Callable[[Key], str | None],
    residual_of: Callable[[Key], torch.Tensor | None],
    counts_half: bool,
) -> list[Record]:
    """The error of every parameter; collective: all ranks call it with the same buckets.

    1. Count what float16 can't hold of the own share.
    2. Sum the gradients, all buckets at once in flight, and divide.
    3. Compare parameter by parameter, in float64.

    Raises: LaneError: the extra all-reduce failed on a rank, which is named.
    """
    half_counts = [_half_counts(sample) if counts_half else None for sample in samples]

    def mean(sample: Sample) -> Callable[[Scratch], Exchange]:
        def start(scratch: Scratch) -> Exchange:
            sample.own.mul_(1.0 / sample.divisor)
            yield AllReduce([sample.own])

        return start

    for future in [lane.submit(mean(sample)) for sample in samples]:
        error = future.wait()
        if error is not None:
            raise error if isinstance(error, LaneError) else LaneError(str(error))
    records = []
    for at, (sample, counts) in enumerate(zip(samples, half_counts, strict=True)):
        assert sample.result is not None
        exact_parts, parts = _split(sample.own, sample.sizes), _split(sample.result, sample.sizes)
        for index, (key, exact, part) in enumerate(zip(sample.keys, exact_parts, parts, strict=True)):
            record: Record = {"parameter": name_of(key) or f"bucket {at}, parameter {index}"}
            record |= _compare(part, exact)
            residual = residual_of(key)
            record["residual_norm"] = None if residual is None else float(torch.linalg.vector_norm(residual))
            if counts is not None:
                record["fp16_underflows"], record["fp16_overflows"] = counts[index]
            records.append(record)
    return records


def _split(values: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    return torch.split(values, list(sizes))


def _half_counts(sample: Sample) -> list[tuple[int, int]]:
    return [half_range(part * (1.0 / sample.divisor)) for part in _split(sample.own, sample.sizes)]


def _compare(result: torch.Tensor, exact: torch.Tensor) -> Record:
    """Relative error and cosine; None where they are not defined: a mean of zeros, or values that aren't finite."""
    wide = torch.complex128 if exact.is_complex() else torch.float64
    result, exact = result.to(wide), exact.to(wide)
    norm, result_norm = float(torch.linalg.vector_norm(exact)), float(torch.linalg.vector_norm(result))
    error = float(torch.linalg.vector_norm(result - exact))
    dot = float(torch.vdot(exact, result).real) if exact.is_complex() else float(torch.dot(exact, result))
    record: Record = {"values": exact.numel(), "mean_norm": norm, "relative_error": None, "cosine": None}
    if norm > 0:
        record["relative_error"] = error / norm
        if result_norm > 0:
            record["cosine"] = dot / (norm * result_norm)
    return {
        name: None if isinstance(value, float) and not abs(value) < float("inf") else value
        for name, value in record.items()
    }
