"""Exchanges of ranks simulated in one process: how a bucket is cut, and ranks that do and do not run compiled loops."""

from collections.abc import Callable

import pytest
import torch

from tensorplay.compression import compiled
from tensorplay.compression.bucket import GradientSlice
from tensorplay.compression.codec import Codec, Identity
from tensorplay.compression.error_feedback import ErrorFeedback, GradientPort
from tensorplay.compression.exchange import Terms, exchange_unit
from tensorplay.compression.grouped import adds_as_torch
from tensorplay.compression.plan import UNIT_ELEMENTS, Entry, Unit, owned_ranges, plan_units
from tensorplay.compression.registry import make_codec
from tensorplay.compression.rounds import AllToAll, Exchange, Scratch

SIZES = [40_000, 100, 33_001, 7]


def plan(codec: Codec, parts: int, sizes: list[int]) -> list[Unit]:
    entries = [Entry(numel, codec, None, index) for index, numel in enumerate(sizes)]
    return plan_units(entries, parts, Identity(), torch.float32)


class TestPlan:
    @pytest.mark.parametrize("parts", [1, 2, 3])
    def test_every_value_is_in_one_block(self, parts: int) -> None:
        codec = make_codec("int8")
        for unit in plan(codec, parts, SIZES):
            covered = [torch.zeros(numel, dtype=torch.int) for numel in SIZES]
            for block in (block for chunk in unit.chunks for block in chunk.blocks):
                assert block.numel % codec.group_size == 0
                for s in block.segments:
                    covered[s.index][s.start : s.start + s.length] += 1
            assert all(bool((counts == 1).all()) for counts in covered)

    def test_a_long_piece_shares_no_block(self) -> None:
        (unit,) = plan(make_codec("int8"), 1, [100, 300, 40_000, 100, 50, 300_000])
        blocks = [[s.index for s in block.segments] for block in unit.chunks[0].blocks]
        assert blocks == [[0, 1], [2], [3, 4], [5]]
        assert [block.is_one_piece for block in unit.chunks[0].blocks] == [False, False, False, False]
        (unit,) = plan(make_codec("int8"), 1, [128 * 300, 128 * 2000])
        assert [block.is_one_piece for block in unit.chunks[0].blocks] == [True, True]

    def test_a_bias_rides_with_a_weight(self) -> None:
        units = plan(make_codec("int8"), 1, [UNIT_ELEMENTS, 2048, 2 * UNIT_ELEMENTS, 2048])
        assert [unit.elements for unit in units] == [
            UNIT_ELEMENTS + 2048,
            UNIT_ELEMENTS,
            UNIT_ELEMENTS + 2048,
        ]

    def test_a_codec_of_whole_buckets_gets_one_block(self) -> None:
        codec = make_codec("uint8:none")
        entries = [Entry(numel, codec, None, index) for index, numel in enumerate([20_000, 100, 30_000])]
        (unit,) = plan_units(entries, 1, Identity(), torch.float32, whole=True)
        assert [block.numel for block in unit.chunks[0].blocks] == [50_100]

    def test_what_blocks_park_lies_side_by_side(self) -> None:
        for unit in plan(make_codec("int8"), 3, SIZES):
            blocks = [block for chunk in unit.chunks for block in chunk.blocks]
            assert [block.parked_at for block in blocks] == [
                sum(before.numel for before in blocks[:at]) for at in range(len(blocks))
            ]


def together(exchanges: list[Exchange], turn: Callable[[int], None]) -> list[object]:
    """Run one exchange a rank to its end; `turn` is told whose turn it is. Returns their verdicts."""
    verdicts: list[object] = []
    rounds: list[AllToAll] = []

    def advance(rank: int, exchange: Exchange) -> None:
        turn(rank)
        try:
            current = next(exchange)
        except StopIteration as end:
            verdicts.append(end.value)
        else:
            assert isinstance(current, AllToAll)
            rounds.append(current)

    while not verdicts:
        rounds.clear()
        for rank, exchange in enumerate(exchanges):
            advance(rank, exchange)
        for rank, current in enumerate(rounds):
            turn(rank)
            for peer in [*(r for r in range(len(rounds)) if r != rank), rank]:
                message, target = current.produce(peer), rounds[peer].receives[rank]
                if peer != rank and message is not None and target is not None:
                    target.copy_(message)
        for rank, current in enumerate(rounds):
            turn(rank)
            for source in range(len(rounds)):
                current.consume(source)
    return verdicts


