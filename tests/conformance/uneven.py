"""Uneven inputs for one hook: a Join block against the same training in which idle ranks send gradients of zero.

`check_uneven(attach, batches, …)` is what a hook has to pass. It knows nothing of the hook: whatever state the hook
keeps, a rank without data must act as if its gradient were zero, and all ranks must end bit-identical.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tensorplay.compression import participation
from tensorplay.distributed.algorithms.join import Join
from tensorplay.testing import run_ranks

UNEVEN_BATCHES = [(2, 4), (1, 2, 5), (0, 3)]
VARIANTS = ["plain", "no_sync", "batch_norm", "static_graph", "buckets", "unused", "bucket_view"]

Attach = Callable[[DistributedDataParallel], Any]


class Model(nn.Module):
    """Two layers, a norm in between, and a branch that only every third iteration uses.

    The weights have 1,280 elements: enough for hooks that leave small tensors uncompressed.
    """

    def __init__(self, variant: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(16, 80)
        self.norm = nn.BatchNorm1d(80) if variant == "batch_norm" else nn.Identity()
        self.second = nn.Linear(80, 16)
        self.branch = nn.Linear(80, 16) if variant == "unused" else None

    def forward(self, x: torch.Tensor, iteration: int) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.first(x)))
        y = self.second(hidden)
        if self.branch is not None and iteration % 3 == 1:
            y = y + self.branch(hidden)
        return y.square().mean()


def batch(rank: int, iteration: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + iteration)
    return torch.randn(5, 16, generator=generator)


def wrap(model: nn.Module, variant: str) -> DistributedDataParallel:
    return DistributedDataParallel(
        model,
        bucket_cap_mb=1e-4 if variant == "buckets" else 25,  # 100 bytes: one bucket a parameter
        find_unused_parameters=variant == "unused",
        gradient_as_bucket_view=variant == "bucket_view",
        static_graph=variant == "static_graph",
    )


def synchronizes(variant: str, iteration: int) -> bool:
    return variant != "no_sync" or iteration % 2 == 1


def train(
    rank: int,
    world_size: int,
    batches: tuple[int, ...],
    variant: str = "plain",
    divide_by_initial_world_size: bool = True,
    attach: Attach | None = None,
    mode: str = "join",
) -> dict[str, Any]:
    """Train on this rank's batches; returns what it ended with.

    Modes: "join": leave the loop when the batches end. "zeros": go on with gradients of zero, no Join.
    """
    model = wrap(Model(variant), variant)
    if attach is not None:
        attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    history: list[torch.Tensor] = []
    active: list[int] = []

    def step() -> None:
        optimizer.step()
        history.append(gradients(model))
        optimizer.zero_grad()

    def iterate(iteration: int, has_data: bool) -> None:
        averages = synchronizes(variant, iteration)
        with contextlib.nullcontext() if averages else model.no_sync():
            loss = model(batch(rank, iteration), iteration)
            (loss if has_data else loss * 0).backward()
        if averages:
            step()

    if mode == "join":
        with Join([model], divide_by_initial_world_size=divide_by_initial_world_size) as join:
            join.shadow(step, phase="backward")
            for iteration in range(batches[rank]):
                iterate(iteration, True)
                active.append(join.active_ranks)
    else:
        for iteration in range(max(batches)):
            if not divide_by_initial_world_size:
                participation.set_active(None, sum(iteration < count for count in batches))
            if iteration == batches[rank]:
                optimizer.zero_grad()  # what was accumulated but never averaged is lost when the data ends
            iterate(iteration, iteration < batches[rank])
        participation.set_active(None, None)
    return {
        "parameters": flat(model.module.parameters()),
        "momentum": flat(
            optimizer.state[p]["momentum_buffer"] for p in model.parameters() if p in optimizer.state
        ),
        "buffers": flat(b.double() for b in model.module.buffers()),
        "history": history,
        "active": active,
        "left_over": int(sum_of_ranks(rank)),
    }


def sum_of_ranks(rank: int) -> float:
    """A collective after the block: wrong as soon as a rank has one too many or too few."""
    total = torch.tensor([10.0 + rank])
    dist.all_reduce(total)
    return total.item()


def gradients(model: nn.Module) -> torch.Tensor:
    return flat(p.grad if p.grad is not None else torch.full_like(p, torch.nan) for p in model.parameters())


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([torch.zeros(0), *[t.detach().flatten().float() for t in tensors]])


def check_uneven(
    attach: Attach | None,
    batches: tuple[int, ...],
    variant: str = "plain",
    divide_by_initial_world_size: bool = True,
) -> None:
    """Run a hook in a Join block and compare.

    1. All ranks end with bit-identical parameters, optimizer state, buffers and averaged gradients at every step.
    2. They are what the same training gives when idle ranks run on with a loss of zero.
    """
    arguments = {
        "batches": batches,
        "variant": variant,
        "divide_by_initial_world_size": divide_by_initial_world_size,
        "attach": attach,
    }
    joined = run_ranks(partial(train, **arguments), len(batches))
    check_alike(joined, batches, variant)
    if variant == "static_graph" and batches[0] < 2:
        return  # a static graph's second backward on rank 0 decides DDP's buckets; without it their order differs
    zeros = run_ranks(partial(train, **arguments, mode="zeros"), len(batches))
    assert len(joined[0]["history"]) == len(zeros[0]["history"])
    for step, (got, expected) in enumerate(zip(joined[0]["history"], zeros[0]["history"], strict=True)):
        assert torch.equal(got.nan_to_num(7), expected.nan_to_num(7)), f"step {step}: {got} != {expected}"
    assert torch.equal(joined[0]["parameters"], zeros[0]["parameters"])


def attach_named(model: DistributedDataParallel, hook_name: str) -> None:
    from tensorplay.distributed.algorithms.ddp_comm_hooks.register import register_ddp_comm_hook

    register_ddp_comm_hook(hook_name, model)


def run_uneven(
    hook_name: str,
    batches: tuple[int, ...],
    variant: str = "plain",
    divide_by_initial_world_size: bool = True,
) -> None:
    """The uneven part of the conformance suite for one hook of the registry."""
    check_uneven(partial(attach_named, hook_name=hook_name), batches, variant, divide_by_initial_world_size)


def check_alike(results: list[dict[str, Any]], batches: tuple[int, ...], variant: str) -> None:
    """All ranks hold the same, saw the right number of active ranks, and are in step after the block."""
    world_size = len(batches)
    steps = sum(synchronizes(variant, iteration) for iteration in range(max(batches)))
    for rank, result in enumerate(results):
        assert result["left_over"] == 10 * world_size + sum(range(world_size))
        assert result["active"] == [sum(i < count for count in batches) for i in range(batches[rank])]
        assert len(result["history"]) == steps
        for key in ("parameters", "momentum", "buffers"):
            assert result[key].isfinite().all(), f"rank {rank}: {key} is not finite"
            assert torch.equal(result[key], results[0][key]), f"{key} of rank {rank} differs from rank 0's"
        for got, expected in zip(result["history"], results[0]["history"], strict=True):
            assert torch.equal(got.nan_to_num(7), expected.nan_to_num(7)), (
                f"gradients of rank {rank} differ from rank 0's"
            )
