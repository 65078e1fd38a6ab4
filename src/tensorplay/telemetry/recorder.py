"""Keeps account of backward passes: which buckets were exchanged, when, and what that took.

A pass opens with its first bucket. It is written out when the next one opens, or at `flush`: by then its exchanges are
done, the writing is in the training thread, and it delays no exchange.
"""

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from tensorplay.compression.bucket import Bucket, Key
from tensorplay.compression.collective import traffic
from tensorplay.compression.driver import lane_for
from tensorplay.compression.participation import divisor
from tensorplay.telemetry.errors import Sample, measure_errors, take_values
from tensorplay.telemetry.meter import Meter
from tensorplay.telemetry.sinks import Record, Sink

__all__ = ["BucketWatch", "Recorder", "Subject"]


_ROUNDED = (torch.float16, torch.bfloat16)
"""Types of gradient that a mean, finite in float32, may overflow when it is written."""


@dataclass(frozen=True)
class Subject:
    """What is observed, as far as records need to know.

    Attributes:
        hook: its name. counts_process: bytes of hooks that don't tell them a bucket may be taken from the process'
            total. counts_half: whether values travel in float16.
        group: the ranks. name_of, residual_of: of a parameter; None where there is none.
    """

    hook: str
    counts_process: bool
    counts_half: bool
    group: Callable[[], dist.ProcessGroup]
    name_of: Callable[[Key], str | None]
    residual_of: Callable[[Key], torch.Tensor | None]


class BucketWatch:
    """One bucket's exchange: its meters while it runs, its figures afterwards."""

    def __init__(self, bucket: Bucket, sample: Sample | None, is_counted: bool, is_read: bool = True) -> None:
        self.bucket: Bucket | None = bucket
        self.index = bucket.index
        self.sample, self.is_counted, self.is_read = sample, is_counted, is_read
        self.meters: list[Meter] = []
        self.completed: float | None = None
        #: None: nobody looked.
        self.nonfinite: bool | torch.Tensor | None = None
        buffer = bucket.buffer
        values = 0 if bucket.is_sparse else sum(entry.values.numel() for entry in bucket.slices)
        #: Whether the buffer is all there is; else the slices lie in memory of their own.
        self._is_whole = values == 0 or values == buffer.numel()
        self.raw_bytes = _nbytes(buffer) if self._is_whole else values * buffer.element_size()
        self.process_bytes = (0, 0)
        self._running = 0
        self._lock = threading.Lock()
        self.called = perf_counter()

    def meter(self) -> Meter:
        """A meter for one more exchange of this bucket; all are made before the first one runs."""
        self.meters.append(Meter())
        self._running += 1
        return self.meters[-1]

    def one_done(self) -> None:
        """One of the exchanges has ended; with the last one the bucket is done."""
        with self._lock:
            self._running -= 1
            if self._running:
                return
        bucket = self.bucket
        assert bucket is not None
        self.completed = perf_counter()
        verdicts = [meter.finite for meter in self.meters]
        if None not in verdicts and bucket.buffer.dtype not in _ROUNDED:
            self.nonfinite = _any_false(verdicts)
        elif self.is_read:
            parts = [bucket.buffer] if self._is_whole else [entry.values for entry in bucket.slices]
            self.nonfinite = any(bool(_has_nonfinite(part)) for part in parts)
        elif any(verdict is False for verdict in verdicts):
            self.nonfinite = True  # one exchange of it knows; what the others hold changes nothing
        self._take([entry.values for entry in bucket.slices])

    def finish(self, result: torch.Tensor) -> None:
        """Note the time, whether all values are finite, and, where the error is measured, the values.

        Args:
            result: what a hook that is observed from outside made of the bucket.
        """
        self.completed = perf_counter()
        if self.is_read:
            self.nonfinite = _has_nonfinite(result)
        self._take([result])

    def _take(self, parts: Sequence[torch.Tensor]) -> None:
        self.process_bytes = (traffic.sent_bytes, traffic.received_bytes)
        if self.sample is not None:
            self.sample.result = take_values(parts)
        self.bucket = None

    def figures(self) -> Record:
        """The bucket's record, without step and kind."""
        assert self.completed is not None
        meters = self.meters
        return {
            "bucket": self.index,
            "raw_bytes": self.raw_bytes,
            "sent_bytes": sum([m.sent_bytes for m in meters]) if self.is_counted else None,
            "received_bytes": sum([m.received_bytes for m in meters]) if self.is_counted else None,
            "encode_seconds": sum([m.encode_seconds for m in meters]),
            "wait_seconds": sum([m.wait_seconds for m in meters]),
            "decode_seconds": sum([m.decode_seconds for m in meters]),
            "exchange_seconds": self.completed - self.called,
            "nonfinite": None if self.nonfinite is None else bool(self.nonfinite),
        }


