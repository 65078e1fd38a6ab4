"""`tensorplay report run.jsonl …`: what telemetry recorded, as one HTML file."""

import argparse
import sys
from pathlib import Path

from tensorplay.cli.command import UsageError
from tensorplay.cli.report_data import read_run, tell_apart
from tensorplay.cli.report_page import build_page

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
    parser.add_argument(
        "--output", type=Path, default=Path("report.html"), help="the file to write (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Read the runs, write the page, say where it is.

    Raises: UsageError: a run can't be read or holds no step, or the page can't be written.
    Example:
        >>> run(argparse.Namespace(runs=[Path("no/run.jsonl")], output=Path("report.html")))
        Traceback (most recent call last):
        tensorplay.cli.command.UsageError: no/run.jsonl: No such file or directory
    """
    runs = tell_apart([read_run(path) for path in arguments.runs])
    page = build_page(runs)
    try:
        arguments.output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{arguments.output}: {error.strerror}") from None
    print(f"report of {len(runs)} run{'s' if len(runs) > 1 else ''}: {arguments.output}", file=sys.stdout)
    return 0
