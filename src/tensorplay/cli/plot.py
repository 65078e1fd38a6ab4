"""Line plots as SVG text: no script, no font, no file from elsewhere; colours follow the page's light or dark.

A page that shows them includes PLOT_STYLE in its <style> once.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["PLOT_STYLE", "Axis", "Line", "legend", "line_plot"]

_WIDTH, _HEIGHT = 480, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 44
_MOST_POINTS = 400
_COLOURS = 8
_DASHES = ("", "7 4", "2 3", "9 3 2 3")

PLOT_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1c2024; --quiet: #5c646d; --rule: #d9dde1;
  --line0: #3f4a55; --line1: #0072b2; --line2: #d55e00; --line3: #00805c; --line4: #b03a83; --line5: #8a6d00;
  --line6: #5b4fc4; --line7: #a63d2f; }
@media (prefers-color-scheme: dark) { :root { --ground: #15181b; --ink: #e8eaec; --quiet: #a3abb3;
  --rule: #343a40; --line0: #c3cad1; --line1: #5bb3f0; --line2: #ff9a52; --line3: #3fcf9f; --line4: #f08ac6;
  --line5: #e0c04a; --line6: #a9a0ff; --line7: #ff8f80; } }
svg.plot { width: 100%; height: auto; display: block; }
svg.plot text { font: 12px system-ui, sans-serif; fill: var(--quiet); }
svg.plot .grid { stroke: var(--rule); stroke-width: 1; }
svg.plot polyline { fill: none; stroke-linejoin: round; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; list-style: none; padding: 0; margin: .3rem 0; }
.legend svg { width: 2rem; height: .6rem; vertical-align: middle; margin-right: .35rem; }
"""
"""The style sheet that the plots and legends need."""


@dataclass(frozen=True)
class Axis:
    """How one direction is drawn.

    Attributes:
        label: what it shows, with its unit.
        logarithmic: equal distances are equal ratios; values <= 0 are left out.
        low, high: the range shown; None takes it from the lines.
        text: a tick's value as text.
    """

    label: str
    logarithmic: bool = False
    low: float | None = None
    high: float | None = None
    text: Callable[[float], str] = "{:g}".format


@dataclass(frozen=True)
class Line:
    """A named curve: y[i] at x[i]."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def line_plot(lines: Sequence[Line], horizontal: Axis, vertical: Axis, title: str) -> str:
    """Draw the lines into one <svg> element.

    1. Range and ticks of both directions.
    2. Grid, tick texts, labels.
    3. The curves, at most 400 points each, the first one wide so that others on top of it leave it visible.

    Args:
        lines: the curves, in the order of the legend.
        horizontal, vertical: the two directions.
        title: read out by screen readers.

    Raises:
        ValueError: a line with fewer y than x, or the other way round.

    Example:
        >>> text = line_plot([Line("loss", [1, 2], [8.0, 4.0])], Axis("step"), Axis("bits"), "Loss")
        >>> text.count("<polyline"), text.startswith("<svg")
        (1, True)
    """
    points = [_shown(line, horizontal, vertical) for line in lines]
    across = _Scale(horizontal, [x for line in points for x, _ in line], _LEFT, _WIDTH - _RIGHT)
    up = _Scale(vertical, [y for line in points for _, y in line], _HEIGHT - _BOTTOM, _TOP)
    parts = [f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">']
    clip = f"clip-{zlib.crc32(title.encode())}"
    frame = f'x="{_LEFT}" y="{_TOP}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_HEIGHT - _TOP - _BOTTOM}"'
    parts.append(f'<clipPath id="{clip}"><rect {frame}/></clipPath>')
    for tick in across.ticks:
        x = across.place(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
        parts.append(_text(x, _HEIGHT - _BOTTOM + 15, "middle", horizontal.text(tick)))
    for tick in up.ticks:
        y = up.place(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 6, y + 4, "end", vertical.text(tick)))
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, "middle", horizontal.label))
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    turned = f' transform="rotate(-90 13 {middle:.0f})"'
    parts.append(_text(13, middle, "middle", vertical.label, turned))
    for index, (line, shown) in enumerate(zip(lines, points, strict=True)):
        path = " ".join(f"{across.place(x):.1f},{up.place(y):.1f}" for x, y in shown)
        style = _stroke(index)
        parts.append(
            f'<polyline clip-path="url(#{clip})" {style} points="{path}"><title>{escape(line.name)}</title></polyline>'
        )
    return "".join([*parts, "</svg>"])


def legend(names: Sequence[str]) -> str:
    """A list of the lines' names with a sample of each, in the plot's order.

    Example:
        >>> legend(["allreduce"]).count("<li>")
        1
    """
    items = []
    for index, name in enumerate(names):
        sample = f'<svg viewBox="0 0 32 8"><line x1="0" x2="32" y1="4" y2="4" {_stroke(index)}/></svg>'
        items.append(f"<li>{sample}{escape(name)}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def _stroke(index: int) -> str:
    dash = _DASHES[(index // _COLOURS + index) % len(_DASHES)] if index else ""
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    width, opacity = (5, 0.45) if index == 0 else (1.8, 1)
    colour = f"var(--line{index % _COLOURS})"
    return f'style="stroke: {colour}" stroke-width="{width}" stroke-opacity="{opacity}"{dashed}'


def _shown(line: Line, horizontal: Axis, vertical: Axis) -> list[tuple[float, float]]:
    """The finite points of a line that its axes can show, thinned to about _MOST_POINTS."""
    points = [
        (x, y)
        for x, y in zip(line.x, line.y, strict=True)
        if math.isfinite(x)
        and math.isfinite(y)
        and not (horizontal.logarithmic and x <= 0)
        and not (vertical.logarithmic and y <= 0)
    ]
    stride = max(1, math.ceil(len(points) / _MOST_POINTS))
    return points if stride == 1 else [*points[:-1:stride], points[-1]]


class _Scale:
    """Values to pixels along one direction, and where the ticks are."""

    def __init__(self, axis: Axis, values: Sequence[float], first_pixel: float, last_pixel: float) -> None:
        low = axis.low if axis.low is not None else min(values, default=1.0)
        high = axis.high if axis.high is not None else max(values, default=2.0)
        self._logarithmic = axis.logarithmic
        if high <= low:
            margin = max(0.5, 1e-3 * abs(low))  # of a large value 0.5 may be less than its rounding
            low, high = (low / 2, low * 2) if axis.logarithmic else (low - margin, low + margin)
        self._low, self._high = self._on_axis(low), self._on_axis(high)
        self._first, self._last = first_pixel, last_pixel
        self.ticks = _decades(low, high) if axis.logarithmic else _round_steps(low, high)

    def _on_axis(self, value: float) -> float:
        return math.log10(value) if self._logarithmic else value

    def place(self, value: float) -> float:
        fraction = (self._on_axis(value) - self._low) / (self._high - self._low)
        return self._first + fraction * (self._last - self._first)


def _round_steps(low: float, high: float) -> list[float]:
    """Four to eight multiples of 1, 2 or 5 times a power of ten from low to high."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(multiple * power for multiple in (1, 2, 5, 10) if multiple * power >= rough)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _decades(low: float, high: float) -> list[float]:
    """Powers of ten from low to high, with 2 and 5 times them where fewer than three would show."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for multiples in ((1,), (1, 2, 5)):
        ticks = [
            m * 10.0**exponent
            for exponent in exponents
            for m in multiples
            if low <= m * 10.0**exponent <= high
        ]
        if len(ticks) >= 3:
            return ticks[:: math.ceil(len(ticks) / 7)]
    return ticks


def _text(x: float, y: float, anchor: str, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'
