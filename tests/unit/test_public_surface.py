"""The public surface: declared, sorted, documented, and without side effects when imported."""

import ast
import enum
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.unit.surface import Source, load, sources

MODULES = [source.name for source in sources() if not source.name.endswith("__main__")]
# A package file that holds a docstring alone has no names to declare.
PUBLIC = [
    source.name
    for source in sources()
    if len(source.tree.body) > 1 and not any(part.startswith("_") for part in source.name.split("."))
]


@pytest.mark.parametrize("name", MODULES)
def test_module_says_what_it_is_for(name: str) -> None:
    assert inspect.cleandoc(load(name).__doc__ or ""), f"{name} has no docstring"


@pytest.mark.parametrize("name", PUBLIC)
def test_all_is_declared_sorted_and_true(name: str) -> None:
    module = load(name)
    assert "__all__" in vars(module), f"{name} declares no __all__"
    declared = list(module.__all__)
    # A package that takes its list from torch's package sorts it plainly.
    expected = sorted(set(declared), key=_order if _is_spelt_out(name) else None)
    assert declared == expected, f"{name}.__all__ must be {expected}"
    assert [entry for entry in declared if entry.startswith("_") or not hasattr(module, entry)] == []


def _order(name: str) -> tuple[int, list[tuple[bool, int, str]]]:
    """Constants, then classes, then the rest; numbers in names by value (as ruff's RUF022 sorts)."""
    kind = 0 if len(name) > 1 and name.isupper() else 1 if name[0].isupper() else 2
    parts = [part for part in re.split(r"(\d+)", name) if part]
    return kind, [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def _is_spelt_out(module: str) -> bool:
    (source,) = (source for source in sources() if source.name == module)
    lists = [
        node.value
        for node in source.tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return not any(isinstance(value, ast.Call) for value in lists)


def _stands_for_torch(module: ModuleType) -> bool:
    return "_twin" in vars(module)


def test_the_order_of_names_is_the_linters() -> None:
    names = ["zero", "int8", "DDP", "MAX_ROUNDS", "Int16", "int16", "Int4", "Join", "JoinHook", "Joinable"]
    in_order = ["DDP", "MAX_ROUNDS", "Int4", "Int16", "Join", "JoinHook", "Joinable", "int8", "int16", "zero"]
    assert sorted(names, key=_order) == in_order


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_a_docstring(name: str) -> None:
    assert list(_undocumented(load(name))) == []


def _undocumented(module: ModuleType) -> Iterator[str]:
    for name in module.__all__:
        if _stands_for_torch(module) and name not in vars(module):
            continue  # torch's own
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            if (getattr(value, "__module__", None) or "").partition(".")[0] == "tensorplay":
                yield from _undocumented_parts(name, value)
        elif isinstance(value, ModuleType):
            if value.__name__.startswith("tensorplay") and not value.__doc__:
                yield name
        elif _is_assigned_here(module.__name__, name) and name not in _documented_constants():
            yield f"{name}: put a string under the assignment"


def _undocumented_parts(name: str, value: object) -> Iterator[str]:
    if not inspect.isclass(value):
        if not inspect.getdoc(value):
            yield name
        return
    own = vars(value).get("__doc__") or ""
    # A dataclass without a docstring gets its signature for one.
    if not own.strip() or own.startswith(f"{value.__name__}("):
        yield name
    for part, member in vars(value).items():
        inner = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if part.startswith("_") or not (inspect.isfunction(inner) or isinstance(inner, property)):
            continue
        if (getattr(inner, "__module__", None) or "tensorplay").startswith(
            "tensorplay"
        ) and not inspect.getdoc(getattr(value, part)):
            yield f"{name}.{part}"


def _assignments(source: Source) -> Iterator[tuple[str, bool]]:
    """Names assigned at module level, each with whether a string stands under the assignment."""
    body = source.tree.body
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        else:
            continue
        documented = (
            isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        )
        for target in targets:
            if isinstance(target, ast.Name):
                yield target.id, documented


def _documented_constants() -> set[str]:
    return {name for source in sources() for name, documented in _assignments(source) if documented}


def _is_assigned_here(module: str, name: str) -> bool:
    return any(
        assigned == name
        for source in sources()
        if source.name.startswith(module)
        for assigned, _ in _assignments(source)
    )


def test_the_check_of_docstrings_finds_what_lacks_one() -> None:
    module = ModuleType("tensorplay.made_up")
    source = '''
import dataclasses
class Bare: ...
class Full:
    """Has one."""
    def method(self): ...
    @property
    def value(self): ...
    @classmethod
    def make(cls): ...
    def _private(self): ...
@dataclasses.dataclass
class Data:
    x: int
def function(): ...
def documented():
    """Has one."""
'''
    exec(source, vars(module))
    module.__all__ = ["Bare", "Data", "Full", "documented", "function"]
    assert sorted(_undocumented(module)) == [
        "Bare",
        "Data",
        "Full.make",
        "Full.method",
        "Full.value",
        "function",
    ]


@pytest.mark.parametrize("name", MODULES)
def test_enum_members_are_distinct(name: str) -> None:
    for value in vars(load(name)).values():
        if isinstance(value, type) and issubclass(value, enum.Enum) and value.__module__ == name:
            assert len(value.__members__) == len(list(value)), f"{value} has two names for one value"


def test_importing_everything_leaves_the_process_as_it_was() -> None:
    code = """
import importlib, logging, os, random, signal, sys, threading, warnings
import numpy, torch, torch.distributed
import torch.distributed.optim  # what it changes is torch's: our ZeRO derives from torch's class, as clients check it

def seen():
    return {
        "filters": list(warnings.filters),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "random": (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
        "environment": dict(os.environ),
        "group": torch.distributed.is_initialized(),
        "dtype": torch.get_default_dtype(),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "handlers": list(logging.getLogger().handlers),
        "running": threading.active_count(),
        "path": list(sys.path),
        "folder": os.getcwd(),
        "excepthook": sys.excepthook,
    }

before = seen()
for name in sys.argv[1:]:
    importlib.import_module(name)
after = seen()
changed = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
assert not changed, str(changed)[:3000]
"""
    # The command line is a program, nobody's import; rich draws from `random` when it is imported.
    names = [name for name in MODULES if not name.startswith(("tensorplay.integrations", "tensorplay.cli"))]
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
