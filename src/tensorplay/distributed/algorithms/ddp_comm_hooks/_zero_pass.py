"""What one backward of a ZeRO hook consists of."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from tensorplay.compression.collective import WireError
from tensorplay.compression.rounds import Exchange
from tensorplay.distributed.algorithms.ddp_comm_hooks._zero_bucket import BucketWork

__all__ = ["Done", "Pass", "Stage", "Update", "ZeroOptions", "bucket_result", "wait_for_gradient"]

Update = Literal["in_backward", "after_backward"]
Done = torch.futures.Future[BaseException | None]


@dataclass(frozen=True)
class ZeroOptions:
    """How the hook works.

    Args:
        interleaved: parameters travel bucket by bucket, not after the last gradient.
        shard_buckets: owners by the optimizer's partition; False: one owner a bucket.
        update: when parameters change. reduce_scatter: gradients go to their owner only, in `wire_dtype`.
        max_grad_norm, grad_scaler: clip; unscale and skip.
    """

    interleaved: bool
    shard_buckets: bool
    update: Update
    reduce_scatter: bool
    wire_dtype: torch.dtype | None
    max_grad_norm: float | None
    grad_scaler: torch.amp.GradScaler | None

    @property
    def needs_all_gradients(self) -> bool:
        """Whether updates wait for the last bucket."""
        return (
            self.update == "after_backward" or self.max_grad_norm is not None or self.grad_scaler is not None
        )


class Stage:
    """Part of a step that later exchanges of the same lane wait for.

    They wait here and not for the exchange's future, which is done only after the lane has closed: and a lane that
    closes waits for what is running.
    """

    def __init__(self) -> None:
        self._over = threading.Event()
        self._failure: BaseException | None = None

    def run(self, exchange: Exchange) -> Exchange:
        """The exchange, remembering how it ended."""
        try:
            yield from exchange
        except GeneratorExit:  # one of its rounds failed; the store knows whose fault it was
            self._failure = WireError("an exchange that this one builds on was cut off")
            raise
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._over.set()

    def wait(self) -> None:
        """Wait for an exchange that was submitted earlier, so is running or over; raise what it raised."""
        self._over.wait()
        if self._failure is not None:
            raise self._failure


@dataclass
class Pass:
    """One backward: its buckets so far, the bytes each rank updates, and whether the step was skipped."""

    scale: float | None
    works: list[BucketWork] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)
    skipped: bool = False


def bucket_result(pieces: Sequence[BucketWork], done: Sequence[Done]) -> torch.Tensor:
    """The bucket's averaged gradient, once all its pieces are done; raises what ended one."""
    for future in done:
        error = future.value()
        if error is not None:
            raise error
    result = pieces[0].result
    assert result is not None
    for work in pieces:
        work.release()
    return result


def wait_for_gradient(work: BucketWork) -> torch.Tensor:
    """Wait for the wrapped hook's gradient; runs in the lane, never in a callback."""
    assert work.gradient is not None
    value = work.gradient.wait()
    tensor: torch.Tensor = value[0] if isinstance(value, list | tuple) else value
    if tensor.layout == torch.strided:
        tensor = tensor.view(-1).to(work.read.buffer.dtype)
    if tensor.device.type != "cpu":
        tensor.record_stream(torch.accelerator.current_stream(work.device))
    return tensor
