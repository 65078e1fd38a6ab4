"""What the averagers share: which parameters are meant, and their mean over a group."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from tensorplay.compression.participation import resolve_group
from tensorplay.distributed.algorithms.model_averaging.flat_mean import FlatMean
from tensorplay.distributed.algorithms.model_averaging.groups import is_member

__all__ = [
    "average_parameters",
    "average_parameters_or_parameter_groups",
    "get_params_to_average",
    "named_tensors",
    "trainable_parameters",
]

Parameters = (
    torch.nn.Module | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]]
)


def named_tensors(params: Parameters) -> list[tuple[str, torch.Tensor]]:
    """Return (name, tensor) for every tensor in `params`, each tensor once, in order.

    Args:
        params: a module, or an iterable of tensors, of (name, tensor) pairs, or of optimizer parameter groups.
    Returns: names as given; where none is given, the position: "0", "1", …
    Raises: TypeError: an entry is none of these. ValueError: two tensors of one name.
    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> [name for name, _ in named_tensors(layer)], [name for name, _ in named_tensors(layer.parameters())]
        (['weight', 'bias'], ['0', '1'])
    """
    if isinstance(params, torch.nn.Module):
        return list(params.named_parameters())
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in _entries(params):
        found.setdefault(id(tensor), (str(len(found)) if name is None else name, tensor))
    if len({name for name, _ in found.values()}) < len(found):
        raise ValueError(
            f"every parameter needs a name of its own, got {[name for name, _ in found.values()]}: name all or none"
        )
    return list(found.values())


def _entries(params: Iterable[Any]) -> Iterator[tuple[str | None, torch.Tensor]]:
    if isinstance(params, torch.Tensor):
        raise TypeError("params must be an iterable of parameters, got one tensor: pass [tensor]")
    for entry in params:
        if isinstance(entry, torch.Tensor):
            yield None, entry
        elif isinstance(entry, Mapping) and "params" in entry:
            names = entry.get("param_names") or [None] * len(entry["params"])
            yield from zip(names, entry["params"], strict=True)
        elif isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], torch.Tensor):
            yield entry
        else:
            raise TypeError(
                "params must hold parameters, (name, parameter) pairs or optimizer parameter groups, "
                f"got an entry of type {type(entry).__name__}"
            )


def trainable_parameters(params: Parameters) -> list[torch.Tensor]:
    """Return the set every averager averages: each parameter with `requires_grad`, once, with or without a gradient.

    Whether a parameter got a gradient in this step depends on the rank's data; `requires_grad` does not, so all ranks
    agree on the set.

    Raises: TypeError: see `named_tensors`.
    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> _ = layer.bias.requires_grad_(False)
        >>> [tuple(p.shape) for p in trainable_parameters(layer)]
        [(1, 2)]
    """
    return [tensor for _, tensor in named_tensors(params) if tensor.requires_grad]


def average_parameters(
    params: Iterable[torch.Tensor], process_group: dist.ProcessGroup | None, *, bucket_cap_mb: float = 25.0
) -> None:
    """Replace every tensor given by its mean over the ranks of a group, in place.

        p = sum over ranks of (p / W)

    Args:
        params: floating or complex tensors of any shape, strides, dtype and device, the same list on every rank;
            an empty one does nothing.
        process_group: None for the default group. A rank outside the group does nothing.
        bucket_cap_mb: bound of the scratch, in MiB.
    Example: `average_parameters(model.parameters(), None)` on every rank.
    Differs: storage, strides, `data_ptr` and dtype of every tensor stay what they were, each dtype is summed as itself,
        and the scratch is bounded; torch's version makes one flat copy of the model and leaves views of it behind.
    """
    if is_member(process_group):
        FlatMean(bucket_cap_mb).average_(params, resolve_group(process_group))


def get_params_to_average(params: Parameters) -> list[torch.Tensor]:
    """Return the parameters that hold a gradient now, as torch's function of this name does.

    The averagers do not use it: ranks with different unused parameters would disagree on the set. They use
    `trainable_parameters`.

    Raises: TypeError: see `named_tensors`. (torch raises NotImplementedError.)
    Example:
        >>> get_params_to_average(torch.nn.Linear(2, 1))
        []
    """
    return [tensor for _, tensor in named_tensors(params) if tensor.grad is not None]


def average_parameters_or_parameter_groups(
    params: Parameters, process_group: dist.ProcessGroup | None, *, bucket_cap_mb: float = 25.0
) -> None:
    """Average the trainable parameters of a module, an iterable, or an optimizer's parameter groups over a group.

    Args: as in `average_parameters`; `params` also takes what `named_tensors` takes.
    Raises: TypeError: see `named_tensors`.
    Example: `average_parameters_or_parameter_groups(optimizer.param_groups, None)` on every rank.
    Differs: the set is `trainable_parameters(params)`, not those that hold a gradient.
    """
    average_parameters(trainable_parameters(params), process_group, bucket_cap_mb=bucket_cap_mb)
