"""How long one averaging step takes, beside a bare all-reduce of the same bytes and the wire's own limit.

    torchrun --nproc-per-node 2 benchmarks/bench_averaging.py [--rate-gbit 1] [--repeats 15] [--json FILE]

The model is an MLP of about 25 million parameters. The contenders take turns, in another order each round:

* all-reduce: the backend's own, of one flat buffer that holds the model; nothing is copied;
* ours: one scheduled `PeriodicModelAverager.average_parameters`;
* torch: the same of torch.distributed's averager (its parameters get gradients, or it would skip them).

A figure is the median over the rounds, of the slowest rank. With `--rate-gbit`, the rate of the link the ranks
really share, the wire floor is  2 (W-1)/W x bytes / rate.
"""

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager as TorchAverager

from tensorplay.distributed.algorithms.model_averaging import PeriodicModelAverager

WIDTH, LAYERS = 1250, 16  # 16 x (1250 x 1250 + 1250) = 25.02 million


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def contenders(bucket_cap_mb: float) -> dict[str, Callable[[], None]]:
    """Each name's function performs one averaging; every one has a model of its own."""
    ours, torchs = build_model(), build_model()
    for parameter in torchs.parameters():
        parameter.grad = torch.zeros_like(parameter)
    flat = torch.cat([parameter.detach().flatten() for parameter in ours.parameters()])
    averager = PeriodicModelAverager(2, bucket_cap_mb=bucket_cap_mb)
    torch_averager = TorchAverager(2)

    def one_of_ours() -> None:
        averager.step = 0
        averager.average_parameters(ours.parameters())

    def one_of_torchs() -> None:
        torch_averager.step = 0
        torch_averager.average_parameters(torchs.parameters())

    return {
        "all-reduce": lambda: dist.all_reduce(flat),
        "ours": one_of_ours,
        "torch": one_of_torchs,
    }


def measure(repeats: int, bucket_cap_mb: float) -> dict[str, float]:
    """Median seconds of the slowest rank, by contender."""
    functions = contenders(bucket_cap_mb)
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(repeats + 1):
        for name in order.sample(sorted(functions), len(functions)):
            dist.barrier()
            start = time.perf_counter()
            functions[name]()
            slowest = torch.tensor([time.perf_counter() - start])
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if number:  # the first round allocates
                seconds[name].append(slowest.item())
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time one averaging step.")
    parser.add_argument("--rate-gbit", type=float, help="rate of each rank's link, Gbit/s")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--bucket-cap-mb", type=float, default=25.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    seconds = measure(options.repeats, options.bucket_cap_mb)
    model_bytes = sum(parameter.numel() * 4 for parameter in build_model().parameters())
    wire_bytes = 2 * (world_size - 1) * model_bytes / world_size
    if options.rate_gbit:
        seconds["wire floor"] = wire_bytes * 8 / (options.rate_gbit * 1e9)
    if dist.get_rank() == 0:
        base = "wire floor" if options.rate_gbit else "all-reduce"
        print(
            f"{world_size} ranks, {model_bytes / 1e6:.1f} MB of parameters, {wire_bytes / 1e6:.1f} MB sent a rank"
        )
        for name, value in seconds.items():
            print(f"{name:12} {value:8.4f} s   {value / seconds[base]:5.2f} x {base}")
        if options.json:
            report = {
                "world_size": world_size,
                "rate_gbit": options.rate_gbit,
                "bucket_cap_mb": options.bucket_cap_mb,
                "model_bytes": model_bytes,
                "wire_bytes": wire_bytes,
                "seconds": seconds,
                "repeats": options.repeats,
                "torch": torch.__version__,
                "cores": os.cpu_count(),
                "machine": platform.machine(),
            }
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
