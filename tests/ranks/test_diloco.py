"""DiLoCo on real ranks: traces one can check by hand, equivalences, fragments, overlap, resume."""

import copy
import io
import pickle
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tensorplay.distributed.algorithms.model_averaging import DiLoCoAverager, PeriodicModelAverager
from tensorplay.distributed.algorithms.model_averaging.fragments import split_evenly
from tensorplay.distributed.optim.post_localSGD_optimizer import PostLocalSGDOptimizer
from tensorplay.testing import run_ranks

plain_average = partial(torch.optim.SGD, lr=1.0)  # the outer step that makes DiLoCo an averager


def _descend(param: nn.Parameter, amount: float) -> float:
    with torch.no_grad():
        param.sub_(amount)
    return param.item()


def _scalar_trace(rank: int, world_size: int, steps: int, **options: Any) -> list[float]:
    """Rank 0 takes 1 away at each step, rank 1 takes 2; both start at 10, rank 1 only after construction."""
    param = nn.Parameter(torch.tensor(10.0 if rank == 0 else 99.0))
    averager = DiLoCoAverager([param], **options)
    trace = [param.item()]
    for _ in range(steps):
        _descend(param, rank + 1.0)
        averager.average_parameters([param])
        trace.append(round(param.item(), 4))
    return trace


def test_trace_with_the_default_outer_optimizer() -> None:
    # step 0: 9, 8; d = 10 - 8.5 = 1.5; momentum 1.5; outer = 10 - 0.7 (1.5 + 0.9 * 1.5) = 8.005
    # step 2: 6.005, 4.005; d = 8.005 - 5.005 = 3; momentum 0.9 * 1.5 + 3 = 4.35
    #         outer = 8.005 - 0.7 (3 + 0.9 * 4.35) = 3.1645
    assert run_ranks(partial(_scalar_trace, steps=3, period=2), 2) == [
        [10.0, 8.005, 7.005, 3.1645],
        [10.0, 8.005, 6.005, 3.1645],
    ]


def test_trace_with_warm_up() -> None:
    # steps 0 and 1 only count: 9, 8 and 8, 6. step 2: 7, 4, mean 5.5 becomes the outer parameter, no outer step.
    # step 4: 3.5, 1.5, mean 2.5; d = 5.5 - 2.5 = 3; outer = 5.5 - 0.5 * 3 = 4
    options = {"period": 2, "warmup_steps": 2, "outer_optimizer": partial(torch.optim.SGD, lr=0.5)}
    assert run_ranks(partial(_scalar_trace, steps=5, **options), 2) == [
        [10.0, 9.0, 8.0, 5.5, 4.5, 4.0],
        [10.0, 8.0, 6.0, 5.5, 3.5, 4.0],
    ]


def test_trace_with_overlap() -> None:
    # step 0: 9, 8 leave with d = 1, 2, mean 1.5. step 1: 8, 6; outer = 10 - 1.5 = 8.5; halfway: 8.25, 7.25.
    # step 2: 7.25, 5.25. step 3: 6.25, 3.25 leave with d = 8.5 - p = 2.25, 5.25, mean 3.75.
    # step 4: 5.25, 1.25; outer = 8.5 - 3.75 = 4.75; halfway: 5, 3
    options = {"period": 3, "overlap_steps": 1, "outer_optimizer": plain_average}
    assert run_ranks(partial(_scalar_trace, steps=5, **options), 2) == [
        [10.0, 9.0, 8.25, 7.25, 6.25, 5.0],
        [10.0, 8.0, 7.25, 5.25, 3.25, 3.0],
    ]


