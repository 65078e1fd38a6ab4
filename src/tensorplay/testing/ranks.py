"""`run_ranks`: one function on several real ranks, each result back by rank."""

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from tensorplay.testing import worker
from tensorplay.testing.failures import Exited, RankFailure, RankReport, lost_its_peer, waiting_places
from tensorplay.testing.modules import own_main_file, own_modules
from tensorplay.testing.pool import Pool, Rank, fixed_environment
from tensorplay.testing.wire import Call, Failed, Finished, Release

__all__ = ["MAX_WORLD_SIZE", "close_ranks", "run_ranks"]

MAX_WORLD_SIZE = 8
"""The most ranks one call may ask for."""

_HOLD_SECONDS = 0.3  # a failed rank's connections stay open this long: others may be failing on their own
_STACK_SECONDS = 2.0
_CLEAN_UP_SECONDS = 10.0
_OWN_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep

_pool: Pool | None = None
_lock = threading.Lock()


def run_ranks(
    function: Callable[[int, int], Any],
    world_size: int,
    timeout_seconds: float = 60.0,
    backend: str = "gloo",
    *,
    group_timeout_seconds: float = 30.0,
    grace_seconds: float = 5.0,
    expect_exit: Iterable[int] = (),
    warnings_as_errors: bool = True,
    seed: int = 0,
) -> list[Any]:
    """Run `function(rank, world_size)` on `world_size` processes and return what each returned, by rank.

    Steps:
      1. processes kept from earlier calls are reused, missing ones forked (milliseconds; the first call imports torch);
      2. in each: the caller's environment, folder and modules, one torch thread, seeds set to `seed` on every rank,
         a new default group on 127.0.0.1;
      3. the function runs; results travel by value;
      4. when all ranks are done the groups are destroyed and torch's settings put back.

    Args:
        function: a function at module level, or a functools.partial of one: it is pickled by name.
        world_size: number of ranks, 1 to 8.
        timeout_seconds: ranks still running after this time are ended; the error says where each was waiting.
        backend: what `torch.distributed.init_process_group` takes.
        group_timeout_seconds: the default group's timeout, so how long a collective waits for its peers.
        grace_seconds: how long the others may go on once a rank has failed.
        expect_exit: ranks that must end their process themselves (`os._exit`, a signal); their result is an `Exited`.
        warnings_as_errors: a warning raises in the rank; deprecations inside torch's own modules do not.
        seed: for torch, random and numpy, the same on every rank.

    Raises:
        RankFailure: a rank raised, ended, or was still running; shows every such rank, the first one first.
        TypeError: the function can't be pickled by name.
        ValueError: world_size outside 1 to 8, a rank in expect_exit that does not exist, a timeout that is not > 0.

    Example:
        >>> import operator
        >>> run_ranks(operator.add, 2)  # rank + world_size
        [2, 3]
        >>> close_ranks()
    """
    expected = _check(world_size, timeout_seconds, group_timeout_seconds, grace_seconds, expect_exit)
    pickled, main_file = _pickle(function)
    with _lock:
        pool = _started_pool()
        pool.calls += 1
        name = _name(function)
        ranks = pool.take(world_size)
        modules = own_modules()
        for number, rank in enumerate(ranks):
            place = {
                "RANK": number,
                "LOCAL_RANK": number,
                "WORLD_SIZE": world_size,
                "LOCAL_WORLD_SIZE": world_size,
            }
            rank.send(
                Call(
                    name=f"call {pool.calls}",
                    function=pickled,
                    rank=number,
                    world_size=world_size,
                    backend=backend,
                    store_port=pool.store_port,
                    group_timeout_seconds=group_timeout_seconds,
                    seed=seed,
                    warnings_as_errors=warnings_as_errors,
                    environment={
                        **os.environ,
                        **fixed_environment(),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(pool.store_port),
                        **{key: str(value) for key, value in place.items()},
                    },
                    working_directory=os.getcwd(),
                    search_path=list(sys.path),
                    modules=modules,
                    main_file=main_file,
                )
            )
        running = _Running(pool, ranks, expected, timeout_seconds, grace_seconds)
        try:
            running.wait()
            for rank in ranks:
                if rank.alive:
                    rank.send(Release())
            pool.wait_idle(ranks, _CLEAN_UP_SECONDS)
        except BaseException:
            pool.kill(ranks)
            raise
        if running.reports:
            raise RankFailure(name, world_size, running.reports)
        return running.loaded_results()


def close_ranks() -> None:
    """End every process that `run_ranks` has kept. The next call starts new ones."""
    global _pool
    with _lock:
        if _pool is not None:
            _pool.close()
            _pool = None


def _started_pool() -> Pool:
    global _pool
    if worker.IN_RANK:
        raise RuntimeError(
            "run_ranks was called inside a rank. If a script calls it at its top level, "
            'put the call under `if __name__ == "__main__":`'
        )
    if _pool is None or not _pool.alive:
        if _pool is not None:
            _pool.close()
        _pool = Pool()
    return _pool


def _check(
    world_size: int, timeout: float, group_timeout: float, grace: float, expect_exit: Iterable[int]
) -> frozenset[int]:
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ValueError(f"world_size must be 1 to {MAX_WORLD_SIZE}, got {world_size}")
    for name, value in (("timeout_seconds", timeout), ("group_timeout_seconds", group_timeout)):
        if not value > 0:
            raise ValueError(f"{name} must be > 0, got {value}")
    if not grace >= 0:
        raise ValueError(f"grace_seconds must be >= 0, got {grace}")
    expected = frozenset(expect_exit)
    if unknown := sorted(expected - set(range(world_size))):
        raise ValueError(f"expect_exit must name ranks below world_size {world_size}, got {unknown}")
    return expected


