"""Join on real ranks: schedules worked out by hand, DDP's options, phases, other joinables, refusals."""

import contextlib
import io
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.algorithms.join as torch_join
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tensorplay.compression.participation import divisor
from tensorplay.distributed.algorithms.join import Join, Joinable, JoinHook
from tensorplay.nn.parallel.distributed import DistributedDataParallel as OwnDistributedDataParallel
from tensorplay.testing import RankFailure, run_ranks
from tests.conformance.uneven import (
    UNEVEN_BATCHES,
    VARIANTS,
    check_alike,
    check_uneven,
    flat,
    sum_of_ranks,
    train,
)

# A schedule by hand: the gradient of `w * x` is x, and each step subtracts the mean of the ranks' gradients from w.
# rank -> its values;   means over all ranks;   means over the ranks that have data
SCHEDULES: list[tuple[tuple[tuple[float, ...], ...], list[float], list[float]]] = [
    (((2, 4), (6, 8, 10, 12)), [4, 6, 5, 6], [4, 6, 10, 12]),
    (((3,), (6, 9), (9, 3, 12, 15, 6)), [6, 4, 4, 5, 2], [6, 6, 12, 15, 6]),
    (((), (6, 8, 10)), [3, 4, 5], [6, 8, 10]),
    (((4, 8), (8,), (12, 4, 16), (16, 12, 4)), [10, 6, 5], [10, 8, 10]),
]


def mean_of_those_with_data(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    count = divisor(group)
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0].div_(count))


