"""Start ranks on this machine with PyTorch's elastic launcher, and end them all, whatever happens."""

import json
import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tensorplay.cli.demo_plan import DemoPlan

__all__ = ["RankFailedError", "launch_ranks"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class RankFailedError(RuntimeError):
    """A rank ended with an error.

    Attributes:
        rank: the one that failed first.
        details: its traceback, or where its log is.

    Example:
        >>> str(RankFailedError(1, "ValueError: no", "…"))
        'rank 1 failed: ValueError: no'
    """

    def __init__(self, rank: int, error: str, details: str) -> None:
        super().__init__(f"rank {rank} failed: {error}")
        self.rank, self.details = rank, details


def launch_ranks(plan: DemoPlan, plan_path: Path) -> None:
    """Run the plan's ranks to their end.

    1. One elastic agent in this process starts plan.ranks processes; what they print goes to <out>/rank_logs.
    2. It waits for them; when one fails, or a signal comes, it ends the others.
    3. The error of the rank that failed first is raised.

    Raises:
        RankFailedError: a rank ended with an error or was killed.
        KeyboardInterrupt: Ctrl-C, or another of the signals that end a process.

    Example:
        >>> launch_ranks(plan, plan.save())                                # doctest: +SKIP
    """
    plan.logs_folder.mkdir(exist_ok=True)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=plan.ranks,
        run_id=uuid.uuid4().hex[:8],
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(plan.logs_folder), redirects=Std.ALL),
    )
    with _as_found():
        try:
            elastic_launch(config, sys.executable)("-u", "-m", "tensorplay.cli.demo_rank", str(plan_path))
        except SignalException as stopped:
            raise KeyboardInterrupt from stopped
        except ChildFailedError as failed:
            raise _first_failure(plan, failed) from failed


@contextmanager
def _as_found() -> Iterator[None]:
    """Keep the launcher's log quiet, and leave signal handlers, variables and log level as they were."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]
    levels = {name: logging.getLogger(name).level for name in names}
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    environment = dict(os.environ)
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)


def _first_failure(plan: DemoPlan, failed: ChildFailedError) -> RankFailedError:
    """Tell the rank that began it from those that only lost their peer.

    1. A rank that was killed left no error behind: it is the cause. The agent ends the others with SIGTERM.
    2. Otherwise the earliest error file is.
    3. Otherwise the first rank that the agent saw ending.
    """
    log = f"what the ranks printed is in {plan.logs_folder}"
    for rank, failure in failed.failures.items():
        if (
            failure.exitcode < 0
            and failure.exitcode != -signal.SIGTERM
            and not plan.error_path(rank).exists()
        ):
            return RankFailedError(rank, f"it was killed by {signal.Signals(-failure.exitcode).name}", log)
    records: list[tuple[float, int, dict[str, Any]]] = []
    for rank in range(plan.ranks):
        if plan.error_path(rank).exists():
            record = json.loads(plan.error_path(rank).read_text(encoding="utf-8"))
            records.append((record["time_seconds"], rank, record))
    if records:
        _, rank, record = min(records, key=lambda entry: entry[:2])
        return RankFailedError(rank, record["error"], record["traceback"])
    rank, failure = next(iter(failed.failures.items()))
    return RankFailedError(rank, f"it ended with exit status {failure.exitcode}", log)
