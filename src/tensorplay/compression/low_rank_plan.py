"""Which gradients of a bucket are factorised, as which matrices, and where their factors lie.

A gradient is seen as the matrix of its memory: its first dimension against the rest. The columns of a channels_last
weight are permuted then, and a transposed weight appears transposed; neither changes what a low-rank approximation is.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tensorplay.compression.bucket import GradientSlice

__all__ = ["LAYOUTS", "Factorisation", "LowRankPlan", "Rule", "matrix_shape", "plan_low_rank"]

LAYOUTS = ("layer", "batched", "same_shape", "bucket")
"""layer: a matrix a parameter. batched: the same, those of one shape multiplied together. same_shape: the rows of all
parameters of one shape make one matrix. bucket: the whole bucket is one square matrix, padded with zeros."""


def matrix_shape(shape: Sequence[int], stride: Sequence[int] | None, numel: int) -> tuple[int, int]:
    """Rows and columns of the matrix that a gradient's memory is.

    The first dimension against the rest, where it is the outermost or the innermost in memory; the outermost dimension
    against the rest in the few layouts where it is neither.

    Args:
        shape, stride: of the parameter (stride None: contiguous). numel: its values; twice the elements if complex.
    Example:
        >>> matrix_shape((8, 3, 5, 5), None, 600)
        (8, 75)
        >>> matrix_shape((8, 4), (1, 8), 32)
        (4, 8)
    """
    if numel == 0 or not shape:
        return (1, numel)
    if stride is None:
        return (shape[0], numel // shape[0])
    order = sorted(
        (dim for dim in range(len(shape)) if shape[dim] > 1), key=lambda dim: stride[dim], reverse=True
    )
    if not order or order[0] == 0 or shape[0] == 1:
        return (shape[0], numel // shape[0])
    if order[-1] == 0:
        columns = shape[0] * (numel // math.prod(shape))
        return (numel // columns, columns)
    return (shape[order[0]], numel // shape[order[0]])


@dataclass(frozen=True)
class Rule:
    """What is factorised: rank at most `rank`, where that makes a matrix more than `min_rate` times smaller."""

    rank: int
    min_rate: float
    layout: str

    def rank_of(self, rows: int, columns: int) -> int:
        """The rank for a matrix of that size; 0: not worth it."""
        rank = min(rows, columns, self.rank)
        return rank if (rows + columns) * rank * self.min_rate < rows * columns else 0


@dataclass(frozen=True)
class Factorisation:
    """Matrices (batch, rows, columns) that are factorised in one go.

    Args:
        members: slices, whose values lie behind each other in the matrices; `starts` says where.
        rows_each: rows of a member; 0 where members don't begin and end with a row.
        left_offset, right_offset: of the factors, stored transposed: (batch, rank, rows) and (batch, rank, columns).
    """

    members: tuple[int, ...]
    starts: tuple[int, ...]
    batch: int
    rows: int
    columns: int
    rank: int
    rows_each: int
    left_offset: int = 0
    right_offset: int = 0

    @property
    def numel(self) -> int:
        """Values of the matrices, padding included."""
        return self.batch * self.rows * self.columns

    @property
    def is_shared(self) -> bool:
        """Whether several members have one pair of factors."""
        return len(self.members) > self.batch

    def left(self, flat: torch.Tensor) -> torch.Tensor:
        """This left factor within the flat vector of all: (batch, rank, rows)."""
        shape = (self.batch, self.rank, self.rows)
        return flat[self.left_offset : self.left_offset + math.prod(shape)].view(shape)

    def right(self, flat: torch.Tensor) -> torch.Tensor:
        """This right factor within the flat vector of all: (batch, rank, columns)."""
        shape = (self.batch, self.rank, self.columns)
        return flat[self.right_offset : self.right_offset + math.prod(shape)].view(shape)


@dataclass(frozen=True)
class LowRankPlan:
    """A bucket's factorisations.

    Args:
        plain: slices that travel uncompressed. left_elements, right_elements: of all factors.
        left_classes, right_classes: (offset, count, rank, length) of neighbouring factors of one shape.
        elements: of the bucket. members: all slices that are factorised.
        fingerprint: equal for equal plans.
    """

    factorisations: tuple[Factorisation, ...]
    plain: tuple[int, ...]
    plain_elements: int
    left_elements: int
    right_elements: int
    left_classes: tuple[tuple[int, int, int, int], ...]
    right_classes: tuple[tuple[int, int, int, int], ...]
    elements: int
    members: tuple[int, ...]
    fingerprint: int

    @property
    def sent_elements(self) -> int:
        """Elements that enter collectives: both factors and what travels uncompressed, without the flags."""
        return self.left_elements + self.right_elements + self.plain_elements


def plan_low_rank(slices: Sequence[GradientSlice], rule: Rule) -> LowRankPlan:
    """Lay out the factorisations of a bucket; a function of shapes alone, so all ranks get the same."""
    sizes = [entry.values.numel() for entry in slices]
    drafts: list[Factorisation] = []
    if rule.layout == "bucket":
        drafts += _whole_bucket(sizes, rule)
    else:
        shapes = [matrix_shape(entry.shape, entry.stride, sizes[at]) for at, entry in enumerate(slices)]
        groups: dict[object, list[int]] = {}
        for index, shape in enumerate(shapes):
            if sizes[index]:
                groups.setdefault(index if rule.layout == "layer" else shape, []).append(index)
        for members in groups.values():
            rows, columns = shapes[members[0]]
            together = len(members) if rule.layout == "same_shape" else 1
            rank = rule.rank_of(rows * together, columns)
            if rank:
                starts = tuple(at * rows * columns for at in range(len(members)))
                batch = len(members) // together
                drafts.append(
                    Factorisation(tuple(members), starts, batch, rows * together, columns, rank, rows)
                )
    factorised = {index for draft in drafts for index in draft.members}
    plain = tuple(index for index, size in enumerate(sizes) if size and index not in factorised)
    return _place(drafts, plain, sizes)


def _whole_bucket(sizes: Sequence[int], rule: Rule) -> list[Factorisation]:
    total = sum(sizes)
    side = math.isqrt(max(0, total - 1)) + 1
    rows = -(-total // side)  # rows of nothing but padding are left out
    rank = rule.rank_of(rows, side) if total else 0
    if not rank:
        return []
    members = tuple(index for index, size in enumerate(sizes) if size)
    starts, at = [], 0
    for index in members:
        starts.append(at)
        at += sizes[index]
    return [Factorisation(members, tuple(starts), 1, rows, side, rank, rows_each=0)]


def _place(drafts: list[Factorisation], plain: tuple[int, ...], sizes: Sequence[int]) -> LowRankPlan:
    """Give every draft its places; factors of one shape become neighbours, so that one QR serves them all."""
    lefts, left_classes, left_elements = _stack([(d.batch, d.rank, d.rows) for d in drafts])
    rights, right_classes, right_elements = _stack([(d.batch, d.rank, d.columns) for d in drafts])
    placed = []
    for draft, left, right in zip(drafts, lefts, rights, strict=True):
        placed.append(replace(draft, left_offset=left, right_offset=right))
    return LowRankPlan(
        factorisations=tuple(placed),
        plain=plain,
        plain_elements=sum(sizes[index] for index in plain),
        left_elements=left_elements,
        right_elements=right_elements,
        left_classes=left_classes,
        right_classes=right_classes,
        elements=sum(sizes),
        members=tuple(index for item in placed for index in item.members),
        fingerprint=zlib.crc32(repr((placed, plain, sizes)).encode()),
    )


def _stack(
    shapes: Sequence[tuple[int, int, int]],
) -> tuple[list[int], tuple[tuple[int, int, int, int], ...], int]:
    """Place blocks (batch, rank, length) with equal ones as neighbours: their offsets, the classes, the total."""
    offsets = [0] * len(shapes)
    classes: list[tuple[int, int, int, int]] = []
    at = 0
    for index in sorted(range(len(shapes)), key=lambda i: (shapes[i][1:], i)):
        batch, rank, length = shapes[index]
        offsets[index] = at
        if classes and classes[-1][2:] == (rank, length):
            start, count = classes[-1][:2]
            classes[-1] = (start, count + batch, rank, length)
        else:
            classes.append((at, batch, rank, length))
        at += batch * rank * length
    return offsets, tuple(classes), at
