"""What observing a hook costs: the same training steps with and without `observe`, side by side in one run.

    python benchmarks/bench_telemetry.py --hooks allreduce int8 --out benchmarks/results/telemetry.json

The model is a stack of linear layers whose batch is chosen so that a step takes about `--step-milliseconds` with plain
all-reduce. Its gradients travel in about eight buckets. Blocks of steps with and without `observe` take turns, in an
order that changes from round to round; each rank writes a `JSONLinesSink`, and no error is measured. Figures:

    ratio         step time with / without in the same round, median over the rounds, of the slowest rank
    CPU           process time a step with - without, all threads of a rank, median over the rounds
    telemetry     `telemetry_seconds` a step: what the training thread spends between steps, median
"""

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed.algorithms.ddp_comm_hooks import register_ddp_comm_hook
from tensorplay.telemetry import JSONLinesSink, MemorySink, observe
from tensorplay.testing import close_ranks, run_ranks

HOOKS = ["allreduce", "fp16_compress", "int8"]
LAYERS = 16
BUCKETS = 8


def build(width: int, hook: str) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [module for _ in range(LAYERS) for module in (nn.Linear(width, width), nn.ReLU())]
    cap = 4 * LAYERS / BUCKETS * (width * width + width) / 2**20
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=cap, gradient_as_bucket_view=True)
    register_ddp_comm_hook(hook, model)
    return model


def train(model: DistributedDataParallel, data: torch.Tensor, steps: int) -> tuple[float, float]:
    """Seconds and CPU seconds a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


def choose_batch(width: int, step_seconds: float) -> int:
    """The batch whose step takes about `step_seconds` on the slowest rank; the same on all ranks."""
    model, batch = build(width, "allreduce"), 64
    for _ in range(3):
        train(model, torch.randn(batch, width), 3)
        seconds = torch.tensor(train(model, torch.randn(batch, width), 8)[0])
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        batch = max(1, int(batch * min(8.0, step_seconds / seconds.item())))
    return batch


def measure(
    hooks: list[str], width: int, step_seconds: float, rounds: int, steps: int, rank: int, world_size: int
) -> dict[str, Any]:
    """By hook: a list of rounds, each with (seconds, CPU seconds) without and with, and telemetry's own seconds."""
    batch = choose_batch(width, step_seconds)
    found: dict[str, Any] = {"batch": batch, "hooks": {}}
    order = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        for hook in hooks:
            model = build(width, hook)
            data = torch.randn(batch, width)
            train(model, data, 5)  # DDP makes its final buckets
            kept: list[dict[str, Any]] = []
            for number in range(rounds + 1):
                turn: dict[str, Any] = {}
                for watched in order.sample([False, True], 2):
                    if not watched:
                        turn["without"] = train(model, data, steps)
                        continue
                    memory = MemorySink()
                    sinks = [JSONLinesSink(Path(folder) / f"{number}.jsonl"), memory]
                    with observe(model, sinks, error_every=0):
                        turn["with"] = train(model, data, steps)
                    records = memory.of("step")[1:]
                    turn["telemetry"] = statistics.median(one["telemetry_seconds"] for one in records)
                    turn["buckets"] = len(memory.of("bucket")) // steps
                if number:  # the first round only warms up
                    kept.append(turn)
            found["hooks"][hook] = kept
    return found


def figures(by_rank: list[list[dict[str, Any]]]) -> dict[str, float]:
    """The slowest rank's time in every round; CPU and telemetry as means over the ranks."""
    turns = list(zip(*by_rank, strict=True))
    slowest = [{kind: max(one[kind][0] for one in turn) for kind in ("without", "with")} for turn in turns]
    cpu = [statistics.fmean(one["with"][1] - one["without"][1] for one in turn) for turn in turns]
    ratios = sorted(turn["with"] / turn["without"] for turn in slowest)
    return {
        "step_seconds": statistics.median(turn["without"] for turn in slowest),
        "ratio": statistics.median(ratios),
        "ratio_low_quartile": ratios[len(ratios) // 4],
        "ratio_high_quartile": ratios[(3 * len(ratios)) // 4],
        "cpu_seconds_a_step": statistics.median(cpu),
        "telemetry_seconds_a_step": statistics.median(one["telemetry"] for turn in turns for one in turn),
        "buckets": by_rank[0][0]["buckets"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What observing a hook costs.")
    parser.add_argument("--hooks", nargs="+", default=HOOKS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20, help="of a block (default: %(default)s)")
    parser.add_argument("--width", type=int, default=384, help=f"of the {LAYERS} linear layers")
    parser.add_argument("--step-milliseconds", type=float, default=50.0)
    parser.add_argument("--out", type=Path, help="write JSON here")
    arguments = parser.parse_args()
    run = partial(
        measure,
        arguments.hooks,
        arguments.width,
        arguments.step_milliseconds / 1000,
        arguments.rounds,
        arguments.steps,
    )
    results = run_ranks(run, arguments.ranks, timeout_seconds=1800, warnings_as_errors=False)
    close_ranks()
    values = LAYERS * (arguments.width * arguments.width + arguments.width)
    report = {
        "ranks": arguments.ranks,
        "rounds": arguments.rounds,
        "steps_a_block": arguments.steps,
        "gradient_bytes": 4 * values,
        "batch": results[0]["batch"],
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hooks": {hook: figures([result["hooks"][hook] for result in results]) for hook in arguments.hooks},
    }
    print(
        f"{arguments.ranks} ranks, {os.cpu_count()} cores, PyTorch {torch.__version__}, Python "
        f"{platform.python_version()}; {4 * values / 1e6:.1f} MB of gradients, batch {report['batch']}, "
        f"{arguments.rounds} rounds of {arguments.steps} steps"
    )
    print(
        f"{'hook':<16}{'buckets':>8}{'step ms':>9}{'ratio':>8}{'quartiles':>16}"
        f"{'CPU ms a step':>15}{'telemetry ms':>14}"
    )
    for hook, found in report["hooks"].items():
        quartiles = f"{found['ratio_low_quartile']:.3f}-{found['ratio_high_quartile']:.3f}"
        print(
            f"{hook:<16}{found['buckets']:>8}{1000 * found['step_seconds']:>9.1f}{found['ratio']:>8.3f}"
            f"{quartiles:>16}{1000 * found['cpu_seconds_a_step']:>15.2f}"
            f"{1000 * found['telemetry_seconds_a_step']:>14.2f}"
        )
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
