"""The arithmetic of codecs with one scale a group, as loops that Numba compiles. Import it through `compiled`.

Every function goes through its groups once, by way of a row that stays in the first-level cache: it adds what was left
over, measures the group, makes its codes, and subtracts what they stand for. Arithmetic is that of the codecs' PyTorch
operations, operation by operation and in float32, so payloads are equal bit by bit; only the sum of magnitudes may be
added up in another order.

Shapes, everywhere: values, addend, out (groups x group_size,) float32; scales (groups,) float32; codes uint8, group
after group. All are contiguous NumPy arrays.

brief: scales are rounded to bfloat16.
add: what is encoded is values + addend.
subtract: the values become that less what the codes stand for; otherwise they are not changed.
accumulate: what is decoded is added to out; otherwise it replaces out.

Where a group's scale isn't finite, neither its codes nor its values mean anything: the step doesn't count.
"""

from typing import Any

import numpy

from tensorplay.compression.compiled import FUSED, jit

__all__ = [
    "affine_decode",
    "affine_encode",
    "bytes_decode",
    "bytes_encode",
    "bytes_levels",
    "fours_decode",
    "fours_encode",
    "fours_levels",
    "lloyd_max_decode",
    "lloyd_max_encode",
    "lloyd_max_levels",
    "signs_decode",
    "signs_encode",
    "signs_levels",
]

_FLOAT, _BYTE, _BITS, _WORD, _EIGHT = numpy.float32, numpy.uint8, numpy.int32, numpy.uint32, numpy.uint64
_ONE, _ZERO = _FLOAT(1.0), _FLOAT(0.0)
_INNER, _OUTER = _FLOAT(3.0), _FLOAT(10.0)
_ONE_BITS, _OUTER_BITS, _SIGN = _WORD(0x3F800000), _WORD(0x41200000), _WORD(0x80000000)
_OUTER_OR_INNER = _WORD(0x41200000 ^ 0x40400000)  # turns the bits of 10 into those of 3
#: Eight bytes of 0 or 1, read as one number and multiplied by this: its highest byte has the first of them in its
#: highest bit, the last in its lowest. Its bits are 63, 54, 45, …, so that no two products meet.
_GATHER, _TOP = _EIGHT(0x8040201008040201), _EIGHT(56)
_NOT_SIGN, _SIGN_BIT = _BITS(0x7FFFFFFF), _BITS(-0x80000000)
_INFINITY_BITS = _BITS(0x7F800000)
_NAN_BITS = _BITS(0x7FC00000)
_SHARE = _FLOAT(1.0 / 255.0)
_SMALLEST_SCALE_BITS = _BITS((127 - 120) << 23)  # of 2 ** -120


@jit(fastmath={"reassoc"})
def _sum_magnitudes(values: Any) -> Any:
    """Not finite where a value isn't."""
    total = _ZERO
    for i in range(values.shape[0]):
        total += abs(values[i])
    return total


@jit
def _brief(bits: Any) -> Any:
    """The bits of a float32 that isn't negative, rounded to the nearest bfloat16, ties to even."""
    if bits > _INFINITY_BITS:
        return _NAN_BITS
    return _BITS((bits + _BITS(0x7FFF) + ((bits >> _BITS(16)) & _BITS(1))) & _BITS(-0x10000))


@jit(inline="always")
def _store(levels: Any, scale: Any, first: int, size: int, out: Any, accumulate: bool) -> None:
    """The group of `out` at `first` becomes scale * level, or grows by it."""
    if accumulate:
        for i in range(size):
            out[first + i] = out[first + i] + levels[i] * scale
    else:
        for i in range(size):
            out[first + i] = levels[i] * scale


@jit(inline="always")
def bytes_levels(signed: Any, at: int, size: int, levels: Any, start: int) -> None:
    """The `size` codes int8 from `at` on, as levels from `start` on."""
    for i in range(size):
        levels[start + i] = _FLOAT(signed[at + i])


@jit(inline="always")
def fours_levels(signed: Any, at: int, size: int, levels: Any, start: int) -> None:
    """As `bytes_levels`, with 4 bits: size / 2 bytes int8."""
    half = size // 2
    for i in range(half):
        levels[start + i] = _FLOAT((_BITS(signed[at + i]) & _BITS(15)) - _BITS(8))
    for i in range(half):
        levels[start + half + i] = _FLOAT(_BITS(signed[at + i]) >> _BITS(4))


