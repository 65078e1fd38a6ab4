"""Averagers keep replicas together by averaging parameters every few steps instead of gradients every step."""

import copy
import warnings
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from tensorplay.compression.collective import Traffic
from tensorplay.compression.participation import resolve_group
from tensorplay.distributed.algorithms.join import Join, Joinable, JoinHook
from tensorplay.distributed.algorithms.model_averaging.flat_mean import FlatMean
from tensorplay.distributed.algorithms.model_averaging.groups import (
    group_device,
    is_member,
    refuse_pickled_group,
)
from tensorplay.distributed.algorithms.model_averaging.utils import (
    Parameters,
    named_tensors,
    trainable_parameters,
)

__all__ = ["ModelAverager", "PeriodicModelAverager"]


def positive_integer(name: str, value: Any, least: int = 1) -> int:
    """Return `value` when it is an integer of at least `least`, else raise naming the rule."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")
    return value


class ModelAverager(Joinable):
    """Base of all averagers: a step counter, a group, and what Join needs to shadow them.

    A subclass writes `average_parameters(params)`, which every rank calls once a training step, after the optimizer. It
    starts with `self._begin(params)` and ends by adding 1 to `self.step`.

    Args:
        process_group: ranks that average; None for the default group.
        module: the model whose floating buffers (BatchNorm statistics) are averaged with `average_buffers`, and whose
            parameters a joined rank shadows with before it made a step.
        average_buffers: average floating buffers of `module` too, element by element, whenever parameters are averaged.
            Integer and boolean buffers (num_batches_tracked) stay as they are.
        bucket_cap_mb: bound of the scratch, in MiB.
    Attributes:
        step: calls of `average_parameters` so far.
        traffic: bytes this averager handed to collectives.
    Raises: ValueError: `average_buffers` without `module`; a bad `bucket_cap_mb`.
    Join: an averager is a Joinable. A rank that ran out of data takes part in every scheduled averaging with its last
        parameters, its counter goes on alike, so the mean is always over all ranks of the group. One iteration
        shadows one call of `average_parameters`; inside our Join, those under `no_sync` shadow none. Driven by
        PostLocalSGDOptimizer, give Join the optimizer instead of the averager.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        module: torch.nn.Module | None = None,
        average_buffers: bool = False,
        bucket_cap_mb: float = 25.0,
    ) -> None:
        super().__init__()
        if average_buffers and module is None:
            raise ValueError("average_buffers=True needs module=, the model whose buffers are meant")
        self.process_group = resolve_group(process_group)
        self.step = 0
        self._flat = FlatMean(bucket_cap_mb)
        self._buffers_of = module if average_buffers else None
        self._bound = [] if module is None else [p for _, p in named_tensors(module)]
        self._shadowing = False

    @abstractmethod
    def average_parameters(self, params: Parameters) -> None:
        """Average `params` if this step is one of the schedule's, and count the step."""
        raise NotImplementedError

    def average_now(self, params: Parameters | None = None) -> None:
        """Average over the whole group now, whatever the schedule says, without counting a step. A collective.

        At the end of training, or before an evaluation, it makes all replicas bit-identical.

        Args: params: None for those of the last `average_parameters`, or bound ones.
        """
        if params is not None:
            self.bind(params)
        self._average_over(self.process_group, self._bound)

    @property
    def traffic(self) -> Traffic:
        """Bytes handed to collectives by this averager, sent and received."""
        return self._flat.traffic

    def bind(self, params: Parameters) -> None:
        """Remember the parameters, for a joined rank that has to shadow before its first step."""
        self._bound = [tensor for _, tensor in named_tensors(params)]

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs: the step. The same on every rank."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore `state_dict()`.

        Raises: KeyError: there is no "step".
        """
        self.step = int(state_dict["step"])

    def _begin(self, params: Parameters) -> list[torch.Tensor]:
        """Tell Join that this rank is still there, remember the parameters, and return them all."""
        if not self._shadowing:
            Join.notify_join_context(self)
        self.bind(params)
        return self._bound

    def _average_over(self, group: dist.ProcessGroup, params: Iterable[torch.Tensor]) -> None:
        """Average the trainable ones of `params`, and the buffers, over `group` now; nothing on a rank outside it."""
        if not is_member(group):
            return
        self._flat.average_([*trainable_parameters(params), *self._averaged_buffers()], group)

    def _averaged_buffers(self) -> list[torch.Tensor]:
        if self._buffers_of is None:
            return []
        return [b for b in self._buffers_of.buffers() if b.is_floating_point() or b.is_complex()]

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook with which a joined rank takes part in the averaging (see the class)."""
        return _AveragerJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """Where Join's own small collectives run: where the parameters are, else where the group's backend works."""
        if self._bound:
            return self._bound[0].device
        return group_device(self.process_group)

    @property
    def join_process_group(self) -> Any:
        """The averager's group."""
        return self.process_group

    def _shadow(self) -> None:
        """Do what one step of a rank that still has data does, with this rank's last parameters."""
        if not self._bound:
            raise RuntimeError(
                f"this rank has to take part in averaging, but {type(self).__name__} has not seen its parameters: it "
                "had no step before it ran out of data; pass module= to the averager, or call averager.bind(params)"
            )
        self._shadowing = True
        try:
            self.average_parameters(list(self._bound))
        finally:
            self._shadowing = False

    def _portable_state(self) -> dict[str, Any]:
        """Return the attributes that can be copied and pickled: no groups, no parameters that are merely remembered."""
        state = self.__dict__.copy()
        del state["process_group"]
        return state | {"_bound": []}

    def _restore(self, state: dict[str, Any], original: "ModelAverager | None") -> None:
        """Take a portable state, and groups from the copied averager, or the default one when loaded from a pickle."""
        self.__dict__.update(state)
        Joinable.__init__(self)
        self.process_group = resolve_group(None) if original is None else original.process_group

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelAverager":
        new = memo[id(self)] = object.__new__(type(self))
        new._restore(copy.deepcopy(self._portable_state(), memo), self)
        return new

    def __getstate__(self) -> dict[str, Any]:
        refuse_pickled_group(type(self).__name__, self.process_group)
        return self._portable_state()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._restore(state, None)


