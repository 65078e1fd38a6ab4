"""What every codec of the registry keeps, whatever it does: the contract in codec.py, point by point."""

import random
import threading

import numpy
import pytest
import torch

from tensorplay.compression import compiled
from tensorplay.compression.codec import Codec, Context, Identity
from tensorplay.compression.grouped import SMALLEST_SCALE, GroupScaled
from tensorplay.compression.registry import codec_entry, known_codecs, make_codec, register_codec
from tensorplay.compression.rounds import Scratch

VARIANTS = [
    *known_codecs(),
    "int8:group_size=512,scale_dtype=bfloat16",
    "int8:rounding=stochastic",
    "int8:scale_dtype=bfloat16,rounding=stochastic",
    "int4:group_size=32",
    "int4:scale_dtype=bfloat16,rounding=stochastic",
    "fp8_e4m3:scale_dtype=bfloat16",
    "fp8_e4m3:rounding=stochastic",
    "fp8_e5m2:rounding=stochastic",
    "int2:scale_dtype=float32",
    "sign:group_size=1024",
    "uint8:none",
    "topk:0.001",
    "topk:0.4",
    "topk:1",
    "randomk:0.7",
    "randomk:1",
]
NOT_FINITE = [float("nan"), float("inf"), -float("inf")]
#: Run a second time as they are without Numba.
WITH_LOOPS = [
    "int2",
    "int4:group_size=32",
    "int8",
    "int8:group_size=512,scale_dtype=bfloat16",
    "sign",
    "uint8",
    "uint8:none",
]
every_codec = pytest.mark.parametrize(
    "spec", [*VARIANTS, *(f"{spec} in torch" for spec in WITH_LOOPS)], indirect=True
)


