"""Find parameters that backward still reads after their own gradient is complete.

An update during backward would change them too early. autograd notices it by a version counter, but only when the
timing is bad; this looks at the graph itself, right after forward, and is sure.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["late_reads"]

_saved_names: dict[str, list[str]] = {}


def late_reads(outputs: Any, parameters: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of `parameters` that a node of the graph has saved without sending them a gradient.

    A node that leads to the parameter's gradient runs before that is complete; any other that saved the parameter's
    memory may run after it.

    Args:
        outputs: what forward returned: tensors, in any nest of lists, tuples and dicts.

    Reads inside a checkpointed segment or after forward (in the loss) are not seen.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> x = torch.ones(1, 2)
        >>> late_reads(layer(x), {"weight": layer.weight})
        []
        >>> late_reads(torch.nn.functional.linear(layer(x), layer.weight.detach()), {"weight": layer.weight})
        []
        >>> late_reads(layer(torch.nn.functional.linear(layer(x), layer.weight.detach())), {"weight": layer.weight})
        []
        >>> free = torch.ones(1, 2, requires_grad=True)
        >>> late_reads(layer(torch.nn.functional.linear(free, layer.weight.detach())), {"weight": layer.weight})
        ['weight']
    """
    ranges = sorted(
        (p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name)
        for name, p in parameters.items()
        if p.numel()
    )
    starts = [start for start, _, _ in ranges]
    found: set[str] = set()
    for node in _nodes(outputs):
        for tensor in _saved(node):
            place = bisect_right(starts, tensor.data_ptr()) - 1
            if place < 0 or tensor.data_ptr() >= ranges[place][1]:
                continue
            name = ranges[place][2]
            if name not in found and not _leads_to(node, parameters[name]):
                found.add(name)
    return sorted(found)


def _roots(outputs: Any) -> Iterator[Any]:
    if isinstance(outputs, torch.Tensor):
        if outputs.grad_fn is not None:
            yield outputs.grad_fn
    elif isinstance(outputs, dict):
        for value in outputs.values():
            yield from _roots(value)
    elif isinstance(outputs, list | tuple):
        for value in outputs:
            yield from _roots(value)


def _nodes(outputs: Any) -> Iterator[Any]:
    waiting = list(_roots(outputs))
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def _saved(node: Any) -> Iterator[torch.Tensor]:
    """The tensors a node has saved, but not those behind saved-tensor hooks (a checkpoint would compute them again)."""
    kind = type(node).__name__
    names = _saved_names.get(kind)
    if names is None:
        names = _saved_names[kind] = [name for name in dir(node) if name.startswith("_raw_saved_")]
    for name in names:
        try:
            raw = getattr(node, name)
        except RuntimeError:
            continue  # the graph is freed already
        for saved in raw if isinstance(raw, list | tuple) else [raw]:
            if saved is None or getattr(saved, "unpack_hook", saved) is not None:
                continue  # behind a hook, or a PyTorch that can't tell
            value = saved.data
            if isinstance(value, torch.Tensor) and value.layout == torch.strided:
                yield value


def _leads_to(node: Any, parameter: torch.Tensor) -> bool:
    waiting = deque([node])
    seen = {node}
    while waiting:
        current = waiting.popleft()
        if getattr(current, "variable", None) is parameter:
            return True
        for following, _ in current.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return False
