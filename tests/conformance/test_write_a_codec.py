"""The codec that docs/write_a_codec.md shows: written to a file, registered, and put through the suite."""

import re
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tensorplay.testing import run_ranks
from tests.conformance import suite
from tests.conformance.suite import CELLS, Cell

NAME = "power_of_two"


@pytest.fixture
def codec_file(tmp_path: Path) -> Path:
    document = (Path(__file__).parents[2] / "docs" / "write_a_codec.md").read_text()
    first = re.search(r"```python\n(.*?)```", document, re.DOTALL)
    assert first is not None
    path = tmp_path / "power_of_two.py"
    path.write_text(first.group(1))
    return path


def with_codec(rank: int, world_size: int, path: Path, check: Callable[..., Any]) -> Any:
    from tensorplay.compression import registry

    runpy.run_path(str(path))
    try:
        return check(rank, world_size)
    finally:  # ranks are used again by other tests
        del registry._CODECS[NAME]


@pytest.mark.parametrize("cell", [CELLS[1], CELLS[3], CELLS[5]], ids=str)
def test_replicas_stay_equal(codec_file: Path, cell: Cell) -> None:
    check = partial(suite.train, name=NAME, cell=cell, steps=20)
    run_ranks(partial(with_codec, path=codec_file, check=check), cell.world_size)


def test_nothing_is_lost(codec_file: Path) -> None:
    check = partial(suite.account, name=NAME, many_buckets=True, steps=50)
    assert max(run_ranks(partial(with_codec, path=codec_file, check=check), 3)) < 1e-5


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_bad_step_is_forgotten(codec_file: Path, value: float) -> None:
    check = partial(suite.poison, name=NAME, many_buckets=True, value=value)
    run_ranks(partial(with_codec, path=codec_file, check=check), 2)


def test_resume_is_bit_identical(codec_file: Path) -> None:
    check = partial(suite.resume, name=NAME, many_buckets=True)
    run_ranks(partial(with_codec, path=codec_file, check=check), 3)
