"""Attaching telemetry to a hook, and taking it off."""

import weakref
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from tensorplay.compression.bucket import Bucket, GradBucket, Key, read_bucket
from tensorplay.compression.collective import traffic
from tensorplay.compression.driver import Start
from tensorplay.compression.state import HookState
from tensorplay.distributed.algorithms.ddp_comm_hooks._attach import HookHandle, _handles, attach
from tensorplay.distributed.algorithms.ddp_comm_hooks._protocol import HookFunction, as_future, value_of
from tensorplay.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from tensorplay.telemetry.meter import metered
from tensorplay.telemetry.recorder import BucketWatch, Recorder, Subject
from tensorplay.telemetry.sinks import Sink, as_sinks

__all__ = ["Observation", "observe"]


class Observation:
    """What `observe` returns. Use it in a `with` block, or call `remove()` on all ranks.

    Example:
        >>> def train(ddp, batches, optimizer, sink):
        ...     with observe(ddp, [sink]) as observation:
        ...         for batch in batches:
        ...             loss = ddp(batch).mean()
        ...             loss.backward()
        ...             observation.log(loss=loss.item())
        ...             optimizer.step()
    """

    def __init__(self, recorder: Recorder, sinks: Sequence[Sink], detach: Callable[[], None]) -> None:
        self._recorder, self._sinks, self._detach = recorder, sinks, detach
        self._is_removed = False

    def log(self, **values: float | int | str | None) -> None:
        """Write numbers of your own at the step whose backward pass ran last; `tensorplay report` draws `loss`.

        Raises: ValueError: a name that every record has. RuntimeError: the observation was removed.
        """
        if self._is_removed:
            raise RuntimeError("the observation was removed: call observe again")
        reserved = {"event", "step", "time_seconds"} & set(values)
        if reserved:
            raise ValueError(f"log can't take {', '.join(sorted(reserved))}: every record has one of its own")
        self._recorder.note(values)

    def flush(self) -> None:
        """Write out the last step now. Call it on all ranks alike: at a step whose error is measured they exchange."""
        self._recorder.flush()

    def remove(self) -> None:
        """Write out the last step, take telemetry off the hook, close the sinks. A second call does nothing.

        Call it on all ranks alike, between steps.
        """
        if self._is_removed:
            return
        self._is_removed = True
        try:
            self._recorder.close()
        finally:
            self._detach()
            for sink in self._sinks:
                sink.close()

    def __enter__(self) -> "Observation":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.remove()
            return
        self._is_removed = True  # peers may have failed too: exchange nothing
        self._detach()
        for sink in self._sinks:
            sink.close()


def observe(
    model_or_state: torch.nn.parallel.DistributedDataParallel | HookState,
    sinks: Sequence[Sink | Callable[..., Any]] = (),
    error_every: int = 100,
    name: str | None = None,
    nonfinite_every: int = 10,
) -> Observation:
    """Record what every exchange of a hook costs, and every `error_every` steps what it loses.

    Args:
        model_or_state: a DDP module, torch's or ours, with any hook registered through this package or none (then
            plain all-reduce is observed); or a hook's state, e.g. a `CompressedHookState`.
        sinks: objects with `write(record)` and `close()`, or callables `log(values, step=…)`. Ranks may have different
            ones; `[]` on all ranks but one writes one rank's records.
        error_every: steps between measurements of the error, counted from the first observed one; 0: never.
        name: how records call the hook; None: its own name.
        nonfinite_every: where a hook does not say itself whether its result is finite (plain all-reduce, casts, hooks
            of other packages, half-precision gradients), every bucket's result is read once in so many steps, the
            buckets taking turns; where nobody looked, `nonfinite` is None. 1: all, at about 0.1 ms a MB; 0: never.

    Records, each a flat dict with `event` and `step` (bytes and seconds of this rank):
        run      hook, rank, world_size, backend, torch, error_every; before all others
        bucket   raw_bytes, sent_bytes, received_bytes, encode_seconds, wait_seconds, decode_seconds,
                 exchange_seconds (hook's call to completion), nonfinite
        step     the same summed, step_seconds (since the last step's completion), exposed_seconds (from the last
                 bucket's call to completion), telemetry_*: what observing took, not part of the others
        error    parameter, relative_error and cosine to the exact mean, mean_norm, residual_norm, and for hooks that
                 send float16 fp16_underflows and fp16_overflows
        scalars  what `log` was given

    Call it on all ranks alike, between steps. A state is told apart into encode, wait and decode; of any other hook
    encode_seconds is the time of its call and wait_seconds the rest. Bytes are None for hooks of other packages, whose
    collectives nobody counts. On a GPU seconds are those of the host that queues the work.

    Raises: TypeError: neither a DDP module nor a `HookState`, or a sink that is none. ValueError: `error_every` or
        `nonfinite_every` is negative, or the module's hook was registered through torch alone. RuntimeError: DDP's
        Python reducer, whose hooks the compiler traces.
    Example:
        >>> from tensorplay.distributed.algorithms.ddp_comm_hooks.compressed_hook import CompressedHookState
        >>> observation = observe(CompressedHookState("int8"), error_every=0)
        >>> observation.remove()
    """
    if error_every < 0:
        raise ValueError(f"error_every must be >= 0, got {error_every}")
    if nonfinite_every < 0:
        raise ValueError(f"nonfinite_every must be >= 0, got {nonfinite_every}")
    made = as_sinks(sinks)
    if isinstance(model_or_state, HookState):
        recorder = Recorder(_subject_of_state(model_or_state, name), made, error_every, nonfinite_every)
        return Observation(recorder, made, _watch_state(model_or_state, recorder))
    if not isinstance(model_or_state, torch.nn.parallel.DistributedDataParallel):
        raise TypeError(
            f"observe needs a DistributedDataParallel module or a HookState, got {type(model_or_state).__name__}"
        )
    return _observe_model(model_or_state, made, error_every, name, nonfinite_every)


