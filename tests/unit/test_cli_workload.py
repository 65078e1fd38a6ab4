"""Workloads by name: sizes, the contract of a user's function, and what is refused."""

import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from tensorplay.cli.command import UsageError
from tensorplay.cli.workload import check_workload, default_loss, load_workload


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("own_workloads")
    monkeypatch.setitem(sys.modules, "own_workloads", module)
    return module


def test_the_mlp_has_25_million_parameters_and_its_sizes_can_be_changed() -> None:
    assert load_workload("mlp", 0, 2, 0).parameter_count() == 6 * (2048 * 2048 + 2048)
    small = load_workload("mlp:width=8,layers=2,batch=3", 0, 2, 0)
    assert small.parameter_count() == 2 * (8 * 8 + 8)
    assert next(small.endless()).shape == (3, 8)


@pytest.mark.parametrize("spec", ["mlp:width=16,layers=1", "gpt:tiny"])
def test_ranks_share_weights_and_have_batches_of_their_own(spec: str) -> None:
    before = torch.random.get_rng_state()
    first, second, again = (load_workload(spec, rank, 2, seed=3) for rank in (0, 1, 0))
    assert torch.equal(before, torch.random.get_rng_state())
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
    batches = [next(workload.endless()) for workload in (first, second, again)]
    mine, theirs, same = (batch if torch.is_tensor(batch) else batch[0] for batch in batches)
    assert not torch.equal(mine, theirs)
    assert torch.equal(mine, same)


def test_one_step_of_each_workload_lowers_the_loss_of_its_batch() -> None:
    for spec in ("mlp:width=16,layers=1", "gpt:tiny"):
        workload = load_workload(spec, 0, 1, 0)
        optimizer, batch = workload.optimizer(workload.model), next(workload.endless())
        before = workload.loss(workload.model, batch)
        before.backward()
        optimizer.step()
        assert workload.loss(workload.model, batch) < before


def test_a_function_gets_what_it_asks_for(own: ModuleType) -> None:
    seen: list[Any] = []

    def some(rank: int, seed: int) -> Any:
        seen.append((rank, seed))
        return nn.Linear(2, 1), [torch.zeros(1, 2)]

    def every(**given: int) -> Any:
        seen.append(given)
        return nn.Linear(2, 1), [torch.zeros(1, 2)], None, lambda model: torch.optim.Adam(model.parameters())

    own.some, own.every = some, every  # type: ignore[attr-defined]
    workload = load_workload("own_workloads:some", 1, 4, 7)
    assert isinstance(workload.optimizer(workload.model), torch.optim.SGD)
    workload = load_workload("own_workloads:every", 1, 4, 7)
    assert isinstance(workload.optimizer(workload.model), torch.optim.Adam)
    assert seen == [(1, 7), {"rank": 1, "world_size": 4, "seed": 7}]


def test_batches_begin_again_and_a_generator_must_not_end(own: ModuleType) -> None:
    model = nn.Linear(2, 1)
    own.listed = lambda: (model, [1, 2])  # type: ignore[attr-defined]
    own.empty = lambda: (model, [])  # type: ignore[attr-defined]
    own.once = lambda: (model, iter([1, 2]))  # type: ignore[attr-defined]
    listed = load_workload("own_workloads:listed", 0, 1, 0).endless()
    assert list(itertools.islice(listed, 5)) == [1, 2, 1, 2, 1]
    with pytest.raises(UsageError, match="batches of own_workloads:empty are empty"):
        next(load_workload("own_workloads:empty", 0, 1, 0).endless())
    with pytest.raises(UsageError, match="ended after 2 and can't be gone through again"):
        list(itertools.islice(load_workload("own_workloads:once", 0, 1, 0).endless(), 3))


def test_without_a_loss_a_batch_is_what_the_model_is_called_with() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, by: float) -> torch.Tensor:
            return x * by

    x = torch.tensor([1.0, 2.0])
    assert default_loss(Scaled(), (x, 2.0)) == 10.0  # mean of 4 and 16
    assert default_loss(Scaled(), {"x": x, "by": 1.0}) == 2.5
    assert default_loss(nn.Flatten(0), torch.tensor(-3.0)[None]) == 9.0
    scalar = nn.MSELoss()
    assert default_loss(scalar, [x, torch.zeros(2)]) == 2.5  # a scalar stays as it is
    with pytest.raises(UsageError, match="without a loss the model must return a tensor, got tuple"):
        default_loss(nn.LSTM(2, 2), torch.zeros(1, 1, 2))


MISTAKES = {
    "perceptron": r"--model must be mlp, mlp:width=N,layers=N,batch=N, gpt:SIZE, or your own as module:function; got",
    "mlp:depth=3": r"--model mlp has the settings width, layers, batch",
    "mlp:width=0": r"width of --model mlp must be an integer >= 1, got '0'",
    "gpt": r"--model gpt:SIZE must have a size of tiny, small, base, large, got ''",
    "no_such_module:f": r"got 'no_such_module:f' \(No module named 'no_such_module'\)",
    "math:no_such_function": r"has no attribute 'no_such_function'",
    "math:pi": r"--model math:pi must name a function, got float",
}


@pytest.mark.parametrize("spec", MISTAKES)
def test_a_wrong_name_is_told_before_a_model_is_made(spec: str) -> None:
    with pytest.raises(UsageError, match=MISTAKES[spec]):
        check_workload(spec)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (None, r"must return \(model, batches\), .* got NoneType"),
        (([], [1]), r"with an nn.Module first, got \(list, list\)"),
        ((nn.Linear(1, 1), 3), "must be iterable, got int"),
        ((nn.Linear(1, 1), [1], 3), "the loss that .* returned must be callable, got int"),
        ((nn.Linear(1, 1), [1], None, 3), "the optimizer that .* returned must be callable, got int"),
    ],
)
def test_a_wrong_answer_is_told(own: ModuleType, made: Any, told: str) -> None:
    own.make = lambda: made  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=told):
        load_workload("own_workloads:make", 0, 1, 0)


def test_the_current_folder_is_a_place_to_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_in_this_folder.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Linear(2, 1), [torch.zeros(1, 2)]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert load_workload("mine_in_this_folder:make", 0, 1, 0).parameter_count() == 3
