"""PowerSGD on real ranks: the conformance suite over every layout, and what only this hook has."""

import contextlib
import copy
import logging
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tensorplay as tp
from tensorplay.compression import low_rank_state
from tensorplay.compression.collective import traffic
from tensorplay.compression.driver import lane_for
from tensorplay.distributed.algorithms import Join
from tensorplay.distributed.algorithms.ddp_comm_hooks import register_ddp_comm_hook
from tensorplay.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_wrapper,
    fp16_compress_wrapper,
)
from tensorplay.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    batched_powerSGD_hook,
    powerSGD_hook,
)
from tensorplay.testing import run_ranks
from tests.conformance import suite
from tests.conformance.suite import CELLS, Cell, Net, batch, same_everywhere

DDP = tp.nn.parallel.DistributedDataParallel

#: Hook and settings of every form. The small nets of the suite are worth compressing at a rate of 1.
FORMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "layerwise": (powerSGD_hook, {"matrix_approximation_rank": 2}),
    "layerwise batched": (powerSGD_hook, {"batch_tensors_with_same_shape": True}),
    "same shape": (batched_powerSGD_hook, {"matrix_approximation_rank": 2}),
    "bucket": (batched_powerSGD_hook, {"batched_layout": "bucket"}),
}
FORM = pytest.mark.parametrize("form", FORMS)


def make(form: str, **more: Any) -> tuple[Any, PowerSGDState]:
    hook, options = FORMS[form]
    return hook, PowerSGDState(**{"start_powerSGD_iter": 0, "min_compression_rate": 1, **options, **more})


def conform(rank: int, world_size: int, function: Callable[..., Any], form: str, **arguments: Any) -> Any:
    """A function of the conformance suite with a PowerSGD hook."""
    with mock.patch.object(suite, "make_hook", lambda name, state=None: make(name)):
        return function(rank, world_size, name=form, **arguments)


@FORM
@pytest.mark.parametrize("cell", CELLS[1:6], ids=str)
def test_replicas_stay_equal(form: str, cell: Cell) -> None:
    run_ranks(partial(conform, function=suite.train, form=form, cell=cell, steps=20), cell.world_size)


@FORM
def test_nothing_is_lost(form: str) -> None:
    for world_size, many_buckets in ((2, False), (3, True)):
        call = partial(conform, function=suite.account, form=form, many_buckets=many_buckets, steps=30)
        assert max(run_ranks(call, world_size)) < 1e-5


@FORM
def test_a_bad_step_is_seen_everywhere_and_forgotten(form: str) -> None:
    for value in (float("inf"), float("nan")):
        call = partial(conform, function=suite.poison, form=form, many_buckets=True, value=value)
        run_ranks(call, 3)


@FORM
def test_every_kind_of_parameter(form: str) -> None:
    for world_size, many_buckets in ((2, True), (3, False)):
        call = partial(conform, function=suite.every_kind, form=form, many_buckets=many_buckets, close=False)
        run_ranks(call, world_size)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "bucket"])
def test_resume_is_bit_identical(form: str) -> None:
    for world_size, many_buckets in ((2, False), (3, True)):
        run_ranks(partial(conform, function=suite.resume, form=form, many_buckets=many_buckets), world_size)


def resume_bucket(rank: int, world_size: int) -> None:
    """A whole bucket as a matrix: DDP's first pass has other buckets, so another matrix; nothing is lost yet."""
    first, second = make("bucket"), make("bucket")
    given = torch.zeros(())
    got = torch.zeros(())
    for hook, state in (first, second):
        ddp = DDP(Net(), bucket_cap_mb=0.001)
        ddp.register_comm_hook(state, hook)
        if state is second[1]:
            state.load_state_dict(first[1].state_dict())
        for step in range(3):
            x = batch(rank, step, torch.float32)
            weight = ddp.module.first.weight
            given = given + torch.autograd.grad(ddp.module(x).square().mean(), weight)[0]
            ddp.zero_grad()
            ddp(x).square().mean().backward()
            got = got + weight.grad
    owed = second[1].memory.of(weight)["residual"].view(weight.shape)
    left = given - owed
    dist.all_reduce(left)
    torch.testing.assert_close(left, world_size * got, rtol=1e-4, atol=1e-5)


def test_resume_of_whole_buckets_loses_nothing() -> None:
    run_ranks(resume_bucket, 2)


