"""Telemetry on real ranks: bytes agree with the wire's own count, errors with what can be checked by hand."""

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tensorplay.compression.collective import traffic
from tensorplay.distributed.algorithms.ddp_comm_hooks.compressed_hook import (
    CompressedHookState,
    compressed_hook,
)
from tensorplay.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from tensorplay.distributed.algorithms.ddp_comm_hooks.register import register_ddp_comm_hook
from tensorplay.telemetry import (
    CallableSink,
    JSONLinesSink,
    MemorySink,
    TensorBoardSink,
    observe,
    recorder,
)
from tensorplay.testing import run_ranks

HOOKS = ["allreduce", "fp16_compress", "int8", "int4", "topk", "power_sgd", "quantize_per_tensor", "noop"]


def make_model(rank: int, bucket_cap_mb: float = 25) -> DistributedDataParallel:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
    torch.manual_seed(rank + 1)
    return DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)


def backward(model: DistributedDataParallel, scale: float = 1.0) -> None:
    model.zero_grad()
    (model(torch.randn(8, 64)).square().mean() * scale).backward()


def bytes_and_steps(hook: str, rank: int, world_size: int) -> dict[str, Any]:
    model = make_model(rank, bucket_cap_mb=0.02)
    register_ddp_comm_hook(hook, model)
    backward(model)
    backward(model)  # DDP has made its final buckets
    sink = MemorySink()
    with observe(model, [sink], error_every=2, nonfinite_every=1) as observation:
        before = traffic.sent_bytes, traffic.received_bytes
        for _ in range(3):
            backward(model)
        observation.flush()
        counted = traffic.sent_bytes - before[0], traffic.received_bytes - before[1]
    backward(model)
    return {
        "steps": sink.of("step"),
        "buckets": sink.of("bucket"),
        "errors": sink.of("error"),
        "counted": counted,
    }


@pytest.mark.parametrize("hook", HOOKS)
def test_bytes_are_what_entered_collectives_and_steps_add_up(hook: str) -> None:
    for result in run_ranks(partial(bytes_and_steps, hook), 2):
        steps, buckets = result["steps"], result["buckets"]
        assert [step["step"] for step in steps] == [1, 2, 3]
        raw = sum(p.numel() for p in make_parameters()) * 4
        for step in steps:
            mine = [bucket for bucket in buckets if bucket["step"] == step["step"]]
            assert len(mine) > 1
            assert step["raw_bytes"] == raw == sum(bucket["raw_bytes"] for bucket in mine)
            assert step["exchange_seconds"] >= step["exposed_seconds"] >= 0
            assert step["nonfinite"] is False
            assert step["unfinished_buckets"] == 0
            for name in ("encode_seconds", "wait_seconds", "decode_seconds"):
                assert step[name] >= 0
        for way, total in zip(("sent_bytes", "received_bytes"), result["counted"], strict=True):
            assert sum(step[way] + step[f"telemetry_{way}"] for step in steps) == total
        if hook != "noop":
            assert all(step["sent_bytes"] > 0 for step in steps)
        # the error's own all-reduce of float32 values at step 2 alone: (W-1)/W twice
        assert [step["telemetry_sent_bytes"] for step in steps] == [0, raw, 0]
        assert {error["step"] for error in result["errors"]} == {2}


def make_parameters() -> list[torch.nn.Parameter]:
    return [*torch.nn.Linear(64, 128).parameters(), *torch.nn.Linear(128, 64).parameters()]


