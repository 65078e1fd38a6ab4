"""How near a lane's all-to-all comes to the wire's limit, beside torch's, over links of a chosen rate.

    python benchmarks/bench_all_to_all.py --ranks 2 4 --rate 1gbit --out benchmarks/results/all_to_all.json

The limit of an exchange in which each rank sends `sent` bytes in all is 8 x sent / rate. Ours is measured as hooks use
it: in pieces, several of which are in flight; and as one piece. Median of interleaved rounds, slowest rank.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tensorplay.cli.lab import Lab, available, bits_per_second
from tensorplay.compression.driver import Lane, lane_for
from tensorplay.compression.rounds import AllToAll, Exchange, Scratch

SENT_BYTES = 24_000_000
PIECES = 12


def exchange(scratch: Scratch, nbytes: int) -> Exchange:
    """One piece: `nbytes` to every peer."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    outbox = scratch.borrow("outbox", nbytes, torch.uint8, device)
    inbox = scratch.borrow("inbox", nbytes * world_size, torch.uint8, device).view(world_size, nbytes)
    yield AllToAll(
        lambda peer: None if peer == rank else outbox,
        [None if peer == rank else inbox[peer] for peer in range(world_size)],
        lambda source: None,
    )
    return None


def ours(lane: Lane, pieces: int) -> None:
    """All of it through the lane, in `pieces` exchanges."""
    nbytes = SENT_BYTES // (dist.get_world_size() - 1) // pieces
    for future in [lane.submit(lambda scratch: exchange(scratch, nbytes)) for _ in range(pieces)]:
        future.wait()


def torchs(sent: torch.Tensor, received: torch.Tensor) -> None:
    """The same bytes by `all_to_all_single`; what a rank keeps for itself is as large as what it sends a peer."""
    dist.all_to_all_single(received, sent)


def worker(rounds: int) -> None:
    """Measure; rank 0 prints seconds by name as one line of JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    world_size = dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    lane = lane_for(group, "bench_all_to_all", torch.device("cpu"))
    whole = torch.zeros(SENT_BYTES // (world_size - 1) * world_size, dtype=torch.uint8)
    other = torch.zeros_like(whole)
    tasks: dict[str, Callable[[], None]] = {
        "lane, pieces": lambda: ours(lane, PIECES),
        "lane, whole": lambda: ours(lane, 1),
        "torch all_to_all_single": lambda: torchs(whole, other),
    }
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(rounds + 1):
        for name, task in tasks.items():
            dist.barrier()
            began = time.perf_counter()
            task()
            took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if turn:
                seconds[name].append(took.item())
    if dist.get_rank() == 0:
        print(json.dumps({name: statistics.median(values) for name, values in seconds.items()}))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.rounds)
        return
    rate = bits_per_second(arguments.rate)
    if rate is None:
        sys.exit("bench_all_to_all needs a rate: an unlimited link has no limit to compare with")
    if reason := available():
        sys.exit(f"bench_all_to_all needs a network lab: {reason}")
    limit = 8 * SENT_BYTES / rate
    results: list[dict[str, Any]] = []
    for world_size in arguments.ranks:
        with Lab(world_size, arguments.rate) as lab:
            command = [sys.executable, __file__, "--worker", "--rounds", str(arguments.rounds)]
            measured = json.loads(lab.run(command)[0].strip().splitlines()[-1])
        results.append({"ranks": world_size, "limit_seconds": limit, "seconds": measured})
        print(f"{world_size} ranks, {arguments.rate}: {SENT_BYTES / 1e6:.0f} MB a rank, limit {limit:.3f} s")
        for name, took in measured.items():
            print(f"  {name:28}{took:8.3f} s  {took / limit:6.2f} x the limit", flush=True)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        about = {"command": " ".join(sys.argv), "torch": torch.__version__, "rate": arguments.rate}
        arguments.out.write_text(json.dumps({"about": about, "results": results}, indent=1))


if __name__ == "__main__":
    main()
