"""PyTorch's names under ours: how a package of ours stands for one of torch's, its twin.

1. `stand_for(package, twin)` lets a package answer, for every name it does not define, with its twin's own object.
   Nothing is copied or kept, so a name always means what torch means by it now.
2. A finder resolves `import tensorplay.x.y`: a module of ours where there is one, else torch's own module, entered
   in `sys.modules` a second time under our name. It answers for names below `tensorplay` alone.
3. A package without a twin (`tensorplay.compression`, `tensorplay.distributed.algorithms`) gets nothing from torch.
"""

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import CodeType, ModuleType
from typing import Any

__all__ = ["stand_for"]

_ROOT = __name__.partition(".")[0]


class _Standin(ModuleType):
    """A package of ours that answers with its twin's names where it has none of its own."""

    _twin: ModuleType
    _children: frozenset[str]

    def __setattr__(self, name: str, value: Any) -> None:
        # `import tensorplay.distributed.rendezvous` ends by binding the module here, where `rendezvous` already
        # means torch's function of that name, as it goes on meaning in torch after the same import.
        if isinstance(value, ModuleType) and name not in self.__dict__ and name not in self._children:
            meant = getattr(self._twin, name, value)
            if meant is not value and not isinstance(meant, ModuleType):
                return
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *self._children, *dir(self._twin)})


class _TorchLoader(InspectLoader):
    """Enters torch's own module under our name."""

    def __init__(self, torch_name: str) -> None:
        self.torch_name = torch_name

    def exec_module(self, module: ModuleType) -> None:
        # The import system takes what stands in sys.modules after this call as the result.
        sys.modules[module.__name__] = importlib.import_module(self.torch_name)

    def get_code(self, fullname: str) -> CodeType | None:  # for `python -m tensorplay.distributed.run`
        loader = getattr(_find_torch(self.torch_name), "loader", None)
        return loader.get_code(self.torch_name) if isinstance(loader, InspectLoader) else None

    def get_source(self, fullname: str) -> str | None:
        loader = getattr(_find_torch(self.torch_name), "loader", None)
        return loader.get_source(self.torch_name) if isinstance(loader, InspectLoader) else None


class _Finder(MetaPathFinder):
    """Finds modules below `tensorplay`: ours first, then the twin's."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent_name, _, child = fullname.rpartition(".")
        if not fullname.startswith(f"{_ROOT}.") or parent_name not in sys.modules:
            return None
        parent = sys.modules[parent_name]
        if parent.__name__ == parent_name:  # a package of ours
            ours = PathFinder.find_spec(fullname, path, target)
            if ours is not None and ours.origin is not None:  # not a folder that holds stubs alone
                return ours
            if not isinstance(parent, _Standin) or child in parent._children:
                return None
            parent = parent._twin
        torch_name = f"{parent.__name__}.{child}"
        loaded, found = sys.modules.get(torch_name), _find_torch(torch_name)
        if loaded is None and found is None:
            return None
        return importlib.util.spec_from_loader(
            fullname,
            _TorchLoader(torch_name),
            origin=found.origin if found is not None else None,
            is_package=hasattr(loaded, "__path__")
            or getattr(found, "submodule_search_locations", None) is not None,
        )


def stand_for(package: str, twin: ModuleType, alone: Sequence[str] = ()) -> list[str]:
    """Let `package`, a package of ours being imported, answer with the names of `twin`, a package of torch's.

    Args:
        package: its `__name__`.
        twin: the package of torch it stands for.
        alone: names of children that are never torch's, also where ours do not exist.

    Returns:
        What belongs in the package's `__all__`: the twin's own `__all__`, sorted, or, where it declares none, its
        public names without what it imports from the standard library for itself.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    module = sys.modules[package]
    children = frozenset(child.name for child in pkgutil.iter_modules(module.__path__)) | frozenset(alone)
    vars(module).update(_twin=twin, _children=children, __getattr__=_answer_for(module, twin, children))
    module.__class__ = _Standin
    declared = vars(twin).get("__all__")
    if declared is not None:
        return sorted(set(declared))
    return sorted(
        name for name, value in vars(twin).items() if not name.startswith("_") and not _is_foreign(value)
    )


def _answer_for(module: ModuleType, twin: ModuleType, children: frozenset[str]) -> Callable[[str], Any]:
    def answer(name: str) -> Any:
        if name in children:
            return importlib.import_module(f"{module.__name__}.{name}")
        try:
            return getattr(twin, name)
        except AttributeError:
            problem = f"module {module.__name__!r} has no attribute {name!r}"
            raise AttributeError(problem, name=name, obj=module) from None

    return answer


def _is_foreign(value: object) -> bool:
    """Whether a module imported `value` only for its own use: the standard library, or `torch` itself."""
    kind = type(
        value
    )  # not isinstance: some of torch's objects warn when an attribute is read, __class__ included
    if issubclass(kind, ModuleType):
        name = vars(value)["__name__"]
        return name == "torch" or name.partition(".")[0] in sys.stdlib_module_names
    return issubclass(kind, type) and value.__module__.partition(".")[0] in sys.stdlib_module_names


def _find_torch(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):  # ValueError: entered in sys.modules by hand, without a spec
        return None
