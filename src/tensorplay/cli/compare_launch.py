"""Start the ranks of a cell, watch them, end them, and start them again without a hook that failed."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

from tensorplay.cli.compare_advice import hooks_to_advise
from tensorplay.cli.compare_plan import Job, Settings
from tensorplay.cli.lab import rank_variables

__all__ = ["CellRuns", "Hosts", "Loopback", "order_of_rounds", "run_cell"]

_LOOK_SECONDS = 0.05
_GRACE_SECONDS = 1.0
_LEAST_START_SECONDS = 180.0
_ADVICE_SECONDS = 600.0
_WRAPPING = (
    r"(\w+: )?Got the following error when running the callback: "  # what passing through futures adds
)


class Hosts(Protocol):
    """Where ranks are started: a Lab, or this machine's loopback."""

    world_size: int

    def start(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdout: IO[str] | int | None = None,
        stderr: IO[str] | int | None = None,
    ) -> "subprocess.Popen[str]":
        """Start `command` as this rank."""
        ...


class Loopback:
    """Ranks as plain processes on this machine, over its loopback device. Stands in for a Lab.

    Example:
        >>> with Loopback(2) as hosts:
        ...     hosts.start(0, ["true"], {}).wait(timeout=60)
        0
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def __enter__(self) -> "Loopback":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def start(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdout: IO[str] | int | None = None,
        stderr: IO[str] | int | None = None,
    ) -> "subprocess.Popen[str]":
        """Start `command`; rank 0 chooses a free port for the ranks that follow."""
        if rank == 0:
            with socket.create_server(("127.0.0.1", 0)) as free:
                self._port = free.getsockname()[1]
        own = rank_variables(rank, self.world_size, "127.0.0.1", self._port)
        variables = {**os.environ, **own, **environment}
        loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        if loopback:
            variables["GLOO_SOCKET_IFNAME"] = loopback[0]
        return subprocess.Popen(list(command), env=variables, stdout=stdout, stderr=stderr, text=True)


@dataclass
class CellRuns:
    """What came of a cell.

    Attributes:
        results: by hook, one for each round that it ended; see `compare_measure.combine`.
        failures: by hook, why it has no figures.
        advice: what the advisor said, or {"failure": why}; None where it wasn't asked.
        parameters: of the model; None when no rank got as far.
    """

    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    advice: dict[str, Any] | None = None
    parameters: int | None = None


def order_of_rounds(hooks: Sequence[str], rounds: int) -> list[tuple[int, str]]:
    """Every hook once a round, each round beginning one further on: what disturbs the machine meets all alike.

    Example:
        >>> order_of_rounds(["a", "b", "c"], rounds=2)
        [(0, 'a'), (0, 'b'), (0, 'c'), (1, 'b'), (1, 'c'), (1, 'a')]
    """
    return [
        (number, hooks[(number + place) % len(hooks)])
        for number in range(rounds)
        for place in range(len(hooks))
    ]


def run_cell(
    hosts: Hosts,
    device: str,
    hooks: Sequence[str],
    settings: Settings,
    folder: Path,
    show: Callable[[dict[str, Any]], None] = lambda event: None,
) -> CellRuns:
    """Run every hook in every round, over the links that `hosts` has now.

    1. Start the ranks with all that is still to do and follow what rank 0 reports.
    2. When a rank fails, or no step ends for hook_timeout seconds, end all ranks: the hook that was running has failed
       and is not run again here.
    3. Start again with the rest. Ranks that fail before any hook runs fail them all.

    Args:
        device: the interface that is a rank's alone, or "".
        show: called with each event.
    """
    cell = CellRuns()
    todo = order_of_rounds(hooks, settings.rounds)
    advise_for = tuple(hooks_to_advise(hooks)) if settings.advise else ()
    start = 0
    while todo:
        here = folder / f"start{start}"
        shutil.rmtree(here, ignore_errors=True)
        here.mkdir(parents=True)
        job = Job(settings, device, tuple(todo), advise_for, here, os.getpid())
        job.save()
        launch = _Launch(hosts, job, show)
        reason = launch.run()
        cell.parameters = launch.parameters or cell.parameters
        if launch.advice is not None:
            cell.advice, advise_for = launch.advice, ()
        for hook, result in launch.results:
            cell.results.setdefault(hook, []).append(result)
        todo = todo[len(launch.results) :]
        if not reason:
            break
        if launch.advising:
            cell.advice, advise_for = {"failure": reason}, ()
        elif not launch.ready:
            cell.failures.update({hook: f"the ranks did not start: {reason}" for _, hook in todo})
            todo = []
        elif todo:
            failed = launch.running or todo[0][1]
            cell.failures[failed] = reason
            todo = [(number, hook) for number, hook in todo if hook != failed]
        start += 1
    for hook in cell.failures:
        cell.results.pop(hook, None)
    return cell


class _Launch:
    """One start of the ranks, until they have ended.

    Attributes:
        results: (hook, result) in the order in which they ended.
        ready: the ranks had met, and the model was made.
        running: the hook that was at work when the ranks ended, or None.
        advising: the advisor was at work then.
    """

    def __init__(self, hosts: Hosts, job: Job, show: Callable[[dict[str, Any]], None]) -> None:
        self._hosts, self._job, self._show = hosts, job, show
        self._read_bytes = 0
        self._last_progress = time.monotonic()
        self.ready = False
        self.results: list[tuple[str, dict[str, Any]]] = []
        self.running: str | None = None
        self.advising = False
        self.advice: dict[str, Any] | None = None
        self.parameters: int | None = None

    def run(self) -> str:
        """Start and follow the ranks; returns why they failed, or ''. None of them is left when it returns."""
        command = [sys.executable, "-u", "-m", "tensorplay.cli.compare_rank", str(self._job.path)]
        threads = {"OMP_NUM_THREADS": str(self._job.settings.threads)}
        processes: list[subprocess.Popen[str]] = []
        with ExitStack() as stack:
            stack.callback(_end, processes)
            for rank in range(self._hosts.world_size):
                log = stack.enter_context((self._job.folder / f"rank{rank}.log").open("w", encoding="utf-8"))
                processes.append(
                    self._hosts.start(rank, command, threads, stdout=log, stderr=subprocess.STDOUT)
                )
            reason = self._follow(processes)
        self._read_events()
        return reason

    def _follow(self, processes: "list[subprocess.Popen[str]]") -> str:
        self._last_progress = time.monotonic()
        while True:
            self._read_events()
            codes = [process.poll() for process in processes]
            if any(code not in (None, 0) for code in codes):
                return self._first_failure(processes)
            if all(code == 0 for code in codes):
                return ""
            limit = self._limit()
            if time.monotonic() - self._last_progress > limit:
                return f"it hangs: no step ended within {limit:g} s (--hook-timeout)"
            time.sleep(_LOOK_SECONDS)

    def _limit(self) -> float:
        timeout = self._job.settings.hook_timeout
        if self.advising:
            return max(_ADVICE_SECONDS, timeout)
        return timeout if self.ready else max(_LEAST_START_SECONDS, timeout)

    def _read_events(self) -> None:
        if not self._job.events_path.exists():
            return
        with self._job.events_path.open("rb") as file:
            file.seek(self._read_bytes)
            chunk = file.read()
        lines, found, _ = chunk.rpartition(b"\n")
        self._read_bytes += len(lines) + len(found)
        for line in lines.splitlines():
            self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        self._last_progress = time.monotonic()
        kind = event["event"]
        if kind == "ready":
            self.ready, self.parameters = True, event["parameters"]
        elif kind == "advising":
            self.advising = True
        elif kind == "advised":
            self.advising, self.advice = False, event["advice"]
        elif kind == "started":
            self.running = event["hook"]
        elif kind == "finished":
            self.results.append((event["hook"], event["result"]))
            self.running = None
        self._show(event)

    def _first_failure(self, processes: "list[subprocess.Popen[str]]") -> str:
        """Tell the rank that began it from those that only lost their peer.

        1. Peers may be about to leave their errors, too: wait a moment for them.
        2. A rank that was killed left no error behind: it is the cause.
        3. Otherwise the earliest error file is.
        """
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            time.sleep(_LOOK_SECONDS)
        errors: list[tuple[float, int, str]] = []
        for rank, process in enumerate(processes):
            path = self._job.error_path(rank)
            if path.exists():
                record = json.loads(path.read_text(encoding="utf-8"))
                errors.append((record["time_seconds"], rank, record["error"]))
            elif process.poll() not in (None, 0):
                return (
                    f"rank {rank} {_ending(process.poll())}{_last_line(self._job.folder / f'rank{rank}.log')}"
                )
        if not errors:
            return "a rank ended with an error and left no trace"
        _, rank, error = min(errors)
        told = re.sub(_WRAPPING, "", error.strip()).partition("\n")[0] or "an error without a text"
        return told if told.startswith("rank ") else f"rank {rank}: {told}"


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit status {code}"


def _last_line(log: Path) -> str:
    """What a rank printed last, for one that left no other trace."""
    lines = [
        line.strip()
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    told = [line for line in lines if "what():" in line] or lines
    return f": {told[-1][:300]}" if told else ""


def _end(processes: "list[subprocess.Popen[str]]") -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()
