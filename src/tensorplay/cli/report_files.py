"""A report's plots as files: PNG on white, SVG whose colours follow light and dark; both drawn by matplotlib.

A plot is described once (`LinePlot`, `BarPlot`, `HeatMap`); the page draws the same description into its HTML.
"""

import io
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from tensorplay.cli.command import UsageError
from tensorplay.cli.plot import PLOT_STYLE, Axis, Line
from tensorplay.cli.report_charts import Bar, shown_cells

__all__ = ["BarPlot", "HeatMap", "LinePlot", "Plot", "file_stems", "write_plots"]

_DOTS_AN_INCH = 150
_LONGEST_STEM = 80
_DASHES: tuple[Any, ...] = ("-", (0, (5, 3)), (0, (1.2, 2)), (0, (6, 2, 1.5, 2)))
_CELL_INK = "#1c2025"  # not the page's ink: cells keep their colours, and so must what is written on them
_LOWEST_SHADE = "#fffefd"  # for the same reason not the page's white
_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


@dataclass(frozen=True)
class LinePlot:
    """Curves over two axes.

    Args:
        stem: the files' name without its suffix. title: what it shows. lines, horizontal, vertical: see `line_plot`.
    """

    stem: str
    title: str
    lines: Sequence[Line]
    horizontal: Axis
    vertical: Axis


@dataclass(frozen=True)
class BarPlot:
    """Stacked bars, one a run, in seconds. Args: as `LinePlot`; bars, parts: see `bar_chart`."""

    stem: str
    title: str
    bars: Sequence[Bar]
    parts: Sequence[str]


@dataclass(frozen=True)
class HeatMap:
    """A value for each parameter and step. Args: as `LinePlot`; cells: see `heat_map`. label: what a value is."""

    stem: str
    title: str
    cells: Mapping[tuple[str, int], float]
    label: str


Plot = LinePlot | BarPlot | HeatMap
"""What can be drawn."""


def write_plots(plots: Sequence[Plot], folder: Path) -> list[Path]:
    """Write each plot as PNG (at least 1000 pixels wide) and as SVG; the folder is made when it is missing.

    Args:
        plots: with stems of their own; characters that file names can't hold everywhere become "-".
        folder: files of the same names in it are replaced, others are left alone.
    Returns: the files, PNG before SVG of each plot.
    Raises: UsageError: a file can't be written. ModuleNotFoundError: matplotlib is missing.
    Example:
        >>> plot = LinePlot("loss", "Loss", [Line("int8", [1, 2], [8.0, 4.0])], Axis("step"), Axis("loss"))
        >>> [path.name for path in write_plots([plot], Path("plots"))]     # doctest: +SKIP
        ['loss.png', 'loss.svg']
    """
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for plot, stem in zip(plots, file_stems([plot.stem for plot in plots]), strict=True):
            png, svg = _render(plot)
            for suffix, content in ((".png", png), (".svg", svg.encode())):
                written.append(folder / f"{stem}{suffix}")
                written[-1].write_bytes(content)
    except OSError as error:
        raise UsageError(f"{error.filename or folder}: {error.strerror}") from None
    return written


def file_stems(names: Sequence[str]) -> list[str]:
    """Names as file names, without two that are the same where upper and lower case are.

    Example:
        >>> file_stems(["error topk:0.01", "Error topk/0.01", "int8"])
        ['error-topk-0.01', 'Error-topk-0.01-2', 'int8']
    """
    taken: set[str] = set()
    stems = []
    for name in names:
        whole = re.sub(r"[^\w.+=-]+", "-", name, flags=re.ASCII).strip("-.")[:_LONGEST_STEM] or "plot"
        stem, number = whole, 1
        while stem.lower() in taken:
            number += 1
            stem = f"{whole}-{number}"
        taken.add(stem.lower())
        stems.append(stem)
    return stems


