"""Where a name stands in for one of torch's, its parameters are named and passed the same.

Every module of ours is laid beside the module of torch with the same path below `torch`, so a new front door is
checked without being listed. Ours may take more: further parameters after torch's, with defaults.
"""

import enum
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.unit.surface import load, sources

POSSIBLE_TWINS = ("tensorplay.distributed.", "tensorplay.nn.parallel.")
# Found without fail: if the walk below stopped seeing them, it would check nothing.
KNOWN = {
    "tensorplay.distributed.algorithms.join.Join",
    "tensorplay.distributed.algorithms.model_averaging.averagers.PeriodicModelAverager",
    "tensorplay.distributed.optim.post_localSGD_optimizer.PostLocalSGDOptimizer",
    "tensorplay.nn.parallel.distributed.DistributedDataParallel",
}
KINDS_OF_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def twin_of(name: str) -> ModuleType | None:
    twin = name.replace("tensorplay", "torch", 1)
    try:
        return importlib.import_module(twin)
    except ModuleNotFoundError as error:
        if error.name is not None and twin.startswith(error.name):
            return None
        raise


def shared_names(name: str) -> Iterator[tuple[str, Any, Any]]:
    """Public names of our module that torch defines in the module of the same path."""
    twin = twin_of(name)
    if twin is None:
        return
    module = load(name)
    for entry in module.__all__:
        theirs = vars(twin).get(entry)
        if getattr(theirs, "__module__", None) == twin.__name__:
            yield entry, getattr(module, entry), theirs


def differences(ours: Callable[..., Any], theirs: Callable[..., Any]) -> list[str]:
    """How the parameters of `ours` keep a call that is right for `theirs` from working."""
    own = list(inspect.signature(ours).parameters.values())
    asked = list(inspect.signature(theirs).parameters.values())
    found = []
    own_plain = [parameter for parameter in own if parameter.kind not in KINDS_OF_REST]
    asked_plain = [parameter for parameter in asked if parameter.kind not in KINDS_OF_REST]
    own_kinds = {parameter.kind for parameter in own}
    for place, parameter in enumerate(asked_plain):
        match = own_plain[place] if place < len(own_plain) else None
        if match is not None and parameter.name.startswith("_") and match.kind == parameter.kind:
            continue  # nobody passes torch's by name
        if match is None or match.name != parameter.name:
            found.append(f"parameter {place} is {match and match.name!r}, torch's is {parameter.name!r}")
        elif match.kind != parameter.kind:
            found.append(
                f"{parameter.name} is {match.kind.description}, torch's is {parameter.kind.description}"
            )
        elif match.default is inspect.Parameter.empty and parameter.default is not inspect.Parameter.empty:
            found.append(f"{parameter.name} has no default, torch's has {parameter.default!r}")
    for match in own_plain[len(asked_plain) :]:
        if match.default is inspect.Parameter.empty:
            found.append(f"{match.name} comes after torch's parameters without a default")
    for parameter in asked:
        if parameter.kind in KINDS_OF_REST and parameter.kind not in own_kinds:
            found.append(f"*{parameter.name} is missing")
    return found


def problems(ours: Any, theirs: Any) -> list[str]:
    if inspect.isclass(theirs) and issubclass(theirs, enum.Enum):
        return []  # members arrive with their hooks
    if not inspect.isclass(theirs):
        return differences(ours, theirs) if callable(theirs) else []
    if not inspect.isclass(ours):
        return ["is not a class, torch's is"]
    found = [f"__init__: {text}" for text in differences(ours.__init__, theirs.__init__)]
    for method, their_member in inspect.getmembers(theirs):
        if method.startswith("_") or not getattr(their_member, "__module__", "").startswith(
            "torch.distributed"
        ):
            continue
        if not hasattr(ours, method):
            found.append(f"has no {method}")
        elif callable(their_member):
            found += [f"{method}: {text}" for text in differences(getattr(ours, method), their_member)]
    return found


CANDIDATES = [source.name for source in sources() if source.name.startswith(POSSIBLE_TWINS)]


@pytest.mark.parametrize("name", CANDIDATES)
def test_parameters_are_torchs(name: str) -> None:
    assert {
        entry: found for entry, ours, theirs in shared_names(name) if (found := problems(ours, theirs))
    } == {}


def test_names_that_stand_for_torchs_are_found() -> None:
    found = {f"{name}.{entry}" for name in CANDIDATES for entry, _, _ in shared_names(name)}
    assert found >= KNOWN


def test_init_process_group() -> None:
    import torch.distributed

    import tensorplay.distributed

    ours = inspect.signature(tensorplay.distributed.init_process_group)
    assert ours == inspect.signature(torch.distributed.init_process_group)


def test_the_check_finds_differences() -> None:
    def theirs(_: object, bucket: int, size: int = 8, **rest: int) -> None: ...

    def same(state: object, bucket: int, size: int = 4, more: int = 2, **rest: int) -> None: ...

    def renamed(state: object, grad: int, size: int = 8, **rest: int) -> None: ...

    def keyword(state: object, bucket: int, *, size: int = 8, **rest: int) -> None: ...

    def demanding(state: object, bucket: int, size: int, more: int) -> None: ...

    assert differences(same, theirs) == []
    assert differences(renamed, theirs) == ["parameter 1 is 'grad', torch's is 'bucket'"]
    assert differences(keyword, theirs) == ["size is keyword-only, torch's is positional or keyword"]
    assert differences(demanding, theirs) == [
        "size has no default, torch's has 8",
        "more comes after torch's parameters without a default",
        "*rest is missing",
    ]