def _model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def _batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, averager: Any, rank: int, steps: range
) -> None:
    for step in steps:
        inputs, targets = _batch(rank, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        if averager is not None:
            averager.average_parameters(model.parameters())


def _parameters(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def _like_periodic(rank: int, world_size: int, period: int, warmup_steps: int) -> float:
    found = []
    for make in (
        lambda m: DiLoCoAverager(m, plain_average, period, warmup_steps),
        lambda m: PeriodicModelAverager(period, warmup_steps),
    ):
        model = _model()
        _train(model, torch.optim.Adam(model.parameters(), lr=0.01), make(model), rank, range(20))
        found.append(_parameters(model))
    return max((a - b).abs().max().item() for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(("period", "warmup_steps"), [(4, 0), (3, 5)])
def test_plain_outer_step_equals_the_periodic_averager(period: int, warmup_steps: int) -> None:
    apart = run_ranks(partial(_like_periodic, period=period, warmup_steps=warmup_steps), 3)
    assert max(apart) < 1e-6


def _like_ddp(rank: int, world_size: int, outer: Any, inner_lr: float, ddp_options: dict[str, Any]) -> float:
    model = _model()
    inner = torch.optim.SGD(model.parameters(), lr=inner_lr)
    _train(model, inner, DiLoCoAverager(model, outer, period=1), rank, range(20))
    ddp = nn.parallel.DistributedDataParallel(_model())
    _train(ddp, torch.optim.SGD(ddp.parameters(), **ddp_options), None, rank, range(20))
    apart = zip(_parameters(model), _parameters(ddp), strict=True)
    return max((a - b).abs().max().item() for a, b in apart)


@pytest.mark.parametrize(
    ("outer", "ddp_options"),
    [
        (plain_average, {"lr": 0.1}),
        (None, {"lr": 0.07, "momentum": 0.9, "nesterov": True}),  # 0.7 of the inner 0.1
    ],
)
def test_period_one_with_inner_sgd_equals_ddp(outer: Any, ddp_options: dict[str, Any]) -> None:
    apart = run_ranks(partial(_like_ddp, outer=outer, inner_lr=0.1, ddp_options=ddp_options), 2)
    assert max(apart) < 1e-5


def test_fragments_are_whole_tensors_and_none_is_empty() -> None:
    assert split_evenly([4, 4, 100, 4, 4], 3) == [slice(0, 2), slice(2, 3), slice(3, 5)]
    assert split_evenly([100, 1, 1], 3) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    for sizes in ([0, 0, 5], [5, 0, 0], [0, 0, 0], [1, 9, 9, 1, 1]):
        for parts in range(1, len(sizes) + 1):
            runs = [sizes[run] for run in split_evenly(sizes, parts)]
            assert len(runs) == parts
            assert all(runs)
            assert [size for run in runs for size in run] == sizes
    assert split_evenly([3, 3, 3, 3], 1) == [slice(0, 4)]


def _fragment_schedule(rank: int, world_size: int, overlap_steps: int) -> list[list[int]]:
    """Return the steps at which each of three parameters came to agree on all ranks."""
    params = [nn.Parameter(torch.zeros(shape)) for shape in ((4,), (1000, 20), (2, 2))]
    averager = DiLoCoAverager(
        params,
        plain_average,
        period=6,
        num_fragments=3,
        overlap_steps=overlap_steps,
        mixing_fraction=0.0,
        bucket_cap_mb=0.01,  # the second one is larger than a bucket and than a fragment
    )
    agreed: list[list[int]] = [[], [], []]
    for step in range(13):
        with torch.no_grad():
            for param in params:
                param.add_(rank + 1.0)
        averager.average_parameters()
        for number, param in enumerate(params):
            both = [torch.empty_like(param) for _ in range(world_size)]
            dist.all_gather(both, param.detach())
            if torch.equal(*both):
                agreed[number].append(step)
                assert torch.all(param == param.flatten()[0])
    return agreed


@pytest.mark.parametrize("overlap_steps", [0, 1])
def test_fragments_take_turns(overlap_steps: int) -> None:
    shifted = [
        [s + overlap_steps for s in steps if s + overlap_steps < 13]
        for steps in ([0, 6, 12], [2, 8], [4, 10])
    ]
    assert run_ranks(partial(_fragment_schedule, overlap_steps=overlap_steps), 2) == [shifted] * 2


def _bytes(rank: int, world_size: int, overlap_steps: int) -> tuple[int, int]:
    params = [nn.Parameter(torch.zeros(300, 10)), nn.Parameter(torch.zeros(8))]
    averager = DiLoCoAverager(params, period=5, overlap_steps=overlap_steps, num_fragments=2)
    before = averager.traffic
    for _ in range(10):
        averager.average_parameters()
    if overlap_steps:
        averager.state_dict()  # waits for what is in flight
    after = averager.traffic
    return after.sent_bytes - before.sent_bytes, after.received_bytes - before.received_bytes


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_bytes_are_those_of_an_all_reduce_each_period(overlap_steps: int) -> None:
    # 10 steps: two exchanges of 3008 values, 2 * 3/4 * 4 bytes each
    assert run_ranks(partial(_bytes, overlap_steps=overlap_steps), 4) == [(2 * 3008 * 6,) * 2] * 4


def _every_kind(rank: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(rank)

    def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return [
        nn.Parameter(values()),
        nn.Parameter(values(0, 3)),
        nn.Parameter(values(4, 3, 2, 2).to(memory_format=torch.channels_last)),
        nn.Parameter(values(5, dtype=torch.float64)),
        nn.Parameter(values(5, dtype=torch.bfloat16)),
        nn.Parameter(values(5, dtype=torch.float16)),
        nn.Parameter(torch.complex(values(5), values(5))),
        nn.Parameter(values(3), requires_grad=False),
    ]


def _kinds(rank: int, world_size: int, overlap_steps: int) -> list[list[float]]:
    params = _every_kind(rank)
    frozen = params[-1].detach().clone()
    layout = [(p.data_ptr(), p.stride(), p.dtype) for p in params]
    averager = DiLoCoAverager(
        params, period=2, num_fragments=2, overlap_steps=overlap_steps, mixing_fraction=0.0
    )
    start = [p.detach().clone() for p in params]
    for _ in range(4):
        with torch.no_grad():
            for param, move in zip(params, _every_kind(rank + 10), strict=True):
                if param.requires_grad:
                    param.add_(move, alpha=0.1)
        averager.average_parameters(params)
    assert [(p.data_ptr(), p.stride(), p.dtype) for p in params] == layout
    assert torch.equal(params[-1], frozen)
    changed = [not torch.equal(a, b) for a, b in zip(start, params, strict=True)]
    assert changed == [True, False, *[True] * 5, False]
    outer = averager.outer_parameters()
    assert [t.dtype for t in outer.values()] == [
        torch.float32,
        torch.float32,
        torch.float32,
        torch.float64,
        torch.float32,
        torch.float32,
        torch.complex64,
    ]
    return [
        torch.view_as_real(t).flatten().tolist() if t.is_complex() else t.flatten().tolist()
        for t in outer.values()
    ]


@pytest.mark.parametrize("overlap_steps", [0, 1])
def test_every_kind_of_parameter(overlap_steps: int) -> None:
    outer = run_ranks(partial(_kinds, overlap_steps=overlap_steps), 3)
    assert outer[0] == outer[1] == outer[2]


def _half_that_stays(rank: int, world_size: int) -> bool:
    param = nn.Parameter(torch.randn(100).to(torch.bfloat16))
    averager = DiLoCoAverager([param], period=1)
    averager.outer_parameters()["0"].add_(1e-4)  # less than bfloat16 can hold
    before = averager.outer_parameters()["0"].clone()
    with torch.no_grad():
        param.copy_(before)
    for _ in range(5):
        averager.average_parameters()
    return torch.equal(before, averager.outer_parameters()["0"])


def test_rounding_to_half_is_no_outer_gradient() -> None:
    assert all(run_ranks(_half_that_stays, 2))


def _optimizer_kinds(rank: int, world_size: int) -> list[float]:
    found = []
    for make in (
        lambda p: torch.optim.SGD([p], lr=0.5),
        lambda p: partial(torch.optim.SGD, lr=0.5),
        lambda p: lambda outer: torch.optim.SGD(outer, lr=0.5),
    ):
        param = nn.Parameter(torch.tensor(4.0))
        averager = DiLoCoAverager([param], make(param), period=3)
        for group in averager.outer_optimizer.param_groups:
            assert group["params"][0] is not param
        _descend(param, 2.0 * rank)  # 4 and 2: mean 3, d = 1
        averager.average_parameters([param])
        found.append(param.item())
    for group in averager.outer_optimizer.param_groups:
        group["lr"] = 1.0
    for _ in range(3):
        _descend(param, 1.0)
        averager.average_parameters()
    found.append(param.item())
    return found


def test_outer_optimizers_of_every_form() -> None:
    assert run_ranks(_optimizer_kinds, 2) == [[3.5, 3.5, 3.5, 0.5]] * 2


def _state_of_resume(rank: int, world_size: int, options: dict[str, Any]) -> list[bool]:
    def fresh(seed: int) -> tuple[nn.Module, PostLocalSGDOptimizer]:
        model = _model(seed)
        averager = DiLoCoAverager(model, period=4, **options)
        return model, PostLocalSGDOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), averager)

    model, optimizer = fresh(0)
    _train(model, optimizer, None, rank, range(19))
    expected = _parameters(model)
    outcomes = []
    for stop in (6, 9, 10):
        model, optimizer = fresh(0)
        _train(model, optimizer, None, rank, range(stop))
        stream = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stream)
        _train(
            model, optimizer, None, rank, range(stop, stop + 2)
        )  # what goes on does not change what was saved
        stream.seek(0)
        saved = torch.load(stream, weights_only=True)
        model, optimizer = fresh(7)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        _train(model, optimizer, None, rank, range(stop, 19))
        outcomes.append(all(torch.equal(a, b) for a, b in zip(expected, _parameters(model), strict=True)))
    return outcomes


@pytest.mark.parametrize(
    "options",
    [{}, {"num_fragments": 3}, {"overlap_steps": 3, "num_fragments": 2}, {"warmup_steps": 7}],
    ids=str,
)
def test_resume_is_bit_identical(options: dict[str, Any]) -> None:
    assert run_ranks(partial(_state_of_resume, options=options), 2) == [[True] * 3] * 2


def _save_for_other_world(rank: int, world_size: int) -> bytes:
    model = _model()
    averager = DiLoCoAverager(model, period=4)
    _train(model, torch.optim.SGD(model.parameters(), lr=0.1), averager, rank, range(9))
    stream = io.BytesIO()
    torch.save({"model": model.state_dict(), "averager": averager.state_dict()}, stream)
    return stream.getvalue()


def _load_in_other_world(rank: int, world_size: int, saved: bytes) -> tuple[int, float]:
    model = _model(3)
    averager = DiLoCoAverager(model, period=4)
    loaded = torch.load(io.BytesIO(saved), weights_only=True)
    model.load_state_dict(loaded["model"])
    averager.load_state_dict(loaded["averager"])
    outer = averager.outer_parameters()["0.weight"].clone()
    assert torch.equal(outer, loaded["averager"]["outer_parameters"]["0.weight"])
    _train(model, torch.optim.SGD(model.parameters(), lr=0.1), averager, rank, range(9, 13))
    return averager.step, sum(p.sum().item() for p in averager.outer_parameters().values())


def test_a_changed_world_size_resumes() -> None:
    saved = run_ranks(_save_for_other_world, 2)[0]
    loaded = run_ranks(partial(_load_in_other_world, saved=saved), 3)
    assert loaded[0] == loaded[1] == loaded[2]
    assert loaded[0][0] == 13


def _one_rank_not_finite(rank: int, world_size: int, overlap_steps: int) -> list[float]:
    param = nn.Parameter(torch.tensor(8.0))
    averager = DiLoCoAverager([param], plain_average, period=3, overlap_steps=overlap_steps)
    trace = []
    for step in range(8):
        _descend(param, float("nan") if rank == 1 and step == 3 else 1.0)
        averager.average_parameters()
        trace.append(averager.outer_parameters()["0"].item())
    assert averager.dropped_exchanges == 1
    return trace


def test_an_outer_gradient_that_is_not_finite_is_dropped_on_all_ranks() -> None:
    # exchanges at steps 0 (7 left), 3 (dropped: back to 7) and 6 (three steps later: 4 left)
    expected = [7.0, 7.0, 7.0, 7.0, 7.0, 7.0, 4.0, 4.0]
    assert run_ranks(partial(_one_rank_not_finite, overlap_steps=0), 2) == [expected] * 2


def _copies(rank: int, world_size: int, overlap_steps: int) -> bool:
    model = _model()
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        DiLoCoAverager(model, period=3, overlap_steps=overlap_steps),
    )
    _train(model, optimizer, None, rank, range(5))
    pair = (model, optimizer)
    for other_model, other in (copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))):
        assert other.averager.process_group is dist.group.WORLD
        assert other.param_groups[0]["params"][0] is next(other_model.parameters())
        _train(other_model, other, None, rank, range(5, 12))
        if other_model is not model:
            copied = _parameters(other_model)
    _train(model, optimizer, None, rank, range(5, 12))
    return all(torch.equal(a, b) for a, b in zip(copied, _parameters(model), strict=True))


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_copies_and_pickles_go_on_alike(overlap_steps: int) -> None:
    assert run_ranks(partial(_copies, overlap_steps=overlap_steps), 2) == [True, True]