def _palettes() -> tuple[dict[str, str], dict[str, str]]:
    """The page's colours by name, in light and in dark."""
    light, dark = PLOT_STYLE.split("@media", 1)
    found = [dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", text)) for text in (light, dark)]
    return found[0], found[1]


def _render(plot: Plot) -> tuple[bytes, str]:
    """The plot as PNG and as SVG.

    1. Draw it.
    2. PNG, on white.
    3. SVG, whose text stays text, with the dark page's colours where the viewer asks for dark.
    """
    import matplotlib
    from matplotlib.figure import Figure

    light, dark = _palettes()
    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": plot.stem,
        "font.family": ["sans-serif"],
        "font.size": 10.0,
        "axes.edgecolor": light["rule"],
        "text.color": light["ink"],
        "axes.labelcolor": light["quiet"],
        "axes.titlecolor": light["ink"],
        "xtick.color": light["quiet"],
        "ytick.color": light["quiet"],
        "grid.color": light["rule"],
        "legend.frameon": False,
        "text.parse_math": False,  # a hook's name may hold a dollar sign
    }
    png, svg = io.BytesIO(), io.StringIO()
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name may hold characters that the font lacks; they show as boxes
        figure = Figure(figsize=(7.5, 5.0), layout="constrained", facecolor=light["ground"])
        if isinstance(plot, LinePlot):
            _draw_lines(figure, plot, light)
        elif isinstance(plot, BarPlot):
            _draw_bars(figure, plot, light)
        else:
            _draw_map(figure, plot, light)
        figure.savefig(png, format="png", dpi=_DOTS_AN_INCH)
        figure.savefig(svg, format="svg", metadata=_METADATA)
    return png.getvalue(), _on_its_own(svg.getvalue(), plot.title, light, dark)


def _on_its_own(svg: str, title: str, light: dict[str, str], dark: dict[str, str]) -> str:
    """Matplotlib's SVG without its references to elsewhere, with a title, and with a style sheet for dark viewers.

    Colours stay written at each element, so that a viewer that knows no style sheets shows the light ones.
    """
    svg = re.sub(r"<!DOCTYPE.*?>\s*|<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    rules = []
    for name, colour in light.items():
        for kind in ("fill", "stroke"):
            rules.append(f'[style*="{kind}: {colour}"] {{ {kind}: {dark[name]} !important; }}')
    style = f"<style>@media (prefers-color-scheme: dark) {{ {' '.join(rules)} }}</style>"
    head = f"<title>{escape(title)}</title>\n{style}"
    return re.sub(r"(<svg\b[^>]*>)", lambda found: f"{found[1]}\n{head}", svg, count=1)


def _axes(figure: Any, title: str) -> Any:
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=12)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return axes


