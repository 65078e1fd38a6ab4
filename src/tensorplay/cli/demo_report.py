"""From a demo run's events to its figures: the report's data, and the table in the terminal."""

import os
import platform
import time
from typing import Any

import torch
from rich import box
from rich.table import Table

import tensorplay
from tensorplay.cli.demo_plan import DemoPlan
from tensorplay.cli.gpt import GPT, SIZES
from tensorplay.cli.progress import readable_bytes
from tensorplay.compression.compiled import numba_version

__all__ = ["LINK_BITS_PER_SECOND", "build_report", "build_table", "least_step_seconds", "table_cells"]

LINK_BITS_PER_SECOND = 1_000_000_000
"""The link that the least step time is computed for."""

_PLAIN = "allreduce"


def least_step_seconds(compute_alone_seconds: float, sent_bytes: float, received_bytes: float) -> float:
    """The least time a step can take on a full-duplex link of 1 Gbit/s, with perfect overlap.

        max(compute alone, 8 * max(sent, received) / 1e9)

    Example:
        >>> least_step_seconds(0.1, sent_bytes=25e6, received_bytes=25e6)
        0.2
    """
    wire_seconds = 8 * max(sent_bytes, received_bytes) / LINK_BITS_PER_SECOND
    return max(compute_alone_seconds, wire_seconds)


def build_report(plan: DemoPlan, events: list[dict[str, Any]], wall_seconds: float) -> dict[str, Any]:
    """Everything that a run found out, ready for JSON.

    1. Compute alone comes from the extra run without any exchange. On a busy machine a hook's steps may have been
       faster than that run's; as no exchange makes a step faster, the least of them all counts.
    2. Each hook gets its ratio to plain all-reduce: measured in this run where it took part, else computed
       as 2 (W - 1) / W of the gradient's bytes.
    3. Each hook gets its least step time at 1 Gbit/s, computed from 1 and its measured bytes.

    Example:
        >>> report = build_report(plan, events, wall_seconds=98.0)         # doctest: +SKIP
        >>> report["hooks"]["fp16_compress"]["ratio_to_allreduce"]         # doctest: +SKIP
        2.0
    """
    finished = [event for event in events if event["event"] == "finished"]
    alone, hooks = finished[0]["result"], {event["hook"]: event["result"] for event in finished[1:]}
    alone_seconds = min([alone["step_seconds"], *(result["step_seconds"] for result in hooks.values())])
    if _PLAIN in hooks:
        plain_bytes, plain_source = hooks[_PLAIN]["sent_bytes_per_step"], "measured"
    else:
        plain_bytes = 2 * (plan.ranks - 1) / plan.ranks * alone["gradient_bytes"]
        plain_source = "computed: 2 (W - 1) / W of the gradient's bytes"
    for result in hooks.values():
        sent, received = result["sent_bytes_per_step"], result["received_bytes_per_step"]
        result["ratio_to_allreduce"] = plain_bytes / sent if sent else None
        result["least_step_seconds_at_1_gbit_computed"] = least_step_seconds(alone_seconds, sent, received)
    corpus = next(event for event in events if event["event"] == "corpus")
    size = SIZES[plan.size]
    return {
        "made_by": f"tensorplay demo {tensorplay.__version__}",
        "made_at": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "settings": {
            "ranks": plan.ranks,
            "steps": plan.steps,
            "seed": plan.seed,
            "size": plan.size,
            "backend": "nccl" if plan.device == "cuda" else "gloo",
            "parameters": sum(parameter.numel() for parameter in GPT(size, plan.seed).parameters()),
            "batch_bytes_per_rank": plan.batch_size * size.context_bytes,
        },
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads_per_rank": corpus["threads"],
            "gpu": torch.cuda.get_device_name(0) if plan.device == "cuda" else None,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numba": numba_version(),
        },
        "corpus": {
            "text": "source code of Python's standard library",
            "fingerprint": corpus["fingerprint"],
            "files": corpus["files"],
        },
        "compute_alone_seconds": alone_seconds,
        "run_without_exchange_seconds": alone["step_seconds"],
        "allreduce_bytes_per_step": plain_bytes,
        "allreduce_bytes_source": plain_source,
        "wall_seconds": wall_seconds,
        "hooks": hooks,
    }


def table_cells(name: str, result: dict[str, Any]) -> list[str]:
    """One hook's row, for the terminal and the page alike.

    Columns: name (marked when the replicas differ), validation bits per byte, bytes sent and received a step
    and rank, all-reduce's bytes over its own, measured step time, computed least step time at 1 Gbit/s.

    Example:
        >>> table_cells("int8", report["hooks"]["int8"])[0]                # doctest: +SKIP
        'int8'
    """
    ratio = result["ratio_to_allreduce"]
    return [
        name if result["replicas_identical"] else f"{name} †",
        f"{result['validation_bits_per_byte']:.4f}",
        readable_bytes(result["sent_bytes_per_step"]),
        readable_bytes(result["received_bytes_per_step"]),
        "-" if ratio is None else f"{ratio:.2f} x",
        f"{1000 * result['step_seconds']:.0f} ms",
        f"{1000 * result['least_step_seconds_at_1_gbit_computed']:.0f} ms",
    ]


def build_table(report: dict[str, Any]) -> Table:
    """The report's figures, a row a hook.

    Example:
        >>> Console().print(build_table(report))                           # doctest: +SKIP
    """
    table = Table(
        title="Same model, data and steps under each hook",
        caption=_caption(report),
        box=box.SIMPLE_HEAD,
        caption_justify="left",
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    table.add_column("hook", overflow="fold", min_width=14)
    headings = ["validation\nbits/byte", "sent\na step", "received\na step", "fewer\nbytes"]
    for heading in [*headings, "step\nhere", "least at\n1 Gbit/s*"]:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, result in report["hooks"].items():
        table.add_row(*table_cells(name, result))
    return table


def _caption(report: dict[str, Any]) -> str:
    alone = f"{1000 * report['compute_alone_seconds']:.0f} ms"
    lines = ["bytes: of one rank, counted where tensors enter collectives; fewer: than plain all-reduce"]
    lines.append(
        f"* least step time, computed, not measured: the larger of compute alone ({alone}) and bytes / rate"
    )
    if not all(result["replicas_identical"] for result in report["hooks"].values()):
        lines.append("† the ranks' replicas differ at the last step")
    return "\n".join(lines)
