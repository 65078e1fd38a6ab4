"""`run_ranks`: results, failures, hangs and deaths, and that a call leaves nothing for the next one."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from tensorplay.testing import MAX_WORLD_SIZE, Exited, RankFailure, run_ranks
from tensorplay.testing.failures import lost_its_peer

KEPT: list[Any] = []


def process_id(rank: int, world_size: int) -> int:
    return os.getpid()


def all_reduced(rank: int, world_size: int, scale: float = 1.0) -> torch.Tensor:
    value = torch.full((3,), scale * (rank + 1))
    dist.all_reduce(value)
    return value


def surroundings(rank: int, world_size: int) -> dict[str, Any]:
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    return {
        "backend": dist.get_backend(),
        "dtype": torch.get_default_dtype(),
        "device": str(torch.get_default_device()),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "draws": (torch.rand(1).item(), random.random(), float(numpy.random.rand())),  # noqa: NPY002 - the global state is what is tested
        "folder": os.getcwd(),
        "variable": os.environ.get("RUN_RANKS_TEST"),
        "warnings": warnings.filters[-1][0],
        "alarm": signal.getitimer(signal.ITIMER_REAL)[0],
    }


def disturbing(rank: int, world_size: int) -> int:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(99)
    os.chdir("/")
    os.environ["RUN_RANKS_TEST"] = "changed"
    warnings.simplefilter("ignore")
    signal.alarm(60)
    dist.new_group()
    sys.stdout = None  # type: ignore[assignment]
    return os.getpid()


def values(rank: int, world_size: int) -> Any:
    return {"parameter": torch.nn.Parameter(torch.ones(2, 3)), "large": torch.full((5_000_000,), float(rank))}


def slow_first(rank: int, world_size: int) -> str:
    time.sleep(0.2 * (world_size - rank))
    return f"rank {rank}"


def raising(rank: int, world_size: int, failing: tuple[int, ...]) -> None:
    if rank in failing:
        print("about to fail")
        number_of_entries = 17
        raise ValueError(f"no gradient on {rank}, {number_of_entries}")
    dist.barrier()


def leaving_others_busy(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("gone")
    time.sleep(1000)


def hanging(rank: int, world_size: int) -> None:
    if rank == 0:
        return
    threading.Thread(target=waiting_thread, daemon=True).start()
    print("before the wait")
    dist.barrier()


def waiting_thread() -> None:
    threading.Event().wait()


def stopped(rank: int, world_size: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def dying(rank: int, world_size: int, how: str, dying_rank: int = 1) -> str:
    if rank == dying_rank:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(3)
        if how == "sys.exit":
            sys.exit(4)
    return "alive"


def waiting_for_the_dead(rank: int, world_size: int) -> str:
    if rank == 1:
        os._exit(0)
    try:
        dist.barrier()
    except RuntimeError as error:
        return str(error)
    return "the barrier passed"


def warning(rank: int, world_size: int, module: str | None = None) -> str:
    if module is None:
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    else:
        warnings.warn_explicit("old", DeprecationWarning, "file.py", 1, module=module)
    return "went on"


def leaving_a_thread(rank: int, world_size: int) -> int:
    if rank == 1:
        threading.Thread(target=waiting_thread, daemon=True).start()
    return os.getpid()


def leaving_a_process(rank: int, world_size: int) -> tuple[int, int]:
    child = subprocess.Popen(["sleep", "1000"])
    KEPT.append(child)
    return os.getpid(), child.pid


def keeping_memory(rank: int, world_size: int) -> int:
    KEPT.append(torch.ones(150_000_000))
    return os.getpid()


def talking(rank: int, world_size: int) -> None:
    print("hello")
    os.write(2, b"from C\n")


def unpicklable(rank: int, world_size: int) -> Any:
    return (lambda: None) if rank else None


def nested(rank: int, world_size: int) -> None:
    run_ranks(process_id, 1)


def listening_addresses(rank: int, world_size: int) -> list[str]:
    own = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
            own.append(os.readlink(f"/proc/self/fd/{entry}"))
    found = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}") as file:
            for line in file.readlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == "0A" and f"socket:[{inode}]" in own:
                    found.append(local.split(":")[0])
    return found


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# What comes back


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_back_by_rank(world_size: int) -> None:
    results = run_ranks(partial(all_reduced, scale=2.0), world_size)
    assert len(results) == world_size
    for result in results:
        assert torch.equal(result, torch.full((3,), world_size * (world_size + 1.0)))


def test_the_order_of_results_is_not_the_order_of_arrival() -> None:
    assert run_ranks(slow_first, 3) == ["rank 0", "rank 1", "rank 2"]


def test_tensors_come_back_by_value() -> None:
    first, second = run_ranks(values, 2)
    assert isinstance(first["parameter"], torch.nn.Parameter)
    assert torch.equal(second["large"], torch.ones(5_000_000))
    assert not second["large"].is_shared()


def test_the_largest_world_size_runs() -> None:
    assert len(set(run_ranks(process_id, MAX_WORLD_SIZE))) == MAX_WORLD_SIZE


def test_what_ranks_print_reaches_the_caller(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(talking, 2)
    assert capsys.readouterr().out.splitlines() == [
        "[rank 0] hello",
        "[rank 0] from C",
        "[rank 1] hello",
        "[rank 1] from C",
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_listen_on_loopback_alone() -> None:
    for addresses in run_ranks(listening_addresses, 2):
        assert addresses
        assert set(addresses) == {"0100007F"}


# One call leaves nothing for the next


def test_processes_are_kept() -> None:
    assert run_ranks(process_id, 2) == run_ranks(process_id, 2)


def test_a_call_does_not_affect_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    before = run_ranks(surroundings, 2)
    assert run_ranks(disturbing, 2) == run_ranks(process_id, 2), "the same processes, or this shows nothing"
    assert run_ranks(surroundings, 2) == before
    assert before[0] == before[1]
    assert before[0]["threads"] == 1
    assert before[0]["warnings"] == "error"
    monkeypatch.setenv("RUN_RANKS_TEST", "of the caller")
    assert run_ranks(surroundings, 2)[1]["variable"] == "of the caller"


def test_the_seed_decides_what_is_drawn() -> None:
    (first,), (second,) = run_ranks(surroundings, 1, seed=1), run_ranks(surroundings, 1, seed=2)
    assert all(a != b for a, b in zip(first["draws"], second["draws"], strict=True))


def test_a_rank_with_a_thread_left_is_replaced() -> None:
    before = run_ranks(leaving_a_thread, 2)
    after = run_ranks(process_id, 2)
    assert before[1] not in after
    assert before[0] in after
    assert not alive(before[1])


def test_processes_a_rank_started_end_with_it() -> None:
    ((rank, child),) = run_ranks(leaving_a_process, 1)
    assert run_ranks(process_id, 1) != [rank]
    assert not alive(rank)
    assert not alive(child)


def test_an_idle_rank_does_not_keep_memory() -> None:
    assert run_ranks(keeping_memory, 1) != run_ranks(process_id, 1)


# Failures


def test_a_failure_shows_the_rank_its_traceback_and_its_output() -> None:
    with pytest.raises(RankFailure) as raised:
        run_ranks(partial(raising, failing=(1,)), 3)
    failure = raised.value
    assert failure.ranks[0] == 1
    assert sorted(failure.ranks) == [0, 1, 2]
    assert [report.consequence for report in failure.reports] == [False, True, True]
    assert isinstance(failure.exceptions[1], ValueError)
    text = str(failure)
    assert text.startswith("3 of 3 ranks failed in tests.unit.test_run_ranks.raising\n\nrank 1 raised after")
    assert "ValueError: no gradient on 1, 17" in text
    assert 'test_run_ranks.py", line' in text
    assert "    number_of_entries = 17" in text
    assert "  what rank 1 printed:\n  | about to fail" in text
    assert "worker.py" not in text
    assert text.index("rank 1 raised") < text.index("rank 0 lost its peers")
    assert torch.equal(run_ranks(all_reduced, 3)[0], torch.full((3,), 6.0))


def test_ranks_that_fail_on_their_own_are_all_shown() -> None:
    with pytest.raises(RankFailure) as raised:
        run_ranks(partial(raising, failing=(0, 1)), 2)
    assert {rank: str(error) for rank, error in raised.value.exceptions.items()} == {
        0: "no gradient on 0, 17",
        1: "no gradient on 1, 17",
    }
    assert not any(report.consequence for report in raised.value.reports)


def test_the_others_get_a_grace_and_are_then_ended() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure) as raised:
        run_ranks(leaving_others_busy, 2, grace_seconds=0.5)
    assert time.monotonic() - start < 10
    first, second = raised.value.reports
    assert (first.rank, first.kind, second.rank, second.kind) == (1, "raised", 0, "ended")
    assert "leaving_others_busy" in second.details


def test_a_result_that_cannot_travel_is_an_error_of_its_rank() -> None:
    with pytest.raises(
        RankFailure, match=r"rank 1 raised .* TypeError: a rank's result must be picklable"
    ) as raised:
        run_ranks(unpicklable, 2)
    assert raised.value.returned == (0,)


# Hangs


def test_a_hang_says_which_rank_waits_where() -> None:
    pids = run_ranks(process_id, 2)
    start = time.monotonic()
    with pytest.raises(RankFailure) as raised:
        run_ranks(hanging, 2, timeout_seconds=1)
    assert time.monotonic() - start < 10
    (report,) = raised.value.reports
    assert (report.rank, report.kind, raised.value.returned) == (1, "timeout", (0,))
    assert report.headline == "rank 1 was still running after 1 s, at:"
    assert report.output == "before the wait\n"
    main, other = report.details.split("another thread:")
    assert main.startswith("main thread:\n")
    assert "distributed_c10d.py" in main
    assert main.rstrip().endswith(" hanging")
    assert f"{__file__}:{waiting_thread.__code__.co_firstlineno + 1} waiting_thread" in other
    assert not alive(pids[1])
    assert torch.equal(run_ranks(all_reduced, 2)[1], torch.full((3,), 3.0))


def test_a_collective_ends_with_the_group_time_limit() -> None:
    with pytest.raises(RankFailure) as raised:
        run_ranks(hanging, 2, group_timeout_seconds=1)
    (report,) = raised.value.reports
    assert (report.rank, report.kind) == (1, "raised")
    assert "Timed out waiting 1000ms" in report.headline


def test_a_stopped_rank_is_ended() -> None:
    with pytest.raises(RankFailure, match="it answers no signal"):
        run_ranks(stopped, 1, timeout_seconds=0.3)
    assert len(run_ranks(process_id, 1)) == 1


# Deaths


@pytest.mark.parametrize(
    ("how", "exited", "text"),
    [
        ("killed", Exited(1, None, 9), "rank 1 exited with signal 9 (SIGKILL)"),
        ("exit", Exited(1, 3, None), "rank 1 exited with exit code 3"),
        ("sys.exit", Exited(1, 4, None), "rank 1 exited with exit code 4"),
    ],
)
def test_a_death_is_reported_or_expected(how: str, exited: Exited, text: str) -> None:
    with pytest.raises(RankFailure) as raised:
        run_ranks(partial(dying, how=how), 2)
    assert str(raised.value).endswith(text)
    assert run_ranks(partial(dying, how=how), 2, expect_exit={1}) == ["alive", exited]
    assert len(run_ranks(process_id, 2)) == 2


def test_survivors_of_an_expected_death_go_on() -> None:
    survivor, exited = run_ranks(waiting_for_the_dead, 2, expect_exit={1})
    assert lost_its_peer(survivor)
    assert exited == Exited(1, 0, None)


def test_a_rank_that_was_to_die_and_returned_is_a_failure() -> None:
    with pytest.raises(RankFailure, match="rank 0 returned although expect_exit names it"):
        run_ranks(process_id, 2, expect_exit=[0])


# Warnings and arguments


def test_warnings_are_errors_unless_asked_otherwise() -> None:
    with pytest.raises(RankFailure, match="DeprecationWarning: old"):
        run_ranks(warning, 1)
    assert run_ranks(warning, 1, warnings_as_errors=False) == ["went on"]
    assert run_ranks(partial(warning, module="torch.inner"), 1) == ["went on"]
    with pytest.raises(RankFailure, match="DeprecationWarning: old"):
        run_ranks(partial(warning, module="torchlike"), 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "world_size must be 1 to 8, got 0"),
        ({"world_size": 9}, "world_size must be 1 to 8, got 9"),
        ({"world_size": 2, "timeout_seconds": 0}, "timeout_seconds must be > 0, got 0"),
        ({"world_size": 2, "group_timeout_seconds": -1}, "group_timeout_seconds must be > 0, got -1"),
        ({"world_size": 2, "grace_seconds": -1}, "grace_seconds must be >= 0, got -1"),
        ({"world_size": 2, "expect_exit": {2}}, r"below world_size 2, got \[2\]"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_ranks(process_id, **arguments)


def test_a_function_without_a_name_is_refused() -> None:
    with pytest.raises(TypeError, match="must be defined at a module's top level"):
        run_ranks(lambda rank, world_size: None, 2)


def test_a_call_inside_a_rank_is_refused() -> None:
    with pytest.raises(RankFailure, match="run_ranks was called inside a rank"):
        run_ranks(nested, 1)