def step_bytes(rank: int, world_size: int, wrapper: Any, form: str) -> tuple[int, int, int]:
    """Bytes of one step, sent and received, and as counted from outside."""
    with suite.counted_bytes() as counted:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 256))
        hook, state = make(form, matrix_approximation_rank=4, min_compression_rate=2)
        ddp = DDP(model)
        ddp.register_comm_hook(state, wrapper(hook) if wrapper else hook)
        for _ in range(3):
            sent, received = traffic.sent_bytes, traffic.received_bytes
            outside = counted()[0]
            ddp(torch.randn(4, 64)).sum().backward()
        return traffic.sent_bytes - sent, traffic.received_bytes - received, counted()[0] - outside


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_follow_the_formula(world_size: int) -> None:
    plain = 3 * 256  # biases
    for form, factors in (
        ("layerwise", 4 * (64 + 256 + 4 * 256)),
        ("layerwise batched", 4 * (64 + 256 + 4 * 256)),
        ("same shape", 4 * (256 + 64 + 512 + 256)),
        ("bucket", None),
    ):
        for wrapper, width in ((None, 4), (fp16_compress_wrapper, 2), (bf16_compress_wrapper, 2)):
            if factors is None:  # 148,224 values: 385 columns, all rows needed
                elements = 4 * 2 * 385 + 6
            else:
                elements = factors + plain + 3
            expected = 2 * (world_size - 1) / world_size * width * elements
            for sent, received, outside in run_ranks(
                partial(step_bytes, wrapper=wrapper, form=form), world_size
            ):
                assert sent == outside
                assert sent == pytest.approx(expected, rel=0.02)
                assert received == pytest.approx(expected, rel=0.02)


def wrapped(rank: int, world_size: int, wrapper: Any, scale: float) -> tuple[float, float]:
    """Mean gradients with and without the wrapper, relative difference of their sums over 8 steps."""
    sums = []
    for wrap in (wrapper, lambda hook: hook):
        torch.manual_seed(0)
        ddp = DDP(nn.Linear(256, 256))
        _, state = make("layerwise", matrix_approximation_rank=4)
        ddp.register_comm_hook(state, wrap(powerSGD_hook))
        total = [torch.zeros_like(p) for p in ddp.parameters()]
        for step in range(8):
            x = torch.randn(8, 256, generator=torch.Generator().manual_seed(10 * step + rank))
            ddp.zero_grad()
            (ddp(x).square().mean() * scale).backward()
            for t, p in zip(total, ddp.parameters(), strict=True):
                assert p.grad is not None
                assert p.grad.dtype == torch.float32
                assert torch.isfinite(p.grad).all()
                t.add_(p.grad)
            same_everywhere([p.grad for p in ddp.parameters() if p.grad is not None], f"step {step}")
        assert state.memory.of(ddp.module.weight)["residual"].dtype == torch.float32
        sums.append(total)
    weight, bias = (float((a - b).norm() / b.norm()) for a, b in zip(*sums, strict=True))
    return weight, bias


@pytest.mark.parametrize("wrapper", [fp16_compress_wrapper, bf16_compress_wrapper])
@pytest.mark.parametrize("scale", [1e7, 1e-5])
def test_wrappers_keep_large_and_small_gradients(wrapper: Any, scale: float) -> None:
    for weight, bias in run_ranks(partial(wrapped, wrapper=wrapper, scale=scale), 2):
        assert weight < 0.05
        assert bias < 0.01


def accumulate(rank: int, world_size: int, explicit: bool) -> list[int]:
    model = Net()
    ddp = DDP(model)
    _, state = make("layerwise", start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook)
    seen = []
    for step in range(3):
        for micro in range(2):  # both exchange: no no_sync
            ddp(batch(rank, 2 * step + micro, torch.float32)).sum().backward()
        if explicit:
            state.step()
        seen.append(state.iter)
    before = state.compression_stats()[1]
    assert before == (2 if explicit else 4) * sum(p.numel() for p in model.parameters())
    return seen


def test_steps_are_passes_unless_counted() -> None:
    assert run_ranks(partial(accumulate, explicit=False), 2)[0] == [2, 4, 6]
    assert run_ranks(partial(accumulate, explicit=True), 2)[0] == [1, 2, 3]