def _subject_of_state(state: HookState, name: str | None) -> Subject:
    codec = str(getattr(getattr(state, "codec", None), "name", ""))

    def residual_of(key: Key) -> torch.Tensor | None:
        return state.memory.of(key).get("residual")

    return Subject(
        hook=name or codec or state.kind().removesuffix("State"),
        counts_process=False,
        counts_half=codec.partition(":")[0] == "fp16",
        group=lambda: state.process_group,
        name_of=state.memory.name_of,
        residual_of=residual_of,
    )


def _watch_state(state: HookState, recorder: Recorder) -> Callable[[], None]:
    """Put a meter around every exchange of a state; returns what takes it off."""
    watch: BucketWatch | None = None

    def wrapper(bucket: Bucket, number: int, start: Start) -> Start:
        nonlocal watch
        if number == 0:
            watch = recorder.begin(bucket)
        assert watch is not None
        return metered(start, watch.meter(), watch.one_done)

    state.wrappers.append(wrapper)

    def detach() -> None:
        if wrapper in state.wrappers:
            state.wrappers.remove(wrapper)

    return detach


def _observe_model(
    model: torch.nn.parallel.DistributedDataParallel,
    sinks: list[Sink],
    error_every: int,
    name: str | None,
    nonfinite_every: int,
) -> Observation:
    handle = _handle_of(model)
    hook, state = handle.hook, handle.state
    hook_name = str(getattr(getattr(hook, "func", hook), "__name__", type(hook).__name__))
    flags = getattr(hook, "func", hook)
    if isinstance(state, HookState):
        subject = _subject_of_state(state, name)
    else:
        names: Any = WeakTensorKeyDictionary()
        for parameter_name, parameter in model.module.named_parameters():
            names[parameter] = parameter_name
        group, counts_process = model.process_group, hasattr(flags, "_tensorplay_single_collective")
        subject = Subject(
            hook=name or hook_name,
            counts_process=counts_process,
            counts_half="fp16" in hook_name,
            group=lambda: group,
            name_of=names.get,
            residual_of=lambda key: None,
        )
    recorder = Recorder(subject, sinks, error_every, nonfinite_every)
    take_off = _watch_state(state, recorder) if isinstance(state, HookState) else None
    observed = _watched_hook(hook, recorder, bool(getattr(flags, "_tensorplay_single_collective", False)))
    handle.replace(observed, state)
    held = weakref.ref(model)

    def detach() -> None:
        if take_off is not None:
            take_off()
        if held() is not None and handle.hook is observed:  # not when another hook came meanwhile
            handle.replace(hook, state)
            if hook is allreduce_hook:
                handle.step_aside()

    return Observation(recorder, sinks, detach)


def _handle_of(model: torch.nn.parallel.DistributedDataParallel) -> HookHandle:
    if getattr(model, "_use_python_reducer", False):
        raise RuntimeError(
            "observe can't stand between DDP's Python reducer and its hook: set torch._dynamo.config.optimize_ddp to "
            '"ddp_optimizer" before wrapping the model'
        )
    handle = _handles.get(model)
    if handle is not None:
        return handle
    if model._comm_hooks:
        raise ValueError(
            "the module's hook was registered through torch: register it with "
            "tensorplay's register_ddp_comm_hook, or observe its state"
        )
    return attach(model, allreduce_hook, None)


def _watched_hook(hook: HookFunction, recorder: Recorder, is_single: bool) -> HookFunction:
    """`hook`, timed from outside; a bucket that a `HookState` meters itself passes through."""

    def observed(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if isinstance(state, HookState) and bucket.buffer().layout == torch.strided:
            return as_future(hook(state, bucket))
        index, buffer = bucket.index(), bucket.buffer()
        is_counted = is_single or (buffer.layout != torch.strided and isinstance(state, HookState))
        if recorder.needs_slices(index):
            read = read_bucket(bucket)
        else:
            read = Bucket(index, bucket.is_last(), buffer, ())
        watch = recorder.begin(read, is_counted)
        meter = watch.meter()
        sent, received, began = traffic.sent_bytes, traffic.received_bytes, perf_counter()
        future = as_future(hook(state, bucket))
        meter.encode_seconds = perf_counter() - began
        if is_counted:
            meter.add(traffic.sent_bytes - sent, traffic.received_bytes - received)

        def finish(done: torch.futures.Future[Any]) -> torch.Tensor:
            result = value_of(done)
            meter.wait_seconds = perf_counter() - began - meter.encode_seconds
            watch.finish(result)
            return result

        return future.then(finish)

    observed.__name__ = f"observed({getattr(hook, '__name__', type(hook).__name__)})"
    return observed
