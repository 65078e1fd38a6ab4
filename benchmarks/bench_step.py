"""Step time of a 25 M parameter MLP under each hook, over links of a chosen rate, ours and torch's in one run.

    python benchmarks/bench_step.py --ranks 2 4 --rates 1gbit 200mbit --out benchmarks/results/step.json

Every round runs every hook once, so that a noisy machine hurts all alike. "exposed" is step time less compute alone
(`noop`). Names that begin with "torch:" are torch's own; its quantization hooks fail on gloo and are repaired here
(see `repaired`).
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
from tensorplay.compression.compiled import numba_version

HOOKS = "noop torch:plain allreduce torch:fp16 fp16_compress int8 int4 sign quantize_per_tensor quantize_per_channel"


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(2048, 2048), nn.ReLU()]
    return nn.Sequential(*layers)


def repaired(name: str) -> Any:
    """torch's quantization hooks on gloo: its all_gather of a list, where it indexes the result as on NCCL."""
    from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as stock

    class Rows(list[torch.Tensor]):
        """A list that takes a tensor's indices, so that nothing is copied to make it one."""

        def __getitem__(self, index: Any) -> Any:
            return self[index[0]][index[1:]] if isinstance(index, tuple) else super().__getitem__(index)

    def all_gather(
        tensors: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        work = dist.distributed_c10d.all_gather(tensors, tensor, group=group, async_op=True)
        work.wait()

        class Done:
            def get_future(self) -> Any:
                future: Any = torch.futures.Future()
                future.set_result([Rows(tensors)])
                return future

            def wait(self) -> None:
                pass

        return Done()

    class Dist:
        def __getattr__(self, attribute: str) -> Any:
            return all_gather if attribute == "all_gather" else getattr(dist, attribute)

    stock.dist = Dist()
    return stock.quantization_pertensor_hook if name == "tensor" else stock.quantization_perchannel_hook


def attach(name: str, model: nn.Module) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as stock

    from tensorplay.distributed.algorithms.ddp_comm_hooks import register_ddp_comm_hook
    from tensorplay.nn.parallel import DistributedDataParallel

    if not name.startswith("torch:"):
        ddp = DistributedDataParallel(model)
        register_ddp_comm_hook(name, ddp)
        return ddp
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    if name == "torch:fp16":
        ddp.register_comm_hook(None, stock.fp16_compress_hook)
    elif name.startswith("torch:quantize_per_"):
        ddp.register_comm_hook(dist.group.WORLD, repaired(name.rsplit("_", 1)[1]))
    return ddp


def interface_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        if "eth0:" in line:
            return int(line.split(":")[1].split()[8])
    return 0


def one_run(name: str, batch: int, steps: int) -> dict[str, float]:
    """Two steps to warm up, then `steps` measured ones."""
    ddp = attach(name, mlp())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    x = torch.randn(batch, 2048, generator=torch.Generator().manual_seed(dist.get_rank()))
    seconds, sent = [], 0
    cpu = 0.0
    for step in range(steps + 2):
        dist.barrier()
        if step == 2:
            sent, cpu = interface_bytes(), time.process_time()
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=False)
        ddp(x).square().mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": statistics.median(seconds[2:]),
        "sent_mb": (interface_bytes() - sent) / steps / 1e6,
        "cpu_seconds": (time.process_time() - cpu) / steps,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def worker(hooks: list[str], rounds: int, batch: int, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in hooks}
    failed: dict[str, str] = {}
    for _ in range(rounds):
        for name in hooks:
            if name in failed:
                continue
            try:
                rows[name].append(one_run(name, batch, steps))
            except RuntimeError as error:
                failed[name] = str(error).splitlines()[0]
    if dist.get_rank() == 0:
        report = {
            name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            for name, runs in rows.items()
            if runs
        }
        print(json.dumps({"rows": report, "failed": failed}))
    dist.barrier()
    dist.destroy_process_group()


def table(rows: dict[str, dict[str, float]]) -> str:
    alone = rows.get("noop", {}).get("seconds", 0.0)
    plain = rows.get("torch:plain", rows.get("allreduce", {})).get("seconds", 0.0)
    lines = [
        f"{'hook':28}{'step s':>9}{'exposed s':>11}{'exposed/plain':>15}{'plain/step':>12}{'sent MB':>9}{'cpu s':>8}"
    ]
    for name, row in rows.items():
        exposed = row["seconds"] - alone
        share = exposed / (plain - alone) if plain > alone else float("nan")
        lines.append(
            f"{name:28}{row['seconds']:9.3f}{exposed:11.3f}{share:15.2f}{plain / row['seconds']:12.2f}"
            f"{row['sent_mb']:9.2f}{row['cpu_seconds']:8.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["1gbit"])
    parser.add_argument("--hooks", default=HOOKS, help="names, separated by spaces or commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    hooks = arguments.hooks.replace(",", " ").split()
    if arguments.worker:
        worker(hooks, arguments.rounds, arguments.batch, arguments.steps)
        return
    if reason := available():
        sys.exit(f"bench_step needs a network lab: {reason}")
    results: list[dict[str, Any]] = []
    for world_size in arguments.ranks:
        for rate in arguments.rates:
            command = [sys.executable, __file__, "--worker", "--hooks", " ".join(hooks)]
            for option in ("rounds", "steps", "batch"):
                command += [f"--{option}", str(getattr(arguments, option))]
            with Lab(world_size, rate) as lab:
                report = json.loads(lab.run(command)[0].strip().splitlines()[-1])
            print(f"\n{world_size} ranks, {rate}\n{table(report['rows'])}", flush=True)
            for name, reason in report["failed"].items():
                print(f"{name:28}failed: {reason}", flush=True)
            results.append({"ranks": world_size, "rate": rate, **report})
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        about = {
            "command": " ".join(sys.argv),
            "torch": torch.__version__,
            "numba": numba_version(),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "machine": platform.machine(),
        }
        arguments.out.write_text(json.dumps({"about": about, "results": results}, indent=1))


if __name__ == "__main__":
    main()
