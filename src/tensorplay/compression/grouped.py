"""What codecs with one scale a group share: how a payload is laid out, and how it is worked through.

    payload = scales of all groups, then codes, group after group;   value = scale * level(code)

On a CPU a codec's own compiled loop does it, where there is one (see `compiled`). Otherwise groups are worked through
in runs whose temporaries stay in the cache: three to four times faster than whole tensors. On a device everything is
one run.
"""

import functools
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import torch

from tensorplay.compression.codec import Codec, Context, Settling, all_finite
from tensorplay.compression.compiled import loops_for

__all__ = [
    "MEAN_LOOPS",
    "ROUNDINGS",
    "RUN_ELEMENTS",
    "SMALLEST_SCALE",
    "GroupScaled",
    "Run",
    "absolute_maximum",
    "add_noise",
    "adds_as_torch",
    "check_choice",
    "check_integer",
    "float_dtype",
    "invert_scales",
    "mean_magnitude",
    "name_with",
]

MEAN_LOOPS = "tensorplay.compression.mean_loops"
"""The module of the loops that end a step, for `loops_for`."""
RUN_ELEMENTS = 1 << 16
"""Elements of a run: a quarter of a megabyte, so that a run and its temporaries fit a second-level cache."""
SMALLEST_SCALE = 2.0**-120
"""Scales are at least this where they divide, so that their inverse is finite: smaller values are lost."""
ROUNDINGS = ("nearest", "stochastic")
"""What `rounding` may be."""


def check_integer(name: str, value: object, minimum: int, multiple: int = 1) -> int:
    """Return `value` if it is an integer of at least `minimum` and a multiple of `multiple`; else raise."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < minimum or value % multiple:
        rule = f"at least {minimum}" + (f" and a multiple of {multiple}" if multiple > 1 else "")
        raise ValueError(f"{name} must be {rule}, got {value}")
    return value


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return `value` if it is one of `choices`; else raise ValueError."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return str(value)


def float_dtype(name: str, value: torch.dtype | str, choices: tuple[torch.dtype, ...]) -> torch.dtype:
    """The dtype that `value` names ("bfloat16" or torch.bfloat16), if it is one of `choices`; else ValueError."""
    for dtype in choices:
        if value in (dtype, str(dtype).removeprefix("torch."), str(dtype)):
            return dtype
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in choices)
    raise ValueError(f"{name} must be one of {names}, got {value!r}")


def name_with(name: str, **parameters: tuple[object, object]) -> str:
    """`name` and those parameters, given as (value, default), that differ from their default.

    Example:
        >>> name_with("int8", group_size=(64, 128), rounding=("nearest", "nearest"))
        'int8:group_size=64'
    """
    given = [
        f"{key}={str(value).removeprefix('torch.').replace('None', 'none')}"
        for key, (value, default) in parameters.items()
        if value != default
    ]
    return f"{name}:{','.join(given)}" if given else name


class Run:
    """The groups that are worked on now, as views of a call's tensors, and temporaries of their size.

    Numbers of which there is one a group are few, so what costs time is calling an operation, and NumPy's cost less
    than torch's: on a CPU `xp` is numpy and the `_array` attributes are arrays that share memory with the tensors
    beside them; on a device `xp` is torch and they are the tensors themselves.

    Attributes:
        values: (groups, G). codes: (groups, group_bytes) uint8.
        scales: (groups,) float32; scales_array, as a column (groups, 1): scales_column.
        lowest, lowest_array, inverse_array: temporaries (groups,) float32; inverse_column: the last as a column.
        number: of the run in its call; first: its first group; count: its groups. context: of the call.
    """

    values: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor
    scales_array: Any
    scales_column: torch.Tensor
    first: int
    count: int

    def __init__(self, context: Context, shape: tuple[int, int], device: torch.device) -> None:
        self.context, self.number = context, 0
        self.xp: Any = numpy if device.type == "cpu" else torch
        self._shape, self._device = shape, device
        self._lent: dict[str, torch.Tensor] = {}
        columns = context.scratch.borrow("grouped/columns", 2 * shape[0], torch.float32, device).view(2, -1)
        self.lowest, inverse = columns
        self.inverse_column: torch.Tensor = inverse.unsqueeze(1)
        self.lowest_array, self.inverse_array = as_array(self.lowest), as_array(inverse)

    def table(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A temporary (groups, G)."""
        lent = self._lent.get(name)
        if lent is None:
            groups, size = self._shape
            scratch = self.context.scratch
            lent = scratch.borrow(f"grouped/{name}", groups * size, dtype, self._device).view(groups, size)
            self._lent[name] = lent
        return lent


