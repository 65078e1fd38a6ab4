"""What every hook has to pass, as functions that run on ranks; test_hooks.py runs them over the registry."""

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tensorplay as tp
from tensorplay.distributed.algorithms.ddp_comm_hooks import make_hook


#: Hooks that run the suite: "noop" exchanges nothing, and post-local SGD keeps replicas apart on purpose.
def hook_names() -> list[str]:
    from tensorplay.distributed.algorithms.ddp_comm_hooks import known_hooks

    return [name for name in known_hooks() if name not in NOT_EXCHANGING]


NOT_EXCHANGING = {"noop", "post_localSGD"}


@dataclass(frozen=True)
class Cell:
    """One setting of the option matrix."""

    world_size: int = 2
    many_buckets: bool = False
    dtype: torch.dtype = torch.float32
    micro_batches: int = 1
    options: dict[str, bool] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"W{self.world_size}", "many" if self.many_buckets else "one", str(self.dtype).split(".")[1]]
        if self.micro_batches > 1:
            parts.append("no_sync")
        return "-".join([*parts, *self.options])


#: Every pair of options meets in some cell.
CELLS = [
    Cell(2),
    Cell(3, many_buckets=True, micro_batches=2, options={"gradient_as_bucket_view": True}),
    Cell(4, many_buckets=True, options={"static_graph": True}),
    Cell(2, many_buckets=True, dtype=torch.bfloat16, options={"find_unused_parameters": True}),
    Cell(3, dtype=torch.float16, options={"static_graph": True, "gradient_as_bucket_view": True}),
    Cell(4, dtype=torch.float64, micro_batches=2, options={"find_unused_parameters": True}),
    Cell(2, many_buckets=True, dtype=torch.float64, options={"static_graph": True}),
    Cell(4, many_buckets=True, dtype=torch.bfloat16, options={"gradient_as_bucket_view": True}),
]


class Net(nn.Module):
    """Large and small tensors; with `branch`, a layer that only some steps use."""

    def __init__(self, dtype: torch.dtype = torch.float32, branch: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(24, 96)
        self.second = nn.Linear(96, 50)
        self.branch = nn.Linear(96, 50) if branch else None
        self.to(dtype)

    def forward(self, x: torch.Tensor, use_branch: bool = False) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        y = self.second(hidden)
        if self.branch is not None and use_branch:
            y = y + self.branch(hidden)
        return y


def batch(rank: int, step: int, dtype: torch.dtype, rows: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, 24, generator=generator).to(dtype)


def wrap(model: nn.Module, many_buckets: bool, name: str, state: Any = None, **options: bool) -> Any:
    """A DDP module with the hook of that name, and the hook's state."""
    ddp = tp.nn.parallel.DistributedDataParallel(
        model, bucket_cap_mb=0.001 if many_buckets else 25, **options
    )
    hook, made = make_hook(name, state)
    handle = ddp.register_comm_hook(made, hook)
    return ddp, handle.state


def same_everywhere(tensors: list[torch.Tensor], what: str) -> None:
    """Fail unless all ranks hold the same bits."""
    flat = torch.cat([t.detach().reshape(-1).to(torch.float64) for t in tensors])
    gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, flat)
    for rank, other in enumerate(gathered):
        assert torch.equal(torch.nan_to_num(other), torch.nan_to_num(flat)), f"{what}: rank {rank} differs"


def train(rank: int, world_size: int, name: str, cell: Cell, steps: int) -> float:
    """I1: gradients and parameters are bit-identical on all ranks after every step. Returns the last loss."""
    unused = "find_unused_parameters" in cell.options
    model = Net(cell.dtype, branch=unused)
    ddp, _ = wrap(model, cell.many_buckets, name, **cell.options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss = torch.zeros(())
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(cell.micro_batches):
            last = micro == cell.micro_batches - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                x = batch(rank, step * cell.micro_batches + micro, cell.dtype)
                # rank 0 alone uses the branch in every third step, all ranks in every fifth, none otherwise
                use = unused and (step % 5 == 0 or (step % 3 == 0 and rank == 0))
                loss = (ddp(x, use) - x[:, :1]).square().mean() / cell.micro_batches
                loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert gradients, "no gradients"
        for gradient in gradients:
            assert torch.isfinite(gradient).all(), f"step {step}: a gradient is not finite"
        if step < 4 or step == steps - 1:
            same_everywhere(gradients, f"step {step}, gradients")
        optimizer.step()
        if step < 4 or step == steps - 1:
            same_everywhere(list(model.parameters()), f"step {step}, parameters")
    return float(loss.detach())


def _residuals(state: Any, names: dict[str, torch.Tensor], world_size: int) -> dict[str, torch.Tensor]:
    """Sum over the ranks of what the hook still owes for each parameter, in float64."""
    owed = {name: torch.zeros(p.numel(), dtype=torch.float64) for name, p in names.items()}
    if state is not None and hasattr(state, "state_dict"):
        saved = state.state_dict()
        for name, entry in state.fold(saved).items():
            if "residual" in entry:
                owed[name] += entry["residual"].reshape(-1).double()
    for tensor in owed.values():
        dist.all_reduce(tensor)
    return owed


def account(rank: int, world_size: int, name: str, many_buckets: bool, steps: int) -> float:
    """I2: over `steps` steps, sum of all gradients = W x sum of results + what residuals hold, relative to the first.

    Returns the largest relative difference.
    """
    model = Net()
    ddp, state = wrap(model, many_buckets, name)
    names = dict(model.named_parameters())
    given = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in names.items()}
    got = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in names.items()}
    for step in range(steps):
        x = batch(rank, step, torch.float32)
        twin = torch.autograd.grad((model(x) - x[:, :1]).square().mean(), list(model.parameters()))
        for n, gradient in zip(names, twin, strict=True):
            given[n] += gradient.double()
        model.zero_grad()
        (ddp(x) - x[:, :1]).square().mean().backward()
        for n, p in names.items():
            assert p.grad is not None
            got[n] += p.grad.double()
    for total in given.values():
        dist.all_reduce(total)
    owed = _residuals(state, names, world_size)
    worst = 0.0
    for n in names:
        left = owed[n].reshape(names[n].shape)
        difference = (given[n] - world_size * got[n] - left).norm() / given[n].norm()
        worst = max(worst, float(difference))
    return worst


