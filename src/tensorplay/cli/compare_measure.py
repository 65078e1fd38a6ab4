"""What each rank of a comparison does: run every hook it is told to, from the same start, and measure.

A step's time is that of its slowest rank; ranks wait for each other before each step, outside the measured time.
"""

import ctypes
import gc
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn

from tensorplay.cli.compare_advice import cell_advice
from tensorplay.cli.compare_hooks import parallelise, rhythm
from tensorplay.cli.compare_plan import Job
from tensorplay.cli.workload import Workload, load_workload
from tensorplay.compression.collective import traffic
from tensorplay.compression.registry import make_codec

__all__ = ["Sample", "block_means", "combine", "run_job"]

_COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # the launcher's own limit comes long before


@dataclass
class Sample:
    """What one rank saw in one run of one hook.

    Attributes:
        step_seconds: of each measured step.
        cpu_seconds: of all this process's threads, in the measured steps together.
        sent_bytes, received_bytes: counted where tensors enter collectives, in the measured steps together.
        interface_sent_bytes, interface_received_bytes: by the kernel; None where the interface isn't this rank's alone.
        peak_memory_bytes: the most that was resident during the run beyond what was before it; None where the kernel
            can't tell.
        loss: of the last step.
        replica: a checksum of every parameter's bits.
        choice: what a hook that chooses was using at the end; None for the others.
    """

    step_seconds: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    interface_sent_bytes: int | None = None
    interface_received_bytes: int | None = None
    peak_memory_bytes: int | None = None
    loss: float = 0.0
    replica: str = ""
    choice: str | None = None


def run_job(job: Job) -> None:
    """Join the group, do what the job says, leave the group. Rank 0 writes the events.

    Sets this process's number of threads.

    Example:
        >>> run_job(Job.load("runs/compare/cells/2-1gbit/job.json"))        # doctest: +SKIP
    """
    torch.set_num_threads(job.settings.threads)
    dist.init_process_group("gloo", timeout=_COLLECTIVE_TIMEOUT)
    with _Events(job.events_path if dist.get_rank() == 0 else None) as events:
        workload = load_workload(
            job.settings.model, dist.get_rank(), dist.get_world_size(), job.settings.seed
        )
        events.add("ready", parameters=workload.parameter_count())
        if job.advise_for:
            events.add("advising")
            events.add("advised", advice=cell_advice(workload, job.advise_for))
        _load_what_is_loaded_once(workload)
        del workload
        for number, hook in job.todo:
            events.add("started", round=number, hook=hook)
            sample = _run_hook(hook, job, events)
            samples: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(samples, sample)
            events.add("finished", round=number, hook=hook, result=combine(samples, rhythm(hook).period))
    dist.barrier()
    dist.destroy_process_group()


