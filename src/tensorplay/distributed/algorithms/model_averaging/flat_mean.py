"""The mean of many tensors over a group, through one bounded scratch."""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from tensorplay.compression.collective import Traffic, all_reduce_sum, traffic
from tensorplay.compression.participation import resolve_group

__all__ = ["FlatMean"]

_MEBIBYTE = 1024 * 1024


class FlatMean:
    """Replace tensors, in place, by their sum over a group times a factor.

    1. Tensors are taken dtype by dtype and device by device, in order of first appearance, and cut into pieces by
       their shape alone, so that every rank makes the same buckets whatever its strides are.
    2. A bucket is flattened into one half of the scratch, scaled, and its all-reduce started.
    3. While it travels, the next bucket is flattened into the other half.
    4. A bucket that has arrived is copied back through its tensors: storage, strides and dtype stay what they were.

    Args:
        bucket_cap_mb: bound of the scratch, both halves together, in MiB. Kept and used again by later calls.
    Raises: ValueError: `bucket_cap_mb` is not a finite number above 0.
    Example:
        >>> FlatMean(bucket_cap_mb=25).scratch_bytes()
        0
    """

    def __init__(self, bucket_cap_mb: float = 25.0) -> None:
        if not (math.isfinite(bucket_cap_mb) and bucket_cap_mb > 0):
            raise ValueError(f"bucket_cap_mb must be a finite number above 0, got {bucket_cap_mb}")
        self.bucket_cap_mb = bucket_cap_mb
        self.traffic = Traffic(traffic)
        self._halves: dict[torch.device, list[torch.Tensor]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "FlatMean":
        return FlatMean(self.bucket_cap_mb)

    def __reduce__(self) -> tuple[Any, ...]:
        return FlatMean, (self.bucket_cap_mb,)

    def scratch_bytes(self) -> int:
        """Bytes of scratch held now."""
        return sum(half.numel() for halves in self._halves.values() for half in halves)

    def average_(self, tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> None:
        """Replace each tensor by its mean over all ranks of `group`, scaled before the sum."""
        group = resolve_group(group)
        self.sum_(tensors, group, 1.0 / group.size())

    def sum_(self, tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, scale: float) -> None:
        """Replace each tensor by the sum over `group` of `scale` times the tensor.

        Args:
            tensors: floating or complex, any shape, strides, dtype and device; the same shapes on every rank.
            scale: may differ between ranks; 0 leaves this rank's values out, non-finite ones included.
        """
        if group.size() == 1 and scale == 1.0:
            return
        in_flight: deque[tuple[Any, torch.Tensor, list[torch.Tensor]]] = deque()
        with torch.no_grad():
            for number, bucket in enumerate(self._buckets(tensors)):
                if len(in_flight) == 2:
                    _copy_back(*in_flight.popleft())
                flat = self._flatten(bucket, number % 2, scale)
                in_flight.append((all_reduce_sum(flat, group, self.traffic, async_op=True), flat, bucket))
            while in_flight:
                _copy_back(*in_flight.popleft())

    def _buckets(self, tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Yield lists of pieces of one dtype and device, each list at most half of the scratch."""
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in tensors:
            real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
            kinds.setdefault((real.dtype, real.device), []).append(real)
        for (dtype, device), alike in kinds.items():
            most = max(1, int(self.bucket_cap_mb * _MEBIBYTE) // 2 // dtype.itemsize)
            self._reserve(device, min(most, sum(tensor.numel() for tensor in alike)) * dtype.itemsize)
            bucket: list[torch.Tensor] = []
            filled = 0
            for piece in (piece for tensor in alike for piece in _pieces(tensor, most)):
                if filled + piece.numel() > most:
                    yield bucket
                    bucket, filled = [], 0
                bucket.append(piece)
                filled += piece.numel()
            if bucket:
                yield bucket

    def _reserve(self, device: torch.device, half_bytes: int) -> None:
        halves = self._halves.get(device)
        if halves is None or halves[0].numel() < half_bytes:
            self._halves[device] = [
                torch.empty(half_bytes, dtype=torch.uint8, device=device) for _ in range(2)
            ]

    def _flatten(self, bucket: list[torch.Tensor], half: int, scale: float) -> torch.Tensor:
        dtype, device = bucket[0].dtype, bucket[0].device
        numel = sum(piece.numel() for piece in bucket)
        flat = self._halves[device][half][: numel * dtype.itemsize].view(dtype)
        if scale == 0.0:
            return flat.zero_()
        for view, piece in _views(flat, bucket):
            torch.mul(piece, scale, out=view)
        return flat


def _pieces(tensor: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """Cut a tensor, by shape alone, into views of at most `most` elements."""
    if tensor.numel() <= most:
        if tensor.numel():
            yield tensor
        return
    row = tensor.numel() // tensor.shape[0]
    if row > most:
        for index in range(tensor.shape[0]):
            yield from _pieces(tensor[index], most)
        return
    yield from torch.split(tensor, most // row)


def _views(flat: torch.Tensor, bucket: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pair each piece with its place in the flat bucket, shaped alike."""
    start = 0
    for piece in bucket:
        yield flat[start : start + piece.numel()].view(piece.shape), piece
        start += piece.numel()


def _copy_back(work: Any, flat: torch.Tensor, bucket: list[torch.Tensor]) -> None:
    work.wait()
    for view, piece in _views(flat, bucket):
        piece.copy_(view)