class PeriodicModelAverager(ModelAverager):
    """Average parameters over a group every `period` steps, after a warm-up.

        step >= warmup_steps and (step - warmup_steps) % period == 0:   p = mean over ranks of p

    Args:
        period: steps between averagings. 1 warns: averaging gradients by DDP costs no more.
        warmup_steps: steps before the first averaging, usually `PostLocalSGDState.start_localSGD_iter`.
        process_group, module, average_buffers, bucket_cap_mb: see `ModelAverager`.
    Raises: TypeError: `period` or `warmup_steps` is not an integer. ValueError: period < 1, warmup_steps < 0.
    Paper: Lin et al. 2018, "Don't use large mini-batches, use local SGD".
    Differs: the set is every parameter with `requires_grad` (torch: with a gradient); parameters keep their storage and
        strides; the averager is a Joinable, can average buffers, and can be copied and saved.
    Example:
        >>> def train(model, optimizer, loss_function, batches):  # within a process group
        ...     averager = PeriodicModelAverager(period=4, warmup_steps=100)
        ...     for inputs, targets in batches:
        ...         optimizer.zero_grad()
        ...         loss_function(model(inputs), targets).backward()
        ...         optimizer.step()
        ...         averager.average_parameters(model.parameters())
        ...     averager.average_now()
    """

    def __init__(
        self,
        period: int,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
        *,
        module: torch.nn.Module | None = None,
        average_buffers: bool = False,
        bucket_cap_mb: float = 25.0,
    ) -> None:
        super().__init__(
            process_group, module=module, average_buffers=average_buffers, bucket_cap_mb=bucket_cap_mb
        )
        self.warmup_steps = positive_integer("warmup_steps", warmup_steps, least=0)
        self.period = positive_integer("period", period)
        if period == 1:
            warnings.warn(
                "period=1 averages parameters after every step, which costs no less than averaging gradients: "
                "DistributedDataParallel alone does that",
                stacklevel=2,
            )

    def average_parameters(self, params: Parameters) -> None:
        """Average `params` in place if this step is scheduled, then count the step.

        Args: params: a module, parameters, (name, parameter) pairs, or optimizer parameter groups; iterators too.
        """
        tensors = self._begin(params)
        since = self.step - self.warmup_steps
        if since >= 0 and since % self.period == 0:
            self._average_over(self.process_group, tensors)
        self.step += 1


class _AveragerJoinHook(JoinHook):
    """Shadows one call of `average_parameters`; nothing is left to do once all ranks have joined.

    Iterations that average no gradients (no_sync, evaluation) belong to no optimizer step: nothing is shadowed.
    """

    def __init__(self, averager: ModelAverager) -> None:
        self.averager = averager

    def main_hook(self) -> None:
        if self.join is None or self.join.synchronizes:
            self.averager._shadow()
