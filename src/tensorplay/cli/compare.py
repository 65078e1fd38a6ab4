"""`tensorplay compare`: hooks side by side over links of chosen rates, ours and torch's in one run.

1. Check everything the user chose; a mistake is one line and nothing starts.
2. For each number of ranks and each rate, run every hook in every round, over network namespaces if they can be made.
3. Print a table; write comparison.json and comparison.html. A hook that fails is a row.
"""

import argparse
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from tensorplay.cli.command import INTERRUPTED, UsageError
from tensorplay.cli.compare_data import FORMAT, LOOPBACK, build_about, build_cell, where_it_does_not_pay
from tensorplay.cli.compare_hooks import OUR_PLAIN, TORCH_PLAIN, check_hooks
from tensorplay.cli.compare_launch import CellRuns, Loopback, run_cell
from tensorplay.cli.compare_page import build_page
from tensorplay.cli.compare_plan import Settings
from tensorplay.cli.compare_table import build_table
from tensorplay.cli.hooks import COMPUTE_ALONE, split_hook_names
from tensorplay.cli.lab import Lab, available, bits_per_second
from tensorplay.cli.workload import check_workload

__all__ = ["Choices", "add_arguments", "check_arguments", "run"]

_HOOKS = "torch:allreduce,torch:fp16,allreduce,fp16_compress,int8,int4,topk:0.01,power_sgd"
_RANKS, _RATES = "2", "200mbit,1gbit,unlimited"
_PIPED_WIDTH = 110
_LAB_LINKS = "network namespaces, a full-duplex link of the rate for each rank, shaped by tc at both ends"
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Choices:
    """What the user asked for, checked.

    Attributes:
        ranks, rates: one cell for each pair; the rate is "loopback" where links can't be shaped.
        links: how they are made.
        hooks: names, "noop" and plain all-reduce always among them.
        out: the folder. settings: by number of ranks.
    """

    ranks: tuple[int, ...]
    rates: tuple[str, ...]
    links: str
    hooks: tuple[str, ...]
    out: Path
    settings: dict[int, Settings]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options.

    Example:
        >>> parser = argparse.ArgumentParser()
        >>> add_arguments(parser)
        >>> parser.parse_args(["--ranks", "2,4"]).ranks
        '2,4'
    """
    parser.add_argument(
        "--model",
        default="mlp",
        help="mlp (25 million parameters), mlp:width=N,layers=N,batch=N, gpt:tiny|small|base|large, or "
        "module:function returning (model, batches[, loss[, optimizer]]) (default: mlp)",
    )
    parser.add_argument(
        "--hooks",
        default=_HOOKS,
        help=f"names, with commas between; torch's own as torch:NAME, yours as module:function (default: {_HOOKS})",
    )
    parser.add_argument("--ranks", default=_RANKS, help=f"numbers, with commas between (default: {_RANKS})")
    parser.add_argument(
        "--rates",
        default=_RATES,
        help=f"as 200mbit, 1gbit, unlimited; needs root and iproute2 (default: {_RATES})",
    )
    parser.add_argument(
        "--links",
        default="auto",
        choices=["auto", "namespaces", "loopback"],
        help="network namespaces, or this machine's loopback, where --rates has no effect; auto: namespaces if they "
        "can be made (default: auto)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each hook in a cell (default: 3)")
    parser.add_argument("--steps", type=int, default=4, help="measured steps a run (default: 4)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default: 0)")
    parser.add_argument("--threads", type=int, help="a rank (default: the cores shared out, at least 1)")
    parser.add_argument(
        "--hook-timeout",
        type=float,
        default=60.0,
        help="seconds without a finished step after which a hook counts as hanging (default: 60)",
    )
    parser.add_argument(
        "--advise", action="store_true", help="set the advisor's predictions beside the figures"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/compare"), help="folder (default: runs/compare)"
    )


def check_arguments(arguments: argparse.Namespace) -> Choices:
    """Check every option; makes the output folder.

    Raises:
        UsageError: an unknown model, hook or rate, a count out of range, a folder that can't be written.
    """
    cores = os.cpu_count() or 1
    ranks = _whole_numbers("--ranks", arguments.ranks, least=2, most=max(16, 4 * cores))
    rates = _words("--rates", arguments.rates)
    for rate in rates:
        try:
            bits_per_second(rate)
        except ValueError as error:
            raise UsageError(f"--rates: {error}") from error
    for name, least in (("rounds", 1), ("steps", 1), ("warmup", 1), ("threads", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise UsageError(f"--{name} must be >= {least}, got {value}")
    if not 0 <= arguments.seed < 2**31:
        raise UsageError(f"--seed must be from 0 to {2**31 - 1}, got {arguments.seed}")
    if not arguments.hook_timeout > 0:
        raise UsageError(f"--hook-timeout must be > 0 seconds, got {arguments.hook_timeout:g}")
    check_workload(arguments.model)
    hooks = split_hook_names(arguments.hooks)
    check_hooks(hooks)
    if TORCH_PLAIN not in hooks and OUR_PLAIN not in hooks:
        hooks.insert(0, TORCH_PLAIN)
    if COMPUTE_ALONE not in hooks:
        hooks.insert(0, COMPUTE_ALONE)
    settings = {
        count: Settings(
            model=arguments.model,
            rounds=arguments.rounds,
            steps=arguments.steps,
            warmup=arguments.warmup,
            seed=arguments.seed,
            threads=arguments.threads or _threads(count, cores),
            hook_timeout=arguments.hook_timeout,
            advise=arguments.advise,
        )
        for count in ranks
    }
    links = _LAB_LINKS
    if reason := _no_lab(arguments.links):
        rates, links = [LOOPBACK], f"this machine's loopback, --rates has no effect: {reason}"
    return Choices(tuple(ranks), tuple(rates), links, tuple(hooks), _prepare_folder(arguments.out), settings)


def _no_lab(links: str) -> str:
    """Why ranks are to run over loopback, or ''."""
    if links == "loopback":
        return "--links loopback"
    reason = available()
    if reason and links == "namespaces":
        raise UsageError(f"--links namespaces: {reason}; --links loopback needs none")
    return reason


def _threads(ranks: int, cores: int) -> int:
    """What the user has set for all programs, else an equal share of the cores."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    return int(said) if said.isdecimal() and int(said) >= 1 else max(1, cores // ranks)


