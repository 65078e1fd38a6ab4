"""Averagers on real ranks: values, schedule, storage, options, copies."""

import copy
import io
import itertools
import pickle
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tensorplay.compression.collective import traffic
from tensorplay.distributed.algorithms.model_averaging import (
    HierarchicalModelAverager,
    PeriodicModelAverager,
    average_parameters,
    average_parameters_or_parameter_groups,
)
from tensorplay.distributed.algorithms.model_averaging.flat_mean import FlatMean
from tensorplay.testing import run_ranks


def _every_kind(rank: int) -> list[nn.Parameter]:
    """Parameters of every kind, each holding rank + 1 plus a pattern that tells places apart."""

    def filled(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        numel = torch.Size(shape).numel()
        return (torch.arange(numel, dtype=torch.float32).reshape(shape) / 64 + rank + 1).to(dtype)

    return [
        nn.Parameter(filled()),
        nn.Parameter(filled(0, 3)),
        nn.Parameter(filled(4, 3, 2, 2).to(memory_format=torch.channels_last)),
        nn.Parameter(filled(5, 7).t()),
        nn.Parameter(filled(6, dtype=torch.float64)),
        nn.Parameter(filled(6, dtype=torch.bfloat16)),
        nn.Parameter(filled(6, dtype=torch.float16)),
        nn.Parameter(torch.complex(filled(3), -filled(3))),
        nn.Parameter(filled(3000)),
        nn.Parameter(filled(2, 2000)),
    ]


def _mean_of_every_kind(rank: int, world_size: int, bucket_cap_mb: float) -> int:
    params = _every_kind(rank)
    before = [(p.data_ptr(), p.stride(), p.dtype, p.untyped_storage().nbytes()) for p in params]
    expected = [
        torch.stack([other.detach() for other in alike]).to(torch.complex128).mean(0)
        for alike in zip(*(_every_kind(r) for r in range(world_size)), strict=True)
    ]
    flat = FlatMean(bucket_cap_mb)
    for _ in range(2):  # the second time averages equal values in the kept scratch
        flat.average_(params, None)
        for param, mean in zip(params, expected, strict=True):
            exact = 0.02 if param.dtype.itemsize == 2 else 1e-6
            torch.testing.assert_close(param.detach().to(torch.complex128), mean, rtol=exact, atol=exact)
    assert [(p.data_ptr(), p.stride(), p.dtype, p.untyped_storage().nbytes()) for p in params] == before
    assert flat.scratch_bytes() <= bucket_cap_mb * 2**20
    gathered = [torch.empty_like(params[8]) for _ in range(world_size)]
    dist.all_gather(gathered, params[8].detach())
    assert all(torch.equal(gathered[0], other) for other in gathered)
    return flat.scratch_bytes()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("bucket_cap_mb", [25, 0.002])
def test_mean_keeps_storage_strides_and_dtype(world_size: int, bucket_cap_mb: float) -> None:
    scratch = run_ranks(partial(_mean_of_every_kind, bucket_cap_mb=bucket_cap_mb), world_size)
    assert 0 < scratch[0] == scratch[-1]


def _different_strides(rank: int, world_size: int) -> list[list[float]]:
    values = torch.arange(24, dtype=torch.float32).reshape(2, 3, 2, 2) * (rank + 1)
    if rank == 1:
        values = values.to(memory_format=torch.channels_last)
    average_parameters([values], None, bucket_cap_mb=2**-15)  # 4 elements at a time
    return values.flatten().tolist()


def test_ranks_may_have_different_strides() -> None:
    assert run_ranks(_different_strides, 2) == [[1.5 * i for i in range(24)]] * 2


def _bytes_of_one_mean(rank: int, world_size: int) -> tuple[int, int, int]:
    before = traffic.sent_bytes
    averager = PeriodicModelAverager(period=2)
    averager.average_parameters([nn.Parameter(torch.ones(1000))])
    return averager.traffic.sent_bytes, averager.traffic.received_bytes, traffic.sent_bytes - before


def test_bytes_are_counted_where_they_enter_the_collective() -> None:
    assert run_ranks(_bytes_of_one_mean, 4) == [(6000, 6000, 6000)] * 4  # 2 * 3/4 * 4000


def _kinds_of_input(rank: int, world_size: int) -> list[float]:
    def model() -> nn.Linear:
        layer = nn.Linear(1, 1)
        nn.init.constant_(layer.weight, float(rank))
        return layer

    found = []
    for give in (
        lambda m: m,
        lambda m: m.parameters(),
        lambda m: list(m.parameters()),
        lambda m: m.named_parameters(),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1).param_groups,
        lambda m: torch.optim.SGD(m.named_parameters(), lr=0.1).param_groups,
    ):
        layer = model()
        average_parameters_or_parameter_groups(give(layer), None)
        found.append(layer.weight.item())
    return found


def test_modules_iterators_and_groups_are_taken() -> None:
    assert run_ranks(_kinds_of_input, 2) == [[0.5] * 6] * 2


def _schedule(rank: int, world_size: int, make: Any, steps: int = 12) -> list[list[int]]:
    """Return, for each step, the ranks that averaged together: each holds its own bit."""
    averager = make()
    together = []
    for _ in range(steps):
        param = nn.Parameter(torch.tensor([2.0**rank], dtype=torch.float64))
        averager.average_parameters([param])
        members = 0
        for size in range(1, world_size + 1):
            total = param.item() * size
            if total == int(total) and int(total).bit_count() == size and (int(total) >> rank) & 1:
                members = int(total)
                break
        together.append([r for r in range(world_size) if members >> r & 1])
    assert averager.step == steps
    return together


