"""Step time against bandwidth as SVG text: one panel for each number of ranks, both axes logarithmic.

A filled dot is a hook that is more than 3 % faster than plain all-reduce there, a hollow one is not. Rates at which no
hook is have their column shaded. Links without a limit have a place of their own on the right: they are no rate.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from tensorplay.cli.compare_data import pays
from tensorplay.cli.hooks import COMPUTE_ALONE
from tensorplay.cli.lab import UNLIMITED

__all__ = ["PANEL_HEIGHT", "PANEL_WIDTH", "Style", "hooks_with_figures", "panel", "styles"]

PANEL_WIDTH, PANEL_HEIGHT = 480, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 14, 30, 46
_EDGE = 26  # between the frame and the first and last rate
_COLOURS = 8
_DASHES = ("", "7 4", "2 3", "9 3 2 3")


@dataclass(frozen=True)
class Style:
    """How a hook's line is drawn: a colour of `plot.PLOT_STYLE`, and a dash pattern or ""."""

    colour: str
    dash: str
    width: float = 1.8

    def stroke(self) -> str:
        """As attributes of an SVG element."""
        dash = f' stroke-dasharray="{self.dash}"' if self.dash else ""
        return f'style="stroke: var({self.colour}); fill: none" stroke-width="{self.width}"{dash}'


def hooks_with_figures(cells: Sequence[dict[str, Any]]) -> list[str]:
    """The hooks that have a step time in some cell, in the order of the rows."""
    rows = (row for cell in cells for row in cell["rows"] if row["step_seconds"] is not None)
    return list(dict.fromkeys(row["hook"] for row in rows))


