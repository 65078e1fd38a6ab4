"""From the runs of a cell to its rows, and what they say: is a hook faster than plain all-reduce, and where is it not?

`comparison.json` is {"format": 1, "made_by", "about": {...}, "cells": [...]}; docs/compare.md has every field.
"""

import math
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import tensorplay
from tensorplay.cli.compare_hooks import OUR_PLAIN, TORCH, TORCH_PLAIN, rhythm
from tensorplay.cli.compare_launch import CellRuns
from tensorplay.cli.compare_plan import Settings
from tensorplay.cli.hooks import COMPUTE_ALONE
from tensorplay.cli.lab import bits_per_second
from tensorplay.compression.compiled import numba_version

__all__ = [
    "FORMAT",
    "LEAST_SPEEDUP",
    "LOOPBACK",
    "build_about",
    "build_cell",
    "fastest",
    "pays",
    "plain_hook",
    "where_it_does_not_pay",
]

FORMAT = 1
"""Of comparison.json; it changes when a field changes its meaning or goes away."""
LEAST_SPEEDUP = 1.03
"""A hook pays where it is more than 3 % faster than plain all-reduce: a busy machine does less by itself."""
LOOPBACK = "loopback"
"""The rate of links that are none: ranks share this machine's memory."""


def build_cell(
    ranks: int, rate: str, hooks: Sequence[str], runs: CellRuns, settings: Settings
) -> dict[str, Any]:
    """One cell of the comparison: its ranks, rate, and a row for each hook, those that failed included.

    1. Compute alone is the median step of "noop"; plain all-reduce is torch's where it has figures, else ours.
    2. Each row gets what it exposes of its exchange, its speedup, and the least time that its bytes take on the wire.

    Example:
        >>> cell = build_cell(2, "1gbit", ["noop", "int8"], runs, settings)   # doctest: +SKIP
        >>> [row["hook"] for row in cell["rows"]]                          # doctest: +SKIP
        ['noop', 'int8']
    """
    link = None if rate == LOOPBACK else bits_per_second(rate)
    medians = {hook: statistics.median(_steps(results)) for hook, results in runs.results.items() if results}
    plain = plain_hook(medians)
    rows = []
    for hook in hooks:
        row = _row(hook, runs.results.get(hook, []), link)
        row["failure"] = runs.failures.get(hook)
        if row["step_seconds"] is None and row["failure"] is None:
            row["failure"] = "it was not run"
        if row["step_seconds"] is not None and COMPUTE_ALONE in medians:
            row["exposed_seconds"] = row["step_seconds"] - medians[COMPUTE_ALONE]
        if row["step_seconds"] is not None and plain is not None:
            row["speedup"] = medians[plain] / row["step_seconds"]
        row["compute_seconds"] = medians.get(COMPUTE_ALONE)
        rows.append({"hook": hook, "ranks": ranks, "rate": rate, **row})
    cell = {
        "ranks": ranks,
        "rate": rate,
        "rate_bits_per_second": link,
        "threads_per_rank": settings.threads,
        "compute_seconds": medians.get(COMPUTE_ALONE),
        "plain": plain,
        "rows": rows,
        "advice": runs.advice,
    }
    cell["fastest"] = fastest(cell)
    return cell


def _steps(results: Sequence[dict[str, Any]]) -> list[float]:
    return [seconds for result in results for seconds in result["step_seconds"]]


def _row(hook: str, results: Sequence[dict[str, Any]], link: float | None) -> dict[str, Any]:
    """The figures of one hook, None where unknown. Medians over rounds."""
    names = (
        "sent_bytes",
        "received_bytes",
        "interface_sent_bytes",
        "interface_received_bytes",
        "cpu_seconds",
    )
    row: dict[str, Any] = dict.fromkeys(
        ["step_seconds", "step_seconds_quartiles", "exposed_seconds", "speedup", "wire_floor_seconds"]
    )
    row["period"] = rhythm(hook).period
    row["wire_floor_from"], row["choices"] = None, []
    row.update(dict.fromkeys([*names, "peak_memory_bytes", "loss", "replicas_equal"]))
    if not results:
        return row
    steps = _steps(results)
    row["step_seconds"] = statistics.median(steps)
    row["step_seconds_quartiles"] = _quartiles(steps)
    for name in names:
        values = [result[name] for result in results]
        row[name] = None if None in values else statistics.median(values)
    if not _is_counted(hook, row["sent_bytes"]):
        row["sent_bytes"] = row["received_bytes"] = None
    peaks = [result["peak_memory_bytes"] for result in results]
    row["peak_memory_bytes"] = None if None in peaks else statistics.median(peaks)
    row["loss"] = results[-1]["loss"] if math.isfinite(results[-1]["loss"]) else None
    row["choices"] = sorted({result["choice"] for result in results if result["choice"] is not None})
    row["replicas_equal"] = all(result["replicas_equal"] for result in results)
    if link is not None:
        for source, prefix in (("counted", ""), ("interface", "interface_")):
            sent, received = row[f"{prefix}sent_bytes"], row[f"{prefix}received_bytes"]
            if sent is not None and received is not None:
                row["wire_floor_seconds"], row["wire_floor_from"] = 8 * max(sent, received) / link, source
                break
    return row


