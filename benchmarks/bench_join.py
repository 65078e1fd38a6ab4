"""What a Join block costs while every rank still has data: ours, torch's and none, side by side in one run.

    python benchmarks/bench_join.py [--steps 1000] [--ranks 2] [--width 256]

The blocks take turns in rounds of 100 steps, in another order each round. A figure is the median over the rounds of
the step time, and of its ratio to torch's block with the same setting in the same round.
"""

import argparse
import contextlib
import os
import random
import statistics
import sys
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.algorithms.join as torch_join
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed.algorithms.join import Join
from tensorplay.testing import close_ranks, run_ranks

ROUND_STEPS = 100
BLOCKS = ["no block", "torch, world", "ours, world", "torch, active", "ours, active"]


def open_block(name: str, model: DistributedDataParallel) -> Any:
    if name == "no block":
        return contextlib.nullcontext()
    kind: Any = Join if name.startswith("ours") else torch_join.Join
    return kind([model], divide_by_initial_world_size=name.endswith("world"))


def measure(rank: int, world_size: int, rounds: int, width: int, norm: bool) -> dict[str, list[float]]:
    """Milliseconds a step, a value for each round."""
    torch.manual_seed(0)
    layers = [nn.Linear(width, width), nn.BatchNorm1d(width) if norm else nn.Identity(), nn.Tanh()] * 3
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(128, width)
    order = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in BLOCKS}
    for number in range(rounds + 1):
        for name in order.sample(BLOCKS, len(BLOCKS)):
            with open_block(name, model):
                dist.barrier()
                start = time.perf_counter()
                for _ in range(ROUND_STEPS):
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()
                elapsed = time.perf_counter() - start
            if number:  # the first round only warms up
                times[name].append(1e3 * elapsed / ROUND_STEPS)
    return times


def report(times: dict[str, list[float]], title: str) -> None:
    print(f"\n{title}\n{'':16}{'ms a step':>10}{'/ torch':>10}{'/ no block':>12}")
    for name in BLOCKS:
        torchs = times["torch, " + name.split(", ")[-1]] if ", " in name else times["no block"]
        to_torch = statistics.median(a / b for a, b in zip(times[name], torchs, strict=True))
        to_none = statistics.median(a / b for a, b in zip(times[name], times["no block"], strict=True))
        shown = f"{to_torch:10.3f}" if ", " in name else f"{'':10}"
        print(f"{name:16}{statistics.median(times[name]):10.3f}{shown}{to_none:12.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="What a Join block costs while every rank still has data.")
    parser.add_argument("--steps", type=int, default=1000, help="steps of each block")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=256, help="of the three linear layers")
    arguments = parser.parse_args()
    rounds = max(1, arguments.steps // ROUND_STEPS)
    print(
        f"{arguments.ranks} ranks, {os.cpu_count()} cores, PyTorch {torch.__version__}, Python {sys.version.split()[0]}"
    )
    for norm, title in ((False, "no buffers"), (True, "BatchNorm (its buffers are broadcast every step)")):
        run = partial(measure, rounds=rounds, width=arguments.width, norm=norm)
        results = run_ranks(run, arguments.ranks, timeout_seconds=1800, warnings_as_errors=False)
        report(results[0], title)
    close_ranks()


if __name__ == "__main__":
    main()
