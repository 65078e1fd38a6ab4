"""How a bucket is cut for the wire.

    bucket -> units (exchanges that overlap) -> chunks (one an owner) -> blocks (one call of a codec) -> segments

Where a parameter is cut depends on its size, the codec's group size and the number of ranks, never on the bucket it is
in. So a value meets the same group, and the same owner, before and after DDP rebuilds its buckets and after a resume.
"""

import itertools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tensorplay.compression.codec import Codec

__all__ = [
    "BLOCK_ELEMENTS",
    "UNIT_ELEMENTS",
    "Block",
    "Chunk",
    "Entry",
    "Segment",
    "Unit",
    "owned_ranges",
    "plan_units",
]

BLOCK_ELEMENTS = 1 << 21
"""Values of one call of a codec: enough that calling costs little; codecs go through it in runs that fit the cache."""
UNIT_ELEMENTS = 1 << 21
"""Elements of one exchange, or an eighth more: enough to fill the wire, few enough that one is encoded while another
is sent."""
_LONG_ELEMENTS = 1 << 14
"""Pieces of at least this many elements are worth a call of a codec of their own."""
_HEADER_BYTES = 16  # 8 of fingerprint, then one flag a slice, rounded up


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


@dataclass(frozen=True)
class Segment:
    """`length` values from `start` of slice `index`, at `at` in the block and `owned_at` in the owner's residual."""

    index: int
    start: int
    length: int
    at: int
    owned_at: int


@dataclass(frozen=True)
class Block:
    """One vector for a codec: its segments, and where its payloads, its mean (bytes) and what it parks (values) lie."""

    codec: Codec
    second: Codec
    dtype: torch.dtype
    numel: int
    segments: tuple[Segment, ...]
    gaps: tuple[tuple[int, int], ...]
    seed: int
    offset: int
    payload_bytes: int
    second_offset: int
    second_bytes: int
    mean_offset: int
    parked_at: int
    compressed: bool

    @property
    def is_one_piece(self) -> bool:
        """Whether the block is one stretch of one slice, with no padding."""
        return len(self.segments) == 1 and not self.gaps


@dataclass(frozen=True)
class Chunk:
    """What one rank owns of a unit."""

    blocks: tuple[Block, ...]
    message_bytes: int
    second_bytes: int
    mean_bytes: int


@dataclass(frozen=True)
class Unit:
    """One exchange. `indices` are the slices it touches, in the order of their flags; `elements` counts values."""

    chunks: tuple[Chunk, ...]
    indices: tuple[int, ...]
    header_bytes: int
    elements: int


@dataclass(frozen=True)
class Entry:
    """A slice as the plan sees it: its size, its codec (None: uncompressed), and a number that names it."""

    numel: int
    codec: Codec | None
    second: Codec | None
    seed: int

    @property
    def group_size(self) -> int:
        """Pieces start at multiples of this: whole groups of both codecs."""
        assert self.codec is not None
        return math.lcm(self.codec.group_size, (self.second or self.codec).group_size)


@dataclass(frozen=True)
class _Piece:
    index: int
    start: int
    length: int
    owned_at: int


