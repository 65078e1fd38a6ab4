"""The README's figure: step time against bandwidth, made from a run of `tensorplay compare`.

    python benchmarks/figure.py benchmarks/results/comparison.json docs/figures/step_time.svg

Both axes are logarithmic. One panel for each number of ranks; filled dots are hooks that are more than 3 % faster than
plain all-reduce there, hollow ones are not, and where no hook is the column is shaded. Below stands, in words and from
the same data, where it does not help. The picture follows the reader's light or dark setting and loads nothing.
"""

import argparse
import json
import sys
import textwrap
from html import escape
from pathlib import Path
from typing import Any

from tensorplay.cli.compare_data import FORMAT, where_it_does_not_pay
from tensorplay.cli.compare_plot import PANEL_HEIGHT, PANEL_WIDTH, Style, hooks_with_figures, panel, styles
from tensorplay.cli.hooks import COMPUTE_ALONE
from tensorplay.cli.plot import PLOT_STYLE

MARGIN, ROW, LEGEND_COLUMN, LETTERS_A_COLUMN = 14, 18, 236, 68


def draw(comparison: dict[str, Any]) -> str:
    """The picture as one SVG document.

    1. A panel for each number of ranks, side by side.
    2. The legend, in columns; failed hooks by name.
    3. Where it does not help, a column of text below each panel; what was measured, and on what.
    """
    cells, about = comparison["cells"], comparison["about"]
    hooks = hooks_with_figures(cells)
    drawn = {hook: style for hook, style in styles(hooks).items() if hook in hooks}
    counts = list(dict.fromkeys(cell["ranks"] for cell in cells))
    width = len(counts) * PANEL_WIDTH + 2 * MARGIN
    parts, top = [], MARGIN
    for number, ranks in enumerate(counts):
        inside = panel(
            [cell for cell in cells if cell["ranks"] == ranks], drawn, f"{ranks} ranks, seconds a step"
        )
        parts.append(f'<g transform="translate({MARGIN + number * PANEL_WIDTH} {top})">{inside}</g>')
    top += PANEL_HEIGHT + ROW
    legend, rows = _legend(drawn, top, width)
    parts.append(legend)
    top += rows * ROW + 6
    told = "filled: more than 3 % faster than plain all-reduce; hollow: not; shaded: no hook is"
    parts.append(_text(MARGIN, top, told, "quiet"))
    top += ROW + 10
    lowest = top
    for number, ranks in enumerate(counts):
        left, y = MARGIN + number * PANEL_WIDTH, top
        parts.append(
            _text(left, y, f"Where it does not help, {ranks} ranks (speed, plain all-reduce = 1)", "name")
        )
        for sentence in where_it_does_not_pay([cell for cell in cells if cell["ranks"] == ranks]):
            for line in textwrap.wrap(sentence.partition(", ")[2], LETTERS_A_COLUMN, break_on_hyphens=False):
                y += ROW
                parts.append(_text(left, y, line, "told"))
        lowest = max(lowest, y)
    top = lowest + ROW + 8
    parameters = (
        "" if about["parameters"] is None else f", {about['parameters'] / 1e6:.3g} million parameters"
    )
    failed = sorted({row["hook"] for cell in cells for row in cell["rows"] if row["failure"] is not None})
    made = (
        f"Model {about['model']}{parameters}; median of {about['rounds']} rounds of {about['steps']} steps. "
        f"{about['processor']}, {about['cores']} cores shared by all ranks; torch {about['torch']}, gloo."
        + (f" Failed somewhere: {', '.join(failed)}." if failed else "")
    )
    for line in textwrap.wrap(made, LETTERS_A_COLUMN * len(counts), break_on_hyphens=False):
        parts.append(_text(MARGIN, top, line, "quiet"))
        top += ROW
    height = top + 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="Step time against bandwidth">'
        f"<style>{PLOT_STYLE}{_STYLE}</style>"
        f'<rect class="ground" width="{width}" height="{height}" rx="8"/>{"".join(parts)}</svg>\n'
    )


_STYLE = """
svg.plot { width: auto; } rect.ground { fill: var(--ground); } rect.nothing { fill: var(--rule); opacity: .5; }
svg.plot text.name { fill: var(--ink); font-weight: 600; } svg.plot text.told { fill: var(--ink); }
"""


def _legend(drawn: dict[str, Style], top: int, width: int) -> tuple[str, int]:
    columns = max(1, (width - 2 * MARGIN) // LEGEND_COLUMN)
    parts = []
    for index, (hook, style) in enumerate(drawn.items()):
        x, y = MARGIN + index % columns * LEGEND_COLUMN, top + index // columns * ROW
        parts.append(f'<line x1="{x}" x2="{x + 34}" y1="{y - 4}" y2="{y - 4}" {style.stroke()}/>')
        parts.append(_text(x + 42, y, "compute alone" if hook == COMPUTE_ALONE else hook, "told"))
    return "".join(parts), -(-len(drawn) // columns)


def _text(x: int, y: int, text: str, kind: str) -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(text)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "comparison", type=Path, nargs="?", default=Path("benchmarks/results/comparison.json")
    )
    parser.add_argument("picture", type=Path, nargs="?", default=Path("docs/figures/step_time.svg"))
    arguments = parser.parse_args()
    try:
        comparison = json.loads(arguments.comparison.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        sys.exit(f"{arguments.comparison} must be a comparison.json that `tensorplay compare` wrote: {error}")
    if comparison.get("format") != FORMAT:
        sys.exit(f"{arguments.comparison} must have format {FORMAT}, got {comparison.get('format')!r}")
    if not hooks_with_figures(comparison["cells"]):
        sys.exit(f"{arguments.comparison} must hold at least one hook with figures")
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    arguments.picture.write_text(draw(comparison), encoding="utf-8")
    print(arguments.picture)


if __name__ == "__main__":
    main()