@pytest.mark.parametrize(
    ("period", "warmup", "due"), [(4, 0, [0, 4, 8]), (4, 3, [3, 7, 11]), (5, 12, []), (3, 10, [10])]
)
def test_periodic_schedule(period: int, warmup: int, due: list[int]) -> None:
    runs = run_ranks(partial(_schedule, make=partial(PeriodicModelAverager, period, warmup)), 2)
    for rank, run in enumerate(runs):
        assert run == [[0, 1] if step in due else [rank] for step in range(12)]


@pytest.mark.parametrize(
    ("phase", "warmup", "pairs", "everyone"),
    [
        ("step", 0, [2, 6, 10], [0, 4, 8]),
        ("step", 3, [6, 10], [4, 8]),
        ("warmup", 3, [5, 9], [3, 7, 11]),
    ],
)
def test_hierarchical_schedule(phase: str, warmup: int, pairs: list[int], everyone: list[int]) -> None:
    make = partial(HierarchicalModelAverager, {2: 2, 4: 4}, warmup, phase=phase)
    for rank, run in enumerate(run_ranks(partial(_schedule, make=make), 4)):
        pair = [0, 1] if rank < 2 else [2, 3]
        expected = [
            [0, 1, 2, 3] if step in everyone else pair if step in pairs else [rank] for step in range(12)
        ]
        assert run == expected


def _bad_arguments(rank: int, world_size: int) -> list[str]:
    texts = []
    for error, make in (
        (ValueError, lambda: PeriodicModelAverager(0)),
        (ValueError, lambda: PeriodicModelAverager(2, -1)),
        (TypeError, lambda: PeriodicModelAverager(2.0)),
        (TypeError, lambda: PeriodicModelAverager(True)),
        (ValueError, lambda: PeriodicModelAverager(2, bucket_cap_mb=0)),
        (ValueError, lambda: PeriodicModelAverager(2, bucket_cap_mb=float("nan"))),
        (ValueError, lambda: PeriodicModelAverager(2, average_buffers=True)),
        (TypeError, lambda: average_parameters_or_parameter_groups([3], None)),
        (TypeError, lambda: average_parameters_or_parameter_groups(torch.ones(2), None)),
    ):
        with pytest.raises(error) as raised:
            make()
        texts.append(str(raised.value))
    with pytest.warns(UserWarning, match="period=1"):
        PeriodicModelAverager(1)
    return texts


def test_bad_arguments_are_named() -> None:
    texts = run_ranks(_bad_arguments, 1)[0]
    for text, said in zip(
        texts,
        ["period must be >= 1, got 0", "warmup_steps must be >= 0, got -1", "2.0", "True", "got 0", "nan"],
        strict=False,
    ):
        assert said in text


def _outside_the_group(rank: int, world_size: int) -> float:
    group = dist.new_group([0, 1])
    param = nn.Parameter(torch.tensor([float(rank)]))
    averager = PeriodicModelAverager(2, process_group=group)
    averager.average_parameters([param])
    average_parameters([param], group)
    assert averager.step == 1
    return param.item()


def test_only_the_group_averages() -> None:
    assert run_ranks(_outside_the_group, 3) == [0.5, 0.5, 2.0]


def _copies(rank: int, world_size: int, make: Any) -> int:
    averager = make()
    params = [nn.Parameter(torch.tensor([float(rank)]))]
    for _ in range(3):
        averager.average_parameters(params)
    loaded = make()
    stream = io.BytesIO()
    torch.save(averager.state_dict(), stream)
    stream.seek(0)
    loaded.load_state_dict(torch.load(stream, weights_only=True))
    others = [loaded, copy.deepcopy(averager), pickle.loads(pickle.dumps(averager))]
    for step, other in itertools.product(range(4), others):
        assert other.step == 3 + step
        param = nn.Parameter(torch.tensor([float(rank)]))
        other.average_parameters([param])
        due = (3 + step) % 4 == 0
        assert param.item() == (0.5 if due else rank)
    return averager.step


@pytest.mark.parametrize(
    "make", [partial(PeriodicModelAverager, 4), partial(HierarchicalModelAverager, {2: 1, 4: 2})]
)
def test_averagers_save_copy_and_pickle(make: Any) -> None:
    assert run_ranks(partial(_copies, make=make), 2) == [3, 3]


def _now(rank: int, world_size: int) -> list[float]:
    averager = HierarchicalModelAverager({2: 2, 4: 4})
    params = [nn.Parameter(torch.tensor(float(rank))), nn.Parameter(torch.tensor(float(rank)))]
    averager.average_now(params[:1])
    assert averager.step == 0
    averager.bind(params)
    averager.average_now()
    return [p.item() for p in params]


def test_average_now_is_over_the_whole_group() -> None:
    assert run_ranks(_now, 4) == [[1.5, 1.5]] * 4


def _pickle_on_subgroup(rank: int, world_size: int) -> str:
    averager = PeriodicModelAverager(2, process_group=dist.new_group([0, 1]))
    with pytest.raises(TypeError) as raised:
        pickle.dumps(averager)
    assert copy.deepcopy(averager).process_group is averager.process_group
    return str(raised.value)


def test_a_pickle_on_another_group_says_what_to_do() -> None:
    assert "state_dict()" in run_ranks(_pickle_on_subgroup, 2)[0]


def _globals_are_left(rank: int, world_size: int) -> bool:
    torch.manual_seed(5)
    random, threads, filters = torch.get_rng_state(), torch.get_num_threads(), list(warnings.filters)
    averager = PeriodicModelAverager(2)
    averager.average_parameters([nn.Parameter(torch.ones(3))])
    return (
        torch.equal(random, torch.get_rng_state())
        and threads == torch.get_num_threads()
        and filters == list(warnings.filters)
    )


def test_globals_are_left_as_found() -> None:
    assert run_ranks(_globals_are_left, 2) == [True, True]
