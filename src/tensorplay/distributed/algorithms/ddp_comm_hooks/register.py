"""Registering a hook by enum member, by name, or as a callable."""

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tensorplay.compression import registry
from tensorplay.distributed.algorithms.ddp_comm_hooks import default_hooks, quantization_hooks
from tensorplay.distributed.algorithms.ddp_comm_hooks._attach import HookHandle, attach
from tensorplay.distributed.algorithms.ddp_comm_hooks._protocol import HookFunction
from tensorplay.distributed.algorithms.ddp_comm_hooks.auto_hook import AutoState, auto_hook
from tensorplay.distributed.algorithms.ddp_comm_hooks.compressed_hook import (
    CompressedHookState,
    compressed_hook,
)
from tensorplay.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from tensorplay.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import post_localSGD_hook
from tensorplay.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    batched_powerSGD_hook,
    powerSGD_hook,
)

__all__ = ["DDPCommHookType", "known_hooks", "make_hook", "register_ddp_comm_hook"]


class DDPCommHookType(Enum):
    """The hooks that can be registered by member; the value is the name `register_ddp_comm_hook` takes.

    Example:
        >>> DDPCommHookType.FP16_COMPRESS.value
        'fp16_compress'
    """

    ALLREDUCE = "allreduce"
    FP16_COMPRESS = "fp16_compress"
    BF16_COMPRESS = "bf16_compress"
    QUANTIZE_PER_TENSOR = "quantize_per_tensor"
    QUANTIZE_PER_CHANNEL = "quantize_per_channel"
    POWER_SGD = "power_sgd"
    POWER_SGD_RANK2 = "power_sgd_rank2"
    BATCHED_POWER_SGD = "batched_power_sgd"
    BATCHED_POWER_SGD_RANK2 = "batched_power_sgd_rank2"
    POST_LOCAL_SGD = "post_localSGD"
    AUTO = "auto"
    NOOP = "noop"


Made = tuple[HookFunction, Any]
Recipe = Callable[..., Made]


def _plain(hook: HookFunction) -> Recipe:
    """A hook that takes the caller's state as it is."""
    return lambda state: (hook, state)


def _power_sgd(hook: HookFunction, rank: int) -> Recipe:
    """PowerSGD from the first step on, unless the caller brings a state."""

    def recipe(state: Any, **settings: Any) -> Made:
        if isinstance(state, PowerSGDState):
            if settings:
                raise ValueError(
                    f"settings must stand in the name or in the state, not in both: got {settings} in the name and a "
                    "PowerSGDState"
                )
            return hook, state
        if state is not None and not isinstance(state, dist.ProcessGroup):
            raise TypeError(
                f"state must be a PowerSGDState, a process group or None, got {type(state).__name__}"
            )
        settings = {"matrix_approximation_rank": rank, "start_powerSGD_iter": 0, **settings}
        return hook, PowerSGDState(state, **settings)

    return recipe


def _post_local_sgd(state: Any) -> Made:
    if state is None:
        raise TypeError(
            "post_localSGD needs a PostLocalSGDState, since it must know when to switch: "
            "register_ddp_comm_hook('post_localSGD', model, PostLocalSGDState(None, None, start_localSGD_iter=100))"
        )
    return post_localSGD_hook, state


def _auto(state: Any) -> Made:
    if isinstance(state, AutoState):
        return auto_hook, state
    if state is not None and not isinstance(state, dist.ProcessGroup):
        raise TypeError(f"state must be an AutoState, a process group or None, got {type(state).__name__}")
    return auto_hook, AutoState(state)


_recipes: dict[str, Recipe] = {
    "allreduce": _plain(default_hooks.allreduce_hook),
    "fp16_compress": _plain(default_hooks.fp16_compress_hook),
    "bf16_compress": _plain(default_hooks.bf16_compress_hook),
    "quantize_per_tensor": _plain(quantization_hooks.quantization_pertensor_hook),
    "quantize_per_channel": _plain(quantization_hooks.quantization_perchannel_hook),
    "power_sgd": _power_sgd(powerSGD_hook, 1),
    "power_sgd_rank2": _power_sgd(powerSGD_hook, 2),
    "batched_power_sgd": _power_sgd(batched_powerSGD_hook, 1),
    "batched_power_sgd_rank2": _power_sgd(batched_powerSGD_hook, 2),
    "post_localSGD": _post_local_sgd,
    "auto": _auto,
    "noop": _plain(noop_hook),
}


