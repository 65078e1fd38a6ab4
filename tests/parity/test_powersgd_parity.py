"""Against torch's own powerSGD_hook, in the one set-up where it works: one bucket, from its third step on."""

import inspect
from functools import partial
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs

from tensorplay.compression import low_rank
from tensorplay.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as ours
from tensorplay.testing import run_ranks

TorchDDP = nn.parallel.DistributedDataParallel
SHAPES = [
    (48, 32),
    (32,),
    (20, 8, 3, 3),
    (64, 40),
    (30, 12),
]  # all different: both sides then draw in one order


class Given(nn.Module):
    """Its gradients are what is passed in, whatever the parameters are."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return sum((w * g).sum() for w, g in zip(self.weights, gradients, strict=True))  # type: ignore[return-value]


class TheirDraws:
    """The first factors as torch's hook draws them: one generator a step, layer after layer."""

    def __init__(self) -> None:
        self.seeds = numpy.random.RandomState(0)
        self.generator = torch.Generator()

    def __call__(self, seed: int, step: int, place: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
        if place[1] == 0:
            self.generator.manual_seed(int(self.seeds.randint(1_000_000_000)))
        rank, columns = shape
        return torch.randn(1, columns, rank, generator=self.generator)[0].t()


def gradients(step: int, rank: int) -> list[torch.Tensor]:
    """A part that all ranks share and that lasts, as in training, and noise that differs.

    The lasting part's singular values fall off. Where they coincide, rounding decides which direction is sent first,
    and two correct float32 runs part: each is then as far from a float64 run as from the other.
    """
    lasting, noise = (torch.Generator().manual_seed(seed) for seed in (5, 1000 * step + rank))
    made = []
    for shape in SHAPES:
        rest = torch.Size(shape).numel() // shape[0]
        k = min(shape[0], rest, 6)
        left = torch.linalg.qr(torch.randn(shape[0], k, generator=lasting))[0]
        right = torch.linalg.qr(torch.randn(rest, k, generator=lasting))[0]
        sizes = 20 * 0.6 ** torch.arange(k)
        made.append(((left * sizes) @ right.t()).view(shape) + 0.1 * torch.randn(shape, generator=noise))
    return made


def side_by_side(rank: int, world_size: int, options: dict[str, Any]) -> float:
    with mock.patch.object(low_rank, "draw_factor", TheirDraws()):
        return compared(rank, options)


def compared(rank: int, options: dict[str, Any]) -> float:
    results, stats = [], []
    for module in (theirs, ours):
        ddp = TorchDDP(Given())
        state = module.PowerSGDState(process_group=None, start_powerSGD_iter=2, **options)
        ddp.register_comm_hook(state, module.powerSGD_hook)
        steps = []
        for step in range(22):
            ddp.zero_grad()
            ddp(gradients(step, rank)).backward()
            steps.append([p.grad.clone() for p in ddp.parameters() if p.grad is not None])
        results.append(steps)
        stats.append(state.compression_stats())
    assert stats[0] == stats[1]
    worst = 0.0
    for step, (a, b) in enumerate(zip(*results, strict=True)):
        for want, got in zip(a, b, strict=True):
            error = float((want - got).norm() / want.norm())
            assert error < 1e-4, f"step {step}, shape {tuple(want.shape)}: {error:.1e}"
            worst = max(worst, error)
    return worst


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("warm_start", [True, False])
def test_results_equal(rank: int, feedback: bool, warm_start: bool) -> None:
    options = {
        "matrix_approximation_rank": rank,
        "use_error_feedback": feedback,
        "warm_start": warm_start,
        "min_compression_rate": 1,
    }
    run_ranks(partial(side_by_side, options=options), 2)


def test_results_equal_batched_and_with_epsilon() -> None:
    options = {
        "matrix_approximation_rank": 2,
        "batch_tensors_with_same_shape": True,
        "min_compression_rate": 1,
    }
    run_ranks(partial(side_by_side, options=options), 3)
    options = {"matrix_approximation_rank": 2, "orthogonalization_epsilon": 1e-8, "min_compression_rate": 1}
    run_ranks(partial(side_by_side, options=options), 2)


def test_names_order_and_defaults() -> None:
    want = list(inspect.signature(theirs.PowerSGDState).parameters.values())
    got = list(inspect.signature(ours.PowerSGDState).parameters.values())
    assert [p.name for p in got[: len(want)]] == [p.name for p in want]
    assert [p.kind for p in got[: len(want)]] == [p.kind for p in want]
    for mine, torchs in zip(got[1:], want[1:], strict=False):
        assert mine.default == torchs.default
    assert got[0].default is None
    assert set(theirs.__all__) == set(ours.__all__)
