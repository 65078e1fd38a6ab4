"""Show a demo run while it goes on: read the events that rank 0 appends, draw one bar a hook."""

import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tensorplay.cli.demo_plan import DemoPlan

__all__ = ["follow_run", "readable_bytes"]

_POLL_SECONDS = 0.1
_PLAIN_LINE_SECONDS = 10.0


def readable_bytes(count: float) -> str:
    """A byte count with its unit, three digits.

    Example:
        >>> [readable_bytes(count) for count in (0, 999, 13_031_424, 1e9)]
        ['0 B', '999 B', '13.0 MB', '1.00 GB']
    """
    units = ["B", "kB", "MB", "GB", "TB"]
    power = min(len(units) - 1, int(math.log10(count) // 3)) if count >= 1 else 0
    if power == 0:
        return f"{count:.0f} B"
    scaled = count / 1000**power
    return f"{scaled:.{max(0, 2 - int(math.log10(scaled)))}f} {units[power]}"


@contextmanager
def follow_run(plan: DemoPlan, console: Console) -> Iterator[list[dict[str, Any]]]:
    """Show progress while the body runs.

    Yields:
        the list of events other than single steps; complete once the body has ended.

    Example:
        >>> with follow_run(plan, Console()) as events:                    # doctest: +SKIP
        ...     launch_ranks(plan, plan.save())
    """
    events: list[dict[str, Any]] = []
    ended = threading.Event()
    display = _Bars(plan, console) if console.is_terminal else _Lines(plan, console)

    def follow() -> None:
        for event in _appended(plan.events_path, ended):
            if event["event"] != "step":
                events.append(event)
            display.show(event)

    with display:
        thread = threading.Thread(target=follow, name="follow-events", daemon=True)
        thread.start()
        try:
            yield events
        finally:
            ended.set()
            thread.join()


def _appended(path: Path, ended: threading.Event) -> Iterator[dict[str, Any]]:
    """The events of `path` as they are written; returns after `ended` and the last whole line."""
    position, rest = 0, b""
    while True:
        last_look = ended.is_set()
        if path.exists():
            with path.open("rb") as file:
                file.seek(position)
                chunk = file.read()
            position += len(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            yield from (json.loads(line) for line in lines)
        if last_look:
            return
        ended.wait(_POLL_SECONDS)


class _Display:
    """What both displays share: totals, and the figures of a step."""

    def __init__(self, plan: DemoPlan, console: Console) -> None:
        self.plan, self.console = plan, console
        self.total_steps = plan.compute_alone_steps + plan.steps * len(plan.hooks)

    def __enter__(self) -> "_Display":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, event: dict[str, Any]) -> None:
        raise NotImplementedError

    def figures(self, event: dict[str, Any]) -> str:
        bits = event["loss_nats"] / math.log(2)
        return f"loss {bits:.3f} bits/byte, sends {readable_bytes(event['sent'] / event['step'])} a step"


class _Bars(_Display):
    """For a terminal: a bar a hook, and one for the whole run with the time left."""

    def __init__(self, plan: DemoPlan, console: Console) -> None:
        super().__init__(plan, console)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=console,
        )
        self._whole = self._progress.add_task("[bold]whole run", total=self.total_steps, figures="time left")
        self._task: TaskID | None = None

    def __enter__(self) -> "_Bars":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, event: dict[str, Any]) -> None:
        if event["event"] == "started":
            self._task = self._progress.add_task(event["hook"], total=event["steps"], figures="")
        elif event["event"] == "step" and self._task is not None:
            self._progress.update(self._task, advance=1, figures=self.figures(event))
            self._progress.update(self._whole, advance=1)


class _Lines(_Display):
    """For a file or a pipe: a line when a hook starts and ends, and one every ten seconds."""

    def __init__(self, plan: DemoPlan, console: Console) -> None:
        super().__init__(plan, console)
        self._begin = self._last = math.nan
        self._done_steps = 0

    def show(self, event: dict[str, Any]) -> None:
        now = time.monotonic()
        if event["event"] == "started":
            if math.isnan(self._begin):
                self._begin = self._last = now
            self._steps = event["steps"]
            self._print(f"{event['hook']}: {event['steps']} steps")
        elif event["event"] == "step":
            self._done_steps += 1
            if now - self._last < _PLAIN_LINE_SECONDS and event["step"] < self._steps:
                return
            left = (now - self._begin) / self._done_steps * (self.total_steps - self._done_steps)
            where = f"step {event['step']}/{self._steps}"
            self._print(f"  {where}: {self.figures(event)}, {left:.0f} s left in all")
            self._last = now

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)