@dataclass
class _Pass:
    step: int
    measures_error: bool
    process_bytes: tuple[int, int]
    watches: list[BucketWatch] = field(default_factory=list)
    telemetry_seconds: float = 0.0


_lane_numbers: "weakref.WeakKeyDictionary[dist.ProcessGroup, set[int]]" = weakref.WeakKeyDictionary()


class Recorder:
    """See the module.

    Args:
        subject: what is observed. sinks: where records go. error_every: steps between measurements of the error,
            0: never. nonfinite_every: see `observe`.
    """

    def __init__(
        self, subject: Subject, sinks: Sequence[Sink], error_every: int, nonfinite_every: int
    ) -> None:
        self._subject, self._sinks, self._error_every = subject, sinks, error_every
        self._nonfinite_every = nonfinite_every
        self._pass: _Pass | None = None
        self._began = perf_counter()
        self._last_completed: float | None = None
        self._unaccounted_seconds = self._noted_seconds = 0.0
        self._lane_number: int | None = None
        self._has_written_run = False
        self.step = 0

    def needs_slices(self, index: int) -> bool:
        """Whether the bucket of this index, about to be exchanged, is one whose error is measured."""
        step = self.step + self._opens_a_pass(index)
        return bool(self._error_every) and step % self._error_every == 0

    def _opens_a_pass(self, index: int) -> bool:
        return self._pass is None or index <= self._pass.watches[-1].index

    def begin(self, bucket: Bucket, is_counted: bool = True) -> BucketWatch:
        """A bucket is about to be exchanged; the first one of a pass writes out the pass before.

        The bucket's slices may be missing where `needs_slices` says so.
        """
        if self._opens_a_pass(bucket.index):
            self.flush()
            self.step += 1
            measures = bool(self._error_every) and self.step % self._error_every == 0
            self._pass = _Pass(self.step, measures, (traffic.sent_bytes, traffic.received_bytes))
        current = self._pass
        assert current is not None
        began = perf_counter()
        sample = None
        if current.measures_error and bucket.slices and bucket.buffer.dtype.is_floating_point:
            parts = [entry.values for entry in bucket.slices]
            sample = Sample(
                [entry.key for entry in bucket.slices],
                [part.numel() for part in parts],
                take_values(parts),
                divisor(self._subject.group()),
            )
        current.telemetry_seconds += perf_counter() - began
        every = self._nonfinite_every
        # Buckets take turns, so that a step reads about as much as another.
        is_read = current.measures_error or (every > 0 and (current.step + bucket.index) % every == 0)
        watch = BucketWatch(bucket, sample, is_counted, is_read)
        current.watches.append(watch)
        return watch

    def note(self, values: dict[str, Any]) -> None:
        """Write a record of the caller's own numbers at the current step."""
        began = perf_counter()
        self._write({"event": "scalars", "step": self.step, "time_seconds": began - self._began, **values})
        self._noted_seconds += perf_counter() - began

    def flush(self) -> None:
        """Write out the pass that has ended. Collective where its error is measured."""
        ended, self._pass = self._pass, None
        if ended is None:
            return
        began = perf_counter()
        done = [watch for watch in ended.watches if watch.completed is not None]
        buckets = [watch.figures() for watch in done]
        for bucket in buckets:
            self._write({"event": "bucket", "step": ended.step, **bucket})
        spent = [0, 0]
        if ended.measures_error and len(done) == len(ended.watches):
            spent = self._measure([watch.sample for watch in done if watch.sample], ended.step)
        telemetry_seconds = ended.telemetry_seconds + perf_counter() - began
        if done:
            self._write(self._figures(ended, done, buckets, telemetry_seconds, spent))
        self._unaccounted_seconds += perf_counter() - began + self._noted_seconds  # of the step that begins
        self._noted_seconds = 0.0

    def close(self) -> None:
        """Write out what is left; give the lane's number back."""
        self.flush()
        if self._lane_number is not None:
            _lane_numbers[self._subject.group()].discard(self._lane_number)
            self._lane_number = None

    def _figures(
        self,
        ended: _Pass,
        done: list[BucketWatch],
        buckets: list[Record],
        telemetry_seconds: float,
        spent: Sequence[int],
    ) -> Record:
        completed = max(watch.completed or 0.0 for watch in done)
        record: Record = {"event": "step", "step": ended.step, "time_seconds": completed - self._began}
        record["step_seconds"] = None
        if self._last_completed is not None:
            lost = self._unaccounted_seconds + ended.telemetry_seconds
            record["step_seconds"] = completed - self._last_completed - lost
        self._last_completed, self._unaccounted_seconds = completed, 0.0
        record["exchange_seconds"] = completed - done[0].called
        record["exposed_seconds"] = completed - ended.watches[-1].called
        for name in ("raw_bytes", "sent_bytes", "received_bytes"):
            known = [bucket[name] for bucket in buckets]
            record[name] = None if None in known else sum(known)
        if record["sent_bytes"] is None and self._subject.counts_process:
            after = max(watch.process_bytes for watch in done)
            record["sent_bytes"], record["received_bytes"] = (
                end - start for end, start in zip(after, ended.process_bytes, strict=True)
            )
        for name in ("encode_seconds", "wait_seconds", "decode_seconds"):
            record[name] = sum(bucket[name] for bucket in buckets)
        found = [bucket["nonfinite"] for bucket in buckets]
        record["nonfinite"] = True if True in found else None if None in found else False
        record["unfinished_buckets"] = len(ended.watches) - len(done)
        record["telemetry_seconds"] = telemetry_seconds
        record["telemetry_sent_bytes"], record["telemetry_received_bytes"] = spent
        return record

    def _measure(self, samples: list[Sample], step: int) -> list[int]:
        if not samples:
            return [0, 0]
        group, subject = self._subject.group(), self._subject
        if self._lane_number is None:
            taken = _lane_numbers.setdefault(group, set())
            self._lane_number = next(number for number in range(len(taken) + 1) if number not in taken)
            taken.add(self._lane_number)
        lane = lane_for(group, f"telemetry/{self._lane_number}", samples[0].own.device)
        before = lane.traffic.sent_bytes, lane.traffic.received_bytes
        records = measure_errors(samples, lane, subject.name_of, subject.residual_of, subject.counts_half)
        for record in records:
            self._write({"event": "error", "step": step, **record})
        return [lane.traffic.sent_bytes - before[0], lane.traffic.received_bytes - before[1]]

    def _write(self, record: Record) -> None:
        if not self._has_written_run:
            self._has_written_run = True
            group = self._subject.group()
            self._write(
                {
                    "event": "run",
                    "format": "tensorplay.telemetry/1",
                    "hook": self._subject.hook,
                    "rank": group.rank(),
                    "world_size": group.size(),
                    "backend": dist.get_backend(group),
                    "torch": str(torch.__version__),
                    "error_every": self._error_every,
                }
            )
        for sink in self._sinks:
            sink.write(record)


