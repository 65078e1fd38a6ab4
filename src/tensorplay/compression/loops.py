"""The arithmetic of codecs with one scale a group, as loops that Numba compiles. Import it through `compiled`.

Every function goes through its groups once: it adds what was left over, measures the group, makes its codes, and
subtracts what they stand for, while the group lies in the first-level cache. Arithmetic is that of the codecs' PyTorch
operations, operation by operation and in float32, so payloads are equal bit by bit; only the sum of magnitudes may be
added up in another order.

Shapes, everywhere: values, addend, out (groups x group_size,) float32; scales (groups,) float32; codes uint8, group
after group. All are contiguous NumPy arrays.

brief: scales are rounded to bfloat16.
add: what is encoded is values + addend.
subtract: what the codes stand for is subtracted from that, and written to the values; otherwise they are not changed.
accumulate: what is decoded is added to out, after the addend where `add`; otherwise it replaces out.

Codes of a group whose scale isn't finite are zeros, and its values are left as they were: the step doesn't count.
"""

from typing import Any

import numpy

from tensorplay.compression.compiled import jit

__all__ = [
    "affine_decode",
    "affine_encode",
    "integers_decode",
    "integers_encode",
    "lloyd_max_decode",
    "lloyd_max_encode",
    "signs_decode",
    "signs_encode",
]

#: What is multiplied and added is rounded once, as in torch.addcmul: without it the last bit would be another.
_FUSED = {"contract"}
_FLOAT, _BYTE, _BITS = numpy.float32, numpy.uint8, numpy.int32
_ONE, _ZERO = _FLOAT(1.0), _FLOAT(0.0)
_INNER, _OUTER = _FLOAT(3.0), _FLOAT(10.0)
_NOT_SIGN = _BITS(0x7FFFFFFF)
_INFINITY_BITS = _BITS(0x7F800000)
_NAN_BITS = _BITS(0x7FC00000)
_SHARE = _FLOAT(1.0 / 255.0)
_TILE = 4096
"""Values that one loop packs: they fit a first-level cache."""
_SMALLEST_SCALE_BITS = _BITS((127 - 120) << 23)  # of 2 ** -120


@jit
def _largest_bits(bits: Any) -> Any:
    """The bits of the largest magnitude: as integers, bits of magnitudes are in their order, and NaN's the largest."""
    largest = _BITS(0)
    for i in range(bits.shape[0]):
        largest = max(largest, bits[i] & _NOT_SIGN)
    return largest


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


@jit
def _add(values: Any, addend: Any, out: Any) -> None:
    for i in range(values.shape[0]):
        out[i] = values[i] + addend[i]


@jit(fastmath=_FUSED)
def integers_encode(
    values: Any,
    addend: Any,
    scales: Any,
    codes: Any,
    bits: int,
    factor: Any,
    brief: bool,
    add: bool,
    subtract: bool,
) -> None:
    """scale = factor * max |value|, no less than 2^-120;  code = round(value / scale).

    Four bits: byte j holds code_j + 8 in its lower half and code_{j + G/2} in its upper.
    """
    groups = scales.shape[0]
    size = values.shape[0] // groups
    half = size // 2
    row_bytes = codes.shape[0] // groups
    scale_bits = scales.view(_BITS)
    signed = codes.view(numpy.int8)
    spare = numpy.empty(size if add and not subtract else 0, _FLOAT)
    for g in range(groups):
        some = values[g * size : (g + 1) * size]
        row = signed[g * row_bytes : (g + 1) * row_bytes]
        if add:
            total = some if subtract else spare
            _add(some, addend[g * size : (g + 1) * size], total)
            some = total
        scale_bits[g] = _largest_bits(some.view(_BITS))
        scales[g] = scales[g] * factor
        scale_bits[g] = max(scale_bits[g], _SMALLEST_SCALE_BITS)
        if brief:
            scale_bits[g] = _brief(scale_bits[g])
        if scale_bits[g] >= _INFINITY_BITS:
            row[:] = 0
            continue
        scale = scales[g]
        inverse = _ONE / scale
        if bits == 8:
            if subtract:
                for i in range(size):
                    level = numpy.rint(some[i] * inverse)
                    row[i] = numpy.int8(_BITS(level))
                    some[i] = some[i] - level * scale
            else:
                for i in range(size):
                    row[i] = numpy.int8(_BITS(numpy.rint(some[i] * inverse)))
        else:
            for i in range(half):
                low = numpy.rint(some[i] * inverse)
                high = numpy.rint(some[i + half] * inverse)
                row[i] = numpy.int8(_BITS(low) + (_BITS(high) << _BITS(4)) + _BITS(8))
            if subtract:
                for i in range(size):
                    some[i] = some[i] - numpy.rint(some[i] * inverse) * scale


