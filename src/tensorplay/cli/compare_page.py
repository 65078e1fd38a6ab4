"""A comparison as one HTML file: tables, plots, and where no hook pays; nothing loaded from elsewhere."""

from collections.abc import Sequence
from html import escape
from typing import Any

from tensorplay.cli.compare_data import where_it_does_not_pay
from tensorplay.cli.compare_plot import PANEL_HEIGHT, PANEL_WIDTH, Style, hooks_with_figures, panel, styles
from tensorplay.cli.compare_table import HEADINGS, notes, table_cells, title
from tensorplay.cli.plot import PLOT_STYLE
from tensorplay.cli.progress import readable_bytes

__all__ = ["build_page"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
body { margin: 0 auto; max-width: 66rem; padding: 1rem; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; line-height: 1.25; margin: .5rem 0; } h2 { font-size: 1.05rem; margin: 1.4rem 0 .3rem; }
p, ul { margin: .4rem 0; } p, li { overflow-wrap: anywhere; } .quiet { color: var(--quiet); font-size: .9rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { font-weight: 600; vertical-align: bottom; } th:first-child, td:first-child { text-align: left; }
tr.fastest td { font-weight: 700; } td.failed { text-align: left; white-space: normal; min-width: 20rem; }
.plots { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
.plots > section { min-width: 0; }
svg.plot rect.nothing { fill: var(--rule); opacity: .45; } svg.plot text.name { fill: var(--ink); }
"""
_READING = (
    "A step's time is that of its slowest rank; the median over all steps of all rounds, with fresh models. Exposed: "
    "beyond compute alone (noop). Speed: plain all-reduce's step over this one's. Floor: the bytes at the "
    "link's rate. Counted: where tensors enter collectives; torch's own hooks aren't counted, nor what a hook of yours "
    "sends by itself. On the wire: by the kernel, headers and acknowledgements included; it has no figure "
    "where ranks share the loopback device. Bytes and CPU time are a step's, a mean over the ranks; "
    "memory is the peak of the rank with the highest, beyond what the process held before its model was made."
)


def build_page(comparison: dict[str, Any]) -> str:
    """The whole page for what `comparison.json` holds.

    Example:
        >>> Path("comparison.html").write_text(build_page(comparison))     # doctest: +SKIP
    """
    about, cells = comparison["about"], comparison["cells"]
    heading = "Communication hooks over links of several rates"
    parameters = "" if about["parameters"] is None else f" ({about['parameters']:,} parameters)"
    run = (
        f"Model {about['model']}{parameters}; {about['rounds']} rounds of {about['steps']} steps after "
        f"{about['warmup']} to warm up, seed {about['seed']}. Links: {about['links']}."
    )
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            f"<title>{escape(heading)}</title>\n<style>{PLOT_STYLE}{_STYLE}</style>\n</head>\n<body>",
            f"<h1>{escape(heading)}</h1>\n<p>{escape(run)}</p>",
            _plots(cells),
            _does_not_pay(cells),
            *(_table(cell) for cell in cells),
            f'<p class="quiet">{escape(_READING)}</p>',
            f'<p class="quiet">{escape(_made(comparison))}</p>\n</body>\n</html>\n',
        ]
    )


def _plots(cells: Sequence[dict[str, Any]]) -> str:
    hooks = hooks_with_figures(cells)
    if not hooks:
        return "<p>No hook has figures.</p>"
    drawn = {hook: style for hook, style in styles(hooks).items() if hook in hooks}
    sections = []
    for ranks in dict.fromkeys(cell["ranks"] for cell in cells):
        inside = panel([cell for cell in cells if cell["ranks"] == ranks], drawn, f"{ranks} ranks")
        sections.append(
            f'<section><svg class="plot" viewBox="0 0 {PANEL_WIDTH} {PANEL_HEIGHT}" role="img" '
            f'aria-label="Step time against bandwidth, {ranks} ranks">{inside}</svg></section>'
        )
    return (
        f'<h2>Step time against bandwidth</h2><div class="plots">{"".join(sections)}</div>{_legend(drawn)}'
        '<p class="quiet">Filled: more than 3 % faster than plain all-reduce. Hollow: not. Shaded: no hook is.</p>'
    )


def _legend(drawn: dict[str, Style]) -> str:
    items = []
    for hook, style in drawn.items():
        sample = f'<svg viewBox="0 0 32 8"><line x1="0" x2="32" y1="4" y2="4" {style.stroke()}/></svg>'
        items.append(f"<li>{sample}{escape(hook)}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def _does_not_pay(cells: Sequence[dict[str, Any]]) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in where_it_does_not_pay(cells))
    return (
        "<h2>Where it does not pay</h2><p>A hook pays where it is more than 3 % faster than plain all-reduce "
        f"(1.03 x).</p><ul>{items}</ul>"
    )


def _table(cell: dict[str, Any]) -> str:
    columns = "".join(f"<th>{escape(one)}<br>{escape(two)}</th>" for one, two in HEADINGS)
    rows = []
    for row in cell["rows"]:
        name, *figures = table_cells(row, cell)
        if row["failure"] is not None:
            rest = f'<td class="failed" colspan="{len(HEADINGS)}">{escape(figures[0])}</td>'
        else:
            rest = "".join(f"<td>{escape(figure)}</td>" for figure in figures)
        mark = ' class="fastest"' if row["hook"] == cell["fastest"] else ""
        rows.append(f"<tr{mark}><td>{escape(name)}</td>{rest}</tr>")
    below = "".join(f'<p class="quiet">{escape(note)}</p>' for note in notes(cell))
    return (
        f'<h2>{escape(title(cell))}</h2><div class="wide"><table><tr><th>hook</th>{columns}</tr>'
        f"{''.join(rows)}</table></div>{below}"
    )


def _made(comparison: dict[str, Any]) -> str:
    about = comparison["about"]
    numba = f"Numba {about['numba']}" if about.get("numba") else "no Numba"
    memory = "" if about["memory_bytes"] is None else f", {readable_bytes(about['memory_bytes'])} of memory"
    return (
        f"{about['made_at']}, {comparison['made_by']} {about['tensorplay']}, torch {about['torch']}, {numba}, "
        f"Python {about['python']}, {about['processor']}, {about['cores']} cores{memory}, {about['system']}. "
        f"Command: {about['command']}"
    )