def _pickle(function: Callable[[int, int], Any]) -> tuple[bytes, str | None]:
    """The pickled function, and the script to run first where it refers to `__main__`."""
    rule = "function must be defined at a module's top level, or be a functools.partial of such a function"
    try:
        pickled = pickle.dumps(function, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(f"{rule}, got {function!r}: {error}") from error
    if b"__main__" not in pickled:
        return pickled, None
    main_file = own_main_file()
    if main_file is None:
        raise TypeError(f"{rule} that ranks can import, got {function!r} from a prompt: put it into a file")
    return pickled, main_file


def _name(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return f"{module}.{name}" if module and name else repr(function)


class _Running:
    """One call while its ranks run: collects results and reports until every rank has one."""

    def __init__(
        self,
        pool: Pool,
        ranks: list[Rank],
        expected: frozenset[int],
        timeout_seconds: float,
        grace_seconds: float,
    ) -> None:
        self.reports: list[RankReport] = []
        self._pool = pool
        self._ranks = ranks
        self._expected = expected
        self._timeout_seconds = timeout_seconds
        self._grace_seconds = grace_seconds
        self._results: dict[int, Finished | Exited] = {}
        self._failed: set[int] = set()
        self._start = time.monotonic()

    def wait(self) -> None:
        """Steps, until nothing is pending: 1. answers; 2. ended ranks; 3. the grace and the time limit."""
        deadline = self._start + self._timeout_seconds
        while pending := self._pending():
            failed_at = min((report.at_seconds for report in self.reports), default=None)
            ends = deadline if failed_at is None else min(deadline, failed_at + self._grace_seconds)
            now = time.monotonic()
            if failed_at is not None and now >= failed_at + _HOLD_SECONDS:
                self._drop_failed()
            if now >= ends:
                self._end(pending, timed_out=ends == deadline)
                return
            self._pool.wait(min(0.2, ends - now), [self._ranks[number].connection for number in pending])
            for number in pending:
                self._collect(number)
        self._drop_failed()
        for number, rank in enumerate(self._ranks):
            if not rank.alive and isinstance(self._results.get(number), Finished):
                self._note_exit(number)

    def loaded_results(self) -> list[Any]:
        """What each rank returned, unpickled."""
        results = []
        for number in range(len(self._ranks)):
            result = self._results[number]
            results.append(pickle.loads(result.payload) if isinstance(result, Finished) else result)
        return results

    def _pending(self) -> list[int]:
        return [n for n in range(len(self._ranks)) if n not in self._results and n not in self._failed]

    def _collect(self, number: int) -> None:
        rank = self._ranks[number]
        alive = rank.alive  # read before the messages: an ended rank's last message is in the socket by then
        for message in rank.reader.read():
            if isinstance(message, Failed):
                self._note_failure(number, message)
            elif isinstance(message, Finished) and number in self._expected:
                self._report(number, "returned", f"rank {number} returned although expect_exit names it")
            elif isinstance(message, Finished):
                self._results[number] = message
        if not alive and number in self._pending():
            self._note_exit(number)

    def _note_failure(self, number: int, message: Failed) -> None:
        consequence = bool(self.reports or self._results_exited()) and lost_its_peer(message.summary)
        exception = None if message.exception is None else pickle.loads(message.exception)
        after = f"after {max(0.0, message.at_seconds - self._start):.2f} s"
        why = f"rank {number} lost its peers {after}" if consequence else f"rank {number} raised {after}"
        self._report(
            number,
            "raised",
            f"{why}: {message.summary}",
            message.traceback,
            message.at_seconds,
            consequence,
            exception,
        )

    def _results_exited(self) -> bool:
        return any(isinstance(result, Exited) for result in self._results.values())

    def _note_exit(self, number: int) -> None:
        status = self._ranks[number].wait_status
        assert status is not None
        code = os.waitstatus_to_exitcode(status)
        exited = Exited(number, code if code >= 0 else None, -code if code < 0 else None)
        if number in self._expected and number not in self._results:
            self._results[number] = exited
        else:
            self._report(number, "exited", str(exited))

    def _report(
        self,
        number: int,
        kind: str,
        headline: str,
        details: str = "",
        at_seconds: float | None = None,
        consequence: bool = False,
        exception: BaseException | None = None,
    ) -> None:
        at = time.monotonic() if at_seconds is None else at_seconds
        output = self._ranks[number].output()
        self.reports.append(RankReport(number, kind, headline, details, output, at, consequence, exception))
        self._failed.add(number)

    def _drop_failed(self) -> None:
        """A failed rank's process is not used again; its end closes its connections, as a program's end would."""
        self._pool.kill([rank for n, rank in enumerate(self._ranks) if n in self._failed and rank.alive])

    def _end(self, pending: list[int], timed_out: bool) -> None:
        """Ask the pending ranks where they are, then end them."""
        for number in pending:
            self._pool.signal(self._ranks[number], signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_SECONDS
        stacks: dict[int, str] = {}
        while time.monotonic() < deadline and len(stacks) < len(pending):
            time.sleep(0.05)
            for number in pending:
                text = self._ranks[number].stack()
                if text and text == stacks.get(number):
                    continue
                if text:
                    stacks[number] = text
        for number in pending:
            where = waiting_places(stacks.get(number, ""), _OWN_FOLDER)
            if timed_out:
                kind, headline = (
                    "timeout",
                    f"rank {number} was still running after {self._timeout_seconds:g} s, at:",
                )
            else:
                kind = "ended"
                headline = (
                    f"rank {number} was still running {self._grace_seconds:g} s after the first failure, at:"
                )
            self._report(number, kind, headline, where, consequence=not timed_out)
        self._drop_failed()