def start_at(rank: int, world_size: int, start: int) -> list[bool]:
    """Whether each step's result was the plain mean."""
    plain = []
    ddp = DDP(Net(), bucket_cap_mb=0.001)
    _, state = make("layerwise", start_powerSGD_iter=start)
    ddp.register_comm_hook(state, powerSGD_hook)
    for step in range(4):
        x = batch(rank, step, torch.float32)
        ddp.zero_grad()
        mean = torch.autograd.grad(ddp.module(x).square().mean(), list(ddp.parameters()))
        ddp(x).square().mean().backward()
        exact = True
        for p, g in zip(ddp.parameters(), mean, strict=True):
            dist.all_reduce(g)
            assert p.grad is not None
            exact = exact and torch.allclose(p.grad, g / world_size, rtol=1e-4, atol=1e-7)
        plain.append(exact)
    return plain


@pytest.mark.parametrize("start", [0, 1, 3])
def test_the_start_is_where_it_was_asked_for(start: int) -> None:
    for plain in run_ranks(partial(start_at, start=start), 2):
        assert plain == [step < start for step in range(4)]


def subgroup(rank: int, world_size: int, form: str) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    ddp = DDP(Net(), process_group=mine)
    hook, state = make(form)
    ddp.register_comm_hook(state, hook)
    for step in range(4):
        ddp.zero_grad()
        ddp(batch(rank, step, torch.float32)).square().mean().backward()
    assert state.process_group is mine
    flat = torch.cat([p.grad.reshape(-1) for p in ddp.parameters() if p.grad is not None])
    seen = [torch.empty_like(flat) for _ in range(world_size)]
    dist.all_gather(seen, flat)
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[2], seen[3])
    assert not torch.equal(seen[0], seen[2])


def test_a_subgroup() -> None:
    run_ranks(partial(subgroup, form="layerwise"), 4)


def joined(rank: int, world_size: int, by_active: bool) -> float:
    """Uneven inputs: rank 0 has 3 batches, the others more; I2 in units of the ranks that took part."""
    model = Net()
    ddp = DDP(model)
    _, state = make("layerwise", process_group=None)
    ddp.register_comm_hook(state, powerSGD_hook)
    names = dict(model.named_parameters())
    given = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in names.items()}
    got = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in names.items()}
    batches = 3 + 2 * (rank > 0)
    with Join([ddp], divide_by_initial_world_size=not by_active):
        for step in range(batches):
            x = batch(rank, step, torch.float32)
            for n, g in zip(
                names,
                torch.autograd.grad((model(x) - x[:, :1]).square().mean(), list(names.values())),
                strict=True,
            ):
                given[n] += g.double()
            ddp.zero_grad()
            (ddp(x) - x[:, :1]).square().mean().backward()
            divisor = world_size - 1 if by_active and step >= 3 else world_size
            for n, p in names.items():
                assert p.grad is not None
                got[n] += divisor * p.grad.double()
    owed = suite._residuals(state, names, world_size)
    worst = 0.0
    for n in names:
        dist.all_reduce(given[n])
        if rank == world_size - 1:  # had all batches, so saw all results
            left = given[n] - got[n] - owed[n].reshape(got[n].shape)
            worst = max(worst, float(left.norm() / given[n].norm()))
    return worst


@pytest.mark.parametrize("by_active", [False, True])
def test_join_keeps_the_account(by_active: bool) -> None:
    assert max(run_ranks(partial(joined, by_active=by_active), 3)) < 1e-5


def disagree(rank: int, world_size: int, options: list[dict[str, Any]]) -> str:
    ddp = DDP(Net())
    _, state = make("layerwise", **options[rank])
    if "start_powerSGD_iter" in options[rank]:
        state.iteration = 5 + rank
    ddp.register_comm_hook(state, powerSGD_hook)
    try:
        ddp(batch(rank, 0, torch.float32)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            [{"matrix_approximation_rank": r, "random_seed": r} for r in (1, 2)],
            r"disagree on random_seed \(rank 0: 1, rank 1: 2\); layout \(rank",
        ),
        ([{"start_powerSGD_iter": 6}] * 2, r"step \(rank 0: 5, rank 1: 6\)"),
    ],
)
def test_ranks_that_disagree_say_so(options: list[dict[str, Any]], text: str) -> None:
    for seen in run_ranks(partial(disagree, options=options), 2):
        assert "the ranks disagree on" in seen
        assert re.search(text, seen), seen