@jit(inline="always")
def signs_levels(codes: Any, at: int, size: int, level_bits: Any, start: int) -> None:
    """The levels 1 and -1 of size / 8 bytes, as bits."""
    for j in range(size // 8):
        byte = _WORD(codes[at + j])
        for k in range(8):
            level_bits[start + 8 * j + k] = _ONE_BITS | ((byte << _WORD(24 + k)) & _SIGN)


@jit(inline="always")
def lloyd_max_levels(codes: Any, at: int, size: int, level_bits: Any, start: int) -> None:
    """The levels 3 and 10, with their signs, of size / 4 bytes, as bits."""
    plane = size // 8
    for j in range(plane):
        negative, inside = _WORD(codes[at + j]), _WORD(codes[at + plane + j])
        for k in range(8):
            inner = (inside >> _WORD(7 - k)) & _WORD(1)
            level_bits[start + 8 * j + k] = (_OUTER_BITS ^ (inner * _OUTER_OR_INNER)) | (
                (negative << _WORD(24 + k)) & _SIGN
            )


# The loops below are written out where a function called from two of them would read better: within a function, even
# one put in its place by Numba, the compiler knows less of what it indexes, and takes up to twice as long.


@jit(fastmath=FUSED)
def bytes_encode(
    values: Any, addend: Any, scales: Any, codes: Any, factor: Any, brief: bool, add: bool, subtract: bool
) -> None:
    """scale = factor * max |value|, no less than 2^-120;  code = round(value / scale), of 8 bits.

    As integers, bits of magnitudes are in their order, and those of NaN are the largest.
    """
    size = values.shape[0] // scales.shape[0]
    row = numpy.empty(size, _FLOAT)
    row_bits, scale_bits, signed = row.view(_BITS), scales.view(_BITS), codes.view(numpy.int8)
    for g in range(scales.shape[0]):
        first = g * size
        if add:
            for i in range(size):
                row[i] = values[first + i] + addend[first + i]
        else:
            for i in range(size):
                row[i] = values[first + i]
        largest = _BITS(0)
        for i in range(size):
            largest = max(largest, row_bits[i] & _NOT_SIGN)
        scale_bits[g] = largest
        scales[g] = scales[g] * factor
        scale_bits[g] = max(scale_bits[g], _SMALLEST_SCALE_BITS)
        if brief:
            scale_bits[g] = _brief(scale_bits[g])
        if scale_bits[g] >= _INFINITY_BITS:
            codes[first : first + size] = 0
            continue
        scale = scales[g]
        inverse = _ONE / scale
        if subtract:
            for i in range(size):
                level = numpy.rint(row[i] * inverse)
                signed[first + i] = numpy.int8(_BITS(level))
                values[first + i] = row[i] - level * scale
        else:
            for i in range(size):
                signed[first + i] = numpy.int8(_BITS(numpy.rint(row[i] * inverse)))


@jit(fastmath=FUSED)
def bytes_decode(codes: Any, scales: Any, out: Any, accumulate: bool) -> None:
    """out = scale * code, or, if `accumulate`, out += scale * code."""
    size = out.shape[0] // scales.shape[0]
    levels = numpy.empty(size, _FLOAT)
    signed = codes.view(numpy.int8)
    for g in range(scales.shape[0]):
        first = g * size
        bytes_levels(signed, first, size, levels, 0)
        _store(levels, scales[g], first, size, out, accumulate)


@jit(fastmath=FUSED)
def fours_encode(
    values: Any, addend: Any, scales: Any, codes: Any, factor: Any, brief: bool, add: bool, subtract: bool
) -> None:
    """As `bytes_encode` with 4 bits: byte j holds code_j + 8 in its lower half and code_{j + G/2} in its upper."""
    size = values.shape[0] // scales.shape[0]
    half = size // 2
    row = numpy.empty(size, _FLOAT)
    row_bits, scale_bits, signed = row.view(_BITS), scales.view(_BITS), codes.view(numpy.int8)
    for g in range(scales.shape[0]):
        first, at = g * size, g * half
        if add:
            for i in range(size):
                row[i] = values[first + i] + addend[first + i]
        else:
            for i in range(size):
                row[i] = values[first + i]
        largest = _BITS(0)
        for i in range(size):
            largest = max(largest, row_bits[i] & _NOT_SIGN)
        scale_bits[g] = largest
        scales[g] = scales[g] * factor
        scale_bits[g] = max(scale_bits[g], _SMALLEST_SCALE_BITS)
        if brief:
            scale_bits[g] = _brief(scale_bits[g])
        if scale_bits[g] >= _INFINITY_BITS:
            codes[at : at + half] = 0
            continue
        scale = scales[g]
        inverse = _ONE / scale
        for i in range(half):
            low = _BITS(numpy.rint(row[i] * inverse))
            high = _BITS(numpy.rint(row[half + i] * inverse))
            signed[at + i] = numpy.int8(low + (high << _BITS(4)) + _BITS(8))
        if subtract:
            for i in range(size):
                values[first + i] = row[i] - numpy.rint(row[i] * inverse) * scale


@jit(fastmath=FUSED)
def fours_decode(codes: Any, scales: Any, out: Any, accumulate: bool) -> None:
    """As `bytes_decode` with 4 bits."""
    size = out.shape[0] // scales.shape[0]
    half = size // 2
    levels = numpy.empty(size, _FLOAT)
    signed = codes.view(numpy.int8)
    for g in range(scales.shape[0]):
        fours_levels(signed, g * half, size, levels, 0)
        _store(levels, scales[g], g * size, size, out, accumulate)


@jit
def _mean_scale(values: Any, scales: Any, g: int, factor: Any, brief: bool) -> bool:
    """scale = factor * sum |value|; whether it is finite."""
    scale_bits = scales.view(_BITS)
    scales[g] = _sum_magnitudes(values) * factor
    if brief:
        scale_bits[g] = _brief(scale_bits[g] & _NOT_SIGN)
    return bool((scale_bits[g] & _NOT_SIGN) < _INFINITY_BITS)


@jit(fastmath=FUSED)
def signs_encode(
    values: Any, addend: Any, scales: Any, codes: Any, factor: Any, brief: bool, add: bool, subtract: bool
) -> None:
    """scale = factor * sum |value|;  code = value < 0, eight a byte, the first in the highest bit."""
    size = values.shape[0] // scales.shape[0]
    row_bytes = size // 8
    row, bits = numpy.empty(size, _FLOAT), numpy.empty(size, _BYTE)
    eights = bits.view(_EIGHT)
    for g in range(scales.shape[0]):
        first, at = g * size, g * row_bytes
        if add:
            for i in range(size):
                row[i] = values[first + i] + addend[first + i]
        else:
            for i in range(size):
                row[i] = values[first + i]
        _mean_scale(row, scales, g, factor, brief)
        for i in range(size):
            bits[i] = row[i] < _ZERO
        for j in range(row_bytes):
            codes[at + j] = _BYTE((eights[j] * _GATHER) >> _TOP)
        if subtract:
            scale = scales[g]
            for i in range(size):
                values[first + i] = row[i] - (-scale if row[i] < _ZERO else scale)


@jit(fastmath=FUSED)
def signs_decode(codes: Any, scales: Any, out: Any, accumulate: bool) -> None:
    """out = -scale where the code is 1, else scale; or, if `accumulate`, that is added to out."""
    size = out.shape[0] // scales.shape[0]
    levels = numpy.empty(size, _FLOAT)
    level_bits = levels.view(_WORD)
    for g in range(scales.shape[0]):
        first = g * size
        signs_levels(codes, first // 8, size, level_bits, 0)
        _store(levels, scales[g], first, size, out, accumulate)


@jit(fastmath=FUSED)
def lloyd_max_encode(
    values: Any,
    addend: Any,
    scales: Any,
    codes: Any,
    factor: Any,
    border: Any,
    brief: bool,
    add: bool,
    subtract: bool,
) -> None:
    """scale = factor * sum |value|;  codes: value < 0, then |value| * (border / scale) < 1: levels 3, else 10."""
    size = values.shape[0] // scales.shape[0]
    plane = size // 8
    scale_bits = scales.view(_BITS)
    largest = numpy.empty(1, _FLOAT)
    largest_bits = largest.view(_BITS)
    row, bits = numpy.empty(size, _FLOAT), numpy.empty(size, _BYTE)
    eights = bits.view(_EIGHT)
    for g in range(scales.shape[0]):
        first, at, middle = g * size, g * 2 * plane, g * 2 * plane + plane
        if add:
            for i in range(size):
                row[i] = values[first + i] + addend[first + i]
        else:
            for i in range(size):
                row[i] = values[first + i]
        if not _mean_scale(row, scales, g, factor, brief):
            codes[at : at + 2 * plane] = 0
            continue
        largest_bits[0] = max(scale_bits[g], _SMALLEST_SCALE_BITS)
        inverse = (_ONE / largest[0]) * border
        for i in range(size):
            bits[i] = row[i] < _ZERO
        for j in range(plane):
            codes[at + j] = _BYTE((eights[j] * _GATHER) >> _TOP)
        for i in range(size):
            bits[i] = abs(row[i]) * inverse < _ONE
        for j in range(plane):
            codes[middle + j] = _BYTE((eights[j] * _GATHER) >> _TOP)
        if subtract:
            scale = scales[g]
            for i in range(size):
                level = _INNER if abs(row[i]) * inverse < _ONE else _OUTER
                values[first + i] = row[i] - (-level if row[i] < _ZERO else level) * scale


@jit(fastmath=FUSED)
def lloyd_max_decode(codes: Any, scales: Any, out: Any, accumulate: bool) -> None:
    """out = sign * level * scale, the level 3 or 10; or, if `accumulate`, that is added to out."""
    size = out.shape[0] // scales.shape[0]
    plane = size // 8
    levels = numpy.empty(size, _FLOAT)
    level_bits = levels.view(_WORD)
    for g in range(scales.shape[0]):
        lloyd_max_levels(codes, g * 2 * plane, size, level_bits, 0)
        _store(levels, scales[g], g * size, size, out, accumulate)


@jit
def affine_encode(values: Any, scales: Any, zeros: Any, codes: Any) -> None:
    """code = round(value / scale) + zero;  scale = (high - low) / 255, at least 2^-120.

    zero = round(-low / scale) - 128. low and high include 0; where a value is NaN, one of them is, and so is the scale.
    As integers, bits of floats that aren't negative are in their order and above all others; with the sign turned
    around, so are those of the negative ones, the lowest on top.

    Shapes: scales (groups,) float32; zeros (groups,) and codes (groups x group_size,) int8.
    """
    groups = scales.shape[0]
    size = values.shape[0] // groups
    bits, scale_bits = values.view(_BITS), scales.view(_BITS)
    ends = numpy.empty(2, _FLOAT)
    end_bits = ends.view(_BITS)
    for g in range(groups):
        first = g * size
        depth, height = _BITS(0), _BITS(0)
        for i in range(size):
            height = max(height, bits[first + i])
            depth = max(depth, bits[first + i] ^ _SIGN_BIT)
        end_bits[0], end_bits[1] = depth, height
        below = ends[0] * _SHARE  # divided before they are added: the range may overflow
        scales[g] = ends[1] * _SHARE + below
        scale_bits[g] = max(scale_bits[g] & _NOT_SIGN, _SMALLEST_SCALE_BITS)
        if scale_bits[g] >= _INFINITY_BITS:
            zeros[g] = 0
            codes[first : first + size] = 0
            continue
        inverse = _ONE / scales[g]
        zero = numpy.rint((below * _FLOAT(255.0)) * inverse) - _FLOAT(128.0)
        zeros[g] = numpy.int8(_BITS(zero))
        for i in range(size):
            level = _BITS(numpy.rint(values[first + i] * inverse) + zero)
            codes[first + i] = numpy.int8(max(_BITS(-128), min(_BITS(127), level)))


@jit(fastmath=FUSED)
def affine_decode(codes: Any, scales: Any, zero: Any, out: Any, accumulate: bool) -> None:
    """out = scale * (code - zero), or, if `accumulate`, that is added to out. Shapes: codes int8; zero float32."""
    groups = scales.shape[0]
    size = out.shape[0] // groups
    for g in range(groups):
        first = g * size
        scale, shift = scales[g], zero[g]
        if accumulate:
            for i in range(size):
                out[first + i] = out[first + i] + (_FLOAT(codes[first + i]) - shift) * scale
        else:
            for i in range(size):
                out[first + i] = (_FLOAT(codes[first + i]) - shift) * scale
