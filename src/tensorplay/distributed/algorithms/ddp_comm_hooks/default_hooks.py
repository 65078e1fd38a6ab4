"""Hooks of one collective: plain all-reduce, and all-reduce in half precision.

They run on DDP's own group in the order of the buckets, on every backend, and need no state but the group.
"""

import functools
from typing import Any

import torch
import torch.distributed as dist

from tensorplay.compression.bucket import GradBucket, scratch_like
from tensorplay.compression.collective import all_reduce_sum
from tensorplay.compression.participation import divisor, resolve_group
from tensorplay.compression.state import average_sparse
from tensorplay.distributed.algorithms.ddp_comm_hooks._protocol import (
    HookFunction,
    as_future,
    describe,
    require_backend_dtype,
    value_of,
    wire_cast,
)

__all__ = [
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
]

# DDP compares annotations as objects: this module must not postpone them.


def _average_pair(group: dist.ProcessGroup, pair: Any, dtype: torch.dtype | None) -> None:
    """Average one gradient in place for DDP's Python reducer, which hands (gradient, parameter) and wants no result."""
    gradient = pair[0]
    wire = (gradient * (1.0 / divisor(group))).to(dtype or gradient.dtype)
    if torch.compiler.is_compiling():
        from torch.distributed._functional_collectives import all_reduce

        wire = all_reduce(wire, "sum", group)
    else:
        all_reduce_sum(wire, group, async_op=False)
    gradient.copy_(wire)


