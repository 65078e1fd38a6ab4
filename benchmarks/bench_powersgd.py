"""PowerSGD against torch's own on a 25 M parameter MLP, in one interleaved run.

    python benchmarks/bench_powersgd.py --ranks 2 --rates 1gbit --out benchmarks/results/powersgd.json
    torchrun --nproc-per-node 2 benchmarks/bench_powersgd.py --worker     # without root: this machine's loopback

torch's hook has one bucket, the only set-up in which it works on gloo; ours has DDP's default buckets and overlaps.
"exposed" is the step less compute alone, "hook cpu" the CPU time of a step less that of compute alone ("noop"). Every
round runs every hook once, so that a noisy machine hurts all alike. Peak memory is measured with one process a hook.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorplay.cli.lab import Lab, available
from tensorplay.compression.compiled import KERNELS, is_compiled, numba_version

HOOKS = "noop plain torch:1 ours:1 torch:4 ours:4 batched:4 same_shape:4 bucket:4"
WARM_UP_STEPS = 5  # two of plain averaging, then what is allocated once


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(2048, 2048), nn.ReLU()]
    return nn.Sequential(*layers)


def attach(name: str) -> Any:
    """A DDP module with the hook of that name: `kind:rank`."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as stock

    from tensorplay.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as ours, register_ddp_comm_hook
    from tensorplay.nn.parallel import DistributedDataParallel

    kind, _, rank = name.partition(":")
    if kind == "torch":
        one_bucket = nn.parallel.DistributedDataParallel(mlp(), bucket_cap_mb=4000)
        state = stock.PowerSGDState(
            process_group=None, matrix_approximation_rank=int(rank), start_powerSGD_iter=2
        )
        one_bucket.register_comm_hook(state, stock.powerSGD_hook)
        return one_bucket
    ddp = DistributedDataParallel(mlp())
    if kind == "noop":
        register_ddp_comm_hook("noop", ddp)
    elif kind != "plain":
        mine = ours.PowerSGDState(
            matrix_approximation_rank=int(rank),
            start_powerSGD_iter=2,
            batch_tensors_with_same_shape=kind == "batched",
            batched_layout="bucket" if kind == "bucket" else "same_shape",
        )
        hook = ours.batched_powerSGD_hook if kind in ("same_shape", "bucket") else ours.powerSGD_hook
        register_ddp_comm_hook(hook, ddp, mine)
    return ddp


def interface_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        if "eth0:" in line:
            return int(line.split(":")[1].split()[8])
    return 0


def one_run(name: str, batch: int, steps: int) -> dict[str, float]:
    ddp = attach(name)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    x = torch.randn(batch, 2048, generator=torch.Generator().manual_seed(dist.get_rank()))
    seconds, sent, cpu = [], 0, 0.0
    for step in range(WARM_UP_STEPS + steps):
        dist.barrier()
        if step == WARM_UP_STEPS:
            sent, cpu = interface_bytes(), time.process_time()
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=False)
        ddp(x).square().mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": statistics.median(seconds[WARM_UP_STEPS:]),
        "sent_mb": (interface_bytes() - sent) / steps / 1e6,
        "cpu_seconds": (time.process_time() - cpu) / steps,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def worker(hooks: list[str], rounds: int, batch: int, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in hooks}
    for _ in range(rounds):
        for name in hooks:
            rows[name].append(one_run(name, batch, steps))
    if dist.get_rank() == 0:
        middle = {
            name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            for name, runs in rows.items()
        }
        print(json.dumps(middle))
    dist.barrier()
    dist.destroy_process_group()


def table(rows: dict[str, dict[str, float]]) -> str:
    alone = rows.get("noop", {"seconds": 0.0, "cpu_seconds": 0.0})
    head = f"{'hook':16}{'step s':>9}{'exposed s':>11}{'hook cpu s':>12}{'sent MB':>9}{'peak MB':>9}   against torch: "
    lines = [head + "step, exposed, hook cpu, peak"]
    for name, row in rows.items():
        exposed, cpu = row["seconds"] - alone["seconds"], row["cpu_seconds"] - alone["cpu_seconds"]
        line = f"{name:16}{row['seconds']:9.3f}{exposed:11.3f}{cpu:12.3f}{row['sent_mb']:9.2f}{row['peak_mb']:9.0f}"
        torchs = rows.get(f"torch:{name.partition(':')[2]}")
        if torchs is not None and not name.startswith("torch"):
            theirs = (torchs["seconds"] - alone["seconds"], torchs["cpu_seconds"] - alone["cpu_seconds"])
            line += f"   {row['seconds'] / torchs['seconds']:.2f}, {exposed / theirs[0]:.2f}, {cpu / theirs[1]:.2f}, "
            line += f"{row['peak_mb'] / torchs['peak_mb']:.2f}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--rates", nargs="+", default=["1gbit"])
    parser.add_argument("--hooks", default=HOOKS, help="kind:rank, separated by spaces or commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--no-memory", action="store_true", help="leave out the runs of one process a hook")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help="be one rank; torchrun's variables say which")
    arguments = parser.parse_args()
    hooks = arguments.hooks.replace(",", " ").split()
    if arguments.worker:
        worker(hooks, arguments.rounds, arguments.batch, arguments.steps)
        return
    if reason := available():
        sys.exit(f"bench_powersgd needs a network lab, or torchrun with --worker: {reason}")
    results: list[dict[str, Any]] = []
    for world_size in arguments.ranks:
        for rate in arguments.rates:
            with Lab(world_size, rate) as lab:

                def ask(names: list[str], rounds: int, lab: Lab = lab) -> Any:
                    command = [sys.executable, __file__, "--worker", "--hooks", " ".join(names)]
                    command += ["--rounds", str(rounds), "--steps", str(arguments.steps)]
                    command += ["--batch", str(arguments.batch)]
                    return json.loads(lab.run(command)[0].strip().splitlines()[-1])

                rows = ask(hooks, arguments.rounds)
                for name in hooks if not arguments.no_memory else ():
                    rows[name]["peak_mb"] = ask([name], 1)[name]["peak_mb"]
            print(f"\n{world_size} ranks, {rate}\n{table(rows)}", flush=True)
            results.append({"ranks": world_size, "rate": rate, "rows": rows})
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        about = {
            "command": " ".join(sys.argv),
            "torch": torch.__version__,
            "numba": numba_version(),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "loops": KERNELS if is_compiled() else "none",
        }
        arguments.out.write_text(json.dumps({"about": about, "results": results}, indent=1))


if __name__ == "__main__":
    main()