def poison(rank: int, world_size: int, name: str, many_buckets: bool, value: float) -> None:
    """I4 and F8: one bad value on rank 0 in one step: non-finite everywhere in that step, as if never in the next."""

    def run(bad_step: int | None) -> list[list[torch.Tensor]]:
        model = Net()
        ddp, state = wrap(model, many_buckets, name)
        collected = []
        for step in range(7):
            if step == bad_step:
                x = batch(rank, 99, torch.float32)
                if rank == 0:
                    x[0, 0] = value
                before = state.state_dict()["tensors"] if hasattr(state, "state_dict") else {}
                ddp(x).square().mean().backward()
                after = state.state_dict()["tensors"] if hasattr(state, "state_dict") else {}
                # an infinity leaves the second layer's gradients finite, so its own bucket goes on
                everything_is_bad = not many_buckets or value != value
                for parameter, entry in before.items() if everything_is_bad else ():
                    for kind, tensor in entry.items():
                        assert torch.equal(tensor, after[parameter][kind]), (
                            f"{kind} of {parameter} remembers it"
                        )
                gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
                assert not all(bool(torch.isfinite(g).all()) for g in gradients), "the bad value vanished"
                same_everywhere(
                    [torch.isfinite(g).to(torch.float32) for g in gradients], "where it is finite"
                )
                model.zero_grad()
                continue
            x = batch(rank, step, torch.float32)
            ddp(x).square().mean().backward()
            collected.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            same_everywhere(collected[-1], f"step {step}")
            for gradient in collected[-1]:
                assert torch.isfinite(gradient).all(), f"the bad value came back in step {step}"
            model.zero_grad()
        return collected

    run(bad_step=3)