class Ranks:
    """Gradients and residuals of ranks that average them with a codec; `compiles` says which ranks run loops."""

    def __init__(self, spec: str, route: str, compiles: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
        self.codec, self.route, self.compiles = make_codec(spec), route, compiles
        self.monkeypatch, self.dtype = monkeypatch, torch.float32
        self.size = len(compiles)
        parts = self.size if route == "two-shot" else 1
        self.units = plan(self.codec, parts, SIZES)
        self.residuals = [[torch.zeros(numel) for numel in SIZES] for _ in compiles]
        self.owned: list[list[torch.Tensor | None]] = [
            [
                torch.zeros(sum(n for _, n in owned_ranges(numel, self.codec.group_size, parts, rank)))
                for numel in SIZES
            ]
            if route == "two-shot"
            else []
            for rank in range(self.size)
        ]
        self.scratch = [Scratch() for _ in compiles]

    def turn(self, rank: int) -> None:
        self.monkeypatch.setattr(compiled, "is_compiled", lambda: self.compiles[rank])

    def step(
        self, number: int, feedback: bool = True, bad: float = 0.0, unused: int | None = None
    ) -> list[torch.Tensor]:
        """One step; `bad` is added to a gradient of the last rank, and no rank used slice `unused`. The results."""
        generator = torch.Generator().manual_seed(number)
        gradients = [[torch.randn(numel, generator=generator) for numel in SIZES] for _ in self.compiles]
        gradients = [[one.to(self.dtype) for one in mine] for mine in gradients]
        gradients[-1][0][17] += bad
        used = [index != unused for index in range(len(SIZES))]
        for unit in self.units:
            exchanges = []
            for rank, mine in enumerate(gradients):
                slices = [GradientSlice(str(i), g, tuple(g.shape), None) for i, g in enumerate(mine)]
                port = GradientPort(slices)
                terms = Terms(rank, self.size, self.size, number, used, "test")
                self.turn(rank)
                exchanges.append(
                    exchange_unit(
                        self.route,
                        unit,
                        ErrorFeedback(port, self.residuals[rank]) if feedback else port,
                        port,
                        self.owned[rank] if feedback and self.route == "two-shot" else None,
                        terms,
                        self.scratch[rank],
                    )
                )
            verdicts = together(exchanges, self.turn)
            assert len(set(map(bool, verdicts))) == 1
        return [torch.cat(mine) for mine in gradients]

    def held(self) -> list[torch.Tensor]:
        """Everything that is remembered, a vector a rank."""
        return [
            torch.cat([*mine, *(kept for kept in owned if kept is not None)])
            for mine, owned in zip(self.residuals, self.owned, strict=True)
        ]


needs_loops = pytest.mark.skipif(
    not compiled.is_compiled(), reason="the extra fast is not installed, or switched off"
)
SPECS = ["int8", "int8:scale_dtype=bfloat16", "int4", "sign", "int2", "uint8"]


@needs_loops
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    ("route", "size"), [("gather", 2), ("gather", 3), ("gather", 4), ("two-shot", 2), ("two-shot", 3)]
)
def test_ranks_with_and_without_loops_agree_to_the_bit(
    spec: str, route: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A mean magnitude depends on the order of a sum, so there only ranks of one run are the same.
    exact = adds_as_torch(compiled.loops_for(torch.zeros(1))) and spec not in ("sign", "int2")
    none = Ranks(spec, route, [False] * size, monkeypatch)
    some = Ranks(spec, route, [rank != 1 for rank in range(size)], monkeypatch)
    every = Ranks(spec, route, [True] * size, monkeypatch)
    for number in range(3):
        results = [ranks.step(number) for ranks in (none, some, every)]
        for run in results:
            assert all(torch.equal(result, run[0]) for result in run[1:])
        if exact:
            assert torch.equal(results[0][0], results[1][0])
            assert torch.equal(results[0][0], results[2][0])
    if exact:
        for expected, one, other in zip(none.held(), some.held(), every.held(), strict=True):
            assert torch.equal(expected, one)
            assert torch.equal(expected, other)


@pytest.mark.parametrize("compiles", [pytest.param(True, marks=needs_loops), False])
@pytest.mark.parametrize("spec", ["int8", "sign", "topk:0.1"])
@pytest.mark.parametrize(("route", "size"), [("gather", 2), ("gather", 3), ("two-shot", 3)])
def test_nothing_is_lost(
    spec: str, route: str, size: int, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What went in is what came out and what is kept: an owner's residual counts once for every rank."""
    ranks = Ranks(spec, route, [compiles] * size, monkeypatch)
    total = torch.zeros(sum(SIZES), dtype=torch.float64)
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        for _ in range(size):
            total += torch.cat([torch.randn(numel, generator=generator) for numel in SIZES])
        total -= size * ranks.step(number)[0].double()
    kept = sum(torch.cat(mine).double() for mine in ranks.residuals)
    if route == "two-shot":
        for rank, owned in enumerate(ranks.owned):
            start = 0
            for numel, mine in zip(SIZES, owned, strict=True):
                assert mine is not None
                at = 0
                for low, count in owned_ranges(numel, ranks.codec.group_size, size, rank):
                    kept[start + low : start + low + count] += size * mine[at : at + count].double()
                    at += count
                start += numel
    torch.testing.assert_close(kept, total, rtol=0, atol=1e-5)


@pytest.mark.parametrize("compiles", [pytest.param(True, marks=needs_loops), False])
@pytest.mark.parametrize(("route", "size"), [("gather", 2), ("two-shot", 3)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_step_changes_no_residual(
    route: str, size: int, bad: float, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks("int8", route, [compiles] * size, monkeypatch)
    ranks.step(0)
    before = [held.clone() for held in ranks.held()]
    for result in ranks.step(1, bad=bad):
        assert bool(result.isnan().all())
    for kept, held in zip(before, ranks.held(), strict=True):
        assert torch.equal(kept, held)
    assert all(bool(result.isfinite().all()) for result in ranks.step(2))


@pytest.mark.parametrize("compiles", [pytest.param(True, marks=needs_loops), False])
@pytest.mark.parametrize(("route", "size"), [("gather", 2), ("two-shot", 3)])
@pytest.mark.parametrize("unused", [0, 1])
def test_a_slice_nobody_used_keeps_its_residual(
    route: str, size: int, unused: int, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks("int8", route, [compiles] * size, monkeypatch)
    ranks.step(0)
    before = [mine[unused].clone() for mine in ranks.residuals]
    first = sum(SIZES[:unused])
    for result in ranks.step(1, unused=unused):
        assert not bool(result[first : first + SIZES[unused]].any())
    for kept, mine in zip(before, ranks.residuals, strict=True):
        assert torch.equal(kept, mine[unused])


@needs_loops
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("spec", ["int8", "uint8", "uint8:none"])
def test_a_mean_without_feedback_is_the_same_with_loops(
    spec: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [
        Ranks(spec, "gather", [loops] * size, monkeypatch).step(0, feedback=False) for loops in (True, False)
    ]
    assert torch.equal(runs[0][0], runs[0][1])
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=1e-6, atol=1e-6)


def test_scratch_of_half_gradients_is_bounded_by_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks("int8", "gather", [False, False], monkeypatch)
    ranks.dtype = torch.bfloat16
    for number in range(3):
        first, second = ranks.step(number)
        assert torch.equal(first, second)
    parked = [
        buffer.numel()
        for (name, *_), buffer in ranks.scratch[0]._buffers.items()
        if name.startswith("parked")
    ]
    assert parked == [sum(ranks.codec.padded(numel) for numel in SIZES)]
