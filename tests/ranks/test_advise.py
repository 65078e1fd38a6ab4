"""The advisor on real ranks: the same answer everywhere, nothing of the user's changed, and the command."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from tensorplay.advisor import AdviseSettings, advise
from tensorplay.testing import run_ranks

HOOKS = ["fp16_compress", "int8", "topk:0.05", "power_sgd"]


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Dropout(0.1), nn.Linear(96, 64))


def answer(rank: int, world_size: int, trial: bool = True) -> dict[str, Any]:
    model = tiny()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.get_rng_state()
    batches = [torch.randn(8, 64, generator=torch.Generator().manual_seed(rank)) for _ in range(2)]
    advice = advise(model, batches, hooks=HOOKS, settings=AdviseSettings(trial=trial, budget_seconds=20))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), f"{name} was changed"
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), generator)
    told = advice.to_dict()
    told["probed"].pop("cores")
    return told


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_give_the_same_advice(world_size: int) -> None:
    answers = run_ranks(answer, world_size)
    assert all(told == answers[0] for told in answers)
    told = answers[0]
    assert sorted(p["hook"] for p in told["predictions"]) == sorted(["allreduce", *HOOKS])
    seconds = [p["step_seconds"] for p in told["predictions"]]
    assert seconds == sorted(seconds)
    assert all(s > 0 for s in seconds)
    parameters = 64 * 96 + 96 + 96 + 96 + 96 * 64 + 64
    assert (told["probed"]["parameters"], told["probed"]["gradient_bytes"]) == (parameters, 4 * parameters)
    factor = 2 * (world_size - 1) / world_size
    sent = {p["hook"]: p["sent_bytes"] for p in told["predictions"]}
    assert sent["allreduce"] == pytest.approx(factor * 4 * parameters, rel=0.02)
    assert sent["fp16_compress"] == pytest.approx(factor * 2 * parameters, rel=0.02)
    assert {link["between"] for link in told["probed"]["links"]} == {"group", "within a host"}
    assert {p["hook"] for p in told["predictions"] if p["basis"] == "tried"} >= {"allreduce", "int8"}


def alone(rank: int, world_size: int) -> dict[str, Any]:
    return answer(rank, world_size, trial=False)


def test_one_rank_is_advised_not_to_compress() -> None:
    (told,) = run_ranks(alone, 1)
    assert told["best"] == "allreduce"
    assert told["probed"]["links"] == []
    assert all(p["basis"] == "formula" for p in told["predictions"])


def mistakes(rank: int, world_size: int) -> None:
    model, batches = tiny(), [torch.randn(8, 64)]
    with pytest.raises(ValueError, match="unknown hook 'int9'"):
        advise(model, batches, hooks=["int9"])
    with pytest.raises(ValueError, match="at least one batch, got none"):
        advise(model, [])
    with pytest.raises(TypeError, match=r"pass model\.module"):
        advise(torch.nn.parallel.DistributedDataParallel(model), batches)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        advise(tiny().requires_grad_(False), batches)


def test_mistakes_are_told_on_every_rank() -> None:
    run_ranks(mistakes, 2)


def test_the_command_starts_ranks_and_prints_json() -> None:
    command = [
        sys.executable,
        "-m",
        "tensorplay.cli.main",
        "advise",
        "--ranks",
        "2",
        "--threads",
        "1",
        "--json",
    ]
    command += ["--model", "mlp:width=32,layers=2,batch=4", "--hooks", "allreduce,int8", "--budget", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["model"] == "mlp:width=32,layers=2,batch=4"
    assert told["best"] in ("allreduce", "int8")
    assert told["probed"]["world_size"] == 2
    assert told["seconds"] < 60


def test_the_command_runs_under_torchrun_and_prints_once() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"]
    command += ["-m", "tensorplay.cli.main", "advise", "--parameters", "5e4", "--hooks", "int8"]
    done = subprocess.run(
        [*command, "--max-risk", "safe", "--no-trial"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Advice: no compression.") == 1
    assert "usually-safe (above --max-risk)" in done.stdout
