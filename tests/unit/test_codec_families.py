"""What single codecs promise beyond the contract: error against bits, rounding, exact choice, parity with torch."""

import math
import warnings
from typing import ClassVar

import numpy
import pytest
import torch

from tensorplay.compression.bitpack import unpack_fours
from tensorplay.compression.cast import Float8
from tensorplay.compression.codec import Codec, Context
from tensorplay.compression.lloyd_max import LloydMax2, lloyd_max
from tensorplay.compression.quantize import AffineUint8, SymmetricInteger
from tensorplay.compression.registry import make_codec
from tensorplay.compression.sparsify import RandomK, TopK, _largest_anywhere


def normal(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def sent(codec: Codec, values: torch.Tensor, seed: int = 0, rank: int = 0) -> torch.Tensor:
    context = Context(seed=seed, rank=rank)
    return codec.decompress(codec.compress(values, context), values.numel(), context)


def relative_error(codec: Codec, values: torch.Tensor) -> float:
    return float((sent(codec, values) - values).square().sum() / values.square().sum())


class TestErrorAgainstBits:
    """The table of measured errors on Gaussian values, and the best that theory allows."""

    @pytest.mark.parametrize(
        ("spec", "limit"),
        [
            ("sign", 0.37),
            ("int2", 0.125),
            ("int2:scale_dtype=float32", 0.125),
            ("int4:group_size=32", 0.0096),
            ("int4", 0.0139),
            ("int4:scale_dtype=bfloat16", 0.0140),
            ("int4:group_size=2048", 0.0227),
            ("int8:group_size=32", 3.1e-5),
            ("int8", 4.3e-5),
            ("int8:scale_dtype=bfloat16", 4.3e-5),
            ("int8:group_size=2048", 7.2e-5),
            ("uint8", 7e-5),
            ("fp8_e4m3", 8e-4),
            ("fp8_e5m2", 3e-3),
            ("bf16", 3.5e-6),
            ("fp16", 6e-8),
        ],
    )
    def test_squared_error(self, spec: str, limit: float) -> None:
        error = relative_error(make_codec(spec), normal(1 << 19))
        assert 0.5 * limit < error <= limit

    def test_sign_and_two_bits_reach_the_best_quantizer(self) -> None:
        values = normal(1 << 20)
        assert relative_error(make_codec("sign:group_size=4096"), values) == pytest.approx(0.363, abs=2e-3)
        assert relative_error(make_codec("int2:group_size=4096"), values) == pytest.approx(0.1175, abs=1e-3)

    @pytest.mark.parametrize("spec", ["int8", "int4", "int2", "sign", "uint8", "fp8_e4m3"])
    def test_one_outlier_spoils_its_own_group_alone(self, spec: str) -> None:
        codec = make_codec(spec)
        values = normal(codec.group_size * 8) * 1e-3
        clean = sent(codec, values)
        values[codec.group_size + 3] = 10.0
        others = torch.ones(len(values), dtype=torch.bool)
        others[codec.group_size : 2 * codec.group_size] = False
        assert torch.equal(sent(codec, values)[others], clean[others])


class TestSymmetricInteger:
    @pytest.mark.parametrize("bits", [4, 8])
    @pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16"])
    def test_no_value_is_off_by_more_than_half_a_scale(self, bits: int, scale_dtype: str) -> None:
        generator = torch.Generator().manual_seed(1)
        magnitudes = torch.exp(torch.randn(2000, 1, generator=generator) * 10.0)
        values = torch.rand(2000, 64, generator=generator).sub_(0.5) * magnitudes
        codec = SymmetricInteger(bits, 64, scale_dtype)
        difference = (sent(codec, values.view(-1)).view_as(values) - values).abs().amax(1)
        scale = values.abs().amax(1) / codec.top * (1.0 if scale_dtype == "float32" else 1.0 + 2.0**-8)
        assert bool((difference <= scale * 0.50001).all())

    @pytest.mark.parametrize("bits", [4, 8])
    def test_codes_reach_the_top_and_never_pass_it(self, bits: int) -> None:
        for scale_dtype in ("float32", "bfloat16"):
            for rounding in ("nearest", "stochastic"):
                codec = SymmetricInteger(bits, 8, scale_dtype, rounding)
                peaks = torch.logspace(-20, 20, 4000)
                values = torch.zeros(4000, 8)
                values[:, 1], values[:, 6], values[:, 3] = peaks, -peaks, peaks * 0.999
                payload = codec.compress(values.view(-1), Context(seed=5))
                packed = payload[4000 * codec.scale_dtype.itemsize :]
                codes = torch.empty(4000, 8, dtype=torch.int8)
                if bits == 8:
                    codes.copy_(packed.view(torch.int8).view(4000, 8))
                else:
                    planes = torch.empty(2, 4000, 4, dtype=torch.int8)
                    unpack_fours(packed.view(4000, 4), planes)
                    codes = torch.cat([*planes], dim=1)
                assert int(codes.max()) == codec.top
                assert int(codes.min()) == -codec.top
                assert bool((codes[:, 1] >= codec.top - 1).all())  # 127 + u must not wrap to -128
                assert bool((codes[:, 6] <= 1 - codec.top).all())

    def test_by_hand(self) -> None:
        codec = SymmetricInteger(4, 4)
        payload = codec.compress(torch.tensor([1.4, -7.0, 2.6, 0.2]))
        assert payload[:4].view(torch.float32).item() == 1.0
        assert payload[4:].tolist() == [(1 + 8) + 16 * 3, (-7 + 8) + 16 * 0]
        assert codec.decompress(payload, 4).tolist() == [1.0, -7.0, 3.0, 0.0]

    @pytest.mark.parametrize("group_size", [2, 6, 130, 1 << 18])
    def test_any_even_group_size_works(self, group_size: int) -> None:
        for bits in (4, 8):
            codec = SymmetricInteger(bits, group_size)
            values = normal(group_size * 3)
            assert relative_error(codec, values) < 0.06

    def test_bits_are_checked(self) -> None:
        with pytest.raises(ValueError, match="bits must be 4 or 8, got 5"):
            SymmetricInteger(5)


class TestStochasticRounding:
    SPECS = ("int8", "int4", "fp8_e4m3", "fp8_e5m2", "int8:scale_dtype=bfloat16", "int4:scale_dtype=bfloat16")

    @pytest.mark.parametrize("spec", SPECS)
    def test_it_is_right_on_average(self, spec: str) -> None:
        """4,000 draws of one group: every mean within 3 sigma, allowed for how many means there are."""
        codec = make_codec(f"{spec}{',' if ':' in spec else ':'}group_size=64,rounding=stochastic")
        values = normal(64, 5)
        draws = sent(codec, values.repeat(4000), seed=11).view(4000, 64)
        deviation = draws.std(0) / math.sqrt(4000)
        away = (draws.mean(0) - values).abs()
        exact = deviation < 1e-7
        assert bool((away[exact] <= 1e-5).all())
        sigmas = away[~exact] / deviation[~exact]
        assert float((sigmas <= 3.0).float().mean()) >= 0.98
        assert float(sigmas.max()) < 4.5
        assert float(((draws.mean(0) - values)[~exact] / deviation[~exact]).mean().abs()) < 3.0 / math.sqrt(
            64
        )

    def test_single_values_over_4000_seeds(self) -> None:
        codec = make_codec("int8:group_size=2,rounding=stochastic")
        shares = torch.tensor([0.01, 0.3, 0.5, 0.98])
        values = torch.stack([torch.full((4,), 127.0), 5.0 + shares], dim=1).view(-1)
        draws = torch.stack([sent(codec, values, seed=seed).view(4, 2)[:, 1] for seed in range(4000, 8000)])
        assert draws.unique().tolist() == [5.0, 6.0]
        sigmas = (draws.mean(0) - 5.0 - shares) / (shares * (1.0 - shares) / 4000).sqrt()
        assert float(sigmas.abs().max()) < 3.0

    @pytest.mark.parametrize("spec", ["int8", "int4"])
    def test_it_is_off_by_less_than_a_scale(self, spec: str) -> None:
        codec = make_codec(f"{spec}:rounding=stochastic")
        assert isinstance(codec, SymmetricInteger)
        values = normal(128 * 3000)
        difference = (sent(codec, values) - values).abs().view(-1, 128).amax(1)
        assert bool((difference <= values.view(-1, 128).abs().amax(1) / codec.top * 1.0001).all())

    def test_draws_differ_between_seeds_ranks_runs_and_groups(self) -> None:
        codec = make_codec("int8:rounding=stochastic")
        values = torch.full((1 << 18,), 0.5)  # two runs
        values[::128] = 127.0
        first = sent(codec, values, seed=1).view(-1, 128)[:, 1:] - 0.5
        for other in (sent(codec, values, seed=2), sent(codec, values, seed=1, rank=1)):
            product = first * (other.view(-1, 128)[:, 1:] - 0.5)
            assert abs(float(product.mean())) < 4.0 * 0.25 / math.sqrt(product.numel())
        rows = first.numpy() * 2.0
        correlation = rows @ rows.T / rows.shape[1]
        numpy.fill_diagonal(correlation, 0.0)
        assert abs(correlation).max() < 6.5 / math.sqrt(rows.shape[1])
        assert abs(correlation.mean()) < 1e-3

    def test_whole_blocks_keep_results_from_depending_on_the_bucket(self) -> None:
        for spec in ("int8", "int4", "fp8_e4m3"):
            assert make_codec(f"{spec}:rounding=stochastic").whole_blocks
            assert not make_codec(spec).whole_blocks


class TestFloat8:
    @pytest.mark.parametrize("form", ["e4m3", "e5m2"])
    def test_every_finite_code_decodes_as_torch_does(self, form: str) -> None:
        codec = Float8(form, group_size=256)
        codes = torch.arange(256, dtype=torch.uint8)
        payload = torch.cat([torch.tensor([1.0]).view(torch.uint8), codes])
        decoded, expected = codec.decompress(payload, 256), codes.view(codec.dtype).float()
        finite = expected.isfinite()
        assert int(finite.sum()) == (254 if form == "e4m3" else 248)
        assert torch.equal(decoded[finite], expected[finite])

    @pytest.mark.parametrize("form", ["e4m3", "e5m2"])
    def test_nearest_rounding_is_torchs_on_the_scaled_group(self, form: str) -> None:
        codec = Float8(form, group_size=128)
        values = normal(128 * 100)
        scale = values.view(-1, 128).abs().amax(1, keepdim=True) / codec.top
        expected = (values.view(-1, 128) / scale).to(codec.dtype).float() * scale
        torch.testing.assert_close(sent(codec, values).view(-1, 128), expected, rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize("form", ["e4m3", "e5m2"])
    def test_stochastic_rounding_gives_a_neighbouring_level(self, form: str) -> None:
        codec = Float8(form, group_size=128, rounding="stochastic")
        values = normal(128 * 200)
        values[::128] = codec.top  # scale 1
        levels = torch.arange(256, dtype=torch.uint8).view(codec.dtype).float()
        levels = levels[levels.isfinite()].unique()
        index = torch.searchsorted(levels, values, right=True) - 1
        low, high = levels[index], levels[(index + 1).clamp_max(len(levels) - 1)]
        got = sent(codec, values)
        scaled_exactly = values.abs() < codec.top
        assert bool(((got == low) | (got == high))[scaled_exactly].all())


class TestLloydMax:
    def test_levels_are_means_and_borders_midpoints(self) -> None:
        """The two equations, checked by integrating numerically."""
        inner, outer, border = lloyd_max()
        x = numpy.linspace(0.0, 12.0, 1_200_001)
        density = numpy.exp(-x * x / 2.0)
        near, far = x < border, x >= border
        assert inner == pytest.approx((x * density)[near].sum() / density[near].sum(), abs=1e-4)
        assert outer == pytest.approx((x * density)[far].sum() / density[far].sum(), abs=1e-4)
        assert border == pytest.approx((inner + outer) / 2.0)
        assert (inner, outer) == (pytest.approx(0.4528, abs=1e-4), pytest.approx(1.5104, abs=1e-4))

    def test_the_levels_sent_are_those_to_a_thousandth(self) -> None:
        inner, outer, _ = lloyd_max()
        decoded = sent(LloydMax2(4096, "float32"), normal(4096 * 64)).unique().view(4, -1) / 1.0
        values = decoded.abs().mean(1)
        deviation = float(normal(4096 * 64).abs().mean()) * math.sqrt(math.pi / 2.0)
        torch.testing.assert_close(
            values / deviation, torch.tensor([outer, inner, inner, outer]), rtol=2e-3, atol=0.0
        )

    def test_error_at_group_128_is_within_the_limit(self) -> None:
        assert relative_error(LloydMax2(), normal(1 << 20, 3)) <= 0.14


class TestSign:
    def test_by_hand(self) -> None:
        codec = make_codec("sign:group_size=8,scale_dtype=float32")
        values = torch.tensor([1.0, -2.0, 3.0, -4.0, 0.0, 0.0, 6.0, 0.0])
        assert sent(codec, values).tolist() == [2.0, -2.0, 2.0, -2.0, 2.0, 2.0, 2.0, 2.0]

    def test_it_is_one_bit_and_a_scale(self) -> None:
        assert make_codec("sign").wire_bytes(1 << 20) == (1 << 17) + 2 * (1 << 13)


def _heavy(numel: int) -> torch.Tensor:
    return normal(numel, 1) / normal(numel, 2).abs().clamp_min(1e-4)


def _periodic(numel: int) -> torch.Tensor:
    """All large values where a stride of the sample would find them, or miss them."""
    values = torch.full((numel,), 1e-3) + normal(numel) * 1e-5
    values[:: max(1, numel // (1 << 14)) | 1] = 5.0
    return values


def _missed(numel: int) -> torch.Tensor:
    """The sample sees large values alone, of which there are fewer than k."""
    values = normal(numel) * 1e-3
    step = max(1, numel // (1 << 14)) | 1
    values[::step] += 1.0 + normal(len(values[::step]), 7).abs()
    return values


def _rare(numel: int) -> torch.Tensor:
    values = torch.zeros(numel)
    values[numel // 3], values[-1] = -2.0, 1.0
    return values


class TestTopK:
    SIZES = (1, 2, 63, 64, 65, 1000, 65_536, 65_537, 200_000)

    @pytest.mark.parametrize("fraction", [1e-5, 0.001, 0.01, 0.019, 0.1, 0.9, 1.0])
    @pytest.mark.parametrize("make", [normal, _heavy, _periodic, _missed, _rare, torch.ones, torch.zeros])
    def test_the_k_largest_and_no_others(self, fraction: float, make: object) -> None:
        for numel in self.SIZES:
            values = make(numel)  # type: ignore[operator]
            codec = TopK(fraction)
            count = max(1, math.floor(fraction * numel))
            payload = codec.compress(values)
            entries = payload[: 4 * count].view(torch.float32)
            expected = values.abs().topk(count).values
            assert torch.equal(entries.abs().sort(descending=True).values, expected)
            decoded = codec.decompress(payload, numel)
            at = decoded.nonzero().flatten()
            assert torch.equal(decoded[at], values[at])
            assert int((entries != 0).sum()) == len(at)

    @pytest.mark.parametrize("numel", [1000, 65_536, 65_537, 300_000])
    def test_what_devices_use_chooses_the_same(self, numel: int) -> None:
        values = normal(numel)
        count = TopK(0.01).entries(numel)
        chosen, extremes = _largest_anywhere(values, count)
        assert torch.equal(sent(TopK(0.01), values).nonzero().flatten(), chosen)
        assert extremes.tolist() == [float(values.max()), float(values.min())]

    def test_bytes(self) -> None:
        assert TopK(0.01).wire_bytes(50_000) == 500 * 6
        assert TopK(0.01).wire_bytes(1 << 20) == 10485 * 6 + 16 * 4
        assert TopK(1e-6).wire_bytes(1 << 20) == 8  # one entry: a 32-bit index is shorter than 16 counts

    def test_entries_of_one_page_alone(self) -> None:
        values = torch.zeros(400_000)
        values[131_072:131_172] = torch.arange(1.0, 101.0)
        codec = TopK(100 / 400_000)
        assert torch.equal(sent(codec, values), values)


class TestRandomK:
    def test_places_are_the_same_on_all_ranks_and_differ_between_steps(self) -> None:
        codec, values = RandomK(0.1), normal(10_000).abs() + 1.0
        places = [
            sent(codec, values, seed, rank).nonzero().flatten() for seed, rank in ((1, 0), (1, 3), (2, 0))
        ]
        assert all(len(place) == 1000 for place in places)
        assert torch.equal(places[0], places[1])
        assert not torch.equal(places[0], places[2])

    @pytest.mark.parametrize("fraction", [0.05, 0.3, 0.7])
    def test_every_place_is_equally_likely(self, fraction: float) -> None:
        codec, steps = RandomK(fraction), 1500
        counts = sum(sent(codec, torch.ones(20), seed=seed) for seed in range(steps))
        assert isinstance(counts, torch.Tensor)
        share = codec.entries(20) / 20
        sigma = math.sqrt(steps * share * (1.0 - share))
        assert int(counts.sum()) == steps * codec.entries(20)
        assert float((counts - steps * share).abs().max()) < 4.0 * sigma

    def test_four_bytes_an_entry(self) -> None:
        assert RandomK(0.25).wire_bytes(1000) == 1000


class TestAffineUint8:
    RANGES: ClassVar = {
        "10 to 11": (10.0, 11.0),
        "constant": (0.3, 0.3),
        "negative constant": (-7.0, -7.0),
        "both signs": (-1.0, 3.0),
        "below zero": (-5.0, -4.0),
        "huge": (-3e38, 3e38),
        "tiny": (1e-30, 2e-30),
        "far from zero": (1e6, 1e6 + 1.0),
    }

    @pytest.mark.parametrize("group_size", [None, 64])
    @pytest.mark.parametrize("name", RANGES)
    def test_any_range_comes_back_within_a_step(self, name: str, group_size: int | None) -> None:
        low, high = (torch.tensor(end, dtype=torch.float64) for end in self.RANGES[name])
        values = (low + (high - low) * torch.linspace(0, 1, 6400, dtype=torch.float64)).float()
        values = values[torch.randperm(6400, generator=torch.Generator().manual_seed(0))]
        codec = AffineUint8(group_size)
        payload = codec.compress(values)
        assert bool(codec.is_finite(payload, 6400, Context()))
        step = (max(float(high), 0.0) - min(float(low), 0.0)) / 255.0
        difference = (codec.decompress(payload, 6400).double() - values.double()).abs()
        assert float(difference.max()) <= step * 1.001

    def test_zero_is_exact(self) -> None:
        values = normal(1000) * 3.0 + 1.0
        values[::10] = 0.0
        assert not sent(AffineUint8(100), values)[::10].any()

    @pytest.mark.parametrize("group_size", [None, 1, 7, 512, 200_000])
    def test_five_bytes_a_group_and_no_padding(self, group_size: int | None) -> None:
        codec = AffineUint8(group_size)
        numel = 1_400_000 if group_size == 200_000 else 512 * 7 * 5
        groups = 1 if group_size is None else numel // group_size
        assert codec.wire_bytes(numel) == numel + 5 * groups
        assert codec.padded(numel) == numel
        assert relative_error(codec, normal(numel)) < 2e-4

    @pytest.mark.parametrize("shift", [0.0, 10.0, -3.0])
    def test_within_a_step_of_torchs_own_arithmetic(self, shift: float) -> None:
        """Scale and zero point by torch's observers, arithmetic as in its quantization hooks, channels of 512."""
        from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as torchs

        values = normal(512 * 40) + shift
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tensor_observer = torch.ao.quantization.MinMaxObserver()
            channel_observer = torch.ao.quantization.PerChannelMinMaxObserver()
            tensor_observer(values)
            channel_observer(values.view(-1, 512))
            scale, zero = tensor_observer.calculate_qparams()
            scales, zeros = channel_observer.calculate_qparams()
        whole = torchs._dequantize_per_tensor_backend(
            torchs._quantize_per_tensor_backend(values, scale, zero), scale, zero
        )
        difference = (sent(AffineUint8(None), values) - whole).abs()
        assert float(difference.max()) <= float(scale) * 1.001
        rows = values.view(-1, 512)
        channels = torchs._dequantize_per_channel_backend(
            torchs._quantize_per_channel_backend(rows, scales, zeros), scales, zeros
        )
        steps = (sent(AffineUint8(512), values).view(-1, 512) - channels).abs() / scales[:, None]
        assert float(steps.max()) <= 1.001
