"""Compiled loops that end a codec's step: what was not sent becomes the residual, and the mean the gradient.

    residual = (out + residual) - own_scale * own level;   out = scale * level + more_scale * more level

Each reads and writes gradient and residual once, where one operation after the other does so two or three times.
Arithmetic is that of `loops`, operation by operation, so what is written is equal bit by bit.

Shapes, everywhere: out, residual (groups x group_size,) float32; scales, more_scales, own_scales (groups,) float32;
codes, more_codes uint8, of `affine_mean` int8, group after group. All are contiguous NumPy arrays.

own: which codes this rank sent: 0 the first, 1 the others.
sums: the others are added to the mean; if not, they are at most the own ones.
settles: the residual changes; if not, it isn't read either.
"""

from typing import Any

import numpy

from tensorplay.compression.compiled import FUSED, jit
from tensorplay.compression.loops import bytes_levels, fours_levels, lloyd_max_levels, signs_levels

__all__ = ["affine_mean", "bytes_mean", "fours_mean", "lloyd_max_mean", "signs_mean"]

_RUN = 1 << 12
"""Values of a group that are summed at a time: their products stay in the first-level cache."""


@jit(inline="always")
def _store(
    levels: Any,
    scale: Any,
    more_scale: Any,
    own_scale: Any,
    first: int,
    size: int,
    own_start: int,
    sums: bool,
    settles: bool,
    residual: Any,
    out: Any,
) -> None:
    """End the group at `first`. Levels: `size` of the first codes, then `size` of the others; they are used up."""
    if settles:
        for i in range(size):
            residual[first + i] = (out[first + i] + residual[first + i]) - levels[own_start + i] * own_scale
    if (
        sums
    ):  # the first product is rounded before the second joins it, as where one is written and the other added
        for i in range(size):
            levels[i] = levels[i] * scale
        for i in range(size):
            out[first + i] = levels[i] + levels[size + i] * more_scale
    else:
        for i in range(size):
            out[first + i] = levels[i] * scale


@jit(fastmath=FUSED)
def bytes_mean(
    codes: Any,
    scales: Any,
    more_codes: Any,
    more_scales: Any,
    own: int,
    own_scales: Any,
    sums: bool,
    settles: bool,
    residual: Any,
    out: Any,
) -> None:
    """Codes of 8 bits."""
    size = out.shape[0] // scales.shape[0]
    levels = numpy.empty(2 * size, numpy.float32)
    signed, more_signed = codes.view(numpy.int8), more_codes.view(numpy.int8)
    for g in range(scales.shape[0]):
        first = g * size
        bytes_levels(signed, first, size, levels, 0)
        if own or sums:
            bytes_levels(more_signed, first, size, levels, size)
        _store(
            levels,
            scales[g],
            more_scales[g],
            own_scales[g],
            first,
            size,
            own * size,
            sums,
            settles,
            residual,
            out,
        )


@jit(fastmath=FUSED)
def fours_mean(
    codes: Any,
    scales: Any,
    more_codes: Any,
    more_scales: Any,
    own: int,
    own_scales: Any,
    sums: bool,
    settles: bool,
    residual: Any,
    out: Any,
) -> None:
    """Codes of 4 bits, two a byte."""
    size = out.shape[0] // scales.shape[0]
    levels = numpy.empty(2 * size, numpy.float32)
    signed, more_signed = codes.view(numpy.int8), more_codes.view(numpy.int8)
    for g in range(scales.shape[0]):
        first = g * size
        fours_levels(signed, first // 2, size, levels, 0)
        if own or sums:
            fours_levels(more_signed, first // 2, size, levels, size)
        _store(
            levels,
            scales[g],
            more_scales[g],
            own_scales[g],
            first,
            size,
            own * size,
            sums,
            settles,
            residual,
            out,
        )


@jit(fastmath=FUSED)
def signs_mean(
    codes: Any,
    scales: Any,
    more_codes: Any,
    more_scales: Any,
    own: int,
    own_scales: Any,
    sums: bool,
    settles: bool,
    residual: Any,
    out: Any,
) -> None:
    """Codes of signs, eight a byte."""
    size = out.shape[0] // scales.shape[0]
    levels = numpy.empty(2 * size, numpy.float32)
    level_bits = levels.view(numpy.uint32)
    for g in range(scales.shape[0]):
        first = g * size
        signs_levels(codes, first // 8, size, level_bits, 0)
        if own or sums:
            signs_levels(more_codes, first // 8, size, level_bits, size)
        _store(
            levels,
            scales[g],
            more_scales[g],
            own_scales[g],
            first,
            size,
            own * size,
            sums,
            settles,
            residual,
            out,
        )


@jit(fastmath=FUSED)
def lloyd_max_mean(
    codes: Any,
    scales: Any,
    more_codes: Any,
    more_scales: Any,
    own: int,
    own_scales: Any,
    sums: bool,
    settles: bool,
    residual: Any,
    out: Any,
) -> None:
    """Codes of 2 bits, in two planes."""
    size = out.shape[0] // scales.shape[0]
    levels = numpy.empty(2 * size, numpy.float32)
    level_bits = levels.view(numpy.uint32)
    for g in range(scales.shape[0]):
        first = g * size
        lloyd_max_levels(codes, first // 4, size, level_bits, 0)
        if own or sums:
            lloyd_max_levels(more_codes, first // 4, size, level_bits, size)
        _store(
            levels,
            scales[g],
            more_scales[g],
            own_scales[g],
            first,
            size,
            own * size,
            sums,
            settles,
            residual,
            out,
        )


@jit(fastmath=FUSED)
def affine_mean(
    codes: Any, scales: Any, zero: Any, more_codes: Any, more_scales: Any, more_zero: Any, out: Any
) -> None:
    """out = scale * (code - zero) + more_scale * (more code - more zero). Shapes: zeros (groups,) float32."""
    groups = scales.shape[0]
    size = out.shape[0] // groups
    row = numpy.empty(min(size, _RUN), numpy.float32)
    for g in range(groups):
        scale, shift, more_scale, more_shift = scales[g], zero[g], more_scales[g], more_zero[g]
        for part in range(-(-size // _RUN)):
            first = g * size + part * _RUN
            count = min(_RUN, size - part * _RUN)
            for i in range(count):
                row[i] = (numpy.float32(codes[first + i]) - shift) * scale
            for i in range(count):
                out[first + i] = row[i] + (numpy.float32(more_codes[first + i]) - more_shift) * more_scale
