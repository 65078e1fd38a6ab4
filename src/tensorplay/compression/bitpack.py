"""Small integers packed into bytes, and back: pure arithmetic on byte tensors, on any device.

Codes of four bits are packed in planes: with G codes in a group, byte j holds codes j and j + G/2. Whole planes are
added to each other, so nothing is shuffled and every step runs at the speed of memory. Single bits are packed eight
neighbours a byte, the first in the highest bit.

Codes are int8, packed bytes uint8; packed bytes may be rows of a larger tensor. Byte arithmetic wraps modulo 256, which
the formulas below count on. On a CPU most steps are NumPy's, which are two to four times faster on bytes than torch's.
"""

import numpy
import torch

__all__ = ["pack_below", "pack_fours", "unpack_bits", "unpack_fours"]


def pack_fours(codes: torch.Tensor, packed: torch.Tensor) -> None:
    """Pack codes from -8 to 7, two a byte.

        packed_j = code_j + 16 code_{j + G/2} + 8      (modulo 256)

    Shapes: codes (groups, G) int8, G even; packed (groups, G/2) uint8.
    Example:
        >>> packed = torch.empty(1, 2, dtype=torch.uint8)
        >>> pack_fours(torch.tensor([[-7, 7, 1, -8]], dtype=torch.int8), packed)
        >>> packed
        tensor([[ 17, 143]], dtype=torch.uint8)
    """
    half = codes.shape[1] // 2
    target = packed.view(torch.int8)
    torch.add(codes[:, :half], codes[:, half:], alpha=16, out=target)
    target.add_(8)


def unpack_fours(packed: torch.Tensor, planes: torch.Tensor) -> None:
    """Undo `pack_fours`; the codes come back as two planes.

        planes_0j = code_j = (packed_j and 15) - 8;   planes_1j = code_{j + G/2} = packed_j >> 4, the sign kept

    Shapes: packed (groups, G/2) uint8; planes (2, groups, G/2) int8.
    Example:
        >>> planes = torch.empty(2, 1, 2, dtype=torch.int8)
        >>> unpack_fours(torch.tensor([[17, 143]], dtype=torch.uint8), planes)
        >>> planes
        tensor([[[-7,  7]],
        <BLANKLINE>
                [[ 1, -8]]], dtype=torch.int8)
    """
    if packed.device.type == "cpu":
        source, (low, high) = packed.numpy().view(numpy.int8), planes.numpy()
        numpy.bitwise_and(source, 15, out=low)
        numpy.subtract(low, 8, out=low)
        numpy.right_shift(source, 4, out=high)
    else:
        _unpack_fours(packed, planes)


def pack_below(values: torch.Tensor, limit: float, packed: torch.Tensor) -> None:
    """Pack which values are below a limit, eight a byte: bit 1 where value < limit, else 0, also for NaN.

    Shapes: values of any shape, float, contiguous, 8 dividing their number n; packed n/8 uint8, of any shape.
    Example:
        >>> packed = torch.empty(1, dtype=torch.uint8)
        >>> pack_below(torch.tensor([-1.0, 2, -3, 0, 5, 6, 7, -8]), 0.0, packed)
        >>> packed, 0b10100001
        (tensor([161], dtype=torch.uint8), 161)
    """
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        bits = numpy.packbits(
            numpy.less(values.numpy(), limit)
        )  # twelve times faster than torch's comparison
        packed.numpy()[...] = bits.reshape(packed.shape)
    else:
        packed.copy_(_pack_bits(values < limit).view(packed.shape))


def unpack_bits(packed: torch.Tensor, factor: int, offset: int) -> torch.Tensor:
    """Undo `pack_below`: factor * bit + offset, int8, freshly allocated.

    Shapes: packed (..., n/8) uint8; result (..., n) int8.
    Example:
        >>> unpack_bits(torch.tensor([0b10100001], dtype=torch.uint8), -2, 1)
        tensor([-1,  1, -1,  1,  1,  1,  1, -1], dtype=torch.int8)
    """
    shape = (*packed.shape[:-1], packed.shape[-1] * 8)
    if packed.device.type == "cpu":
        bits = numpy.unpackbits(packed.numpy()).view(numpy.int8)
        numpy.multiply(bits, factor, out=bits)
        numpy.add(bits, offset, out=bits)
        return torch.from_numpy(bits).view(shape)
    return _unpack_bits(packed).view(torch.int8).mul_(factor).add_(offset).view(shape)


def _unpack_fours(packed: torch.Tensor, planes: torch.Tensor) -> None:
    """`unpack_fours` on any device."""
    source, (low, high) = packed.view(torch.int8), planes
    torch.bitwise_and(source, 15, out=low)
    low.sub_(8)
    torch.bitwise_right_shift(source, 4, out=high)


def _pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """numpy.packbits on any device: n bool to uint8 (n/8,)."""
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.int32, device=bits.device)
    return (bits.view(-1, 8) * weights).sum(1).to(torch.uint8)


def _unpack_bits(packed: torch.Tensor) -> torch.Tensor:
    """numpy.unpackbits on any device: n/8 uint8 to uint8 (n,) of 0 and 1."""
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=packed.device)
    return ((packed.reshape(-1, 1) >> shifts) & 1).view(-1)
