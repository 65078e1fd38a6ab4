"""Shorter floats: 16 bits as they are, and 8 bits with a scale a group."""

import torch

from tensorplay.compression.codec import Identity
from tensorplay.compression.grouped import (
    ROUNDINGS,
    GroupScaled,
    Run,
    absolute_maximum,
    add_noise,
    check_choice,
    check_integer,
    invert_scales,
    name_with,
)

__all__ = ["Float8", "Float16"]

_SHORT = {"fp16": torch.float16, "bf16": torch.bfloat16}
_EIGHT_BIT = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class Float16(Identity):
    """Half precision floats, which ranks can add without decoding.

        payload = half(value)

    fp16 keeps 11 bits of a value and ends at 65504, so values are divided by the number of ranks before they are
    encoded, and one beyond it makes the step non-finite on every rank. bf16 keeps 8 bits and float32's range.

    Args:
        form: "fp16" or "bf16".
    Shapes: values (n,) float32; payload n float16 or bfloat16.
    Wire: 2 n bytes.
    Raises: ValueError: another form.
    Example:
        >>> codec = Float16("bf16")
        >>> codec.decompress(codec.compress(torch.tensor([1.0, 1.003])), 2)
        tensor([1., 1.])

    Paper: Micikevicius et al. 2018, section 3.
    """

    def __init__(self, form: str = "fp16") -> None:
        super().__init__(_SHORT[check_choice("form", form, tuple(_SHORT))])
        self.name = form


class Float8(GroupScaled):
    """Floats of 8 bits, one scale a group: relative, not absolute, precision.

        scale = max |value| / top;   code = float8(value / scale);   decoded = scale * code
        e4m3: 4 bits of exponent, 3 of mantissa, top = 448; smallest level 2^-9
        e5m2: 5 bits of exponent, 2 of mantissa, top = 57344; smallest level 2^-16

    On evenly spread values int8 is far more exact at the same size; float8 wins on heavy tails.

    Args:
        form: "e4m3" or "e5m2".
        group_size: values that share a scale.
        scale_dtype: of the scales on the wire, "float32" or "bfloat16".
        rounding: "nearest" or "stochastic": on average right, off by less than one step of the format.
    Shapes: values (n,) float32, n a multiple of group_size; payload: n / group_size scales, then n codes.
    Wire: n + n / group_size * scale_dtype.itemsize bytes.
    Raises: ValueError: another form, scale_dtype or rounding; group_size below 1.
    Example:
        >>> codec = Float8("e4m3", group_size=4)
        >>> codec.decompress(codec.compress(torch.tensor([448.0, 1.0, -0.3, 0.0])), 4).tolist()
        [448.0, 1.0, -0.3125, 0.0]

    Paper: Micikevicius et al. 2022 ("FP8 Formats for Deep Learning"), section 3. Differs: a scale a group, not one a
        tensor.
    """

    def __init__(
        self,
        form: str = "e4m3",
        group_size: int = 128,
        scale_dtype: torch.dtype | str = torch.float32,
        rounding: str = "nearest",
    ) -> None:
        self.form = check_choice("form", form, tuple(_EIGHT_BIT))
        self.dtype = _EIGHT_BIT[form]
        check_integer("group_size", group_size, minimum=1)
        super().__init__(group_size, group_size, scale_dtype)
        self.top = torch.finfo(self.dtype).max
        self.mantissa_bits = 3 if form == "e4m3" else 2
        self.smallest_exponent = -6 if form == "e4m3" else -14
        self.rounding = check_choice("rounding", rounding, ROUNDINGS)
        self.name = name_with(
            f"fp8_{form}",
            group_size=(group_size, 128),
            scale_dtype=(self.scale_dtype, torch.float32),
            rounding=(rounding, "nearest"),
        )
        if rounding == "stochastic":
            self.whole_blocks = True
            self._scale_margin = 1.0 + 2.0**-8

    def _measure(self, run: Run) -> None:
        absolute_maximum(run, 1.0 / self.top)

    def _quantize(self, run: Run) -> torch.Tensor | None:
        work = run.table("floats")
        torch.mul(run.values, invert_scales(run), out=work)
        if self.rounding == "stochastic":
            self._round_stochastically(work, run)
        run.codes.view(self.dtype).copy_(work)
        return None

    def _round_stochastically(self, work: torch.Tensor, run: Run) -> None:
        """Round to levels of the format, up or down at random.

        1. The spacing of levels at a value: 2^(exponent - mantissa bits), the exponent no less than the smallest.
        2. Multiples of the spacing, plus noise, rounded down. Clamped first, so that none ends above the top.
        """
        work.clamp_(-self.top, self.top)
        spacing = run.table("spacing")
        # The bits of an exponent alone are the power of two at or below |value|.
        torch.bitwise_and(work.view(torch.int32), 0x7F800000, out=spacing.view(torch.int32))
        spacing.clamp_min_(2.0**self.smallest_exponent).mul_(2.0**-self.mantissa_bits)
        work.div_(spacing)
        add_noise(work, run)
        work.floor_().mul_(spacing)

    def _levels(self, codes: torch.Tensor, levels: torch.Tensor, run: Run) -> None:
        """Read the codes as float16, by shifting their bits there: ten times faster than the conversion in torch.

        e5m2 is the upper half of a float16. The exponent of e4m3 is one bit shorter, which leaves a factor of
        2^8 between the two; a cast of int8 to int16 carries the sign to bits 14 and 15, and bit 14 is cleared.
        """
        if codes.device.type != "cpu":
            levels.copy_(codes.view(self.dtype))
            return
        wide = run.table("wide", torch.int16)
        wide.copy_(codes.view(torch.int8))
        if self.form == "e5m2":
            wide.bitwise_left_shift_(8)
            levels.copy_(wide.view(torch.float16))
            return
        wide.bitwise_left_shift_(7).bitwise_and_(-0x4001)
        levels.copy_(wide.view(torch.float16)).mul_(256.0)
