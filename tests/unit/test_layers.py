"""Arrows point down only: cli, integrations > advisor, telemetry > distributed, nn.parallel > compression > torch."""

import ast
import importlib.util
import sys
from collections.abc import Iterator

import pytest

from tests.unit.surface import REPOSITORY, Source, sources

TOP = 4
# The first match counts. `testing` stands outside: tests use it, and the command line may.
LAYERS = (
    ("tensorplay.cli", TOP),
    ("tensorplay.integrations", TOP),
    ("tensorplay.advisor", 3),
    ("tensorplay.telemetry", 3),
    ("tensorplay.nn.parallel", 2),
    ("tensorplay.distributed", 2),
    ("tensorplay.compression", 1),
    # PyTorch under our name: part of the lowest layer, which is torch.
    ("tensorplay.nn", 0),
    ("tensorplay._alias", 0),
)
TESTING = "tensorplay.testing"
MAY_USE_TESTING = ("tensorplay.testing", "tensorplay.cli")
OUTSIDE = ("torch", "numpy")
# Where the libraries of the optional extras may be imported.
OPTIONAL_MAY_BE_USED_IN = (
    "tensorplay.cli",
    "tensorplay.integrations",
    "tensorplay.telemetry",
    "tensorplay.advisor",
)


def layer_of(module: str) -> int | None:
    for prefix, layer in LAYERS:
        if module == prefix or module.startswith(f"{prefix}."):
            return layer
    return None


def imported(source: Source) -> Iterator[tuple[int, str]]:
    """Line and full name of everything a file imports, anywhere in it: relative, inside functions, by import_module."""
    package = source.name if source.is_package else source.name.rpartition(".")[0]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            target = node.args[0] if node.args else None
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                yield node.lineno, importlib.util.resolve_name(target.value, package)


def problems(source: Source) -> list[str]:
    found = []
    own_layer = layer_of(source.name)
    for line, name in imported(source):
        at = f"{source.path.relative_to(REPOSITORY)}:{line}"
        if name.partition(".")[0] != "tensorplay":
            continue
        if name == TESTING or name.startswith(f"{TESTING}."):
            if not source.name.startswith(MAY_USE_TESTING) and not _for_a_type_checker(source, line):
                found.append(f"{at} imports {name}: only tests and the command line use it")
            continue
        if source.name.startswith(TESTING):
            continue
        layer = layer_of(name)
        if (
            own_layer is None
        ):  # tensorplay/__init__.py stands for torch and names the layers to a type checker alone
            if layer != 0 and not _for_a_type_checker(source, line):
                found.append(f"{at} imports {name}, which lies above torch's names")
        elif layer is None and own_layer < TOP:
            found.append(f"{at} imports {name}: say torch for torch's names, and a full path for ours")
        elif (layer or 0) > own_layer and not (own_layer == 0 and _for_a_type_checker(source, line)):
            found.append(f"{at} imports {name}, which lies above it")
    return found


def _for_a_type_checker(source: Source, line: int) -> bool:
    """Only the packages that stand for torch's may look up, and only so that a type checker knows their parts."""
    if layer_of(source.name) not in (None, 0):
        return False
    return any(
        isinstance(node, ast.If)
        and ast.unparse(node.test) == "TYPE_CHECKING"
        and node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0)
        for node in source.tree.body
    )


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.name)
def test_arrows_point_down(source: Source) -> None:
    assert problems(source) == []


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.name)
def test_every_file_lies_in_a_layer(source: Source) -> None:
    assert source.name == "tensorplay" or source.name.startswith(TESTING) or layer_of(source.name) is not None


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.name)
def test_nothing_of_torchs_algorithms_is_passed_on(source: Source) -> None:
    """They may be subclassed, where clients check for torch's class, but never handed out as ours."""
    declared = _declared_names(source)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            ("torch.distributed.algorithms", "torch.distributed.optim")
        ):
            given = {alias.asname or alias.name for alias in node.names}
            assert given & declared == set(), f"{source.path}:{node.lineno}"
            assert "*" not in given, f"{source.path}:{node.lineno}"


def _declared_names(source: Source) -> set[str]:
    for node in source.tree.body:
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "__all__"
            and isinstance(node.value, ast.List)
        ):
            return {str(ast.literal_eval(entry)) for entry in node.value.elts}
    return set()


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.name)
def test_lower_layers_need_torch_and_numpy_alone(source: Source) -> None:
    if source.name.startswith(OPTIONAL_MAY_BE_USED_IN):
        return
    foreign = {
        name
        for _, name in imported(source)
        if name.partition(".")[0] not in {*OUTSIDE, "tensorplay", *sys.stdlib_module_names}
    }
    assert foreign == set()


@pytest.mark.parametrize(
    ("name", "code", "found"),
    [
        ("tensorplay.compression.codec", "import tensorplay.distributed.algorithms", 1),
        ("tensorplay.compression.codec", "from tensorplay import distributed", 1),
        ("tensorplay.compression.codec", "def f():\n    from ..telemetry import trace", 1),
        (
            "tensorplay.compression.codec",
            "from importlib import import_module\nimport_module('tensorplay.cli')",
            1,
        ),
        ("tensorplay.compression.codec", "from tensorplay.nn.parallel import DistributedDataParallel", 1),
        ("tensorplay.compression.codec", "from tensorplay.testing import run_ranks", 1),
        ("tensorplay.compression.codec", "import tensorplay as tp", 1),
        (
            "tensorplay.compression.codec",
            "if TYPE_CHECKING:\n    from tensorplay.distributed import algorithms",
            1,
        ),
        (
            "tensorplay.compression.codec",
            "from . import driver\nfrom tensorplay.compression import bucket",
            0,
        ),
        ("tensorplay.distributed.algorithms.join", "from tensorplay.compression import participation", 0),
        ("tensorplay.distributed.algorithms.join", "from tensorplay.nn.parallel import distributed", 0),
        ("tensorplay.distributed.algorithms.join", "import tensorplay.advisor", 1),
        ("tensorplay.telemetry.trace", "from tensorplay.cli import main", 1),
        ("tensorplay.cli.demo", "import tensorplay", 0),
        ("tensorplay.cli.demo", "from tensorplay.testing import run_ranks\nimport tensorplay.advisor", 0),
        ("tensorplay.nn", "if TYPE_CHECKING:\n    from tensorplay.nn import parallel", 0),
        ("tensorplay.nn", "from tensorplay.nn import parallel", 1),
    ],
)
def test_the_check_sees_every_kind_of_import(name: str, code: str, found: int) -> None:
    template = sources()[0]
    source = Source(name, template.path, ast.parse(code), is_package=name == "tensorplay.nn")
    assert len(problems(source)) == found, problems(source)
