"""The arithmetic of PowerSGD on ranks simulated in one process: every layout, dtype and route, without a group."""

import contextlib
from dataclasses import dataclass, field

import pytest
import torch

from tensorplay.compression import low_rank, low_rank_fused
from tensorplay.compression.bucket import Bucket, GradientSlice
from tensorplay.compression.compiled import is_compiled
from tensorplay.compression.low_rank import LowRankTerms, low_rank_mean
from tensorplay.compression.low_rank_factors import multiply_transposed
from tensorplay.compression.low_rank_plan import LAYOUTS, Rule, matrix_shape, plan_low_rank
from tensorplay.compression.memory import Tensors
from tensorplay.compression.rounds import AllReduce, AllToAll, Scratch

Shapes = tuple[tuple[int, ...], ...]
MIXED: Shapes = ((40, 30), (30,), (16, 8, 3, 3), (40, 30), (), (0, 3), (12, 20))
LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)
NUMBA = pytest.mark.skipif(not is_compiled(), reason="needs the extra `fast`: Numba")
#: Sizes that no block of four rows or eight columns divides, and matrices that travel uncompressed.
RAGGED: Shapes = ((41, 37), (9,), (41, 37), (6, 131), (130, 7), (64, 64), (50, 1), (1, 70), (0, 5), (7, 3, 3))


@dataclass
class Ranks:
    """`world_size` ranks that exchange one bucket again and again."""

    shapes: Shapes
    world_size: int = 3
    rank: int = 2
    layout: str = "layer"
    dtype: torch.dtype = torch.float32
    feedback: bool = True
    warm_start: bool = True
    wire_dtype: torch.dtype | None = None
    branch_free: bool | None = None
    divisor: int | None = None
    check: bool = False
    step: int = 0
    memories: list[list[Tensors]] = field(default_factory=list)
    sent_elements: int = 0
    rounds: int = 0

    def __post_init__(self) -> None:
        self.memories = [[{} for _ in self.shapes] for _ in range(self.world_size)]
        self.scratches = [Scratch() for _ in range(self.world_size)]

    def bucket(self, gradients: list[torch.Tensor]) -> Bucket:
        buffer = torch.cat([g.reshape(-1) for g in gradients]).to(self.dtype)
        slices, at = [], 0
        for number, shape in enumerate(self.shapes):
            size = torch.Size(shape).numel()
            slices.append(GradientSlice(f"p{number}", buffer[at : at + size], shape, None))
            at += size
        return Bucket(0, True, buffer, slices)

    def average(
        self, gradients: list[list[torch.Tensor]], used: list[list[bool]] | None = None
    ) -> list[torch.Tensor]:
        """One exchange; returns every rank's result."""
        buckets = [self.bucket(mine) for mine in gradients]
        plan = plan_low_rank(buckets[0].slices, Rule(self.rank, 1.0, self.layout))
        if self.feedback:
            for memories in self.memories:
                for index in plan.members:
                    memories[index].setdefault(
                        "residual", torch.zeros(buckets[0].slices[index].values.numel())
                    )
        runs = [
            low_rank_mean(
                buckets[rank],
                plan,
                self.memories[rank],
                LowRankTerms(
                    rank=rank,
                    world_size=self.world_size,
                    divisor=self.divisor or self.world_size,
                    used=used[rank] if used else [True] * len(self.shapes),
                    step=self.step,
                    seed=0,
                    warm_start=self.warm_start,
                    wire_dtype=self.wire_dtype,
                    check=self.check and self.step == 0,
                    branch_free=self.branch_free,
                ),
                self.scratches[rank],
            )
            for rank in range(self.world_size)
        ]
        self.step += 1
        self.rounds = 0
        self.sent_elements = 0
        while True:
            requests = []
            for run in runs:
                with contextlib.suppress(StopIteration):
                    requests.append(next(run))
            if not requests:
                return [bucket.buffer for bucket in buckets]
            assert len(requests) == self.world_size
            self.rounds += 1
            if isinstance(requests[0], AllToAll):
                for receiver, request in enumerate(requests):
                    for sender, other in enumerate(requests):
                        inbox = request.receives[sender]
                        if sender != receiver and inbox is not None:
                            inbox.copy_(other.produce(receiver))
                        request.consume(sender)
                continue
            for parts in zip(*(r.tensors for r in requests if isinstance(r, AllReduce)), strict=True):
                assert len({(part.dtype, part.numel()) for part in parts}) == 1
                total = torch.stack([part.double() for part in parts]).sum(0)
                self.sent_elements += parts[0].numel()
                for part in parts:
                    part.copy_(total)

    def residuals(self) -> torch.Tensor:
        """The sum over ranks of what is owed, one vector."""
        return torch.cat(
            [
                sum(m[at].get("residual", torch.zeros(torch.Size(s).numel())).double() for m in self.memories)
                for at, s in enumerate(self.shapes)
            ]
        )