def _now(rank: int, world_size: int, overlap_steps: int) -> list[float]:
    param = nn.Parameter(torch.tensor(10.0))
    other = nn.Parameter(torch.tensor(0.0))
    averager = DiLoCoAverager(
        [param, other], plain_average, period=4, num_fragments=2, overlap_steps=overlap_steps
    )
    for _ in range(3):
        _descend(param, rank + 1.0)
        averager.average_parameters()
    averager.average_now()
    assert averager.step == 3
    assert param.item() == averager.outer_parameters()["0"].item()
    return [param.item(), other.item()]


@pytest.mark.parametrize("overlap_steps", [0, 3])
def test_average_now_takes_an_outer_step_at_once(overlap_steps: int) -> None:
    # without overlap: 9, 8 became 8.5; 6.5, 4.5 become 5.5
    # with it: d = 1.5 of step 0 is mixed in now: outer 8.5, p halfway: 7.75, 6.25; their mean 7
    expected = [[5.5, 0.0]] * 2 if overlap_steps == 0 else [[7.0, 0.0]] * 2
    assert run_ranks(partial(_now, overlap_steps=overlap_steps), 2) == expected


def _buffers(rank: int, world_size: int) -> list[float]:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    averager = DiLoCoAverager(model, period=2, module=model, average_buffers=True)
    means = []
    for step in range(3):
        model[1].running_mean.fill_(10.0 * step + rank)
        averager.average_parameters(model.parameters())
        means.append(model[1].running_mean[0].item())
    return means