def _nbytes(tensor: torch.Tensor) -> int:
    if tensor.layout != torch.strided:
        values, indices = tensor._values(), tensor._indices()
        return values.numel() * values.element_size() + indices.numel() * indices.element_size()
    return tensor.numel() * tensor.element_size()


def _any_false(verdicts: Sequence[bool | torch.Tensor | None]) -> bool | torch.Tensor:
    """Whether one of them is; on a device the answer is left there."""
    on_device = [verdict for verdict in verdicts if isinstance(verdict, torch.Tensor)]
    if not all(verdict for verdict in verdicts if not isinstance(verdict, torch.Tensor)):
        return True
    return ~torch.stack(on_device).all() if on_device else False


def _has_nonfinite(tensor: torch.Tensor) -> bool | torch.Tensor:
    """Whether a value is infinite or NaN; on a device the answer is left there.

    On the CPU one pass over the values: their sum of squares, which an infinite value or a NaN makes so too. Finite
    values seldom make it infinite (one beyond 1e19 does); only then they are looked at one by one.
    """
    values = tensor._values() if tensor.layout != torch.strided else tensor
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.device.type != "cpu":
        return ~torch.isfinite(values).all()
    if not values.is_floating_point():
        return False
    if values.is_contiguous() and values.dtype not in _ROUNDED:
        flat = values.view(-1)
        total = torch.dot(flat, flat)
    else:
        total = values.sum(dtype=torch.promote_types(values.dtype, torch.float32))
    return not (math.isfinite(total.item()) or bool(torch.isfinite(values).all()))