# Names that take settings after a colon, and the callable whose parameters these are.
_TAKE_SETTINGS: dict[str, Callable[..., Any]] = {
    "power_sgd": partial(PowerSGDState, None),
    "batched_power_sgd": partial(PowerSGDState, None),
}


def known_hooks() -> list[str]:
    """The names `register_ddp_comm_hook` takes, codecs included (those with a parameter in their usual setting).

    Example:
        >>> "fp16_compress" in known_hooks()
        True
    """
    return sorted({*_recipes, *registry.known_codecs()})


def _codec_recipe(spec: str, state: Any) -> Made:
    if isinstance(state, CompressedHookState):
        return compressed_hook, state
    if state is not None and not isinstance(state, dist.ProcessGroup):
        raise TypeError(
            f"the state of codec {spec!r} must be a process group, a CompressedHookState or None, "
            f"got {type(state).__name__}"
        )
    return compressed_hook, CompressedHookState(spec, process_group=state)


def make_hook(name: str, state: Any = None) -> tuple[HookFunction, Any]:
    """Return the hook and state that a name stands for.

    Args:
        name: one of `known_hooks()`, a codec with parameters ("topk:0.05", "int8:group_size=256"), or "power_sgd" and
            "batched_power_sgd" with those of `PowerSGDState` ("power_sgd:4", "power_sgd:4,start_powerSGD_iter=100").
        state: handed to the hook; None or a process group for hooks that make their own state.
    Raises: ValueError: an unknown name; the text lists the known ones.
    Example:
        >>> hook, state = make_hook("fp16_compress")
        >>> hook.__name__
        'fp16_compress_hook'
    """
    recipe = _recipes.get(name)
    if recipe is not None:
        return recipe(state)
    base, colon, text = name.replace(" ", "").partition(":")
    if colon and base in _TAKE_SETTINGS:
        settings = registry.read_parameters(f"hook {base!r}", _TAKE_SETTINGS[base], text)
        return _recipes[base](state, **settings)
    try:
        registry.make_codec(name)
    except ValueError as error:
        if name.partition(":")[0] in {known.partition(":")[0] for known in registry.known_codecs()}:
            raise
        raise ValueError(f"unknown hook {name!r}: known are {', '.join(known_hooks())}") from error
    return _codec_recipe(name, state)


def register_ddp_comm_hook(
    comm_hook_type: DDPCommHookType | str | HookFunction,
    model: torch.nn.parallel.DistributedDataParallel,
    state: Any = None,
) -> HookHandle:
    """Register a hook on a DDP module, torch's or ours.

    Args:
        comm_hook_type: a member of `DDPCommHookType`, a name of `known_hooks()`, a codec or PowerSGD with parameters,
            or any callable `(state, bucket) -> Future or Tensor`.
        model: the DDP module. A second registration replaces the first from the next backward pass on.
        state: handed to the hook; None: the module's own process group where the hook takes a group, else a new
            state with default settings.
    Returns: a handle with `replace(hook, state)`, `remove()`, `hook` and `state`.
    Raises: ValueError: an unknown name. TypeError: `comm_hook_type` is none of these, or `model` isn't a DDP module.
    Example:
        >>> def wrap(ddp):
        ...     handle = register_ddp_comm_hook("int8", ddp)
        ...     handle = register_ddp_comm_hook(DDPCommHookType.FP16_COMPRESS, ddp)

    Differs: torch's takes a member only, and returns nothing.
    """
    if isinstance(comm_hook_type, DDPCommHookType):
        hook, state = make_hook(comm_hook_type.value, state)
    elif isinstance(comm_hook_type, str):
        hook, state = make_hook(comm_hook_type, state)
    elif callable(comm_hook_type):
        hook = comm_hook_type
    else:
        raise TypeError(
            "comm_hook_type must be a DDPCommHookType, a name or a callable, got "
            f"{type(comm_hook_type).__name__}: names are {', '.join(known_hooks())}"
        )
    return attach(model, hook, state)
