"""One bit a value: its sign."""

from typing import Any

import numpy
import torch

from tensorplay.compression.bitpack import pack_below, unpack_bits
from tensorplay.compression.grouped import GroupScaled, Run, check_integer, mean_magnitude, name_with

__all__ = ["Sign"]


class Sign(GroupScaled):
    """The sign of each value, times the mean magnitude of its group.

        scale = mean |value|;   code = value < 0;   decoded = -scale where code, scale elsewhere

    The mean magnitude is the scale with the least squared error: 0.363 of the energy of Gaussian values remains. Use
    it with error feedback, without which it need not converge.

    Zeros of a group with other values decode to +scale, as do the zeros that pad a parameter, which lower the scale of
    their group; error feedback makes up for both. A group of zeros decodes to zeros.

    Args:
        group_size: values that share a scale, a multiple of 8.
        scale_dtype: of the scales on the wire, "float32" or "bfloat16".
    Shapes: values (n,) float32, n a multiple of group_size; payload: n / group_size scales, then signs, eight a byte.
    Wire: n / 8 + n / group_size * scale_dtype.itemsize bytes.
    Raises: ValueError: another scale_dtype; group_size not a multiple of 8, or below 8.
    Example:
        >>> codec = Sign(group_size=8, scale_dtype="float32")
        >>> codec.decompress(codec.compress(torch.tensor([1.0, -1, 3, -3, 2, -2, 2, -2])), 8)
        tensor([ 2., -2.,  2., -2.,  2., -2.,  2., -2.])

    Paper: Karimireddy et al. 2019 (EF-SignSGD), algorithm 1. Differs: a scale a group, not a layer.
    """

    def __init__(self, group_size: int = 128, scale_dtype: torch.dtype | str = torch.bfloat16) -> None:
        check_integer("group_size", group_size, minimum=8, multiple=8)
        super().__init__(group_size, group_size // 8, scale_dtype)
        self.name = name_with(
            "sign", group_size=(group_size, 128), scale_dtype=(self.scale_dtype, torch.bfloat16)
        )

    def _measure(self, run: Run) -> None:
        mean_magnitude(run, 1.0)

    def _quantize(self, run: Run) -> torch.Tensor | None:
        pack_below(run.values, 0.0, run.codes)
        return None

    def _encoding_loop(self, loops: Any) -> tuple[Any, tuple[Any, ...]] | None:
        return loops.signs_encode, (numpy.float32(1.0 / self.group_size),)

    def _decoding_loop(self, loops: Any) -> Any:
        return loops.signs_decode

    def _mean_loop(self, loops: Any) -> Any:
        return loops.signs_mean

    def _levels(self, codes: torch.Tensor, levels: torch.Tensor, run: Run) -> None:
        levels.copy_(unpack_bits(codes, -2, 1))
