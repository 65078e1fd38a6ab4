"""What the source-tree tests share: the modules of this package, as files, syntax trees and imported."""

import ast
import importlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import tensorplay

__all__ = ["REPOSITORY", "Source", "load", "sources"]

SOURCE = Path(tensorplay.__file__).parent
REPOSITORY = SOURCE.parent.parent
# Integrations import the library they are for; the development set leaves these out.
OPTIONAL = frozenset({"accelerate", "lightning", "pytorch_lightning", "transformers"})


@dataclass(frozen=True)
class Source:
    """One Python file of the package."""

    name: str
    path: Path
    tree: ast.Module
    is_package: bool


@cache
def sources() -> tuple[Source, ...]:
    """Every Python file under src/tensorplay, by module name."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found.append(Source(name, path, ast.parse(path.read_text(), str(path)), is_package))
    return tuple(found)


def load(name: str) -> ModuleType:
    """Import one of our modules; skip the test where that needs a library the development set leaves out."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in OPTIONAL:
            pytest.skip(f"{error.name} is not installed")
        raise
