"""`tensorplay demo` and examples/train_gpt.py with real ranks: results, Ctrl-C, ranks that fail, resume."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
OWN_HOOKS = """
import os, signal, time
import torch.distributed as dist

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
"""


def start_demo(folder: Path, *options: str) -> "subprocess.Popen[str]":
    (folder / "own_hooks.py").write_text(OWN_HOOKS)
    command = [sys.executable, "-m", "tensorplay.cli.main", "demo", "--size", "tiny", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "--out", "out", *options],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_demo(folder: Path, *options: str) -> tuple[int, str, str]:
    process = start_demo(folder, *options)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def ranks_of(folder: Path) -> list[int]:
    """Process ids whose command line names this run's plan; the launcher's does not."""
    plan, found = str(folder / "out" / "plan.json"), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if plan in words:
            found.append(int(entry.name))
    return found


def wait_for_steps(folder: Path, hook: str, process: "subprocess.Popen[str]") -> list[int]:
    """Wait until training under `hook` has begun; the ranks' process ids."""
    events, deadline = folder / "out" / "events.jsonl", time.monotonic() + 90
    while not (events.exists() and f'"started", "hook": "{hook}"' in events.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "training did not begin"
        time.sleep(0.1)
    ranks = ranks_of(folder)
    assert len(ranks) == 2
    return ranks


def all_end(folder: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while ranks_of(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not ranks_of(folder)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("demo")
    hooks = "allreduce,fp16_compress,bf16_compress,own_hooks:mean,post_localSGD,diloco:period=5,codec=int8"
    status, out, err = run_demo(folder, "--steps", "24", "--hooks", hooks)
    assert status == 0, err
    return folder, out, json.loads((folder / "out" / "report.json").read_text())


def test_a_run_leaves_a_table_and_two_reports(finished: tuple[Path, str, dict[str, Any]]) -> None:
    folder, out, report = finished
    score = report["hooks"]["fp16_compress"]["validation_bits_per_byte"]
    assert re.search(rf"fp16_compress +{score:.4f} +\S+ kB", out)
    assert "step 24/24: loss" in out
    assert len(report["hooks"]) == 6
    assert (folder / "out" / "report.html").read_text().count("<polyline") == 12
    assert sorted(path.name for path in (folder / "out" / "report-plots").iterdir()) == (
        [f"loss-against-{what}.{kind}" for what in ("bytes", "steps") for kind in ("png", "svg")]
    )
    assert all_end(folder, seconds=5)


def test_half_precision_sends_half_and_learns_the_same(finished: tuple[Path, str, dict[str, Any]]) -> None:
    hooks, ranks = finished[2]["hooks"], finished[2]["settings"]["ranks"]
    plain = hooks["allreduce"]
    assert plain["sent_bytes_per_step"] == 2 * (ranks - 1) / ranks * plain["gradient_bytes"]
    for name in ("fp16_compress", "bf16_compress"):
        assert hooks[name]["sent_bytes_by_rank"] == [sent / 2 for sent in plain["sent_bytes_by_rank"]]
        assert hooks[name]["received_bytes_by_rank"] == hooks[name]["sent_bytes_by_rank"]
        assert hooks[name]["validation_bits_per_byte"] == pytest.approx(
            plain["validation_bits_per_byte"], rel=0.01
        )
        assert hooks[name]["loss_nats_by_step"] != plain["loss_nats_by_step"], "nothing was rounded"


def test_hooks_start_alike_and_end_with_equal_replicas(finished: tuple[Path, str, dict[str, Any]]) -> None:
    hooks = finished[2]["hooks"].values()
    assert len({result["loss_nats_by_step"][0] for result in hooks}) == 1
    assert all(result["replicas_identical"] for result in hooks)
    assert all(result["loss_nats_by_step"][-1] < 0.9 * result["loss_nats_by_step"][0] for result in hooks)


def test_a_hook_of_the_users_own_trains_as_all_reduce_does(
    finished: tuple[Path, str, dict[str, Any]],
) -> None:
    hooks = finished[2]["hooks"]
    own, plain = hooks["own_hooks:mean"], hooks["allreduce"]
    assert own["validation_bits_per_byte"] == pytest.approx(plain["validation_bits_per_byte"], rel=1e-4)


def test_local_sgd_sends_less(finished: tuple[Path, str, dict[str, Any]]) -> None:
    hooks = finished[2]["hooks"]
    assert hooks["post_localSGD"]["ratio_to_allreduce"] > 1.5
    assert hooks["diloco:period=5,codec=int8"]["ratio_to_allreduce"] > 10


def test_same_seed_same_losses(finished: tuple[Path, str, dict[str, Any]], tmp_path: Path) -> None:
    status, _, err = run_demo(tmp_path, "--steps", "24", "--hooks", "bf16_compress")
    assert status == 0, err
    again = json.loads((tmp_path / "out" / "report.json").read_text())["hooks"]["bf16_compress"]
    first = finished[2]["hooks"]["bf16_compress"]
    for figure in ("loss_nats_by_step", "validation_bits_per_byte", "sent_bytes_by_rank"):
        assert again[figure] == first[figure]


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds processes through /proc")
@pytest.mark.parametrize(
    "hook", ["allreduce", "own_hooks:waits"], ids=["training", "blocked in a collective"]
)
def test_ctrl_c_ends_all_ranks_at_once(tmp_path: Path, hook: str) -> None:
    process = start_demo(tmp_path, "--steps", "100000", "--hooks", hook)
    wait_for_steps(tmp_path, hook, process)
    time.sleep(0.5)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - begin < 15, "the launcher waited for ranks that did not heed the signal"
    assert process.returncode == 130
    assert err == "tensorplay demo: stopped, all ranks have ended\n"
    assert ranks_of(tmp_path) == []


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds processes through /proc")
def test_ranks_end_when_the_launcher_is_killed(tmp_path: Path) -> None:
    process = start_demo(tmp_path, "--steps", "100000", "--hooks", "own_hooks:waits")
    wait_for_steps(tmp_path, "own_hooks:waits", process)
    process.kill()
    process.communicate(timeout=30)
    assert all_end(tmp_path, seconds=5)


def test_a_rank_that_raises_ends_the_run_with_its_error(tmp_path: Path) -> None:
    status, _, err = run_demo(tmp_path, "--steps", "20", "--hooks", "own_hooks:fails")
    assert status == 1
    assert "gradient is cursed" in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("tensorplay demo: error: rank 1 failed: ")
    assert "own_hooks.py" in err or "in fails" in err or "Traceback" in err
    assert not (tmp_path / "out" / "report.json").exists()


def test_a_rank_that_is_killed_ends_the_run_and_is_named(tmp_path: Path) -> None:
    status, _, err = run_demo(tmp_path, "--steps", "20", "--hooks", "own_hooks:dies")
    assert status == 1
    assert err.splitlines()[-1] == "tensorplay demo: error: rank 1 failed: it was killed by SIGKILL"


def train(folder: Path, *options: str, ranks: int = 2) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(REPOSITORY / "examples" / "train_gpt.py"), "--size", "tiny", "--steps", "40"]
    done = subprocess.run(
        [*command, "--checkpoints", str(folder / "checkpoints"), "--every", "20", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_resumes_bit_for_bit_and_with_another_number_of_ranks(tmp_path: Path) -> None:
    whole = train(tmp_path, "--hook", "sign")
    checkpoints = tmp_path / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step00000020", "step00000040"]
    (checkpoints / "step00000040").rename(tmp_path / "last")
    assert train(tmp_path, "--hook", "sign", "--resume") == whole.partition("\n")[2]
    first, again = (
        (parent / "rank1.pt").read_bytes() for parent in (tmp_path / "last", checkpoints / "step00000040")
    )
    assert first == again
    (checkpoints / "step00000040").rename(tmp_path / "again")
    assert "validation: " in train(tmp_path, "--hook", "sign", "--resume", ranks=3)


def test_the_example_is_two_lines_from_plain_ddp() -> None:
    text = (REPOSITORY / "examples" / "train_gpt.py").read_text()
    marked = [line for line in text.splitlines() if line.rstrip().endswith(("# (1)", "# (2)"))]
    assert len(marked) == 2
    plain = "\n".join(line for line in text.splitlines() if line not in marked)
    assert "register_ddp_comm_hook" not in plain
    assert "comm_hook" not in plain
    compile(plain, "plain.py", "exec")
