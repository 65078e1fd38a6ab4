"""A low-rank exchange of float32 gradients by compiled loops, which never form M = g + e; see `low_rank_loops`.

Besides the residual and the right factor, a parameter's memory then holds "ahead": (rank, rows) float32, the product of
its residual with the orthonormal right factor that the next step begins with. It only saves reading the residual once
more: where it is missing, as after loading, or was made for another factor, the same loop forms the same bits anew.
"""

import functools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from tensorplay.compression.compiled import loops_for
from tensorplay.compression.error_feedback import Condition
from tensorplay.compression.low_rank_factors import held_right
from tensorplay.compression.low_rank_plan import Factorisation, LowRankPlan
from tensorplay.compression.memory import Tensors

__all__ = ["AHEAD", "FusedMatrices", "fits", "fused_loops", "require_one_rounding", "rounding_code"]

LOOPS = "tensorplay.compression.low_rank_loops"
AHEAD = "ahead"
"""The kind under which a parameter's memory holds its residual's product with the next right factor."""


def fused_loops(factor: torch.Tensor) -> Any:
    """The module of loops for exchanges whose factors are like `factor`; None where PyTorch's operations are used."""
    return loops_for(factor, LOOPS)


def fits(
    loops: Any, item: Factorisation, values: Sequence[torch.Tensor], memories: Sequence[Tensors]
) -> bool:
    """Whether all members (of all slices' `values` and `memories`) are whole rows of float32 with a residual, and there
    are loops for the rank."""
    if loops is None or item.rank not in loops.SETTLE or not item.rows_each:
        return False
    return all(
        values[index].dtype == torch.float32 and "residual" in memories[index] for index in item.members
    )


def rounding_code(loops: Any, plan: LowRankPlan) -> int:
    """Names how this rank rounds P Q^T, twice; plus 1 where loops compute it."""
    ranks = sorted({item.rank for item in plan.factorisations if item.rows_each})
    with_loops = loops is not None and any(rank in loops.SETTLE for rank in ranks)
    crc = 0
    for rank in ranks:
        crc = zlib.crc32(_product(loops if with_loops and rank in loops.SETTLE else None, rank), crc)
    return 2 * crc + with_loops


def require_one_rounding(codes: Sequence[int]) -> None:
    """Check the ranks' `rounding_code`s: some may compute with loops and others without where that is the same.

    Raises: RuntimeError: they do, and it isn't.
    """
    with_loops = [rank for rank, code in enumerate(codes) if code % 2]
    if 0 < len(with_loops) < len(codes) and len({code // 2 for code in codes}) > 1:
        names = ", ".join(map(str, with_loops))
        raise RuntimeError(
            f"rank {names} multiplies factors with Numba, the others without, and on these processors the last bits "
            "differ: install Numba on all ranks or on none (NUMBA_DISABLE_JIT=1 switches it off)"
        )


@functools.cache
def _product(loops: Any, rank: int) -> bytes:
    """A product P Q^T of that rank, as an exchange computes it."""
    generator = torch.Generator().manual_seed(rank)
    left, right = (torch.randn(rank, length, generator=generator) for length in (67, 203))
    mean = torch.zeros(67, 203)
    if loops is None:
        torch.mm(left.t(), right, out=mean)
    else:
        arrays = [t.numpy() for t in (mean, torch.zeros(67, 203), left, right, right, torch.zeros(rank, 67))]
        loops.SETTLE[rank](*arrays[:4], numpy.float32(1.0), *arrays[4:])
    return mean.numpy().tobytes()


@dataclass(frozen=True)
class _Member:
    """A member: its gradient and residual (rows, columns), and its part of the factors of matrix `at`."""

    index: int
    at: int
    gradient: Any
    residual: Any
    left: Any
    right: Any


class FusedMatrices:
    """The matrices of one factorisation, in an exchange that goes through the loops from end to end.

    Args:
        values, memories: of all slices of the bucket. left: (batch, rank, rows), right: (batch, rank, columns): the
            factors' memory, read and written by every method.
    """

    def __init__(
        self,
        loops: Any,
        item: Factorisation,
        values: Sequence[torch.Tensor],
        memories: Sequence[Tensors],
        factors: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        self.loops, self.item, self.memories = loops, item, memories
        self.left, self.right = factors
        lefts, rights = self.left.numpy(), self.right.numpy()
        shape = (item.rows_each, item.columns)
        self.members = []
        for number, index in enumerate(item.members):
            at = 0 if item.is_shared else number
            first = number * item.rows_each if item.is_shared else 0
            gradient = values[index].view(shape).numpy()
            residual = memories[index]["residual"].view(shape).numpy()
            left = lefts[at][:, first : first + item.rows_each]
            self.members.append(_Member(index, at, gradient, residual, left, rights[at]))

    def project(self, is_own: bool) -> None:
        """left = (g + e) right^T. `is_own`: right is what the memories hold, not another rank's or a draw."""
        loop = self.loops.PROJECT[self.item.rank]
        for member in self.members:
            loop(member.gradient, member.right, member.left)
            kept = self._ahead(member) if is_own else None
            if kept is not None:
                ahead = kept.numpy()
            else:
                self.memories[member.index].pop(AHEAD, None)
                ahead = numpy.empty(member.left.shape, numpy.float32)
                loop(member.residual, member.right, ahead)
            numpy.add(member.left, ahead, out=member.left)

    def back(self) -> None:
        """right = left (g + e)."""
        self.right.zero_()
        loop = self.loops.BACK[self.item.rank]
        for member in self.members:
            loop(member.gradient, member.residual, member.left, member.right)

    def settle(self, following: torch.Tensor, share: float, keep: Mapping[int, Condition]) -> None:
        """g = left^T right;  e = g + e - share left^T right;  ahead = e following^T;  where `keep` is False: g = 0."""
        loop = self.loops.SETTLE[self.item.rank]
        factors, part = following.numpy(), numpy.float32(share)
        for member in self.members:
            memory = self.memories[member.index]
            if not keep[member.index]:
                member.gradient.fill(0.0)
                if self.item.is_shared:  # its factor moves on with the others
                    memory.pop(AHEAD, None)
                continue
            ahead = memory.get(AHEAD)
            if ahead is None or not _is_like(ahead, member):
                ahead = memory[AHEAD] = torch.empty(member.left.shape)
            gradient, residual, left, right = member.gradient, member.residual, member.left, member.right
            loop(gradient, residual, left, right, part, factors[member.at], ahead.numpy())

    def _ahead(self, member: _Member) -> torch.Tensor | None:
        """The kept product, if it was made for the factor in use: the one the members share, or the member's own."""
        memory, item = self.memories[member.index], self.item
        ahead, own = memory.get(AHEAD), memory.get("q")
        if ahead is None or own is None or not _is_like(ahead, member):
            return None
        sources = item.members if item.is_shared else (member.index,)
        held = held_right(self.memories, sources, (item.rank, item.columns))
        return ahead if held is not None and (own is held or torch.equal(own, held)) else None


def _is_like(ahead: torch.Tensor, member: _Member) -> bool:
    return (
        tuple(ahead.shape) == member.left.shape
        and ahead.dtype == torch.float32
        and ahead.device.type == "cpu"
        and ahead.is_contiguous()
    )