def _draw_lines(figure: Any, plot: LinePlot, colours: dict[str, str]) -> None:
    from matplotlib.ticker import LogLocator

    axes = _axes(figure, plot.title)
    for axis, set_scale, set_label, set_range, own in (
        (plot.horizontal, axes.set_xscale, axes.set_xlabel, axes.set_xlim, axes.xaxis),
        (plot.vertical, axes.set_yscale, axes.set_ylabel, axes.set_ylim, axes.yaxis),
    ):
        if axis.logarithmic:
            set_scale("log", nonpositive="mask")
        set_label(axis.label)
        text = axis.text
        own.set_major_formatter(lambda value, position, text=text: text(value))
        own.set_minor_formatter(lambda value, position: "")
        set_range(axis.low, axis.high, auto=True if axis.low is None and axis.high is None else None)
        values = [value for line in plot.lines for value in (line.x if own is axes.xaxis else line.y)]
        if axis.logarithmic and _few_decades(values):
            own.set_major_locator(LogLocator(subs=(1, 2, 5)))
    handles = []
    for index, line in enumerate(plot.lines):
        dash = _DASHES[(index // 8 + index) % len(_DASHES)] if index else "-"
        width, opacity = (
            (4.0, 0.45) if index == 0 else (1.6, 1.0)
        )  # others on top of the first leave it visible
        points = [
            (x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(x) and math.isfinite(y)
        ]
        alone = len(points) == 1
        (handle,) = axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=colours[f"line{index % 8}"],
            linestyle=dash,
            linewidth=width,
            alpha=opacity,
            marker="o" if alone else "",
        )
        handles.append(handle)
    axes.grid(True)
    _legend(figure, handles, [line.name for line in plot.lines])


def _few_decades(values: Sequence[float]) -> bool:
    """Whether powers of ten alone may be fewer than three ticks."""
    positive = [value for value in values if 0 < value < math.inf]
    return bool(positive) and max(positive) < 1000 * min(positive)


def _legend(figure: Any, handles: Sequence[Any], names: Sequence[str]) -> None:
    # Matplotlib leaves out names that begin with an underscore.
    shown = [f" {name}" if name.startswith("_") else name for name in names]
    if shown:
        columns = max(1, min(4, len(shown), 100 // (6 + max(map(len, shown)))))
        figure.legend(handles, shown, loc="outside lower left", ncols=columns)
        figure.set_figheight(figure.get_figheight() + 0.22 * (-(-len(shown) // columns) - 1))


def _draw_bars(figure: Any, plot: BarPlot, colours: dict[str, str]) -> None:
    figure.set_figheight(1.9 + 0.55 * len(plot.bars))
    axes = _axes(figure, plot.title)
    places = range(len(plot.bars))
    left = [0.0] * len(plot.bars)
    handles = []
    for index, _ in enumerate(plot.parts):
        widths = [1000 * bar.seconds[index] for bar in plot.bars]
        handles.append(axes.barh(places, widths, left=left, height=0.6, color=colours[f"line{index}"]))
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, total in zip(places, left, strict=True):
        axes.text(total, place, f" {total:.3g} ms", va="center", color=colours["ink"])
    axes.set_yticks(list(places), [bar.name for bar in plot.bars])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel("milliseconds a step")
    axes.grid(True, axis="x")
    axes.set_axisbelow(True)
    _legend(figure, handles, plot.parts)


def _draw_map(figure: Any, plot: HeatMap, colours: dict[str, str]) -> None:
    from matplotlib.colors import LinearSegmentedColormap, LogNorm
    from matplotlib.patches import Rectangle

    names, steps, notes = shown_cells(plot.cells)
    figure.set_size_inches(max(7.5, 3.5 + 0.5 * len(steps)), max(3.0, 1.6 + 0.26 * len(names)))
    axes = _axes(figure, plot.title)
    positive = [value for value in plot.cells.values() if value > 0]
    low, high = (min(positive), max(positive)) if positive else (0.1, 1.0)
    if low == high:
        low, high = low / 2, high * 2
    scale = LogNorm(low, high)
    shades = LinearSegmentedColormap.from_list("error", [_LOWEST_SHADE, "#e89b66"])
    for row, name in enumerate(names):
        for column, step in enumerate(steps):
            value = plot.cells.get((name, step))
            if value is None:
                continue
            shade = shades(scale(value) if value > 0 else 0.0)
            place = (column - 0.5, row - 0.5)
            axes.add_patch(Rectangle(place, 1.0, 1.0, facecolor=shade, edgecolor=colours["rule"]))
            axes.text(column, row, f"{value:.2g}", ha="center", va="center", fontsize=8, color=_CELL_INK)
    axes.set_yticks(range(len(names)), names)
    axes.set_xticks(range(len(steps)), [str(step) for step in steps])
    axes.set_xlim(-0.5, len(steps) - 0.5)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("\n".join(["step", *notes]))
    axes.set_ylabel("parameter")
    axes.text(1.0, 1.01, plot.label, transform=axes.transAxes, ha="right", va="bottom", fontsize=9)
