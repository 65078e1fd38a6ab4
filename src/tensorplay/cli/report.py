"""`tensorplay report run.jsonl …`: what telemetry recorded, as one HTML file, and each of its plots as PNG and SVG."""

import argparse
import sys
from pathlib import Path

from tensorplay.cli.command import UsageError
from tensorplay.cli.report_data import read_runs, tell_apart
from tensorplay.cli.report_files import write_plots
from tensorplay.cli.report_page import build_page, plots_of

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options.

    Example:
        >>> parser = argparse.ArgumentParser()
        >>> add_arguments(parser)
        >>> parser.parse_args(["a.jsonl"]).output
        PosixPath('report.html')
    """
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="a file that tensorplay.telemetry.JSONLinesSink wrote; the first one is drawn widest",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--plots",
        type=Path,
        metavar="DIR",
        help="the folder for each plot's PNG and SVG (default: the page's name with -plots, beside it)",
    )
    where.add_argument("--no-plots", action="store_true", help="write the page alone")
    parser.add_argument(
        "--output", type=Path, default=Path("report.html"), help="the file to write (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Read the runs, write the page and its plots, say where they are.

    Raises: UsageError: a run can't be read or holds no step, or a file can't be written.
    Example:
        >>> run(argparse.Namespace(runs=[Path("no/run.jsonl")], output=Path("report.html"), plots=None))
        Traceback (most recent call last):
        tensorplay.cli.command.UsageError: no/run.jsonl: No such file or directory
    """
    runs = tell_apart([run for path in arguments.runs for run in read_runs(path)])
    page = build_page(runs)
    try:
        arguments.output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{arguments.output}: {error.strerror}") from None
    print(f"report of {len(runs)} run{'s' if len(runs) > 1 else ''}: {arguments.output}", file=sys.stdout)
    if not arguments.no_plots:
        folder = arguments.plots or arguments.output.with_name(f"{arguments.output.stem}-plots")
        if plots := plots_of(runs):
            write_plots(plots, folder)
            print(f"{len(plots)} plots as PNG and SVG: {folder}", file=sys.stdout)
    return 0
