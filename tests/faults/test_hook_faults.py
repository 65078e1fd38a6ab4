"""Faults F1 to F18: registering, choosing the group, and correctness of hooks."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tensorplay as tp
from tensorplay.compression.codec import Context
from tensorplay.compression.quantize import AffineUint8
from tensorplay.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    known_hooks,
    register_ddp_comm_hook,
)
from tensorplay.distributed.algorithms.ddp_comm_hooks.compressed_hook import (
    CompressedHookState,
    compressed_hook,
)
from tensorplay.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from tensorplay.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from tensorplay.distributed.algorithms.ddp_comm_hooks.quantization_hooks import quantization_perchannel_hook
from tensorplay.testing import run_ranks

TorchDDP = torch.nn.parallel.DistributedDataParallel


def backward(ddp: nn.Module, rank: int) -> torch.Tensor:
    """One step whose gradient is rank + 1 everywhere; returns the averaged one."""
    ddp.zero_grad()
    (ddp(torch.ones(1, 40)).sum() * (rank + 1)).backward()
    gradient = next(ddp.parameters()).grad
    assert gradient is not None
    return gradient.clone()


class Callable_:
    def __call__(self, state: Any, what: Any) -> torch.Tensor:
        tensor: torch.Tensor = what.buffer()
        dist.all_reduce(tensor)
        return tensor.div_(dist.get_world_size())


def f1(rank: int, world_size: int) -> None:
    mean = (world_size + 1) / 2
    partial_hook = functools.partial(quantization_perchannel_hook, bucket_size=128)
    for wrap in (tp.nn.parallel.DistributedDataParallel, TorchDDP):
        for hook in (partial_hook, Callable_(), lambda s, b: b.buffer().fill_(mean)):
            ddp = wrap(nn.Linear(40, 40))
            handle = register_ddp_comm_hook(hook, ddp)
            torch.testing.assert_close(backward(ddp, rank), torch.full((40, 40), mean), rtol=1e-2, atol=0)
            assert handle.hook is hook


def test_f1_any_callable_registers() -> None:
    run_ranks(f1, 2)


def f2(rank: int, world_size: int) -> None:
    mean = (world_size + 1) / 2
    for hook in (
        bf16_compress_hook,
        bf16_compress_wrapper(allreduce_hook),
        fp16_compress_wrapper(allreduce_hook),
    ):
        for wrap in (tp.nn.parallel.DistributedDataParallel, TorchDDP):
            ddp = wrap(nn.Linear(40, 40))
            ddp.register_comm_hook(None, hook)
            torch.testing.assert_close(backward(ddp, rank), torch.full((40, 40), mean), rtol=1e-2, atol=0)


def test_f2_bf16_works_on_gloo() -> None:
    run_ranks(f2, 3)


def f3(rank: int, world_size: int) -> list[float]:
    groups = [dist.new_group([r]) for r in range(world_size)]
    seen = []
    for name in known_hooks():
        if name.startswith(("post_", "diloco")):
            continue
        ddp = tp.nn.parallel.DistributedDataParallel(nn.Linear(40, 40), process_group=groups[rank])
        register_ddp_comm_hook(name, ddp)
        gradient = backward(ddp, rank)
        assert torch.isfinite(gradient).all(), name
        seen.append(float(gradient.sum() / 1600))
        if name not in ("randomk", "topk", "int2"):  # those send a part of a constant gradient in one step
            assert abs(seen[-1] - (rank + 1)) < 0.1 * (rank + 1), (
                f"{name} averaged over other ranks: {seen[-1]}"
            )
    return seen


def test_f3_the_group_is_ddps_own() -> None:
    run_ranks(f3, 2)


def f4(rank: int, world_size: int) -> None:
    mean = (world_size + 1) / 2
    for wrap in (tp.nn.parallel.DistributedDataParallel, TorchDDP):
        ddp = wrap(nn.Linear(40, 40))
        handle = register_ddp_comm_hook(noop_hook, ddp)
        assert float(backward(ddp, rank).mean()) == rank + 1
        handle.replace(fp16_compress_hook)
        assert float(backward(ddp, rank).mean()) == mean
        register_ddp_comm_hook("int8", ddp)
        assert float(backward(ddp, rank).mean()) == pytest.approx(mean, rel=1e-2)
        handle.replace(noop_hook)
        assert float(backward(ddp, rank).mean()) == rank + 1
        handle.remove()
        assert float(backward(ddp, rank).mean()) == mean


def test_f4_hooks_can_be_swapped_and_removed() -> None:
    run_ranks(f4, 2)


def f5(rank: int, world_size: int) -> None:
    mean = (world_size + 1) / 2
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        for hook in (allreduce_hook, fp16_compress_hook, bf16_compress_hook):
            ddp = tp.nn.parallel.DistributedDataParallel(nn.Linear(40, 40))
            ddp.register_comm_hook(None, hook)
            assert float(backward(ddp, rank).mean()) == mean
        ddp = tp.nn.parallel.DistributedDataParallel(nn.Linear(40, 40))
        with pytest.raises(RuntimeError, match="optimize_ddp"):
            ddp.register_comm_hook(CompressedHookState(), compressed_hook)


def test_f5_the_python_reducer_gets_one_collective_or_an_error() -> None:
    run_ranks(f5, 2)


def f10(rank: int, world_size: int, member: DDPCommHookType) -> None:
    ddp = tp.nn.parallel.DistributedDataParallel(nn.Linear(40, 40))
    register_ddp_comm_hook(member, ddp)
    for _ in range(3):
        torch.testing.assert_close(
            backward(ddp, rank), torch.full((40, 40), (world_size + 1) / 2), rtol=1e-2, atol=0
        )


@pytest.mark.parametrize(
    "member", [DDPCommHookType.QUANTIZE_PER_TENSOR, DDPCommHookType.QUANTIZE_PER_CHANNEL]
)
def test_f10_quantization_hooks_work_on_gloo(member: DDPCommHookType) -> None:
    run_ranks(functools.partial(f10, member=member), 3)


def f12(rank: int, world_size: int) -> None:
    ddp = tp.nn.parallel.DistributedDataParallel(nn.Linear(40, 40))
    ddp.register_comm_hook(None, fp16_compress_hook)
    ddp.zero_grad()
    (ddp(torch.ones(1, 40)).sum() * 60000.0).backward()  # the sum of two would overflow float16
    gradient = next(ddp.parameters()).grad
    assert gradient is not None
    torch.testing.assert_close(gradient, torch.full((40, 40), 60000.0), rtol=1e-3, atol=0)


def test_f12_a_sum_does_not_overflow_where_the_mean_does_not() -> None:
    run_ranks(f12, 2)


def f14(rank: int, world_size: int) -> None:
    from tensorplay.compression.bucket import read_bucket

    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    ddp = tp.nn.parallel.DistributedDataParallel(model)
    shaped: dict[int, torch.Tensor] = {}

    def hook(state: Any, bucket: Any) -> torch.Tensor:
        for entry in read_bucket(bucket).slices:
            shaped[id(entry.key)] = entry.shaped().clone()
        return bucket.buffer()  # type: ignore[no-any-return]

    ddp.register_comm_hook(None, hook)
    image = torch.randn(2, 3, 6, 6)
    ddp(image).square().sum().backward()
    expected = torch.autograd.grad(model(image).square().sum(), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(shaped[id(parameter)], gradient)


def test_f14_channels_last_gradients_are_seen_in_their_own_order() -> None:
    run_ranks(f14, 2)


@pytest.mark.parametrize(
    "values",
    [
        torch.linspace(10, 11, 512),
        torch.full((512,), 0.3),
        torch.linspace(-3e30, 3e30, 512),
        torch.linspace(-2e-30, 1e-30, 512),
        torch.cat([torch.full((256,), 1e-3), torch.full((256,), 10.0)]),
    ],
    ids=["10..11", "constant", "huge", "tiny", "outlier"],
)
def test_f15_f16_any_range_comes_back_within_a_step(values: torch.Tensor) -> None:
    for group_size in (None, 256):
        codec = AffineUint8(group_size)
        back = codec.decompress(codec.compress(values, Context()), values.numel(), Context())
        for part, got in zip(values.split(group_size or 512), back.split(group_size or 512), strict=True):
            low, high = min(0.0, float(part.min())), max(0.0, float(part.max()))
            step = high / 255 - low / 255
            assert float((part - got).abs().max()) <= step * 1.001


def f18(rank: int, world_size: int) -> str:
    ddp = tp.nn.parallel.DistributedDataParallel(nn.Linear(40, 40))
    state = CompressedHookState("int8")
    ddp.register_comm_hook(state, compressed_hook)
    backward(ddp, rank)
    if rank == 0:

        def broken(*args: Any) -> Any:
            raise ValueError("no memory for 7 tensors")

        state.starts = broken  # type: ignore[method-assign]
    try:
        backward(ddp, rank)
    except Exception as error:
        return str(error)
    return "no error"


def test_f18_a_raising_hook_is_named_on_every_rank() -> None:
    first, *others = run_ranks(f18, 3, timeout_seconds=25)
    assert "no memory for 7 tensors" in first
    for text in others:
        assert "rank 0 failed: ValueError: no memory for 7 tensors" in text


def wrapped_at_every_step(rank: int, world_size: int) -> None:
    """A foreign hook of two rounds in a cast wrapper, several buckets: right at step 1 and after."""

    def foreign(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        assert buffer.dtype == torch.float16
        buffer.div_(world_size)
        dist.all_reduce(buffer)
        dist.all_reduce(buffer.div_(world_size))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 40))
    ddp = TorchDDP(model, bucket_cap_mb=0.001)
    ddp.register_comm_hook(None, fp16_compress_wrapper(foreign))
    for step in range(5):
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(step))
        expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        ddp.zero_grad()
        ddp(x).square().sum().backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.float32
            torch.testing.assert_close(parameter.grad, gradient, rtol=5e-3, atol=5e-3)


def test_wrappers_hold_at_every_step() -> None:
    run_ranks(wrapped_at_every_step, 2)


def test_wrapping_twice_and_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="one wrapper"):
        fp16_compress_wrapper(bf16_compress_wrapper(allreduce_hook))
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        register_ddp_comm_hook("int8", nn.Linear(2, 2))  # type: ignore[arg-type]
    from tensorplay.distributed.algorithms.ddp_comm_hooks import make_hook

    with pytest.raises(ValueError, match=r"known are .*allreduce"):
        make_hook("fp17_compress")


def identical_to_ddp(rank: int, world_size: int) -> None:
    results = []
    for hook in (None, allreduce_hook):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(40, 90), nn.Tanh(), nn.Linear(90, 7))
        ddp = tp.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.005)
        if hook:
            ddp.register_comm_hook(None, hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            x = torch.randn(6, 40, generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_allreduce_hook_is_bit_identical_to_ddp(world_size: int) -> None:
    run_ranks(identical_to_ddp, world_size)