def _is_counted(hook: str, sent_bytes: float | None) -> bool:
    """Whether the bytes that were counted are the hook's: torch's aren't seen, nor what a user's own hook sends."""
    if hook.startswith(TORCH) or sent_bytes is None:
        return False
    return hook == COMPUTE_ALONE or sent_bytes > 0


def _quartiles(values: Sequence[float]) -> list[float]:
    """The first and the third.

    Example:
        >>> _quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
        [2.0, 4.0]
    """
    if len(values) < 2:
        return [values[0], values[0]]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


def plain_hook(measured: Any) -> str | None:
    """What the others are held against: torch's DDP as it is where it was measured, else our all-reduce hook.

    Example:
        >>> plain_hook(["allreduce", "torch:allreduce"]), plain_hook(["int8"])
        ('torch:allreduce', None)
    """
    return next((name for name in (TORCH_PLAIN, OUR_PLAIN) if name in measured), None)


def pays(row: dict[str, Any]) -> bool:
    """Whether a hook is more than 3 % faster than plain all-reduce in its cell.

    Example:
        >>> pays({"speedup": 1.04}), pays({"speedup": 1.03}), pays({"speedup": None})
        (True, False, False)
    """
    return row["speedup"] is not None and row["speedup"] > LEAST_SPEEDUP


def fastest(cell: dict[str, Any]) -> str | None:
    """The hook with the shortest step, of those that exchange something and whose replicas stayed equal.

    Example:
        >>> rows = [{"hook": "noop", "step_seconds": 1.0, "replicas_equal": False}]
        >>> rows += [{"hook": name, "step_seconds": 3.0 - n, "replicas_equal": True} for n, name in enumerate("ab")]
        >>> fastest({"rows": rows})
        'b'
    """
    taking_part = [
        row
        for row in cell["rows"]
        if row["hook"] != COMPUTE_ALONE and row["step_seconds"] is not None and row["replicas_equal"]
    ]
    return min(taking_part, key=lambda row: row["step_seconds"])["hook"] if taking_part else None


def where_it_does_not_pay(cells: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each cell: which hooks aren't more than 3 % faster than plain all-reduce there.

    Example:
        >>> rows = [{"hook": "allreduce", "step_seconds": 0.3, "speedup": 1.0, "failure": None}]
        >>> rows += [{"hook": "int8", "step_seconds": 0.4, "speedup": 0.75, "failure": None}]
        >>> where_it_does_not_pay([{"ranks": 2, "rate": "unlimited", "plain": "allreduce", "rows": rows}])
        ['2 ranks, unlimited: no hook pays: int8 0.75 x. Plain all-reduce takes 300 ms a step.']
    """
    return [_sentence(cell) for cell in cells]


def _sentence(cell: dict[str, Any]) -> str:
    where = f"{cell['ranks']} ranks, {cell['rate']}"
    if cell["plain"] is None:
        return f"{where}: plain all-reduce has no figures, so nothing can be said."
    others = [
        row
        for row in cell["rows"]
        if row["hook"] not in (COMPUTE_ALONE, TORCH_PLAIN, OUR_PLAIN) and row["speedup"] is not None
    ]
    plain_seconds = next(row["step_seconds"] for row in cell["rows"] if row["hook"] == cell["plain"])
    plain = f"Plain all-reduce takes {1000 * plain_seconds:.0f} ms a step"
    if not others:
        return f"{where}: no other hook has figures."
    slow = ", ".join(f"{row['hook']} {row['speedup']:.2f} x" for row in others if not pays(row))
    paying = sum(pays(row) for row in others)
    if not slow:
        return f"{where}: every hook pays. {plain}."
    if not paying:
        return f"{where}: no hook pays: {slow}. {plain}."
    return f"{where}: {slow}; {paying} of {len(others)} pay. {plain}."


def build_about(settings: Settings, command: str, links: str, parameters: int | None) -> dict[str, Any]:
    """Where and how the comparison was made."""
    return {
        "made_at": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": command,
        "model": settings.model,
        "parameters": parameters,
        "rounds": settings.rounds,
        "steps": settings.steps,
        "warmup": settings.warmup,
        "seed": settings.seed,
        "hook_timeout_seconds": settings.hook_timeout,
        "links": links,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": numba_version(),
        "tensorplay": tensorplay.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
