"""The factors of a bucket: where they start from, how they are made orthonormal, and what is kept of them.

Factors are float32 and stored transposed, (rank, length), so that their long side is contiguous.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch

from tensorplay.compression.error_feedback import Condition
from tensorplay.compression.low_rank_plan import Factorisation, LowRankPlan
from tensorplay.compression.memory import Tensors
from tensorplay.compression.orthogonalize import orthogonalize_

__all__ = [
    "draw_factor",
    "is_bounded",
    "load_right",
    "multiply",
    "multiply_transposed",
    "orthogonalize_factors",
    "store_right",
]

#: A factor sum of this size counts as an overflow: products with it would leave float32.
_OVERFLOW = 1e36

# MKL's product of a thin factor and a transposed matrix reads the matrix once for every two or three rows of the
# factor. In slabs of a few rows it reads it once; that pays from this rank and this many columns on.
_SLAB_RANK = 4
_SLAB_COLUMNS = 2048
_SLAB_ROWS = 16

Draw = Callable[[int, tuple[int, int]], torch.Tensor]


def draw_factor(seed: int, step: int, place: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    """A right factor (rank, columns) of normal values that all ranks draw alike, the user's generators untouched.

    >>> torch.equal(draw_factor(0, 5, (0, 1), (2, 3)), draw_factor(0, 5, (0, 1), (2, 3)))
    True
    """
    generator = torch.Generator()
    generator.manual_seed(zlib.crc32(f"{seed}/{step}/{place}/{shape}".encode()))
    return torch.randn(shape, generator=generator)


def load_right(
    plan: LowRankPlan, memories: Sequence[Tensors], flat: torch.Tensor, draw: Draw, warm_start: bool
) -> None:
    """Fill `flat` with the right factors of the last step; `draw(number, shape)` where there is none that fits.

    A matrix of several parameters takes the factor of the first of them that has one of its size.
    """
    for number, item in enumerate(plan.factorisations):
        right = item.right(flat)
        drawn: torch.Tensor | None = None
        for at in range(item.batch):
            members = item.members if item.is_shared else item.members[at : at + 1]
            held = held_right(memories, members, right.shape[1:]) if warm_start else None
            if held is None:
                if drawn is None:
                    drawn = draw(number, (item.batch * item.rank, item.columns)).view(right.shape)
                held = drawn[at]
            right[at].copy_(held)


def orthogonalize_factors(
    flat: torch.Tensor,
    classes: Sequence[tuple[int, int, int, int]],
    epsilon: float,
    branch_free: bool,
    revive: bool = False,
) -> None:
    """Make all factors' rows orthonormal, one call for those of one shape.

    Args:
        classes: (offset, count, rank, length) of neighbours of one shape. branch_free: never wait for a device's value.
        revive: a row that is exactly zero, since its gradient was, becomes some direction, so that a layer whose
            gradient returns is seen again.
    """
    for start, count, rank, length in classes:
        rows = flat[start : start + count * rank * length].view(count, rank, length)
        if revive:
            dead = (rows.amax(-1) == 0) & (rows.amin(-1) == 0)
            if branch_free or bool(dead.any()):
                torch.where(dead.unsqueeze(-1), _some_directions(rank, length, flat.device), rows, out=rows)
        orthogonalize_(rows, epsilon)


def _some_directions(rank: int, length: int, device: torch.device) -> torch.Tensor:
    """Rows without structure that need no generator: sin(1), sin(4), sin(9), …"""
    counted = torch.arange(1, rank * length + 1, dtype=torch.float64, device=device)
    return counted.square_().sin_().float().view(rank, length)


def store_right(
    item: Factorisation, memories: Sequence[Tensors], right: torch.Tensor, keep: Mapping[int, Condition]
) -> None:
    """Keep the right factors (batch, rank, columns) for the next step, where `keep[slice]` says so.

    What is kept is always a new tensor: members of one matrix share it, and once the buckets are rebuilt they may
    belong to different ones.
    """
    if item.is_shared:
        groups, conditions = [item.members], [_any(keep[index] for index in item.members)]
    else:
        groups = [(index,) for index in item.members]
        conditions = [keep[index] for index in item.members]
    for at, (members, condition) in enumerate(zip(groups, conditions, strict=True)):
        own = right[at]
        if isinstance(condition, torch.Tensor):
            held = held_right(memories, members, own.shape)
            kept = torch.where(condition, own, 0.0 if held is None else held.to(own.device))
        elif condition:
            kept = own.clone()
        else:
            continue
        for index in members:
            memories[index]["q"] = kept


def held_right(
    memories: Sequence[Tensors], members: Sequence[int], shape: Sequence[int]
) -> torch.Tensor | None:
    """The right factor that the first of the members has that has one of this shape (rank, columns)."""
    for index in members:
        held = memories[index].get("q")
        if held is not None and tuple(held.shape) == tuple(shape):
            return held
    return None


def _any(conditions: Iterable[Condition]) -> Condition:
    found: Any = False
    for condition in conditions:
        found = condition | found
    return cast(Condition, found)


def is_bounded(values: torch.Tensor) -> torch.Tensor:
    """Whether no value is NaN or near the end of float32: a bool tensor with no dimensions."""
    if values.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=values.device)
    return (values.amax() < _OVERFLOW) & (values.amin() > -_OVERFLOW)


def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """out = left @ right over a batch; a single matrix takes the faster route."""
    if out.shape[0] == 1:
        torch.mm(left[0], right[0], out=out[0])
    else:
        torch.bmm(left, right, out=out)


def multiply_transposed(
    factor: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor, add: bool = False
) -> None:
    """out = factor @ matrix^T, or out += it; factor: (rank, columns), matrix: (rows, columns), out: (rank, rows)."""
    rank, columns = factor.shape
    rows = matrix.shape[0]
    slabs = rows // _SLAB_ROWS
    if rank < _SLAB_RANK or columns < _SLAB_COLUMNS or not slabs or not _has_slabs(matrix):
        torch.addmm(out, factor, matrix.t(), beta=float(add), out=out)
        return
    whole = slabs * _SLAB_ROWS
    right = factor.t().contiguous().expand(slabs, columns, rank)
    product = torch.bmm(matrix[:whole].view(slabs, _SLAB_ROWS, columns), right).view(whole, rank).t()
    if add:
        out[:, :whole].add_(product)
    else:
        out[:, :whole].copy_(product)
    if whole < rows:
        torch.addmm(out[:, whole:], factor, matrix[whole:].t(), beta=float(add), out=out[:, whole:])


def _has_slabs(matrix: torch.Tensor) -> bool:
    return matrix.device.type == "cpu" and bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]
