"""Faults F6 to F9, F11, F12, F17, F20 and F21, as users of PowerSGD meet them."""

import io
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tensorplay as tp
from tensorplay.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_wrapper,
    fp16_compress_wrapper,
)
from tensorplay.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    batched_powerSGD_hook,
    powerSGD_hook,
)
from tensorplay.testing import run_ranks

DDP = tp.nn.parallel.DistributedDataParallel
TorchDDP = nn.parallel.DistributedDataParallel
HOOKS = {
    "layerwise": (powerSGD_hook, {}),
    "same_shape": (batched_powerSGD_hook, {}),
    "bucket": (batched_powerSGD_hook, {"batched_layout": "bucket"}),
}
HOOK = pytest.mark.parametrize("hook_name", HOOKS)


def mlp() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def data(rank: int, step: int, rows: int = 8, width: int = 64) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(100 * step + rank))


def equal_everywhere(model: nn.Module) -> None:
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    others = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(others, flat)
    for other in others:
        assert torch.equal(other, flat)


def finite(model: nn.Module) -> bool:
    return all(
        bool(torch.isfinite(t).all())
        for p in model.parameters()
        for t in (p, p.grad if p.grad is not None else p)
    )


def f6(rank: int, world_size: int, steps: int, hook_name: str) -> None:
    hook, options = HOOKS[hook_name]
    model = mlp()
    ddp = TorchDDP(model, bucket_cap_mb=0.001)  # plain torch DDP, one parameter or two a bucket
    ddp.register_comm_hook(PowerSGDState(start_powerSGD_iter=2, **options), hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        ddp(data(rank, step)).square().mean().backward()
        optimizer.step()
    assert finite(model)
    equal_everywhere(model)


@pytest.mark.parametrize(("world_size", "steps"), [(2, 500), (3, 200), (8, 20)])
def test_f6_many_buckets_never_hang(world_size: int, steps: int) -> None:
    run_ranks(partial(f6, steps=steps, hook_name="layerwise"), world_size, timeout_seconds=120)


@pytest.mark.soak
@HOOK
@pytest.mark.parametrize("world_size", range(2, 9))
@pytest.mark.timeout(900)
def test_f6_soak(world_size: int, hook_name: str) -> None:
    for _ in range(2):
        run_ranks(partial(f6, steps=500, hook_name=hook_name), world_size, timeout_seconds=400)


class DeadThenAlive(nn.Module):
    """A branch whose gradient is exactly zero until it is switched on; a LoRA pair with B = 0 has one in A."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(32, 32)
        self.branch = nn.Linear(32, 32)
        self.a = nn.Parameter(torch.randn(8, 32) / 6)
        self.b = nn.Parameter(torch.zeros(32, 8))
        self.to(dtype)

    def forward(self, x: torch.Tensor, gate: float) -> torch.Tensor:
        return self.base(x) + gate * self.branch(x) + x @ self.a.t() @ self.b.t()


def f7(rank: int, world_size: int, hook_name: str, low_rank: int, dtype: torch.dtype) -> None:
    hook, options = HOOKS[hook_name]
    model = DeadThenAlive(dtype)
    ddp = DDP(model)
    state = PowerSGDState(
        matrix_approximation_rank=low_rank, start_powerSGD_iter=2, min_compression_rate=1, **options
    )
    ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start, first_a = model.branch.weight.detach().clone(), model.a.detach().clone()
    for step in range(14):
        optimizer.zero_grad()
        x = data(rank, step, width=32).to(dtype)
        ddp(x, float(step >= 7)).sub(x).square().mean().backward()
        optimizer.step()
        assert finite(model), f"step {step}"
        if step == 6 and hook_name == "layerwise":  # a shared factor may carry others' noise into it
            assert torch.equal(model.branch.weight, start)
    assert not torch.equal(model.branch.weight, start), "the layer must learn again"
    assert not torch.equal(model.a, first_a)
    equal_everywhere(model)


@HOOK
@pytest.mark.parametrize("low_rank", [1, 2, 4])
def test_f7_a_zero_gradient_is_no_end(hook_name: str, low_rank: int) -> None:
    for dtype in (torch.float32, torch.bfloat16) if low_rank == 1 else (torch.float32,):
        run_ranks(partial(f7, hook_name=hook_name, low_rank=low_rank, dtype=dtype), 2)


def f8(rank: int, world_size: int, hook_name: str, value: float) -> None:
    hook, options = HOOKS[hook_name]
    model = mlp()
    ddp = DDP(model, bucket_cap_mb=0.001)
    state = PowerSGDState(start_powerSGD_iter=2, **options)
    ddp.register_comm_hook(state, hook)
    good: dict[str, dict[str, torch.Tensor]] = {}
    for step in range(8):
        x = data(rank, step)
        if step == 4:
            good = state.state_dict()["tensors"]
            if rank == 0:
                x *= value
        ddp.zero_grad()
        ddp(x).square().mean().backward()
        bad = torch.tensor([float(not torch.isfinite(p.grad).all()) for p in model.parameters()])  # type: ignore[arg-type]
        everyone = [torch.empty_like(bad) for _ in range(world_size)]
        dist.all_gather(everyone, bad)
        for other in everyone:
            assert torch.equal(other, bad)
        assert bool(bad.any()) == (step == 4), f"step {step}"
        if step == 4:
            now = state.state_dict()["tensors"]
            for name, entry in good.items():
                for kind, tensor in entry.items():
                    if bad[[n for n, _ in model.named_parameters()].index(name)]:
                        assert torch.equal(now[name][kind], tensor), f"{kind} of {name}"
        for entry in state.memory.by_name().values():
            assert all(bool(torch.isfinite(t).all()) for t in entry.values())


@HOOK
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_f8_an_inf_is_forgotten(hook_name: str, value: float) -> None:
    run_ranks(partial(f8, hook_name=hook_name, value=value), 2)


def f9(rank: int, world_size: int, layout: str) -> float:
    torch.manual_seed(0)
    ddp = TorchDDP(nn.Linear(64, 64))
    ddp.register_comm_hook(PowerSGDState(start_powerSGD_iter=2, batched_layout=layout), batched_powerSGD_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    losses = []
    for step in range(30):
        optimizer.zero_grad()
        x = data(rank, step)
        loss = (ddp(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    equal_everywhere(ddp)
    return losses[-1]


@pytest.mark.parametrize("layout", ["same_shape", "bucket"])
def test_f9_the_batched_hook_works(layout: str) -> None:
    run_ranks(partial(f9, layout=layout), 2)


def f11(rank: int, world_size: int) -> None:
    """Saved with three buckets, loaded into a DDP that still has one: each tensor is its parameter's."""

    def fresh() -> tuple[nn.Module, Any, PowerSGDState]:
        model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 80), nn.Linear(80, 64))
        ddp = DDP(model, bucket_cap_mb=0.001)
        state = PowerSGDState(start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook)
        return model, ddp, state

    torch.manual_seed(0)
    model, ddp, state = fresh()
    for step in range(5):
        ddp(data(rank, step)).square().mean().backward()
    saved = state.state_dict()
    assert set(saved["tensors"]) == {"0.weight", "1.weight", "2.weight"}
    model2, ddp2, state2 = fresh()
    model2.load_state_dict(model.state_dict())
    state2.load_state_dict(saved)
    results = []
    for one in (ddp, ddp2):
        one.zero_grad()
        one(data(rank, 5)).square().mean().backward()
        results.append([p.grad.clone() for p in one.parameters() if p.grad is not None])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_f11_state_belongs_to_parameters() -> None:
    run_ranks(f11, 2)


