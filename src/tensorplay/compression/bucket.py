"""One way to read a bucket of gradients, whatever form DDP gives it.

A bucket is a flat buffer; each parameter owns a slice of it, laid out with the parameter's own strides. Complex
parameters own two real values an element. A sparse gradient is a bucket of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket

__all__ = ["Bucket", "GradBucket", "GradientSlice", "Key", "read_bucket", "scratch_like"]

Key = torch.Tensor | str
"""What a slice belongs to: a parameter, or a name where there is none."""


@dataclass(frozen=True)
class GradientSlice:
    """One parameter's gradient within a bucket.

    Args:
        key: the parameter itself, or a name where there is no parameter.
        values: (n,) real view of the buffer, in memory order.
        shape, stride: of the parameter, to see the gradient in its own form.
    """

    key: Key
    values: torch.Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None

    def shaped(self) -> torch.Tensor:
        """View the values in the parameter's own shape and strides (complex ones with a last dimension of 2)."""
        shape, stride = self.shape, self.stride
        if isinstance(self.key, torch.Tensor) and self.key.is_complex():
            shape = (*shape, 2)
            stride = None if stride is None else (*(2 * step for step in stride), 1)
        if stride is None:
            return self.values.view(shape)
        return self.values.as_strided(shape, stride, self.values.storage_offset())


@dataclass(frozen=True)
class Bucket:
    """The gradients of one exchange.

    Args:
        index: position among the buckets of a backward pass. is_last: the pass ends with this one.
        slices: the parameters' gradients, in order. buffer: the whole flat buffer, or the sparse gradient.
    """

    index: int
    is_last: bool
    buffer: torch.Tensor
    slices: Sequence[GradientSlice]

    @property
    def is_sparse(self) -> bool:
        """Whether the bucket is one sparse gradient, which travels as it is."""
        return self.buffer.layout != torch.strided

    def signature(self) -> tuple[Any, ...]:
        """Equal for two buckets of the same parameters in the same order, dtype and device."""
        keys = tuple(s.key if isinstance(s.key, str) else id(s.key) for s in self.slices)
        return (self.buffer.dtype, self.buffer.device, self.buffer.numel(), self.buffer.data_ptr(), keys)

    @staticmethod
    def of_tensors(tensors: dict[str, torch.Tensor]) -> "Bucket":
        """Make a bucket of named contiguous tensors; results are written into them.

        Raises: ValueError: a tensor is not contiguous, none is given, or dtypes or devices differ.
        """
        if not tensors:
            raise ValueError("a bucket needs at least one tensor, got none")
        first = next(iter(tensors.values()))
        slices = []
        for name, tensor in tensors.items():
            if not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
            if tensor.dtype != first.dtype or tensor.device != first.device:
                raise ValueError(
                    f"all tensors must be {first.dtype} on {first.device}, {name} is {tensor.dtype} on {tensor.device}"
                )
            slices.append(GradientSlice(name, tensor.detach().view(-1), tuple(tensor.shape), None))
        return Bucket(0, True, first.detach().view(-1), slices)


def _own_stride(parameter: torch.Tensor) -> tuple[int, ...] | None:
    """The strides DDP lays a gradient out with: the parameter's, when it fills its memory without gaps."""
    if parameter.is_contiguous():
        return None
    extent = 1
    for size, step in sorted(zip(parameter.shape, parameter.stride(), strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if step != extent:
            return None  # gaps or overlaps: DDP lays it out contiguously
        extent *= size
    return tuple(parameter.stride())


def read_bucket(bucket: GradBucket) -> Bucket:
    """Read the bucket DDP hands to a hook.

    Raises: TypeError: `bucket` is the (gradient, parameter) pair of DDP's Python reducer, which only hooks of a single
        collective can serve.
    """
    if isinstance(bucket, tuple):
        raise TypeError(
            "this hook needs DDP's C++ reducer: the Python reducer (torch._dynamo.config.optimize_ddp = "
            '"python_reducer") discards what a hook returns. Set optimize_ddp to "ddp_optimizer" or use '
            "allreduce_hook, fp16_compress_hook or bf16_compress_hook"
        )
    buffer = bucket.buffer()
    if buffer.layout != torch.strided:
        return Bucket(bucket.index(), bucket.is_last(), buffer, ())
    slices = []
    start = 0
    for parameter in bucket.parameters():
        length = parameter.numel() * (2 if parameter.is_complex() and not buffer.is_complex() else 1)
        slices.append(
            GradientSlice(
                parameter, buffer[start : start + length], tuple(parameter.shape), _own_stride(parameter)
            )
        )
        start += length
    if start != buffer.numel():
        raise RuntimeError(
            f"the bucket's parameters have {start} values, its buffer {buffer.numel()}: unknown layout"
        )
    return Bucket(bucket.index(), bucket.is_last(), buffer, slices)


def scratch_like(buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of `buffer`'s size in another dtype, made once for this memory and freed with it."""
    storage = buffer.untyped_storage()
    owned = getattr(storage, "_tensorplay_scratch", None)
    key = (buffer.storage_offset(), buffer.numel(), dtype)
    if owned is None:
        owned = {}
        storage._tensorplay_scratch = owned  # type: ignore[attr-defined]
    if key not in owned:
        owned[key] = torch.empty(buffer.numel(), dtype=dtype, device=buffer.device)
    found: torch.Tensor = owned[key]
    return found
