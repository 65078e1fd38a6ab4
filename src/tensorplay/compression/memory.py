"""What a hook remembers of each parameter: residuals, factors, and whether this step used it.

Entries belong to parameters. They survive DDP's rebuild of its buckets because they never know a bucket, they are saved
under the parameter's name, and they hold no strong reference to a parameter.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from tensorplay.compression.bucket import Key

__all__ = ["ParameterMemory", "Tensors"]

Tensors = dict[str, torch.Tensor]
"""The state tensors of one parameter by kind ("residual", …)."""


class ParameterMemory:
    """Named tensors of each parameter of one hook state.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> memory = ParameterMemory()
        >>> memory.bind(model)
        >>> memory.of(model.weight)["residual"] = torch.zeros(4)
        >>> sorted(memory.by_name())
        ['weight']
    """

    def __init__(self) -> None:
        self._by_parameter: Any = WeakTensorKeyDictionary()  # Parameter -> Tensors
        self._by_key: dict[str, Tensors] = {}
        self._names: Any = WeakTensorKeyDictionary()  # Parameter -> name
        self._waiting: dict[str, Tensors] = {}  # loaded, their parameters not seen yet
        self._used: set[int] = set()
        self._watched: Any = WeakTensorKeyDictionary()  # Parameter -> handle

    def bind(self, model: torch.nn.Module) -> None:
        """Learn the parameters' names from `model` (a DDP wrapper is looked through) and watch which a step uses.

        Raises: ValueError: a loaded state names parameters the model doesn't have.
        """
        inner = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
        names: Any = WeakTensorKeyDictionary()
        for name, parameter in inner.named_parameters():
            names[parameter] = name
            self.watch(parameter)
        unknown = sorted(set(self._waiting) - {name for _, name in names.items()})
        if unknown:
            raise ValueError(f"the loaded state has parameters the model lacks: {', '.join(unknown[:5])}")
        self._names = names

    @property
    def is_bound(self) -> bool:
        """Whether names are known."""
        return len(self._names) > 0 or bool(self._by_key)

    def name_of(self, key: Key) -> str | None:
        """The name a parameter is saved under, or None while it is unknown."""
        if isinstance(key, str):
            return key
        name: str | None = self._names.get(key)
        return name

    def of(self, key: Key) -> Tensors:
        """The tensors of a parameter (or of a name, where there is no parameter); loaded ones on first sight."""
        if isinstance(key, str):
            if key not in self._by_key:
                self._by_key[key] = self._waiting.pop(key, {})
            return self._by_key[key]
        entry: Tensors | None = self._by_parameter.get(key)
        if entry is None:
            name = self.name_of(key)
            entry = {} if name is None else self._waiting.pop(name, {})
            self._by_parameter[key] = entry
        return entry

    def by_name(self) -> dict[str, Tensors]:
        """All entries that hold something, by parameter name.

        Raises: RuntimeError: names are unknown.
        """
        found = {name: entry for name, entry in self._by_key.items() if entry}
        found.update({name: entry for name, entry in self._waiting.items() if entry})
        for parameter, entry in self._by_parameter.items():
            if not entry:
                continue
            name = self.name_of(parameter)
            if name is None:
                raise RuntimeError(
                    "the state does not know its parameters' names: register it through register_ddp_comm_hook, "
                    "or call state.bind(model), before saving or loading"
                )
            found[name] = entry
        return found

    def load(self, entries: dict[str, Tensors]) -> None:
        """Replace everything by `entries`; tensors are cloned, and placed when their parameter is next seen.

        Raises: ValueError: bound to a model that lacks one of the names.
        """
        if len(self._names):
            unknown = sorted(set(entries) - set(self._names.values()))
            if unknown:
                raise ValueError(f"the loaded state has parameters the model lacks: {', '.join(unknown[:5])}")
        self._by_parameter = WeakTensorKeyDictionary()
        self._by_key = {}
        self._waiting = {
            name: {kind: tensor.detach().clone() for kind, tensor in tensors.items()}
            for name, tensors in entries.items()
        }

    def map_tensors(self, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        """Replace every tensor by `change(kind, tensor)`."""
        for entry in [*self._by_key.values(), *self._waiting.values(), *self._by_parameter.values()]:
            for kind in list(entry):
                entry[kind] = change(kind, entry[kind])

    # Used parameters -------------------------------------------------------------------------------------------

    def watch(self, parameter: torch.Tensor) -> None:
        """Note from now on when a backward pass gives `parameter` a gradient."""
        if parameter in self._watched or not parameter.requires_grad:
            return
        used = self._used

        def note(leaf: torch.Tensor) -> None:
            used.add(id(leaf))

        self._watched[parameter] = parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    def unwatch(self) -> None:
        """Take the notes' hooks off the parameters."""
        for handle in self._watched.values():
            handle.remove()
        self._watched = WeakTensorKeyDictionary()
        self._used.clear()

    def take_used(self, keys: Iterable[Key]) -> list[bool]:
        """For each key, whether this rank used it since the last call; True for what is not watched yet."""
        answers = []
        for key in keys:
            if isinstance(key, str) or key not in self._watched:
                answers.append(True)
                if not isinstance(key, str):
                    self.watch(key)
            else:
                answers.append(id(key) in self._used)
                self._used.discard(id(key))
        return answers
