"""Step time, optimizer memory and bytes of a 25 M parameter MLP with Adam: plain DDP beside every form of ZeRO.

    python benchmarks/bench_zero.py --ranks 4 --rates 1gbit --out benchmarks/results/zero.json
    torchrun --nproc-per-node 4 benchmarks/bench_zero.py --worker       # without a lab: this machine's own loopback

Every round runs every contender once, so that a noisy machine hurts all alike; each gets a new model, three steps to
warm up (DDP changes its buckets, the optimizer makes its state) and `--steps` measured ones. A step is zero_grad,
forward, backward, step; a figure is the median over steps and rounds of the slowest rank.

* alone: forward, backward and Adam without any exchange.
* plain: DDP and the whole Adam on every rank.
* torch zero, zero: DDP, then step() outside of backward; torch's and ours.
* hook, interleaved: ours in a hook. "to owner": with reduce_scatter=True.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tensorplay.cli.lab import Lab, available
from tensorplay.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from tensorplay.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from tensorplay.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from tensorplay.distributed.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer

Model = DistributedDataParallel
Made = tuple[Model, torch.optim.Optimizer]
WARM_UP_STEPS = 3


def mlp(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())))


def alone(ddp: Model) -> torch.optim.Optimizer:
    ddp.register_comm_hook(None, noop_hook)
    return torch.optim.Adam(ddp.parameters(), lr=1e-4)


def plain(ddp: Model) -> torch.optim.Optimizer:
    return torch.optim.Adam(ddp.parameters(), lr=1e-4)


def torch_zero(ddp: Model) -> torch.optim.Optimizer:
    return TorchZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=1e-4)


def zero(ddp: Model) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=1e-4)


def in_hook(make: Callable[..., Any], **options: Any) -> Callable[[Model], torch.optim.Optimizer]:
    def build(ddp: Model) -> torch.optim.Optimizer:
        optimizer = ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=1e-4
        )
        ddp.register_comm_hook(None, make(allreduce_hook, ddp, optimizer, True, **options))
        return optimizer

    return build


CONTENDERS: dict[str, Callable[[Model], torch.optim.Optimizer]] = {
    "alone": alone,
    "plain": plain,
    "torch zero": torch_zero,
    "zero": zero,
    "hook": in_hook(hook_with_zero_step),
    "hook to owner": in_hook(hook_with_zero_step, reduce_scatter=True),
    "interleaved": in_hook(hook_with_zero_step_interleaved),
    "interleaved to owner": in_hook(hook_with_zero_step_interleaved, reduce_scatter=True),
}


def interface_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        if "eth0:" in line:
            return int(line.split(":")[1].split()[8])
    return 0


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of this rank: torch's class keeps it in the optimizer it wraps."""
    if isinstance(optimizer, TorchZeroRedundancyOptimizer):
        optimizer = optimizer.optim
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def slowest(value: float) -> float:
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.item()


def one_run(name: str, options: argparse.Namespace) -> dict[str, float]:
    ddp = DistributedDataParallel(mlp(options.width, options.layers), bucket_cap_mb=options.bucket_cap_mb)
    optimizer = CONTENDERS[name](ddp)
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(options.batch, options.width, generator=generator)
    seconds = []
    sent, cpu = 0, 0.0
    for step in range(options.steps + WARM_UP_STEPS):
        if step == WARM_UP_STEPS:
            sent, cpu = interface_bytes(), time.process_time()
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()
        seconds.append(slowest(time.perf_counter() - start))
    return {
        "seconds": statistics.median(seconds[WARM_UP_STEPS:]),
        "sent_mb": (interface_bytes() - sent) / options.steps / 1e6,
        "cpu_seconds": (time.process_time() - cpu) / options.steps,
        "state_mb": slowest(state_bytes(optimizer)) / 1e6,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def worker(names: list[str], options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            rows[name].append(one_run(name, options))
    if dist.get_rank() == 0:
        report = {
            name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            for name, runs in rows.items()
        }
        if not options.quiet:
            print(table(report))
        print(json.dumps({"rows": report}))
    dist.barrier()
    dist.destroy_process_group()


def table(rows: dict[str, dict[str, float]]) -> str:
    base = rows.get("plain", next(iter(rows.values())))
    lines = [f"{'':24}{'step s':>9}{'x plain':>9}{'sent MB':>9}{'cpu s':>8}{'state MB':>10}"]
    for name, row in rows.items():
        lines.append(
            f"{name:24}{row['seconds']:9.3f}{row['seconds'] / base['seconds']:9.2f}{row['sent_mb']:9.1f}"
            f"{row['cpu_seconds']:8.2f}{row['state_mb']:10.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[4])
    parser.add_argument("--rates", nargs="+", default=["1gbit"])
    parser.add_argument(
        "--contenders", default=",".join(CONTENDERS).replace(", ", "; "), help="names, by ','"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--bucket-cap-mb", type=float, default=25.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--worker", action="store_true", help="be one rank, started by torchrun or by the lab"
    )
    parser.add_argument("--quiet", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.contenders.split(",")
    unknown = sorted(set(names) - set(CONTENDERS))
    if unknown:
        parser.error(
            f"unknown contenders {unknown}: known are {list(CONTENDERS)}; write ';' for a ',' in a name"
        )
    if options.worker:
        worker(names, options)
        return
    if reason := available():
        sys.exit(f"bench_zero needs a network lab: {reason}; or start it with torchrun and --worker")
    results: list[dict[str, Any]] = []
    for world_size in options.ranks:
        for rate in options.rates:
            command = [sys.executable, __file__, "--worker", "--quiet", "--contenders", options.contenders]
            for option in ("rounds", "steps", "batch", "width", "layers", "bucket_cap_mb"):
                command += [f"--{option.replace('_', '-')}", str(getattr(options, option))]
            with Lab(world_size, rate) as lab:
                report = json.loads(lab.run(command)[0].strip().splitlines()[-1])
            print(f"\n{world_size} ranks, {rate}\n{table(report['rows'])}", flush=True)
            results.append({"ranks": world_size, "rate": rate, **report})
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        about = {
            "command": " ".join(sys.argv),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "machine": platform.machine(),
        }
        options.out.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