def errors_of(hook: str, rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    model = make_model(rank)
    register_ddp_comm_hook(hook, model)
    sink = MemorySink()
    own: dict[str, torch.Tensor] = {}
    with observe(model, [sink], error_every=1):
        with model.no_sync():
            state = torch.get_rng_state()
            backward(model)
            for name, parameter in model.module.named_parameters():
                assert parameter.grad is not None
                own[name] = parameter.grad.clone()
            torch.set_rng_state(state)
        backward(model)
    for name, parameter in model.module.named_parameters():
        exact = own[name].clone()
        dist.all_reduce(exact)
        exact /= world_size
        assert parameter.grad is not None
        expected = float((parameter.grad - exact).norm() / exact.norm())
        found = next(record for record in sink.of("error") if record["parameter"] == name)
        assert found["relative_error"] == pytest.approx(expected, rel=1e-3, abs=1e-6)
        found["expected"] = expected
    return {record["parameter"]: record for record in sink.of("error")}


@pytest.mark.parametrize("hook", ["allreduce", "bf16_compress", "int4", "power_sgd", "noop"])
def test_errors_are_those_against_the_mean(hook: str) -> None:
    for records in run_ranks(partial(errors_of, hook), 2):
        assert sorted(records) == ["0.bias", "0.weight", "2.bias", "2.weight"]
        error, cosine = records["0.weight"]["relative_error"], records["0.weight"]["cosine"]
        if hook == "allreduce":
            assert error == 0
            assert cosine == pytest.approx(1)
        else:
            assert error > 1e-4
            assert 0.3 < cosine < 1
        residual = records["0.weight"]["residual_norm"]
        assert (residual is not None and residual > 0) == (hook in ("int4", "power_sgd"))


def half_range_of(hook: str, rank: int, world_size: int) -> list[dict[str, Any]]:
    linear = torch.nn.Linear(4, 1, bias=False)
    model = DistributedDataParallel(linear)
    register_ddp_comm_hook(hook, model)
    sink = MemorySink()
    with observe(model, [sink], error_every=1):
        model(torch.tensor([[1e-8, 1e6, 0.0, 1.0]])).sum().backward()
    return [*sink.of("error"), *sink.of("step")]


@pytest.mark.parametrize("hook", ["fp16_compress", "fp16"])
def test_values_that_float16_can_not_hold_are_counted(hook: str) -> None:
    for error, step in run_ranks(partial(half_range_of, hook), 2):
        assert (error["fp16_underflows"], error["fp16_overflows"]) == (1, 1)
        if hook == "fp16_compress":
            assert step["nonfinite"] is True
            assert error["relative_error"] is None
    for error, _ in run_ranks(partial(half_range_of, "allreduce"), 2):
        assert "fp16_underflows" not in error


def nonfinite_on_one_rank(hook: str, rank: int, world_size: int) -> list[bool]:
    model = make_model(rank)
    register_ddp_comm_hook(hook, model)
    sink = MemorySink()
    with observe(model, [sink], error_every=0, nonfinite_every=1):
        backward(model)
        backward(model, scale=float("nan") if rank == 0 else 1.0)
        backward(model)
    assert sink.of("error") == []
    return [step["nonfinite"] for step in sink.of("step")]


@pytest.mark.parametrize("hook", ["allreduce", "int8", "fp16", "topk", "power_sgd", "quantize_per_tensor"])
def test_nonfinite_steps_are_marked_on_all_ranks(hook: str) -> None:
    assert run_ranks(partial(nonfinite_on_one_rank, hook), 2) == [[False, True, False]] * 2


def looked_at_in_turn(hook: str, rank: int, world_size: int) -> list[list[bool | None]]:
    model = make_model(rank, bucket_cap_mb=0.02)
    register_ddp_comm_hook(hook, model)
    backward(model)
    backward(model)  # DDP has made its final buckets
    sink = MemorySink()
    with observe(model, [sink], error_every=5, nonfinite_every=3):
        for _ in range(3):
            backward(model)
        backward(model, scale=float("nan"))
        backward(model)
    found = [
        [bucket["nonfinite"] for bucket in sink.of("bucket") if bucket["step"] == step]
        for step in range(1, 6)
    ]
    for step, buckets in zip(sink.of("step"), found, strict=True):
        assert step["nonfinite"] is (True if True in buckets else None if None in buckets else False)
    return found


def test_results_that_no_hook_judges_are_read_in_turn() -> None:
    for found in run_ranks(partial(looked_at_in_turn, "allreduce"), 2):
        assert len(found[0]) > 1
        for step, buckets in enumerate(found, 1):
            for index, nonfinite in enumerate(buckets):
                is_read = (step + index) % 3 == 0 or step == 5  # the error of step 5 is measured
                assert nonfinite is ((step == 4) if is_read else None)
    for found in run_ranks(partial(looked_at_in_turn, "int8"), 2):
        assert [set(buckets) for buckets in found] == [{False}, {False}, {False}, {True}, {False}]


def judged_by_the_exchange(hook: str, rank: int, world_size: int) -> list[bool]:
    def reading(tensor: torch.Tensor) -> bool:
        raise AssertionError(f"read {tensor.numel()} values that {hook} has judged itself")

    held, recorder._has_nonfinite = recorder._has_nonfinite, reading
    try:
        return nonfinite_on_one_rank(hook, rank, world_size)
    finally:
        recorder._has_nonfinite = held


@pytest.mark.parametrize("hook", ["int8", "int4", "topk", "sign"])
def test_what_an_exchange_judges_itself_is_not_read_again(hook: str) -> None:
    for world_size in (2, 3):
        assert (
            run_ranks(partial(judged_by_the_exchange, hook), world_size)
            == [[False, True, False]] * world_size
        )


def results_with_and_without(hook: str, rank: int, world_size: int) -> None:
    gradients = []
    for observed in (False, True):
        model = make_model(rank)
        handle = register_ddp_comm_hook(hook, model)
        before = handle.hook
        observation = observe(model, [], error_every=1) if observed else None
        for _ in range(3):
            backward(model)
        if observation is not None:
            assert (handle.hook is before) == (not observed)
            observation.remove()
            observation.remove()
            assert handle.hook is before
            assert not getattr(handle.state, "wrappers", [])
            with pytest.raises(RuntimeError, match="was removed"):
                observation.log(loss=1.0)
        gradients.append([p.grad for p in model.parameters()])
        backward(model)
    for plain, watched in zip(*gradients, strict=True):
        assert torch.equal(plain, watched)


@pytest.mark.parametrize("hook", ["allreduce", "int8", "power_sgd"])
def test_observing_changes_no_result(hook: str) -> None:
    run_ranks(partial(results_with_and_without, hook), 2)


def state_alone(rank: int, world_size: int) -> None:
    """On torch's DDP, with the hook registered through torch: the state is what can be observed."""
    torch_model = make_model(rank)
    state = CompressedHookState("int8")
    DistributedDataParallel.register_comm_hook(torch_model, state, compressed_hook)
    with pytest.raises(ValueError, match="observe its state"):
        observe(torch_model)
    sink = MemorySink()
    with observe(state, [sink], error_every=1, name="mine"):
        backward(torch_model)
    (run,) = sink.of("run")
    assert (run["hook"], run["rank"], run["world_size"]) == ("mine", rank, world_size)
    assert len(sink.of("error")) == 4
    assert sink.of("error")[0]["parameter"].startswith("bucket 0, parameter")
    assert state.wrappers == []


def test_a_state_alone_can_be_observed() -> None:
    run_ranks(state_alone, 2)


def foreign(rank: int, world_size: int) -> None:
    def slow_hook(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        time.sleep(0.02)
        future = dist.all_reduce(bucket.buffer() / world_size, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    model = make_model(rank)
    register_ddp_comm_hook(slow_hook, model)
    sink = MemorySink()
    with observe(model, [sink], error_every=1):
        backward(model)
    (step,) = sink.of("step")
    assert step["sent_bytes"] is None
    assert step["encode_seconds"] > 0.015
    assert all(error["relative_error"] < 1e-6 for error in sink.of("error"))
    plain = make_model(rank)
    with observe(plain, [sink := MemorySink()]):
        backward(plain)
    assert sink.of("run")[0]["hook"] == allreduce_hook.__name__
    assert sink.of("step")[0]["sent_bytes"] > 0


def test_hooks_of_others_are_timed_and_their_bytes_unknown() -> None:
    run_ranks(foreign, 2)


def into_every_sink(folder: Path, rank: int, world_size: int) -> list[tuple[dict[str, float], int]]:
    calls: list[tuple[dict[str, float], int]] = []
    model = make_model(rank)
    register_ddp_comm_hook("int8", model)
    sinks: list[Any] = [lambda values, step: calls.append((values, step))]
    if rank == 0:
        sinks += [JSONLinesSink(folder / "run.jsonl"), TensorBoardSink(folder / "board")]
    with observe(model, sinks, error_every=2) as observation:
        for number in range(2):
            backward(model)
            observation.log(loss=float("nan") if number else 0.5)
        with pytest.raises(ValueError, match="can't take step"):
            observation.log(step=1)
    return calls


def test_sinks_get_the_same_records(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    calls = run_ranks(partial(into_every_sink, tmp_path), 2)[0]
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert lines[0]["event"] == "run"
    steps = [line for line in lines if line["event"] == "step"]
    assert [line["loss"] for line in lines if line["event"] == "scalars"] == [0.5, None]
    called = [values["step/sent_bytes"] for values, _ in calls if "step/sent_bytes" in values]
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    written = [(event.step, event.value) for event in board.Scalars("step/sent_bytes")]
    assert called == [step["sent_bytes"] for step in steps]
    assert written == [(step["step"], step["sent_bytes"]) for step in steps]
    assert "error/0.weight/relative_error" in board.Tags()["scalars"]


def fails_on_rank_1(rank: int, world_size: int) -> str:
    model = make_model(rank)
    handle = register_ddp_comm_hook("int8", model)

    def failing(bucket: Any, number: int, start: Any) -> Any:
        def run(scratch: Any) -> Any:
            yield from ()
            raise ZeroDivisionError("rank 1's own")

        return run if rank == 1 else start

    handle.state.wrappers.append(failing)
    sink = MemorySink()
    with pytest.raises(RuntimeError) as caught, observe(model, [sink], error_every=1):
        backward(model)
    assert sink.of("error") == []
    assert handle.hook is compressed_hook
    return str(caught.value)


def test_a_failure_while_observed_still_names_its_rank() -> None:
    for text in run_ranks(fails_on_rank_1, 2):
        assert "rank 1 failed: ZeroDivisionError: rank 1's own" in text


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ValueError, match="error_every must be >= 0, got -1"):
        observe(CompressedHookState("int8"), error_every=-1)
    with pytest.raises(ValueError, match="nonfinite_every must be >= 0, got -2"):
        observe(CompressedHookState("int8"), nonfinite_every=-2)
    with pytest.raises(TypeError, match="HookState, got Linear"):
        observe(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got int"):
        observe(CompressedHookState("int8"), [3])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="log must be callable"):
        CallableSink(3)  # type: ignore[arg-type]