@jit(fastmath=_FUSED)
def integers_decode(
    codes: Any, scales: Any, out: Any, addend: Any, bits: int, accumulate: bool, add: bool
) -> None:
    """out = scale * code, or, if `accumulate`, out += scale * code."""
    groups = scales.shape[0]
    size = out.shape[0] // groups
    half = size // 2
    row_bytes = codes.shape[0] // groups
    signed = codes.view(numpy.int8)
    for g in range(groups):
        some = out[g * size : (g + 1) * size]
        row = signed[g * row_bytes : (g + 1) * row_bytes]
        scale = scales[g]
        if add:
            _add(some, addend[g * size : (g + 1) * size], some)
        if bits == 8:
            if accumulate:
                for i in range(size):
                    some[i] = some[i] + _FLOAT(row[i]) * scale
            else:
                for i in range(size):
                    some[i] = _FLOAT(row[i]) * scale
        elif accumulate:
            for i in range(half):
                some[i] = some[i] + _FLOAT((_BITS(row[i]) & _BITS(15)) - _BITS(8)) * scale
            for i in range(half):
                some[i + half] = some[i + half] + _FLOAT(row[i] >> numpy.int8(4)) * scale
        else:
            for i in range(half):
                some[i] = _FLOAT((_BITS(row[i]) & _BITS(15)) - _BITS(8)) * scale
            for i in range(half):
                some[i + half] = _FLOAT(row[i] >> numpy.int8(4)) * scale


@jit
def _mean_scale(values: Any, scales: Any, g: int, factor: Any, brief: bool) -> bool:
    """scale = factor * sum |value|; whether it is finite."""
    scale_bits = scales.view(_BITS)
    scales[g] = _sum_magnitudes(values) * factor
    if brief:
        scale_bits[g] = _brief(scale_bits[g] & _NOT_SIGN)
    return bool((scale_bits[g] & _NOT_SIGN) < _INFINITY_BITS)


@jit
def _pack_negative(values: Any, row: Any) -> None:
    """Which values are below 0, eight a byte, the first in the highest bit. Written out: a loop is slower by half."""
    for j in range(row.shape[0]):
        i = 8 * j
        row[j] = (
            (_BYTE(values[i] < _ZERO) << _BYTE(7))
            | (_BYTE(values[i + 1] < _ZERO) << _BYTE(6))
            | (_BYTE(values[i + 2] < _ZERO) << _BYTE(5))
            | (_BYTE(values[i + 3] < _ZERO) << _BYTE(4))
            | (_BYTE(values[i + 4] < _ZERO) << _BYTE(3))
            | (_BYTE(values[i + 5] < _ZERO) << _BYTE(2))
            | (_BYTE(values[i + 6] < _ZERO) << _BYTE(1))
            | _BYTE(values[i + 7] < _ZERO)
        )


