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
    "absolute_maximum",
    "add_noise",
    "check_choice",
    "check_integer",
    "float_dtype",
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


def add_noise(values: torch.Tensor, offset: float, context: Context, stream: int) -> None:
    """values += u + offset, with u uniform in (0, 1), other draws for every seed, rank and stream; one u a value.

    Shapes: values (groups, G) float32, contiguous, 4 dividing its size or not.
    On a CPU u is one of 65,536 equally spaced numbers symmetric about 1/2, so that rounding stays unbiased. No
    generator of the user's is touched.
    """
    seeds = [context.seed & (2**64 - 1), context.rank, stream]
    count = values.numel()
    if values.device.type != "cpu":
        generator = torch.Generator(values.device)
        generator.manual_seed(int(numpy.random.SeedSequence(seeds).generate_state(1, numpy.uint64)[0] >> 1))
        values.add_(torch.rand(values.shape, generator=generator, device=values.device)).add_(offset)
        return
    raw = numpy.random.SFC64(numpy.random.SeedSequence(seeds)).random_raw(-(-count // 4))
    draws = torch.from_numpy(raw.view(numpy.int16)[:count]).view(values.shape)
    noise = context.scratch.borrow("grouped/noise", count, torch.float32, values.device).view(values.shape)
    noise.copy_(draws)
    values.add_(noise, alpha=2.0**-16)  # draws are -32768 .. 32767, so u - 1/2 - 2^-17
    values.add_(offset + 0.5 + 2.0**-17)


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
    def _measure(self, values: torch.Tensor, scales: torch.Tensor, context: Context) -> None:
        """Write the scales (groups,) float32 of values (groups, G); not finite where a value isn't."""

    @abstractmethod
    def _quantize(
        self, values: torch.Tensor, inverse: torch.Tensor, codes: torch.Tensor, context: Context, run: int
    ) -> None:
        """Write the codes (groups, group_bytes) uint8 of values (groups, G); inverse (groups, 1) is 1 / scale."""

    @abstractmethod
    def _levels(self, codes: torch.Tensor, levels: torch.Tensor, context: Context) -> None:
        """Write the levels (groups, G) float32 that codes (groups, group_bytes) stand for."""

    def wire_bytes(self, numel: int) -> int:
        """Bytes of the payload of `numel` values, whole groups."""
        return numel // self.group_size * (self.scale_dtype.itemsize + self.group_bytes)

    def encode(self, values: torch.Tensor, payload: torch.Tensor, context: Context) -> None:
        """Write the payload of `values`.

        For each run of groups: 1. measure the scales; 2. round them to what is sent; 3. make the codes with those.
        """
        sent, codes = self._parts(payload, values.numel())
        table = values.view(-1, self.group_size)
        for run, (first, last) in enumerate(self._runs(values)):
            rows = table[first:last]
            scales, inverse = context.scratch.borrow(
                "grouped/scales", 2 * (last - first), torch.float32, values.device
            ).view(2, -1)
            self._measure(rows, scales, context)
            if self._smallest_sent:
                scales.clamp_min_(self._smallest_sent)
            if self.scale_dtype == torch.bfloat16:
                if self._scale_margin != 1.0:
                    scales.mul_(self._scale_margin)
                scales = sent[first:last].copy_(scales)
                inverse.copy_(scales)
                inverse.clamp_min_(SMALLEST_SCALE).reciprocal_()
            else:
                sent[first:last].copy_(scales)
                torch.clamp_min(scales, SMALLEST_SCALE, out=inverse)
                inverse.reciprocal_()
            self._quantize(rows, inverse.unsqueeze(1), codes[first:last], context, run)

    def decode(self, payload: torch.Tensor, out: torch.Tensor, context: Context) -> None:
        """Write scale * level to `out`."""
        if out.dtype != torch.float32:
            values = context.scratch.borrow("grouped/decoded", out.numel(), torch.float32, out.device)
            self.decode(payload, values, context)
            out.copy_(values)
            return
        scales, codes = self._decoding(payload, out, context)
        table = out.view(-1, self.group_size)
        for first, last in self._runs(out):
            rows = table[first:last]
            self._levels(codes[first:last], rows, context)
            rows.mul_(scales[first:last])

    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, factor: float, context: Context) -> None:
        """out += factor * scale * level; the product of factor and scale is made once a group."""
        if out.dtype != torch.float32:
            super().decode_add(payload, out, factor, context)
            return
        scales, codes = self._decoding(payload, out, context, factor)
        table = out.view(-1, self.group_size)
        for first, last in self._runs(out):
            rows = table[first:last]
            levels = self._work(rows, context)
            self._levels(codes[first:last], levels, context)
            rows.addcmul_(levels, scales[first:last])

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

    def _runs(self, values: torch.Tensor) -> Iterator[tuple[int, int]]:
        """First and last group of each run."""
        groups = values.numel() // self.group_size
        step = groups if values.device.type != "cpu" else max(1, RUN_ELEMENTS // self.group_size)
        for first in range(0, groups, max(1, step)):
            yield first, min(first + step, groups)

    @staticmethod
    def _work(values: torch.Tensor, context: Context) -> torch.Tensor:
        """A temporary float32 of the shape of `values`."""
        return context.scratch.borrow("grouped/work", values.numel(), torch.float32, values.device).view(
            values.shape
        )

    @staticmethod
    def _codes(values: torch.Tensor, context: Context) -> torch.Tensor:
        """A temporary int8 of the shape of `values`."""
        return context.scratch.borrow("grouped/codes", values.numel(), torch.int8, values.device).view(
            values.shape
        )


def absolute_maximum(values: torch.Tensor, out: torch.Tensor, context: Context) -> None:
    """out (groups,) = max |value| of each group of values (groups, G); NaN where a value is NaN.

    Two reading passes and no temporary of the size of `values`.
    """
    lowest = context.scratch.borrow("grouped/lowest", out.numel(), torch.float32, out.device)
    torch.amax(values, 1, out=out)
    torch.amin(values, 1, out=lowest)
    torch.maximum(out, lowest.neg_(), out=out)


def mean_magnitude(values: torch.Tensor, out: torch.Tensor, context: Context) -> None:
    """out (groups,) = mean |value| of each group of values (groups, G); not finite where a value isn't."""
    magnitudes = context.scratch.borrow("grouped/work", values.numel(), torch.float32, values.device).view(
        values.shape
    )
    torch.abs(values, out=magnitudes)
    torch.sum(magnitudes, 1, out=out)
    out.mul_(1.0 / values.shape[1])