def gradients(shapes: Shapes, world_size: int, seed: int, scale: float = 1.0) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[scale * torch.randn(s, generator=generator) for s in shapes] for _ in range(world_size)]


def total(mine: list[list[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([torch.cat([g.reshape(-1) for g in one]).double() for one in mine]).sum(0)


def all_equal(results: list[torch.Tensor]) -> torch.Tensor:
    for other in results[1:]:
        assert torch.equal(results[0], other)
    return results[0].double()


@LAYOUT
@pytest.mark.parametrize("branch_free", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_nothing_is_lost(layout: str, branch_free: bool, dtype: torch.dtype) -> None:
    ranks = Ranks(MIXED, layout=layout, branch_free=branch_free, dtype=dtype)
    grain = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(
        dtype, 1e-5
    )  # the result is rounded to the bucket
    for seed in range(4):
        mine = [[g.to(dtype).float() for g in one] for one in gradients(MIXED, 3, seed)]
        before = ranks.residuals()
        result = all_equal(ranks.average(mine))
        left = total(mine) + before - 3 * result - ranks.residuals()
        assert float(left.norm()) < grain * float(total(mine).norm())
        assert ranks.rounds == 2


@LAYOUT
def test_both_ways_of_finishing_are_one(layout: str) -> None:
    with_branches, without = (Ranks(MIXED, layout=layout, branch_free=b) for b in (False, True))
    for seed in range(3):
        mine = gradients(MIXED, 3, seed)
        used = [[seed != 1, True, rank == 0, True, True, True, True] for rank in range(3)]
        one, other = (all_equal(r.average(mine, used)) for r in (with_branches, without))
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(with_branches.residuals(), without.residuals(), rtol=1e-3, atol=1e-5)


def test_a_low_rank_gradient_is_reproduced() -> None:
    shapes: Shapes = ((60, 40), (40, 50))
    for layout in ("layer", "batched", "same_shape"):
        ranks = Ranks(shapes, rank=2, layout=layout)
        base = gradients(((60, 2), (2, 40), (40, 2), (2, 50)), 1, 5)[0]
        exact = [base[0] @ base[1], base[2] @ base[3]]
        for step in range(2):
            mine = [[(rank + 1) * g for g in exact] for rank in range(3)]
            result = all_equal(ranks.average(mine))
            if step == 1:
                mean = total(mine) / 3
                assert float((result - mean).norm() / mean.norm()) < 1e-5


def test_batching_changes_nothing() -> None:
    shapes: Shapes = ((40, 30), (7,), (40, 30), (30, 40), (40, 30))
    one, other = Ranks(shapes, layout="layer"), Ranks(shapes, layout="batched")
    # the first factors are drawn by place, so let both start from the same
    for at in (0, 2, 3, 4):
        start = torch.randn(2, shapes[at][1], generator=torch.Generator().manual_seed(at))
        for ranks in (one, other):
            for memories in ranks.memories:
                memories[at]["q"] = start.clone()
    for seed in range(5):
        mine = gradients(shapes, 3, seed)
        torch.testing.assert_close(
            all_equal(one.average(mine)), all_equal(other.average(mine)), rtol=1e-4, atol=1e-4
        )


def test_the_step_by_hand() -> None:
    # One rank, M = diag(3, 1) with zeros, Q = e1: P = e1, Q' = (3, 0, 0), so the 3 gets through and the 1 stays.
    ranks = Ranks(((3, 3),), world_size=1, rank=1)
    ranks.memories[0][0]["q"] = torch.tensor([[1.0, 0.0, 0.0]])
    matrix = torch.diag(torch.tensor([3.0, 1.0, 0.0]))
    plan = plan_low_rank(ranks.bucket([matrix]).slices, Rule(1, 1.0, "layer"))
    assert [item.rank for item in plan.factorisations] == [1]
    (result,) = ranks.average([[matrix]])
    torch.testing.assert_close(result, torch.tensor([3.0, 0, 0, 0, 0, 0, 0, 0, 0]))
    torch.testing.assert_close(ranks.memories[0][0]["residual"], torch.tensor([0.0, 0, 0, 0, 1, 0, 0, 0, 0]))
    torch.testing.assert_close(ranks.memories[0][0]["q"].abs(), torch.tensor([[3.0, 0, 0]]))


@LAYOUT
@pytest.mark.parametrize("branch_free", [False, True])
@pytest.mark.parametrize("bad", [float("inf"), float("nan"), -float("inf"), 3e38])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_bad_value_leaves_no_trace(layout: str, branch_free: bool, bad: float, where: int) -> None:
    ranks, never = (Ranks(MIXED, layout=layout, branch_free=branch_free) for _ in range(2))
    if bad == 3e38 and where == 1 and layout != "bucket":
        return  # finite, and travels uncompressed
    for seed in range(2):
        ranks.average(gradients(MIXED, 3, seed))
        never.average(gradients(MIXED, 3, seed))
    mine = gradients(MIXED, 3, 9)
    mine[1][where].view(-1)[-1] = bad
    for result in ranks.average(mine):
        assert not torch.isfinite(result).all()
    never.step += 1
    for seed in range(2, 4):
        after, expected = (r.average(gradients(MIXED, 3, seed)) for r in (ranks, never))
        assert torch.equal(all_equal(after), all_equal(expected))
    assert torch.equal(ranks.residuals(), never.residuals())


@LAYOUT
@pytest.mark.parametrize("branch_free", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_zero_gradient_passes_and_the_layer_learns_again(layout: str, branch_free: bool, rank: int) -> None:
    ranks = Ranks(MIXED, layout=layout, rank=rank, branch_free=branch_free, world_size=2)
    zeros = [[torch.zeros(s) for s in MIXED] for _ in range(2)]
    for _ in range(3):
        assert all_equal(ranks.average(zeros)).abs().max() == 0
    given, got = torch.zeros(1), torch.zeros(1)
    # only the last corner of the first layer is ever not zero
    mine = [[torch.zeros(s) for s in MIXED] for _ in range(2)]
    mine[0][0][30:, 20:] = 1.0
    for _ in range(12):
        given = given + total(mine) / 2
        got = got + all_equal(ranks.average(mine))
    assert float((got - given).norm() / given.norm()) < 0.5  # the first steps may see little of it
    assert torch.isfinite(ranks.residuals()).all()


@LAYOUT
@pytest.mark.parametrize("branch_free", [False, True])
def test_a_parameter_unused_everywhere_keeps_its_residual(layout: str, branch_free: bool) -> None:
    ranks = Ranks(MIXED, layout=layout, branch_free=branch_free)
    ranks.average(gradients(MIXED, 3, 0))
    kept = [m[0]["residual"].clone() for m in ranks.memories]
    factors = [m[0]["q"].clone() for m in ranks.memories]
    mine = gradients(MIXED, 3, 1)
    for one in mine:
        one[0].zero_()
    results = ranks.average(mine, [[False] + [True] * 6] * 3)
    assert all_equal(results)[:1200].abs().max() == 0
    for rank, memories in enumerate(ranks.memories):
        assert torch.equal(memories[0]["residual"], kept[rank])
        if layout in ("layer", "batched"):
            assert torch.equal(memories[0]["q"], factors[rank])
    # used by one rank: it counts for all
    results = ranks.average(mine, [[rank == 1] + [True] * 6 for rank in range(3)])
    assert all_equal(results)[:1200].abs().max() > 0


@LAYOUT
@pytest.mark.parametrize("wire_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [4000.0, 1e-7, 1.0, 1e30])
def test_half_precision_on_the_wire_survives_any_scale(
    layout: str, wire_dtype: torch.dtype, scale: float
) -> None:
    half, full = Ranks(MIXED, layout=layout, wire_dtype=wire_dtype), Ranks(MIXED, layout=layout)
    for seed in range(3):
        mine = gradients(MIXED, 3, seed, scale)
        before = half.residuals()
        result = all_equal(half.average(mine))
        expected = all_equal(full.average(mine))
        assert float((result - expected).norm() / expected.norm()) < 0.1
        left = total(mine) + before - 3 * result - half.residuals()
        factorised = torch.cat(
            [
                torch.full((torch.Size(s).numel(),), float("residual" in half.memories[0][at]))
                for at, s in enumerate(MIXED)
            ]
        )
        assert float((left * factorised).norm() / total(mine).norm()) < 1e-5
        assert float(left.norm() / total(mine).norm()) < 1e-2  # what travels uncompressed is rounded
    assert half.memories[0][0]["residual"].dtype == torch.float32


def test_opposite_gradients_in_float16() -> None:
    ranks = Ranks(((40, 30),), world_size=2, wire_dtype=torch.float16)
    base = gradients(((40, 30),), 1, 0, 1e6)[0][0]
    for _ in range(4):
        assert torch.isfinite(all_equal(ranks.average([[base], [-base]]))).all()
    assert float(ranks.residuals().abs().max()) < 1e-3 * float(base.abs().max())


def test_fewer_ranks_take_part() -> None:
    """Join: the mean is over 2 of 3 ranks, and the account is kept in those units."""
    ranks = Ranks(MIXED, divisor=2)
    for seed in range(4):
        mine = gradients(MIXED, 3, seed)
        mine[2] = [torch.zeros_like(g) for g in mine[2]]
        before = ranks.residuals()
        result = all_equal(ranks.average(mine))
        left = total(mine) + before - 2 * result - ranks.residuals()
        assert float(left.norm() / total(mine).norm()) < 1e-5


def test_without_feedback_and_without_warm_start() -> None:
    ranks = Ranks(MIXED, feedback=False, warm_start=False)
    mine = gradients(MIXED, 3, 0)
    first, second = all_equal(ranks.average(mine)), all_equal(ranks.average(mine))
    assert not torch.equal(first, second), "the factor must be drawn anew at every step"
    assert all(not memory for memories in ranks.memories for memory in memories)


def test_the_first_step_gives_all_ranks_one_factor() -> None:
    ranks = Ranks(((40, 30),), check=True)
    ranks.memories[1][0]["q"] = torch.randn(2, 30)
    ranks.average(gradients(ranks.shapes, 3, 0))
    assert ranks.rounds == 4  # compare, broadcast, and the two of every step
    ranks.average(gradients(ranks.shapes, 3, 1))
    assert ranks.rounds == 2


def test_elements_sent() -> None:
    ranks = Ranks(((40, 30), (30,), (40, 30)), rank=2)
    ranks.average(gradients(ranks.shapes, 3, 0))
    assert ranks.sent_elements == 2 * 2 * (40 + 30) + 30 + 2  # factors, uncompressed, flags
    ranks = Ranks(((40, 30), (30,), (40, 30)), rank=2, layout="same_shape")
    ranks.average(gradients(ranks.shapes, 3, 0))
    assert ranks.sent_elements == 2 * (80 + 30) + 30 + 2
    ranks = Ranks(((40, 30), (30,), (40, 30)), rank=2, layout="bucket")
    ranks.average(gradients(ranks.shapes, 3, 0))
    assert ranks.sent_elements == 2 * (50 + 49) + 3  # 2430 values: 50 columns, 49 rows


def test_a_shared_factor_survives_another_grouping() -> None:
    ranks = Ranks(((40, 30), (40, 30)), layout="same_shape")
    ranks.average(gradients(ranks.shapes, 3, 0))
    assert ranks.memories[0][0]["q"] is ranks.memories[0][1]["q"]
    kept = ranks.memories[0][1]["q"].clone()
    apart = Ranks(((40, 30),), layout="same_shape")
    apart.memories = [[m[0]] for m in ranks.memories]
    apart.average(gradients(apart.shapes, 3, 1))
    assert torch.equal(ranks.memories[0][1]["q"], kept)
    assert not torch.equal(ranks.memories[0][0]["q"], kept)


@pytest.mark.parametrize(
    ("shape", "stride", "numel", "expected"),
    [
        ((), None, 1, (1, 1)),
        ((5,), None, 5, (5, 1)),
        ((0, 3), None, 0, (1, 0)),
        ((8, 3, 5, 5), None, 600, (8, 75)),
        ((8, 3, 5, 5), (75, 1, 15, 3), 600, (8, 75)),  # channels_last
        ((8, 4), (1, 8), 32, (4, 8)),  # transposed: its memory is the other way round
        ((3, 4, 5), (5, 15, 1), 60, (4, 15)),  # the first dimension lies in the middle
        ((1, 4, 5), (1, 1, 4), 20, (1, 20)),
        ((8, 4), None, 64, (8, 8)),  # complex: two values an element
        ((8, 4), (1, 8), 64, (4, 16)),
    ],
)
def test_matrix_shape(
    shape: tuple[int, ...], stride: tuple[int, ...] | None, numel: int, expected: tuple[int, int]
) -> None:
    assert matrix_shape(shape, stride, numel) == expected


def test_what_is_worth_it() -> None:
    rule = Rule(4, 2, "layer")
    assert rule.rank_of(100, 100) == 4  # 800 x 2 < 10,000
    assert rule.rank_of(16, 16) == 0  # 128 x 2 = 256, not less
    assert rule.rank_of(2, 1000) == 0
    assert Rule(4, 0.4, "layer").rank_of(2, 1000) == 2  # the rank is at most the smaller side
    assert Rule(1, 2, "layer").rank_of(5, 1) == 0


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("rank", [1, 3, 4, 8])
@pytest.mark.parametrize(("rows", "columns"), [(5, 2048), (64, 2050), (71, 4096), (71, 30)])
def test_a_thin_product_is_one_in_slabs_too(
    rank: int, rows: int, columns: int, add: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda one, other: calls.append(1) or real(one, other))
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(rank, columns, generator=generator)
    matrix = torch.randn(rows, columns, generator=generator)
    before = torch.randn(rank, rows, generator=generator) if add else torch.full((rank, rows), float("nan"))
    exact = factor.double() @ matrix.double().t() + (before.double() if add else 0.0)
    out = before.clone()
    multiply_transposed(factor, matrix, out, add)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-3)
    pays = rank >= 4 and columns >= 2048 and rows >= 16
    assert bool(calls) == (pays and torch.backends.mkl.is_available())


def without_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "fused_loops", lambda factor: None)


@NUMBA
@LAYOUT
@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize("warm_start", [True, False])
def test_loops_and_operations_are_one(
    layout: str, rank: int, warm_start: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same exchange with and without Numba; the last matrix of a shape is not used in one step."""
    one, other = (Ranks(RAGGED, rank=rank, layout=layout, warm_start=warm_start) for _ in range(2))
    for seed in range(4):
        mine = gradients(RAGGED, 3, seed)
        used = [[seed != 2 or at not in (2, 5) for at in range(len(RAGGED))]] * 3
        if seed == 2:
            for gradient in mine:
                gradient[2].zero_()
                gradient[5].zero_()
        before = one.residuals()
        compiled = all_equal(one.average(mine, used))
        left = total(mine) + before - 3 * compiled - one.residuals()
        assert float(left.norm() / total(mine).norm()) < 1e-5
        with monkeypatch.context() as patch:
            without_loops(patch)
            plain = all_equal(other.average(mine, used))
        torch.testing.assert_close(compiled, plain, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(one.residuals(), other.residuals(), rtol=1e-3, atol=1e-4)
    held = [set(memory) for memory in one.memories[0] if memory]
    by_loops = rank != 3 and layout != "bucket"
    assert any("ahead" in kinds for kinds in held) == by_loops
    assert not any("ahead" in memory for memory in other.memories[0])


def loops_on_first_of_three(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of three ranks, only the first has loops from now on; returns a list that grows with every exchange of a rank."""
    real, made = low_rank.fused_loops, []

    def only_first_rank(factor: torch.Tensor) -> object:
        made.append(1)
        return real(factor) if len(made) % 3 == 1 else None

    monkeypatch.setattr(low_rank, "fused_loops", only_first_rank)
    return made


@NUMBA
@LAYOUT
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_ranks_with_and_without_loops_agree_to_the_bit(
    layout: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = loops_on_first_of_three(monkeypatch)
    ranks = Ranks(RAGGED, rank=rank, layout=layout, check=True)
    if not rounds_as_torch(rank) and layout != "bucket":
        with pytest.raises(RuntimeError, match="multiplies factors with Numba"):
            ranks.average(gradients(RAGGED, 3, 0))
        return
    for seed in range(3):
        mine = gradients(RAGGED, 3, seed)
        before = ranks.residuals()
        result = all_equal(ranks.average(mine))
        left = total(mine) + before - 3 * result - ranks.residuals()
        assert float(left.norm() / total(mine).norm()) < 1e-5
    assert len(made) == 9
    assert ("ahead" in ranks.memories[0][0]) == (layout != "bucket")
    assert "ahead" not in ranks.memories[1][0]


@NUMBA
def test_where_loops_round_otherwise_some_ranks_without_them_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        low_rank_fused, "_product", lambda loops, rank: b"torch" if loops is None else b"loops"
    )
    real = low_rank.fused_loops
    loops_on_first_of_three(monkeypatch)
    with pytest.raises(RuntimeError, match=r"rank 0 multiplies factors with Numba, .*NUMBA_DISABLE_JIT=1"):
        Ranks(RAGGED, check=True).average(gradients(RAGGED, 3, 0))
    monkeypatch.setattr(low_rank, "fused_loops", real)
    all_equal(Ranks(RAGGED, check=True).average(gradients(RAGGED, 3, 0)))


def rounds_as_torch(rank: int) -> bool:
    """Not everywhere: PyTorch's products add up in another order on some processors."""
    loops = low_rank_fused.fused_loops(torch.empty(0))
    return low_rank_fused._product(loops, rank) == low_rank_fused._product(None, rank)


@NUMBA
@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize(("rows", "columns"), [(4, 8), (5, 33), (67, 203), (130, 5), (9, 1)])
def test_loops_against_float64(rank: int, rows: int, columns: int) -> None:
    loops = low_rank_fused.fused_loops(torch.empty(0))
    generator = torch.Generator().manual_seed(rank)
    shapes = ((rows, columns), (rows, columns), (rank, rows), (rank, columns), (rank, columns))
    # one value off an aligned address, as a slice of a bucket may be
    g, e, left, right, following = (
        torch.randn(a * b + 1, generator=generator)[1:].view(a, b) for a, b in shapes
    )
    exact, mean = g.double() + e.double(), torch.mm(left.t(), right)
    out, back, ahead = torch.empty(rank, rows), torch.zeros(rank, columns), torch.empty(rank, rows)
    loops.PROJECT[rank](g.numpy(), right.numpy(), out.numpy())
    loops.BACK[rank](g.numpy(), e.numpy(), left.numpy(), back.numpy())
    torch.testing.assert_close(out.double(), right.double() @ g.double().t(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(back.double(), left.double() @ exact, rtol=1e-5, atol=1e-4)
    arrays = [t.numpy() for t in (g, e, left, right, following, ahead)]
    loops.SETTLE[rank](*arrays[:4], arrays[0].dtype.type(0.5), *arrays[4:])
    torch.testing.assert_close(g, mean, rtol=1e-5, atol=1e-5)
    if rounds_as_torch(rank):
        assert torch.equal(g, mean)
    torch.testing.assert_close(e.double(), exact - 0.5 * mean.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ahead.double(), following.double() @ e.double().t(), rtol=1e-5, atol=1e-4)


@NUMBA
@pytest.mark.parametrize("layout", ["layer", "batched", "same_shape"])
def test_the_residual_is_read_once_less_while_its_product_is_known(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    project = low_rank_fused.fused_loops(torch.empty(0)).PROJECT
    real = project[2]

    def count(*arguments: object) -> None:
        calls.append(1)
        real(*arguments)

    monkeypatch.setitem(project, 2, count)
    shapes: Shapes = ((40, 30), (40, 30))
    ranks, again = (Ranks(shapes, world_size=1, layout=layout) for _ in range(2))

    def step(seed: int, used: tuple[bool, bool] = (True, True)) -> tuple[torch.Tensor, int]:
        calls.clear()
        mine = gradients(shapes, 1, seed)
        result = ranks.average(mine, [list(used)])[0].clone()
        return result, len(calls) - len(shapes)  # each gradient is read in any case

    assert step(0)[1] == 2
    assert step(1)[1] == 0
    expected = ranks.memories[0][0]["residual"].view(40, 30) @ unit_rows(ranks.memories[0][0]["q"]).t()
    torch.testing.assert_close(ranks.memories[0][0]["ahead"], expected.t(), rtol=1e-4, atol=1e-4)
    # without it, as after loading: it is formed anew, and the bits are the same
    again.memories = [
        [{kind: t.clone() for kind, t in m.items() if kind != "ahead"} for m in ranks.memories[0]]
    ]
    again.step = ranks.step
    result, formed = step(2)
    assert formed == 0
    calls.clear()
    assert torch.equal(result, again.average(gradients(shapes, 1, 2))[0])
    assert len(calls) - len(shapes) == 2
    # unused everywhere: its own factor waits for it, a shared one moves on
    assert step(3, (True, False))[1] == 0
    assert step(4)[1] == (layout == "same_shape")
    # one member's factor came from another matrix, or the state was saved without Numba: formed anew
    ranks.memories[0][1]["q"] = torch.randn(2, 30)
    assert step(5)[1] == (layout == "same_shape")
    del ranks.memories[0][1]["ahead"]
    assert step(6)[1] == 1


def unit_rows(factor: torch.Tensor) -> torch.Tensor:
    return torch.linalg.qr(factor.t()).Q.t()
