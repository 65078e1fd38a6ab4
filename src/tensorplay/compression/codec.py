"""The contract of a codec: one float32 vector to bytes, and back.

A codec knows nothing of ranks, buckets or residuals. It is given a vector whose length is a multiple of its
`group_size` and a byte buffer of exactly `wire_bytes(numel)`, and fills it; everything else (error feedback, warm-up,
which tensors, which route) is wrapped around it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from tensorplay.compression.rounds import Scratch

__all__ = ["Codec", "Context", "Identity", "Settling", "all_finite"]


@dataclass
class Context:
    """What a call may use besides its arguments.

    Args:
        scratch: temporaries that are allocated once.
        seed: equal on all ranks, different for every step and block; also when the payload is decoded.
        rank: of the encoder; noise that should differ between ranks mixes it in.
    """

    scratch: Scratch = field(default_factory=Scratch)
    seed: int = 0
    rank: int = 0


class Settling(Protocol):
    """A codec that needs no parking: it reads gradient and residual when it encodes, and again when it knows the mean.

    Where a codec makes one loop of several operations, that is a third less to move through memory.
    """

    def encode_sum(
        self, values: torch.Tensor, addend: torch.Tensor, payload: torch.Tensor, context: Context
    ) -> None:
        """Write the payload of values + addend; neither changes."""

    def settle_mean(
        self,
        out: torch.Tensor,
        residual: torch.Tensor,
        own: torch.Tensor,
        payloads: Sequence[torch.Tensor],
        factor: float,
        contexts: Sequence[Context],
    ) -> None:
        """End a step whose `own` payload `encode_sum` made of `out` and `residual`.

            residual = out + residual - decode(own);   out = factor * sum of decode(p) for p in payloads

        Shapes: out, residual (n,) float32. `own` may be one of `payloads`; there is a context for each of these.
        """


class Codec(ABC):
    """Turns float32 vectors into bytes.

    Shapes: values (n,) float32, contiguous, n a multiple of `group_size`; payload (wire_bytes(n),) uint8, its memory
    aligned to 16 bytes.

    A subclass writes `wire_bytes`, `encode`, `decode`, and `is_finite`; `decode_add`, `decode_scaled`, `decode_mean`,
    `encode_residual` and `settling` when they can be done faster.
    Rules every codec keeps, each checked by the conformance suite:

    * zeros come back as zeros; `encode` doesn't change `values` (`encode_residual` does);
    * a NaN or infinity anywhere in `values` makes `is_finite` false for the payload;
    * the same input and seed give the same bytes.
    """

    #: What the registry and the listing call it, with parameters.
    name: str = ""
    #: Values are padded with zeros to a multiple of this, parameter by parameter.
    group_size: int = 1
    #: True: what is sent depends on the other values of a block, so a block never joins two parameters.
    whole_blocks: bool = False
    #: True: the payload has a narrow range, so values are divided by the number of ranks before encoding.
    divide_first: bool = False
    #: A dtype in which payloads of equal seeds may be added (the sum of payloads decodes to the sum), or None.
    sums_as: torch.dtype | None = None

    @abstractmethod
    def wire_bytes(self, numel: int) -> int:
        """Bytes of the payload of `numel` values."""

    @abstractmethod
    def encode(self, values: torch.Tensor, payload: torch.Tensor, context: Context) -> None:
        """Write the payload of `values`."""

    @abstractmethod
    def decode(self, payload: torch.Tensor, out: torch.Tensor, context: Context) -> None:
        """Write the values of `payload` to `out`."""

    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, factor: float, context: Context) -> None:
        """out += factor * decode(payload)."""
        values = context.scratch.borrow("codec/decode_add", out.numel(), out.dtype, out.device)
        self.decode(payload, values, context)
        out.add_(values, alpha=factor)

    def decode_scaled(
        self, payload: torch.Tensor, out: torch.Tensor, factor: float, context: Context
    ) -> None:
        """out = factor * decode(payload)."""
        self.decode(payload, out, context)
        if factor != 1.0:
            out.mul_(factor)

    def decode_mean(
        self,
        payloads: Sequence[torch.Tensor],
        out: torch.Tensor,
        factor: float,
        contexts: Sequence[Context],
    ) -> None:
        """out = factor * sum of decode(p) for p in payloads, added in their order."""
        for number, (payload, context) in enumerate(zip(payloads, contexts, strict=True)):
            if number:
                self.decode_add(payload, out, factor, context)
            else:
                self.decode_scaled(payload, out, factor, context)

    def settling(self, values: torch.Tensor) -> Settling | None:
        """This codec, where it needs no parking of such values, n of them; None where `encode_residual` is used."""
        return None

    def encode_residual(
        self,
        values: torch.Tensor,
        payload: torch.Tensor,
        context: Context,
        addend: torch.Tensor | None = None,
    ) -> None:
        """Write the payload of `values` (+ `addend`) and leave in `values` what was not sent.

            values = values + addend - decode(payload)

        Args:
            values: float32 (n,), changed. payload, context: as for `encode`.
            addend: float32 (n,), what to add first; None: nothing.
        """
        if addend is not None:
            values.add_(addend)
        self.encode(values, payload, context)
        self.decode_add(payload, values, -1.0, context)

    @abstractmethod
    def is_finite(self, payload: torch.Tensor, numel: int, context: Context) -> torch.Tensor:
        """Whether everything that was encoded is finite: a bool tensor with no dimensions."""

    def padded(self, numel: int) -> int:
        """`numel` rounded up to whole groups."""
        return -(-numel // self.group_size) * self.group_size

    def compress(self, values: torch.Tensor, context: Context | None = None) -> torch.Tensor:
        """Encode a vector of any length and float dtype; returns its payload, freshly allocated."""
        context = context or Context()
        padded = torch.zeros(self.padded(values.numel()), dtype=torch.float32, device=values.device)
        padded[: values.numel()].copy_(values.reshape(-1))
        payload = torch.zeros(self.wire_bytes(padded.numel()), dtype=torch.uint8, device=values.device)
        self.encode(padded, payload, context)
        return payload

    def decompress(self, payload: torch.Tensor, numel: int, context: Context | None = None) -> torch.Tensor:
        """Decode what `compress` made of `numel` values; returns float32 (numel,)."""
        context = context or Context()
        out = torch.empty(self.padded(numel), dtype=torch.float32, device=payload.device)
        self.decode(payload, out, context)
        return out[:numel]

    def __repr__(self) -> str:
        return f"<codec {self.name}>"


def all_finite(values: torch.Tensor) -> torch.Tensor:
    """Whether every value is finite: a bool tensor with no dimensions, in two reading passes and no temporary."""
    if values.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=values.device)
    return torch.isfinite(values.amax()) & torch.isfinite(values.amin())


class Identity(Codec):
    """Values as they are, in one dtype; what can't or shouldn't be compressed travels this way.

    Args:
        dtype: on the wire: float32, float64, float16 or bfloat16.
    Wire: dtype.itemsize * n bytes.
    Example:
        >>> codec = Identity(torch.float32)
        >>> codec.decompress(codec.compress(torch.tensor([1.0, -2.5])), 2)
        tensor([ 1.0000, -2.5000])
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        if dtype not in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            raise ValueError(f"dtype must be float32, float64, float16 or bfloat16, got {dtype}")
        self.dtype = self.sums_as = dtype
        self.name = str(dtype).removeprefix("torch.")
        self.divide_first = dtype == torch.float16

    def wire_bytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def encode(self, values: torch.Tensor, payload: torch.Tensor, context: Context) -> None:
        payload.view(self.dtype).copy_(values)

    def decode(self, payload: torch.Tensor, out: torch.Tensor, context: Context) -> None:
        out.copy_(payload.view(self.dtype))

    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, factor: float, context: Context) -> None:
        if self.dtype == out.dtype:
            out.add_(payload.view(self.dtype), alpha=factor)
        else:
            super().decode_add(payload, out, factor, context)

    def is_finite(self, payload: torch.Tensor, numel: int, context: Context) -> torch.Tensor:
        return all_finite(payload.view(self.dtype))
