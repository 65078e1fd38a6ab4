"""A low-rank exchange of float32 gradients by compiled loops, which never form M = g + e; see `low_rank_loops`.

Besides the residual and the right factor, a parameter's memory then holds "ahead": (rank, rows) float32, the product of
its residual with the orthonormal right factor that the next step begins with. It only saves reading the residual once
more. It is saved with the rest, so that a resumed run adds the same numbers, and where it is missing or was made for
another factor, the product is formed anew.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from tensorplay.compression.compiled import loops_for
from tensorplay.compression.error_feedback import Condition
from tensorplay.compression.low_rank_factors import held_right, multiply_transposed
from tensorplay.compression.low_rank_plan import Factorisation, LowRankPlan
from tensorplay.compression.memory import Tensors

__all__ = ["AHEAD", "Fused", "agreement_code", "fused_for"]

LOOPS = "tensorplay.compression.low_rank_loops"
AHEAD = "ahead"


def fused_for(factor: torch.Tensor, branch_free: bool) -> "Fused | None":
    """What runs exchanges whose factors are like `factor`; None where PyTorch's operations do."""
    loops = None if branch_free else loops_for(factor, LOOPS)
    return None if loops is None else Fused(loops)


def agreement_code(plan: LowRankPlan, fused: "Fused | None") -> int:
    """0, or a number that ranks must have in common: not 0 where this rank's results could have bits of their own.

    They do where the loops and torch.mm add up in different orders, which they are not known to.
    """
    if fused is None:
        return 0
    ranks = sorted({item.rank for item in plan.factorisations if item.rank in fused.loops.SETTLE})
    return sum(1 << rank for rank in ranks if not _is_torchs(rank))


@functools.cache
def _is_torchs(rank: int) -> bool:
    """Whether this machine's loops write P Q^T to the bit as torch.mm does."""
    fused = fused_for(torch.empty(0), branch_free=False)
    if fused is None:
        return True
    generator = torch.Generator().manual_seed(rank)
    left, right = (torch.randn(rank, length, generator=generator) for length in (67, 203))
    mean, rest, ahead = torch.zeros(67, 203), torch.zeros(67, 203), torch.zeros(rank, 67)
    fused.loops.SETTLE[rank](
        *(t.numpy() for t in (mean, rest, left, right)), 1.0, right.numpy(), ahead.numpy()
    )
    return torch.equal(mean, torch.mm(left.t(), right))


@dataclass(frozen=True)
class _Part:
    """A member's gradient as whole rows of a factorisation's matrix `at`."""

    index: int
    at: int
    rows: slice
    gradient: torch.Tensor
    residual: torch.Tensor


@dataclass(frozen=True)
class Fused:
    """The loops and how members are handed to them. A factorisation is done by the same methods from end to end.

    Shapes: left (batch, rank, rows), right and following (batch, rank, columns); values and residuals of members (n,).
    """

    loops: Any

    def fits(self, item: Factorisation, values: Sequence[torch.Tensor], memories: Sequence[Tensors]) -> bool:
        """Whether every member is whole rows of float32 with a residual, and there are loops for the rank."""
        return (
            item.rank in self.loops.SETTLE
            and item.rows_each > 0
            and all(
                values[index].dtype == torch.float32 and "residual" in memories[index]
                for index in item.members
            )
        )

    def project(
        self,
        item: Factorisation,
        values: Sequence[torch.Tensor],
        memories: Sequence[Tensors],
        left: torch.Tensor,
        right: torch.Tensor,
        is_own: bool,
    ) -> None:
        """left = (g + e) right^T.

        Args:
            values, memories: of all slices. is_own: `right` comes from the memories, not from another rank or a draw.
        """
        loop = self.loops.PROJECT[item.rank]
        for part in _parts(item, values, memories):
            out, factor, memory = left[part.at][:, part.rows], right[part.at], memories[part.index]
            loop(part.gradient.numpy(), factor.numpy(), out.numpy())
            ahead = _ahead(item, memories, part, out) if is_own else None
            if ahead is not None:
                out.add_(ahead)
            else:
                memory.pop(AHEAD, None)
                multiply_transposed(factor, part.residual, out, add=True)

    def back(
        self,
        item: Factorisation,
        values: Sequence[torch.Tensor],
        memories: Sequence[Tensors],
        left: torch.Tensor,
        right: torch.Tensor,
    ) -> None:
        """right = left (g + e)."""
        right.zero_()
        loop = self.loops.BACK[item.rank]
        for part in _parts(item, values, memories):
            rows = left[part.at][:, part.rows].numpy()
            loop(part.gradient.numpy(), part.residual.numpy(), rows, right[part.at].numpy())

    def settle(
        self,
        item: Factorisation,
        values: Sequence[torch.Tensor],
        memories: Sequence[Tensors],
        left: torch.Tensor,
        right: torch.Tensor,
        following: torch.Tensor,
        share: float,
        keep: dict[int, Condition],
    ) -> None:
        """g = left^T right;  e = g + e - share left^T right;  ahead = e following^T. Zero where `keep` is False."""
        loop = self.loops.SETTLE[item.rank]
        for part in _parts(item, values, memories):
            memory = memories[part.index]
            if not keep[part.index]:
                part.gradient.zero_()
                if item.is_shared:  # its factor moves on with the others
                    memory.pop(AHEAD, None)
                continue
            rows = left[part.at][:, part.rows]
            ahead = memory.get(AHEAD)
            if ahead is None or not _is_like(ahead, rows):
                ahead = memory[AHEAD] = torch.empty(rows.shape)
            tensors = (part.gradient, part.residual, rows, right[part.at], following[part.at], ahead)
            arrays = [t.numpy() for t in tensors]
            loop(*arrays[:4], numpy.float32(share), *arrays[4:])


def _parts(
    item: Factorisation, values: Sequence[torch.Tensor], memories: Sequence[Tensors]
) -> Iterator[_Part]:
    shape = (item.rows_each, item.columns)
    for number, index in enumerate(item.members):
        first = number * item.rows_each if item.is_shared else 0
        yield _Part(
            index,
            0 if item.is_shared else number,
            slice(first, first + item.rows_each),
            values[index].view(shape),
            memories[index]["residual"].view(shape),
        )


def _is_like(ahead: torch.Tensor, out: torch.Tensor) -> bool:
    return ahead.shape == out.shape and ahead.dtype == out.dtype and ahead.device == out.device


def _ahead(
    item: Factorisation, memories: Sequence[Tensors], part: _Part, out: torch.Tensor
) -> torch.Tensor | None:
    """The kept product, if it was made for the factor in use: the one that the members share, or the member's own."""
    memory = memories[part.index]
    ahead, own = memory.get(AHEAD), memory.get("q")
    if ahead is None or own is None or not _is_like(ahead, out):
        return None
    held = held_right(memories, item.members if item.is_shared else (part.index,), (item.rank, item.columns))
    return ahead if held is not None and (own is held or torch.equal(own, held)) else None