class Zoo(nn.Module):
    """Parameters of every kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.conv = nn.Conv2d(16, 24, 3, padding=1).to(memory_format=torch.channels_last)
        self.complex = nn.Parameter(torch.randn(20, 60, dtype=torch.complex64))
        self.shared = nn.Linear(40, 40)
        self.also = self.shared
        self.wide = nn.Parameter(torch.randn(40, 40, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(40, 40).to(torch.bfloat16))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(50, 50))

    def forward(self, image: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(image).square().mean() * self.scale + self.empty.sum()
        z = torch.view_as_real(self.complex * (1 + 2j)).square().mean()
        w = self.also(self.shared(x)).square().mean()
        d = (x.double() @ self.wide).square().mean() + (x.to(torch.bfloat16) @ self.narrow).square().mean()
        return y + z + w + d.float()


def every_kind(rank: int, world_size: int, name: str, many_buckets: bool, close: bool) -> None:
    """I9: the mean reaches every kind of parameter; with `close`, sums of results are held against sums of means."""
    model = Zoo()
    ddp, _ = wrap(model, many_buckets, name, find_unused_parameters=True)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    totals = {
        n: torch.zeros(p.shape, dtype=torch.complex128 if p.is_complex() else torch.float64)
        for n, p in named.items()
    }
    got = {n: torch.zeros_like(t) for n, t in totals.items()}
    steps = 12
    for step in range(steps):
        generator = torch.Generator().manual_seed(step * 10 + rank)
        image = torch.randn(2, 16, 5, 5, generator=generator).contiguous(memory_format=torch.channels_last)
        x = torch.randn(6, 40, generator=generator)
        twin = torch.autograd.grad(model(image, x), list(named.values()), allow_unused=True)
        for (n, _), gradient in zip(named.items(), twin, strict=True):
            if gradient is not None:
                totals[n] += gradient.to(totals[n].dtype)
        model.zero_grad()
        ddp(image, x).backward()
        for n, p in named.items():
            if p.grad is not None:
                got[n] += p.grad.to(got[n].dtype)
        same_everywhere(
            [
                torch.view_as_real(p.grad) if p.grad.is_complex() else p.grad
                for p in named.values()
                if p.grad is not None
            ],
            f"step {step}",
        )
    assert model.unused.grad is None, "an unused parameter got a gradient"
    for n, total in totals.items():
        view = torch.view_as_real(total) if total.is_complex() else total
        dist.all_reduce(view)
        if n != "unused" and total.numel() and close:
            error = (got[n] - total / world_size).abs().norm() / (total / world_size).abs().norm()
            assert float(error) < 0.15, f"{n}: the sum of results is {float(error):.3f} off the sum of means"


def resume(rank: int, world_size: int, name: str, many_buckets: bool) -> None:
    """I5: saved after step 4, loaded into a new DDP module and a new state: the same bits as never having stopped."""

    def steps(model: nn.Module, ddp: Any, optimizer: Any, span: range) -> None:
        for step in span:
            x = batch(rank, step, torch.float32)
            optimizer.zero_grad()
            (ddp(x) - x[:, :1]).square().mean().backward()
            optimizer.step()

    def fresh() -> tuple[nn.Module, Any, Any, Any]:
        model = Net()
        ddp, state = wrap(model, many_buckets, name)
        return model, ddp, state, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    model, ddp, state, optimizer = fresh()
    steps(model, ddp, optimizer, range(5))
    saved = io.BytesIO()
    has_state = hasattr(state, "state_dict")
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "hook": state.state_dict() if has_state else {},
        },
        saved,
    )
    steps(model, ddp, optimizer, range(5, 9))

    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    again, ddp2, state2, optimizer2 = fresh()
    again.load_state_dict(loaded["model"])
    optimizer2.load_state_dict(loaded["optimizer"])
    if has_state:
        state2.load_state_dict(loaded["hook"])
    steps(again, ddp2, optimizer2, range(5, 9))
    is_plain = getattr(state2, "choice", "") == "allreduce"  # "auto", while nothing pays
    for (n, a), b in zip(model.named_parameters(), again.parameters(), strict=True):
        if (has_state and not is_plain) or (world_size == 2 and not name.startswith("quantize")):
            assert torch.equal(a, b), f"{n} differs by {float((a - b).detach().abs().max()):.2e}"
        else:  # sums and scales that depend on the bucket, which DDP rebuilds after the first step
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


@contextlib.contextmanager
def counted_bytes() -> Iterator[Callable[[], tuple[int, int]]]:
    """Count, from outside, what is handed to Gloo: point-to-point bytes on private groups and all-reduces on others."""
    from tensorplay.compression import collective

    seen = [0, 0]
    real_group, real_reduce = collective.c10d.ProcessGroupGloo, dist.all_reduce

    class Counting:
        def __init__(self, *args: Any) -> None:
            self.inner = real_group(*args)

        def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
            seen[0] += sum(t.numel() * t.element_size() for t in tensors)
            return self.inner.send(tensors, peer, tag)

        def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
            seen[1] += sum(t.numel() * t.element_size() for t in tensors)
            return self.inner.recv(tensors, peer, tag)

    def reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        world_size = dist.get_world_size()
        each_way = 2 * (world_size - 1) * tensor.numel() * tensor.element_size() // world_size
        seen[0] += each_way
        seen[1] += each_way
        return real_reduce(tensor, *args, **kwargs)

    collective.c10d.ProcessGroupGloo = Counting
    dist.all_reduce = reduce
    try:
        yield lambda: (seen[0], seen[1])
    finally:
        collective.c10d.ProcessGroupGloo, dist.all_reduce = real_group, real_reduce


class One(nn.Module):
    """One large weight, so that a formula in N can be held against what is sent."""

    def __init__(self, rows: int = 512, columns: int = 768) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(rows, columns) / 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight.t()).square().mean()


def sent_a_step(rank: int, world_size: int, name: str) -> tuple[float, float, float, float]:
    """I6: bytes a step counted at Gloo, sent and received, and what the package says it counted."""
    from tensorplay.compression.collective import traffic

    with counted_bytes() as counted:
        model = One()
        ddp, _ = wrap(model, False, name)
        steps = 3

        def step(number: int) -> None:
            generator = torch.Generator().manual_seed(number * 10 + rank)
            ddp(torch.randn(4, 768, generator=generator)).backward()

        step(0)  # DDP itself speaks to the others around its first step
        before, told = counted(), (traffic.sent_bytes, traffic.received_bytes)
        for number in range(1, steps + 1):
            step(number)
        after = counted()
        return (
            (after[0] - before[0]) / steps,
            (after[1] - before[1]) / steps,
            (traffic.sent_bytes - told[0]) / steps,
            (traffic.received_bytes - told[1]) / steps,
        )
