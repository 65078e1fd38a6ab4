"""Hooks to measure with."""

from typing import Any

import torch

from tensorplay.compression.bucket import GradBucket
from tensorplay.distributed.algorithms.ddp_comm_hooks._protocol import completed, describe

__all__ = ["noop_hook"]


@describe()
def noop_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange nothing: every rank keeps its own gradient, and replicas drift apart.

    A step with it is "compute alone", the bound no hook can beat.

    Args:
        state: ignored. bucket: returned as it is.
    Example:
        >>> import tensorplay as tp
        >>> def compute_alone(ddp):
        ...     ddp.register_comm_hook(None, noop_hook)
    """
    return completed(bucket.buffer())
