"""`tensorplay compare` with real ranks: over loopback with hooks that fail, die and hang, and over shaped links."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tensorplay.cli.lab import available

IN_A_LAB = pytest.mark.skipif(bool(available()), reason=f"no network lab: {available()}")
TINY = "--model mlp:width=64,layers=2,batch=8 --rounds 2 --steps 2 --warmup 1".split()
OWN = """
import os, signal, time
import torch, torch.distributed as dist

def mean(state, bucket):
    tensor = bucket.buffer().div_(dist.get_world_size())
    dist.all_reduce(tensor)
    return tensor

def fails(state, bucket):
    if dist.get_rank() == 1:
        raise ValueError("gradient is cursed")
    return mean(state, bucket)

def dies(state, bucket):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return mean(state, bucket)

def waits(state, bucket):
    if dist.get_rank() == 1:
        time.sleep(600)
    return mean(state, bucket)

def drifts(state, bucket):
    return bucket.buffer() * (1 + dist.get_rank())

def workload(rank, seed):
    model = torch.nn.Linear(4, 4)
    batches = [torch.full((2, 4), float(rank + 1))]
    return model, batches, lambda model, batch: model(batch).abs().sum()

def broken():
    raise RuntimeError("no data here")
"""


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "tensorplay.cli.main", "compare", "--out", "out", *words]


def run(folder: Path, *words: str, status: int = 0) -> tuple[dict[str, Any], str]:
    """The comparison that was written, and what was printed; no namespace of its is left."""
    (folder / "own.py").write_text(OWN)
    process = subprocess.Popen(
        command(*words), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, err = process.communicate(timeout=150)
    finally:
        process.terminate()
    assert process.returncode == status, err + out
    assert "Traceback" not in err
    assert not [name for name in namespaces() if name.startswith(f"tp{process.pid % 100000}-")]
    return json.loads((folder / "out" / "comparison.json").read_text()), out + err


def namespaces() -> list[str]:
    if shutil.which("ip") is None:
        return []
    return subprocess.run(
        ["ip", "netns"], capture_output=True, text=True, timeout=20, check=True
    ).stdout.split()


def rows_of(cell: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["hook"]: row for row in cell["rows"]}


@pytest.mark.timeout(170)
def test_hooks_that_fail_are_rows_and_the_others_are_measured(tmp_path: Path) -> None:
    hooks = "allreduce,own:fails,fp16_compress,own:dies,own:waits,own:drifts,torch:fp16"
    options = ["--hooks", hooks, "--links", "loopback", "--hook-timeout", "10"]
    comparison, printed = run(tmp_path, *TINY, *options)
    assert "links: this machine's loopback, --rates has no effect: --links loopback" in printed
    (cell,) = comparison["cells"]
    rows = rows_of(cell)
    assert list(rows) == ["noop", *hooks.split(",")]
    assert rows["own:fails"]["failure"].startswith("rank 1")
    assert "gradient is cursed" in rows["own:fails"]["failure"]
    assert rows["own:dies"]["failure"] == "rank 1 was killed by SIGKILL"
    assert rows["own:waits"]["failure"] == "it hangs: no step ended within 10 s (--hook-timeout)"
    for hook in ("own:fails", "own:dies", "own:waits"):
        assert rows[hook]["step_seconds"] is None
        assert f"{hook} failed: " in printed
    for hook in ("noop", "allreduce", "fp16_compress", "torch:fp16", "own:drifts"):
        row = rows[hook]
        assert row["failure"] is None
        low, high = row["step_seconds_quartiles"]
        assert 0 < low <= row["step_seconds"] <= high
        assert row["interface_sent_bytes"] is None, "all ranks share the loopback device"
        assert row["wire_floor_seconds"] is None
        assert row["cpu_seconds"] > 0
    gradient_bytes = 4 * 2 * (64 * 64 + 64)
    assert comparison["about"]["parameters"] == gradient_bytes // 4
    assert rows["allreduce"]["sent_bytes"] == gradient_bytes  # 2 (W - 1) / W of them, W = 2
    assert rows["fp16_compress"]["sent_bytes"] == gradient_bytes / 2
    assert rows["noop"]["sent_bytes"] == 0
    assert rows["torch:fp16"]["sent_bytes"] is None
    assert rows["allreduce"]["replicas_equal"]
    assert not rows["own:drifts"]["replicas_equal"]
    assert rows["allreduce"]["speedup"] == 1
    assert cell["plain"] == "allreduce"
    assert cell["fastest"] in ("allreduce", "fp16_compress", "torch:fp16")
    assert rows["allreduce"]["loss"] == pytest.approx(rows["torch:fp16"]["loss"], rel=1e-2)
    assert "Where it does not pay" in (tmp_path / "out" / "comparison.html").read_text()


@pytest.mark.timeout(170)
def test_local_sgd_is_sampled_in_whole_periods_and_the_users_model_is_trained(tmp_path: Path) -> None:
    hooks = "torch:allreduce,post_localSGD:period=3,warmup_steps=2,auto"
    options = [
        "--model",
        "own:workload",
        "--rounds",
        "1",
        "--steps",
        "4",
        "--warmup",
        "1",
        "--links",
        "loopback",
    ]
    comparison, printed = run(tmp_path, *options, "--hooks", hooks)
    rows = rows_of(comparison["cells"][0])
    assert rows["post_localSGD:period=3,warmup_steps=2"]["period"] == 3
    assert rows["post_localSGD:period=3,warmup_steps=2"]["replicas_equal"], "they are averaged at the end"
    sent = rows["post_localSGD:period=3,warmup_steps=2"]["sent_bytes"]
    assert sent == pytest.approx(4 * 20 / 3), "twenty numbers, once in three steps"
    assert rows["auto"]["choices"] == ["allreduce"]
    assert "a step is the mean of a whole period" in printed
    assert comparison["about"]["parameters"] == 20


@pytest.mark.timeout(120)
def test_a_model_that_cannot_be_made_is_told_and_nothing_hangs(tmp_path: Path) -> None:
    comparison, printed = run(tmp_path, "--model", "own:broken", "--links", "loopback", status=1)
    reason = "the ranks did not start: rank 0: RuntimeError: no data here"
    other = reason.replace("rank 0", "rank 1")
    assert {row["failure"] for row in comparison["cells"][0]["rows"]} <= {reason, other}
    assert "error: no hook has figures: the ranks did not start: rank " in printed


@pytest.mark.timeout(120)
@pytest.mark.parametrize("links", ["loopback", pytest.param("namespaces", marks=IN_A_LAB)])
def test_when_it_is_stopped_no_rank_and_no_namespace_is_left(tmp_path: Path, links: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    words = [*TINY, "--links", links, "--rates", "1gbit", "--hooks", "own:waits", "--hook-timeout", "100"]
    process = subprocess.Popen(
        command(*words), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    cell = {"loopback": "2-loopback", "namespaces": "2-1gbit"}[links]
    job = tmp_path / "out" / "cells" / cell / "start0" / "job.json"
    events, deadline = job.with_name("events.jsonl"), time.monotonic() + 60
    while not (events.exists() and '"own:waits"' in events.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    mine = f"tp{process.pid % 100000}-"
    assert len([name for name in namespaces() if name.startswith(mine)]) == (
        3 if links == "namespaces" else 0
    )
    assert len(ranks_of(job)) == 2
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "stopped, all ranks have ended" in errors
    assert ranks_of(job) == []
    assert [name for name in namespaces() if name.startswith(mine)] == []


def ranks_of(job: Path) -> list[str]:
    """Process ids whose command line names the job."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if str(job) in words:
            found.append(entry.name)
    return found


