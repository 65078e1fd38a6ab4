"""Two bits a value, with the levels that are best for Gaussian values."""

import math
from typing import Any

import numpy
import torch

from tensorplay.compression.bitpack import pack_below, unpack_bits
from tensorplay.compression.grouped import (
    GroupScaled,
    Run,
    check_integer,
    invert_scales,
    mean_magnitude,
    name_with,
)

__all__ = ["LloydMax2", "lloyd_max"]

_BORDER = 0.9816  # between the inner and the outer level, for a standard deviation of 1; see lloyd_max
_UNIT = 0.15104  # levels are -10, -3, 3 and 10 units: 1.5104 and 0.4531, to 0.1 % those of lloyd_max
_GAUSSIAN_MEAN_MAGNITUDE = math.sqrt(2.0 / math.pi)  # of a standard deviation of 1


def lloyd_max(rounds: int = 100) -> tuple[float, float, float]:
    """The best four levels for values of a standard normal distribution: +-inner, +-outer, with +-border between.

    Each level is the mean of the values nearest to it, and each border lies midway between two levels; the equations

        inner = (f(0) - f(border)) / (F(border) - F(0));   outer = f(border) / (1 - F(border))
        border = (inner + outer) / 2;   f, F: density and distribution

    are applied in turn until they hold. Returns (inner, outer, border). Squared error: 0.1175 of the variance.

    Example:
        >>> [round(number, 4) for number in lloyd_max()]
        [0.4528, 1.5104, 0.9816]

    Paper: Max 1960, table I; Lloyd 1982.
    """
    inner, outer, border = 0.0, 0.0, 1.0
    for _ in range(rounds):
        density_0, density = (math.exp(-x * x / 2.0) / math.sqrt(2.0 * math.pi) for x in (0.0, border))
        above = math.erfc(border / math.sqrt(2.0)) / 2.0
        inner, outer = (density_0 - density) / (0.5 - above), density / above
        border = (inner + outer) / 2.0
    return inner, outer, border


class LloydMax2(GroupScaled):
    """Two bits a value: four fixed levels, best for Gaussian values, times a scale a group.

        deviation = mean |value| * sqrt(pi / 2)             (the standard deviation, if values are Gaussian)
        decoded = deviation * sign(value) * (0.453 where |value| / deviation < 0.9816, else 1.510)

    Squared error on Gaussian values: 0.118 of their energy, where levels spread evenly up to the largest magnitude of
    128 values leave 0.59. The mean magnitude, unlike the mean square, neither overflows nor underflows in float32.

    Args:
        group_size: values that share a scale, a multiple of 8.
        scale_dtype: of the scales on the wire, "float32" or "bfloat16".
    Shapes: values (n,) float32, n a multiple of group_size; payload: n / group_size scales, then, group after group,
        which values are negative, and which are on an inner level, eight a byte.
    Wire: n / 4 + n / group_size * scale_dtype.itemsize bytes.
    Raises: ValueError: another scale_dtype; group_size not a multiple of 8, or below 8. Padding zeros shrink the scale
        of their group; error feedback makes up for it.
    Example:
        >>> codec = LloydMax2(group_size=8, scale_dtype="float32")
        >>> codec.decompress(codec.compress(torch.tensor([0.5, -0.5, 1.5, -1.5, 0, 2, 2, 0])), 8)
        tensor([ 0.5679, -0.5679,  1.8930, -1.8930,  0.5679,  1.8930,  1.8930,  0.5679])

    Paper: Max 1960, table I, for the levels. Differs: rounded to whole multiples of 0.15104 of the deviation, which
        makes decoding integer arithmetic and adds less than 1e-6 to the error.
    """

    def __init__(self, group_size: int = 128, scale_dtype: torch.dtype | str = torch.bfloat16) -> None:
        check_integer("group_size", group_size, minimum=8, multiple=8)
        super().__init__(group_size, group_size // 4, scale_dtype)
        self.name = name_with(
            "int2", group_size=(group_size, 128), scale_dtype=(self.scale_dtype, torch.bfloat16)
        )

    def _measure(self, run: Run) -> None:
        mean_magnitude(run, _UNIT / _GAUSSIAN_MEAN_MAGNITUDE)

    def _quantize(self, run: Run) -> torch.Tensor | None:
        magnitudes, half = run.table("floats"), self.group_bytes // 2  # left there by mean_magnitude
        magnitudes.mul_(invert_scales(run, _UNIT / _BORDER))  # the border lies at 1
        pack_below(run.values, 0.0, run.codes[:, :half])
        pack_below(magnitudes, 1.0, run.codes[:, half:])
        return None

    def _encoding_loop(self, loops: Any) -> tuple[Any, tuple[Any, ...]] | None:
        unit = _UNIT / _GAUSSIAN_MEAN_MAGNITUDE / self.group_size
        return loops.lloyd_max_encode, (numpy.float32(unit), numpy.float32(_UNIT / _BORDER))

    def _decoding_loop(self, loops: Any) -> Any:
        return loops.lloyd_max_decode

    def _mean_loop(self, loops: Any) -> Any:
        return loops.lloyd_max_mean

    def _levels(self, codes: torch.Tensor, levels: torch.Tensor, run: Run) -> None:
        half = self.group_bytes // 2
        integers = unpack_bits(codes[:, :half], -2, 1)  # negative: -1, else 1
        integers.mul_(unpack_bits(codes[:, half:], -7, 10))  # inner: 3, outer: 10
        levels.copy_(integers)
