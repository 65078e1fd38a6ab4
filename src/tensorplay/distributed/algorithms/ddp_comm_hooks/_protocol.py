"""What our hooks tell about themselves, and small pieces they share.

A hook is any callable `(state, bucket) -> Future or Tensor`. Ours carry attributes that registration and the cast
wrappers read; a foreign hook has none of them.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tensorplay.compression.bucket import GradBucket

__all__ = ["HookFunction", "as_future", "completed", "describe", "takes_group", "wire_cast"]

HookFunction = Callable[[Any, GradBucket], Any]
WireCast = Callable[[Any, GradBucket, torch.dtype], torch.futures.Future[torch.Tensor]]

_H = TypeVar("_H", bound=Callable[..., Any])


def describe(
    *, state_is_group: bool = False, single_collective: bool = False, cast: WireCast | None = None
) -> Callable[[_H], _H]:
    """Mark a hook of this package.

    Args:
        state_is_group: its state is a process group, so registration may fill in DDP's own.
        single_collective: it can serve DDP's Python reducer, in place.
        cast: the hook with its float values entering collectives in another dtype; for the cast wrappers.
    """

    def mark(hook: _H) -> _H:
        hook._tensorplay_state_is_group = state_is_group  # type: ignore[attr-defined]
        hook._tensorplay_single_collective = single_collective  # type: ignore[attr-defined]
        hook._tensorplay_cast = cast  # type: ignore[attr-defined]
        return hook

    return mark


def takes_group(hook: Any) -> bool:
    """Whether the hook's state is a process group (looked for through functools.partial)."""
    return bool(getattr(getattr(hook, "func", hook), "_tensorplay_state_is_group", False))


def wire_cast(hook: Any) -> WireCast | None:
    """The hook's own way to cast what enters collectives, or None for a foreign hook."""
    found: WireCast | None = getattr(hook, "_tensorplay_cast", None)
    return found


def completed(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """A future that is done."""
    devices: Any = [tensor.device] if tensor.device.type != "cpu" else None
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    future.set_result(tensor)
    return future


def as_future(result: Any) -> torch.futures.Future[Any]:
    """A hook may return a Future or a Tensor.

    Raises: TypeError: it returned something else.
    """
    if isinstance(result, torch.Tensor):
        return completed(result)
    if isinstance(result, torch._C.Future):
        return result  # type: ignore[return-value]
    raise TypeError(
        f"a communication hook must return a torch.futures.Future or a Tensor, got {type(result).__name__}"
    )


def value_of(future: torch.futures.Future[Any]) -> torch.Tensor:
    """A finished hook future's tensor; torch's collectives give it in a list of one."""
    value = future.value()
    tensor: torch.Tensor = value[0] if isinstance(value, list | tuple) else value
    return tensor


def require_backend_dtype(group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> None:
    """Check that the backend can add `dtype`.

    Raises: RuntimeError: it can't; the text names the backend, what it lacks and the way out.
    """
    if dtype != torch.bfloat16:
        return
    backend = dist.get_backend(group)
    if device.type == "cuda" and "nccl" in backend:
        version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        if version < (2, 10):
            raise RuntimeError(
                f"backend nccl {'.'.join(map(str, version))} can't add bfloat16, it needs NCCL >= 2.10: "
                "use fp16_compress_hook"
            )
    if backend == "mpi":
        raise RuntimeError("backend mpi can't add bfloat16: use fp16_compress_hook, or a gloo or nccl group")