@functools.cache
def adds_as_torch(loops: Any) -> bool:
    """Whether loops round a product and the sum it joins as torch.addcmul does on this processor: once.

    Where they don't, sums are left to PyTorch's operations: on the gather route they decide what all ranks hold, and
    some ranks may have no Numba.
    """
    generator = torch.Generator().manual_seed(0)
    total, scales = torch.randn(64, 128, generator=generator), torch.randn(64, 1, generator=generator)
    codes = torch.arange(64 * 128, dtype=torch.int32).remainder_(255).sub_(127).to(torch.int8)
    expected = torch.addcmul(total, codes.view(64, 128).float(), scales)
    levels, numbers, found = codes.view(torch.uint8).numpy(), scales.view(-1).numpy(), total.clone()
    loops.bytes_decode(levels, numbers, found.view(-1).numpy(), True)
    pair = torch.addcmul(codes.view(64, 128).float().mul_(scales), codes.view(64, 128).float(), scales)
    mean, ends = torch.empty_like(total), loops_for(total, MEAN_LOOPS)
    ends.bytes_mean(
        levels,
        numbers,
        levels,
        numbers,
        0,
        numbers,
        True,
        False,
        mean.view(-1).numpy(),
        mean.view(-1).numpy(),
    )
    return torch.equal(found, expected) and torch.equal(mean, pair)


def as_array(tensor: torch.Tensor) -> Any:
    """A NumPy array that shares a CPU tensor's memory; a device's tensor itself."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def add_noise(values: torch.Tensor, run: Run) -> None:
    """values += u, uniform in (0, 1), one draw a value, others for every seed, rank and run.

    Shapes: values (groups, G) float32, contiguous.
    On a CPU u is one of 65,536 equally spaced numbers, symmetric about 1/2, so that rounding stays right on average.
    No generator of the user's is touched.
    """
    context, count = run.context, values.numel()
    seeds = numpy.random.SeedSequence([context.seed & (2**64 - 1), context.rank, run.number])
    if values.device.type != "cpu":
        generator = torch.Generator(values.device)
        generator.manual_seed(int(seeds.generate_state(1, numpy.uint64)[0] >> 1))
        values.add_(torch.rand(values.shape, generator=generator, device=values.device))
        return
    raw = numpy.random.SFC64(seeds).random_raw(-(-count // 4))
    draws = torch.from_numpy(raw.view(numpy.int16)[:count]).view(values.shape)
    noise = run.table("noise").copy_(draws)
    values.add_(noise, alpha=2.0**-16).add_(0.5 + 2.0**-17)  # draws are -32768 .. 32767


_ARITHMETIC = {
    *("_measure", "_quantize", "_levels", "_encode", "_parts", "encode", "encode_residual"),
    *("decode", "decode_scaled", "decode_add"),
}
"""What a codec's loops must agree with."""


