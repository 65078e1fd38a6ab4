"""DistributedDataParallel, with registration of communication hooks mended."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tensorplay.distributed.algorithms.ddp_comm_hooks._attach import HookHandle

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """torch's DistributedDataParallel; only the registration of hooks differs.

    Args: as torch's.
    Example:
        >>> import tensorplay as tp
        >>> from tensorplay.distributed.algorithms.ddp_comm_hooks import default_hooks
        >>> def wrap(model):  # within an initialised process group
        ...     ddp = tp.nn.parallel.DistributedDataParallel(model)
        ...     handle = ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        ...     return ddp, handle
    Differs: `register_comm_hook` accepts any callable `(state, bucket) -> Future or Tensor`, may be called again, uses
        this module's own process group where the state gives none, and returns a handle.
    """

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> "HookHandle":  # type: ignore[override]
        """Exchange gradients by `hook(state, bucket)`.

        Args:
            state: handed to every call. None for a hook of this package that takes a group: this module's own.
            hook: returns a Future, or the averaged Tensor. A second call replaces the first from the next backward on.
        Returns: a handle with `replace(hook, state)` and `remove()`.
        Raises: TypeError: `hook` isn't callable. RuntimeError: the hook can't serve DDP's Python reducer.
        """
        from tensorplay.distributed.algorithms.ddp_comm_hooks._attach import attach

        return attach(self, hook, state)
