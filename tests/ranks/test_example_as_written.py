"""The example of the design runs as written under torchrun: with gloo on CPU here, with nccl in tests/gpu."""

import json
import os
import subprocess
import sys
from pathlib import Path

__all__ = ["EXAMPLE", "check", "run_example"]

EXAMPLE = """
import tensorplay as tp
import tensorplay.distributed as dist
from tensorplay.distributed.algorithms.ddp_comm_hooks import default_hooks

dist.init_process_group("nccl")
model = tp.nn.Linear(64, 64).cuda()
model = tp.nn.parallel.DistributedDataParallel(model, device_ids=[dist.get_rank()])
model.register_comm_hook(None, default_hooks.fp16_compress_hook)
"""

# What makes the hook's work visible: one step on data that differs by rank, against the mean gradient worked out
# from what both ranks hold.
STEP = """
import json, pathlib
tp.manual_seed(dist.get_rank())
device = next(model.parameters()).device
x = tp.randn(8, 64, device=device)
model(x).pow(2).mean().backward()
alone = tp.nn.Linear(64, 64).to(device)
alone.load_state_dict(model.module.state_dict())
alone(x).pow(2).mean().backward()
expected = alone.weight.grad / dist.get_world_size()
dist.all_reduce(expected)
gradients = [tp.empty_like(expected) for _ in range(dist.get_world_size())]
dist.all_gather(gradients, model.module.weight.grad)
pathlib.Path(__file__).with_name(f"rank{dist.get_rank()}.json").write_text(json.dumps({
    "equal": all(tp.equal(gradients[0], other) for other in gradients),
    "largest": expected.abs().max().item(),
    "error": (model.module.weight.grad - expected).abs().max().item(),
    "rounded": not tp.equal(model.module.weight.grad, expected),
}))
dist.destroy_process_group()
"""


def run_example(code: str, folder: Path, ranks: int = 2) -> list[dict[str, float]]:
    """Run `code` and one step under torchrun; what each rank says of its gradient, by rank."""
    path = folder / "example.py"
    path.write_text(code + STEP)
    command = [sys.executable, "-W", "error", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def check(said: list[dict[str, float]]) -> None:
    for entry in said:
        assert entry["equal"]
        assert entry["rounded"], "the gradient was not compressed: it equals the float32 mean"
        assert entry["error"] <= 2**-10 * entry["largest"]


def test_example_on_gloo(tmp_path: Path) -> None:
    code = (
        EXAMPLE.replace('"nccl"', '"gloo"')
        .replace(".cuda()", "")
        .replace(", device_ids=[dist.get_rank()]", "")
    )
    check(run_example(code, tmp_path))


def test_example_where_nccl_is_missing_says_what_to_use(tmp_path: Path) -> None:
    path = tmp_path / "example.py"
    path.write_text(EXAMPLE)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "ValueError: backend 'nccl' needs NCCL and a CUDA device, and "
    )
    assert 'use "gloo"' in done.stderr.splitlines()[-1]
