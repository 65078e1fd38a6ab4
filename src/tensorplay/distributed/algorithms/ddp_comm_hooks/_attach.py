"""How a hook gets onto a DDP module: one trampoline that stays, behind which hooks are swapped.

torch's DDP takes one hook for ever and insists on its signature. The trampoline has the right signature, calls whatever
hook is current, accepts a Future or a Tensor, and adds the first failing rank's text to errors.

A hook also has to divide by the number of ranks, in a pass of its own; without one DDP divides as it copies gradients.
`HookHandle.step_aside` takes the trampoline off for that: DDP's reducer is made anew, as when a DDP is unpickled.
"""

import contextlib
import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist

from tensorplay.compression.bucket import GradBucket
from tensorplay.compression.collective import group_store
from tensorplay.compression.driver import LaneError
from tensorplay.distributed.algorithms._join_block import Membership
from tensorplay.distributed.algorithms.ddp_comm_hooks._protocol import (
    HookFunction,
    as_future,
    takes_group,
    value_of,
)
from tensorplay.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

__all__ = ["HookHandle", "attach"]

_handles: "weakref.WeakKeyDictionary[torch.nn.Module, HookHandle]" = weakref.WeakKeyDictionary()


class _Trampoline:
    """The hook DDP holds. It knows the group, the current hook and the one that comes with the next backward pass."""

    def __init__(self, group: dist.ProcessGroup, hook: HookFunction, state: Any) -> None:
        self.group, self.hook, self.state = group, hook, state
        self.coming: tuple[HookFunction, Any] | None = None
        self.lock = threading.Lock()
        self.fault_key = f"tensorplay/fault/{group.group_name}"

    def call(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        with self.lock:
            if self.coming is not None and bucket.index() == 0:
                self.hook, self.state = self.coming
                self.coming = None
            hook, state = self.hook, self.state
        try:
            future = as_future(hook(state, bucket))
        except BaseException as error:
            if not isinstance(error, LaneError):
                self.note_fault(error)
            raise
        return future.then(self.check)

    def check(self, future: torch.futures.Future[Any]) -> torch.Tensor:
        """The hook's tensor; when it failed, the error with the first failing rank's own text."""
        try:
            return value_of(future)
        except RuntimeError as error:
            text = _own_words(str(error))
            if not text.startswith("rank ") and (note := self.read_fault()):
                text = f"{note}\n[seen on rank {self.group.rank()} as] {text}"
            raise RuntimeError(text) from error

    def note_fault(self, error: BaseException) -> None:
        text = f"rank {self.group.rank()} failed in its communication hook: {type(error).__name__}: {error}"
        with contextlib.suppress(
            RuntimeError
        ):  # the store's host may be gone; the error is raised all the same
            group_store(self.group).compare_set(self.fault_key, "", text)

    def read_fault(self) -> str | None:
        try:
            store = group_store(self.group)
            return store.get(self.fault_key).decode() if store.check([self.fault_key]) else None
        except RuntimeError:
            return None


def _own_words(text: str) -> str:
    """An error's own text, without what passing through futures wraps around it."""
    text = text.split("\n\nAt:\n")[0]
    while "Got the following error when running the callback: " in text:
        text = text.split("Got the following error when running the callback: ", 1)[1]
        text = text.split(": ", 1)[1] if ": " in text else text
    return text


def _trampoline_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    trampoline: _Trampoline = state
    return trampoline.call(bucket)


class HookHandle:
    """What registration returns: swaps or removes the hook of a DDP module.

    Changes take effect with the next backward pass and must be made on all ranks alike.

    Example:
        >>> def later(handle, hook, state):
        ...     handle.replace(hook, state)   # from the next backward pass on
        ...     handle.remove()               # back to plain all-reduce
    """

    def __init__(self, trampoline: _Trampoline, model: torch.nn.parallel.DistributedDataParallel) -> None:
        self._trampoline = trampoline
        self._model = weakref.ref(model)
        self._is_attached = True
        self._waiting: torch.utils.hooks.RemovableHandle | None = None

    def replace(self, hook: HookFunction, state: Any = None) -> None:
        """Exchange gradients by `hook` with `state` from the next backward pass on.

        Raises: TypeError: `hook` isn't callable. RuntimeError: the module is gone.
        """
        model = self._model()
        if model is None:
            raise RuntimeError("the DDP module of this handle is gone")
        hook, state = _prepared(model, hook, state)
        self._come_back(model)
        with self._trampoline.lock:
            self._trampoline.coming = (hook, state)

    def remove(self) -> None:
        """Go back to plain all-reduce from the next backward pass on; DDP does it without a hook where it can."""
        self.replace(allreduce_hook, None)
        self.step_aside()

    def step_aside(self) -> None:
        """Leave plain all-reduce to DDP itself, from the next forward pass on; `replace` ends it.

        Call it on all ranks alike, outside `no_sync`, when the hook does nothing that DDP doesn't. Where DDP can't be
        given a reducer like its own at that moment the hook stays, until this is called again: mixed precision, delayed
        parameters, the Python reducer, a compiled forward, parameters frozen since the module was wrapped, within Join.
        """
        model = self._model()
        if model is not None and self._is_attached and self._waiting is None:
            self._waiting = model.register_forward_pre_hook(self._leave)

    def _leave(self, model: Any, inputs: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        # A reducer that looks for unused parameters notes their use in no_sync too: it can't be changed in between.
        if not (
            model.require_backward_grad_sync or (model.find_unused_parameters and not model.static_graph)
        ):
            return
        self._stop_waiting()
        if model._join_config.enable or isinstance(model._join_config, Membership):
            return  # a rank that has run out of data makes no forward pass
        self._is_attached = not _forget_hook(model)

    def _come_back(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        self._stop_waiting()
        if not self._is_attached:
            torch.nn.parallel.DistributedDataParallel.register_comm_hook(
                model, self._trampoline, _trampoline_hook
            )
            self._is_attached = True

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.remove()
            self._waiting = None

    @property
    def hook(self) -> HookFunction:
        """The hook the next backward pass uses."""
        coming = self._trampoline.coming
        return coming[0] if coming else self._trampoline.hook

    @property
    def state(self) -> Any:
        """The state the next backward pass uses."""
        coming = self._trampoline.coming
        return coming[1] if coming else self._trampoline.state


def _prepared(
    model: torch.nn.parallel.DistributedDataParallel, hook: HookFunction, state: Any
) -> tuple[HookFunction, Any]:
    """Check a hook and tell its state the model: parameter names, and the group where none was given."""
    if not callable(hook):
        raise TypeError(
            f"a communication hook must be callable as hook(state, bucket), got {type(hook).__name__}"
        )
    python_reducer = getattr(model, "_use_python_reducer", False)
    base = getattr(hook, "func", hook)
    if python_reducer and getattr(base, "_tensorplay_single_collective", None) is False:
        raise RuntimeError(
            f"{getattr(hook, '__name__', hook)} needs DDP's C++ reducer, but torch._dynamo.config.optimize_ddp is "
            '"python_reducer", which discards what a hook returns. Set it to "ddp_optimizer" before wrapping the '
            "model, or use allreduce_hook, fp16_compress_hook or bf16_compress_hook"
        )
    if state is None and takes_group(hook):
        state = model.process_group
    bind = getattr(state, "bind", None)
    if callable(bind):
        bind(model, model.process_group)
    return hook, state


def _forget_hook(model: Any) -> bool:
    """Give a DDP module a reducer without a hook, as `DistributedDataParallel.__setstate__` makes it."""
    if (
        getattr(model, "_use_python_reducer", False)
        or getattr(model, "mixed_precision", None) is not None
        or getattr(model, "_delay_all_reduce_params", None)
        or not all(hasattr(model, name) for name in _REMAKES_REDUCER)
    ):
        return False
    parameters, expects_sparse = model._build_params_for_reducer()
    before = model.reducer
    if len(parameters) != model._get_ddp_logging_data().get("num_parameter_tensors"):
        return False  # some are frozen for now: a reducer without them would not average them later
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, expects_sparse, names, model.static_graph)
    if model.static_graph:
        model._static_graph_delay_allreduce_enqueued = False
        model.reducer._set_static_graph()
        model.logger._set_static_graph()
    before._remove_autograd_hooks()
    model._has_rebuilt_buckets = False
    model._comm_hooks.clear()
    return True


_REMAKES_REDUCER = ("_build_params_for_reducer", "_build_debug_param_to_name_mapping", "_ddp_init_helper")


def attach(model: torch.nn.parallel.DistributedDataParallel, hook: HookFunction, state: Any) -> HookHandle:
    """Register `hook` on a DDP module, torch's or ours; a second call replaces the first hook.

    Raises: TypeError: `hook` isn't callable or `model` isn't a DDP module. RuntimeError: the hook can't serve the
        module's reducer, or torch's own registration holds another hook.
    """
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise TypeError(
            f"model must be a DistributedDataParallel module, got {type(model).__name__}: wrap it first"
        )
    handle = _handles.get(model)
    if handle is not None:
        handle.replace(hook, state)
        return handle
    hook, state = _prepared(model, hook, state)
    trampoline = _Trampoline(model.process_group, hook, state)
    if getattr(model, "_use_python_reducer", False):
        model._comm_hooks.append((hook, state))  # traced by the compiler, so nothing may stand between
    else:
        torch.nn.parallel.DistributedDataParallel.register_comm_hook(model, trampoline, _trampoline_hook)
    handle = _handles[model] = HookHandle(trampoline, model)
    return handle
