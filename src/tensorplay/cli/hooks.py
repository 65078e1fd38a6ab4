"""From a name on the command line to a hook at work on a model, with what must stand beside it.

A name is one of three things, looked for in this order:

1. A recipe, for what takes more than a hook: local SGD also needs an optimizer that averages parameters.
   RECIPES lists them; a new one is one line there.
2. A registered hook, with settings after a colon where it has some: "fp16_compress", "topk:0.01".
3. The user's own hook, as "module:function"; the current folder counts as a place to look.
"""

import importlib
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tensorplay.cli.command import UsageError
from tensorplay.cli.local_sgd import DILOCO, POST_LOCAL_SGD, Attached, Recipe
from tensorplay.distributed.algorithms.ddp_comm_hooks import (
    known_hooks,
    make_hook,
    register_ddp_comm_hook,
)

__all__ = ["COMPUTE_ALONE", "RECIPES", "attach", "check_hook_names", "split_hook_names"]

COMPUTE_ALONE = "noop"
"""The hook that exchanges nothing: a step under it takes as long as compute alone."""

RECIPES: dict[str, Recipe] = {
    "diloco": DILOCO,
    "post_localSGD": POST_LOCAL_SGD,
}
"""Names that need more than the registration of a hook."""


def attach(name: str, model: DistributedDataParallel, optimizer: Optimizer) -> Attached:
    """Register the hook called `name` on `model`, with what belongs to it. A collective for some names.

    Args:
        name: see the module's docstring.
        model: the DDP model.
        optimizer: the optimizer of its parameters.

    Raises:
        UsageError: nothing has that name, or a setting is unknown or against its rule.

    Example:
        >>> attached = attach("fp16_compress", model, optimizer)           # doctest: +SKIP
        >>> attached.optimizer.step()                                      # doctest: +SKIP
    """
    base, _, settings = name.partition(":")
    if base in RECIPES:
        return RECIPES[base].attach(model, optimizer, RECIPES[base].read_settings(base, settings))
    return Attached(register_ddp_comm_hook(_find_hook(name), model), optimizer)


def check_hook_names(names: list[str]) -> None:
    """Raise UsageError for an empty list, a name given twice, or one that `attach` would refuse.

    Example:
        >>> check_hook_names(["allreduce", "topk:0.01", "diloco:period=20"])
    """
    if not names:
        raise UsageError(f"--hooks must name at least one hook; known: {', '.join(_known_names())}")
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--hooks must name each hook once, got {name} {names.count(name)} times")
        base, _, settings = name.partition(":")
        if base in RECIPES:
            RECIPES[base].read_settings(base, settings)
        else:
            _find_hook(name)


def split_hook_names(text: str) -> list[str]:
    """Split at commas, except at those between the settings of one name.

    Example:
        >>> split_hook_names("allreduce, int4:group_size=64,rounding=nearest, sign")
        ['allreduce', 'int4:group_size=64,rounding=nearest', 'sign']
    """
    names: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if names and re.match(r"\w+=", part):
            names[-1] += f",{part}"
        elif part:
            names.append(part)
    return names


def _known_names() -> list[str]:
    return sorted({*known_hooks(), *RECIPES})


def _find_hook(name: str) -> str | Callable[..., Any]:
    """The name itself where it is registered with these settings, else the function that it points to."""
    base, _, function = name.partition(":")
    try:
        make_hook(name)
        return name
    except ValueError as error:
        if base in {known.partition(":")[0] for known in known_hooks()}:
            raise UsageError(f"hook {name!r}: {error}") from error
    return _import_hook(name, base, function)


def _import_hook(name: str, module: str, function: str) -> Callable[..., Any]:
    rule = f"known are {', '.join(_known_names())}, and your own as module:function"
    if not function:
        raise UsageError(f"no hook is called {name!r}: {rule}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        hook: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"no hook is called {name!r} ({error}): {rule}") from error
    if not callable(hook):
        raise UsageError(f"{name!r} must be callable, got {type(hook).__name__}")
    return hook