@pytest.fixture
def spec(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What names the codec; "... in torch" switches compiled loops off."""
    name, _, in_torch = request.param.partition(" ")
    if in_torch:
        monkeypatch.setattr(compiled, "is_compiled", lambda: False)
    return str(name)


def normal(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def sent(codec: Codec, values: torch.Tensor, context: Context) -> torch.Tensor:
    return codec.decompress(codec.compress(values, context), values.numel(), context)


@every_codec
def test_zeros_come_back_as_zeros(spec: str) -> None:
    codec, context = make_codec(spec), Context(seed=3)
    values = torch.zeros(codec.padded(5000))
    payload = codec.compress(values, context)
    assert not codec.decompress(payload, len(values), context).any()
    assert bool(codec.is_finite(payload, len(values), context))


@every_codec
def test_a_group_of_zeros_beside_others_comes_back_as_zeros(spec: str) -> None:
    codec, context = make_codec(spec), Context(seed=3)
    values = normal(codec.padded(5000))
    values[: codec.group_size] = 0.0
    assert not sent(codec, values, context)[: codec.group_size].any()


@every_codec
@pytest.mark.parametrize("bad", NOT_FINITE)
def test_one_value_that_is_not_finite_is_told(spec: str, bad: float) -> None:
    codec, context = make_codec(spec), Context(seed=3)
    numel = codec.padded(140_000)  # more than one run and one page
    for place in (0, 1, 63, 70_001, numel - 65, numel - 1):
        values = normal(numel)
        values[place] = bad
        finite = codec.is_finite(codec.compress(values, context), numel, context)
        assert finite.dtype == torch.bool
        assert finite.shape == ()
        assert not bool(finite), place


@every_codec
@pytest.mark.parametrize("bad", NOT_FINITE)
def test_values_that_are_all_not_finite_are_told(spec: str, bad: float) -> None:
    codec, context = make_codec(spec), Context(seed=3)
    values = torch.full((codec.padded(3000),), bad)
    assert not bool(codec.is_finite(codec.compress(values, context), len(values), context))


@every_codec
@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1.0, 1e4, 1e30])
def test_relative_error_does_not_depend_on_the_scale(spec: str, scale: float) -> None:
    if spec == "fp16" and scale not in (1.0, 1e4):
        pytest.skip("fp16 has no scale; its range is documented")
    codec, context = make_codec(spec), Context(seed=3)
    values = normal(codec.padded(20_000))
    payload = codec.compress(values * scale, context)
    assert bool(codec.is_finite(payload, len(values), context))
    error = (codec.decompress(payload, len(values), context) / scale - values).square().mean()
    expected = (sent(codec, values, context) - values).square().mean()
    torch.testing.assert_close(error, expected, rtol=0.03, atol=1e-7)


@every_codec
@pytest.mark.parametrize("scale", [1e-38, 1e-42, 1e-45])
def test_denormal_values_are_finite_and_off_by_next_to_nothing(spec: str, scale: float) -> None:
    codec, context = make_codec(spec), Context(seed=3)
    values = normal(codec.padded(2000)) * scale
    payload = codec.compress(values, context)
    assert bool(codec.is_finite(payload, len(values), context))
    difference = codec.decompress(payload, len(values), context) - values
    assert float(difference.abs().max()) <= 2.0 * SMALLEST_SCALE


@every_codec
def test_encode_leaves_its_input_and_every_generator_alone(spec: str) -> None:
    codec, context = make_codec(spec), Context(seed=3, rank=1)
    values = normal(codec.padded(10_000))
    before = values.clone(), torch.get_rng_state(), random.getstate()
    numpy_before = numpy.random.get_state(legacy=False)  # noqa: NPY002
    sent(codec, values, context)
    assert torch.equal(values, before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert random.getstate() == before[2]
    numpy_after = numpy.random.get_state(legacy=False)  # noqa: NPY002
    assert numpy_before["state"]["pos"] == numpy_after["state"]["pos"]
    assert numpy.array_equal(numpy_before["state"]["key"], numpy_after["state"]["key"])


@every_codec
def test_every_byte_of_the_payload_is_written_and_the_same_each_time(spec: str) -> None:
    codec = make_codec(spec)
    for numel in (codec.padded(1), codec.padded(5000), codec.padded(140_000)):
        values = normal(numel)
        payloads = []
        for filling in (0, 255):
            payload = torch.full((codec.wire_bytes(numel),), filling, dtype=torch.uint8)
            codec.encode(values, payload, Context(seed=3, rank=2))
            payloads.append(payload)
        assert torch.equal(*payloads)


@every_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decode_add_adds_what_decode_gives(spec: str, dtype: torch.dtype) -> None:
    codec, context = make_codec(spec), Context(seed=3)
    values = normal(codec.padded(140_000))
    payload = codec.compress(values, context)
    decoded, total = torch.full_like(values, 7.0, dtype=dtype), normal(len(values), 1).to(dtype)
    expected = total.clone()
    codec.decode(payload, decoded, context)
    expected += decoded * (-1.0 / 3.0)
    codec.decode_add(payload, total, -1.0 / 3.0, context)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)


@every_codec
def test_encode_residual_leaves_what_was_not_sent(spec: str) -> None:
    codec, context = make_codec(spec), Context(seed=3, rank=1)
    values = normal(codec.padded(140_000))
    payload = torch.empty(codec.wire_bytes(len(values)), dtype=torch.uint8)
    left = values.clone()
    codec.encode_residual(left, payload, context)
    assert torch.equal(payload, codec.compress(values, context))
    codec.decode_add(payload, values, -1.0, context)
    assert torch.equal(left, values)


@pytest.mark.parametrize("spec", [spec for spec in VARIANTS if isinstance(make_codec(spec), GroupScaled)])
def test_encode_residual_of_a_sum(spec: str) -> None:
    codec, context = make_codec(spec), Context(seed=3, rank=1)
    assert isinstance(codec, GroupScaled)
    values, addend = normal(codec.padded(140_000)), normal(codec.padded(140_000), 1)
    before = addend.clone()
    left, total = values.clone(), values + addend
    payloads = [torch.empty(codec.wire_bytes(len(values)), dtype=torch.uint8) for _ in range(2)]
    codec.encode_residual(left, payloads[0], context, addend)
    codec.encode_residual(total, payloads[1], context)
    assert torch.equal(*payloads)
    assert torch.equal(left, total)
    assert torch.equal(addend, before)


@every_codec
def test_no_values_are_no_bytes(spec: str) -> None:
    codec, context = make_codec(spec), Context()
    assert codec.wire_bytes(0) == 0
    empty, payload = torch.empty(0), torch.empty(0, dtype=torch.uint8)
    codec.encode(empty, payload, context)
    codec.decode(payload, empty, context)
    codec.decode_add(payload, empty, 1.0, context)
    assert bool(codec.is_finite(payload, 0, context))


@every_codec
def test_a_codec_serves_two_threads_at_once(spec: str) -> None:
    codec = make_codec(spec)
    inputs = [normal(codec.padded(150_000), seed) for seed in (1, 2)]
    alone = [codec.compress(values, Context(seed=4)) for values in inputs]
    wrong: list[int] = []

    def work(index: int) -> None:
        context = Context(Scratch(), seed=4)
        for _ in range(5):
            if not torch.equal(codec.compress(inputs[index], context), alone[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@every_codec
def test_with_error_feedback_nothing_is_lost(spec: str) -> None:
    codec = make_codec(spec)
    numel = codec.padded(4000)
    residual, total_given, total_sent = torch.zeros(numel), torch.zeros(numel), torch.zeros(numel)
    for step in range(50):
        gradient, context = normal(numel, step), Context(seed=step)
        decoded = sent(codec, gradient + residual, context)
        residual += gradient - decoded
        total_given += gradient
        total_sent += decoded
    torch.testing.assert_close(total_sent + residual, total_given, rtol=1e-5, atol=1e-4)


@every_codec
def test_with_error_feedback_the_residual_stays_bounded(spec: str) -> None:
    """A constant gradient for many steps: what is sent follows it, so the residual doesn't grow with their number."""
    if spec.startswith("topk:0.001"):
        pytest.skip("sends an entry every 1,000 steps: nothing to see in a few hundred")
    codec = make_codec(spec)
    gradient = normal(codec.padded(1000))
    residual, norms = torch.zeros_like(gradient), []
    for step in range(600):
        residual += gradient
        residual -= sent(codec, residual, Context(seed=step))
        norms.append(float(residual.norm()))
    assert max(norms[300:]) <= 1.5 * max(norms[:300]) + 1e-6


@pytest.mark.parametrize("spec", [spec for spec in VARIANTS if make_codec(spec).sums_as is not None])
def test_payloads_of_one_seed_may_be_added(spec: str) -> None:
    codec = make_codec(spec)
    dtype = codec.sums_as
    assert dtype is not None
    inputs = [normal(5000, seed) for seed in (1, 2, 3)]
    payloads = [codec.compress(values, Context(seed=9, rank=rank)) for rank, values in enumerate(inputs)]
    total = sum(payload.view(dtype) for payload in payloads)
    assert isinstance(total, torch.Tensor)
    together = codec.decompress(total.view(torch.uint8), 5000, Context(seed=9, rank=0))
    expected = sum(
        codec.decompress(payload, 5000, Context(seed=9, rank=rank)) for rank, payload in enumerate(payloads)
    )
    precision = torch.finfo(dtype).eps
    torch.testing.assert_close(together, expected, rtol=2 * precision, atol=4 * precision)


@every_codec
def test_its_name_makes_the_same_codec(spec: str) -> None:
    codec = make_codec(spec)
    again = make_codec(codec.name)
    assert again.name == codec.name
    assert again.padded(3001) == codec.padded(3001)
    values = normal(codec.padded(3001))
    assert torch.equal(codec.compress(values, Context(seed=1)), again.compress(values, Context(seed=1)))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_bits_a_value_are_as_stated(bits: int) -> None:
    codec = make_codec(f"int{bits}:scale_dtype=bfloat16")
    assert codec.wire_bytes(1 << 20) * 8 / (1 << 20) == bits + 16 / 128


class TestRegistry:
    def test_lists_the_codecs_of_the_table(self) -> None:
        table = {"fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "int2", "sign", "topk", "randomk"}
        assert table <= set(known_codecs())
        assert list(known_codecs()) == sorted(known_codecs())
        assert all(codec_entry(name).paper for name in known_codecs())

    def test_every_codec_has_defaults_for_all_parameters(self) -> None:
        for name in known_codecs():
            assert make_codec(name).name.partition(":")[0] == name

    def test_a_codec_is_returned_as_it_is(self) -> None:
        codec = Identity()
        assert make_codec(codec) is codec

    @pytest.mark.parametrize(
        ("spec", "text"),
        [
            ("int9", "codec must be one of bf16, .*, got 'int9'"),
            ("", "codec must be one of"),
            (
                "int8:colour=red",
                "a parameter of codec 'int8' must be one of group_size, scale_dtype, rounding, got",
            ),
            ("int8:group_size=64,group_size=64", "group_size of codec 'int8' must be given once"),
            ("int8:64,nearest", "must be written name=value, got 'nearest'"),
            (
                "fp16:3",
                "a parameter of codec 'fp16' must be left out, it has none, got '3'|written name=value",
            ),
            ("int8:group_size=0", "group_size must be at least 2 and a multiple of 2, got 0"),
            ("int4:group_size=33", "group_size must be .* a multiple of 2, got 33"),
            ("int2:group_size=12", "group_size must be .* a multiple of 8, got 12"),
            ("sign:group_size=4", "group_size must be .* a multiple of 8, got 4"),
            ("uint8:group_size=-1", "group_size must be at least 1, got -1"),
            ("int8:rounding=up", "rounding must be one of nearest, stochastic, got 'up'"),
            ("int8:scale_dtype=float16", "scale_dtype must be one of float32, bfloat16, got 'float16'"),
            ("topk:0", "fraction must be above 0 and at most 1, got 0"),
            ("topk:1.5", "fraction must be above 0 and at most 1, got 1.5"),
            ("randomk:nan", "fraction must be above 0 and at most 1, got nan"),
        ],
    )
    def test_mistakes_are_told_with_value_and_rule(self, spec: str, text: str) -> None:
        with pytest.raises(ValueError, match=text):
            make_codec(spec)

    @pytest.mark.parametrize("spec", ["topk:much", "int8:group_size=64.0", "int8:group_size=none", None, 3])
    def test_values_of_another_type_are_told(self, spec: object) -> None:
        with pytest.raises(TypeError, match="must be"):
            make_codec(spec)  # type: ignore[arg-type]

    def test_a_registered_codec_is_made_by_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tensorplay.compression.registry._CODECS", {})
        register_codec("half", lambda: Identity(torch.float16), "none")
        assert known_codecs() == ("half",)
        assert make_codec("half").wire_bytes(10) == 20
        with pytest.raises(ValueError, match="name must not be taken, got 'half'"):
            register_codec("half", Identity)
        for name in ("", "a:b", "a=b", "a b"):
            with pytest.raises(ValueError, match="name must not be empty or contain"):
                register_codec(name, Identity)
        with pytest.raises(TypeError, match="factory must be callable, got str"):
            register_codec("other", "half")  # type: ignore[arg-type]

    def test_a_factory_must_return_a_codec(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tensorplay.compression.registry._CODECS", {})
        register_codec("wrong", lambda: 3)  # type: ignore[arg-type,return-value]
        with pytest.raises(TypeError, match="the factory of codec 'wrong' must return a Codec, got int"):
            make_codec("wrong")
