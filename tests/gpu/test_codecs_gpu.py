"""Every codec on a device: the promises of test_codecs.py, and payloads that a CPU decodes to the same values."""

import pytest
import torch

from tensorplay.compression.codec import Context
from tensorplay.compression.registry import known_codecs, make_codec

pytestmark = pytest.mark.gpu

VARIANTS = [
    *known_codecs(),
    "int8:rounding=stochastic",
    "int4:scale_dtype=bfloat16,rounding=stochastic",
    "fp8_e5m2:rounding=stochastic",
    "topk:0.001",
    "uint8:none",
]
every_codec = pytest.mark.parametrize("spec", VARIANTS)


def normal(numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(0)).cuda()


@every_codec
def test_a_cpu_decodes_the_payload_to_the_same_values(spec: str) -> None:
    codec, context = make_codec(spec), Context(seed=3)
    if spec.startswith("randomk"):
        pytest.skip("its places are drawn by the device's generator")
    values = normal(codec.padded(300_000))
    payload = codec.compress(values, context)
    here = codec.decompress(payload, len(values), context).cpu()
    there = codec.decompress(payload.cpu(), len(values), Context(seed=3))
    torch.testing.assert_close(here, there, rtol=1e-6, atol=1e-7)
    error = (here - values.cpu()).square().mean()
    on_cpu = (codec.decompress(codec.compress(values.cpu()), len(values)) - values.cpu()).square().mean()
    torch.testing.assert_close(error, on_cpu, rtol=0.02, atol=1e-7)


@every_codec
def test_zeros_and_the_not_finite(spec: str) -> None:
    codec, context = make_codec(spec), Context(seed=3)
    values = torch.zeros(codec.padded(70_000), device="cuda")
    payload = codec.compress(values, context)
    assert not bool(codec.decompress(payload, len(values), context).any())
    assert bool(codec.is_finite(payload, len(values), context))
    for bad in (float("nan"), float("inf"), -float("inf")):
        values = normal(codec.padded(70_000))
        values[65_000] = bad
        assert not bool(codec.is_finite(codec.compress(values, context), len(values), context))


@every_codec
def test_encode_residual_and_decode_add(spec: str) -> None:
    codec, context = make_codec(spec), Context(seed=3)
    values = normal(codec.padded(70_000))
    left, payload = (
        values.clone(),
        torch.empty(codec.wire_bytes(len(values)), dtype=torch.uint8, device="cuda"),
    )
    codec.encode_residual(left, payload, context)
    decoded = codec.decompress(payload, len(values), context)
    torch.testing.assert_close(left, values - decoded, rtol=1e-5, atol=1e-6)
    total = torch.ones_like(values)
    codec.decode_add(payload, total, 0.25, context)
    torch.testing.assert_close(total, 1.0 + 0.25 * decoded, rtol=1e-6, atol=1e-6)


@every_codec
def test_the_same_seed_gives_the_same_bytes_and_no_generator_is_touched(spec: str) -> None:
    codec = make_codec(spec)
    values = normal(codec.padded(70_000))
    before = torch.cuda.get_rng_state()
    assert torch.equal(codec.compress(values, Context(seed=5)), codec.compress(values, Context(seed=5)))
    assert torch.equal(torch.cuda.get_rng_state(), before)