def _words(option: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise UsageError(f"{option} must name at least one, got {text!r}")
    for word in words:
        if words.count(word) > 1:
            raise UsageError(f"{option} must name each once, got {word} {words.count(word)} times")
    return words


def _whole_numbers(option: str, text: str, least: int, most: int) -> list[int]:
    words = _words(option, text)
    for word in words:
        if not word.isdecimal() or not least <= int(word) <= most:
            raise UsageError(f"{option} must be from {least} to {most} on this machine, got {word}")
    return [int(word) for word in words]


def _prepare_folder(out: Path) -> Path:
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "comparison.json").unlink(missing_ok=True)
        (out / "comparison.html").unlink(missing_ok=True)
        probe = out / ".writable"
        probe.write_text("", encoding="utf-8")
        probe.unlink()
    except OSError as error:
        raise UsageError(f"--out {out} must be a folder that can be written: {error.strerror}") from error
    return out.resolve()


def run(arguments: argparse.Namespace) -> int:
    """Run the comparison; see the module's docstring. Returns 0, 1 when no hook has figures, 130 after Ctrl-C.

    Raises:
        UsageError: as in check_arguments, before anything starts.
    """
    choices = check_arguments(arguments)
    console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH, soft_wrap=True)
    console.print(f"links: {choices.links}", highlight=False)
    comparison: dict[str, Any] = {}
    try:
        with _ended_by_signals():
            cells: list[dict[str, Any]] = []
            parameters: int | None = None
            for ranks in choices.ranks:
                failed_before: dict[str, str] = {}
                for rate in choices.rates:
                    runs = _run_one(choices, ranks, rate, failed_before, console)
                    parameters = runs.parameters or parameters
                    cells.append(build_cell(ranks, rate, choices.hooks, runs, choices.settings[ranks]))
                    console.print(build_table(cells[-1]))
                    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
                    comparison = {
                        "format": FORMAT,
                        "made_by": "tensorplay compare",
                        "about": build_about(choices.settings[ranks], command, choices.links, parameters),
                        "cells": cells,
                    }
                    _write(choices.out, comparison)
    except KeyboardInterrupt:
        print("tensorplay compare: stopped, all ranks have ended", file=sys.stderr)
        return INTERRUPTED
    for sentence in where_it_does_not_pay(comparison["cells"]):
        console.print(sentence, highlight=False)
    console.print(f"{choices.out / 'comparison.html'} and comparison.json", highlight=False)
    rows = [row for cell in comparison["cells"] for row in cell["rows"]]
    if all(row["failure"] for row in rows):
        print(f"tensorplay compare: error: no hook has figures: {rows[0]['failure']}", file=sys.stderr)
        return 1
    return 0


def _run_one(
    choices: Choices, ranks: int, rate: str, failed_before: dict[str, str], console: Console
) -> CellRuns:
    """One cell. A hook that failed at another rate with as many ranks isn't tried again: it may hang for long."""
    where = f"{ranks} ranks, {rate}"
    hooks = [hook for hook in choices.hooks if hook not in failed_before]
    settings, folder = choices.settings[ranks], choices.out / "cells" / f"{ranks}-{rate}"

    def show(event: dict[str, Any]) -> None:
        if event["event"] == "started":
            status.update(f"{where}: round {event['round'] + 1} of {settings.rounds}, {event['hook']}")

    with console.status(f"{where}: starting") as status:
        if not console.is_terminal:
            console.print(f"{where}, rounds: {settings.rounds}; {', '.join(hooks)}", highlight=False)
        if rate == LOOPBACK:
            with Loopback(ranks) as hosts:
                runs = run_cell(hosts, "", hooks, settings, folder, show)
        else:
            with Lab(ranks, rate) as lab:
                runs = run_cell(lab, "eth0", hooks, settings, folder, show)
    runs.failures.update({hook: f"not run again: {why}" for hook, why in failed_before.items()})
    if runs.results:  # else it was no hook's fault
        for hook, why in runs.failures.items():
            failed_before.setdefault(hook, f"{why} (at {rate})")
    return runs


def _write(out: Path, comparison: dict[str, Any]) -> None:
    text = json.dumps(comparison, indent=1, allow_nan=False)
    (out / "comparison.json").write_text(text + "\n", encoding="utf-8")
    (out / "comparison.html").write_text(build_page(comparison), encoding="utf-8")


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let the signals that end a process end this one as Ctrl-C does, so that ranks and namespaces go with it."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    handlers = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
