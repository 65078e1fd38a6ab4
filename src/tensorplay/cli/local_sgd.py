"""The demo's recipes for hooks that come with an optimizer of their own: post-local SGD and DiLoCo."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tensorplay.cli.command import UsageError
from tensorplay.compression.registry import make_codec
from tensorplay.distributed.algorithms.ddp_comm_hooks import register_ddp_comm_hook
from tensorplay.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from tensorplay.distributed.algorithms.model_averaging import DiLoCoAverager, PeriodicModelAverager
from tensorplay.distributed.optim.post_localSGD_optimizer import PostLocalSGDOptimizer

__all__ = ["DILOCO", "POST_LOCAL_SGD", "Attached", "Recipe"]

Settings = dict[str, Any]


def _nothing() -> None:
    """The model is the one to evaluate as it is."""


@dataclass(frozen=True)
class Attached:
    """A hook at work on a model.

    Attributes:
        handle: what register_ddp_comm_hook returned.
        optimizer: the one to step, wrapped where the hook needs it.
        finish: to be called on every rank after the last step: makes the model the one to evaluate.
    """

    handle: Any
    optimizer: Optimizer
    finish: Callable[[], None] = _nothing


@dataclass(frozen=True)
class Recipe:
    """How a name becomes a hook and an optimizer.

    Attributes:
        attach: called with the model, the optimizer and the settings.
        defaults: the settings with their default values; "name:period=20" changes one.
    """

    attach: Callable[[DistributedDataParallel, Optimizer, Settings], Attached]
    defaults: Settings

    def read_settings(self, name: str, text: str) -> Settings:
        """The defaults, changed by "period=20,codec=int4".

        Raises:
            UsageError: a setting that `name` does not have, a count below its least, an unknown codec.

        Example:
            >>> DILOCO.read_settings("diloco", "period=20")
            {'period': 20, 'warmup_steps': 0, 'codec': None}
        """
        settings = dict(self.defaults)
        for part in text.split(",") if text else []:
            key, _, value = part.partition("=")
            if key not in settings:
                raise UsageError(f"a setting of {name} must be one of {', '.join(settings)}, got {part!r}")
            settings[key] = _codec(name, value) if key == "codec" else _count(name, key, value)
        return settings


def _count(name: str, key: str, text: str) -> int:
    least = 0 if key == "warmup_steps" else 1
    if not text.isdecimal() or int(text) < least:
        raise UsageError(f"{key} of {name} must be an integer >= {least}, got {text!r}")
    return int(text)


def _codec(name: str, text: str) -> str | None:
    if text.lower() == "none":
        return None
    try:
        make_codec(text)
    except ValueError as error:
        raise UsageError(f"codec of {name}: {error}") from error
    return text


def _exchange_until(warmup_steps: int, model: DistributedDataParallel) -> Any:
    """Average gradients for `warmup_steps` steps, then leave them to each rank."""
    state = PostLocalSGDState(None, None, warmup_steps, post_local_gradient_allreduce=False)
    return register_ddp_comm_hook(post_localSGD_hook, model, state)


def _attach_post_local_sgd(
    model: DistributedDataParallel, optimizer: Optimizer, settings: Settings
) -> Attached:
    averager = PeriodicModelAverager(settings["period"], warmup_steps=settings["warmup_steps"])
    handle = _exchange_until(settings["warmup_steps"], model)
    return Attached(handle, PostLocalSGDOptimizer(optimizer, averager), averager.average_now)


def _attach_diloco(model: DistributedDataParallel, optimizer: Optimizer, settings: Settings) -> Attached:
    averager = DiLoCoAverager(model.module, **settings)
    handle = _exchange_until(settings["warmup_steps"], model)

    @torch.no_grad()
    def take_outer_parameters() -> None:
        parameters = dict(model.module.named_parameters())
        for name, outer in averager.outer_parameters().items():
            parameters[name].copy_(outer)

    return Attached(handle, PostLocalSGDOptimizer(optimizer, averager), take_outer_parameters)


POST_LOCAL_SGD = Recipe(_attach_post_local_sgd, {"period": 4, "warmup_steps": 10})
"""Gradients are averaged for warmup_steps steps; after that parameters are, every `period` steps and at the end.

Paper: Lin et al. 2018, "Don't use large mini-batches, use local SGD".
"""

DILOCO = Recipe(_attach_diloco, {"period": 10, "warmup_steps": 0, "codec": None})
"""Ranks train alone and exchange what changed every `period` steps; the outer parameters are evaluated.

Paper: Douillard et al. 2023, "DiLoCo".
"""
