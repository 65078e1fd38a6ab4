"""Faults F44 and F50 to F55: what users met in the sharded optimizer elsewhere does not happen here."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.algorithms.join as torch_join
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from tensorplay.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from tensorplay.distributed.algorithms.ddp_comm_hooks.quantization_hooks import quantization_pertensor_hook
from tensorplay.distributed.algorithms.join import Join
from tensorplay.distributed.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from tensorplay.testing import run_ranks
from tests.ranks.zero import MANY_BUCKETS, Pair, batch, largest_difference, net

# F44: in Join, the rank without data steps on the averaged gradient


def _uneven(rank: int, world_size: int, join: Any, in_hook: bool, sleepers: bool) -> float:
    """Rank 0 has one batch, the others two (and the last rank none with `sleepers`); SGD, as in the row."""
    batches = [1 if r == 0 else 2 for r in range(world_size)]
    if sleepers:
        batches[-1] = 0
    plain, shared = DistributedDataParallel(net()), DistributedDataParallel(net())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    zero = ZeroRedundancyOptimizer(shared.parameters(), torch.optim.SGD, overlap_with_ddp=in_hook, lr=0.1)
    if in_hook:
        shared.register_comm_hook(None, hook_with_zero_step_interleaved(allreduce_hook, shared, zero))
    for step in range(max(batches)):
        optimizer.zero_grad()
        has_data = 1.0 if step < batches[rank] else 0.0
        (plain(batch(rank, step)).pow(2).sum() * has_data).backward()
        optimizer.step()
    with join([shared, zero]):
        for step in range(batches[rank]):
            zero.zero_grad()
            shared(batch(rank, step)).pow(2).sum().backward()
            zero.step()
    return largest_difference(plain.parameters(), shared.parameters())


@pytest.mark.parametrize("join", [Join, torch_join.Join])
@pytest.mark.parametrize("in_hook", [False, True])
@pytest.mark.parametrize("sleepers", [False, True])
def test_f44_uneven_inputs_equal_the_plain_optimizer(join: Any, in_hook: bool, sleepers: bool) -> None:
    world_size = 3 if sleepers else 2
    run = partial(_uneven, join=join, in_hook=in_hook, sleepers=sleepers)
    assert max(run_ranks(run, world_size, warnings_as_errors=join is Join)) <= 1e-6


# F50: gloo


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("interleaved", [False, True])
def test_f50_works_on_gloo_with_several_buckets(world_size: int, interleaved: bool) -> None:
    results = run_ranks(partial(_differences, interleaved=interleaved, steps=5), world_size)
    assert results == [[0.0] * 5] * world_size


# F51: updates from step 0


def _differences(rank: int, world_size: int, interleaved: bool, steps: int) -> list[float]:
    pair = Pair(optimizer="adam", interleaved=interleaved, ddp=MANY_BUCKETS)
    before = [p.detach().clone() for p in pair.ddp.parameters()]
    differences = []
    for step in range(steps):
        pair.step(batch(rank, step))
        assert largest_difference(before, pair.ddp.parameters()) > 0.0
        differences.append(pair.difference())
    return differences


@pytest.mark.parametrize("interleaved", [False, True])
def test_f51_three_steps_are_three_steps_of_adam(interleaved: bool) -> None:
    assert run_ranks(partial(_differences, interleaved=interleaved, steps=3), 2) == [[0.0] * 3] * 2


# F52: any optimizer, any groups, schedulers


def _nadam_in_two_groups(rank: int, world_size: int) -> tuple[float, list[float]]:
    plain, shared = DistributedDataParallel(net()), DistributedDataParallel(net())

    def groups(ddp: DistributedDataParallel) -> list[dict[str, Any]]:
        first, *others = list(ddp.parameters())
        return [{"params": [first], "lr": 0.3}, {"params": others}]

    optimizer = torch.optim.NAdam(groups(plain), lr=0.01)
    zero = ZeroRedundancyOptimizer(groups(shared), torch.optim.NAdam, overlap_with_ddp=True, lr=0.01)
    shared.register_comm_hook(None, hook_with_zero_step(allreduce_hook, shared, zero))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, zero)]
    for step in range(4):
        for model, stepper, scheduler in zip((plain, shared), (optimizer, zero), schedulers, strict=True):
            stepper.zero_grad()
            model(batch(rank, step)).pow(2).sum().backward()
            stepper.step()
            scheduler.step()
    return largest_difference(plain.parameters(), shared.parameters()), [g["lr"] for g in zero.param_groups]


def test_f52_nadam_in_two_groups_with_a_schedule() -> None:
    for difference, rates in run_ranks(_nadam_in_two_groups, 2):
        assert difference == 0.0
        assert rates == [0.3 / 16, 0.01 / 16]


def test_f52_any_hook_can_be_wrapped() -> None:
    assert run_ranks(_quantized, 2) == [0.0] * 2


def _quantized(rank: int, world_size: int) -> float:
    plain, shared = (DistributedDataParallel(net(), **MANY_BUCKETS) for _ in range(2))
    plain.register_comm_hook(None, quantization_pertensor_hook)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    zero = ZeroRedundancyOptimizer(shared.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    shared.register_comm_hook(None, hook_with_zero_step(quantization_pertensor_hook, shared, zero))
    for step in range(3):
        for model, stepper in ((plain, optimizer), (shared, zero)):
            stepper.zero_grad()
            model(batch(rank, step)).pow(2).sum().backward()
            stepper.step()
    return largest_difference(plain.parameters(), shared.parameters())


# F53: accumulation, clipping, GradScaler


def _accumulate_clip_scale(rank: int, world_size: int) -> list[float]:
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0) for _ in range(2)]
    pair = Pair(optimizer="adamw", ddp=MANY_BUCKETS, max_grad_norm=0.3, grad_scaler=scalers[1])
    differences = []
    for step in range(5):
        for model, optimizer, scaler in zip(
            (pair.plain, pair.ddp), (pair.optimizer, pair.zero), scalers, strict=True
        ):
            optimizer.zero_grad()
            inputs = batch(rank, step)
            if step == 3 and rank == 0:
                inputs[0] = torch.nan
            with model.no_sync():
                scaler.scale(model(batch(rank, 50 + step)).pow(2).sum()).backward()
            scaler.scale(model(inputs).pow(2).sum()).backward()
            if model is pair.plain:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale() == (256.0 if step < 3 else 128.0)
        differences.append(pair.difference())
    return differences


def test_f53_accumulation_clipping_and_loss_scaling_together() -> None:
    assert run_ranks(_accumulate_clip_scale, 2) == [[0.0] * 5] * 2


# F54: one dominating tensor


class Dominated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.large, self.small = nn.Linear(512, 512), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.small(self.large(inputs)[:, :4])  # type: ignore[no-any-return]


def _dominated(rank: int, world_size: int, shard_buckets: bool, interleaved: bool) -> float:
    pair = Pair(Dominated, interleaved=interleaved, shard_buckets=shard_buckets)
    for step in range(3):
        pair.step(batch(rank, step, width=512))
    return pair.difference()


@pytest.mark.parametrize("shard_buckets", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_f54_one_dominating_tensor(shard_buckets: bool, interleaved: bool) -> None:
    run = partial(_dominated, shard_buckets=shard_buckets, interleaved=interleaved)
    assert run_ranks(run, 4) == [0.0] * 4


# F55: the contract of state_dict


def _contract(rank: int, world_size: int) -> list[str]:
    pair = Pair()
    said = []
    for stage in ("before", "consolidated", "after another step"):
        if stage == "consolidated":
            pair.zero.consolidate_state_dict(to=1)
        if stage == "after another step":
            pair.step(batch(rank, 1))
        try:
            state = pair.zero.state_dict()
            assert all(v.device.type == "cpu" for entry in state["state"].values() for v in entry.values())
            said.append(f"{len(state['state'])} states")
        except RuntimeError as error:
            said.append(str(error))
        pair.step(batch(rank, 0)) if stage == "before" else None
    return said


def test_f55_state_dict_is_whole_or_says_what_to_do() -> None:
    first, second = run_ranks(_contract, 2)
    for said in (first, second):
        assert "call consolidate_state_dict(to) on all ranks" in said[0]
        assert "after the last step" in said[2]
    assert first[1] == (
        "the state was consolidated on rank 1 and this is rank 0: call state_dict() there, or "
        "consolidate_state_dict(to=…) for another rank on all ranks"
    )
    assert second[1] == "8 states"


# What can't work is refused with the way out


def _refusals(rank: int, world_size: int) -> dict[str, str]:
    ddp = DistributedDataParallel(net())

    def zero(**options: Any) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(
            ddp.parameters(),
            **{"optimizer_class": torch.optim.SGD, "overlap_with_ddp": True, "lr": 0.1, **options},
        )

    other = nn.Parameter(torch.ones(2))
    ignoring = net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["0.weight"])
    ignoring_ddp = DistributedDataParallel(ignoring)
    calls: dict[str, Any] = {
        "LBFGS": lambda: zero(optimizer_class=torch.optim.LBFGS),
        "no class": lambda: zero(optimizer_class="adam"),
        "of itself": lambda: zero(optimizer_class=ZeroRedundancyOptimizer),
        "views in the hook": lambda: zero(parameters_as_bucket_view=True),
        "views with gaps": lambda: ZeroRedundancyOptimizer(
            [nn.Parameter(torch.ones(4, 4)[:, :2])], torch.optim.SGD, parameters_as_bucket_view=True, lr=0.1
        ),
        "not for a hook": lambda: hook_with_zero_step(allreduce_hook, ddp, zero(overlap_with_ddp=False)),
        "update": lambda: hook_with_zero_step(allreduce_hook, ddp, zero(), update="later"),  # type: ignore[arg-type]
        "norm": lambda: hook_with_zero_step(allreduce_hook, ddp, zero(), max_grad_norm=0.0),
        "scaler": lambda: hook_with_zero_step(allreduce_hook, ddp, zero(), grad_scaler=2.0),  # type: ignore[arg-type]
        "codec": lambda: hook_with_zero_step(quantization_pertensor_hook, ddp, zero(), reduce_scatter=True),
        "no hook": lambda: hook_with_zero_step(None, ddp, zero()),  # type: ignore[arg-type]
        "no ddp": lambda: hook_with_zero_step(allreduce_hook, net(), zero()),  # type: ignore[arg-type]
        "plain optimizer": lambda: hook_with_zero_step(
            allreduce_hook,
            ddp,
            torch.optim.SGD(ddp.parameters(), lr=0.1),  # type: ignore[arg-type]
        ),
        "stranger": lambda: hook_with_zero_step(
            allreduce_hook,
            ddp,
            ZeroRedundancyOptimizer([other], torch.optim.SGD, overlap_with_ddp=True, lr=0.1),
        ),
        "ignored": lambda: hook_with_zero_step(
            allreduce_hook,
            ignoring_ddp,
            ZeroRedundancyOptimizer(ignoring.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1),
        ),
        "part of the model": lambda: hook_with_zero_step(
            allreduce_hook,
            ddp,
            ZeroRedundancyOptimizer(
                ddp.module[0].parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
            ),
            reduce_scatter=True,
        ),
    }
    said = {}
    for name, call in calls.items():
        with pytest.raises((TypeError, ValueError)) as raised:
            call()
        said[name] = f"{type(raised.value).__name__}: {raised.value}"
    return said


def test_what_cannot_work_is_refused_with_the_way_out() -> None:
    said = run_ranks(_refusals, 1)[0]
    expected = {
        "LBFGS": "ValueError: LBFGS uses the gradients of all parameters at once",
        "no class": "TypeError: optimizer_class must be a torch.optim.Optimizer subclass, got 'adam'",
        "of itself": "TypeError: optimizer_class must be the optimizer to share out",
        "views in the hook": "ValueError: parameters_as_bucket_view=True can't be used with overlap_with_ddp=True",
        "views with gaps": "ValueError: parameters_as_bucket_view=True needs parameters without gaps",
        "not for a hook": "ValueError: the optimizer must be made with overlap_with_ddp=True",
        "update": 'ValueError: update must be "in_backward" or "after_backward", got \'later\'',
        "norm": "ValueError: max_grad_norm must be > 0, got 0.0",
        "scaler": "TypeError: grad_scaler must be a torch.amp.GradScaler, got float",
        "codec": "ValueError: reduce_scatter=True replaces the wrapped hook's exchange",
        "no hook": "TypeError: hook must be callable",
        "no ddp": "TypeError: ddp must be a DistributedDataParallel, got Sequential",
        "plain optimizer": "TypeError: zero must be a tensorplay.distributed.optim.ZeroRedundancyOptimizer, got SGD",
        "stranger": "ValueError: zero has 1 trainable parameters that ddp does not average",
        "ignored": "ValueError: zero has 1 trainable parameters that ddp does not average",
        "part of the model": "ValueError: reduce_scatter=True needs an owner for every parameter of ddp, and zero",
    }
    for name, text in expected.items():
        assert said[name].startswith(text), (name, said[name])
