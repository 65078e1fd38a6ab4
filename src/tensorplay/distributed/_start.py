"""Starting a process group, with a usable message where NCCL can't be had."""

import functools
from collections.abc import Callable
from typing import ParamSpec

import torch
import torch.distributed as dist

__all__ = ["init_process_group"]

Parameters = ParamSpec("Parameters")


def _refuse_unusable_nccl(start: Callable[Parameters, None]) -> Callable[Parameters, None]:
    @functools.wraps(start, assigned=("__name__", "__qualname__", "__annotations__"))
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        backend = args[0] if args else kwargs.get("backend")
        if isinstance(backend, str) and "nccl" in backend.lower():
            lacking = _lacking_for_nccl()
            if lacking:
                raise ValueError(
                    f'backend {backend!r} needs NCCL and a CUDA device, and {lacking}; use "gloo", which runs on the '
                    "CPU of any machine, and leave the model there"
                )
        start(*args, **kwargs)

    return checked


def _lacking_for_nccl() -> str:
    if not dist.is_nccl_available():
        return f"PyTorch {torch.__version__} is built without NCCL"
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} finds no CUDA device here"
    return ""


init_process_group = _refuse_unusable_nccl(dist.init_process_group)
init_process_group.__doc__ = """Start the default process group: `torch.distributed.init_process_group`.

Takes its arguments and passes them on as they are.

Raises:
    ValueError: the backend names NCCL, alone or for one kind of device ("cpu:gloo,cuda:nccl"), and this PyTorch has
        no NCCL or finds no CUDA device. The text says what is lacking and what to use instead.

Example:
    >>> import tensorplay.distributed as dist
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> dist.get_world_size()
    1
    >>> dist.destroy_process_group()

Differs: torch raises RuntimeError, at this call or at the first collective, without a way out.
"""
