"""What an exchange costs on this group: hooks run on sample buckets, outside of any backward pass.

Everything here is collective: all ranks call it with the same arguments in the same order, never from a future's
callback.
"""

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tensorplay.compression.collective import all_reduce_sum, traffic
from tensorplay.distributed.algorithms.ddp_comm_hooks._protocol import HookFunction, as_future
from tensorplay.distributed.algorithms.ddp_comm_hooks._step_time import ExchangeCost, contention

__all__ = ["Host", "SampleBucket", "agree", "look_at_hosts", "measure_cost", "sample_bytes", "sample_shapes"]

SMALLEST_SAMPLE_BYTES, LARGEST_SAMPLE_BYTES = 2 << 20, 32 << 20


def agree(
    values: Sequence[float], group: dist.ProcessGroup, device: torch.device, how: str = "max"
) -> list[float]:
    """The largest (or mean, or sum) of each value over the ranks: the same bits on every rank.

    Args:
        how: "max", "mean" or "sum".
    """
    if not values:
        return []
    tensor = torch.tensor(list(values), dtype=torch.float64)
    if device.type != "cpu":
        tensor = tensor.to(device)
    if how == "max":
        gathered = torch.zeros(group.size(), tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        gathered[group.rank()] = tensor
        all_reduce_sum(gathered, group).wait()
        tensor = gathered.amax(0)
    else:
        all_reduce_sum(tensor, group).wait()
        if how == "mean":
            tensor = tensor / group.size()
    agreed: list[float] = tensor.tolist()
    return agreed


class SampleBucket:
    """A bucket of made-up normal gradients that hooks take for DDP's.

    Args:
        shapes: of the parameters. dtype, device: of the gradients. seed: of the values, different on each rank.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device, seed: int
    ) -> None:
        self._parameters = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        numel = sum(parameter.numel() for parameter in self._parameters)
        generator = torch.Generator().manual_seed(seed)
        self._values = (torch.randn(numel, generator=generator) * 1e-2).to(device=device, dtype=dtype)
        self._buffer = self._values.clone()

    @property
    def nbytes(self) -> int:
        """Bytes of gradient."""
        return self._buffer.numel() * self._buffer.element_size()

    def refill(self) -> None:
        """Put the first values back: an exchange averages in place."""
        self._buffer.copy_(self._values)

    def index(self) -> int:
        """See torch's GradBucket."""
        return 0

    def is_last(self) -> bool:
        """See torch's GradBucket."""
        return True

    def buffer(self) -> torch.Tensor:
        """See torch's GradBucket."""
        return self._buffer

    def parameters(self) -> list[torch.Tensor]:
        """See torch's GradBucket."""
        return self._parameters

    def gradients(self) -> list[torch.Tensor]:
        """See torch's GradBucket."""
        views, start = [], 0
        for parameter in self._parameters:
            views.append(self._buffer[start : start + parameter.numel()].view(parameter.shape))
            start += parameter.numel()
        return views

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """See torch's GradBucket."""
        self._buffer = tensor


def sample_shapes(
    shapes: Sequence[tuple[int, ...]], itemsize: int, limit_bytes: int
) -> list[tuple[int, ...]]:
    """The first of `shapes` that fit into `limit_bytes`, the last one cut along its first dimension.

    Example:
        >>> sample_shapes([(10,), (100, 10), (5, 5)], 4, 2040)
        [(10,), (50, 10)]
    """
    taken: list[tuple[int, ...]] = []
    left = limit_bytes // itemsize
    for shape in shapes:
        numel = 1
        for size in shape:
            numel *= size
        if not numel:
            continue
        if numel <= left:
            taken.append(shape)
            left -= numel
            continue
        rows = left // (numel // shape[0]) if shape else 0
        if rows:
            taken.append((rows, *shape[1:]))
        elif not taken:
            taken.append((max(1, left),))  # a row alone is larger than the limit
        break
    return taken


def sample_bytes(total_bytes: int, seconds_per_byte: float, budget_seconds: float = 0.8) -> tuple[int, int]:
    """How much gradient to exchange in a small and in a large sample.

    Args:
        total_bytes: of the model's gradients. seconds_per_byte: of plain all-reduce. budget_seconds: for the large one.
    Example:
        >>> sample_bytes(100 << 20, 1e-8), sample_bytes(1000, 1e-8)
        ((8388608, 33554432), (250, 1000))
    """
    affordable = int(budget_seconds / seconds_per_byte) if seconds_per_byte > 0 else LARGEST_SAMPLE_BYTES
    large = min(total_bytes, max(SMALLEST_SAMPLE_BYTES, min(affordable, LARGEST_SAMPLE_BYTES)))
    return large // 4, large


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _exchange(hook: HookFunction, state: Any, sample: SampleBucket) -> None:
    bucket: Any = sample
    as_future(hook(state, bucket)).wait()
    _wait(sample.buffer().device)


def measure_cost(
    hook: HookFunction,
    state: Any,
    samples: tuple[SampleBucket, SampleBucket],
    group: dist.ProcessGroup,
    repeats: int = 3,
) -> ExchangeCost:
    """Time a hook's exchange of a small and of a large sample; the median over `repeats` of the slowest rank's time.

    Args:
        state: of this measurement alone. One unmeasured exchange of each sample comes first, for scratch and
            connections.
    """
    device = samples[0].buffer().device
    seconds: list[float] = []
    cpu, sent = 0.0, 0
    for sample in samples:
        _exchange(hook, state, sample)
        walls, cpus = [], []
        for _ in range(repeats):
            sample.refill()
            agree([0.0], group, device)
            before, cpu_before, began = traffic.sent_bytes, time.process_time(), time.perf_counter()
            _exchange(hook, state, sample)
            walls.append(time.perf_counter() - began)
            cpus.append(time.process_time() - cpu_before)
            sent = traffic.sent_bytes - before
        seconds.append(statistics.median(agree(walls, group, device)))
        cpu = statistics.median(cpus)
    cpu, counted_bytes = agree([cpu, sent], group, device, "mean")
    counted = None if not counted_bytes and group.size() > 1 else counted_bytes
    return ExchangeCost.from_two(
        (samples[0].nbytes, samples[1].nbytes), (seconds[0], seconds[1]), cpu, counted
    )


@dataclass(frozen=True)
class Host:
    """A machine that ranks run on.

    Attributes:
        ranks: of the group, on this machine. cores: that they may use together. threads: a rank computes with.
    """

    ranks: int
    cores: float
    threads: int

    @property
    def contention(self) -> float:
        """k of the formula."""
        return contention(self.ranks, self.threads, self.cores)


def look_at_hosts(group: dist.ProcessGroup) -> tuple[Host, list[str]]:
    """The machine whose cores are shortest, the first of equals, and which machine every rank runs on.

    Containers of one kernel are one machine. The same answer on every rank.
    """
    mine = (_machine(), sorted(_affinity()), _core_quota(), torch.get_num_threads())
    told: list[Any] = [None] * group.size()
    dist.all_gather_object(told, mine, group=group)
    hosts = []
    for machine in dict.fromkeys(entry[0] for entry in told):
        here = [entry for entry in told if entry[0] == machine]
        cores: set[int] = set().union(*(entry[1] for entry in here))
        quota = min(entry[2] for entry in here)
        hosts.append(Host(len(here), min(float(len(cores)), quota), max(entry[3] for entry in here)))
    return max(hosts, key=lambda host: host.contention), [entry[0] for entry in told]


def _machine() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        import socket

        return socket.gethostname()


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _core_quota() -> float:
    """Cores that a container's limit allows, or infinity."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return float(quota) / float(period)
    except (OSError, ValueError):
        return float("inf")
