"""Packing and unpacking, checked against the same done one code at a time in Python."""

import numpy
import pytest
import torch

from tensorplay.compression.bitpack import (
    _pack_bits,
    _unpack_bits,
    _unpack_fours,
    pack_below,
    pack_fours,
    unpack_bits,
    unpack_fours,
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
    for unpack in (unpack_fours, _unpack_fours):
        planes = torch.empty(2, groups, size // 2, dtype=torch.int8)
        unpack(packed, planes)
        assert torch.equal(planes[0], codes[:, : size // 2])
        assert torch.equal(planes[1], codes[:, size // 2 :])


def test_every_pair_of_fours_survives() -> None:
    codes = torch.tensor([[low, high] for low in range(-8, 8) for high in range(-8, 8)], dtype=torch.int8)
    packed, planes = torch.empty(256, 1, dtype=torch.uint8), torch.empty(2, 256, 1, dtype=torch.int8)
    pack_fours(codes, packed)
    unpack_fours(packed, planes)
    assert torch.equal(planes[:, :, 0].T, codes)
    assert packed.unique().numel() == 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("limit", [0.0, 0.7])
def test_bits_hold_eight_neighbours(dtype: torch.dtype, limit: float) -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(1)).to(dtype)
    values[::7] = 0.0
    packed = torch.empty(512, dtype=torch.uint8)
    pack_below(values, limit, packed)
    below = values < torch.tensor(limit, dtype=dtype)
    assert numpy.array_equal(numpy.unpackbits(packed.numpy()), below.numpy())
    assert torch.equal(unpack_bits(packed, -2, 1), 1 - 2 * below.to(torch.int8))
    assert torch.equal(unpack_bits(packed, 5, -3), 5 * below.to(torch.int8) - 3)


def test_not_a_number_is_not_below() -> None:
    packed = torch.empty(1, dtype=torch.uint8)
    pack_below(torch.tensor([float("nan"), -float("inf"), float("inf"), -0.0, 0, -1, 1, 2]), 0.0, packed)
    assert packed.item() == 0b01000100


def test_what_devices_use_for_bits_equals_numpy() -> None:
    bits = torch.rand(4096, generator=torch.Generator().manual_seed(2)) < 0.5
    packed = torch.from_numpy(numpy.packbits(bits.numpy()))
    assert torch.equal(_pack_bits(bits), packed)
    assert torch.equal(_unpack_bits(packed), bits.to(torch.uint8))


def test_packing_works_between_rows_and_columns_of_larger_tensors() -> None:
    codes = random_codes((6, 64), -7, 7)
    store = torch.full((10, 32), 99, dtype=torch.uint8)
    pack_fours(codes, store[2:8])
    assert bool((store[:2] == 99).all())
    assert bool((store[8:] == 99).all())
    planes = torch.empty(2, 6, 32, dtype=torch.int8)
    unpack_fours(store[2:8], planes)
    assert torch.equal(planes[0], codes[:, :32])
    values = torch.randn(10, 64, generator=torch.Generator().manual_seed(3))
    store.fill_(99)
    pack_below(values, 0.0, store[:, 8:16])
    assert bool((store[:, :8] == 99).all())
    assert bool((store[:, 16:] == 99).all())
    assert torch.equal(unpack_bits(store[:, 8:16], -2, 1) == -1, values < 0)
