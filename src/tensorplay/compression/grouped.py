"""What codecs with one scale a group share: how a payload is laid out, and how it is worked through.

    payload = scales of all groups, then codes, group after group;   value = scale * level(code)

On a CPU the groups are worked through in runs whose temporaries stay in the cache: three to four times faster than
whole tensors. On a device everything is one run.
"""

from abc import abstractmethod
from collections.abc import Iterator

import numpy
import torch

from tensorplay.compression.codec import Codec, Context, all_finite

__all__ = [
    "ROUNDINGS",
    "RUN_ELEMENTS",
    "SMALLEST_SCALE",
    "GroupScaled",
    "Workspace",
    "absolute_maximum",
    "add_noise",
    "check_choice",
    "check_integer",
    "float_dtype",
    "inverse_of",
    "mean_magnitude",
    "name_with",
]

#: Elements of a run: half a megabyte, so that a run and its temporaries fit a second-level cache.
RUN_ELEMENTS = 1 << 17
#: Scales are at least this where they divide, so that their inverse is finite: smaller values are lost.
SMALLEST_SCALE = 2.0**-120
ROUNDINGS = ("nearest", "stochastic")


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


class Workspace:
    """The temporaries of one run: lent once, looked up by name for each run that follows.

    Args:
        context: of the call. shape: (groups, G) of a run.
    """

    def __init__(self, context: Context, shape: tuple[int, int], device: torch.device) -> None:
        self.context = context
        self.run = 0
        self._shape, self._device = shape, device
        self._lent: dict[str, torch.Tensor] = {}

    def table(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A temporary (groups, G)."""
        lent = self._lent.get(name)
        if lent is None:
            groups, size = self._shape
            lent = self._lent[name] = self._borrow(name, groups * size, dtype).view(groups, size)
        return lent

    def column(self, name: str) -> torch.Tensor:
        """A temporary (groups,) float32."""
        lent = self._lent.get(name)
        if lent is None:
            lent = self._lent[name] = self._borrow(name, self._shape[0], torch.float32)
        return lent

    def _borrow(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.context.scratch.borrow(f"grouped/{name}", numel, dtype, self._device)


def add_noise(values: torch.Tensor, space: Workspace) -> None:
    """values += u, uniform in (0, 1), one draw a value, others for every seed, rank and run.

    Shapes: values (groups, G) float32, contiguous.
    On a CPU u is one of 65,536 equally spaced numbers, symmetric about 1/2, so that rounding stays right on average.
    No generator of the user's is touched.
    """
    context, count = space.context, values.numel()
    seeds = numpy.random.SeedSequence([context.seed & (2**64 - 1), context.rank, space.run])
    if values.device.type != "cpu":
        generator = torch.Generator(values.device)
        generator.manual_seed(int(seeds.generate_state(1, numpy.uint64)[0] >> 1))
        values.add_(torch.rand(values.shape, generator=generator, device=values.device))
        return
    raw = numpy.random.SFC64(seeds).random_raw(-(-count // 4))
    draws = torch.from_numpy(raw.view(numpy.int16)[:count]).view(values.shape)
    noise = space.table("noise").copy_(draws)
    values.add_(noise, alpha=2.0**-16).add_(0.5 + 2.0**-17)  # draws are -32768 .. 32767


class GroupScaled(Codec):
    """Base of codecs that send a scale and G codes a group.

    A subclass writes `_measure`, `_quantize` and `_levels`, each for one run of groups.

    Args:
        group_size: values that share a scale. group_bytes: bytes of a group's codes.
        scale_dtype: of scales on the wire, float32 or bfloat16; codes are made with the scale as it is sent.
    Wire: (group_bytes + scale_dtype.itemsize) bytes a group.
    """

    #: Lower limit of the scales that are sent. Zero where a zero scale is what makes a group of zeros decode to zeros.
    _smallest_sent = 0.0
    #: Scales are multiplied by this before they are rounded to bfloat16.
    _scale_margin = 1.0

    def __init__(self, group_size: int, group_bytes: int, scale_dtype: torch.dtype | str) -> None:
        self.group_size = group_size
        self.group_bytes = group_bytes
        self.scale_dtype = float_dtype("scale_dtype", scale_dtype, (torch.float32, torch.bfloat16))

    @abstractmethod
    def _measure(self, values: torch.Tensor, scales: torch.Tensor, space: Workspace) -> None:
        """Write the scales (groups,) float32 of values (groups, G); not finite where a value isn't."""

    @abstractmethod
    def _quantize(
        self, values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, space: Workspace
    ) -> torch.Tensor | None:
        """Write the codes (groups, group_bytes) uint8 of values (groups, G), scales (groups,) float32.

        Returns the levels (groups, G) float32 where they are at hand.
        """

    @abstractmethod
    def _levels(self, codes: torch.Tensor, levels: torch.Tensor, space: Workspace) -> None:
        """Write the levels (groups, G) float32 that codes (groups, group_bytes) stand for."""

    def wire_bytes(self, numel: int) -> int:
        """Bytes of the payload of `numel` values, whole groups."""
        return numel // self.group_size * (self.scale_dtype.itemsize + self.group_bytes)

    def encode(self, values: torch.Tensor, payload: torch.Tensor, context: Context) -> None:
        """Write the payload of `values`."""
        for _ in self._encode(values, payload, context):
            pass

    def encode_residual(self, values: torch.Tensor, payload: torch.Tensor, context: Context) -> None:
        """Write the payload of `values` and leave in `values` what was not sent: values - decode(payload).

        The same as `encode` and then `decode_add` with factor -1, but each run is still in the cache.
        """
        for rows, scales, codes, levels, space in self._encode(values, payload, context):
            if levels is None:
                levels = space.table("levels")
                self._levels(codes, levels, space)
            rows.addcmul_(levels, scales.unsqueeze(1), value=-1.0)

    def _encode(
        self, values: torch.Tensor, payload: torch.Tensor, context: Context
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, Workspace]]:
        """Encode run by run; after each, yield its values, scales (groups,) float32, codes, levels if known, space.

        For each run: 1. measure the scales; 2. round them to what is sent; 3. make the codes with those.
        """
        sent, codes = self._parts(payload, values.numel())
        for space, rows, sent_run, codes_run in self._runs(values, sent, codes, context):
            if self.scale_dtype == torch.float32:
                scales = sent_run
            else:
                scales = space.column("scales")
            self._measure(rows, scales, space)
            if self._smallest_sent:
                scales.clamp_min_(self._smallest_sent)
            if self.scale_dtype != torch.float32:
                if self._scale_margin != 1.0:
                    scales.mul_(self._scale_margin)
                sent_run.copy_(scales)
                scales.copy_(sent_run)
            levels = self._quantize(rows, scales, codes_run, space)
            yield rows, scales, codes_run, levels, space

    def decode(self, payload: torch.Tensor, out: torch.Tensor, context: Context) -> None:
        """Write scale * level to `out`."""
        if out.dtype != torch.float32:
            values = context.scratch.borrow("grouped/decoded", out.numel(), torch.float32, out.device)
            self.decode(payload, values, context)
            out.copy_(values)
            return
        scales, codes = self._decoding(payload, out, context)
        for space, rows, scale, code in self._runs(out, scales, codes, context):
            self._levels(code, rows, space)
            rows.mul_(scale)

    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, factor: float, context: Context) -> None:
        """out += factor * scale * level; the product of factor and scale is made once a group."""
        if out.dtype != torch.float32:
            super().decode_add(payload, out, factor, context)
            return
        scales, codes = self._decoding(payload, out, context, factor)
        for space, rows, scale, code in self._runs(out, scales, codes, context):
            levels = space.table("levels")
            self._levels(code, levels, space)
            rows.addcmul_(levels, scale)

    def is_finite(self, payload: torch.Tensor, numel: int, context: Context) -> torch.Tensor:
        """Whether every scale is finite."""
        return all_finite(self._parts(payload, numel)[0])

    def _parts(self, payload: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales (groups,) and the codes (groups, group_bytes) of a payload."""
        groups = numel // self.group_size
        border = groups * self.scale_dtype.itemsize
        return payload[:border].view(self.scale_dtype), payload[border:].view(groups, self.group_bytes)

    def _decoding(
        self, payload: torch.Tensor, out: torch.Tensor, context: Context, factor: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales (groups, 1) float32, times `factor`, and the codes."""
        scales, codes = self._parts(payload, out.numel())
        if scales.dtype != torch.float32 or factor != 1.0:
            target = context.scratch.borrow("grouped/decoding", scales.numel(), torch.float32, scales.device)
            scales = target.copy_(scales) if factor == 1.0 else target.copy_(scales).mul_(factor)
        return scales.unsqueeze(1), codes

    def _runs(
        self, values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, context: Context
    ) -> Iterator[tuple[Workspace, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Cut values (n,), scales and codes into runs: (workspace, values (groups, G), scales, codes) each."""
        groups = codes.shape[0]
        if not groups:
            return
        step = groups if values.device.type != "cpu" else max(1, RUN_ELEMENTS // self.group_size)
        tables = values.view(groups, self.group_size), scales, codes
        parts = zip(*(table.split(step) for table in tables), strict=True)  # type: ignore[no-untyped-call]
        space: Workspace | None = None
        for run, (rows, scale, code) in enumerate(parts):
            if space is None or rows.shape[0] != step:
                space = Workspace(context, (rows.shape[0], self.group_size), values.device)
            space.run = run
            yield space, rows, scale, code


def inverse_of(scales: torch.Tensor, space: Workspace, factor: float = 1.0) -> torch.Tensor:
    """factor / scale as a column (groups, 1), finite where a scale is zero."""
    inverse = space.column("inverse")
    torch.clamp_min(scales, SMALLEST_SCALE, out=inverse)
    inverse.reciprocal_()
    return (inverse if factor == 1.0 else inverse.mul_(factor)).unsqueeze(1)


def absolute_maximum(values: torch.Tensor, out: torch.Tensor, space: Workspace) -> None:
    """out (groups,) = max |value| of each group of values (groups, G); NaN where a value is NaN.

    Two reading passes and no temporary of the size of `values`.
    """
    lowest = space.column("lowest")
    torch.amax(values, 1, out=out)
    torch.amin(values, 1, out=lowest)
    torch.maximum(out, lowest.neg_(), out=out)


def mean_magnitude(values: torch.Tensor, out: torch.Tensor, space: Workspace) -> None:
    """out (groups,) = mean |value| of each group of values (groups, G); not finite where a value isn't."""
    magnitudes = space.table("floats")
    torch.abs(values, out=magnitudes)
    torch.sum(magnitudes, 1, out=out)
    out.mul_(1.0 / values.shape[1])