def test_buffers_are_averaged_with_the_first_fragment() -> None:
    assert run_ranks(_buffers, 2) == [[0.5, 10.0, 20.5], [0.5, 11.0, 20.5]]


def _bad_arguments(rank: int, world_size: int) -> list[str]:
    def one() -> list[nn.Parameter]:
        return [nn.Parameter(torch.ones(2))]

    used = one()
    used_optimizer = torch.optim.SGD(used, lr=0.1, momentum=0.9)
    used[0].grad = torch.ones(2)
    used_optimizer.step()
    averager = DiLoCoAverager(one(), period=3)
    state = averager.state_dict()
    texts = []
    for error, make in (
        (ValueError, lambda: DiLoCoAverager([], period=2)),
        (ValueError, lambda: DiLoCoAverager([nn.Parameter(torch.ones(1), requires_grad=False)])),
        (ValueError, lambda: DiLoCoAverager(one(), period=0)),
        (ValueError, lambda: DiLoCoAverager(one(), period=3, num_fragments=2)),
        (ValueError, lambda: DiLoCoAverager(one(), period=3, overlap_steps=3)),
        (ValueError, lambda: DiLoCoAverager(one(), period=3, mixing_fraction=1.0)),
        (ValueError, lambda: DiLoCoAverager(one(), torch.optim.SGD(one(), lr=0.1))),
        (ValueError, lambda: DiLoCoAverager(used, used_optimizer)),
        (TypeError, lambda: DiLoCoAverager(one(), 0.7)),
        (TypeError, lambda: DiLoCoAverager(one(), lambda params: None)),
        (ValueError, lambda: averager.average_parameters(one())),
        (ValueError, lambda: averager.average_parameters([])),
        (ValueError, lambda: DiLoCoAverager([nn.Parameter(torch.ones(3))]).load_state_dict(state)),
        (ValueError, lambda: DiLoCoAverager([("a", *one()), ("a", *one())])),
    ):
        with pytest.raises(error) as raised:
            make()
        texts.append(str(raised.value))
    return texts


