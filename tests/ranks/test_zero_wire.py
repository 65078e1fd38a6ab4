"""Hooks that make the optimizer's step: parameters of every kind, and what travels."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tensorplay.compression.collective import traffic
from tensorplay.distributed.algorithms.ddp_comm_hooks.compressed_hook import (
    CompressedHookState,
    compressed_hook,
)
from tensorplay.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from tensorplay.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from tensorplay.distributed.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from tensorplay.testing import run_ranks
from tests.ranks.zero import MANY_BUCKETS, Pair, batch, equal_at_every_step, largest_difference, linear, net

Cell = dict[str, Any]

# Parameters of every size and kind


class Kinds(nn.Module):
    """0-dim, empty, complex, bfloat16, double, channels_last and frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.spectrum = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.bfloat = nn.Parameter(torch.randn(7, dtype=torch.bfloat16))
        self.float64 = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.image = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        total = (inputs.sum() * self.scalar) ** 2 + self.empty.sum() + self.frozen.sum()
        total = total + (self.spectrum * inputs.sum()).abs().pow(2).sum()
        total = (
            total + (self.bfloat * 2).float().pow(2).sum() * inputs.mean() + self.float64.float().pow(2).sum()
        )
        return (
            total
            + self.image(inputs.view(1, 2, 4, 3).contiguous(memory_format=torch.channels_last)).pow(2).sum()
        )


def _kinds(rank: int, world_size: int, options: Cell) -> list[float]:
    pair = Pair(Kinds, **options)
    differences = []
    for step in range(4):
        pair.step(batch(rank, step), loss=lambda output: output)
        differences.append(pair.difference())
    return differences


@pytest.mark.parametrize("interleaved", [False, True])
def test_every_kind_of_parameter(interleaved: bool) -> None:
    for shard in (False, True):
        options = {"interleaved": interleaved, "shard_buckets": shard, "ddp": MANY_BUCKETS}
        assert run_ranks(partial(_kinds, options=options), 3) == [[0.0] * 4] * 3
    options = {"interleaved": interleaved, "shard_buckets": True, "reduce_scatter": True, "ddp": MANY_BUCKETS}
    for differences in run_ranks(partial(_kinds, options=options), 3):
        assert max(differences) < 1e-2  # one bfloat16 rounding
    assert run_ranks(partial(_kinds_outside_of_a_hook, views=interleaved), 3) == [0.0] * 3


def _kinds_outside_of_a_hook(rank: int, world_size: int, views: bool) -> float:
    plain, shared = DistributedDataParallel(Kinds()), DistributedDataParallel(Kinds())
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    zero = ZeroRedundancyOptimizer(
        shared.parameters(), torch.optim.Adam, parameters_as_bucket_view=views, lr=0.01
    )
    for step in range(4):
        for model, stepper in ((plain, optimizer), (shared, zero)):
            stepper.zero_grad()
            model(batch(rank, step)).backward()
            stepper.step()
    return largest_difference(plain.parameters(), shared.parameters())


