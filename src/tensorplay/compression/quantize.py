"""Integers with a scale a group: symmetric ones of 8 and 4 bits, and affine ones of 8 bits.

Quantization with a scale per group of values, not per tensor, keeps one outlier from wiping out all small values
(Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", section 2).
"""

from collections.abc import Sequence
from typing import Any

import numpy
import torch

from tensorplay.compression.bitpack import pack_fours, unpack_fours
from tensorplay.compression.codec import Codec, Context, all_finite
from tensorplay.compression.compiled import loops_for
from tensorplay.compression.grouped import (
    MEAN_LOOPS,
    ROUNDINGS,
    RUN_ELEMENTS,
    SMALLEST_SCALE,
    GroupScaled,
    Run,
    absolute_maximum,
    add_noise,
    adds_as_torch,
    check_choice,
    check_integer,
    invert_scales,
    name_with,
)

__all__ = ["AffineUint8", "SymmetricInteger"]


class SymmetricInteger(GroupScaled):
    """Signed integers of 8 or 4 bits, one scale a group.

        scale = max |value| / top;   code = round(value / scale);   decoded = scale * code
        top = 127 with 8 bits, 7 with 4

    Nearest rounding is off by half a scale at most. Stochastic rounding, floor(value / scale + u) with u uniform in
    (0, 1), is right on average and off by less than one scale; it draws u from the step's seed and the rank.

    Args:
        bits: 8 or 4.
        group_size: values that share a scale, even. Smaller: more exact, more bytes, slower.
        scale_dtype: of the scales on the wire, "float32" or "bfloat16" (2 bytes a group less; a group of equal values
            is then off by up to 0.4 %). Codes are made with the rounded scale, and never clip.
        rounding: "nearest" or "stochastic".
    Shapes: values (n,) float32, n a multiple of group_size; payload: n / group_size scales, then codes, two of 4 bits
        a byte.
    Wire: n * bits / 8 + n / group_size * scale_dtype.itemsize bytes.
    Raises: ValueError: another value of bits, scale_dtype or rounding; group_size odd or below 2.
    Example:
        >>> codec = SymmetricInteger(8, group_size=4)
        >>> codec.decompress(codec.compress(torch.tensor([0.0, 1.0, -127.0, 63.4])), 4)
        tensor([   0.,    1., -127.,   63.])
        >>> codec.wire_bytes(1024)
        2048

    Paper: Alistarh et al. 2017 (QSGD), section 3, for stochastic rounding. Differs: the scale is the largest magnitude
        of a group, not the 2-norm of the vector, and codes are packed, not entropy coded.
    """

    def __init__(
        self,
        bits: int = 8,
        group_size: int = 128,
        scale_dtype: torch.dtype | str = torch.float32,
        rounding: str = "nearest",
    ) -> None:
        if bits not in (4, 8):
            raise ValueError(f"bits must be 4 or 8, got {bits!r}")
        check_integer("group_size", group_size, minimum=2, multiple=2)
        super().__init__(group_size, group_size * bits // 8, scale_dtype)
        self.bits = bits
        self.top = 2 ** (bits - 1) - 1
        self.rounding = check_choice("rounding", rounding, ROUNDINGS)
        self.name = name_with(
            f"int{bits}",
            group_size=(group_size, 128),
            scale_dtype=(self.scale_dtype, torch.float32),
            rounding=(rounding, "nearest"),
        )
        if rounding == "stochastic":
            self.whole_blocks = True  # the noise of a value depends on its place in the block
            self._scale_margin = 1.0 + 2.0**-8  # rounded down to bfloat16 it is still no smaller than it was

    def _measure(self, run: Run) -> None:
        absolute_maximum(run, 1.0 / self.top)

    def _quantize(self, run: Run) -> torch.Tensor | None:
        levels = run.table("floats")
        torch.mul(run.values, invert_scales(run), out=levels)
        if self.rounding == "stochastic":
            levels.clamp_(
                -self.top, self.top
            )  # before the noise: 127 + u must not become 128, which wraps to -128
            add_noise(levels, run)
            levels.floor_()
        else:
            levels.round_()
        if self.bits == 8:
            run.codes.view(torch.int8).copy_(levels)
        else:
            integers = run.table("integers", torch.int8)
            integers.copy_(levels)
            pack_fours(integers, run.codes)
        return levels

    def _encoding_loop(self, loops: Any) -> tuple[Any, tuple[Any, ...]] | None:
        if self.rounding == "stochastic":
            return None
        loop = loops.bytes_encode if self.bits == 8 else loops.fours_encode
        return loop, (numpy.float32(1.0 / self.top),)

    def _decoding_loop(self, loops: Any) -> Any:
        return loops.bytes_decode if self.bits == 8 else loops.fours_decode

    def _mean_loop(self, loops: Any) -> Any:
        return loops.bytes_mean if self.bits == 8 else loops.fours_mean

    def _levels(self, codes: torch.Tensor, levels: torch.Tensor, run: Run) -> None:
        if self.bits == 8:
            levels.copy_(codes.view(torch.int8))
        else:
            groups, half = codes.shape
            planes = run.table("integers", torch.int8).view(2, groups, half)
            unpack_fours(codes, planes)
            levels.view(groups, 2, half).copy_(planes.transpose(0, 1))


class AffineUint8(Codec):
    """Unsigned 8-bit integers with a scale and a zero point a group; the range always includes 0.

        low = min(0, min value);  high = max(0, max value);  scale = (high - low) / 255
        zero = round(-low / scale);   code = clamp(round(value / scale) + zero, 0, 255)
        decoded = scale * (code - zero)

    Every value comes back within one scale, 0 exactly, whatever the range.

    Args:
        group_size: values that share a scale and a zero point; None: all values of a call share one.
    Shapes: values (n,) float32, n a multiple of group_size; payload: scales float32, then zero points and codes uint8.
    Wire: n + 5 bytes a group.
    Raises: ValueError: group_size below 1. TypeError: group_size not an integer.
    Example:
        >>> codec = AffineUint8(group_size=4)
        >>> codec.decompress(codec.compress(torch.tensor([10.0, 11.0, 10.2, 0.0])), 4)
        tensor([10.0078, 11.0000, 10.1804,  0.0000])

    Paper: Jacob et al. 2018, section 2.1. Differs: none in the equation; codes are stored less 128.
    """

    def __init__(self, group_size: int | None = 512) -> None:
        self.shared_by = None if group_size is None else check_integer("group_size", group_size, minimum=1)
        self.group_size = self.shared_by or 1
        self.name = name_with("uint8", group_size=(group_size, 512))

    def wire_bytes(self, numel: int) -> int:
        """Bytes of the payload of `numel` values, whole groups."""
        return numel + 5 * self._groups(numel)

    def encode(self, values: torch.Tensor, payload: torch.Tensor, context: Context) -> None:
        """Write the payload of `values`.

        1. Range of each group, 0 included. 2. Scale and zero point. 3. Codes, less 128, as int8: the conversion
        from float to int8 is four times faster than to uint8.
        """
        scales, zeros, codes = self._parts(payload, values.numel())
        groups = scales.numel()
        if not groups:
            return
        loops = loops_for(values)
        if loops is not None:
            loops.affine_encode(
                values.view(-1).numpy(),
                scales.numpy(),
                zeros.view(torch.int8).numpy(),
                codes.view(-1).numpy(),
            )
            return
        inverse, low, high = context.scratch.borrow(
            "affine/range", 3 * groups, torch.float32, values.device
        ).view(3, -1)
        table = values.view(groups, -1)
        torch.amin(table, 1, out=low)
        torch.amax(table, 1, out=high)
        low.clamp_max_(0.0).mul_(1.0 / 255.0)  # divided before they are subtracted: the range may overflow
        high.clamp_min_(0.0).mul_(1.0 / 255.0)
        torch.sub(high, low, out=inverse)
        inverse.clamp_min_(SMALLEST_SCALE)
        scales.copy_(inverse)
        inverse.reciprocal_()
        zero = low.mul_(-255.0).mul_(inverse).round_().sub_(128.0)
        zeros.view(torch.int8).copy_(zero)
        for part, source, target in self._runs(table, codes):
            work = context.scratch.borrow("affine/work", source.numel(), torch.float32, values.device).view(
                source.shape
            )
            torch.mul(source, inverse[part].unsqueeze(1), out=work)
            work.round_().add_(zero[part].unsqueeze(1)).clamp_(-128.0, 127.0)
            target.copy_(work)

    def decode(self, payload: torch.Tensor, out: torch.Tensor, context: Context) -> None:
        """Write scale * (code - zero) to `out`."""
        self.decode_scaled(payload, out, 1.0, context)

    def decode_scaled(
        self, payload: torch.Tensor, out: torch.Tensor, factor: float, context: Context
    ) -> None:
        """Write factor * scale * (code - zero) to `out`; the product of factor and scale is made once a group."""
        if out.dtype != torch.float32:
            values = context.scratch.borrow("affine/decoded", out.numel(), torch.float32, out.device)
            self.decode_scaled(payload, values, factor, context)
            out.copy_(values)
            return
        scales, zero, codes = self._factors(payload, out, factor, context)
        if not scales.numel() or self._decoded_in_loops(codes, scales, zero, out, False):
            return
        for part, target, source in self._runs(out.view(scales.numel(), -1), codes):
            target.copy_(source).sub_(zero[part].unsqueeze(1)).mul_(scales[part].unsqueeze(1))

    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, factor: float, context: Context) -> None:
        """out += factor * scale * (code - zero)."""
        if out.dtype != torch.float32:
            super().decode_add(payload, out, factor, context)
            return
        scales, zero, codes = self._factors(payload, out, factor, context)
        if not scales.numel() or self._decoded_in_loops(codes, scales, zero, out, True):
            return
        for part, target, source in self._runs(out.view(scales.numel(), -1), codes):
            work = context.scratch.borrow("affine/work", source.numel(), torch.float32, out.device).view(
                source.shape
            )
            work.copy_(source).sub_(zero[part].unsqueeze(1))
            target.addcmul_(work, scales[part].unsqueeze(1))

    def decode_mean(
        self,
        payloads: Sequence[torch.Tensor],
        out: torch.Tensor,
        factor: float,
        contexts: Sequence[Context],
    ) -> None:
        """factor * scale * (code - zero) of all payloads, the first two in one loop."""
        loops, ends = loops_for(out), loops_for(out, MEAN_LOOPS)
        is_own = all(
            getattr(type(self), name) is getattr(AffineUint8, name)
            for name in ("_parts", "decode", "decode_scaled", "decode_add")
        )
        if not is_own or ends is None or len(payloads) < 2 or not out.numel() or not adds_as_torch(loops):
            super().decode_mean(payloads, out, factor, contexts)
            return
        scales, zero, codes = self._factors(payloads[0], out, factor, contexts[0])
        more_scales, more_zero, more_codes = self._factors(payloads[1], out, factor, contexts[1], "more/")
        ends.affine_mean(
            codes.view(-1).numpy(),
            scales.numpy(),
            zero.numpy(),
            more_codes.view(-1).numpy(),
            more_scales.numpy(),
            more_zero.numpy(),
            out.view(-1).numpy(),
        )
        for payload, context in zip(payloads[2:], contexts[2:], strict=True):
            self.decode_add(payload, out, factor, context)

    def is_finite(self, payload: torch.Tensor, numel: int, context: Context) -> torch.Tensor:
        """Whether every scale is finite."""
        return all_finite(self._parts(payload, numel)[0])

    def _groups(self, numel: int) -> int:
        return min(numel, 1) if self.shared_by is None else numel // self.shared_by

    def _parts(self, payload: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scales (groups,) float32, zero points (groups,) uint8, codes (groups, G) int8, of a payload."""
        groups = self._groups(numel)
        scales, rest = payload[: 4 * groups].view(torch.float32), payload[4 * groups :]
        return scales, rest[:groups], rest[groups:].view(torch.int8).view(groups, -1 if groups else 0)

    @staticmethod
    def _decoded_in_loops(
        codes: torch.Tensor, scales: torch.Tensor, zero: torch.Tensor, out: torch.Tensor, accumulate: bool
    ) -> bool:
        loops = loops_for(out)
        if loops is None or (accumulate and not adds_as_torch(loops)):
            return False
        loops.affine_decode(
            codes.view(-1).numpy(), scales.numpy(), zero.numpy(), out.view(-1).numpy(), accumulate
        )
        return True

    def _factors(
        self, payload: torch.Tensor, out: torch.Tensor, factor: float, context: Context, name: str = ""
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The payload's scales times `factor` and its zero points, float32, and its codes. `name`: of the scratch."""
        scales, zeros, codes = self._parts(payload, out.numel())
        borrow, groups = context.scratch.borrow, scales.numel()
        scaled = torch.mul(
            scales, factor, out=borrow(f"affine/{name}scaled", groups, torch.float32, out.device)
        )
        zero = borrow(f"affine/{name}zero", groups, torch.float32, out.device)
        return scaled, zero.copy_(zeros.view(torch.int8)), codes

    @staticmethod
    def _runs(table: torch.Tensor, codes: torch.Tensor) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Cut a table (groups, G) and its codes alike into parts that stay in the cache: (groups, values, codes)."""
        groups, size = table.shape
        run = RUN_ELEMENTS if table.device.type == "cpu" else table.numel()
        if size >= run:
            return [
                (
                    slice(row, row + 1),
                    table[row : row + 1, at : at + run],
                    codes[row : row + 1, at : at + run],
                )
                for row in range(groups)
                for at in range(0, size, run)
            ]
        step = run // size
        parts = [slice(row, min(row + step, groups)) for row in range(0, groups, step)]
        return [(part, table[part], codes[part]) for part in parts]
