"""A hook that measures in the first steps, chooses, and checks its choice: `register_ddp_comm_hook("auto", model)`."""

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from tensorplay.compression.bucket import GradBucket, read_bucket
from tensorplay.compression.participation import resolve_group
from tensorplay.distributed.algorithms.ddp_comm_hooks._attach import HookHandle, _handles
from tensorplay.distributed.algorithms.ddp_comm_hooks._auto_choice import Candidates, Choice, choose
from tensorplay.distributed.algorithms.ddp_comm_hooks._probe import agree
from tensorplay.distributed.algorithms.ddp_comm_hooks._protocol import (
    HookFunction,
    as_future,
    describe,
    value_of,
)
from tensorplay.distributed.algorithms.ddp_comm_hooks._risk import RISKS, is_allowed
from tensorplay.distributed.algorithms.ddp_comm_hooks._step_clock import WARM_STEPS, StepClock
from tensorplay.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

__all__ = ["AutoState", "auto_hook"]

# DDP compares annotations as objects: this module must not postpone them.

_logger = logging.getLogger(__name__)
_FORMAT = "tensorplay.auto_state/1"
_PLAIN = "allreduce"
_MIN_MEASURED_GAIN = 0.03
_MOST_TRIALS = 2


class AutoState:
    """State of `auto_hook`: what it has measured, and what it chose.

    1. The first `plain_steps` steps run plain all-reduce, and are timed.
    2. At the end of the next one every candidate exchanges a sample of the gradients, and the formula of
       docs/advisor.md predicts its step. The ranks agree on all numbers. This takes some seconds, once.
    3. The fastest candidate takes over if it is predicted to save `min_gain` of a step.
    4. After `check_steps` timed steps it stays if it saved at least 3 %; otherwise the next candidate has its turn (two
       at most), or plain all-reduce comes back. What a codec still owed is added to the next step's gradients.

    Args:
        process_group: the ranks; None: DDP's own group, as for `allreduce_hook`.
        candidates: names `register_ddp_comm_hook` takes. None: fp16_compress, int8 and int4.
        max_risk: "safe", "usually-safe", "check" or "risky": candidates of a higher class are left out.
        min_gain: share of plain all-reduce's step that a candidate must be predicted to save.
        min_bytes: models with fewer bytes of gradients stay with plain all-reduce, nothing is measured.
        plain_steps, check_steps: timed steps before the choice and after it, after two each that are not timed.

    Attributes:
        choice: the hook in use, by name. is_settled: whether that is final. reason: why, in one line.
        predictions: a step's seconds by hook, once predicted. measured: a step's seconds by hook, as far as run.

    Raises: ValueError: a value out of its range, named in the text, or an unknown candidate.
    Example:
        >>> AutoState(max_risk="safe").candidates
        ('fp16_compress',)
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        candidates: Sequence[str] | None = None,
        max_risk: str = "check",
        min_gain: float = 0.1,
        min_bytes: int = 1_000_000,
        plain_steps: int = 5,
        check_steps: int = 4,
    ) -> None:
        if max_risk not in RISKS:
            raise ValueError(f"max_risk must be one of {', '.join(RISKS)}, got {max_risk!r}")
        if not 0 <= min_gain < 1:
            raise ValueError(f"min_gain must be in [0, 1), got {min_gain}")
        for name, value in (("plain_steps", plain_steps), ("check_steps", check_steps)):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        wanted = ("fp16_compress", "int8", "int4") if candidates is None else tuple(candidates)
        for name in wanted:
            if name in ("auto", "noop", "post_localSGD"):
                raise ValueError(f"candidates must be hooks that average gradients every step, got {name!r}")
            if name != _PLAIN:
                _make(name, None)  # an unknown name is told now
        self.candidates = tuple(
            dict.fromkeys(name for name in wanted if name != _PLAIN and is_allowed(name, max_risk))
        )
        self.min_gain, self.min_bytes = min_gain, min_bytes
        self.plain_steps, self.check_steps = plain_steps, check_steps
        self._explicit_group = process_group
        self._bound_group: dist.ProcessGroup | None = None
        self._model: weakref.ref[torch.nn.Module] | None = None
        self._names: Any = WeakTensorKeyDictionary()
        self._begin()

    def _begin(self) -> None:
        self.choice, self.is_settled = _PLAIN, False
        self.reason = "nothing is decided yet: plain all-reduce is being timed"
        self.predictions: dict[str, float] = {}
        self.measured: dict[str, float] = {}
        self._queue: list[str] = []
        self._current: tuple[HookFunction, Any] | None = None
        self._coming: tuple[HookFunction, Any] | None = None
        self._owed: dict[str, torch.Tensor] = {}
        self._settled_passes = 0
        self._clock = StepClock()
        self._candidates = Candidates()
        self._futures: list[torch.futures.Future[Any]] = []

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group the gradients are averaged in."""
        return resolve_group(self._explicit_group or self._bound_group)

    def bind(self, model: torch.nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
        """Learn parameter names and the group; `register_ddp_comm_hook` does it."""
        inner = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
        self._model = weakref.ref(model)
        self._names = WeakTensorKeyDictionary({p: name for name, p in inner.named_parameters()})
        if process_group is None and isinstance(model, torch.nn.parallel.DistributedDataParallel):
            process_group = model.process_group
        self._bound_group = process_group
        for made in (self._current, self._coming):
            if made is not None:
                self._bind(made[1])

    def _bind(self, state: Any) -> None:
        model = self._model() if self._model is not None else None
        if model is not None and callable(getattr(state, "bind", None)):
            state.bind(model, self.process_group)

    # Steps ----------------------------------------------------------------------------------------------------

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket by the hook of the hour; at the end of some steps, measure and decide.

        Everything collective happens in here, at the same bucket of the same step on every rank.
        """
        index = bucket.index()
        if index == 0 and self._coming is not None:
            self._current, self._coming = self._coming, None
        if self._current is None:
            self._current = (allreduce_hook, self.process_group)
        if self._owed:
            self._pay(bucket)
        hook, state = self._current
        if self.is_settled:
            self._settled_passes += index == 0
            # Not in the first: what was owed is paid in it, on those ranks that owe something.
            if index == 0 and self.choice == _PLAIN and self._settled_passes > 1:
                self._step_aside()
            return as_future(hook(state, bucket))
        buffer = bucket.buffer()
        dense = buffer.layout == torch.strided
        self._clock.called(index, buffer.numel() * buffer.element_size() if dense else 0)
        decides = self._clock.steps > WARM_STEPS + (
            self.plain_steps if self.choice == _PLAIN else self.check_steps
        )
        if decides and self.choice == _PLAIN and dense:
            self._candidates.add(bucket, first=index == 0)
        future = as_future(hook(state, bucket))
        if index == 0:
            self._futures.clear()
        self._futures.append(future)
        if not bucket.is_last():
            return future
        if decides:
            for one in self._futures:
                one.wait()
            self._futures.clear()
            self._decide(buffer.device)
            return future
        self._settle_early()
        clock = self._clock

        def ended(done: torch.futures.Future[Any]) -> torch.Tensor:
            clock.ended()
            return value_of(done)

        return future.then(ended)

    def _settle_early(self) -> None:
        """Where no codec can pay, nothing is measured."""
        if self.choice != _PLAIN or self._clock.steps < WARM_STEPS:
            return
        nbytes, world_size = sum(self._clock.bucket_bytes()), self.process_group.size()
        if world_size == 1:
            self._settle("there is one rank: nothing is exchanged")
        elif nbytes < self.min_bytes:
            self._settle(
                f"{nbytes} bytes of gradients are fewer than min_bytes={self.min_bytes}: latency decides, not size"
            )
        elif not self.candidates:
            self._settle("no candidate is within max_risk")

    def _decide(self, device: torch.device) -> None:
        """Choose after the plain steps; after a trial, keep the hook, try the next, or go back to plain all-reduce."""
        if self.choice == _PLAIN:
            found = choose(self._clock.seen(), self._candidates, self.candidates, self.process_group)
            self.measured[_PLAIN] = found.plain_seconds
            self.predictions = found.predictions
            self._queue = [
                name
                for name in sorted(self.candidates, key=lambda name: found.predictions[name])
                if found.predictions[name] <= found.plain_seconds * (1 - self.min_gain)
            ][:_MOST_TRIALS]
            self._next(found)
            return
        (seconds,) = agree([self._clock.seen().period_seconds], self.process_group, device)
        self.measured[self.choice] = seconds
        plain = self.measured[_PLAIN]
        if seconds <= plain * (1 - _MIN_MEASURED_GAIN):
            self._settle(
                f"{self.choice} takes {seconds:.3f} s a step, plain all-reduce took {plain:.3f} s "
                f"(predicted: {self.predictions[self.choice]:.3f} s)"
            )
            return
        self._log(f"{self.choice} took {seconds:.3f} s a step, plain all-reduce {plain:.3f} s: not kept")
        self._leave()
        self._next(None)

    def _next(self, found: Choice | None) -> None:
        """Put the first hook of the queue to work; plain all-reduce when it is empty."""
        plain = self.measured[_PLAIN]
        if self._queue:
            name = self._queue.pop(0)
            made = _make(name, self.process_group)
            self._bind(made[1])
            self.choice, self._coming = name, made
            self.reason = (
                f"{name} is predicted to take {self.predictions[name]:.3f} s a step, "
                f"plain all-reduce takes {plain:.3f} s"
            )
            self._clock.restart()
            self._log(f"{self.reason}; it is on trial from the next step on")
            return
        self.choice, self._coming = _PLAIN, (allreduce_hook, self.process_group)
        if found is not None:
            told = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in sorted(found.predictions.items()))
            self._settle(
                f"plain all-reduce takes {plain:.3f} s a step and no candidate is predicted to save "
                f"{100 * self.min_gain:.0f} % ({told})"
            )
        else:
            tried = ", ".join(f"{n} {s:.3f} s" for n, s in sorted(self.measured.items()) if n != _PLAIN)
            self._settle(
                f"plain all-reduce takes {plain:.3f} s a step, and on trial none was 3 % faster ({tried})"
            )

    def _settle(self, reason: str) -> None:
        self.is_settled, self.reason = True, reason
        self._queue = []
        self._candidates.clear()
        self._log(f"chose {self.choice}: {reason}")

    def _log(self, text: str) -> None:
        _logger.log(logging.INFO if self.process_group.rank() == 0 else logging.DEBUG, "auto hook: %s", text)

    def _step_aside(self) -> None:
        """Leave plain all-reduce to DDP: without a hook it saves a pass over the gradients."""
        handle = self._handle()
        if handle is not None and handle.hook is auto_hook:
            handle.step_aside()

    def _handle(self) -> HookHandle | None:
        model = self._model() if self._model is not None else None
        handle = _handles.get(model) if model is not None else None
        return handle if handle is not None and handle.state is self else None

    # What a codec owes ------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Keep what the hook on trial has not sent yet, for the next step."""
        state = self._current[1] if self._current is not None else None
        if hasattr(state, "state_dict"):
            if len(self._names) == 0:
                _logger.warning(
                    "auto hook: what %s has not sent yet is dropped, since parameter names are unknown: register "
                    "through register_ddp_comm_hook, or call state.bind(model)",
                    self.choice,
                )
                return
            self._owe(state)

    def _owe(self, state: Any) -> None:
        for name, tensors in state.fold(state.state_dict()).items():
            if "residual" in tensors:
                self._owed[name] = tensors["residual"].reshape(-1)

    def _pay(self, bucket: GradBucket) -> None:
        for entry in read_bucket(bucket).slices:
            name = self._names.get(entry.key) if isinstance(entry.key, torch.Tensor) else None
            owed = self._owed.pop(name, None) if name is not None else None
            if owed is not None:
                entry.values.add_(owed.to(entry.values))
        if bucket.is_last() and self._owed:
            _logger.warning(
                "auto hook: what was not sent yet of %s is dropped, since they are in no bucket of this step",
                ", ".join(sorted(self._owed)),
            )
            self._owed.clear()

    # Saving ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: the choice, its reason, and the chosen hook's own state; one file a rank.

        Raises: RuntimeError: the chosen hook needs parameter names and has none; see `HookState.state_dict`.
        """
        made = self._coming or self._current
        inner = made[1].state_dict() if made is not None and hasattr(made[1], "state_dict") else {}
        group = self.process_group
        return {
            "format": _FORMAT,
            "rank": group.rank(),
            "world_size": group.size(),
            "choice": self.choice,
            "is_settled": self.is_settled,
            "reason": self.reason,
            "predictions": dict(self.predictions),
            "measured": dict(self.measured),
            "queue": list(self._queue),
            "inner": inner,
            "tensors": inner.get("tensors", {}),
            "owed": {name: tensor.clone() for name, tensor in self._owed.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from a saved state: with a choice if it had one, otherwise from the first plain step.

        Args:
            state: this rank's, or those of all ranks. For another number of ranks all are needed; then the measurement
                begins anew, and what a codec still owed is shared out and added to the first step's gradients.
        Raises: ValueError: not such a state, another rank's, or for another number of ranks when given alone.
        """
        group = self.process_group
        handle = self._handle()
        if handle is not None:
            handle.replace(handle.hook, self)  # it may have stepped aside
        states = [state] if isinstance(state, Mapping) else list(state)
        for one in states:
            if one.get("format") != _FORMAT:
                raise ValueError(
                    f"not a state of the auto hook: format is {one.get('format')!r}, expected {_FORMAT!r}"
                )
        world_size = states[0]["world_size"] if states else 0
        if world_size == group.size():
            mine = [one for one in states if one["rank"] == group.rank()]
            if not mine:
                raise ValueError(
                    f"rank {group.rank()}'s state is missing, got those of ranks {[one['rank'] for one in states]}: "
                    "every rank loads its own, or all of them"
                )
            self._continue(mine[0])
            return
        if sorted(one["rank"] for one in states) != list(range(world_size)) or not states:
            raise ValueError(
                f"the state was saved by {world_size} ranks, this group has {group.size()}: "
                "pass the list of all ranks' states"
            )
        self._begin()
        by_rank = {one["rank"]: one for one in states}
        if states[0]["inner"]:
            made = _make(states[0]["choice"], group)
            self._bind(made[1])
            made[1].load_state_dict([by_rank[rank]["inner"] for rank in range(world_size)])
            self._owe(made[1])
        for old in range(group.rank(), world_size, group.size()):
            for name, tensor in by_rank[old]["owed"].items():
                held = self._owed.get(name)
                self._owed[name] = tensor.clone() if held is None else held + tensor.to(held)

    def _continue(self, state: Mapping[str, Any]) -> None:
        self._begin()
        self.choice, self.is_settled, self.reason = state["choice"], state["is_settled"], state["reason"]
        self.predictions, self.measured = dict(state["predictions"]), dict(state["measured"])
        self._queue = list(state["queue"])
        self._owed = {name: tensor.clone() for name, tensor in state["owed"].items()}
        made = _make(self.choice, self.process_group)
        self._bind(made[1])
        if state["inner"]:
            made[1].load_state_dict(state["inner"])
        self._current = made

    def fold(self, state: Mapping[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
        """A saved state's residuals by parameter name, each counting once; see `HookState.fold`."""
        folded: dict[str, dict[str, torch.Tensor]] = {}
        if state["inner"]:
            _, inner = _make(state["choice"], self.process_group)
            for name, tensors in inner.fold(state["inner"]).items():
                if "residual" in tensors:
                    folded[name] = {"residual": tensors["residual"]}
        for name, tensor in state["owed"].items():
            held = folded.get(name, {}).get("residual")
            folded[name] = {"residual": tensor if held is None else held.reshape(-1) + tensor}
        return folded


def _make(name: str, group: dist.ProcessGroup | None) -> tuple[HookFunction, Any]:
    from tensorplay.distributed.algorithms.ddp_comm_hooks.register import make_hook

    return make_hook(name, group)


@describe()
def auto_hook(state: AutoState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients by the hook that is fastest here, plain all-reduce included, found in the first steps.

    Args:
        state: an `AutoState`. bucket: any dtype, dense or sparse.
    Wire: that of the hook in use (`state.choice`); while deciding, samples of up to 32 MB a candidate, once.
    Raises: TypeError: `state` isn't an AutoState.
    Example:
        >>> from tensorplay.distributed.algorithms.ddp_comm_hooks import register_ddp_comm_hook
        >>> def wrap(model):                         # model: DDP, torch's or ours
        ...     handle = register_ddp_comm_hook("auto", model, AutoState(max_risk="usually-safe"))
        ...     return handle.state                  # .choice, .is_settled and .reason tell what it does
    """
    if not isinstance(state, AutoState):
        raise TypeError(
            f"auto_hook needs an AutoState as its state, got {type(state).__name__}: "
            'register_ddp_comm_hook("auto", model)'
        )
    return state.exchange(bucket)