def test_bad_arguments_are_named() -> None:
    texts = run_ranks(_bad_arguments, 1)[0]
    said = [
        "requires_grad",
        "requires_grad",
        "got 0",
        "got 2",
        "got 3",
        "got 1.0",
        "new and hold exactly the 1",
    ]
    for text, part in zip(texts, said, strict=False):
        assert part in text
    assert "1 are unknown" in texts[10]
    assert "1 are missing" in texts[11]


def _close_to_uncompressed(rank: int, world_size: int, codec: str) -> float:
    found = []
    for name in (None, codec):
        model = _wide_model()
        averager = DiLoCoAverager(model, period=3, codec=name)
        _train(model, torch.optim.SGD(model.parameters(), lr=0.05), averager, rank, range(19))
        found.append(_parameters(model))
        flat = torch.cat([p.flatten() for p in averager.outer_parameters().values()])
        every = [torch.empty_like(flat) for _ in range(world_size)]
        dist.all_gather(every, flat)
        assert all(torch.equal(every[0], other) for other in every)
    moved = max((a - b).abs().max().item() for a, b in zip(found[0], _parameters(_wide_model()), strict=True))
    return max((a - b).abs().max().item() for a, b in zip(*found, strict=True)) / moved


def _wide_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 256), nn.Tanh(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 3))