class GroupScaled(Codec):
    """Base of codecs that send a scale and G codes a group.

    A subclass writes `_measure`, `_quantize` and `_levels`, each for one run of groups; and `_encoding_loop`,
    `_decoding_loop` and `_mean_loop` where compiled loops do the same.

    Args:
        group_size: values that share a scale. group_bytes: bytes of a group's codes.
        scale_dtype: of scales on the wire, float32 or bfloat16; codes are made with the scale as it is sent.
    Wire: (group_bytes + scale_dtype.itemsize) bytes a group.
    """

    #: Scales are multiplied by this before they are rounded to bfloat16.
    _scale_margin = 1.0

    def __init_subclass__(cls) -> None:
        """A subclass with arithmetic of its own inherits no loops, which would go on with that of its parent."""
        super().__init_subclass__()
        if not _ARITHMETIC.isdisjoint(cls.__dict__):
            for loop in ("_encoding_loop", "_decoding_loop", "_mean_loop"):
                if loop not in cls.__dict__:
                    setattr(cls, loop, getattr(GroupScaled, loop))

    def __init__(self, group_size: int, group_bytes: int, scale_dtype: torch.dtype | str) -> None:
        self.group_size = group_size
        self.group_bytes = group_bytes
        self.scale_dtype = float_dtype("scale_dtype", scale_dtype, (torch.float32, torch.bfloat16))

    @abstractmethod
    def _measure(self, run: Run) -> None:
        """Write the scales of a run; not finite where a value isn't."""

    @abstractmethod
    def _quantize(self, run: Run) -> torch.Tensor | None:
        """Write the codes of a run; returns their levels (groups, G) float32 where they are at hand."""

    @abstractmethod
    def _levels(self, codes: torch.Tensor, levels: torch.Tensor, run: Run) -> None:
        """Write the levels (groups, G) float32 that codes (groups, group_bytes) stand for."""

    def _encoding_loop(self, loops: Any) -> tuple[Any, tuple[Any, ...]] | None:
        """The loop of the module `loops` that does all of `_encode` but the cast of the scales, and its own arguments.

        It is called with values, addend, scales and codes; those; brief, add and subtract: see `loops`. None: none can.
        """
        return None

    def _decoding_loop(self, loops: Any) -> Any:
        """The loop that writes scale * level; it is called with codes, scales, out and accumulate. None: none can."""
        return None

    def _mean_loop(self, loops: Any) -> Any:
        """The loop of the module `loops`, which is `mean_loops`, that ends a step. None: none can."""
        return None

    def wire_bytes(self, numel: int) -> int:
        """Bytes of the payload of `numel` values, whole groups."""
        return numel // self.group_size * (self.scale_dtype.itemsize + self.group_bytes)

    def encode(self, values: torch.Tensor, payload: torch.Tensor, context: Context) -> None:
        """Write the payload of `values`."""
        self._encode(values, payload, context)

    def encode_residual(
        self,
        values: torch.Tensor,
        payload: torch.Tensor,
        context: Context,
        addend: torch.Tensor | None = None,
    ) -> None:
        """As `Codec.encode_residual`, run by run: each is read from memory and written once, in half the time."""
        self._encode(values, payload, context, addend, subtract=True)

    def _encode(
        self,
        values: torch.Tensor,
        payload: torch.Tensor,
        context: Context,
        addend: torch.Tensor | None = None,
        subtract: bool = False,
    ) -> None:
        """For each run: 1. add the addend. 2. Measure the scales, and round them to what is sent.

        3. Make the codes with those. 4. If `subtract`: subtract what the codes stand for.
        """
        sent, codes = self._parts(payload, values.numel())
        scales = sent
        if sent.dtype != torch.float32:
            scales = context.scratch.borrow("grouped/scales", sent.numel(), torch.float32, sent.device)
        if self._encoded_in_loops(values, addend, sent, scales, codes, subtract):
            return
        more = addend.view(codes.shape[0], -1) if addend is not None and codes.shape[0] else None
        with numpy.errstate(all="ignore"):  # what isn't finite is told by the scale, not by a warning
            for run in self._runs(values, scales, codes, context):
                runs = slice(run.first, run.first + run.count)
                if more is not None:
                    run.values.add_(more[runs])
                self._measure(run)
                if sent is not scales:
                    if self._scale_margin != 1.0:
                        run.scales.mul_(self._scale_margin)
                    run.scales.copy_(sent[runs].copy_(run.scales))
                levels = self._quantize(run)
                if subtract:
                    if levels is None:
                        levels = run.table("levels")
                        self._levels(run.codes, levels, run)
                    run.values.addcmul_(levels, run.scales_column, value=-1.0)

    def decode(self, payload: torch.Tensor, out: torch.Tensor, context: Context) -> None:
        """Write scale * level to `out`."""
        self.decode_scaled(payload, out, 1.0, context)

    def decode_scaled(
        self, payload: torch.Tensor, out: torch.Tensor, factor: float, context: Context
    ) -> None:
        """Write factor * scale * level to `out`; the product of factor and scale is made once a group."""
        if out.dtype != torch.float32:
            values = context.scratch.borrow("grouped/decoded", out.numel(), torch.float32, out.device)
            self.decode_scaled(payload, values, factor, context)
            out.copy_(values)
            return
        scales, codes = self._factors(payload, out, factor, context)
        if self._decoded_in_loops(scales, codes, out, False):
            return
        for run in self._runs(out, scales, codes, context):
            self._levels(run.codes, run.values, run)
            run.values.mul_(run.scales_column)

    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, factor: float, context: Context) -> None:
        """out += factor * scale * level; the product of factor and scale is made once a group."""
        if out.dtype != torch.float32:
            super().decode_add(payload, out, factor, context)
            return
        scales, codes = self._factors(payload, out, factor, context)
        if self._decoded_in_loops(scales, codes, out, True):
            return
        for run in self._runs(out, scales, codes, context):
            levels = run.table("levels")
            self._levels(run.codes, levels, run)
            run.values.addcmul_(levels, run.scales_column)

    def decode_mean(
        self,
        payloads: Sequence[torch.Tensor],
        out: torch.Tensor,
        factor: float,
        contexts: Sequence[Context],
    ) -> None:
        """factor * scale * level of all payloads, two of them in one loop."""
        done = 0
        if len(payloads) > 1 and out.dtype == torch.float32:
            done = self._mean_in_loops(out, None, payloads[0], payloads, factor, contexts[0])
        if not done:
            super().decode_mean(payloads, out, factor, contexts)
            return
        for payload, context in zip(payloads[done:], contexts[done:], strict=True):
            self.decode_add(payload, out, factor, context)

    def settling(self, values: torch.Tensor) -> Settling | None:
        """This codec where compiled loops do all of it."""
        loops, ends = loops_for(values), loops_for(values, MEAN_LOOPS)
        if loops is None or self._encoding_loop(loops) is None or self._mean_loop(ends) is None:
            return None
        return self

    def encode_sum(
        self, values: torch.Tensor, addend: torch.Tensor, payload: torch.Tensor, context: Context
    ) -> None:
        """As `Settling.encode_sum`."""
        self._encode(values, payload, context, addend)

    def settle_mean(
        self,
        out: torch.Tensor,
        residual: torch.Tensor,
        own: torch.Tensor,
        payloads: Sequence[torch.Tensor],
        factor: float,
        contexts: Sequence[Context],
    ) -> None:
        """As `Settling.settle_mean`; one payload, or two, in the loop that settles."""
        done = self._mean_in_loops(out, residual, own, payloads, factor, contexts[0])
        if not done:
            raise RuntimeError(f"{self.name} has no loop that settles such values: see `settling`")
        for payload, context in zip(payloads[done:], contexts[done:], strict=True):
            self.decode_add(payload, out, factor, context)

    def is_finite(self, payload: torch.Tensor, numel: int, context: Context) -> torch.Tensor:
        """Whether every scale is finite."""
        return all_finite(self._parts(payload, numel)[0])

    def _parts(self, payload: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales (groups,) and the codes (groups, group_bytes) of a payload."""
        groups = numel // self.group_size
        border = groups * self.scale_dtype.itemsize
        return payload[:border].view(self.scale_dtype), payload[border:].view(groups, self.group_bytes)

    def _factors(
        self, payload: torch.Tensor, out: torch.Tensor, factor: float, context: Context, name: str = "scales"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The payload's scales times `factor`, float32, and its codes. `name`: of the scratch that may hold them."""
        scales, codes = self._parts(payload, out.numel())
        if scales.dtype != torch.float32 or factor != 1.0:
            target = context.scratch.borrow(f"grouped/{name}", scales.numel(), torch.float32, scales.device)
            scales = target.copy_(scales) if factor == 1.0 else target.copy_(scales).mul_(factor)
        return scales, codes

    def _encoded_in_loops(
        self,
        values: torch.Tensor,
        addend: torch.Tensor | None,
        sent: torch.Tensor,
        scales: torch.Tensor,
        codes: torch.Tensor,
        subtract: bool,
    ) -> bool:
        """Whether loops did all of `_encode`. `sent`: (groups,) in the scales' dtype; `scales`: the same, float32."""
        loops = loops_for(values)
        found = None if loops is None or not codes.shape[0] else self._encoding_loop(loops)
        if found is None:
            return False
        loop, numbers = found
        array = values.view(-1).numpy()
        added = array if addend is None else addend.view(-1).numpy()
        flags = self.scale_dtype != torch.float32, addend is not None, subtract
        loop(array, added, scales.numpy(), codes.view(-1).numpy(), *numbers, *flags)
        if sent is not scales:
            sent.copy_(scales)
        return True

    def _decoded_in_loops(
        self,
        scales: torch.Tensor,
        codes: torch.Tensor,
        out: torch.Tensor,
        accumulate: bool,
    ) -> bool:
        """Whether loops wrote scale * level to `out`, or, if `accumulate`, added it."""
        loops = loops_for(out)
        if loops is None or not codes.shape[0] or (accumulate and not adds_as_torch(loops)):
            return False
        loop = self._decoding_loop(loops)
        if loop is not None:
            loop(codes.view(-1).numpy(), scales.numpy(), out.view(-1).numpy(), accumulate)
        return loop is not None

    def _mean_in_loops(
        self,
        out: torch.Tensor,
        residual: torch.Tensor | None,
        own: torch.Tensor,
        payloads: Sequence[torch.Tensor],
        factor: float,
        context: Context,
    ) -> int:
        """Settle `residual`, if it is given, and write the mean of the first payload, or the first two, to `out`.

        Returns how many payloads are done: 0 where no loop can, or where it would spare nothing.
        """
        loops, ends = loops_for(out), loops_for(out, MEAN_LOOPS)
        loop = None if ends is None or not out.numel() else self._mean_loop(ends)
        if loop is None:
            return 0
        reads_own = residual is not None and own is not payloads[0]
        sums = len(payloads) > 1 and adds_as_torch(loops) and (not reads_own or own is payloads[1])
        if residual is None and not sums:
            return 0
        first, more = payloads[0], payloads[1] if sums else own
        scales, codes = self._factors(first, out, factor, context)
        more_scales, more_codes = self._factors(more, out, factor, context, "more_scales")
        own_scales, _ = self._factors(own, out, 1.0, context, "own_scales")
        settled = out if residual is None else residual
        loop(
            codes.view(-1).numpy(),
            scales.numpy(),
            more_codes.view(-1).numpy(),
            more_scales.numpy(),
            int(reads_own),
            own_scales.numpy(),
            sums,
            residual is not None,
            settled.view(-1).numpy(),
            out.view(-1).numpy(),
        )
        return 2 if sums else 1

    def _runs(
        self, values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, context: Context
    ) -> Iterator[Run]:
        """Cut values (n,), scales (groups,) float32 and codes into runs; what is yielded is one object, moved on."""
        groups = codes.shape[0]
        if not groups:
            return
        step = groups if values.device.type != "cpu" else max(1, RUN_ELEMENTS // self.group_size)
        array = as_array(scales)
        tables = values.view(groups, self.group_size), codes, scales, scales.unsqueeze(1)
        # Tensor.split and len() do the same through Python, at a microsecond or more a call.
        parts = zip(*(table.unsafe_split(step) for table in tables), strict=True)
        run: Run | None = None
        for number, (rows, code, scale, column) in enumerate(parts):
            first = number * step
            count = min(step, groups - first)
            if run is None or count != step:
                run = Run(context, (count, self.group_size), values.device)
            run.number, run.first, run.count = number, first, count
            run.values, run.codes, run.scales, run.scales_column = rows, code, scale, column
            run.scales_array = array[first : first + step]
            yield run


def absolute_maximum(run: Run, factor: float) -> None:
    """scale = factor * max |value| of each group, no less than SMALLEST_SCALE; NaN where a value is NaN.

    Two reading passes and no temporary of the size of the values.
    """
    scales, lowest, xp = run.scales_array, run.lowest_array, run.xp
    torch.amax(run.values, 1, out=run.scales)
    torch.amin(run.values, 1, out=run.lowest)
    xp.negative(lowest, out=lowest)
    xp.maximum(scales, lowest, out=scales)
    xp.multiply(scales, factor, out=scales)
    at_least(SMALLEST_SCALE, scales, scales, xp)


def mean_magnitude(run: Run, factor: float) -> None:
    """scale = factor * mean |value| of each group; not finite where a value isn't."""
    magnitudes = run.table("floats")
    torch.abs(run.values, out=magnitudes)
    torch.sum(magnitudes, 1, out=run.scales)
    run.xp.multiply(run.scales_array, factor / run.values.shape[1], out=run.scales_array)


def invert_scales(run: Run, factor: float = 1.0) -> torch.Tensor:
    """factor / scale as a column (groups, 1); scales smaller than SMALLEST_SCALE count as that."""
    inverse, xp = run.inverse_array, run.xp
    at_least(SMALLEST_SCALE, run.scales_array, inverse, xp)
    xp.reciprocal(inverse, out=inverse)
    if factor != 1.0:
        xp.multiply(inverse, factor, out=inverse)
    return run.inverse_column


def at_least(minimum: float, source: Any, out: Any, xp: Any) -> None:
    """out = max(source, minimum), NaN where source is NaN: arrays of NumPy, or tensors."""
    if xp is torch:
        torch.clamp_min(source, minimum, out=out)
    else:
        numpy.maximum(source, minimum, out=out)