class _Events:
    """Appends lines to a file; does nothing where there is none."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: TextIO | None = None

    def __enter__(self) -> "_Events":
        if self._path is not None:
            self._file = self._path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, event: str, **fields: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"event": event, **fields}) + "\n")
            self._file.flush()


def _load_what_is_loaded_once(workload: Workload) -> None:
    """A step without DDP, and Numba where codecs use it: libraries load and allocate in the first one.

    The first hook shall not pay for that, in seconds or in memory.
    """
    make_codec("int8").compress(torch.zeros(1024))
    optimizer = workload.optimizer(workload.model)
    workload.loss(workload.model, next(workload.endless())).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _run_hook(name: str, job: Job, events: _Events) -> Sample:
    """One run of one hook.

    1. Give back what the run before has freed; start the peak of memory afresh.
    2. Model, optimizer and data as for every other hook, wrapped in DDP with this one.
    3. Warm-up steps, more for a hook that has yet to choose.
    4. Measured steps, of whole periods. CPU time and bytes are read around them together.
    5. The last loss, and a checksum of the replica after the hook's own finish.
    """
    peak = _PeakMemory()
    settings, pace = job.settings, rhythm(name)
    workload = load_workload(settings.model, dist.get_rank(), dist.get_world_size(), settings.seed)
    parallel = parallelise(name, workload.model, workload.optimizer(workload.model))
    batches, sample = workload.endless(), Sample()

    def step() -> float:
        batch = next(batches)
        dist.barrier()
        begin = time.perf_counter()
        parallel.optimizer.zero_grad(set_to_none=False)
        loss = workload.loss(parallel.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        parallel.optimizer.step()
        seconds = time.perf_counter() - begin
        sample.loss = loss.item()
        events.add("step")
        return seconds

    for _ in range(max(settings.warmup, pace.warmup)):
        step()
    for _ in range(pace.most_until_settled):
        if _everywhere(parallel.settled()):
            for _ in range(settings.warmup):
                step()
            break
        step()
    dist.barrier()
    sent, received = traffic.sent_bytes, traffic.received_bytes
    before, cpu = _interface_bytes(job.device), time.process_time()
    for _ in range(-(-settings.steps // pace.period) * pace.period):
        sample.step_seconds.append(step())
    sample.cpu_seconds = time.process_time() - cpu
    dist.barrier()
    sample.sent_bytes, sample.received_bytes = traffic.sent_bytes - sent, traffic.received_bytes - received
    after = _interface_bytes(job.device)
    if before is not None and after is not None:
        sample.interface_sent_bytes, sample.interface_received_bytes = (
            after[0] - before[0],
            after[1] - before[1],
        )
    parallel.finish()
    sample.peak_memory_bytes = peak.read()
    sample.replica, sample.choice = _fingerprint(workload.model), parallel.choice()
    return sample


def _everywhere(value: bool) -> bool:
    flag = torch.tensor(int(value))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


class _PeakMemory:
    """The most resident memory since it was made, less what was resident then. Linux only: elsewhere it reads None.

    A process keeps a little of what earlier hooks used, a lane's scratch and libraries' caches: that isn't this run's.
    """

    def __init__(self) -> None:
        gc.collect()
        if sys.platform == "linux":
            with suppress(OSError, AttributeError):  # another C library has no malloc_trim
                ctypes.CDLL(None).malloc_trim(0)
        self._start: int | None = None
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again at what is resident now
            self._start = _status_bytes("VmRSS")

    def read(self) -> int | None:
        if self._start is None:
            return None
        peak = _status_bytes("VmHWM")
        return None if peak is None else max(0, peak - self._start)


def _status_bytes(name: str) -> int | None:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return 1024 * int(line.split()[1])
    return None


def _interface_bytes(device: str) -> tuple[int, int] | None:
    """Bytes that the interface has sent and received; None without a device."""
    if not device:
        return None
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == device:
            return int(fields.split()[8]), int(fields.split()[0])
    raise RuntimeError(f"/proc/net/dev must have a line for {device}")


@torch.no_grad()
def _fingerprint(model: nn.Module) -> str:
    """A checksum of every parameter's bits: equal on all ranks when the replicas are."""
    digest = hashlib.sha1(usedforsecurity=False)
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def block_means(seconds: Sequence[float], period: int) -> list[float]:
    """The mean of each `period` values, one after the other.

    Example:
        >>> block_means([1.0, 3.0, 5.0, 7.0], 2)
        [2.0, 6.0]
    """
    return [statistics.fmean(seconds[start : start + period]) for start in range(0, len(seconds), period)]


def combine(samples: Sequence[Sample], period: int) -> dict[str, Any]:
    """One run's figures from those of its ranks, a step: times of the slowest rank, bytes and CPU time as means.

    Example:
        >>> one, other = Sample([1.0, 2.0], 0.5, 10, 10), Sample([3.0, 1.0], 1.5, 30, 10)
        >>> result = combine([one, other], period=1)
        >>> result["step_seconds"], result["cpu_seconds"], result["sent_bytes"]
        ([3.0, 2.0], 0.5, 10.0)
    """
    steps = len(samples[0].step_seconds)
    slowest = [max(sample.step_seconds[step] for sample in samples) for step in range(steps)]
    peaks = [sample.peak_memory_bytes for sample in samples]

    def a_step(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.fmean(known) / steps if len(known) == len(values) else None

    return {
        "step_seconds": block_means(slowest, period),
        "cpu_seconds": a_step([sample.cpu_seconds for sample in samples]),
        "sent_bytes": a_step([sample.sent_bytes for sample in samples]),
        "received_bytes": a_step([sample.received_bytes for sample in samples]),
        "interface_sent_bytes": a_step([sample.interface_sent_bytes for sample in samples]),
        "interface_received_bytes": a_step([sample.interface_received_bytes for sample in samples]),
        "peak_memory_bytes": None if None in peaks else max(peak for peak in peaks if peak is not None),
        "loss": statistics.fmean(sample.loss for sample in samples),
        "replicas_equal": len({sample.replica for sample in samples}) == 1,
        "choice": samples[0].choice,
    }
