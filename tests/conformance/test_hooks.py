"""The conformance suite over every registered hook. A new hook joins by being registered."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from tensorplay.compression.exchange import choose_route, route_bytes
from tensorplay.compression.quantize import AffineUint8
from tensorplay.compression.registry import known_codecs, make_codec
from tensorplay.testing import run_ranks
from tests.conformance import suite
from tests.conformance.suite import CELLS, Cell

HOOKS = suite.hook_names()
#: The same machinery as another hook, with another number in it.
RELATIVES = {"batched_power_sgd_rank2", "bf16", "fp16", "fp32", "fp8_e5m2", "power_sgd_rank2", "uint8"}
#: No error feedback: each step's result is the mean to the hook's own grain.
STATELESS = {
    "allreduce": 1e-6,
    "fp16_compress": 2e-3,
    "bf16_compress": 1e-2,
    "quantize_per_tensor": 2e-2,
    "quantize_per_channel": 2e-2,
}


def matrix(settings: Sequence[Any], short: Sequence[int]) -> list[Any]:
    """Every hook with every setting; relatives of another hook run those at `short`, and the others in the soak."""
    return [
        pytest.param(name, setting, marks=[pytest.mark.soak] if name in RELATIVES and at not in short else [])
        for name in HOOKS
        for at, setting in enumerate(settings)
    ]


@pytest.mark.parametrize(("name", "cell"), matrix(CELLS, short=[1, 3]), ids=str)
def test_replicas_stay_equal(name: str, cell: Cell) -> None:
    run_ranks(partial(suite.train, name=name, cell=cell, steps=20), cell.world_size)


@pytest.mark.parametrize(("name", "steps"), matrix([200], short=[]))
def test_two_hundred_steps(name: str, steps: int) -> None:
    run_ranks(partial(suite.train, name=name, cell=Cell(3, many_buckets=True), steps=steps), 3)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("many_buckets", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_five_hundred_steps_at_least_twenty_times(world_size: int, many_buckets: bool) -> None:
    assert len(HOOKS) >= 20  # one after the other in the same processes
    for name in HOOKS:
        train = partial(suite.train, name=name, cell=Cell(world_size, many_buckets), steps=500)
        run_ranks(train, world_size, timeout_seconds=170)


@pytest.mark.parametrize(("name", "setting"), matrix([(2, False), (3, True)], short=[1]))
def test_nothing_is_lost(name: str, setting: tuple[int, bool]) -> None:
    world_size, many_buckets = setting
    worst = run_ranks(partial(suite.account, name=name, many_buckets=many_buckets, steps=50), world_size)
    assert max(worst) < STATELESS.get(name, 1e-5)


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_bad_step_is_seen_everywhere_and_forgotten(name: str, value: float) -> None:
    for world_size, many_buckets in ((2, False), (3, True)):
        run_ranks(partial(suite.poison, name=name, many_buckets=many_buckets, value=value), world_size)


@pytest.mark.parametrize("name", HOOKS)
def test_every_kind_of_parameter(name: str) -> None:
    for world_size, many_buckets in ((2, True), (3, False)):
        close = name in STATELESS or name in ("int8", "fp16", "bf16", "fp32")
        run_ranks(partial(suite.every_kind, name=name, many_buckets=many_buckets, close=close), world_size)


@pytest.mark.parametrize("name", HOOKS)
def test_resume_is_bit_identical(name: str) -> None:
    for world_size, many_buckets in ((2, False), (3, True)):
        run_ranks(partial(suite.resume, name=name, many_buckets=many_buckets), world_size)


def promised_bytes(name: str, world_size: int) -> float | None:
    """The formula of the docs, for one weight of 512 x 768 float32 values."""
    numel = 512 * 768
    if name in ("allreduce", "fp16_compress", "bf16_compress"):
        return 2 * (world_size - 1) / world_size * numel * (4 if name == "allreduce" else 2)
    if name.startswith("quantize"):
        codec = AffineUint8(None if name.endswith("tensor") else 512)
        return codec.wire_bytes(numel) * (world_size - 1)
    if name.partition(":")[0] in known_codecs() or name in known_codecs():
        codec = make_codec(name)
        route = choose_route(codec, codec, world_size, torch.device("cpu"), True)
        return route_bytes(route, codec.wire_bytes(numel), codec.wire_bytes(numel), world_size)
    return None  # held against a formula of its own in tests/ranks


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_are_what_is_promised(name: str, world_size: int) -> None:
    promise = promised_bytes(name, world_size)
    for sent, received, told_sent, told_received in run_ranks(
        partial(suite.sent_a_step, name=name), world_size
    ):
        assert told_sent == sent
        assert told_received == received
        if promise is not None:
            assert sent == pytest.approx(promise, rel=0.02)
            assert received == pytest.approx(promise, rel=0.02)
