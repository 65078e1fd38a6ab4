"""Compiled loops and PyTorch's operations make the same payloads, and the first are never needed."""

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorplay.compression import compiled, grouped, quantize
from tensorplay.compression.codec import Context
from tensorplay.compression.registry import make_codec

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None or bool(os.environ.get("NUMBA_DISABLE_JIT")),
    reason="the extra fast is not installed, or switched off",
)
ROUNDS_AS_TORCH = compiled.is_compiled() and grouped.adds_as_torch(compiled.loops_for(torch.zeros(1)))
#: Scales as they travel are the same bits both ways.
EXACT = [
    "int8",
    "int8:group_size=6",
    "int8:scale_dtype=bfloat16",
    "int4",
    "int4:group_size=2",
    "int4:scale_dtype=bfloat16",
    "sign",
    "int2",
    "uint8",
    "uint8:group_size=7",
    "uint8:none",
]
#: The mean magnitude in float32 depends on the order of a sum.
CLOSE = ["sign:scale_dtype=float32", "int2:scale_dtype=float32", "sign:group_size=8"]


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function that switches compiled loops off for the rest of a test."""
    return lambda: monkeypatch.setattr(compiled, "is_compiled", lambda: False)


def vectors(numel: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    values, addend = torch.randn(2, numel, generator=generator).mul_(scale)
    values[:300], addend[:300] = 0.0, 0.0
    return values, addend


def everything(spec: str, scale: float) -> dict[str, torch.Tensor]:
    codec, context = make_codec(spec), Context(seed=1)
    numel = codec.padded(30_011)
    values, addend = vectors(numel, scale)
    payload, sum_payload = (torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8) for _ in range(2))
    left, decoded, third = values.clone(), torch.empty(numel), torch.empty(numel)
    codec.encode(values, payload, context)
    codec.encode_residual(left, sum_payload, context, addend)
    codec.decode(payload, decoded, context)
    codec.decode_scaled(payload, third, 1.0 / 3.0, context)
    total = decoded.clone()
    codec.decode_add(sum_payload, total, 1.0 / 3.0, context)
    parts = {"payload": payload, "payload of a sum": sum_payload, "left": left}
    return parts | {"decoded": decoded, "third": third, "total": total}


def test_loops_are_compiled_here() -> None:
    assert compiled.is_compiled()
    loops = compiled.loops_for(torch.zeros(1))
    assert all(hasattr(getattr(loops, name), "py_func") for name in loops.__all__)
    assert compiled.loops_for(torch.zeros(1, dtype=torch.float64)) is None
    assert compiled.loops_for(torch.zeros(1, device="meta")) is None


@pytest.mark.parametrize("scale", [1e-39, 1e-30, 1e-3, 1.0, 1e30])
@pytest.mark.parametrize("spec", EXACT)
def test_loops_and_torch_give_the_same_bits(spec: str, scale: float, in_torch: Callable[[], None]) -> None:
    loops = everything(spec, scale)
    in_torch()
    for name, expected in everything(spec, scale).items():
        if name == "left" and not ROUNDS_AS_TORCH:  # a rank's own residual, which nobody else computes
            torch.testing.assert_close(loops[name], expected, rtol=1e-5, atol=1e-6 * scale)
        else:
            assert torch.equal(loops[name], expected), name


@pytest.mark.parametrize("spec", CLOSE)
def test_loops_and_torch_agree_where_a_sum_rounds(spec: str, in_torch: Callable[[], None]) -> None:
    codec, context = make_codec(spec), Context()
    values, _ = vectors(codec.padded(30_011), 1.0)
    loops = codec.compress(values, context)
    one_way = codec.decompress(loops, len(values), context)
    in_torch()
    assert torch.equal(one_way, codec.decompress(loops, len(values), context))  # one payload, the same values
    other_way = codec.decompress(codec.compress(values, context), len(values), context)
    differing = (one_way - other_way).abs() > 1e-5 * other_way.abs().max()
    assert int(differing.sum()) <= 3  # a value at a border may fall to the other side


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("spec", [spec for spec in EXACT + CLOSE if spec != "uint8:none"])
def test_groups_that_are_not_finite_do_no_harm_to_others(
    spec: str, bad: float, in_torch: Callable[[], None]
) -> None:
    codec, context = make_codec(spec), Context()
    values, _ = vectors(codec.padded(5000), 1.0)
    whole = codec.decompress(codec.compress(values, context), len(values), context)
    values[4000] = bad
    payload = codec.compress(values, context)
    assert not bool(codec.is_finite(payload, len(values), context))
    hit = 4000 // codec.group_size
    others = torch.ones(len(values), dtype=torch.bool)
    others[hit * codec.group_size : (hit + 1) * codec.group_size] = False
    decoded = codec.decompress(payload, len(values), context)
    assert torch.equal(decoded[others], whole[others])
    in_torch()
    assert not bool(codec.is_finite(codec.compress(values, context), len(values), context))


class Coarse(quantize.SymmetricInteger):
    """Levels of its own, and no loops that know them."""

    def _quantize(self, run: grouped.Run) -> torch.Tensor | None:
        super()._quantize(run)
        run.codes.view(torch.int8).bitwise_and_(-4)
        return None


class Halved(quantize.AffineUint8):
    def decode_scaled(
        self, payload: torch.Tensor, out: torch.Tensor, factor: float, context: Context
    ) -> None:
        super().decode_scaled(payload, out, factor / 2, context)

    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, factor: float, context: Context) -> None:
        super().decode_add(payload, out, factor / 2, context)


@pytest.mark.parametrize("codec", [Coarse(8), Halved(128)], ids=["own levels", "own scale"])
def test_a_subclass_with_arithmetic_of_its_own_inherits_no_loop(codec: grouped.Codec) -> None:
    values, other = vectors(1280, 1.0)
    payloads, contexts = [codec.compress(values), codec.compress(other)], [Context(), Context(rank=1)]
    expected, mean = torch.empty(1280), torch.empty(1280)
    codec.decode_scaled(payloads[0], expected, 0.5, contexts[0])
    codec.decode_add(payloads[1], expected, 0.5, contexts[1])
    codec.decode_mean(payloads, mean, 0.5, contexts)
    assert torch.equal(mean, expected)
    assert codec.settling(values) is None


def test_what_is_kept_is_compiled_again_when_any_loop_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "some_loops.py"
    source.write_text(
        "from tensorplay.compression.compiled import jit\n\n\n@jit\ndef add(x, y):\n    return x + y\n"
    )

    def is_compiled_for(sources: str) -> bool:
        monkeypatch.setattr(compiled, "_fingerprint", lambda: sources)
        spec = importlib.util.spec_from_file_location("some_loops", source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module.add(1, 2) == 3
        return bool(module.add.stats.cache_misses)

    assert [is_compiled_for(sources) for sources in ("old", "old", "new", "new")] == [
        True,
        False,
        True,
        False,
    ]


def test_the_fingerprint_is_of_all_loops() -> None:
    loops = compiled.loops_for(torch.zeros(1))
    assert loops.bytes_encode._cache._cache_file._source_stamp[1] == compiled._fingerprint()
    assert len(compiled._fingerprint()) == 64


class TestWithoutThem:
    def fresh(self, monkeypatch: pytest.MonkeyPatch) -> bool:
        monkeypatch.setattr(compiled, "is_compiled", compiled.is_compiled.__wrapped__)
        return compiled.is_compiled()

    def test_numba_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        assert not self.fresh(monkeypatch)
        assert compiled.loops_for(torch.zeros(1)) is None

    @pytest.mark.parametrize("kind", [ImportError, OSError, AttributeError, SystemError])
    def test_numba_can_not_be_imported(
        self, kind: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def refuse(name: str) -> Any:
            raise kind(f"{name} needs NumPy 2.3 or less")

        monkeypatch.setattr(importlib, "import_module", refuse)
        assert not self.fresh(monkeypatch)
        assert "numba needs NumPy 2.3 or less" in caplog.text

    def test_numba_is_too_old(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(importlib.import_module("numba"), "__version__", "0.60.0")
        assert not self.fresh(monkeypatch)
        assert "0.60.0 is older than 0.61" in caplog.text

    def test_sums_are_left_to_torch_where_it_rounds_otherwise(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On the gather route they decide what all ranks hold."""
        monkeypatch.setattr(grouped, "adds_as_torch", lambda loops: False)
        monkeypatch.setattr(quantize, "adds_as_torch", lambda loops: False)
        loops = {spec: everything(spec, 1.0) for spec in EXACT}
        monkeypatch.setattr(compiled, "is_compiled", lambda: False)
        for spec in EXACT:
            assert torch.equal(loops[spec]["total"], everything(spec, 1.0)["total"]), spec

    def test_numba_is_switched_off(self) -> None:
        code = "from tensorplay.compression.compiled import is_compiled; print(is_compiled())"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"NUMBA_DISABLE_JIT": "1", "PATH": ""},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.split() == ["False"]

    def test_importing_and_training_start_without_numba(self) -> None:
        """Numba is imported by the first codec that runs, not by import."""
        code = (
            "import sys, tensorplay, tensorplay.distributed.algorithms.ddp_comm_hooks.compressed_hook\n"
            "print('numba' in sys.modules)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout.split() == ["False"]


NO_FOLDER = """
import numba.core.caching as caching
for place in list(caching.CacheImpl._locator_classes):
    place.from_function = classmethod(lambda cls, *a: None)
"""
FULL_DISK = """
import numba.core.caching as caching
def full(*a):
    raise OSError(28, "No space left on device")
caching.IndexDataCacheFile.save = full
"""
UNREADABLE = """
import numba.core.caching as caching
def refused(*a):
    raise PermissionError(13, "Permission denied")
caching.IndexDataCacheFile.load = refused
"""


@pytest.mark.parametrize("trouble", [NO_FOLDER, FULL_DISK, UNREADABLE])
def test_loops_work_where_nothing_can_be_kept_on_disk(trouble: str, tmp_path: Path) -> None:
    (tmp_path / "loop_of_mine.py").write_text(
        "from tensorplay.compression.compiled import jit\n\n\n@jit\ndef twice(x):\n    return 2 * x\n"
    )
    code = f"{trouble}\nimport loop_of_mine\nprint(loop_of_mine.twice(21))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["42"]
