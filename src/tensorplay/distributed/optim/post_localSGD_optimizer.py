"""An optimizer that steps locally and then averages parameters: local SGD around any `torch.optim` optimizer."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from tensorplay.distributed.algorithms.join import Join, Joinable, JoinHook

__all__ = ["ModelAveragingOptimizer", "PostLocalSGDOptimizer"]


class PostLocalSGDOptimizer(Optimizer, Joinable):
    """Step a local optimizer, then let an averager average its parameters.

        1. optim.step()                                  skipped on a rank whose GradScaler found an inf or nan
        2. averager.average_parameters(param_groups)     never skipped, so the schedule is the same on every rank

    `param_groups`, `state` and `defaults` are the local optimizer's own objects, always, also after `load_state_dict`
    and `add_param_group`: learning-rate schedulers work on either. Step and state-dict hooks may be registered here or
    on the local optimizer.

    Args:
        optim: the local optimizer, any subclass of torch.optim.Optimizer.
        averager: a ModelAverager, or anything with `average_parameters(params)` and `step`.
    Attributes: optim, averager: as given.
    Raises: TypeError: an argument is neither.
    GradScaler: call `scaler.step(optimizer)` with this optimizer. A rank whose own gradients overflow leaves its
        parameters as they are in that step and takes part in the averaging. `scaler.unscale_(optimizer)` before it,
        for clipping, works as usual.
    Join: pass this optimizer to Join, not its averager as well. A joined rank makes no local step and takes part in
        every scheduled averaging with its last parameters.
    Paper: Lin et al. 2018, "Don't use large mini-batches, use local SGD".
    Differs: torch's keeps a second list of parameter groups, has no `defaults`, closure, copies or hooks, and loses a
        step's averaging when GradScaler skips it. This class is not a subclass of torch's, whose import warns.
    Example:
        >>> from tensorplay.distributed.algorithms.model_averaging import PeriodicModelAverager
        >>> def make_optimizer(model):  # within a process group
        ...     inner = torch.optim.SGD(model.parameters(), lr=0.01)
        ...     return PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=4, warmup_steps=100))
    """

    _step_supports_amp_scaling = True  # GradScaler then always calls step() and leaves the skipping to it

    def __init__(self, optim: Optimizer, averager: Any) -> None:
        if not isinstance(optim, Optimizer):
            raise TypeError(f"optim must be a torch.optim.Optimizer, got {type(optim).__name__}")
        if not (callable(getattr(averager, "average_parameters", None)) and hasattr(averager, "step")):
            raise TypeError(
                "averager must have average_parameters(params) and step, as a ModelAverager has, "
                f"got {type(averager).__name__}"
            )
        self.__setstate__({"optim": optim, "averager": averager})

    def __getstate__(self) -> dict[str, Any]:
        return {"optim": self.optim, "averager": self.averager}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.optim: Optimizer = state["optim"]
        self.averager: Any = state["averager"]
        super().__setstate__({})  # the hook tables and the hooked step, with no groups or state of its own
        Joinable.__init__(self)
        if hasattr(self.averager, "bind"):
            self.averager.bind(self.param_groups)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The local optimizer's parameter groups."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optim.param_groups = groups

    @property
    def state(self) -> Any:
        """The local optimizer's state."""
        return self.optim.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optim.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The local optimizer's defaults."""
        return self.optim.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optim.defaults = defaults

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.optim!r}"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the local optimizer, then average if the averager's schedule says so.

        Args: closure: handed to the local optimizer, which evaluates it.
        Returns: what the local optimizer's step returns, usually the closure's loss.
        Raises: RuntimeError: a closure together with a GradScaler. ValueError: float16 gradients to be unscaled.
        """
        self._enter_join()
        if "found_inf" in self.__dict__:
            if closure is not None:
                raise RuntimeError("a closure can't be used with GradScaler: step without it")
            result = self._scaled_step(self.__dict__["grad_scale"], self.__dict__["found_inf"])
        else:
            result = self.optim.step() if closure is None else self.optim.step(closure)
        self.averager.average_parameters(self.param_groups)
        return result

    def _scaled_step(self, grad_scale: torch.Tensor | None, found_inf: torch.Tensor) -> Any:
        """Step as GradScaler would: unscale (`grad_scale` is None when that is done), skip on an inf or nan.

        A fused local optimizer does both in its kernel and gets what GradScaler gave.
        """
        if getattr(self.optim, "_step_supports_amp_scaling", False):
            inner: Any = self.optim
            inner.grad_scale, inner.found_inf = grad_scale, found_inf
            try:
                return inner.step()
            finally:
                del inner.grad_scale, inner.found_inf
        if grad_scale is not None:
            self._unscale(grad_scale)
        return None if bool(found_inf) else self.optim.step()

    @torch.no_grad()
    def _unscale(self, grad_scale: torch.Tensor) -> None:
        factor = 1.0 / float(grad_scale)
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if gradient.dtype == torch.float16:
                    raise ValueError(
                        "float16 gradients can't be unscaled: keep parameters in float32 under autocast"
                    )
                (gradient._values() if gradient.is_sparse else gradient).mul_(factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as the local optimizer does."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the local optimizer; the averager averages it from the next averaging on."""
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the local optimizer's state dict with the averager's step under "step".

        The averager's own `state_dict()`, where it has one, is under "averager": DiLoCo keeps more than its step.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        saved: dict[str, Any] = self.optim.state_dict()
        saved["step"] = self.averager.step
        if hasattr(self.averager, "state_dict"):
            saved["averager"] = self.averager.state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, saved)
            saved = saved if changed is None else changed
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore `state_dict()`, the averager's step included.

        A state dict with no "step" (of the bare local optimizer) warns and sets the averager's step to 0. One without
        "averager" restores the step alone, which is all that torch's saves.

        Raises: ValueError: what the local optimizer or the averager raises when the groups differ.
        """
        saved = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, saved)
            saved = saved if changed is None else changed
        step, averager = saved.pop("step", None), saved.pop("averager", None)
        self.optim.load_state_dict(saved)
        if averager is not None and hasattr(self.averager, "load_state_dict"):
            self.averager.load_state_dict(averager)
        elif step is not None:
            self.averager.step = step
        else:
            warnings.warn(
                "the loaded state dict holds no step of an averager: the averager starts again at step 0",
                stacklevel=2,
            )
            self.averager.step = 0
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the averager's hook: a joined rank makes no local step and averages when it is due.

        Raises: TypeError: the averager is not a Joinable.
        """
        self._joinable_averager().bind(self.param_groups)
        hook: JoinHook = self._joinable_averager().join_hook(**kwargs)
        return hook

    @property
    def join_device(self) -> torch.device:
        """Where the parameters are."""
        device: torch.device = self.param_groups[0]["params"][0].device
        return device

    @property
    def join_process_group(self) -> Any:
        """The averager's group."""
        return self._joinable_averager().join_process_group

    def _enter_join(self) -> None:
        averager_joins = isinstance(self.averager, Joinable) and self.averager._join_config.enable
        if averager_joins and self._join_config.enable:
            raise ValueError(
                "Join got both this optimizer and its averager, so a joined rank would average twice: pass the "
                "optimizer alone"
            )
        Join.notify_join_context(self)

    def _joinable_averager(self) -> Any:
        if not isinstance(self.averager, Joinable):
            raise TypeError(f"{type(self.averager).__name__} can't be used in Join: it is not a Joinable")
        return self.averager


ModelAveragingOptimizer = PostLocalSGDOptimizer
"""Another name of PostLocalSGDOptimizer: the averager need not be local SGD's."""
