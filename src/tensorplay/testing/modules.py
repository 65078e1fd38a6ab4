"""Make the modules of the caller importable in a rank: its search path, and its own modules by file."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import sys
import sysconfig
import types
from collections.abc import Sequence

__all__ = ["CallerModules", "own_main_file", "own_modules"]

ModuleMap = dict[str, tuple[str | None, list[str] | None]]


def _installed_prefixes() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple({sysconfig.get_path(name) + os.sep for name in names})


_INSTALLED = _installed_prefixes()


def own_modules() -> ModuleMap:
    """Name -> (file, package path) of each loaded module that is neither the standard library nor installed.

    A test module is known to pytest by a name that its folder alone does not give; this map does.

    Example:
        >>> "json" in own_modules()
        False
    """
    found: ModuleMap = {}
    for name, module in list(sys.modules.items()):
        if name == "__main__" or not isinstance(module, types.ModuleType):
            continue
        # Looked up in the dictionary: torch has modules that answer any attribute with something else.
        file = module.__dict__.get("__file__")
        path = module.__dict__.get("__path__")
        if isinstance(file, str):
            if file.startswith(_INSTALLED) or not file.endswith(".py"):
                continue
            found[name] = (file, None if path is None else [str(entry) for entry in path])
        elif path is not None and module.__dict__.get("__spec__") is not None:
            entries = [str(entry) for entry in path]
            if entries and not any((entry + os.sep).startswith(_INSTALLED) for entry in entries):
                found[name] = (None, entries)
    return found


def own_main_file() -> str | None:
    """The file of the running script, or None where there is none (a prompt, `-c`)."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.abspath(file) if isinstance(file, str) and os.path.exists(file) else None


class CallerModules(importlib.abc.MetaPathFinder):
    """Find a module where the caller has it: a module's file before any other finder, a package's folder after all.

    Steps of `update`, once a call:
      1. take the caller's search path;
      2. forget loaded modules that the caller has under the same name from another file;
      3. remember the map for the imports to come.

    Example:
        >>> CallerModules().find_spec("json") is None
        True
    """

    def __init__(self) -> None:
        self._modules: ModuleMap = {}
        self._main_file: str | None = None

    def install(self) -> None:
        """Join the interpreter's finders."""
        sys.meta_path.insert(0, self)
        sys.meta_path.append(_ImpliedPackages(self))

    def update(self, search_path: list[str], modules: ModuleMap) -> None:
        """Follow the caller: its `sys.path` and its `own_modules()`."""
        sys.path[:] = search_path
        for name, (file, _) in modules.items():
            loaded = sys.modules.get(name)
            known = None if loaded is None else loaded.__dict__.get("__file__")
            if file is not None and known is not None and known != file:
                del sys.modules[name]
        self._modules = modules
        importlib.invalidate_caches()

    def load_main(self, file: str) -> None:
        """Run the caller's script under the name `__mp_main__`, and let `__main__` mean it, once a file."""
        if self._main_file == file:
            return
        main = types.ModuleType("__mp_main__")
        main.__dict__.update(runpy.run_path(file, run_name="__mp_main__"))
        main.__file__ = file
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
        self._main_file = file

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The caller's file for this name."""
        file, package_path = self._modules.get(fullname, (None, None))
        if file is None:
            return None
        return importlib.util.spec_from_file_location(fullname, file, submodule_search_locations=package_path)

    def find_package(self, fullname: str) -> importlib.machinery.ModuleSpec | None:
        """A package without a file: the caller's folders for it, none if only something below it is known."""
        known = fullname in self._modules
        if not known and not any(name.startswith(fullname + ".") for name in self._modules):
            return None
        spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = (self._modules[fullname][1] if known else None) or []
        return spec


class _ImpliedPackages(importlib.abc.MetaPathFinder):
    """The last finder: packages of the caller that nobody else finds."""

    def __init__(self, modules: CallerModules) -> None:
        self._modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return self._modules.find_package(fullname)
