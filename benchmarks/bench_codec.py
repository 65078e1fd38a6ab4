"""Speed of every codec on one core, as ratios to `copy_` of the same gradient in the same run.

    OMP_NUM_THREADS=1 python benchmarks/bench_codec.py [CODEC ...] [--rounds 7] [--out benchmarks/results/codec.json]

Columns, each the time of `copy_` over the time of what it names, so larger is faster:

    feedback    encode with error feedback: residual += gradient, encode it, residual -= decode(payload)
    encode      encoding alone
    decode      payloads to a float32 gradient
    add         payloads times 1/2 added to a float32 gradient
    step        all a codec does in a step of two ranks: encode gradient + residual; then, since no residual may change
                before the step is known to be finite everywhere, settle the residual and write the mean of two payloads

The gradient is worked through in blocks, as exchanges do; each block is timed. Within a round everything runs once,
right after a `copy_` of its own. A figure takes each block's best of all rounds, for the codec and for its `copy_`, so
that other work on the machine disturbs it little; in brackets is the median of the ratios within rounds.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tensorplay.compression.codec import Codec, Context
from tensorplay.compression.compiled import numba_version
from tensorplay.compression.grouped import GroupScaled
from tensorplay.compression.plan import BLOCK_ELEMENTS
from tensorplay.compression.registry import make_codec

CODECS = [
    "int8:group_size=512",
    "int8",
    "int8:rounding=stochastic",
    "int4:group_size=512",
    "int4",
    "sign:group_size=512",
    "sign",
    "int2",
    "fp8_e4m3",
    "fp8_e5m2",
    "uint8",
    "bf16",
    "fp16",
    "topk:0.01",
    "topk:0.001",
    "randomk:0.01",
]
COLUMNS = ("feedback", "encode", "decode", "add", "step")
#: The least that is asked for, on one core.
GOALS = {
    "int8:group_size=512": {"feedback": 0.35, "decode": 0.9},
    "int8": {"feedback": 0.27},
    "int4:group_size=512": {"feedback": 0.3, "decode": 0.8},
    "int4": {"feedback": 0.24},
    "sign:group_size=512": {"feedback": 0.2, "decode": 0.5},
}


class Bench:
    """One codec's tasks over one gradient."""

    def __init__(self, codec: Codec, elements: int, block_elements: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.codec, self.context = codec, Context(seed=1)
        self.numel = codec.padded(elements)
        self.original = torch.randn(self.numel, generator=generator) * 1e-3
        self.gradient, self.residual = self.original.clone(), self.original * 1e-2
        self.result = torch.zeros(self.numel)
        step = block_elements // codec.group_size * codec.group_size
        self.blocks = [slice(at, min(at + step, self.numel)) for at in range(0, self.numel, step)]
        self.payloads = [
            torch.empty(codec.wire_bytes(block.stop - block.start), dtype=torch.uint8)
            for block in self.blocks
        ]
        self.theirs = [codec.compress(self.original[block]) for block in self.blocks]

    def copy(self, block: slice, payload: torch.Tensor) -> None:
        self.result[block].copy_(self.gradient[block])

    def encode_sum(self, values: torch.Tensor, addend: torch.Tensor, payload: torch.Tensor) -> None:
        """values += addend, encode, values -= decode(payload)."""
        if isinstance(self.codec, GroupScaled):
            self.codec.encode_residual(values, payload, self.context, addend)
        else:
            self.codec.encode_residual(values.add_(addend), payload, self.context)

    def feedback(self, block: slice, payload: torch.Tensor) -> None:
        self.encode_sum(self.residual[block], self.gradient[block], payload)

    def begin(self, block: slice, payload: torch.Tensor) -> None:
        settling = self.codec.settling(self.gradient[block])
        if settling is not None:
            settling.encode_sum(self.gradient[block], self.residual[block], payload, self.context)
        else:
            self.encode_sum(self.gradient[block], self.residual[block], payload)

    def end(self, block: slice, payload: torch.Tensor) -> None:
        gradient, residual = self.gradient[block], self.residual[block]
        theirs = self.theirs[block.start // (self.blocks[0].stop)]
        payloads, contexts = [payload, theirs], [self.context] * 2
        settling = self.codec.settling(gradient)
        if settling is not None:
            settling.settle_mean(gradient, residual, payload, payloads, 0.5, contexts)
        else:
            residual.copy_(gradient)
            self.codec.decode_mean(payloads, gradient, 0.5, contexts)

    def encode(self, block: slice, payload: torch.Tensor) -> None:
        self.codec.encode(self.gradient[block], payload, self.context)

    def decode(self, block: slice, payload: torch.Tensor) -> None:
        self.codec.decode(payload, self.result[block], self.context)

    def add(self, block: slice, payload: torch.Tensor) -> None:
        self.codec.decode_add(payload, self.result[block], 0.5, self.context)

    def seconds(self, column: str) -> list[float]:
        """Seconds a block, of one pass over the gradient."""
        tasks = {
            "copy": [self.copy],
            "feedback": [self.feedback],
            "encode": [self.encode],
            "decode": [self.decode],
            "add": [self.add],
            "step": [self.begin, self.end],
        }
        self.gradient.copy_(self.original)
        self.residual.copy_(self.original).mul_(1e-2)
        total = [0.0] * len(self.blocks)
        for task in tasks[column]:
            for index, (block, payload) in enumerate(zip(self.blocks, self.payloads, strict=True)):
                start = time.perf_counter()
                task(block, payload)
                total[index] += time.perf_counter() - start
        return total


def best(passes: list[list[float]]) -> float:
    """Seconds of a pass none of whose blocks was disturbed: each block's best, summed."""
    return float(sum(min(block) for block in zip(*passes, strict=True)))


def measure(specs: list[str], elements: int, block_elements: int, rounds: int) -> list[dict[str, Any]]:
    """A row a codec: name, bits, and for each column the best and the median ratio and GB/s of float32."""
    benches = {spec: Bench(make_codec(spec), elements, block_elements) for spec in specs}
    copies: dict[str, list[list[float]]] = {spec: [] for spec in specs}
    times: dict[tuple[str, str], list[list[float]]] = {(spec, name): [] for spec in specs for name in COLUMNS}
    ratios: dict[tuple[str, str], list[float]] = {key: [] for key in times}
    for turn in range(rounds + 1):
        for spec, bench in benches.items():
            for column in COLUMNS:
                copy, task = bench.seconds("copy"), bench.seconds(column)
                if turn:  # the first round allocates and warms up
                    copies[spec].append(copy)
                    times[spec, column].append(task)
                    ratios[spec, column].append(sum(copy) / sum(task))
    rows = []
    for spec, bench in benches.items():
        copy_seconds = best(copies[spec])
        row: dict[str, Any] = {"codec": spec, "bits": bench.codec.wire_bytes(bench.numel) * 8 / bench.numel}
        row["copy_gb_per_second"] = 4e-9 * bench.numel / copy_seconds
        for column in COLUMNS:
            task_seconds = best(times[spec, column])
            row[column] = {
                "best": copy_seconds / task_seconds,
                "median": statistics.median(ratios[spec, column]),
                "gb_per_second": 4e-9 * bench.numel / task_seconds,
                "goal": GOALS.get(spec, {}).get(column),
            }
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'best ratio (median)':26}{'bits':>7}" + "".join(f"{column:>16}" for column in COLUMNS)]
    for row in rows:
        cells = []
        for column in COLUMNS:
            cell = row[column]
            mark = "" if cell["goal"] is None else "*" if cell["best"] >= cell["goal"] else "!"
            cells.append(f"{mark + format(cell['best'], '.2f'):>9} ({cell['median']:.2f})")
        lines.append(f"{row['codec']:26}{row['bits']:7.3f}" + "".join(cells))
    lines.append(f"copy_ {rows[0]['copy_gb_per_second']:.1f} GB/s; * reaches its goal, ! does not")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("codecs", nargs="*", default=CODECS, metavar="CODEC")
    parser.add_argument("--elements", type=int, default=6_250_000, help="of the gradient (default: 25 MB)")
    parser.add_argument("--block", type=int, default=BLOCK_ELEMENTS, help="elements of a block")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write JSON here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = measure(arguments.codecs, arguments.elements, arguments.block, arguments.rounds)
    print(table(rows))
    if arguments.out:
        about = {
            "command": " ".join(["bench_codec.py", *sys.argv[1:]]),
            "torch": torch.__version__,
            "numba": numba_version(),
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "threads": arguments.threads,
            "elements": arguments.elements,
            "block_elements": arguments.block,
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
