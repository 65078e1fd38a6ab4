"""State of codec hooks: refused where it doesn't belong, shared out over another number of ranks, bounded in memory."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tensorplay as tp
from tensorplay.compression.plan import owned_ranges
from tensorplay.distributed.algorithms.ddp_comm_hooks.compressed_hook import (
    CompressedHookState,
    compressed_hook,
)
from tensorplay.testing import run_ranks


def trained(rank: int, world_size: int, steps: int = 3, route: str = "auto", **settings: Any) -> Any:
    """A state and the module it belongs to, which must live as long."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 70), nn.Linear(70, 30))
    ddp = tp.nn.parallel.DistributedDataParallel(model)
    state = CompressedHookState("int4", route=route, **settings)
    ddp.register_comm_hook(state, compressed_hook)
    for step in range(steps):
        x = torch.randn(4, 50, generator=torch.Generator().manual_seed(10 * step + rank))
        ddp(x).square().mean().backward()
    return state, ddp


def saved_state(rank: int, world_size: int, route: str) -> Any:
    state, _ddp = trained(rank, world_size, route=route)
    return state.state_dict()


def total(states: list[Any]) -> dict[str, torch.Tensor]:
    """Sum over the ranks of what is owed, second residuals counted once a rank."""
    sums: dict[str, torch.Tensor] = {}
    for state in states:
        for name, entry in state["tensors"].items():
            owed = entry["residual"].double()
            at = 0
            if "owner_residual" in entry:
                for start, length in owned_ranges(owed.numel(), 128, state["world_size"], state["rank"]):
                    owed[start : start + length] += (
                        state["world_size"] * entry["owner_residual"][at : at + length]
                    )
                    at += length
            sums[name] = sums.get(name, 0) + owed
    return sums


def load_all(rank: int, world_size: int, states: list[Any], route: str) -> Any:
    state, _ddp = trained(rank, world_size, steps=0, route=route)
    state.load_state_dict(states)
    return state.state_dict()


@pytest.mark.parametrize("route", ["gather", "two-shot"])
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3), (3, 3)])
def test_a_changed_world_size_keeps_the_sum_of_residuals(route: str, before: int, after: int) -> None:
    states = run_ranks(partial(saved_state, route=route), before)
    loaded = run_ranks(partial(load_all, states=states, route=route), after)
    old, new = total(states), total(loaded)
    assert old.keys() == new.keys()
    assert any(float(tensor.abs().max()) > 0 for tensor in old.values())
    for name in old:
        torch.testing.assert_close(new[name], old[name], rtol=1e-5, atol=1e-7)
    assert [state["iteration"] for state in loaded] == [3] * after


def refusals(rank: int, world_size: int) -> list[str]:
    state, _ddp = trained(rank, world_size)
    good = state.state_dict()
    texts = []
    for change in (
        {"rank": 1 - rank},
        {"world_size": 5},
        {"kind": "PowerSGDState"},
        {"config": {**good["config"], "codec": "int8"}},
        {"tensors": {"nowhere.weight": {"residual": torch.zeros(3)}}},
        {"format": "something else"},
    ):
        with pytest.raises(ValueError, match=r".") as error:
            state.load_state_dict({**good, **change})
        texts.append(str(error.value))
    # A setting that was saved once and no longer is one does no harm.
    state.load_state_dict({**good, "config": {**good["config"], "block_elements": 1 << 19}})
    with pytest.raises(ValueError, match="missing"):
        state.load_state_dict([good])
    plain = torch.nn.parallel.DistributedDataParallel(nn.Linear(50, 50))
    bare = CompressedHookState("int8")
    plain.register_comm_hook(bare, compressed_hook)
    plain(torch.ones(1, 50)).sum().backward()
    with pytest.raises(RuntimeError, match=r"bind\(model\)"):
        bare.state_dict()
    bare.bind(plain)
    assert sorted(bare.state_dict()["tensors"]) == ["weight"]
    return texts


