"""A cell of a comparison as a table: the same columns in the terminal and on the page."""

from typing import Any

from rich import box
from rich.table import Table

from tensorplay.cli.compare_data import pays
from tensorplay.cli.hooks import COMPUTE_ALONE
from tensorplay.cli.progress import readable_bytes

__all__ = ["HEADINGS", "build_table", "notes", "table_cells", "title"]

HEADINGS = (
    ("step,", "ms"),
    ("exposed,", "ms"),
    ("speed,", "plain = 1"),
    ("floor,", "ms"),
    ("sent,", "counted"),
    ("sent, on", "the wire"),
    ("CPU,", "ms"),
    ("peak", "memory"),
    ("last", "loss"),
)
"""Two lines each, of the columns after the hook's name."""


def title(cell: dict[str, Any]) -> str:
    """Ranks, rate and compute alone of a cell.

    Example:
        >>> title({"ranks": 2, "rate": "1gbit", "compute_seconds": 0.2871, "threads_per_rank": 1})
        '2 ranks, 1gbit; compute alone 287 ms a step, threads a rank: 1'
    """
    alone = f"{_milliseconds(cell['compute_seconds'])} ms"
    threads = cell["threads_per_rank"]
    return f"{cell['ranks']} ranks, {cell['rate']}; compute alone {alone} a step, threads a rank: {threads}"


def table_cells(row: dict[str, Any], cell: dict[str, Any]) -> list[str]:
    """One hook's row as text: its marked name, then the columns of HEADINGS; one that failed has its reason alone.

    "*" is the fastest, "†" replicas that differ, "-" what is unknown.
    """
    name = row["hook"]
    if row["failure"] is not None:
        return [name, f"failed: {row['failure']}"]
    if name == cell["fastest"]:
        name += " *"
    if row["replicas_equal"] is False and row["hook"] != COMPUTE_ALONE:
        name += " †"
    speedup = row["speedup"]
    return [
        name,
        _milliseconds(row["step_seconds"]),
        _milliseconds(row["exposed_seconds"]),
        "-" if speedup is None else f"{speedup:.2f}",
        _milliseconds(row["wire_floor_seconds"]),
        _bytes(row["sent_bytes"]),
        _bytes(row["interface_sent_bytes"]),
        _milliseconds(row["cpu_seconds"]),
        _bytes(row["peak_memory_bytes"]),
        "-" if row["loss"] is None else f"{row['loss']:.4g}",
    ]


def notes(cell: dict[str, Any]) -> list[str]:
    """What must be said below the cell's table."""
    rows = cell["rows"]
    told = []
    if cell["fastest"] is not None:
        told.append("* the fastest of those that keep replicas equal")
    if any(row["replicas_equal"] is False and row["hook"] != COMPUTE_ALONE for row in rows):
        told.append("† the ranks' replicas differ at the end")
    if periodic := [f"{row['hook']} {row['period']}" for row in rows if row["period"] > 1]:
        told.append(f"a step is the mean of a whole period: {', '.join(periodic)}")
    told += [f"{row['hook']} chose {' or '.join(row['choices'])}" for row in rows if row["choices"]]
    if any(row["wire_floor_from"] == "interface" for row in rows):
        told.append("where bytes aren't counted, the wire floor is from those on the interface")
    if (advice := cell["advice"]) is not None:
        told.append(_advice(cell, advice))
    return told


def _advice(cell: dict[str, Any], advice: dict[str, Any]) -> str:
    if "failure" in advice:
        return f"the advisor failed: {advice['failure']}"
    measured = {row["hook"]: row["step_seconds"] for row in cell["rows"]}
    parts = [
        f"{hook} {_milliseconds(seconds)} ms (measured {_milliseconds(measured.get(hook))})"
        for hook, seconds in advice["predicted_seconds"].items()
    ]
    return f"the advisor would take {advice['best']}; it predicted {', '.join(parts)}"


def build_table(cell: dict[str, Any]) -> Table:
    """The cell for a terminal; hooks that don't pay are dim.

    Example:
        >>> Console().print(build_table(cell))                              # doctest: +SKIP
    """
    failures = [
        f"{row['hook']} failed: {row['failure']}" for row in cell["rows"] if row["failure"] is not None
    ]
    table = Table(
        title=title(cell),
        caption="\n".join([*failures, *notes(cell)]),
        box=box.SIMPLE_HEAD,
        caption_justify="left",
        title_justify="left",
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    table.add_column("hook", overflow="fold", min_width=14)
    for heading in HEADINGS:
        table.add_column("\n".join(heading), justify="right", no_wrap=True)
    for row in cell["rows"]:
        cells = table_cells(row, cell)
        if row["failure"] is not None:
            cells = [row["hook"], "failed"]
        plain = row["hook"] in (COMPUTE_ALONE, cell["plain"])
        table.add_row(*cells, style=None if plain or pays(row) else "dim")
    return table


def _milliseconds(seconds: float | None) -> str:
    """Three digits.

    Example:
        >>> [_milliseconds(seconds) for seconds in (1.2345, 0.12345, 0.012345, 0.0012345, 0.0, None)]
        ['1234', '123', '12.3', '1.23', '0.00', '-']
    """
    if seconds is None:
        return "-"
    size = abs(1000 * seconds)
    return f"{1000 * seconds:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}"


def _bytes(count: float | None) -> str:
    return "-" if count is None else readable_bytes(count)