class Bag(nn.Module):
    """An embedding with sparse gradients and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.table, self.layer = nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table((inputs.abs() * 10).long() % 20))  # type: ignore[no-any-return]


def _sparse(rank: int, world_size: int) -> float:
    pair = Pair(Bag, "sgd", interleaved=True)
    for step in range(4):
        pair.step(batch(rank, step))
    return pair.difference()


def test_sparse_gradients() -> None:
    assert run_ranks(_sparse, 2) == [0.0] * 2


def _dominating() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 512), nn.Linear(512, 6), nn.Linear(6, 1))


@pytest.mark.parametrize("shard_buckets", [False, True])
def test_one_tensor_larger_than_all_others_and_fewer_tensors_than_ranks(shard_buckets: bool) -> None:
    cells: list[Cell] = [
        {"build": build, "shard_buckets": shard_buckets, "interleaved": interleaved}
        for build in (_dominating, linear)
        for interleaved in (False, True)
    ]
    run_ranks(partial(equal_at_every_step, cells=cells, steps=4), 4)


# Wire


def _wire(rank: int, world_size: int, options: Cell) -> tuple[int, int, int]:
    torch.manual_seed(1)
    ddp = DistributedDataParallel(nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)]), bucket_cap_mb=0.05)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, overlap_with_ddp=True)
    options = dict(options)
    make = hook_with_zero_step_interleaved if options.pop("interleaved") else hook_with_zero_step
    ddp.register_comm_hook(None, make(allreduce_hook, ddp, zero, **options))
    counts = []
    for step in range(3):
        before = traffic.sent_bytes, traffic.received_bytes
        zero.zero_grad()
        ddp(batch(rank, step, width=64)).sum().backward()
        counts.append((traffic.sent_bytes - before[0], traffic.received_bytes - before[1]))
    return (*counts[-1], sum(4 * p.numel() for p in ddp.parameters()))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("reduce_scatter", [False, True])
def test_bytes_are_gradients_plus_parameters(interleaved: bool, reduce_scatter: bool) -> None:
    """All ranks together: a 2 (W-1) all-reduce, or (W-1) to owners, and (W-1) of parameters."""
    options = {"interleaved": interleaved, "reduce_scatter": reduce_scatter, "shard_buckets": True}
    results = run_ranks(partial(_wire, options=options), 4)
    parameter_bytes = results[0][2]
    expected = (2 if reduce_scatter else 3) * 3 * parameter_bytes
    for direction in (0, 1):
        assert sum(result[direction] for result in results) == pytest.approx(expected, rel=0.05)
        share = [result[direction] * 4 / expected for result in results]
        assert max(share) < 1.1, share


# Gradients to their owners only


def _reduce_scatter(rank: int, world_size: int, hook: str, interleaved: bool) -> list[Any]:
    wrapped = {"plain": allreduce_hook, "fp16": fp16_compress_hook, "bf16": bf16_compress_hook}[hook]
    plain = DistributedDataParallel(net(), **MANY_BUCKETS)
    if hook != "plain":
        plain.register_comm_hook(None, wrapped)
    ddp = DistributedDataParallel(net(), **MANY_BUCKETS)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.05)
    make = hook_with_zero_step_interleaved if interleaved else hook_with_zero_step
    ddp.register_comm_hook(None, make(wrapped, ddp, zero, True, reduce_scatter=True))
    worst = 0.0
    for step in range(4):
        optimizer.zero_grad()
        zero.zero_grad()
        plain(batch(rank, step)).pow(2).sum().backward()
        ddp(batch(rank, step)).pow(2).sum().backward()
        optimizer.step()
        for number, parameter in enumerate(zero.shards.parameters):
            assert (parameter.grad is not None) == (zero.shards.owners[number] == rank)
        worst = max(worst, largest_difference(plain.parameters(), ddp.parameters()))
    return [worst, torch.cat([p.detach().flatten() for p in ddp.parameters()])]


@pytest.mark.parametrize(("hook", "limit"), [("plain", 1e-6), ("fp16", 1e-3), ("bf16", 1e-2)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_go_to_their_owner_only(hook: str, limit: float, interleaved: bool) -> None:
    results = run_ranks(partial(_reduce_scatter, hook=hook, interleaved=interleaved), 3)
    assert all(worst < limit for worst, _ in results)
    assert all(torch.equal(parameters, results[0][1]) for _, parameters in results)


def _with_a_codec(rank: int, world_size: int, interleaved: bool) -> float:
    plain, ddp = (DistributedDataParallel(net(), **MANY_BUCKETS) for _ in range(2))
    plain.register_comm_hook(CompressedHookState("int8", min_elements=16), compressed_hook)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=0.01)
    make = hook_with_zero_step_interleaved if interleaved else hook_with_zero_step
    ddp.register_comm_hook(CompressedHookState("int8", min_elements=16), make(compressed_hook, ddp, zero))
    for step in range(6):
        for model, stepper in ((plain, optimizer), (ddp, zero)):
            stepper.zero_grad()
            model(batch(rank, step)).pow(2).sum().backward()
            stepper.step()
    return largest_difference(plain.parameters(), ddp.parameters())


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_codec_on_the_gradient_half(interleaved: bool) -> None:
    assert run_ranks(partial(_with_a_codec, interleaved=interleaved), 3) == [0.0] * 3