def test_a_state_that_does_not_belong_is_refused_with_what_differs() -> None:
    for texts in run_ranks(refusals, 2):
        for text, expected in zip(
            texts,
            ["rank", "5 ranks", "PowerSGDState", "codec: saved 'int8'", "nowhere.weight", "something else"],
            strict=True,
        ):
            assert expected in text


def memory(rank: int, world_size: int, codec: str) -> tuple[int, int]:
    """Bytes of scratch after two steps of a 4 M parameter layer, and bytes of its bucket."""
    model = nn.Linear(2048, 2048, bias=False)
    ddp = tp.nn.parallel.DistributedDataParallel(model)
    state = CompressedHookState(codec)
    ddp.register_comm_hook(state, compressed_hook)
    for _ in range(2):
        ddp(torch.ones(1, 2048)).sum().backward()
    assert state._lane is not None
    return state._lane[2].scratch_bytes(), 4 * 2048 * 2048


@pytest.mark.parametrize("codec", ["int8", "int4", "sign"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_scratch_is_bounded(codec: str, world_size: int) -> None:
    for scratch_bytes, bucket_bytes in run_ranks(partial(memory, codec=codec), world_size):
        assert scratch_bytes <= 2 * bucket_bytes


def exempted(rank: int, world_size: int) -> None:
    """Exempt, small and early tensors travel uncompressed: their mean is exact."""
    model = nn.Sequential(nn.Linear(50, 70), nn.Linear(70, 30))
    ddp = tp.nn.parallel.DistributedDataParallel(model)
    state = CompressedHookState("sign", start_iter=1, exempt=lambda name, shape: name == "0.weight")
    ddp.register_comm_hook(state, compressed_hook)
    for step in range(3):
        x = torch.randn(4, 50, generator=torch.Generator().manual_seed(step))
        exact = dict(
            zip(
                dict(model.named_parameters()),
                torch.autograd.grad(model(x).square().sum(), list(model.parameters())),
                strict=True,
            )
        )
        ddp.zero_grad()
        ddp(x).square().sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            if step >= 1 and name == "1.weight":
                assert not torch.allclose(parameter.grad, exact[name], rtol=0.1)
            else:
                torch.testing.assert_close(parameter.grad, exact[name])


def test_policies_say_what_is_compressed() -> None:
    run_ranks(exempted, 2)


def test_settings_are_checked() -> None:
    for settings, text in (
        ({"codec": "int9"}, "int9"),
        ({"route": "ring"}, "route must be one of"),
        ({"start_iter": -1}, "start_iter must be >= 0, got -1"),
        ({"min_elements": -5}, "min_elements must be >= 0, got -5"),
        ({"codec": "int8", "route": "sum"}, "can be added"),
        ({"route": "gather", "second_codec": "int8"}, "second_codec needs"),
    ):
        with pytest.raises(ValueError, match=text):
            CompressedHookState(**settings)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="exempt must be callable"):
        CompressedHookState(exempt="bias")  # type: ignore[arg-type]


def mean_of_many(rank: int, world_size: int) -> float:
    """Relative error of the mean of 600 results, two stochastic roundings each, of one gradient."""
    model = nn.Linear(64, 64, bias=False)
    ddp = tp.nn.parallel.DistributedDataParallel(model)
    state = CompressedHookState("int4:rounding=stochastic", error_feedback=False, route="two-shot")
    ddp.register_comm_hook(state, compressed_hook)
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    exact = torch.outer(x[0], x[0]).double()
    total = torch.zeros_like(exact)
    for _ in range(600):
        model.zero_grad()
        (ddp(x) * x).sum().backward()
        assert model.weight.grad is not None
        total += model.weight.grad.double()
    return float((total / 600 - exact).norm() / exact.norm())


def test_the_two_roundings_draw_independently() -> None:
    """With one draw for both, the error of the mean stays near 0.026; independent draws average out to 0.010."""
    assert max(run_ranks(mean_of_many, 3)) < 0.015
