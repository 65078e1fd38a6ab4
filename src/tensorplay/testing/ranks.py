"""`run_ranks`: one function on several real ranks, each result back by rank."""

import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from tensorplay.testing import worker
from tensorplay.testing.modules import own_main_file, own_modules
from tensorplay.testing.pool import Pool, fixed_environment
from tensorplay.testing.running import Limits, Running
from tensorplay.testing.wire import Call, Release

__all__ = ["MAX_WORLD_SIZE", "close_ranks", "run_ranks"]

MAX_WORLD_SIZE = 8
"""The most ranks one call may ask for."""

_CLEAN_UP_SECONDS = 10.0

_pool: Pool | None = None
_lock = threading.Lock()
_watching_forks = False


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
      2. in each: the caller's environment, folder, arguments and modules, one torch thread, seeds set to `seed` on
         every rank, a new default group on 127.0.0.1;
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

    Kept from call to call: modules and what they hold. A function that patches a module must undo it; patches of
    the caller don't reach the ranks, its environment does. A rank that leaves a thread, a child process or half a
    gigabyte behind is replaced. Differs from a launcher: all ranks are forks of one process, so they hash strings
    alike and iterate over sets of strings in the same order.

    Raises:
        RankFailure: a rank raised, ended, or was still running; shows every such rank, the first one first.
        TypeError: the function can't be pickled by name.
        ValueError: world_size outside 1 to 8, a rank in expect_exit that does not exist, a timeout that is not > 0.

    Example:
        >>> import operator
        >>> run_ranks(operator.add, 2)  # rank + world_size
        [2, 3]
    """
    __tracebackhide__ = True  # pytest: a failure shows the test, then the ranks, not this function
    expected = _check(world_size, timeout_seconds, group_timeout_seconds, grace_seconds, expect_exit)
    pickled, main_file = _pickle(function)
    with _lock:
        pool = _started_pool()
        try:
            ranks = pool.take(world_size)
            call = Call(
                name=f"call {pool.next_call()}",
                function=pickled,
                rank=0,
                world_size=world_size,
                backend=backend,
                store_port=pool.store_port,
                group_timeout_seconds=group_timeout_seconds,
                seed=seed,
                warnings_as_errors=warnings_as_errors,
                arguments=list(sys.argv),
                environment={**os.environ, **fixed_environment()},
                working_directory=os.getcwd(),
                search_path=[
                    os.path.abspath(entry) if os.path.isdir(entry or ".") else entry for entry in sys.path
                ],
                modules=own_modules(),
                main_file=main_file,
            )
            for number, rank in enumerate(ranks):
                rank.send(replace(call, rank=number))
            running = Running(pool, ranks, Limits(timeout_seconds, grace_seconds, expected))
            running.wait()
            sys.stdout.write(running.returned_output())
            for rank in ranks:
                if rank.alive:
                    rank.send(Release())
            running.check_ends()
            pool.wait_idle(ranks, _CLEAN_UP_SECONDS)
        except BaseException:
            pool.close(at_once=True)  # the user's Ctrl-C, a test's time limit: nothing is left running
            raise
    if failure := running.failure(_name(function)):
        raise failure
    return running.results()


def close_ranks() -> None:
    """End every process that `run_ranks` has kept. The next call starts new ones."""
    global _pool
    with _lock:
        if _pool is not None:
            _pool.close()
            _pool = None


def _started_pool() -> Pool:
    global _pool, _watching_forks
    if worker.IN_RANK:
        raise RuntimeError(
            "run_ranks was called inside a rank. If a script calls it at its top level, "
            'put the call under `if __name__ == "__main__":`'
        )
    if _pool is None or not _pool.alive:
        if _pool is not None:
            _pool.close()
        if not hasattr(os, "fork"):
            raise RuntimeError(
                f"run_ranks forks its ranks, which {sys.platform} cannot do: use Linux or macOS"
            )
        _pool = Pool()
        if not _watching_forks:
            os.register_at_fork(after_in_child=_forget_in_child)
            _watching_forks = True
    return _pool


def _forget_in_child() -> None:
    global _lock, _pool
    _lock = threading.Lock()
    if _pool is not None:
        _pool.forget_in_child()
        _pool = None


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