@IN_A_LAB
@pytest.mark.timeout(170)
def test_over_shaped_links_the_slow_one_is_slow_and_its_bytes_are_the_kernels(tmp_path: Path) -> None:
    model = "--model mlp:width=256,layers=2,batch=8 --rounds 1 --steps 2 --warmup 1".split()
    hooks = "torch:allreduce,allreduce,int8,own:fails"
    comparison, printed = run(tmp_path, *model, "--hooks", hooks, "--rates", "20mbit,unlimited")
    slow, fast = (rows_of(cell) for cell in comparison["cells"])
    gradient_bytes = 4 * 2 * (256 * 256 + 256)
    for hook in ("torch:allreduce", "allreduce"):
        row = slow[hook]
        assert gradient_bytes < row["interface_sent_bytes"] < 1.1 * gradient_bytes
        assert gradient_bytes < row["interface_received_bytes"] < 1.1 * gradient_bytes
        floor = 8 * gradient_bytes / 20e6
        assert row["wire_floor_seconds"] == pytest.approx(floor, rel=0.1)
        assert row["step_seconds"] > 0.8 * floor
        assert fast[hook]["wire_floor_seconds"] is None
    assert slow["allreduce"]["wire_floor_from"] == "counted"
    assert slow["torch:allreduce"]["wire_floor_from"] == "interface"
    assert slow["int8"]["speedup"] > 1.5
    assert slow["int8"]["interface_sent_bytes"] < 0.35 * gradient_bytes
    assert fast["own:fails"]["failure"].startswith("not run again: rank 1")
    assert fast["own:fails"]["failure"].endswith("(at 20mbit)")
    assert "2 ranks, 20mbit: every hook pays" in printed
