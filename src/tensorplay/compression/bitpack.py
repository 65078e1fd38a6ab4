"""Small integers packed into bytes, and back: pure arithmetic on byte tensors, on any device.

Fours and twos are packed in planes: with G codes in a group, byte j of four-bit codes holds codes j and j + G/2, byte j
of two-bit codes holds j, j + G/4, j + G/2 and j + 3G/4. Whole planes are added to each other, so nothing is shuffled
and every step runs at the speed of memory. Signs are packed eight neighbours a byte, the first in the highest bit.

Codes are int8, packed bytes uint8; both may be rows of a larger tensor. Byte arithmetic wraps modulo 256, which the
formulas below count on.
"""

import numpy
import torch

__all__ = [
    "pack_fours",
    "pack_signs",
    "pack_twos",
    "unpack_fours",
    "unpack_signs",
    "unpack_twos",
]


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


def unpack_fours(packed: torch.Tensor, codes: torch.Tensor) -> None:
    """Undo `pack_fours`.

        code_j = (packed_j and 15) - 8;   code_{j + G/2} = packed_j >> 4, the sign kept

    Shapes: packed (groups, G/2) uint8; codes (groups, G) int8.
    Example:
        >>> codes = torch.empty(1, 4, dtype=torch.int8)
        >>> unpack_fours(torch.tensor([[17, 143]], dtype=torch.uint8), codes)
        >>> codes
        tensor([[-7,  7,  1, -8]], dtype=torch.int8)
    """
    half = codes.shape[1] // 2
    source = packed.view(torch.int8)
    low = codes[:, :half]
    torch.bitwise_and(source, 15, out=low)
    low.sub_(8)
    torch.bitwise_right_shift(source, 4, out=codes[:, half:])


def pack_twos(codes: torch.Tensor, packed: torch.Tensor) -> None:
    """Pack codes from -2 to 1, four a byte.

        packed_j = sum over p of 4^p (code_{j + p G/4} + 2)      (modulo 256)

    Shapes: codes (groups, G) int8, G a multiple of 4; packed (groups, G/4) uint8.
    Example:
        >>> packed = torch.empty(1, 1, dtype=torch.uint8)
        >>> pack_twos(torch.tensor([[-2, -1, 0, 1]], dtype=torch.int8), packed)
        >>> packed
        tensor([[228]], dtype=torch.uint8)
    """
    quarter = codes.shape[1] // 4
    planes = [codes[:, p * quarter : (p + 1) * quarter] for p in range(4)]
    target = packed.view(torch.int8)
    torch.add(planes[0], planes[1], alpha=4, out=target)
    target.add_(planes[2], alpha=16)
    target.add_(planes[3], alpha=64)
    target.add_(-86)  # 2 (1 + 4 + 16 + 64) = 170, modulo 256


def unpack_twos(packed: torch.Tensor, codes: torch.Tensor) -> None:
    """Undo `pack_twos`, except that codes come back from 0 to 3.

        code_{j + p G/4} = (packed_j >> 2p) and 3

    Shapes: packed (groups, G/4) uint8; codes (groups, G) int8.
    Example:
        >>> codes = torch.empty(1, 4, dtype=torch.int8)
        >>> unpack_twos(torch.tensor([[228]], dtype=torch.uint8), codes)
        >>> codes
        tensor([[0, 1, 2, 3]], dtype=torch.int8)
    """
    quarter = codes.shape[1] // 4
    source = packed.view(torch.int8)
    for p in range(4):
        plane = codes[:, p * quarter : (p + 1) * quarter]
        if p:
            torch.bitwise_right_shift(source, 2 * p, out=plane)
            plane.bitwise_and_(3)
        else:
            torch.bitwise_and(source, 3, out=plane)


def pack_signs(values: torch.Tensor, packed: torch.Tensor) -> None:
    """Pack which values are negative, eight a byte: bit 1 for values below zero, 0 for zero, above it, and NaN.

    Shapes: values (n,) float, contiguous, n a multiple of 8; packed (n/8,) uint8.
    Example:
        >>> packed = torch.empty(1, dtype=torch.uint8)
        >>> pack_signs(torch.tensor([-1.0, 2, -3, 0, 5, 6, 7, -8]), packed)
        >>> packed, 0b10100001
        (tensor([161], dtype=torch.uint8), 161)
    """
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        packed.numpy()[:] = numpy.packbits(values.numpy() < 0)  # several times faster than the same in torch
    else:
        packed.copy_(_pack_bits(values < 0))


def unpack_signs(packed: torch.Tensor, signs: torch.Tensor) -> None:
    """Undo `pack_signs`: -1 where the value was negative, 1 elsewhere.

    Shapes: packed (n/8,) uint8; signs (n,) int8, contiguous.
    Example:
        >>> signs = torch.empty(8, dtype=torch.int8)
        >>> unpack_signs(torch.tensor([0b10100001], dtype=torch.uint8), signs)
        >>> signs
        tensor([-1,  1, -1,  1,  1,  1,  1, -1], dtype=torch.int8)
    """
    if packed.device.type == "cpu":
        bits = torch.from_numpy(numpy.unpackbits(packed.numpy()))
    else:
        bits = _unpack_bits(packed)
    torch.mul(bits.view(torch.int8), -2, out=signs)
    signs.add_(1)


def _pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """numpy.packbits on any device: bool (n,) to uint8 (n/8,)."""
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.int32, device=bits.device)
    return (bits.view(-1, 8) * weights).sum(1).to(torch.uint8)


def _unpack_bits(packed: torch.Tensor) -> torch.Tensor:
    """numpy.unpackbits on any device: uint8 (n/8,) to uint8 (n,) of 0 and 1."""
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & 1).view(-1)