def generators_untouched(rank: int, world_size: int) -> None:
    ddp = DDP(Net())
    _, state = make("layerwise", warm_start=False)
    ddp.register_comm_hook(state, powerSGD_hook)
    x = batch(rank, 0, torch.float32)
    before = torch.get_rng_state()
    ddp(x).sum().backward()
    assert torch.equal(before, torch.get_rng_state())


def test_the_users_generator_is_untouched() -> None:
    run_ranks(generators_untouched, 2)


def scaled(rank: int, world_size: int, form: str) -> None:
    """GradScaler: an inf on one rank skips the step on all, and training goes on."""
    model = Net()
    ddp = DDP(model, bucket_cap_mb=0.001)
    hook, state = make(form)
    ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(6):
        x = batch(rank, step, torch.float32)
        if step == 3 and rank == 1:
            x[0, 0] = float("inf")
        optimizer.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale((ddp(x) - 1).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert moved == (step != 3)
        same_everywhere(list(model.parameters()), f"step {step}")
    assert scaler.get_scale() == 512.0


@FORM
def test_grad_scaler(form: str) -> None:
    run_ranks(partial(scaled, form=form), 2)


def sparse(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(40, 32, sparse=True), nn.Linear(32, 32))
    ddp = DDP(model)
    _, state = make("layerwise")
    ddp.register_comm_hook(state, powerSGD_hook)
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.tensor([rank, 5])).sum().backward()
    gradient = model[0].weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    dense = gradient.to_dense()
    assert dense[5].abs().sum() > 0
    assert torch.allclose(dense[0] * world_size, dense[1] * world_size)
    same_everywhere([dense], "sparse")


def test_sparse_gradients_travel_as_they_are() -> None:
    run_ranks(sparse, 2)


def kept(rank: int, world_size: int) -> None:
    """pickle and deepcopy keep everything but the group; a bare state on plain torch DDP can't be saved before bind."""
    ddp = DDP(Net())
    _, state = make("layerwise", process_group=dist.group.WORLD)
    ddp.register_comm_hook(state, powerSGD_hook)
    for step in range(3):
        ddp(batch(rank, step, torch.float32)).sum().backward()
    for other in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state)):
        assert other.iter == 3
        assert other.matrix_approximation_rank == 2
        assert other.compression_stats() == state.compression_stats()
        for name, entry in state.memory.by_name().items():
            for kind, tensor in entry.items():
                assert torch.equal(other.memory.by_name()[name][kind], tensor)
        other.process_group = dist.group.WORLD
        assert other.process_group is dist.group.WORLD
    bare = PowerSGDState(start_powerSGD_iter=0, min_compression_rate=1)
    plain = nn.parallel.DistributedDataParallel(Net())
    plain.register_comm_hook(bare, powerSGD_hook)
    plain(batch(rank, 0, torch.float32)).sum().backward()
    with pytest.raises(RuntimeError, match="bind"):
        bare.state_dict()
    bare.bind(plain)
    assert set(bare.state_dict()["tensors"]) == {"first.weight", "second.weight"}


def test_pickle_deepcopy_and_names() -> None:
    run_ranks(kept, 2)


def resized(rank: int, world_size: int, states: list[Any]) -> dict[str, torch.Tensor]:
    """Load the states of another number of ranks; returns the residuals, and trains a step to see that it goes on."""
    ddp = DDP(Net())
    _, state = make("layerwise")
    ddp.register_comm_hook(state, powerSGD_hook)
    state.load_state_dict(states)
    loaded = {n: e["residual"].clone() for n, e in state.memory.by_name().items() if "residual" in e}
    factors = {n: e["q"].clone() for n, e in state.memory.by_name().items() if "q" in e}
    for name, entry in states[0]["tensors"].items():
        assert torch.equal(factors[name], entry["q"])
    with contextlib.suppress(KeyError):
        same_everywhere(list(factors.values()), "factors")
    assert state.iter == 3
    ddp(batch(rank, 3, torch.float32)).sum().backward()
    same_everywhere([p.grad for p in ddp.parameters() if p.grad is not None], "after loading")
    return loaded


def saved(rank: int, world_size: int) -> Any:
    ddp = DDP(Net())
    _, state = make("layerwise")
    ddp.register_comm_hook(state, powerSGD_hook)
    for step in range(3):
        ddp(batch(rank, step, torch.float32)).sum().backward()
    return state.state_dict()