def f12(rank: int, world_size: int, wrapper: Any, factor: float) -> None:
    torch.manual_seed(0)
    ddp = DDP(nn.Linear(256, 256))
    ddp.register_comm_hook(PowerSGDState(start_powerSGD_iter=0), wrapper(powerSGD_hook))
    for step in range(4):
        ddp.zero_grad()
        x = data(rank, step, width=256)
        (ddp(x).square().mean() * factor).backward()
        for p in ddp.parameters():
            assert p.grad is not None
            assert torch.isfinite(p.grad).all()
            assert p.grad.abs().max() > 0


@pytest.mark.parametrize("wrapper", [fp16_compress_wrapper, bf16_compress_wrapper])
@pytest.mark.parametrize("factor", [1e3, 1e6, 1e-6])
def test_f12_half_precision_factors_do_not_overflow(wrapper: Any, factor: float) -> None:
    run_ranks(partial(f12, wrapper=wrapper, factor=factor), 2)


def f17(rank: int, world_size: int) -> list[int]:
    ddp = DDP(mlp())
    state = PowerSGDState(start_powerSGD_iter=3)
    ddp.register_comm_hook(state, powerSGD_hook)
    seen = []
    for step in range(3):
        for micro in range(2):
            ddp(data(rank, 2 * step + micro)).sum().backward()
        state.step()
        seen.append(state.iter)
    assert state.compression_stats() == (0, 0, 0), "still in the warm-up of three optimizer steps"
    return seen


def test_f17_optimizer_steps_can_be_counted() -> None:
    assert run_ranks(f17, 2)[0] == [1, 2, 3]
    assert "every backward pass" in (PowerSGDState.__doc__ or "")


def f20(rank: int, world_size: int) -> None:
    ddp = DDP(mlp())
    state = PowerSGDState(start_powerSGD_iter=0)
    ddp.register_comm_hook(state, powerSGD_hook)
    for step in range(2):
        ddp(data(rank, step)).sum().backward()
    file = io.BytesIO()
    torch.save({"state": state.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    other = PowerSGDState(start_powerSGD_iter=0)
    DDP(mlp()).register_comm_hook(other, powerSGD_hook)
    other.load_state_dict(loaded["state"])
    assert other.iter == 2
    assert other.compression_stats() == state.compression_stats()


def test_f20_states_load_by_default() -> None:
    run_ranks(f20, 2)


def f21(rank: int, world_size: int) -> None:
    ddp = DDP(mlp())
    state = PowerSGDState(start_powerSGD_iter=0)
    ddp.register_comm_hook(state, powerSGD_hook)
    ddp(data(rank, 0)).square().sum().backward()
    states: list[Any] = [None] * world_size
    dist.all_gather_object(states, state.state_dict())
    mine, other = states[rank], states[1 - rank]
    assert not torch.equal(mine["tensors"]["0.weight"]["residual"], other["tensors"]["0.weight"]["residual"])
    state.load_state_dict(mine)
    with pytest.raises(ValueError, match=f"the state is rank {1 - rank}'s, this is rank {rank}"):
        state.load_state_dict(other)
    other_rank = PowerSGDState(matrix_approximation_rank=2)
    with pytest.raises(ValueError, match="matrix_approximation_rank: saved 1, here 2"):
        other_rank.load_state_dict(mine)


def test_f21_residuals_are_each_ranks_own() -> None:
    run_ranks(f21, 2)