@pytest.mark.parametrize(
    ("codec", "most"), [("int8", 0.02), ("int4", 0.2), ("sign", 1.0), ("topk:0.05", 1.0)]
)
def test_codecs_stay_close_and_bit_identical(codec: str, most: float) -> None:
    assert 0 < max(run_ranks(partial(_close_to_uncompressed, codec=codec), 3)) < most


@pytest.mark.parametrize(
    "options",
    [{"codec": "int4"}, {"codec": "int8", "overlap_steps": 2, "num_fragments": 3}],
    ids=str,
)
def test_resume_with_a_codec_is_bit_identical(options: dict[str, Any]) -> None:
    assert run_ranks(partial(_state_of_resume, options=options), 2) == [[True] * 3] * 2


def _nothing_is_lost(rank: int, world_size: int) -> float:
    """Return the largest part of the summed movement that neither the outer parameters nor residuals hold."""
    torch.manual_seed(rank)
    param = nn.Parameter(torch.zeros(3000))
    averager = DiLoCoAverager([param], plain_average, period=1, codec="int4")
    moved = torch.zeros(3000)
    for _ in range(12):
        move = torch.randn(3000)
        moved += move
        with torch.no_grad():
            param.add_(move)
        averager.average_parameters()
    dist.all_reduce(moved)
    kept = torch.zeros(3000)
    for name, entry in averager.state_dict()["exchange"]["tensors"].items():
        assert name == "0"
        assert "owner_residual" not in entry  # two ranks gather: there is no second rounding
        kept += entry["residual"]
    dist.all_reduce(kept)
    return (world_size * averager.outer_parameters()["0"] - kept - moved).abs().max().item()


def test_with_error_feedback_nothing_is_lost() -> None:
    assert max(run_ranks(_nothing_is_lost, 2)) < 1e-3


