"""The example of the design, as written, with nccl."""

from pathlib import Path

import pytest
import torch

from tests.ranks.test_example_as_written import EXAMPLE, check, run_example

pytestmark = pytest.mark.gpu


def test_example_on_one_gpu(tmp_path: Path) -> None:
    check(run_example(EXAMPLE, tmp_path, ranks=1))


def test_example_on_two_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices, found {torch.cuda.device_count()}")
    # `.cuda()` takes the process's current device, and choosing that is the script's affair: one line more.
    start = 'dist.init_process_group("nccl")\n'
    assert start in EXAMPLE
    check(run_example(EXAMPLE.replace(start, start + "tp.cuda.set_device(dist.get_rank())\n"), tmp_path))
