"""The outer optimizer: any torch.optim optimizer, over the outer parameters."""

from collections.abc import Callable

import torch

__all__ = ["OuterOptimizer", "make_outer_optimizer"]

OuterOptimizer = torch.optim.Optimizer | Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None
"""What DiLoCoAverager takes: an optimizer over the model's parameters, a callable that makes one, or None."""


def make_outer_optimizer(
    given: OuterOptimizer, parameters: list[torch.Tensor], outer: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Make the optimizer over the outer parameters, or turn a given one to them.

    Args: given: see `DiLoCoAverager`. parameters, outer: the parameters and their outer twins, in one order.
    Raises: TypeError: `given` makes no optimizer. ValueError: it is an optimizer over other parameters, or a used one.
    """
    if given is None:
        return torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
    if not isinstance(given, torch.optim.Optimizer):
        made = given(outer) if callable(given) else None
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(
                "outer_optimizer must be a torch.optim.Optimizer, or a callable that makes one from a list of "
                f"parameters, got {given!r}"
            )
        return made
    twins = {id(parameter): twin for parameter, twin in zip(parameters, outer, strict=True)}
    held = [parameter for group in given.param_groups for parameter in group["params"]]
    if {id(parameter) for parameter in held} != set(twins) or given.state:
        raise ValueError(
            f"outer_optimizer must be new and hold exactly the {len(twins)} trainable parameters, got "
            f"{len(held)} with state for {len(given.state)}; or pass a callable that makes one"
        )
    for group in given.param_groups:
        group["params"] = [twins[id(parameter)] for parameter in group["params"]]
    return given
