"""8-bit affine quantization by the all-gather protocol, without error feedback.

    q = round(x / scale) + zero_point, clamped to 0 .. 255;   x' = (q - zero_point) * scale

Each rank sends its quantized bucket with scales and zero points in one message to every other, decodes all of them and
takes the mean, so one rounding is all that is lost. For less traffic at more than two ranks, and for error feedback,
use `compressed_hook` with "int8".
"""

import weakref

import torch
import torch.distributed as dist

from tensorplay.compression.bucket import Bucket, GradBucket, GradientSlice, read_bucket
from tensorplay.compression.compressed import CodecState
from tensorplay.compression.participation import resolve_group
from tensorplay.compression.quantize import AffineUint8
from tensorplay.compression.state import average_sparse
from tensorplay.distributed.algorithms.ddp_comm_hooks._protocol import describe

__all__ = ["quantization_perchannel_hook", "quantization_pertensor_hook"]

# The state of these hooks is a group; what they keep (lane, plans, scratch, no gradients) lives as long as it.
_states: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int | None, CodecState]]" = (
    weakref.WeakKeyDictionary()
)


class _GroupState(CodecState):
    """What the hooks of one group share; it doesn't keep the group alive."""

    def __init__(self, group: dist.ProcessGroup, group_size: int | None) -> None:
        super().__init__(
            AffineUint8(group_size), error_feedback=False, route="gather", whole_buckets=group_size is None
        )
        self._held = weakref.ref(group)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group."""
        return resolve_group(self._held())


def _quantized(
    process_group: dist.ProcessGroup | None,
    grad_bucket: GradBucket,
    group_size: int | None,
    wire_dtype: torch.dtype | None = None,
) -> torch.futures.Future[torch.Tensor]:
    group = resolve_group(process_group)
    bucket = read_bucket(grad_bucket)
    if bucket.is_sparse:
        return average_sparse(bucket.buffer, group)
    states = _states.setdefault(group, {})
    state = states.get(group_size)
    if state is None:
        state = states[group_size] = _GroupState(group, group_size)
    flat = GradientSlice("bucket", bucket.buffer, tuple(bucket.buffer.shape), None)
    return state.average(Bucket(bucket.index, bucket.is_last, bucket.buffer, [flat]), wire_dtype)


def _cast_pertensor(
    process_group: dist.ProcessGroup | None, bucket: GradBucket, dtype: torch.dtype
) -> torch.futures.Future[torch.Tensor]:
    return _quantized(process_group, bucket, None, dtype)


def _cast_perchannel(
    process_group: dist.ProcessGroup | None, bucket: GradBucket, dtype: torch.dtype
) -> torch.futures.Future[torch.Tensor]:
    return _quantized(process_group, bucket, 512, dtype)


@describe(state_is_group=True, cast=_cast_pertensor)
def quantization_pertensor_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients quantized to 8 bits with one scale and zero point a bucket.

    The range always includes 0, so zeros stay zeros. One outlier sets the step for the whole bucket: with gradients of
    mixed size prefer `quantization_perchannel_hook`.

    Args:
        process_group: the ranks; None: DDP's own group when registered through our DDP or `register_ddp_comm_hook`,
            the world otherwise.
        bucket: any dtype; quantized in float32. Sparse gradients travel uncompressed.
    Wire: (N + 8) (W-1) bytes sent and received for N values.
    Raises: RuntimeError: no process group, or the exchange failed on a rank, which is named.
    Example:
        >>> import tensorplay as tp
        >>> def wrap(model):
        ...     ddp = tp.nn.parallel.DistributedDataParallel(model)
        ...     ddp.register_comm_hook(None, quantization_pertensor_hook)
        ...     return ddp

    Differs: scale and codes travel in one message; works on gloo with any number of buckets; a non-finite gradient
        on one rank makes the bucket non-finite on all.
    """
    return _quantized(process_group, bucket, None)


@describe(state_is_group=True, cast=_cast_perchannel)
def quantization_perchannel_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket, bucket_size: int = 512
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients quantized to 8 bits with a scale and zero point for every `bucket_size` values.

    Args:
        process_group, bucket: see `quantization_pertensor_hook`.
        bucket_size: values that share a scale; `functools.partial(hook, bucket_size=128)` registers.
    Wire: (N + 8 ceil(N / bucket_size)) (W-1) bytes sent and received for N values; only the last group is padded.
    Raises: ValueError: `bucket_size` is below 1. RuntimeError: see `quantization_pertensor_hook`.
    Example:
        >>> import functools
        >>> import tensorplay as tp
        >>> def wrap(model):
        ...     ddp = tp.nn.parallel.DistributedDataParallel(model)
        ...     ddp.register_comm_hook(None, functools.partial(quantization_perchannel_hook, bucket_size=128))
        ...     return ddp

    Differs: vectorised; no padding when the length divides; see `quantization_pertensor_hook`.
    """
    if bucket_size < 1:
        raise ValueError(f"bucket_size must be >= 1, got {bucket_size}")
    return _quantized(process_group, bucket, bucket_size)