def _one_rank_not_finite_with_codec(rank: int, world_size: int) -> list[bool]:
    param = nn.Parameter(torch.zeros(4000))
    averager = DiLoCoAverager([param], plain_average, period=2, codec="int8")
    finite = []
    for step in range(6):
        with torch.no_grad():
            param.add_(torch.randn(4000))
            if rank == 1 and step == 2:
                param[7] = float("inf")
        averager.average_parameters()
        finite.append(bool(torch.isfinite(param).all()))
    assert averager.dropped_exchanges == 1
    assert torch.isfinite(averager.state_dict()["exchange"]["tensors"]["0"]["residual"]).all()
    return finite


def test_a_codec_forgets_what_is_not_finite() -> None:
    assert run_ranks(_one_rank_not_finite_with_codec, 3) == [[True] * 6] * 3


def _save_with_codec(rank: int, world_size: int) -> bytes:
    model = _wide_model()
    averager = DiLoCoAverager(model, period=2, codec="int4")
    _train(model, torch.optim.SGD(model.parameters(), lr=0.1), averager, rank, range(5))
    stream = io.BytesIO()
    torch.save(averager.state_dict(), stream)
    return stream.getvalue()


def _load_with_codec(rank: int, world_size: int, saved: list[bytes]) -> float:
    states = [torch.load(io.BytesIO(one), weights_only=True) for one in saved]
    model = _wide_model()
    averager = DiLoCoAverager(model, period=2, codec="int4")
    averager.load_state_dict(states)
    own = averager.state_dict()["exchange"]["tensors"].get("2.weight")  # a rank that is new has none
    kept = torch.zeros(64 * 256) if own is None else own["residual"].clone()
    dist.all_reduce(kept)
    before = torch.zeros(64 * 256)
    owned = []
    for entry in (state["exchange"]["tensors"]["2.weight"] for state in states):
        before += entry["residual"]
        owned.append(entry.get("owner_residual", torch.zeros(0)))
    if len(states) > 2:  # two ranks gather and encode no mean
        before += len(states) * torch.cat(owned)  # what was lost in encoding the mean counts for every rank
    assert before.any()
    _train(model, torch.optim.SGD(model.parameters(), lr=0.1), averager, rank, range(5, 9))
    return (kept - before).abs().max().item()


@pytest.mark.parametrize(("old", "new"), [(2, 3), (3, 2)])
def test_a_changed_world_size_keeps_the_sum_of_residuals(old: int, new: int) -> None:
    saved = run_ranks(_save_with_codec, old)
    assert max(run_ranks(partial(_load_with_codec, saved=saved), new)) < 1e-6


def _beside_ddp(rank: int, world_size: int, codec: str | None) -> bool:
    """Outer exchanges in flight while DDP and the user reduce on the same group, at unequal speeds."""
    ddp = nn.parallel.DistributedDataParallel(_wide_model(), bucket_cap_mb=0.01)
    averager = DiLoCoAverager(ddp, period=4, codec=codec, num_fragments=4, overlap_steps=3)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.05), averager)
    for step in range(80):
        inputs, targets = _batch(rank, step)
        optimizer.zero_grad()
        if (step + rank) % 7 == 0:
            time.sleep(0.003)
        loss = nn.functional.mse_loss(ddp(inputs), targets)
        loss.backward()
        optimizer.step()
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == world_size
    flat = torch.cat([p.flatten() for p in averager.outer_parameters().values()])
    every = [torch.empty_like(flat) for _ in range(world_size)]
    dist.all_gather(every, flat)
    return all(torch.equal(every[0], other) for other in every) and bool(torch.isfinite(flat).all())


@pytest.mark.parametrize("codec", [None, "int8"])
def test_exchanges_in_the_background_mix_with_no_other_collective(codec: str | None) -> None:
    assert run_ranks(partial(_beside_ddp, codec=codec), 3) == [True] * 3


def _documented(rank: int, world_size: int, code: str) -> str:
    names: dict[str, Any] = {}
    exec(code, names)
    return " ".join(names["trace"])


def test_the_documented_example_prints_what_the_document_says() -> None:
    text = (Path(__file__).parents[2] / "docs" / "local_sgd.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "trace" in block)
    printed = run_ranks(partial(_documented, code=code), 2)
    for rank, trace in enumerate(printed):
        assert f"rank {rank}: {trace}\n" in text
