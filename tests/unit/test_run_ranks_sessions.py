"""`run_ranks` seen from outside: scripts, pytest sessions, interrupts; no process is left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tensorplay.testing import close_ranks, run_ranks

SCRIPT = """
import os, sys, time
from tensorplay.testing import run_ranks

class Local:
    def __init__(self, rank):
        self.rank = rank

def write_process_id(rank, world_size):
    with open(f"rank{rank}", "w") as file:
        file.write(str(os.getpid()))
    if "hang" in sys.argv:
        time.sleep(1000)
    return Local(rank)

if __name__ == "__main__":
    if "fork" in sys.argv:
        run_ranks(write_process_id, 2)
        child = os.fork()
        if child == 0:
            print("the child runs", run_ranks(write_process_id, 1)[0].rank)
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
    print([result.rank for result in run_ranks(write_process_id, 2)])
"""

UNGUARDED = """
import operator
from tensorplay.testing import run_ranks

def add(rank, world_size):
    return rank + world_size

run_ranks(add, 2)
"""

TEST_MODULE = """
import os
from functools import partial
import pytest
from tensorplay.testing import run_ranks
from {helper} import offset

class Result:
    def __init__(self, value):
        self.value = value

def shifted(rank, world_size, by):
    with open(f"{{os.environ['FOLDER']}}/rank{{rank}}-{name}", "w") as file:
        file.write(str(os.getpid()))
    return Result(rank + by + offset())

def test_it():
    assert [result.value for result in run_ranks(partial(shifted, by=2), 2)] == [{expected}, {expected} + 1]

def test_failing():
    run_ranks(partial(shifted, by="text"), 2)
"""


def process_id(rank: int, world_size: int) -> int:
    return os.getpid()


def sleeping(rank: int, world_size: int) -> None:
    time.sleep(1000)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(pids: list[int], seconds: float = 10.0) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def written_process_ids(folder: Path, count: int, seconds: float = 60.0) -> list[int]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        texts = [file.read_text() for file in folder.glob("rank*")]
        if len(texts) == count and all(texts):
            return [int(text) for text in texts]
        time.sleep(0.05)
    raise AssertionError(f"{count} ranks should have started within {seconds:g} s")


def heed_interrupts() -> None:
    """A shell starts what runs in its background with interrupts ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def started(folder: Path, source: str, *arguments: str) -> "subprocess.Popen[str]":
    (folder / "script.py").write_text(source)
    return subprocess.Popen(
        [sys.executable, "script.py", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )


def test_a_script_may_use_it_and_leaves_nothing(tmp_path: Path) -> None:
    with started(tmp_path, SCRIPT, "fork") as script:
        output, errors = script.communicate(timeout=120)
    assert (script.returncode, output.splitlines()) == (0, ["the child runs 0", "[0, 1]"]), errors
    assert wait_until_gone(written_process_ids(tmp_path, 2)) == []


def test_a_script_without_a_guard_is_told(tmp_path: Path) -> None:
    with started(tmp_path, UNGUARDED) as script:
        _, errors = script.communicate(timeout=120)
    assert script.returncode == 1
    assert 'put the call under `if __name__ == "__main__":`' in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_their_caller(tmp_path: Path, number: signal.Signals) -> None:
    with started(tmp_path, SCRIPT, "hang") as script:
        pids = written_process_ids(tmp_path, 2)
        time.sleep(0.3)
        assert all(alive(pid) for pid in pids), "the ranks are at work"
        script.send_signal(number)
        _, errors = script.communicate(timeout=60)
    assert wait_until_gone(pids) == []
    if number == signal.SIGINT:
        assert errors.rstrip().endswith("KeyboardInterrupt"), errors
        assert "atexit" not in errors
        assert script.returncode in (-signal.SIGINT, 130)


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_test_modules_are_found_by_the_name_pytest_gives_them(tmp_path: Path, mode: str) -> None:
    # With prepend and no packages, modules need names of their own; importlib allows the same name twice.
    names = ["test_same", "test_same"] if mode == "importlib" else ["test_one", "test_two"]
    for number, (folder, name) in enumerate(zip(["first", "second"], names, strict=True)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"helper_{number}.py").write_text(f"def offset():\n    return {10 * number}\n")
        source = TEST_MODULE.format(helper=f"helper_{number}", name=number, expected=2 + 10 * number)
        (tmp_path / folder / f"{name}.py").write_text(source)
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\npythonpath = first second\naddopts = --import-mode={mode}\n"
    )
    session = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "FOLDER": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "2 failed, 2 passed" in session.stdout, session.stdout + session.stderr
    assert "TypeError: unsupported operand type(s) for +: 'int' and 'str'" in session.stdout
    assert wait_until_gone(written_process_ids(tmp_path, 4)) == []


def test_an_interrupt_ends_the_ranks_and_the_next_call_works() -> None:
    before = run_ranks(process_id, 2)
    main = threading.main_thread().ident
    assert main is not None
    previous = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored where pytest runs in the background
    try:
        timer = threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            run_ranks(sleeping, 2)
        timer.join()
    finally:
        signal.signal(signal.SIGINT, previous)
    assert wait_until_gone(before) == []
    assert not set(before) & set(run_ranks(process_id, 2))


def test_closing_ends_every_rank_and_may_be_repeated() -> None:
    before = run_ranks(process_id, 2)
    close_ranks()
    close_ranks()
    assert wait_until_gone(before) == []
