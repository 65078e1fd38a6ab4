"""Telemetry's report as one HTML file: nothing is loaded from elsewhere, and its own policy forbids it."""

from collections.abc import Sequence
from html import escape
from itertools import accumulate

from tensorplay.cli.plot import PLOT_STYLE, Axis, Line, legend, line_plot
from tensorplay.cli.progress import readable_bytes
from tensorplay.cli.report_charts import CHART_STYLE, Bar, bar_chart, heat_map
from tensorplay.cli.report_data import Run, Summary, summarise
from tensorplay.cli.report_files import BarPlot, HeatMap, LinePlot, Plot

__all__ = ["build_page", "plots_of"]

_STYLE = """
body { margin: 0 auto; max-width: 62rem; padding: 1rem; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; line-height: 1.25; margin: .5rem 0; } h2 { font-size: 1.05rem; margin: 1.4rem 0 .3rem; }
p { margin: .4rem 0; } .quiet { color: var(--quiet); font-size: .9rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { font-weight: 600; vertical-align: bottom; } th:first-child, td:first-child { text-align: left; }
.plots { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
.plots > section { min-width: 0; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_READING = (
    "Means over the steps of the rank that wrote the file; - is unknown. Bytes are counted where tensors enter "
    "collectives. The exposed exchange is what backward did not hide. The relative error is that of all "
    "parameters together against the exact mean, when it was last measured."
)
_PARTS = ("compute, with what it hides of the exchange", "encode", "wait", "decode")
_HEADINGS = (
    "hook<br>",
    "ranks<br>",
    "steps<br>",
    "last<br>loss",
    "sent a step<br>and rank",
    "received<br>",
    "fewer bytes<br>than all-reduce",
    "step<br>",
    "of it exposed<br>exchange",
    "relative<br>error",
    "non-finite<br>steps",
)


def build_page(runs: Sequence[Run]) -> str:
    """The whole page.

    Args:
        runs: with names of their own (see `tell_apart`), in the order of table and legends.
    Example:
        >>> Path("report.html").write_text(build_page([read_run(Path("run.jsonl"))]))   # doctest: +SKIP
    """
    summaries = [summarise(run) for run in runs]
    title = f"Telemetry of {len(runs)} run{'s' if len(runs) > 1 else ''}"
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>{PLOT_STYLE}{CHART_STYLE}{_STYLE}</style>\n</head>\n<body>",
            f"<h1>{escape(title)}</h1>",
            _table(runs, summaries),
            f'<p class="quiet">{_READING}</p>',
            _loss(runs),
            _time(runs, summaries),
            *(_errors(run) for run in runs),
            f'<p class="quiet">{escape(_made(runs))}</p>\n</body>\n</html>\n',
        ]
    )


def _table(runs: Sequence[Run], summaries: Sequence[Summary]) -> str:
    rows = []
    for run, summary in zip(runs, summaries, strict=True):
        cells = (
            run.name,
            str(run.about["world_size"]),
            str(summary.step_count),
            _number(summary.last_loss, "{:.4g}"),
            "-" if summary.sent_bytes is None else readable_bytes(summary.sent_bytes),
            "-" if summary.received_bytes is None else readable_bytes(summary.received_bytes),
            _number(summary.fewer_bytes, "{:.1f} x"),
            _milliseconds(summary.step_seconds),
            _milliseconds(summary.exposed_seconds),
            _number(summary.error, "{:.2g}"),
            _seen(summary),
        )
        rows.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    heading = "".join(f"<th>{text}</th>" for text in _HEADINGS)
    return f'<div class="wide"><table><tr>{heading}</tr>{"".join(rows)}</table></div>'


def _seen(summary: Summary) -> str:
    """How many steps were not finite, as far as they were looked at."""
    if not summary.is_partly_looked_at:
        return str(summary.nonfinite_steps)
    return f"at least {summary.nonfinite_steps}" if summary.nonfinite_steps else "none seen"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.3g} ms"


def plots_of(runs: Sequence[Run]) -> list[Plot]:
    """What the page shows as pictures, in its order; `write_plots` makes files of it.

    Example:
        >>> write_plots(plots_of([read_run(Path("run.jsonl"))]), Path("plots"))     # doctest: +SKIP
    """
    bars = _bars(runs, [summarise(run) for run in runs])
    maps = [_error_map(run) for run in runs]
    return [
        *_loss_plots(runs)[0],
        *([BarPlot("step-time", "Where a step's time goes", bars, _PARTS)] if bars else []),
        *(found for found in maps if found.cells),
    ]


def _loss_plots(runs: Sequence[Run]) -> tuple[list[LinePlot], list[str]]:
    """Loss against steps, bytes and time; the names of the runs whose bytes are unknown."""
    if not any(run.losses for run in runs):
        return [], []
    by_step, by_bytes, by_time, without_bytes = [], [], [], []
    for run in runs:
        steps = [step for step in run.steps if step["step"] in run.losses]
        losses = [run.losses[step["step"]] for step in steps]
        by_step.append(Line(run.name, [step["step"] for step in steps], losses))
        by_time.append(Line(run.name, [step["time_seconds"] for step in steps], losses))
        if any(step["sent_bytes"] is None for step in run.steps):
            without_bytes.append(run.name)
            by_bytes.append(Line(run.name, [], []))
            continue
        totals = accumulate(step["sent_bytes"] for step in run.steps)
        sent = {step["step"]: total for step, total in zip(run.steps, totals, strict=True)}
        by_bytes.append(Line(run.name, [sent[step["step"]] for step in steps], losses))
    vertical = Axis("loss")
    sent_axis = Axis("sent by this rank since the start", logarithmic=True, text=readable_bytes)
    return [
        LinePlot("loss-against-steps", "Loss against steps", by_step, Axis("step"), vertical),
        LinePlot("loss-against-bytes", "Loss against bytes sent", by_bytes, sent_axis, vertical),
        LinePlot(
            "loss-against-time", "Loss against time", by_time, Axis("seconds since the start"), vertical
        ),
    ], without_bytes


def _loss(runs: Sequence[Run]) -> str:
    plots, without_bytes = _loss_plots(runs)
    if not plots:
        return "<h2>Loss</h2><p>Not recorded: call observation.log(loss=…) after each backward pass.</p>"
    sections = "".join(
        f"<section><h2>{plot.title}</h2>"
        f"{line_plot(plot.lines, plot.horizontal, plot.vertical, plot.title)}</section>"
        for plot in plots
    )
    note = ""
    if without_bytes:
        note = f'<p class="quiet">Bytes unknown: {escape(", ".join(without_bytes))}.</p>'
    return f'<div class="plots">{sections}</div>{legend([run.name for run in runs])}{note}'


def _bars(runs: Sequence[Run], summaries: Sequence[Summary]) -> list[Bar]:
    return [
        Bar(
            run.name,
            [s.compute_seconds, s.encode_seconds, s.wait_seconds, s.decode_seconds],
        )
        for run, s in zip(runs, summaries, strict=True)
        if s.compute_seconds is not None
    ]


def _time(runs: Sequence[Run], summaries: Sequence[Summary]) -> str:
    bars = _bars(runs, summaries)
    if not bars:
        return "<h2>Where a step's time goes</h2><p>It takes two steps to know how long one is.</p>"
    return (
        f"<h2>Where a step's time goes</h2>{bar_chart(bars, _PARTS)}"
        '<p class="quiet">Encode, wait and decode share out the exposed exchange as their own times, which overlap '
        "with each other and with backward, are to each other.</p>"
    )


def _error_map(run: Run) -> HeatMap:
    cells = {
        (record["parameter"], record["step"]): record["relative_error"]
        for record in run.errors
        if record["relative_error"] is not None
    }
    title = f"Relative error a layer: {run.name}"
    return HeatMap(f"relative-error-{run.name}", title, cells, "|result - mean| / |mean|")


def _errors(run: Run) -> str:
    cells = _error_map(run).cells
    heading = f"<h2>Relative error a layer: {escape(run.name)}</h2>"
    if not cells:
        every = run.about["error_every"]
        why = (
            "error_every was 0"
            if every == 0
            else f"it is every {every} steps, where gradients aren't all zero"
        )
        return f"{heading}<p>Not measured: {escape(why)}.</p>"
    return heading + heat_map(cells, f"Relative error of {run.name}")


def _made(runs: Sequence[Run]) -> str:
    abouts = {f"{run.about['backend']}, torch {run.about['torch']}" for run in runs}
    return f"Made from {', '.join(run.path.name for run in runs)}; {'; '.join(sorted(abouts))}."
