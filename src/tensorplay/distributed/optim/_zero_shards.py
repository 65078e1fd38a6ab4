"""Which rank updates which parameter, and this rank's own optimizer over its part."""

import copy
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

__all__ = ["Shards", "partition_by_size"]

_STRUCTURE = ("params", "param_names")  # what a group is made of; the rest are settings


def partition_by_size(sizes: Sequence[int], parts: int) -> list[int]:
    """Spread items over parts so that the parts are close to even: the largest item goes first, to the emptiest part.

    Equal items keep their order, equal parts are taken in order: every rank finds the same answer.

    Example:
        >>> partition_by_size([8, 5, 4, 3, 0], 2)
        [0, 1, 1, 0, 1]

    Paper: Graham 1969, Bounds on multiprocessing timing anomalies (longest processing time first).
    """
    loads = [0] * parts
    owners = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owner = loads.index(min(loads))
        owners[item] = owner
        loads[owner] += sizes[item]
    return owners


def _size_bytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.element_size()


class Shards:
    """The parameters, numbered in the order of their groups, their owners, and the optimizer of those this rank owns.

    Args:
        optimizer_class, defaults: make the inner optimizer; it gets every group, each with the owned parameters only.
        groups: the outer optimizer's groups. Settings (lr, …) are copied to the inner groups before a step.
        rank, world_size: within the group that shares the work.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        defaults: dict[str, Any],
        groups: list[dict[str, Any]],
        rank: int,
        world_size: int,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.parameters: list[torch.Tensor] = []
        self.owners: list[int] = []
        self._groups = groups
        self._numbers: dict[torch.Tensor, int] = {}
        self._lock = threading.Lock()
        for group in groups:
            self._enter(group)
        self._assign(range(len(self.parameters)))
        self.optimizer = optimizer_class([self._inner_group(group) for group in groups], **defaults)
        self.complete_settings()

    # Who owns what ------------------------------------------------------------------------------------------------

    def _enter(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter not in self._numbers:
                self._numbers[parameter] = len(self.parameters)
                self.parameters.append(parameter)
                self.owners.append(-1)

    def _assign(self, numbers: Iterable[int]) -> None:
        """Trainable and frozen parameters are spread each by themselves: what is updated must be even."""
        numbers = list(numbers)
        for trainable in (True, False):
            chosen = [n for n in numbers if self.parameters[n].requires_grad is trainable]
            sizes = [_size_bytes(self.parameters[n]) for n in chosen]
            for number, owner in zip(chosen, partition_by_size(sizes, self.world_size), strict=True):
                self.owners[number] = owner

    def number_of(self, parameter: torch.Tensor) -> int | None:
        """The parameter's number, None when the optimizer doesn't have it."""
        return self._numbers.get(parameter)

    def add_group(self, group: dict[str, Any]) -> None:
        """Take over a group that the outer optimizer has just added; only its parameters get an owner."""
        first = len(self.parameters)
        self._enter(group)
        self._assign(range(first, len(self.parameters)))
        self.optimizer.add_param_group(self._inner_group(group))
        self.complete_settings()

    def give(self, new_owners: Mapping[int, int]) -> None:
        """Change the owners of parameters (by number). Their state must be moved by the caller."""
        with self._lock:
            for number, owner in new_owners.items():
                self.owners[number] = owner
            for group, inner in zip(self._groups, self.optimizer.param_groups, strict=True):
                inner.update(self._structure(group))

    def _owned(self, parameter: torch.Tensor) -> bool:
        return self.owners[self._numbers[parameter]] == self.rank

    def _structure(self, group: dict[str, Any]) -> dict[str, Any]:
        """The owned part of a group's parameters, and of their names."""
        params = group["params"]
        structure: dict[str, Any] = {"params": [p for p in params if self._owned(p)]}
        if "param_names" in group:
            names = zip(group["param_names"], params, strict=True)
            structure["param_names"] = [name for name, parameter in names if self._owned(parameter)]
        return structure

    def _inner_group(self, group: dict[str, Any]) -> dict[str, Any]:
        settings = {key: value for key, value in group.items() if key not in _STRUCTURE}
        structure = self._structure(group)
        if "param_names" in structure:
            structure = {"params": list(zip(structure["param_names"], structure["params"], strict=True))}
        return {**settings, **structure}

    # Settings -----------------------------------------------------------------------------------------------------

    def complete_settings(self) -> None:
        """Give the outer groups the settings that the optimizer class filled in, changed or dropped."""
        for group, inner in zip(self._groups, self.optimizer.param_groups, strict=True):
            settings = {key: value for key, value in inner.items() if key not in _STRUCTURE}
            for key in [key for key in group if key not in _STRUCTURE and key not in settings]:
                del group[key]
            group.update(settings)

    def _take_settings(self) -> None:
        for group, inner in zip(self._groups, self.optimizer.param_groups, strict=True):
            inner.update({key: value for key, value in group.items() if key not in _STRUCTURE})

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Load the whole optimizer's state: all settings, and the states of owned parameters.

        Raises: ValueError: other groups, or groups of other lengths.
        """
        saved_groups = state_dict["param_groups"]
        lengths = [len(group["params"]) for group in self._groups]
        saved_lengths = [len(group["params"]) for group in saved_groups]
        if lengths != saved_lengths:
            raise ValueError(
                f"the state has groups of {saved_lengths} parameters, this optimizer has groups of {lengths}"
            )
        elsewhere: set[Any] = set()
        local_groups = []
        for group, saved in zip(self._groups, saved_groups, strict=True):
            mine = [self._owned(parameter) for parameter in group["params"]]
            elsewhere.update(key for key, is_mine in zip(saved["params"], mine, strict=True) if not is_mine)
            local = dict(saved)
            for key in _STRUCTURE:
                if key in saved:
                    local[key] = [entry for entry, is_mine in zip(saved[key], mine, strict=True) if is_mine]
            local_groups.append(local)
        # Copied: torch would go on sharing the tensors that need no cast with whoever gave them.
        local_state = {
            key: copy.deepcopy(entry) for key, entry in state_dict["state"].items() if key not in elsewhere
        }
        self.optimizer.load_state_dict({"state": local_state, "param_groups": local_groups})
        for group, saved in zip(self._groups, saved_groups, strict=True):
            if "param_names" in saved:
                group["param_names"] = list(saved["param_names"])
        self.complete_settings()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    # Updating -----------------------------------------------------------------------------------------------------

    def step(self, arguments: Mapping[str, Any]) -> None:
        """Update everything owned by each parameter's `.grad`."""
        with self._lock:
            self._take_settings()
            self.optimizer.step(**arguments)  # also where nothing is owned: it may count steps in its groups
            self.complete_settings()

    def step_with(self, gradients: Mapping[int, torch.Tensor | None], at_once: bool) -> None:
        """Update the owned parameters with these numbers, and no others.

        1. Groups are cut down to the parameters given; `.grad` becomes the gradient given (None: stays as it is).
        2. The inner optimizer steps.
        3. `.grad` and the groups are put back.

        Args:
            gradients: number -> gradient, dense or sparse, of the parameter's shape.
            at_once: these are all the parameters of this step; several calls a step otherwise.

        Raises: RuntimeError: the optimizer keeps something in its groups (a step counter) that several calls would
            change several times a step.
        """
        chosen = {self.parameters[n]: g for n, g in gradients.items() if self.owners[n] == self.rank}
        if not chosen and not at_once:
            return
        with self._lock:
            self._take_settings()
            groups = self.optimizer.param_groups
            structures = [{key: group[key] for key in _STRUCTURE if key in group} for group in groups]
            settings = [dict(group) for group in groups]
            kept = {parameter: parameter.grad for parameter in chosen}
            try:
                for group in groups:
                    group["params"] = [p for p in group["params"] if p in chosen]
                for parameter, gradient in chosen.items():
                    if gradient is not None:
                        parameter.grad = gradient
                with torch.no_grad():
                    self.optimizer.step()
            finally:
                for parameter, gradient in kept.items():
                    parameter.grad = gradient
                for group, structure in zip(groups, structures, strict=True):
                    group.update(structure)
            if at_once:
                self.complete_settings()
            else:
                self._refuse_counters(settings)

    def _refuse_counters(self, before: list[dict[str, Any]]) -> None:
        for group, old in zip(self.optimizer.param_groups, before, strict=True):
            for key, value in group.items():
                if key not in _STRUCTURE and value is not old.get(key) and not _equal(value, old.get(key)):
                    raise RuntimeError(
                        f"{type(self.optimizer).__name__}.step() changes {key!r} in its parameter groups, which would "
                        'happen once a bucket: give the hook update="after_backward", which steps once'
                    )


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and not isinstance(one, torch.Tensor) and bool(one == other)