@jit
def _pack_inner(values: Any, inverse: Any, row: Any) -> None:
    """Which |value| * inverse are below 1."""
    for j in range(row.shape[0]):
        i = 8 * j
        row[j] = (
            (_BYTE(abs(values[i]) * inverse < _ONE) << _BYTE(7))
            | (_BYTE(abs(values[i + 1]) * inverse < _ONE) << _BYTE(6))
            | (_BYTE(abs(values[i + 2]) * inverse < _ONE) << _BYTE(5))
            | (_BYTE(abs(values[i + 3]) * inverse < _ONE) << _BYTE(4))
            | (_BYTE(abs(values[i + 4]) * inverse < _ONE) << _BYTE(3))
            | (_BYTE(abs(values[i + 5]) * inverse < _ONE) << _BYTE(2))
            | (_BYTE(abs(values[i + 6]) * inverse < _ONE) << _BYTE(1))
            | _BYTE(abs(values[i + 7]) * inverse < _ONE)
        )


@jit(fastmath=_FUSED)
def signs_encode(
    values: Any, addend: Any, scales: Any, codes: Any, factor: Any, brief: bool, add: bool, subtract: bool
) -> None:
    """scale = factor * sum |value|;  code = value < 0. Many groups are packed by one loop, since rows are short."""
    groups = scales.shape[0]
    size = values.shape[0] // groups
    row_bytes = size // 8
    tile = max(1, _TILE // size)
    spare = numpy.empty(tile * size if add and not subtract else 0, _FLOAT)
    for first in range(0, groups, tile):
        last = min(first + tile, groups)
        many = values[first * size : last * size]
        if add:
            total = many if subtract else spare[: many.shape[0]]
            _add(many, addend[first * size : last * size], total)
            many = total
        for g in range(first, last):
            _mean_scale(many[(g - first) * size : (g - first + 1) * size], scales, g, factor, brief)
        _pack_negative(many, codes[first * row_bytes : last * row_bytes])
        if subtract:
            for g in range(first, last):
                some = many[(g - first) * size : (g - first + 1) * size]
                scale = scales[g]
                for i in range(size):
                    some[i] = some[i] - (-scale if some[i] < _ZERO else scale)


@jit(fastmath=_FUSED)
def signs_decode(codes: Any, scales: Any, out: Any, addend: Any, accumulate: bool, add: bool) -> None:
    """out = -scale where the code is 1, else scale; or, if `accumulate`, that is added to out."""
    groups = scales.shape[0]
    size = out.shape[0] // groups
    row_bytes = size // 8
    for g in range(groups):
        some = out[g * size : (g + 1) * size]
        row = codes[g * row_bytes : (g + 1) * row_bytes]
        scale = scales[g]
        if add:
            _add(some, addend[g * size : (g + 1) * size], some)
        if accumulate:
            for j in range(row_bytes):
                for k in range(8):
                    bit = (row[j] >> _BYTE(7 - k)) & _BYTE(1)
                    some[8 * j + k] = some[8 * j + k] + (-scale if bit else scale)
        else:
            for j in range(row_bytes):
                for k in range(8):
                    bit = (row[j] >> _BYTE(7 - k)) & _BYTE(1)
                    some[8 * j + k] = -scale if bit else scale


@jit(fastmath=_FUSED)
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
    groups = scales.shape[0]
    size = values.shape[0] // groups
    plane = size // 8
    scale_bits = scales.view(_BITS)
    largest = numpy.empty(1, _FLOAT)
    spare = numpy.empty(size if add and not subtract else 0, _FLOAT)
    for g in range(groups):
        some = values[g * size : (g + 1) * size]
        row = codes[g * 2 * plane : (g + 1) * 2 * plane]
        if add:
            total = some if subtract else spare
            _add(some, addend[g * size : (g + 1) * size], total)
            some = total
        if not _mean_scale(some, scales, g, factor, brief):
            row[:] = 0
            continue
        largest.view(_BITS)[0] = max(scale_bits[g], _SMALLEST_SCALE_BITS)
        inverse = (_ONE / largest[0]) * border
        _pack_negative(some, row[:plane])
        _pack_inner(some, inverse, row[plane:])
        if subtract:
            scale = scales[g]
            for i in range(size):
                level = _INNER if abs(some[i]) * inverse < _ONE else _OUTER
                some[i] = some[i] - (-level if some[i] < _ZERO else level) * scale


@jit(fastmath=_FUSED)
def lloyd_max_decode(codes: Any, scales: Any, out: Any, addend: Any, accumulate: bool, add: bool) -> None:
    """out = sign * level * scale, the level 3 or 10; or, if `accumulate`, that is added to out."""
    groups = scales.shape[0]
    size = out.shape[0] // groups
    plane = size // 8
    for g in range(groups):
        some = out[g * size : (g + 1) * size]
        negative = codes[g * 2 * plane : g * 2 * plane + plane]
        inside = codes[g * 2 * plane + plane : (g + 1) * 2 * plane]
        scale = scales[g]
        if add:
            _add(some, addend[g * size : (g + 1) * size], some)
        for j in range(plane):
            for k in range(8):
                inner = (_BITS(inside[j]) >> _BITS(7 - k)) & _BITS(1)
                sign = _BITS(1) - ((_BITS(negative[j]) >> _BITS(7 - k)) & _BITS(1)) * _BITS(2)
                level = _FLOAT((_BITS(10) - _BITS(7) * inner) * sign)
                if accumulate:
                    some[8 * j + k] = some[8 * j + k] + level * scale
                else:
                    some[8 * j + k] = level * scale


@jit
def affine_encode(values: Any, scales: Any, zeros: Any, codes: Any) -> None:
    """code = round(value / scale) + zero;  scale = (high - low) / 255, at least 2^-120.

    zero = round(-low / scale) - 128. low and high include 0; where a value is NaN, one of them is, and so is the scale.
    Bits of negative floats, all but the sign turned around, are in order with those of positive ones.

    Shapes: scales (groups,) float32; zeros (groups,) and codes (groups x group_size,) int8.
    """
    groups = scales.shape[0]
    size = values.shape[0] // groups
    bits, scale_bits = values.view(_BITS), scales.view(_BITS)
    ends = numpy.empty(2, _FLOAT)
    end_bits = ends.view(_BITS)
    for g in range(groups):
        some, some_bits = values[g * size : (g + 1) * size], bits[g * size : (g + 1) * size]
        row = codes[g * size : (g + 1) * size]
        least, greatest = _BITS(0), _BITS(0)
        for i in range(size):
            ordered = some_bits[i] ^ ((some_bits[i] >> _BITS(31)) & _NOT_SIGN)
            least = min(least, ordered)
            greatest = max(greatest, ordered)
        end_bits[0] = least ^ ((least >> _BITS(31)) & _NOT_SIGN)
        end_bits[1] = greatest
        low = ends[0] * _SHARE  # divided before they are subtracted: the range may overflow
        scales[g] = ends[1] * _SHARE - low
        scale_bits[g] = max(scale_bits[g] & _NOT_SIGN, _SMALLEST_SCALE_BITS)
        if scale_bits[g] >= _INFINITY_BITS:
            zeros[g] = 0
            row[:] = 0
            continue
        inverse = _ONE / scales[g]
        zero = numpy.rint((low * _FLOAT(-255.0)) * inverse) - _FLOAT(128.0)
        zeros[g] = numpy.int8(_BITS(zero))
        for i in range(size):
            level = numpy.rint(some[i] * inverse) + zero
            row[i] = numpy.int8(_BITS(max(_FLOAT(-128.0), min(_FLOAT(127.0), level))))


@jit(fastmath=_FUSED)
def affine_decode(codes: Any, scales: Any, zero: Any, out: Any, accumulate: bool) -> None:
    """out = scale * (code - zero), or, if `accumulate`, that is added to out. Shapes: codes int8; zero float32."""
    groups = scales.shape[0]
    size = out.shape[0] // groups
    for g in range(groups):
        some = out[g * size : (g + 1) * size]
        row = codes[g * size : (g + 1) * size]
        scale, shift = scales[g], zero[g]
        if accumulate:
            for i in range(size):
                some[i] = some[i] + (_FLOAT(row[i]) - shift) * scale
        else:
            for i in range(size):
                some[i] = (_FLOAT(row[i]) - shift) * scale