def _slabs(numel: int, group_size: int, unit_elements: int = UNIT_ELEMENTS) -> list[tuple[int, int]]:
    """Cut a parameter into pieces of at most about a unit, at group borders: (start, length)."""
    step = max(group_size, unit_elements // group_size * group_size)
    return [(start, min(step, numel - start)) for start in range(0, numel, step)]


def _shares(start: int, length: int, group_size: int, parts: int) -> list[tuple[int, int]]:
    """Cut a slab into `parts` shares at group borders, nearly even; shares may be empty: (start, length)."""
    groups = -(-length // group_size)
    borders = [min(length, groups * part // parts * group_size) for part in range(parts + 1)]
    return [(start + low, high - low) for low, high in itertools.pairwise(borders)]


def owned_ranges(numel: int, group_size: int, parts: int, owner: int) -> list[tuple[int, int]]:
    """The ranges (start, length) of a compressed parameter that rank `owner` of `parts` owns."""
    return [_shares(start, length, group_size, parts)[owner] for start, length in _slabs(numel, group_size)]


def plan_units(
    entries: Sequence[Entry], parts: int, plain: Codec, wide: torch.dtype, whole: bool = False
) -> list[Unit]:
    """Cut the slices of a bucket into units.

    Args:
        entries: the slices. parts: owners a unit is split over (1: everybody gets everything).
        plain: codec of what travels uncompressed. wide: dtype in which that is averaged.
        whole: one unit and one block, however large: for codecs that look at a whole bucket.

    1. Compressed slices are cut into slabs, slabs gathered into units.
    2. What travels uncompressed is one long vector, cut evenly; a short one rides with the last unit.
    3. Every unit is laid out: blocks, payload offsets, header.
    """
    drafts: list[list[list[tuple[Codec, Codec, bool, list[_Piece]]]]] = []
    unit_elements = sum(entry.numel for entry in entries) if whole else UNIT_ELEMENTS
    block_elements = unit_elements if whole else BLOCK_ELEMENTS
    filled = 0
    for index, entry in enumerate(entries):
        if entry.codec is None:
            continue
        owned = [0] * parts
        for start, length in _slabs(entry.numel, entry.group_size, unit_elements):
            if not drafts or filled + length > unit_elements + unit_elements // 8:
                drafts.append([[] for _ in range(parts)])
                filled = 0
            filled += length
            for part, (low, count) in enumerate(_shares(start, length, entry.group_size, parts)):
                if count:
                    piece = _Piece(index, low, count, owned[part])
                    owned[part] += count
                    second = entry.second or entry.codec
                    drafts[-1][part].append((entry.codec, second, True, [piece]))
    raw = [(index, entry.numel) for index, entry in enumerate(entries) if entry.codec is None and entry.numel]
    total = sum(numel for _, numel in raw)
    rides = bool(drafts) and total <= UNIT_ELEMENTS // 4
    for low in range(0, total, UNIT_ELEMENTS):
        high = min(total, low + UNIT_ELEMENTS)
        if not rides:
            drafts.append([[] for _ in range(parts)])
        for part in range(parts):
            span = (low + (high - low) * part // parts, low + (high - low) * (part + 1) // parts)
            pieces = _cover(raw, *span)
            if pieces:
                drafts[-1][part].append((plain, plain, False, pieces))
    return [_lay_out(draft, entries, wide, block_elements, whole) for draft in drafts]


def _cover(raw: Sequence[tuple[int, int]], low: int, high: int) -> list[_Piece]:
    """The pieces of the concatenated slices `raw` (index, numel) between `low` and `high`."""
    pieces = []
    base = 0
    for index, numel in raw:
        start, end = max(low, base), min(high, base + numel)
        if start < end:
            pieces.append(_Piece(index, start - base, end - start, 0))
        base += numel
    return pieces


def _lay_out(
    draft: list[list[tuple[Codec, Codec, bool, list[_Piece]]]],
    entries: Sequence[Entry],
    wide: torch.dtype,
    block_elements: int,
    whole: bool,
) -> Unit:
    indices = sorted({piece.index for chunk in draft for *_, pieces in chunk for piece in pieces})
    header = _HEADER_BYTES + _aligned(len(indices))
    chunks = []
    parked = 0
    for chunk in draft:
        blocks: list[Block] = []
        offset, second_offset, mean_offset = header, 0, 0
        for codec, second, compressed, pieces in _merged(chunk):
            for segments, gaps, numel in _cut(
                pieces, math.lcm(codec.group_size, second.group_size), block_elements, whole
            ):
                dtype = torch.float32 if compressed else wide
                first = segments[0]
                block = Block(
                    codec,
                    second,
                    dtype,
                    numel,
                    segments,
                    gaps,
                    zlib.crc32(f"{entries[first.index].seed}/{first.start}".encode()),
                    offset,
                    codec.wire_bytes(numel),
                    second_offset,
                    second.wire_bytes(numel),
                    mean_offset,
                    parked,
                    compressed,
                )
                blocks.append(block)
                parked += numel
                offset += _aligned(block.payload_bytes)
                second_offset += _aligned(block.second_bytes)
                mean_offset += _aligned(numel * dtype.itemsize)
        chunks.append(Chunk(tuple(blocks), offset, second_offset, mean_offset))
    elements = sum(piece.length for chunk in draft for *_, pieces in chunk for piece in pieces)
    return Unit(tuple(chunks), tuple(indices), header, elements)


def _merged(
    chunk: list[tuple[Codec, Codec, bool, list[_Piece]]],
) -> list[tuple[Codec, Codec, bool, list[_Piece]]]:
    """Join neighbours that one call of a codec may handle."""
    merged: list[tuple[Codec, Codec, bool, list[_Piece]]] = []
    for codec, second, compressed, pieces in chunk:
        previous = merged[-1] if merged else None
        alone = codec.whole_blocks or second.whole_blocks
        if (
            previous
            and previous[0] is codec
            and previous[1] is second
            and previous[2] == compressed
            and not alone
        ):
            previous[3].extend(pieces)
        else:
            merged.append((codec, second, compressed, list(pieces)))
    return merged


def _cut(
    pieces: list[_Piece], group_size: int, block_elements: int, whole: bool
) -> list[tuple[tuple[Segment, ...], tuple[tuple[int, int], ...], int]]:
    """Lay pieces behind each other in blocks of at most about `block_elements`: (segments, gaps, numel).

    A long piece shares no block, so that codecs can work on it where it lies, unless one block is asked for.
    """
    step = max(group_size, block_elements // group_size * group_size)
    blocks = []
    segments: list[Segment] = []
    gaps: list[tuple[int, int]] = []
    at = 0
    for piece in pieces:
        done = 0
        is_long = piece.length >= _LONG_ELEMENTS and not whole
        while done < piece.length:
            if at >= step or (at and (is_long or (segments[0].length >= _LONG_ELEMENTS and not whole))):
                blocks.append((tuple(segments), tuple(gaps), at))
                segments, gaps, at = [], [], 0
            length = min(piece.length - done, step - at)
            segments.append(Segment(piece.index, piece.start + done, length, at, piece.owned_at + done))
            done += length
            padded = -(-length // group_size) * group_size
            if padded != length:
                gaps.append((at + length, at + padded))
            at += padded
    if segments:
        blocks.append((tuple(segments), tuple(gaps), at))
    return blocks
