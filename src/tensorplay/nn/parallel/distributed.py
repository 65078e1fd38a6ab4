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

    # torch's Join asks these two: a hook of this package then divides by the ranks that still have data.

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> Any:
        from tensorplay.distributed.algorithms._join_torch import count_for_torch_join

        answer = super()._check_global_requires_backward_grad_sync(is_joined_rank)  # type: ignore[no-untyped-call]
        count_for_torch_join(self, has_data=not is_joined_rank)
        return answer

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        from tensorplay.distributed.algorithms._join_torch import end_of_torch_join

        end_of_torch_join(self)
        super()._sync_final_model(is_last_joiner)  # type: ignore[no-untyped-call]