@pytest.mark.parametrize("new_size", [1, 2, 4])
def test_another_number_of_ranks_owes_the_same(new_size: int) -> None:
    states = run_ranks(saved, 3)
    loaded = run_ranks(partial(resized, states=states), new_size)
    for name in states[0]["tensors"]:
        before = sum(s["tensors"][name]["residual"].double() for s in states)
        after = sum(one[name].double() for one in loaded if name in one)
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-6)


def logged(rank: int, world_size: int) -> list[str]:
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("tensorplay")
    logger.addHandler(handler := Collect())
    logger.setLevel(logging.INFO)
    try:
        ddp = DDP(Net(), bucket_cap_mb=0.001)
        _, state = make("layerwise", compression_stats_logging_frequency=2)
        ddp.register_comm_hook(state, powerSGD_hook)
        for step in range(5):
            ddp(batch(rank, step, torch.float32)).sum().backward()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return lines


def test_statistics_are_logged_as_often_as_asked() -> None:
    lines = run_ranks(logged, 1)[0]
    assert [line.split(":")[0] for line in lines] == [f"PowerSGD at step {step}" for step in (0, 2, 4)]


def as_on_a_device(rank: int, world_size: int, form: str) -> None:
    """The exchange in the caller's thread on the group itself, without branches on values: a device's route, on CPU."""
    results = []
    for inline in (False, True):
        ddp = DDP(Net(), bucket_cap_mb=0.001)
        hook, state = make(form)
        terms = low_rank_state.LowRankTerms
        if inline:
            group = state.process_group
            state.lane = lambda bucket: lane_for(group, "inline", bucket.buffer.device, inline=True)  # noqa: B023
            terms = partial(terms, branch_free=True)
        ddp.register_comm_hook(state, hook)
        with mock.patch.object(low_rank_state, "LowRankTerms", terms):
            for step in range(4):
                ddp.zero_grad()
                ddp(batch(rank, step, torch.float32)).square().mean().backward()
        results.append([p.grad.clone() for p in ddp.parameters() if p.grad is not None])
        same_everywhere(results[-1], "gradients")
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


@FORM
def test_the_route_of_devices(form: str) -> None:
    run_ranks(partial(as_on_a_device, form=form), 2)


def wrong_state(rank: int, world_size: int) -> None:
    for hook in (powerSGD_hook, batched_powerSGD_hook):
        ddp = DDP(Net())
        register_ddp_comm_hook(hook, ddp, state=3)
        with pytest.raises((TypeError, RuntimeError), match="needs a PowerSGDState"):
            ddp(batch(rank, 0, torch.float32)).sum().backward()


def test_a_wrong_state_is_named() -> None:
    run_ranks(wrong_state, 1)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"matrix_approximation_rank": 0}, ValueError, "matrix_approximation_rank must be >= 1, got 0"),
        ({"matrix_approximation_rank": 1.5}, TypeError, "matrix_approximation_rank must be an int, got 1.5"),
        ({"start_powerSGD_iter": -1}, ValueError, "start_powerSGD_iter must be >= 0, got -1"),
        ({"min_compression_rate": 0}, ValueError, "min_compression_rate must be finite and > 0, got 0"),
        ({"min_compression_rate": float("nan")}, ValueError, "min_compression_rate must be finite"),
        ({"min_compression_rate": "2"}, TypeError, "min_compression_rate must be a number, got '2'"),
        ({"use_error_feedback": 1}, TypeError, "use_error_feedback must be True or False, got 1"),
        ({"warm_start": None}, TypeError, "warm_start must be True or False, got None"),
        ({"orthogonalization_epsilon": -1e-8}, ValueError, "orthogonalization_epsilon must be finite and >= 0"),
        ({"random_seed": 2**32}, ValueError, "random_seed must be <= 4294967295, got 4294967296"),
        ({"compression_stats_logging_frequency": 0}, ValueError, "must be >= 1, got 0"),
        ({"batch_tensors_with_same_shape": "no"}, TypeError, "must be True or False, got 'no'"),
        ({"batched_layout": "square"}, ValueError, "batched_layout must be one of same_shape, bucket, got 'square'"),
        ({"process_group": 3}, TypeError, "process_group must be a ProcessGroup or None, got int"),
    ],
)  # fmt: skip
def test_mistakes_are_named(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        PowerSGDState(**options)
