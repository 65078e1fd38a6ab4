"""Post-local SGD: gradients are averaged over all ranks at first, later over near ranks only, or not at all."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook as torch_hook

from tensorplay.compression.bucket import GradBucket, read_bucket
from tensorplay.compression.participation import resolve_group
from tensorplay.compression.state import HookState
from tensorplay.distributed.algorithms.ddp_comm_hooks import default_hooks
from tensorplay.distributed.algorithms.ddp_comm_hooks._protocol import (
    HookFunction,
    as_future,
    completed,
    describe,
)
from tensorplay.distributed.algorithms.model_averaging.groups import (
    check_divides,
    host_identity,
    subgroup_by_key,
)

__all__ = ["PostLocalSGDState", "post_localSGD_hook"]

_logger = logging.getLogger(__name__)


class PostLocalSGDState(torch_hook.PostLocalSGDState):
    """What `post_localSGD_hook` needs and counts.

        step < start_localSGD_iter:                    gradient = mean over process_group
        later, post_local_gradient_allreduce=True:     gradient = mean over subgroup
        later, post_local_gradient_allreduce=False:    gradient = this rank's own

    After the switch nothing keeps all ranks together but an averager: PeriodicModelAverager with
    `warmup_steps=start_localSGD_iter`, or another one.

    Args:
        process_group: None for the default group.
        subgroup: near ranks, this one among them. None: subgroups of `group_size` ranks, or the ranks of each host.
            They are made at the switch, inside the first backward after it, or earlier by calling `local_group()` on
            all ranks.
        start_localSGD_iter: steps with the mean over `process_group`.
        post_local_gradient_allreduce: keep a gradient exchange, inside `subgroup`, after the switch.
        group_size: ranks in a subgroup, consecutive ones of `process_group`; only without `subgroup`.
        hook: does the exchange instead of a plain all-reduce, as `hook(hook_state, bucket)`.
        make_hook_state: makes `hook`'s state for a group; called once for `process_group` and once for the subgroup.
            None: the group is the state, as default_hooks and the quantization hooks take it.
    Attributes:
        iter: steps so far. A step is a backward pass that averages gradients, unless `step()` is called.
    Raises: TypeError: start_localSGD_iter is no integer, `make_hook_state` without `hook`. ValueError: a negative
        start_localSGD_iter, group_size < 1, `group_size` with `subgroup`; at the switch, see `local_group`.
    Saving: `state_dict()` holds numbers and tensors. The object pickles too: without its groups, which are found again
        at first use.
    Paper: Lin et al. 2018, "Don't use large mini-batches, use local SGD".
    Differs: torch's needs CUDA for `subgroup=None` and takes hosts to have equal numbers of devices; its counter stops
        at the switch; it does not pickle with a subgroup. As torch's, and unlike the name suggests,
        `post_local_gradient_allreduce` exchanges within the subgroup only.
    Example: int8 gradients inside either group:
        >>> from tensorplay.distributed.algorithms.ddp_comm_hooks import compressed_hook as compressed
        >>> def int8(group):
        ...     return compressed.CompressedHookState("int8", process_group=group)
        >>> state = PostLocalSGDState(None, None, 100, hook=compressed.compressed_hook, make_hook_state=int8)
        >>> def register(ddp):
        ...     ddp.register_comm_hook(state, post_localSGD_hook)
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        subgroup: dist.ProcessGroup | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
        *,
        group_size: int | None = None,
        hook: HookFunction | None = None,
        make_hook_state: Callable[[dist.ProcessGroup], Any] | None = None,
    ) -> None:
        if isinstance(start_localSGD_iter, bool) or not isinstance(start_localSGD_iter, int):
            raise TypeError(f"start_localSGD_iter must be an integer, got {start_localSGD_iter!r}")
        if start_localSGD_iter < 0:
            raise ValueError(f"start_localSGD_iter must be >= 0, got {start_localSGD_iter}")
        if group_size is not None and group_size < 1:
            raise ValueError(f"group_size must be >= 1, got {group_size}")
        if group_size is not None and subgroup is not None:
            raise ValueError("give subgroup or group_size, not both: a subgroup has its size")
        if make_hook_state is not None and hook is None:
            raise TypeError("make_hook_state makes the state of hook=: give that too")
        super().__init__(  # type: ignore[no-untyped-call]
            process_group, subgroup, start_localSGD_iter, post_local_gradient_allreduce
        )
        self.group_size = group_size
        self.hook = hook
        self.make_hook_state = make_hook_state
        self._start()

    def _start(self) -> None:
        self._made_subgroup = False  # by a rule, so that a loaded state can make it again
        self._saved_ranks: tuple[int, ...] | None = None  # of a subgroup that was passed, in a loaded state
        self._lost_process_group = False
        self._explicit_from: int | None = None  # iter when step() was first called
        self._counted_from = self.iter
        self._hook_states: dict[str, Any] = {}
        self._waiting_hook_states: dict[str, Any] = {}
        self._model: torch.nn.Module | None = None
        self._bound_group: dist.ProcessGroup | None = None

    def step(self) -> None:
        """Count one step. From the first call on, backward passes are not counted.

        For gradient accumulation without `no_sync`, where one step has several backward passes: call it once a step.
        """
        if self._explicit_from is None:
            self._explicit_from = self.iter = self._counted_from
        self._advance()

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count a step if `bucket` is the last of its backward pass and `step()` is not in use."""
        if self._explicit_from is None and bucket.is_last():
            self._advance()

    def _advance(self) -> None:
        self.iter += 1
        if self.iter == self.start_localSGD_iter:
            _logger.info("local SGD starts after %d steps", self.iter)

    def global_group(self) -> dist.ProcessGroup:
        """Return the group of the first phase.

        Raises: RuntimeError: the state was pickled on another group than the default one, and has not been given it.
        """
        if self.process_group is None and self._bound_group is None and self._lost_process_group:
            raise RuntimeError(
                "this state was pickled on a group other than the default one: set state.process_group after loading it"
            )
        return resolve_group(self.process_group or self._bound_group)

    def local_group(self) -> dist.ProcessGroup:
        """Return the subgroup of the second phase, made at the first call, which all ranks make at the same point.

        Raises: ValueError: on all ranks: `group_size` does not divide the number of ranks; subgroups would have to be
            made of a `process_group` that is not the default one; a loaded state belongs to other ranks.
        """
        if self.subgroup is None:
            everyone = self.global_group()
            if self._saved_ranks is not None:
                member = dist.get_rank() in self._saved_ranks
                self.subgroup = subgroup_by_key(everyone, self._saved_ranks if member else None)
            elif self.group_size is None:
                self.subgroup = subgroup_by_key(everyone, host_identity())
            else:
                check_divides(everyone, self.group_size)
                self.subgroup = subgroup_by_key(everyone, everyone.rank() // self.group_size)
            self._made_subgroup = True
        subgroup: dist.ProcessGroup = self.subgroup
        return subgroup

    def bind(self, model: torch.nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
        """Give the states of `hook` the parameters' names, and take a DDP's group where `process_group` is None.

        `register_ddp_comm_hook` and our DDP do it; on plain torch DDP None means the default group.
        """
        self._model = model
        if process_group is None and isinstance(model, torch.nn.parallel.DistributedDataParallel):
            process_group = model.process_group
        self._bound_group = process_group
        for inner in self._hook_states.values():
            if hasattr(inner, "bind"):
                inner.bind(model, inner.process_group)

    def hook_state(self, phase: str, group: dist.ProcessGroup) -> Any:
        """Return the state `hook` gets in `phase` ("global" or "local"), made at its first use.

        Raises: ValueError: `make_hook_state` made a state on another group than the one it was given.
        """
        if self.make_hook_state is None:
            return group
        if phase not in self._hook_states:
            inner = self.make_hook_state(group)
            if getattr(inner, "process_group", group) != group:
                raise ValueError(
                    f"make_hook_state(group) must make a state on that group, its {type(inner).__name__} is on "
                    "another: pass process_group=group"
                )
            if self._model is not None and hasattr(inner, "bind"):
                inner.bind(self._model, group)
            if isinstance(inner, HookState):
                inner.memory.unwatch()  # this backward has begun: what it used before now went unseen
            if phase in self._waiting_hook_states:
                inner.load_state_dict(self._waiting_hook_states.pop(phase))
            self._hook_states[phase] = inner
        return self._hook_states[phase]

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the state dicts of `hook`'s states; loads with `torch.load(weights_only=True)`."""
        inner = {
            phase: state.state_dict()
            for phase, state in self._hook_states.items()
            if hasattr(state, "state_dict")
        }
        return {"iter": self.iter, "hook_states": {**self._waiting_hook_states, **inner}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore `state_dict()`.

        Raises: KeyError: it is not one. What the states of `hook` raise.
        """
        self.iter = self._counted_from = int(state_dict["iter"])
        self._explicit_from = None
        self._waiting_hook_states = dict(state_dict["hook_states"])
        for phase, inner in self._hook_states.items():
            if phase in self._waiting_hook_states:
                inner.load_state_dict(self._waiting_hook_states.pop(phase))

    def __getstate__(self) -> dict[str, Any]:
        size, ranks = self.group_size, self._saved_ranks
        if self.subgroup is not None and not self._made_subgroup:
            members = dist.get_process_group_ranks(self.subgroup)
            everyone = dist.get_process_group_ranks(self.global_group())
            consecutive = [everyone[i : i + len(members)] for i in range(0, len(everyone), len(members))]
            if members in consecutive and len(everyone) % len(members) == 0:
                size = len(members)
            else:
                ranks = tuple(members)
        return {
            "start_localSGD_iter": self.start_localSGD_iter,
            "post_local_gradient_allreduce": self.post_local_gradient_allreduce,
            "group_size": size,
            "saved_ranks": ranks,
            "on_default_group": self._is_on_default_group(),
            "hook": self.hook,
            "make_hook_state": self.make_hook_state,
            **self.state_dict(),
        }

    def _is_on_default_group(self) -> bool:
        if self.process_group is None:
            return not self._lost_process_group
        return bool(self.process_group == dist.group.WORLD)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__init__(  # type: ignore[no-untyped-call]
            None, None, state["start_localSGD_iter"], state["post_local_gradient_allreduce"]
        )
        self.group_size, self.hook = state["group_size"], state["hook"]
        self.make_hook_state = state["make_hook_state"]
        self._start()
        self._saved_ranks = state["saved_ranks"]
        self._lost_process_group = not state["on_default_group"]
        self.load_state_dict(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PostLocalSGDState":
        new = memo[id(self)] = object.__new__(type(self))
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        new.process_group, new.subgroup = self.process_group, self.subgroup
        new.group_size, new._made_subgroup = self.group_size, self._made_subgroup
        new._bound_group = self._bound_group
        return new


def _exchange(
    state: PostLocalSGDState, bucket: GradBucket, dtype: torch.dtype | None
) -> torch.futures.Future[torch.Tensor]:
    """See `post_localSGD_hook`; float values enter collectives in `dtype` where a cast wrapper asks for one."""
    if isinstance(bucket, tuple):
        read_bucket(bucket)  # raises: such a hook can't count steps
    local = state.iter >= state.start_localSGD_iter
    state.maybe_increase_iter(bucket)
    if local and not state.post_local_gradient_allreduce:
        return completed(bucket.buffer())
    group = state.local_group() if local else state.global_group()
    if group.size() == 1:
        return completed(bucket.buffer())
    hook = state.hook or default_hooks.allreduce_hook
    if dtype is not None:
        hook = _WRAPPERS[dtype](hook)
    inner = group if state.hook is None else state.hook_state("local" if local else "global", group)
    return as_future(hook(inner, bucket))


_WRAPPERS = {
    torch.float16: default_hooks.fp16_compress_wrapper,
    torch.bfloat16: default_hooks.bf16_compress_wrapper,
}


@describe(cast=_exchange)
def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients over all ranks until the switch, then over the subgroup, or not at all.

    1. Choose the group by the steps so far (see PostLocalSGDState); count the step with its last bucket.
    2. No exchange, or a group of one rank: the gradient is its own mean.
    3. Otherwise `state.hook`, or a plain all-reduce, over the group.

    Args: state: a PostLocalSGDState. bucket: as DDP gives it; gradients of any dtype, dense or sparse.
    Returns: a future of the averaged bucket, in the bucket's dtype.
    Wire: that of an all-reduce over the group in use, 2 (n - 1) / n times the bucket's bytes each way for n ranks, or
        that of `state.hook`; 0 without an exchange.
    Raises: TypeError: the bucket is of DDP's Python reducer, where a hook can't count steps.
    Example: see PostLocalSGDState.
    """
    return _exchange(state, bucket, None)
