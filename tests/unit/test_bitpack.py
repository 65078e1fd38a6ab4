"""Packing and unpacking, checked against the same done one code at a time in Python."""

import numpy
import pytest
import torch

from tensorplay.compression.bitpack import (
    _pack_bits,
    _unpack_bits,
    pack_fours,
    pack_signs,
    pack_twos,
    unpack_fours,
    unpack_signs,
    unpack_twos,
)

SHAPES = [(1, 8), (3, 8), (5, 128), (2, 520), (0, 16)]


def random_codes(shape: tuple[int, int], low: int, high: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    return torch.randint(low, high + 1, shape, generator=generator, dtype=torch.int8)


@pytest.mark.parametrize("shape", SHAPES)
def test_fours_hold_two_planes(shape: tuple[int, int]) -> None:
    codes = random_codes(shape, -8, 7)
    groups, size = shape
    packed = torch.empty(groups, size // 2, dtype=torch.uint8)
    pack_fours(codes, packed)
    for row in range(groups):
        for j in range(size // 2):
            expected = (int(codes[row, j]) + 8) % 16 + 16 * (int(codes[row, j + size // 2]) % 16)
            assert int(packed[row, j]) == expected
    back = torch.empty_like(codes)
    unpack_fours(packed, back)
    assert torch.equal(back, codes)


def test_every_pair_of_fours_survives() -> None:
    codes = torch.tensor([[low, high] for low in range(-8, 8) for high in range(-8, 8)], dtype=torch.int8)
    packed, back = torch.empty(256, 1, dtype=torch.uint8), torch.empty_like(codes)
    pack_fours(codes, packed)
    unpack_fours(packed, back)
    assert torch.equal(back, codes)
    assert packed.unique().numel() == 256


@pytest.mark.parametrize("shape", SHAPES)
def test_twos_hold_four_planes(shape: tuple[int, int]) -> None:
    codes = random_codes(shape, -2, 1)
    groups, size = shape
    packed = torch.empty(groups, size // 4, dtype=torch.uint8)
    pack_twos(codes, packed)
    for row in range(groups):
        for j in range(size // 4):
            expected = sum(4**p * (int(codes[row, j + p * size // 4]) + 2) for p in range(4))
            assert int(packed[row, j]) == expected
    back = torch.empty_like(codes)
    unpack_twos(packed, back)
    assert torch.equal(back, codes + 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_signs_hold_eight_neighbours(dtype: torch.dtype) -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(1)).to(dtype)
    values[::7] = 0.0
    packed, back = torch.empty(512, dtype=torch.uint8), torch.empty(4096, dtype=torch.int8)
    pack_signs(values, packed)
    assert numpy.array_equal(numpy.unpackbits(packed.numpy()), (values < 0).numpy())
    unpack_signs(packed, back)
    assert torch.equal(back == -1, values < 0)
    assert torch.equal(back == 1, values >= 0)


def test_what_devices_use_for_bits_equals_numpy() -> None:
    bits = torch.rand(4096, generator=torch.Generator().manual_seed(2)) < 0.5
    packed = torch.from_numpy(numpy.packbits(bits.numpy()))
    assert torch.equal(_pack_bits(bits), packed)
    assert torch.equal(_unpack_bits(packed), bits.to(torch.uint8))


def test_packing_works_between_rows_of_larger_tensors() -> None:
    codes = random_codes((6, 64), -7, 7)
    store = torch.full((10, 32), 99, dtype=torch.uint8)
    pack_fours(codes, store[2:8])
    assert bool((store[:2] == 99).all())
    assert bool((store[8:] == 99).all())
    back = torch.zeros(8, 64, dtype=torch.int8)
    unpack_fours(store[2:8], back[1:7])
    assert torch.equal(back[1:7], codes)
    assert not back[0].any()
    assert not back[7].any()