def _average(
    process_group: dist.ProcessGroup | None, bucket: GradBucket, dtype: torch.dtype | None
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket with one all-reduce in `dtype` (None: the bucket's own).

    1. Divide, then cast into memory that belongs to this bucket.
    2. All-reduce.
    3. Cast back into the bucket; the callback only copies, it never waits.
    """
    group = resolve_group(process_group)
    if isinstance(bucket, tuple):
        _average_pair(group, bucket, dtype)
        return bucket[0]  # the Python reducer ignores it
    buffer = bucket.buffer()
    if buffer.layout != torch.strided:
        return average_sparse(buffer, group)
    buffer.mul_(1.0 / divisor(group))
    wire = buffer
    if dtype is not None and buffer.dtype != dtype and not buffer.is_complex():
        require_backend_dtype(group, dtype, buffer.device)
        wire = scratch_like(buffer, dtype)
        wire.copy_(buffer)
    work = all_reduce_sum(torch.view_as_real(wire) if wire.is_complex() else wire, group)

    def decompress(future: torch.futures.Future[Any]) -> torch.Tensor:
        future.value()  # raises what the collective raised
        return buffer if wire is buffer else buffer.copy_(wire)

    return work.get_future().then(decompress)  # type: ignore[no-any-return]


def _cast(
    process_group: dist.ProcessGroup | None, bucket: GradBucket, dtype: torch.dtype
) -> torch.futures.Future[torch.Tensor]:
    return _average(process_group, bucket, dtype)


@describe(state_is_group=True, single_collective=True, cast=_cast)
def allreduce_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients with one all-reduce, as DDP does without a hook.

        result = sum over ranks of (gradient / W)

    Args:
        process_group: the ranks; None: DDP's own group when registered through our DDP or `register_ddp_comm_hook`,
            the world otherwise.
        bucket: any dtype, dense or sparse.
    Wire: 2 (W-1)/W bytes sent and received for every byte of the bucket.
    Raises: RuntimeError: torch.distributed is not initialised.
    Example:
        >>> import tensorplay as tp
        >>> def wrap(model):  # within an initialised process group
        ...     ddp = tp.nn.parallel.DistributedDataParallel(model)
        ...     ddp.register_comm_hook(None, allreduce_hook)
        ...     return ddp

    Differs: bit-identical to DDP without a hook, since it multiplies by 1/W as DDP does.
    """
    return _average(process_group, bucket, None)


@describe(state_is_group=True, single_collective=True, cast=_cast)
def fp16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients in float16.

        result = float(sum over ranks of half(gradient / W))

    Args:
        process_group: see `allreduce_hook`. bucket: any dtype; sparse gradients travel uncompressed.
    Wire: half of what `allreduce_hook` sends for float32.
    Raises: RuntimeError: torch.distributed is not initialised.
    Example:
        >>> import tensorplay as tp
        >>> def wrap(model):
        ...     ddp = tp.nn.parallel.DistributedDataParallel(model)
        ...     ddp.register_comm_hook(None, fp16_compress_hook)
        ...     return ddp

    Differs: divides before the cast, so a gradient overflows only when the mean's own share does (above 65504);
        scratch is allocated once a bucket.

    Paper: Micikevicius et al. 2018, Mixed Precision Training, section 3 (range of gradients).
    """
    return _average(process_group, bucket, torch.float16)


@describe(state_is_group=True, single_collective=True, cast=_cast)
def bf16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients in bfloat16: float32's range with 8 bits of precision.

        result = float(sum over ranks of bfloat16(gradient / W))

    Args:
        process_group: see `allreduce_hook`. bucket: any dtype; sparse gradients travel uncompressed.
    Wire: half of what `allreduce_hook` sends for float32.
    Raises: RuntimeError: the backend can't add bfloat16 (mpi, NCCL before 2.10), or there is no process group.
    Example:
        >>> import tensorplay as tp
        >>> def wrap(model):
        ...     ddp = tp.nn.parallel.DistributedDataParallel(model)
        ...     ddp.register_comm_hook(None, bf16_compress_hook)
        ...     return ddp

    Differs: works on gloo, whose all-reduce adds bfloat16. Its `__name__` is "bf16_compress", because plain torch DDP
        refuses the longer name off CUDA without looking at the backend.

    Paper: Kalamkar et al. 2019, A Study of BFLOAT16 for Deep Learning Training.
    """
    return _average(process_group, bucket, torch.bfloat16)


bf16_compress_hook.__name__ = "bf16_compress"


def _wrapper(hook: HookFunction, dtype: torch.dtype, name: str) -> HookFunction:
    if not callable(hook):
        raise TypeError(f"hook must be callable, got {type(hook).__name__}")
    if getattr(hook, "_tensorplay_is_cast_wrapper", False):
        raise ValueError("the hook is wrapped in a cast already: use one wrapper")
    own_cast = wire_cast(hook)
    inner = functools.partial(hook) if not hasattr(hook, "__name__") else hook

    def wrapped(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if own_cast is not None:
            return own_cast(state, bucket, dtype)
        buffer = bucket.buffer()
        if buffer.layout != torch.strided or buffer.dtype == dtype:
            return as_future(inner(state, bucket))
        half = scratch_like(buffer, dtype)
        half.copy_(buffer)
        bucket.set_buffer(half)
        return as_future(inner(state, bucket)).then(lambda future: buffer.copy_(value_of(future)))

    wrapped.__name__ = f"{name}({getattr(hook, '__name__', type(hook).__name__)})"
    wrapped.__doc__ = f"{getattr(hook, '__name__', 'a hook')} with float values cast to {dtype} on the wire."
    describe(
        state_is_group=getattr(hook, "_tensorplay_state_is_group", False),
        single_collective=getattr(hook, "_tensorplay_single_collective", False),
    )(wrapped)
    wrapped._tensorplay_is_cast_wrapper = True  # type: ignore[attr-defined]
    return wrapped


def fp16_compress_wrapper(hook: HookFunction) -> HookFunction:
    """Make `hook` exchange float values in float16.

    Around a hook of this package it casts what enters the collectives: the bucket and residuals stay float32, and
    factors are scaled to the range of float16. Around any other hook it casts the bucket the hook sees.

    Args:
        hook: any `(state, bucket) -> Future or Tensor`.
    Returns: a hook that takes the same state.
    Raises: TypeError: `hook` isn't callable. ValueError: it is wrapped in a cast already.
    Example:
        >>> hook = fp16_compress_wrapper(allreduce_hook)
        >>> hook.__name__
        'fp16_compress_wrapper(allreduce_hook)'
    """
    return _wrapper(hook, torch.float16, "fp16_compress_wrapper")


def bf16_compress_wrapper(hook: HookFunction) -> HookFunction:
    """Make `hook` exchange float values in bfloat16; see `fp16_compress_wrapper`.

    Args:
        hook: any `(state, bucket) -> Future or Tensor`.
    Returns: a hook that takes the same state.
    Raises: TypeError: `hook` isn't callable. ValueError: it is wrapped in a cast already.
    Example:
        >>> hook = bf16_compress_wrapper(allreduce_hook)
        >>> hook.__name__
        'bf16_compress_wrapper(allreduce_hook)'
    """
    return _wrapper(hook, torch.bfloat16, "bf16_compress_wrapper")
