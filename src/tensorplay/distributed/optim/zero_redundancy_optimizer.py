"""An optimizer whose state is spread over the ranks: each rank updates its share of the parameters."""

import copy
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.optim as torch_optim
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from tensorplay.compression.driver import Lane, lane_for
from tensorplay.compression.participation import resolve_group
from tensorplay.distributed.algorithms._join_block import Membership
from tensorplay.distributed.algorithms.join import Join
from tensorplay.distributed.optim._zero_exchange import PARAMETERS_KEY, WORKERS, FlatParts, share_parameters
from tensorplay.distributed.optim._zero_join import StepHook, refresh_gradients
from tensorplay.distributed.optim._zero_shards import Shards
from tensorplay.distributed.optim._zero_state import collect_states

__all__ = ["ZeroRedundancyOptimizer"]

_log = logging.getLogger(__name__)
_CPU = torch.device("cpu")


class ZeroRedundancyOptimizer(torch_optim.ZeroRedundancyOptimizer):
    """Keep 1/world_size of the optimizer's state on each rank, and give the same parameters as the whole optimizer.

        owner(p): the parameters, largest first, each to the rank that has the fewest bytes so far
        step:     rank r updates {p : owner(p) = r} from p.grad, then every rank receives the others' parameters

    Gradients must be averaged before (DistributedDataParallel does). Bytes sent and received a rank and step, with P
    the bytes of the trainable parameters and W ranks:  P (W-1)/W, as even as the partition is.

    With `overlap_with_ddp=True` the updates are made inside backward, as each bucket of gradients arrives, by a hook
    from `tensorplay.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook`; then `step()` has nothing to do.

    Args:
        params: as for any optimizer: parameters, (name, parameter) pairs or groups, in an order equal on all ranks.
        optimizer_class: any `torch.optim.Optimizer` subclass that updates each parameter from its own gradient and
            state.
        process_group: the ranks that share the work; the default group if None.
        parameters_as_bucket_view: make the parameters of each owner views of one buffer, which travels as it is: saves
            two copies of each parameter a step and the room for them. Parameters get new memory (`p.data` changes).
        overlap_with_ddp: updates are made by a hook.
        defaults: for optimizer_class (lr, …).

    Works with several groups, LR schedulers (they change `param_groups`, which the next step follows), hooks, frozen
    and empty parameters, parameters of several dtypes, fewer parameters than ranks, and a parameter larger than all
    others together. `state` holds what this rank owns. `step(closure)` evaluates the closure once, on all ranks.

    Memory: state of the partition's share; scratch of about 8 MB for each of four workers, none with
    `parameters_as_bucket_view`.

    Checkpoints: all ranks call `consolidate_state_dict(to)`; then `state_dict()` on rank `to` is that of the whole
    optimizer, on the CPU. It loads into a plain `optimizer_class` and back, at any world size.

    Raises:
        TypeError: optimizer_class is no optimizer class.
        ValueError: LBFGS, which uses all gradients at once; parameters_as_bucket_view together with overlap_with_ddp
            (there, parameters travel bucket by bucket), or with parameters that have gaps in memory.
        RuntimeError: torch.distributed is not initialised.

    Example:
        >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.consolidate_state_dict()
        >>> sorted(optimizer.state_dict()["state"])
        [0, 1]
        >>> dist.destroy_process_group()

    Paper: Rajbhandari et al. 2020, ZeRO, section 5.1 (optimizer state partitioning).
    Differs: works with Gloo in every mode; any optimizer, any groups and dtypes; a frozen parameter travels only when
    it has a gradient; gradients are right on a rank that ran out of data inside Join; `state_dict()` refuses to give a
    part or what is out of date. It is an instance of torch's class so that frameworks that look for that one know it.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        _check_class(optimizer_class)
        if parameters_as_bucket_view and overlap_with_ddp:
            raise ValueError(
                "parameters_as_bucket_view=True can't be used with overlap_with_ddp=True, where parameters travel "
                "bucket by bucket and not owner by owner: leave it out"
            )
        self.process_group = resolve_group(process_group)
        self.rank = self.process_group.rank()
        self.world_size = self.process_group.size()
        self._optimizer_class = optimizer_class
        self._in_hook = overlap_with_ddp
        self._has_hook = False
        self._said_no_step = False
        self._views = parameters_as_bucket_view
        self._flat: dict[torch.device, FlatParts] | None = None
        self._consolidated: dict[torch.Tensor, Any] | None = None
        self._consolidated_to: int | None = None
        self._shards: Shards | None = None
        Optimizer.__init__(self, params, defaults)
        Joinable.__init__(self)
        self._shards = Shards(optimizer_class, defaults, self.param_groups, self.rank, self.world_size)
        self.state = self.optim.state
        self.defaults = self.optim.defaults  # complete: schedulers look there for what the optimizer has
        if self._views:
            self._make_views()

    # Parts --------------------------------------------------------------------------------------------------------

    @property
    def shards(self) -> Shards:
        """Who owns what, and the optimizer of this rank's part."""
        assert self._shards is not None
        return self._shards

    @property
    def optim(self) -> Optimizer:
        """The optimizer of this rank's part: an optimizer_class instance."""
        return self.shards.optimizer

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters are spread over the ranks by themselves, the others stay where they are.

        Raises: RuntimeError: a hook already makes the updates.
        """
        if self._shards is None:
            Optimizer.add_param_group(self, param_group)
            return
        if self._has_hook:
            raise RuntimeError("add_param_group must be called before the hook is made from this optimizer")
        Optimizer.add_param_group(self, param_group)
        self._shards.add_group(self.param_groups[-1])
        self._forget_consolidated()
        if self._views:
            self._make_views()

    def _parts(self, device: torch.device) -> list[list[torch.Tensor]]:
        """By owner, the parameters on `device` that a step may change."""
        parts: list[list[torch.Tensor]] = [[] for _ in range(self.world_size)]
        for parameter, owner in zip(self.shards.parameters, self.shards.owners, strict=True):
            if parameter.device == device and (parameter.requires_grad or parameter.grad is not None):
                parts[owner].append(parameter)
        return parts

    def _devices(self) -> list[torch.device]:
        return list(dict.fromkeys(parameter.device for parameter in self.shards.parameters))

    def lane(self, device: torch.device) -> Lane:
        """Where this optimizer's exchanges of tensors on `device` run."""
        return lane_for(self.process_group, PARAMETERS_KEY, device, workers=WORKERS)

    def _make_views(self) -> None:
        self._flat = {device: FlatParts(self._parts(device), device) for device in self._devices()}

    # Stepping -----------------------------------------------------------------------------------------------------

    def step(  # type: ignore[override]  # one signature for torch's two overloads
        self, closure: Callable[[], float] | None = None, **kwargs: Any
    ) -> float | None:
        """Update this rank's part and receive the rest. All ranks must call it.

        With `overlap_with_ddp=True` backward has made the updates already: nothing happens, and a log line says so
        once. Schedulers, `GradScaler.step` and Join call it, so loops need not change.

        Args:
            closure: computes the loss and the gradients; called once.
            kwargs: for optimizer_class's step.

        Raises:
            ValueError: a closure with `overlap_with_ddp=True`.
            RuntimeError: `overlap_with_ddp=True` and no hook was made from this optimizer.
        """
        Join.notify_join_context(self)
        if self._in_hook:
            self._say_no_step(closure)
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step(has_data=True, arguments=kwargs)
        return loss

    def step_without_data(self) -> None:
        """Repeat a step of the ranks that have data, inside Join."""
        if not self._in_hook:  # in the hook's mode DDP's part of Join runs the hook
            self._step(has_data=False, arguments={})

    def _step(self, has_data: bool, arguments: dict[str, Any]) -> None:
        """1. Inside torch's Join: gradients for ranks without data. 2. Update the part. 3. Exchange parameters."""
        self._forget_consolidated()
        if self._join_config.enable and not isinstance(self._join_config, Membership):
            for device in self._devices():
                refresh_gradients(self.lane(device), self._parts(device), has_data, device)
        self.shards.step(arguments)
        self._share()

    def _share(self) -> None:
        for device in self._devices():
            lane = self.lane(device)
            if self._flat is not None and device in self._flat:
                self._flat[device].share(lane)
            else:
                share_parameters(lane, self._parts(device), device)

    def _say_no_step(self, closure: Any) -> None:
        if closure is not None:
            raise ValueError(
                "step(closure) can't be used with overlap_with_ddp=True: backward makes the updates, so compute the "
                "loss and call backward without a closure"
            )
        if not self._has_hook:
            raise RuntimeError(
                "overlap_with_ddp=True leaves the updates to a hook, and none was made: register "
                "hook_with_zero_step(hook, ddp, optimizer) with ddp.register_comm_hook, or pass "
                "overlap_with_ddp=False"
            )
        if not self._said_no_step:
            self._said_no_step = True
            _log.warning("ZeroRedundancyOptimizer.step(): nothing to do, backward makes the updates")

    # What hooks use -------------------------------------------------------------------------------------------------

    def hand_over(self, unscales: bool) -> None:
        """Let a hook make the updates from now on.

        Args:
            unscales: the hook also undoes the loss scale; GradScaler.step then only looks for inf, and calls step.

        Raises:
            ValueError: made with overlap_with_ddp=False.
            RuntimeError: another hook has them.
        """
        if not self._in_hook:
            raise ValueError(
                "the optimizer must be made with overlap_with_ddp=True for a hook to make its updates"
            )
        if self._has_hook:
            raise RuntimeError(
                "a hook was already made from this optimizer; make one optimizer for each hook"
            )
        self._has_hook = True
        if unscales:
            self._step_supports_amp_scaling = True

    def updates_begin(self) -> None:
        """A hook is about to change parameters and state."""
        self._forget_consolidated()

    @property
    def _overlap_with_ddp(self) -> bool:  # type: ignore[override]
        raise TypeError(
            "torch's hook_with_zero_step can't use this optimizer: take hook_with_zero_step from "
            "tensorplay.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook"
        )

    # Saving ---------------------------------------------------------------------------------------------------------

    def _forget_consolidated(self) -> None:
        self._consolidated = self._consolidated_to = None

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect every rank's state on rank `to`, on the CPU, so that `state_dict()` works there.

        All ranks must call it, at a point between steps. Owner by owner, about 8 MB of parameters at a time.

        Args:
            to: a rank of the group.

        Raises: ValueError: no such rank.
        """
        if not 0 <= to < self.world_size:
            raise ValueError(f"to must be a rank of the group, 0 to {self.world_size - 1}, got {to}")
        self._forget_consolidated()
        states = collect_states(self.shards, to, self.lane(_CPU))
        self._consolidated_to = to
        if self.rank == to:
            self._consolidated = {self.shards.parameters[number]: states[number] for number in sorted(states)}

    def state_dict(self) -> dict[str, Any]:
        """The whole optimizer's state, as a plain optimizer_class gives it, tensors on the CPU.

        Raises: RuntimeError: not consolidated on this rank since the last step.
        """
        if self._consolidated is None:
            if self._consolidated_to is not None:
                raise RuntimeError(
                    f"the state was consolidated on rank {self._consolidated_to} and this is rank {self.rank}: call "
                    "state_dict() there, or consolidate_state_dict(to=…) for another rank on all ranks"
                )
            raise RuntimeError(
                "each rank holds a part of the state: call consolidate_state_dict(to) on all ranks, after the last "
                "step, then state_dict() on rank `to`"
            )
        self.state = self._consolidated  # type: ignore[assignment]
        try:
            return Optimizer.state_dict(self)
        finally:
            self.state = self.optim.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the settings, and the state of the parameters this rank owns; every rank loads the same dict.

        Args:
            state_dict: of a consolidated optimizer of this class or torch's, or of a plain optimizer_class; of any
                world size.

        Raises: ValueError: other groups, or groups of other lengths.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        self.shards.load(state_dict)
        self.state = self.optim.state
        self._forget_consolidated()
        for done_hook in self._optimizer_load_state_dict_post_hooks.values():
            done_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a ZeroRedundancyOptimizer belongs to its process group and can't be pickled: save state_dict() after "
            "consolidate_state_dict(), or use copy.deepcopy for a second one on the same group"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "ZeroRedundancyOptimizer":
        """A second optimizer of copied parameters, on the same group. As for any optimizer, hooks stay behind."""
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        Joinable.__init__(other)
        for name in ("process_group", "rank", "world_size", "_optimizer_class", "_in_hook", "_views"):
            setattr(other, name, getattr(self, name))
        other._has_hook, other._said_no_step, other._flat = False, False, None
        other._forget_consolidated()
        other._shards = copy.deepcopy(self.shards, memo)
        Optimizer.__setstate__(
            other,
            {
                "defaults": copy.deepcopy(self.defaults, memo),
                "param_groups": copy.deepcopy(self.param_groups, memo),
                "state": other._shards.optimizer.state,
            },
        )
        if other._views:
            other._make_views()
        return other

    # Join -----------------------------------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> StepHook:
        """What a rank without data does inside Join: the steps of the others.

        Differs: under this package's Join, steps are left out where gradients are not averaged (no_sync). torch's Join
        can't tell, so there every iteration of the others must step.
        """
        return StepHook(self)

    @property
    def join_device(self) -> torch.device:
        """The first parameter's device."""
        return self.shards.parameters[0].device

    @property
    def join_process_group(self) -> Any:
        """The group whose ranks share the work."""
        return self.process_group


def _check_class(optimizer_class: Any) -> None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(
            f"optimizer_class must be a torch.optim.Optimizer subclass, got {optimizer_class!r}: pass the class, and "
            "its arguments as keywords"
        )
    if issubclass(optimizer_class, torch_optim.ZeroRedundancyOptimizer):
        raise TypeError("optimizer_class must be the optimizer to share out, not a ZeroRedundancyOptimizer")
    if issubclass(optimizer_class, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS uses the gradients of all parameters at once and can't be shared out over ranks: use it unsharded"
        )