def hand_schedule(
    rank: int, world_size: int, values: Any, by_world_size: bool, hooked: bool
) -> tuple[list[float], float, float | None, float]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    ddp = DistributedDataParallel(model)
    if hooked:
        ddp.register_comm_hook(None, mean_of_those_with_data)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    means: list[float] = []

    def step() -> None:
        assert model.weight.grad is not None
        means.append(model.weight.grad.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    with Join([ddp], divide_by_initial_world_size=by_world_size) as join:
        join.shadow(step, phase="backward")
        for value in values[rank]:
            ddp(torch.tensor([[float(value)]])).sum().backward()
            step()
    return means, model.weight.item(), divisor(None), sum_of_ranks(rank)


@pytest.mark.parametrize("hooked", [False, True], ids=["no hook", "hook"])
@pytest.mark.parametrize("by_world_size", [True, False], ids=["world", "active"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: str([len(x) for x in schedule[0]]))
def test_means_follow_the_schedule_worked_out_by_hand(
    schedule: Any, by_world_size: bool, hooked: bool
) -> None:
    values, by_world, by_active = schedule
    expected = by_world if by_world_size else by_active
    if hooked and by_world_size:
        expected = by_world
    world_size = len(values)
    results = run_ranks(
        partial(hand_schedule, values=values, by_world_size=by_world_size, hooked=hooked), world_size
    )
    for means, weight, count, total in results:
        assert means == pytest.approx(expected, rel=1e-6)
        assert weight == pytest.approx(-sum(expected), rel=1e-6)
        assert count == world_size
        assert total == 10 * world_size + sum(range(world_size))


@pytest.mark.parametrize("batches", UNEVEN_BATCHES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_ddp_option_equals_training_with_idle_gradients_of_zero(
    variant: str, batches: tuple[int, ...]
) -> None:
    check_uneven(None, batches, variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_ddp_option_keeps_replicas_alike_when_dividing_by_active_ranks(variant: str) -> None:
    batches = (1, 2, 5)
    run = partial(train, batches=batches, variant=variant, divide_by_initial_world_size=False)
    check_alike(run_ranks(run, 3), batches, variant)


def with_hook(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, mean_of_those_with_data)


@pytest.mark.parametrize("variant", ["plain", "buckets", "no_sync"])
def test_a_hook_that_asks_for_the_divisor_gets_the_ranks_with_data(variant: str) -> None:
    check_uneven(with_hook, (1, 2, 5), variant, divide_by_initial_world_size=False)


def even(rank: int, world_size: int) -> bool:
    result = train(rank, world_size, (3,) * world_size)
    return bool(result["left_over"] == 21 and len(result["history"]) == 3)


def test_even_inputs_need_no_shadow() -> None:
    assert run_ranks(even, 2) == [True, True]


class Kinds(nn.Module):
    """A parameter of each kind DDP lays out differently."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.scalar_weight = nn.Parameter(torch.tensor(0.5))
        self.empty_weight = nn.Parameter(torch.zeros(0))
        self.complex_weight = nn.Parameter(torch.randn(2, 3, dtype=torch.complex64))
        self.half_weight = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.convolution(x).square().mean() * self.scalar_weight + self.empty_weight.sum()
        return (
            y
            + (self.complex_weight.abs().square() * x.mean()).sum()
            + (self.half_weight.float() * x.std()).sum()
        )


def gradients_of_every_kind(
    rank: int, world_size: int, batches: tuple[int, int]
) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
    ddp = DistributedDataParallel(Kinds())
    with Join([ddp]):
        for iteration in range(batches[rank]):
            ddp.zero_grad()
            torch.manual_seed(10 * iteration + rank)
            ddp(torch.randn(2, 3, 6, 6)).backward()
    return [(p.grad.resolve_conj(), p.grad.stride()) for p in ddp.module.parameters() if p.grad is not None]


@pytest.mark.parametrize("batches", [(0, 1), (0, 3), (1, 3)], ids=str)
def test_a_rank_without_data_holds_the_averaged_gradient_of_every_parameter_kind(batches: Any) -> None:
    first, second = run_ranks(partial(gradients_of_every_kind, batches=batches), 2)
    assert len(first) == 6
    for (got, got_stride), (expected, expected_stride) in zip(first, second, strict=True):
        assert torch.equal(got, expected)
        assert got_stride == expected_stride


def forward_without_the_others(rank: int, world_size: int) -> float:
    ddp = DistributedDataParallel(nn.Linear(2, 1))
    message = torch.zeros(1)
    with Join([ddp], divide_by_initial_world_size=False):
        if rank == 1:
            dist.recv(message, src=0)  # comes only after rank 0's whole forward
        loss = ddp(torch.ones(1, 2)).sum()
        if rank == 0:
            dist.send(message + 1, dst=1)
        loss.backward()
    return sum_of_ranks(rank)


def test_the_presence_check_does_not_make_a_forward_wait() -> None:
    assert run_ranks(forward_without_the_others, 2) == [21.0, 21.0]


def evaluation_inside(rank: int, world_size: int, batches: tuple[int, ...], buffers: bool) -> tuple[Any, ...]:
    norm: nn.Module = nn.BatchNorm1d(4) if buffers else nn.Identity()
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(2, 4), norm, nn.Linear(4, 1)), bucket_cap_mb=1e-4)
    seen = []
    with Join([ddp]) as join:
        join.shadow(lambda: seen.append(join.synchronizes), phase="end")
        for iteration in range(batches[rank]):
            with torch.no_grad():
                ddp(torch.ones(3, 2))
            ddp(torch.full((3, 2), float(iteration))).sum().backward()
    return flat(ddp.parameters()), ddp.require_backward_grad_sync, seen, sum_of_ranks(rank)


@pytest.mark.parametrize("buffers", [False, True], ids=["no buffers", "buffers"])
def test_a_forward_without_gradients_is_repeated_without_a_backward(buffers: bool) -> None:
    results = run_ranks(partial(evaluation_inside, batches=(1, 3), buffers=buffers), 2)
    for parameters, synchronizes, _, total in results:
        assert torch.equal(parameters, results[1][0])
        assert synchronizes
        assert total == 21
    assert results[0][2] == [False, True, False, True]
    assert results[1][2] == []


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(5, 3, sparse=True)
        self.layer = nn.Linear(3, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(rows)).square().mean()


def with_sparse_gradients(
    rank: int, world_size: int, batches: tuple[int, ...], mode: str, options: dict[str, bool]
) -> tuple[torch.Tensor, list[torch.Tensor], float]:
    ddp = OwnDistributedDataParallel(Sparse(), bucket_cap_mb=1e-4, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    seen = []

    def step() -> None:
        optimizer.step()
        seen.append(flat(p.grad.to_dense() for p in ddp.parameters()))
        optimizer.zero_grad()

    def backward(iteration: int, scale: float) -> None:
        (ddp(torch.tensor([rank, iteration])) * scale).backward()
        step()

    if mode == "join":
        with Join([ddp]) as join:
            join.shadow(step, phase="backward")
            for iteration in range(batches[rank]):
                backward(iteration, 1.0)
    else:
        for iteration in range(max(batches)):
            backward(iteration, float(iteration < batches[rank]))
    return flat(ddp.parameters()), seen, sum_of_ranks(rank)


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str)
@pytest.mark.parametrize("batches", [(2, 4), (1, 0, 3), (0, 3)], ids=str)
def test_sparse_gradients_join_with_our_ddp(batches: tuple[int, ...], options: dict[str, bool]) -> None:
    run = partial(with_sparse_gradients, batches=batches, options=options)
    joined = run_ranks(partial(run, mode="join"), len(batches))
    zeros = run_ranks(partial(run, mode="zeros"), len(batches))
    for parameters, seen, total in joined:
        assert torch.equal(parameters, zeros[0][0])
        assert total == 10 * len(batches) + sum(range(len(batches)))
        assert len(seen) == max(batches)
        for got, expected in zip(seen, zeros[0][1], strict=True):
            assert torch.equal(got, expected)


# Phases and other joinables


def communicating_loop(rank: int, world_size: int, batches: tuple[int, ...]) -> dict[str, Any]:
    """Collectives of the user's own before, after and beyond the backward; each sums what it says."""
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    totals: dict[str, list[float]] = {"loss": [], "clip": [], "metric": []}

    def add(name: str, value: float) -> torch.Tensor:
        total = torch.tensor([value])
        dist.all_reduce(total)
        totals[name].append(total.item())
        return total

    with Join([ddp]) as join:
        join.shadow(lambda: add("metric", 0.0), phase="end")
        join.shadow(lambda: add("clip", 0.0), phase="backward")

        @join.shadow
        def repeat_loss() -> None:
            add("loss", 0.0)

        for iteration in range(batches[rank]):
            output = ddp(torch.ones(1, 1))
            (output / add("loss", 1.0)).sum().backward()
            add("clip", 2.0)
            add("metric", 100.0 + iteration)
    return {**totals, "left_over": sum_of_ranks(rank)}


@pytest.mark.parametrize("batches", [(2, 4), (1, 2, 3)], ids=str)
def test_shadows_meet_the_collectives_of_their_phase(batches: tuple[int, ...]) -> None:
    active = [sum(i < count for count in batches) for i in range(max(batches))]
    for result in run_ranks(partial(communicating_loop, batches=batches), len(batches)):
        assert result["loss"] == [float(n) for n in active]
        assert result["clip"] == [2.0 * n for n in active]
        assert result["metric"] == [n * (100.0 + i) for i, n in enumerate(active)]
        assert result["left_over"] == 10 * len(batches) + sum(range(len(batches)))


class CountHook(torch_join.JoinHook):
    def __init__(self, counter: Any) -> None:
        self.counter = counter

    def main_hook(self) -> None:
        dist.all_reduce(torch.zeros(1))
        self.counter.shadowed += 1

    def post_hook(self, is_last_joiner: bool) -> None:
        self.counter.was_last = is_last_joiner


class TorchCounter(torch_join.Joinable):
    """Written against torch alone: counts the steps of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0
        self.shadowed = 0
        self.was_last: bool | None = None

    def count(self) -> None:
        torch_join.Join.notify_join_context(self)
        one = torch.ones(1)
        dist.all_reduce(one)
        self.total += one.item()

    def join_hook(self, **kwargs: Any) -> torch_join.JoinHook:
        return CountHook(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


class OwnHook(JoinHook):
    def __init__(self, counter: Any) -> None:
        self.counter = counter

    def main_hook(self) -> None:
        dist.all_reduce(torch.zeros(1))
        self.counter.shadowed += 1
        self.counter.blocks.append(type(self.join).__module__ if self.join else None)

    def post_hook(self, is_last_joiner: bool) -> None:
        self.counter.was_last = is_last_joiner


class OwnCounter(Joinable):
    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0
        self.shadowed = 0
        self.was_last: bool | None = None
        self.blocks: list[str | None] = []

    def count(self) -> None:
        Join.notify_join_context(self)
        one = torch.ones(1)
        dist.all_reduce(one)
        self.total += one.item()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return OwnHook(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


COUNTERS: list[Callable[[], Any]] = [TorchCounter, OwnCounter]
JOINS: list[type] = [Join, torch_join.Join]


def counting(rank: int, world_size: int, make: Any, join: Any, model_first: bool | None) -> tuple[Any, ...]:
    batches = (2, 4, 1)
    counter = make()
    ddp = DistributedDataParallel(nn.Linear(1, 1))
    joinables = {None: [counter], True: [ddp, counter], False: [counter, ddp]}[model_first]
    with join(joinables):
        for _ in range(batches[rank]):
            if model_first:
                ddp(torch.ones(1, 1)).sum().backward()
            counter.count()
            if model_first is False:
                ddp(torch.ones(1, 1)).sum().backward()
    return (
        counter.total,
        counter.shadowed,
        counter.was_last,
        getattr(counter, "blocks", []),
        sum_of_ranks(rank),
    )


@pytest.mark.parametrize("model_first", [None, True, False], ids=["alone", "after a DDP", "before a DDP"])
@pytest.mark.parametrize("join", JOINS, ids=["our Join", "torch's Join"])
@pytest.mark.parametrize("make", COUNTERS, ids=["torch's Joinable", "our Joinable"])
def test_joinables_of_torch_and_ours_work_in_either_join(make: Any, join: Any, model_first: Any) -> None:
    results = run_ranks(partial(counting, make=make, join=join, model_first=model_first), 3)
    # iterations have 3, 2, 1, 1 active ranks
    assert [result[0] for result in results] == [3 + 2, 3 + 2 + 1 + 1, 3]
    assert [result[1] for result in results] == [2, 0, 3]
    assert [result[2] for result in results] == [False, True, False]
    assert {result[4] for result in results} == {33.0}
    if make is OwnCounter:
        known = "tensorplay.distributed.algorithms.join" if join is Join else None
        assert results[0][3] == [known, known]


def active_by_counter(rank: int, world_size: int, make: Any) -> list[float]:
    """A DDP that comes second still divides by the ranks with data."""
    counter, ddp = make(), DistributedDataParallel(nn.Linear(1, 1, bias=False))
    means = []
    with Join([counter, ddp], divide_by_initial_world_size=False):
        for value in ((2.0,), (4.0, 6.0))[rank]:
            counter.count()
            ddp.zero_grad()
            ddp(torch.tensor([[value]])).sum().backward()
            means.append(ddp.module.weight.grad.item())
    return means


@pytest.mark.parametrize("make", COUNTERS, ids=["torch's Joinable", "our Joinable"])
def test_the_divisor_reaches_a_ddp_behind_another_joinable(make: Any) -> None:
    assert run_ranks(partial(active_by_counter, make=make), 2) == [[3.0], [3.0, 6.0]]


# Early termination


def terminated(
    rank: int, world_size: int, batches: Any, first: str, catch_inside: bool
) -> tuple[str, int, float]:
    ddp = DistributedDataParallel(nn.Linear(1, 1))
    counter = TorchCounter()
    done = 0
    text = "none"
    try:
        with Join([ddp] if first == "ddp" else [counter], throw_on_early_termination=True):
            for _ in range(batches[rank]):
                try:
                    if first == "ddp":
                        ddp(torch.ones(1, 1)).sum().backward()
                    else:
                        counter.count()
                    done += 1
                except RuntimeError as error:
                    text = str(error)
                    if not catch_inside:
                        raise
    except RuntimeError as error:
        text = str(error)
    return text, done, sum_of_ranks(rank)


@pytest.mark.parametrize("catch_inside", [False, True])
@pytest.mark.parametrize("first", ["ddp", "torch's Joinable"])
@pytest.mark.parametrize(("batches", "named"), [((2, 4), "rank 0 ran"), ((1, 3, 1), "ranks 0, 2 ran")])
def test_early_termination_raises_everywhere_and_names_who_ran_out(
    batches: tuple[int, ...], named: str, first: str, catch_inside: bool
) -> None:
    run = partial(terminated, batches=batches, first=first, catch_inside=catch_inside)
    for text, done, total in run_ranks(run, len(batches)):
        assert text.startswith(named), text
        assert done == min(batches)
        assert total == 10 * len(batches) + sum(range(len(batches)))


def test_early_termination_is_silent_on_even_inputs() -> None:
    run = partial(terminated, batches=(3, 3), first="ddp", catch_inside=False)
    assert run_ranks(run, 2) == [("none", 3, 21.0)] * 2


# What it refuses, and what leaves no trace


def refused(rank: int, world_size: int, case: str) -> str:
    group = dist.new_group([rank]) if case == "groups" else None
    model = DistributedDataParallel(nn.Linear(1, 1))
    try:
        if case == "groups":
            groups = [dist.new_group([0]), dist.new_group([1])]
            other = DistributedDataParallel(nn.Linear(1, 1), process_group=groups[rank])
            Join([model, other])
        elif case == "none":
            Join([])
        elif case == "twice":
            Join([model, model])
        elif case == "optimizer":
            Join([model, torch.optim.SGD(model.parameters())])  # type: ignore[list-item]
        elif case == "argument":
            Join([model], divide_by_world_size=False)
        elif case == "constructor":
            counter = TorchCounter()
            del counter._join_config
            Join([counter])
        elif case == "notify":
            counter = OwnCounter()
            del counter._join_config
            counter.count()
        elif case == "nested":
            with Join([model]), Join([model]):
                pass
        elif case == "reopened":
            join = Join([model])
            with join, join:
                pass
        elif case == "phase":
            Join([model]).shadow(print, phase="middle")  # type: ignore[arg-type]
        elif case == "function":
            Join([model]).shadow(3)  # type: ignore[type-var]
        elif case == "joinable":
            Join([model]).shadow(print, joinable=TorchCounter())
        elif case == "sync batch norm":
            model.module = nn.Sequential(
                nn.Linear(1, 1), nn.SyncBatchNorm(1)
            )  # DDP itself takes it on CUDA only
            Join([model])
        elif case == "sparse":
            Join([DistributedDataParallel(nn.Embedding(3, 2, sparse=True))])
        elif case == "skip":
            Join(
                [
                    DistributedDataParallel(
                        nn.Linear(1, 1), find_unused_parameters=True, skip_all_reduce_unused_params=True
                    )
                ]
            )
        elif case == "python reducer":
            with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
                Join([DistributedDataParallel(nn.Linear(1, 1))])
        elif case == "delayed":
            inner = nn.Linear(1, 1)
            Join(
                [
                    DistributedDataParallel(
                        inner,
                        delay_all_reduce_named_params=[("bias", inner.bias)],
                        param_to_hook_all_reduce=inner.weight,
                    )
                ]
            )
        elif case == "buffer hook":
            model._register_buffer_comm_hook(None, lambda state, buffers: None)
            Join([model])
        return "accepted"
    except (ValueError, TypeError, RuntimeError) as error:
        assert not model._join_config.enable
        return f"{type(error).__name__}: {error}"
    finally:
        del group


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("groups", "ValueError: all joinables of a Join block must use one process group"),
        ("none", "ValueError: Join needs at least one joinable, got none"),
        ("twice", "ValueError: a joinable may be listed once, DistributedDataParallel is listed twice"),
        ("optimizer", "TypeError: SGD is not a Joinable"),
        (
            "argument",
            "TypeError: Join knows divide_by_initial_world_size for a DDP, got divide_by_world_size",
        ),
        ("constructor", "TypeError: TorchCounter has no _join_config"),
        ("notify", "TypeError: OwnCounter has no _join_config"),
        ("nested", "RuntimeError: DistributedDataParallel is already in an open Join block"),
        ("reopened", "RuntimeError: this Join block is already open"),
        ("phase", "ValueError: phase must be"),
        ("function", "TypeError: a shadow must be callable without arguments, got int"),
        ("joinable", "ValueError: TorchCounter is not a joinable of this block"),
        (
            "sync batch norm",
            "ValueError: a rank without data can't repeat the collectives of this DDP: 1 is a Sync",
        ),
        ("sparse", "ValueError: a rank without data can't repeat the collectives of this DDP: it has sparse"),
        ("skip", "ValueError: a rank without data can't repeat the collectives of this DDP: it has skip_all"),
        (
            "python reducer",
            "ValueError: a rank without data can't repeat the collectives of this DDP: its grad",
        ),
        (
            "delayed",
            "ValueError: a rank without data can't repeat the collectives of this DDP: it has delay_all",
        ),
        (
            "buffer hook",
            "ValueError: a rank without data can't repeat the collectives of this DDP: it has a buffer",
        ),
    ],
)
def test_refusals_say_what_is_wrong(case: str, says: str) -> None:
    for text in run_ranks(partial(refused, case=case), 2):
        assert text.startswith(says), text


def test_different_groups_are_both_named() -> None:
    texts = run_ranks(partial(refused, case="groups"), 2)
    assert "of ranks [0, 1]" in texts[0]
    assert "of ranks [0]" in texts[0]
    assert "of ranks [0, 1]" in texts[1]
    assert "of ranks [1]" in texts[1]


def disabled(rank: int, world_size: int) -> tuple[int, bool, float]:
    ddp = DistributedDataParallel(nn.Linear(1, 1))
    with Join([ddp], enable=False) as join:
        for _ in range(2):
            ddp(torch.ones(1, 1)).sum().backward()
        assert not ddp._join_config.enable
    return join.active_ranks, join.joined, sum_of_ranks(rank)


def test_disabled_does_nothing() -> None:
    assert run_ranks(disabled, 2) == [(2, False, 21.0)] * 2


def late_start_of_a_static_graph(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(nn.Linear(1, 1), static_graph=True)
    for batches in ((0, 2), (1, 1)):
        with Join([ddp]):
            for _ in range(batches[rank]):
                ddp(torch.ones(1, 1)).sum().backward()


def test_a_static_graph_that_a_rank_never_saw_is_refused_instead_of_hanging() -> None:
    with pytest.raises(RankFailure, match="no data when the other ranks ran the first backward") as caught:
        run_ranks(late_start_of_a_static_graph, 2)
    assert "rank 0 left the block with RuntimeError: this rank had no data" in str(caught.value)


def warned(rank: int, world_size: int) -> list[str]:
    import warnings

    ddp = DistributedDataParallel(nn.Linear(1, 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        with Join([ddp]):
            for _ in range((0, 1003)[rank]):
                ddp(torch.ones(1, 1)).sum().backward()
        assert list(warnings.filters) == before
    return [f"{warning.filename.rsplit('/', 1)[-1]}: {warning.message}" for warning in caught]


def test_a_great_skew_is_told_once() -> None:
    on_idle, on_busy = run_ranks(warned, 2)
    assert len(on_idle) == 1
    assert on_idle[0].startswith("test_join.py: rank 0 has had no data for 1000 iterations")
    assert on_busy == []


# The worked example of the documentation

DOCUMENT = Path(__file__).parents[2] / "docs" / "join.md"


def code_block(language: str, containing: str) -> str:
    blocks = re.findall(rf"```{language}\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (found,) = [block for block in blocks if containing in block]
    return str(found)


def documented_example(rank: int, world_size: int) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code_block("python", "BATCHES"), {"__name__": "__main__"})
    return printed.getvalue()


def test_the_documented_example_prints_what_the_page_says() -> None:
    expected = code_block("text", "over all ranks")
    assert run_ranks(documented_example, 2) == [expected, expected]