def styles(hooks: Sequence[str]) -> dict[str, Style]:
    """A style a hook: compute alone is a thin dotted line, the others differ in colour, then in dash.

    Example:
        >>> styles(["noop", "int8"])["int8"].colour
        '--line1'
    """
    others = [hook for hook in hooks if hook != COMPUTE_ALONE]
    drawn = {
        hook: Style(f"--line{(index + 1) % _COLOURS}", _DASHES[(index // _COLOURS) % len(_DASHES)])
        for index, hook in enumerate(others)
    }
    return {COMPUTE_ALONE: Style("--line0", "2 4", 1.4), **drawn}


def panel(cells: Sequence[dict[str, Any]], drawn: dict[str, Style], name: str) -> str:
    """The cells of one number of ranks, as the inside of an <svg> of PANEL_WIDTH x PANEL_HEIGHT.

    1. Places of the rates, from the slowest to the fastest; the range of the times, and its ticks.
    2. Shaded columns where no hook pays; grid and texts.
    3. A line a hook through its rates, and a dot at each.

    Args:
        cells: those of one number of ranks, at least one. drawn: a style for each hook. name: above the panel.
    """
    ordered = sorted(cells, key=lambda cell: cell["rate_bits_per_second"] or math.inf)
    places = _places(ordered)
    seconds = [
        row["step_seconds"] for cell in ordered for row in cell["rows"] if row["step_seconds"] is not None
    ]
    up = _Up(min(seconds, default=0.1), max(seconds, default=1.0))
    bottom = PANEL_HEIGHT - _BOTTOM
    parts = [_text(_LEFT, 18, "start", name, ' font-weight="600" class="name"')]
    for cell, x in zip(ordered, places, strict=True):
        rows = [row for row in cell["rows"] if row["hook"] not in (COMPUTE_ALONE, cell["plain"])]
        if cell["plain"] is not None and not any(pays(row) for row in rows):
            parts.append(
                f'<rect class="nothing" x="{x - _EDGE:.1f}" y="{_TOP}" width="{2 * _EDGE}" height="{bottom - _TOP}"/>'
            )
            turned = f' transform="rotate(-90 {x + _EDGE - 5:.1f} {_TOP + 6})"'
            parts.append(_text(x + _EDGE - 5, _TOP + 6, "end", "no hook helps", turned))
        parts.append(_text(x, bottom + 16, "middle", _rate(cell["rate"])))
    for tick in up.ticks:
        y = up.place(tick)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{PANEL_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(_text(_LEFT - 6, y + 4, "end", f"{tick:g} s"))
    parts.append(
        _text((_LEFT + PANEL_WIDTH - _RIGHT) / 2, PANEL_HEIGHT - 8, "middle", "rate of each rank's link")
    )
    for hook, style in drawn.items():
        parts.append(_line(hook, style, ordered, places, up))
    return "".join(parts)


def _line(
    hook: str, style: Style, cells: Sequence[dict[str, Any]], places: Sequence[float], up: "_Up"
) -> str:
    """A line through the rates that are rates, and dots everywhere."""
    path, dots = [], []
    for cell, x in zip(cells, places, strict=True):
        row = next((row for row in cell["rows"] if row["hook"] == hook), None)
        if row is None or row["step_seconds"] is None:
            continue
        y = up.place(row["step_seconds"])
        if cell["rate_bits_per_second"] is not None:
            path.append(f"{x:.1f},{y:.1f}")
        full = pays(row) or hook in (COMPUTE_ALONE, cell["plain"])
        fill = f"var({style.colour})" if full else "var(--ground)"
        told = f"{hook}, {cell['rate']}: {1000 * row['step_seconds']:.0f} ms"
        dots.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4" stroke-width="1.5" '
            f'style="stroke: var({style.colour}); fill: {fill}"><title>{escape(told)}</title></circle>'
        )
    line = f'<polyline {style.stroke()} points="{" ".join(path)}"/>' if len(path) > 1 else ""
    return line + "".join(dots)


def _places(cells: Sequence[dict[str, Any]]) -> list[float]:
    """Where each rate stands: distances are ratios, a link without a rate stands at the right end, a step away."""
    left, right = _LEFT + _EDGE, PANEL_WIDTH - _RIGHT - _EDGE
    rates = [cell["rate_bits_per_second"] for cell in cells if cell["rate_bits_per_second"] is not None]
    if not rates:
        return [(left + right) / 2] * len(cells)
    last = right - (2.6 * _EDGE if len(rates) < len(cells) else 0)
    low, high = math.log(rates[0]), math.log(rates[-1])
    places = [
        left + (last - left) * ((math.log(rate) - low) / (high - low) if high > low else 0.5)
        for rate in rates
    ]
    return places + [float(right)] * (len(cells) - len(rates))


def _rate(rate: str) -> str:
    """As people write it.

    Example:
        >>> [_rate(rate) for rate in ("200mbit", "2.5gbit", "unlimited")]
        ['200 Mbit/s', '2.5 Gbit/s', 'no limit']
    """
    if rate == UNLIMITED:
        return "no limit"
    for unit, written in (("kbit", "kbit/s"), ("mbit", "Mbit/s"), ("gbit", "Gbit/s")):
        if rate.endswith(unit):
            return f"{rate.removesuffix(unit)} {written}"
    return rate


class _Up:
    """Seconds to pixels, logarithmic, with some room at both ends."""

    def __init__(self, low: float, high: float) -> None:
        self._low, self._high = math.log(low / 1.15), math.log(high * 1.15)
        steps = [multiple * 10.0**power for power in range(-6, 5) for multiple in (1, 2, 5)]
        if high / low < 4:
            steps = sorted({multiple * 10.0**power for power in range(-6, 4) for multiple in range(1, 10)})
        self.ticks = [tick for tick in steps if low / 1.15 <= tick <= high * 1.15]

    def place(self, seconds: float) -> float:
        fraction = (math.log(seconds) - self._low) / (self._high - self._low)
        return PANEL_HEIGHT - _BOTTOM - fraction * (PANEL_HEIGHT - _BOTTOM - _TOP)


def _text(x: float, y: float, anchor: str, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'
