"""The demo's report as one HTML file: a table and two plots, nothing loaded from elsewhere."""

import math
from html import escape
from typing import Any

from tensorplay.cli.demo_report import table_cells
from tensorplay.cli.plot import PLOT_STYLE, Axis, Line, legend, line_plot
from tensorplay.cli.progress import readable_bytes
from tensorplay.cli.report_files import LinePlot

__all__ = ["build_page", "plots_of"]

_NOTHING_FROM_ELSEWHERE = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
body { margin: 0 auto; max-width: 62rem; padding: 1rem; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; line-height: 1.25; margin: .5rem 0; } h2 { font-size: 1.05rem; margin: 1.4rem 0 .3rem; }
p { margin: .4rem 0; } .quiet { color: var(--quiet); font-size: .9rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { font-weight: 600; vertical-align: bottom; } th:first-child, td:first-child { text-align: left; }
section { min-width: 0; }
.plots { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
"""
_HEADINGS = (
    "hook<br>",
    "validation<br>bits/byte",
    "sent a step<br>and rank",
    "received",
    "fewer bytes<br>than all-reduce",
    "step time<br>here",
    "least step at<br>1 Gbit/s, computed",
)


def build_page(report: dict[str, Any]) -> str:
    """The whole page for what build_report returned.

    Example:
        >>> Path("report.html").write_text(build_page(report))             # doctest: +SKIP
    """
    settings, machine = report["settings"], report["machine"]
    title = f"{len(report['hooks'])} communication hooks, one training run each"
    run = (
        f"Byte-level GPT of {settings['parameters']:,} parameters ({settings['size']}) on the source code of "
        f"Python's standard library; {settings['ranks']} ranks on {settings['backend']}, {settings['steps']} "
        f"steps of {settings['batch_bytes_per_rank']} bytes a rank, seed {settings['seed']}. Weights and data "
        "order are the same under each hook."
    )
    made = (
        f"{report['made_at']}, {report['made_by']}, torch {machine['torch']}, Python {machine['python']}, "
        f"{machine['gpu'] or machine['processor']}, {machine['cores']} cores, threads a "
        f"rank: {machine['threads_per_rank']}, text {report['corpus']['fingerprint']}, "
        f"{report['wall_seconds']:.0f} s in all."
    )
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_NOTHING_FROM_ELSEWHERE}">',
            f"<title>{escape(title)}</title>\n<style>{PLOT_STYLE}{_STYLE}</style>\n</head>\n<body>",
            f"<h1>{escape(title)}</h1>\n<p>{escape(run)}</p>",
            _table(report["hooks"]),
            f'<p class="quiet">{escape(_reading(report))}</p>',
            _plots(report["hooks"]),
            f'<p class="quiet">{escape(made)}</p>\n</body>\n</html>\n',
        ]
    )


def _table(hooks: dict[str, Any]) -> str:
    rows = []
    for name, result in hooks.items():
        cells = (f"<td>{escape(cell)}</td>" for cell in table_cells(name, result))
        rows.append(f"<tr>{''.join(cells)}</tr>")
    heading = "".join(f"<th>{text}</th>" for text in _HEADINGS)
    return f'<div class="wide"><table><tr>{heading}</tr>{"".join(rows)}</table></div>'


def _reading(report: dict[str, Any]) -> str:
    """How to read the table."""
    text = (
        "Bytes are counted where tensors enter collectives. Step time here is measured on this machine, "
        "whose ranks share memory: fewer bytes save little time here. The least step at 1 Gbit/s is computed, "
        f"not measured: the larger of compute alone ({1000 * report['compute_alone_seconds']:.0f} ms, measured "
        "here) and bytes / rate, that is with perfect overlap and free encoding."
    )
    if report["allreduce_bytes_source"] != "measured":
        text += f" All-reduce did not take part; its bytes are {report['allreduce_bytes_source']}."
    if not all(result["replicas_identical"] for result in report["hooks"].values()):
        text += " † The ranks' replicas differ at the last step."
    return text


def plots_of(hooks: dict[str, Any]) -> list[LinePlot]:
    """The page's plots, for what build_report returned as "hooks"; `write_plots` makes files of them.

    Example:
        >>> write_plots(plots_of(report["hooks"]), Path("plots"))          # doctest: +SKIP
    """
    by_step, by_bytes, high, low_bytes = [], [], [], []
    for name, result in hooks.items():
        bits = _smooth([nats / math.log(2) for nats in result["loss_nats_by_step"]])
        by_step.append(Line(name, range(1, len(bits) + 1), bits))
        by_bytes.append(Line(name, result["sent_bytes_by_step"], bits))
        high.append(bits[len(bits) // 20])
        low_bytes.append(result["sent_bytes_by_step"][len(bits) // 20])
    finite = [value for value in high if math.isfinite(value)]
    vertical = Axis("training loss, bits/byte", high=max(finite) if finite else None)
    low = min((count for count in low_bytes if count > 0), default=None)
    sent = Axis("sent by a rank since the start", logarithmic=True, low=low, text=readable_bytes)
    return [
        LinePlot("loss-against-steps", "Training loss against steps", by_step, Axis("step"), vertical),
        LinePlot("loss-against-bytes", "Training loss against bytes sent", by_bytes, sent, vertical),
    ]


def _plots(hooks: dict[str, Any]) -> str:
    steps, sent_plot = (
        line_plot(plot.lines, plot.horizontal, plot.vertical, plot.title) for plot in plots_of(hooks)
    )
    return (
        f'<div class="plots"><section><h2>Loss against steps</h2>{steps}</section>'
        f"<section><h2>Loss against bytes</h2>{sent_plot}</section></div>{legend(list(hooks))}"
        '<p class="quiet">Mean over the ranks, smoothed over about a twentieth of the run.</p>'
    )


def _smooth(values: list[float]) -> list[float]:
    """Exponential mean over about a twentieth of the values, without a bias towards its start."""
    keep = 1 - 1 / max(1.0, len(values) / 20)
    total = weight = 0.0
    smoothed = []
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        smoothed.append(total / weight)
    return smoothed
