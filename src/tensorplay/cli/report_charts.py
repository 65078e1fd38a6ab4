"""Stacked bars and heat maps as SVG text, beside the line plots of `plot`; colours follow the page's light or dark."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["CHART_STYLE", "Bar", "bar_chart", "heat_map", "shown_cells"]

_WIDTH = 720
_ROW = 34
_MOST_ROWS, _MOST_COLUMNS = 64, 48
_COLOURS = ("--line0", "--line1", "--line2", "--line3")

CHART_STYLE = """
svg.chart { width: 100%; height: auto; display: block; }
svg.chart text { font: 13px system-ui, sans-serif; fill: var(--ink); }
:root { --most: 70%; } @media (prefers-color-scheme: dark) { :root { --most: 40%; } }
.swatch { display: inline-block; width: .8rem; height: .8rem; margin-right: .35rem; border: 1px solid var(--rule); }
.map { border-collapse: separate; border-spacing: 1px; font-size: .8rem; }
.map td, .map th { border: 0; padding: .1rem .3rem; }
.map th { font-weight: 400; color: var(--quiet); }
.map td.cell { background: color-mix(in srgb, var(--line2) calc(var(--share) * var(--most)), var(--ground));
  min-width: 2.6rem; text-align: center; color: var(--ink); }
"""
"""The style sheet that the charts need, beside PLOT_STYLE."""


@dataclass(frozen=True)
class Bar:
    """A name and the seconds of its parts, in the order of the chart's part names.

    Example:
        >>> Bar("int8", [0.04, 0.001, 0.002, 0.001]).name
        'int8'
    """

    name: str
    seconds: Sequence[float]


def bar_chart(bars: Sequence[Bar], parts: Sequence[str]) -> str:
    """One bar a row, its parts one after another, with the sum in milliseconds; a legend below.

    Raises: ValueError: a bar has more or fewer seconds than there are parts, or more than four parts.
    Example:
        >>> text = bar_chart([Bar("int8", [0.03, 0.01])], ["compute", "exchange"])
        >>> text.count("<rect"), "40 ms" in text
        (2, True)
    """
    if len(parts) > len(_COLOURS):
        raise ValueError(f"at most {len(_COLOURS)} parts, got {len(parts)}")
    longest = max((sum(bar.seconds) for bar in bars), default=0.0) or 1.0
    rows = []
    for row, bar in enumerate(bars):
        top, left = row * 2 * _ROW, 0.0
        total = sum(bar.seconds)
        rows.append(f'<text x="0" y="{top + 20}">{escape(bar.name)}: {1000 * total:.3g} ms</text>')
        for part, seconds, colour in zip(parts, bar.seconds, _COLOURS[: len(parts)], strict=True):
            width = _WIDTH * seconds / longest
            rows.append(
                f'<rect x="{left:.2f}" y="{top + _ROW - 6}" width="{width:.2f}" height="{_ROW - 4}" '
                f'style="fill: var({colour})"><title>{escape(part)}: {1000 * seconds:.3g} ms</title></rect>'
            )
            left += width
    title = "; ".join(f"{bar.name}: {1000 * sum(bar.seconds):.3g} ms" for bar in bars)
    picture = (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {len(bars) * 2 * _ROW}" role="img" '
        f'aria-label="{escape(title)}">{"".join(rows)}</svg>'
    )
    keys = "".join(
        f'<li><span class="swatch" style="background: var({colour})"></span>{escape(part)}</li>'
        for part, colour in zip(parts, _COLOURS, strict=False)
    )
    return f'{picture}<ul class="legend">{keys}</ul>'


def heat_map(cells: Mapping[tuple[str, int], float], title: str) -> str:
    """A table with a row a parameter and a column a step, its cells coloured by the logarithm of their value.

    Beyond 64 parameters those with the largest last value are shown, beyond 48 steps one in so many; a line
    below says so. Every cell shows its value too, so that colour is not all there is.

    Args:
        cells: (parameter, step) -> value >= 0, at least one. title: read out by screen readers.
    Example:
        >>> text = heat_map({("weight", 1): 0.01, ("weight", 2): 1.0}, "Error")
        >>> text.count('class="cell"'), "--share: 0.00" in text, "--share: 1.00" in text
        (2, True, True)
    """
    names, steps, notes = shown_cells(cells)
    positive = [value for value in cells.values() if value > 0]
    low, high = (math.log10(min(positive)), math.log10(max(positive))) if positive else (0.0, 0.0)
    head = "".join(f"<th>{step}</th>" for step in steps)
    rows = []
    for name in names:
        columns = (_cell(cells.get((name, step)), low, high) for step in steps)
        rows.append(f"<tr><th>{escape(name)}</th>{''.join(columns)}</tr>")
    below = f'<p class="quiet">{escape(" ".join(notes))}</p>' if notes else ""
    table = (
        f'<table class="map" aria-label="{escape(title)}"><tr><th>step</th>{head}</tr>{"".join(rows)}</table>'
    )
    return f'<div class="wide">{table}</div>{below}'


def shown_cells(cells: Mapping[tuple[str, int], float]) -> tuple[list[str], list[int], list[str]]:
    """The parameters and steps a heat map shows, and what it says about those it leaves out.

    Example:
        >>> shown_cells({("weight", 2): 0.01, ("weight", 1): 1.0})
        (['weight'], [1, 2], [])
    """
    names = list(dict.fromkeys(name for name, _ in cells))
    every_step = sorted({step for _, step in cells})
    notes = []
    stride = math.ceil(len(every_step) / _MOST_COLUMNS)
    steps = every_step[::-1][::stride][::-1] if every_step else []
    if stride > 1:
        notes.append(f"Of {len(every_step)} measured steps one in {stride} is shown.")
    if len(names) > _MOST_ROWS:
        last = {name: value for (name, _), value in sorted(cells.items(), key=lambda item: item[0][1])}
        largest = set(sorted(names, key=lambda name: -last[name])[:_MOST_ROWS])
        notes.append(f"Of {len(names)} parameters the {_MOST_ROWS} with the largest last error are shown.")
        names = [name for name in names if name in largest]
    return names, steps, notes


def _cell(value: float | None, low: float, high: float) -> str:
    if value is None:
        return "<td></td>"
    share = 0.0
    if value > 0:
        share = (math.log10(value) - low) / (high - low) if high > low else 0.5
    return f'<td class="cell" style="--share: {share:.2f}">{value:.2g}</td>'
