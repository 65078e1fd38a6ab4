"""Averaging at several levels: often over a few near ranks, seldom over all."""

from collections import OrderedDict
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist

from tensorplay.distributed.algorithms.model_averaging.averagers import ModelAverager, positive_integer
from tensorplay.distributed.algorithms.model_averaging.groups import is_member, subgroup_by_size
from tensorplay.distributed.algorithms.model_averaging.utils import Parameters

__all__ = ["HierarchicalModelAverager"]


class HierarchicalModelAverager(ModelAverager):
    """Average parameters over groups of growing size at growing periods, after a warm-up.

        step >= warmup_steps:  average over the group of the largest period that divides `step`, if any does
        phase="warmup":        the same with `step - warmup_steps`, so that the first averaging is at `warmup_steps`

    Args:
        period_group_size_dict: period in steps -> group size, periods and sizes ascending. A group of size n holds n
            consecutive ranks of `process_group`. The last size is the size of `process_group`.
        warmup_steps: steps before the first averaging.
        process_group: all ranks that average; None for the default group.
        phase: "step" counts periods from step 0, as torch does; "warmup" counts them from `warmup_steps`, as
            PeriodicModelAverager does.
        module, average_buffers, bucket_cap_mb: see `ModelAverager`.
    Attributes:
        period_process_group_dict: period -> the group this rank averages over at that period.
    Raises:
        TypeError: a period, size or `warmup_steps` is not an integer.
        ValueError: the mapping is empty; a period or size < 1; periods not ascending; a size that does not divide the
            next; a last size that is not the size of `process_group`; warmup_steps < 0; an unknown phase.
    Groups: constructing makes groups, so every rank of the job constructs one at the same point.
    Paper: Wang et al. 2020, "Demystifying why local aggregation helps: convergence analysis of hierarchical SGD".
    Differs: sizes and periods are checked at construction (torch accepts unsorted and non-nesting ones); `phase`; else
        as PeriodicModelAverager differs.
    Example: with 16 ranks, over 8 every 4 steps and over all 16 every 16:
        >>> def make():  # within a process group, on every rank
        ...     return HierarchicalModelAverager({4: 8, 16: 16}, warmup_steps=100)
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
        *,
        phase: Literal["step", "warmup"] = "step",
        module: torch.nn.Module | None = None,
        average_buffers: bool = False,
        bucket_cap_mb: float = 25.0,
    ) -> None:
        super().__init__(
            process_group, module=module, average_buffers=average_buffers, bucket_cap_mb=bucket_cap_mb
        )
        self.warmup_steps = positive_integer("warmup_steps", warmup_steps, least=0)
        if phase not in ("step", "warmup"):
            raise ValueError(f'phase must be "step" or "warmup", got {phase!r}')
        self.phase = phase
        self._sizes = dict(period_group_size_dict or {})
        if is_member(self.process_group):
            _check_levels(self._sizes, self.process_group.size())
            self._make_groups()

    def _make_groups(self) -> None:
        self.period_process_group_dict = OrderedDict(
            (period, subgroup_by_size(self.process_group, size)) for period, size in self._sizes.items()
        )

    def _find_process_group(self) -> dist.ProcessGroup | None:
        """Return the group that averages at this step, or None."""
        since = self.step - self.warmup_steps
        count = since if self.phase == "warmup" else self.step
        if since < 0:
            return None
        for period in reversed(self.period_process_group_dict):
            if count % period == 0:
                return self.period_process_group_dict[period]
        return None

    def average_parameters(self, params: Parameters) -> None:
        """Average `params` in place over the group whose turn it is, if any, then count the step.

        Args: params: see PeriodicModelAverager.
        """
        if not hasattr(self, "period_process_group_dict") and is_member(self.process_group):
            self._make_groups()  # loaded from a pickle; every rank comes here at its first step
        tensors = self._begin(params)
        group = self._find_process_group() if is_member(self.process_group) else None
        if group is not None:
            self._average_over(group, tensors)
        self.step += 1

    def _portable_state(self) -> dict[str, Any]:
        state = super()._portable_state()
        state.pop("period_process_group_dict", None)
        return state

    def _restore(self, state: dict[str, Any], original: ModelAverager | None) -> None:
        super()._restore(state, original)
        if isinstance(original, HierarchicalModelAverager) and hasattr(original, "period_process_group_dict"):
            self.period_process_group_dict = original.period_process_group_dict


def _check_levels(sizes: dict[int, int], group_size: int) -> None:
    """Raise unless the levels form a hierarchy: see the class."""
    if not sizes:
        raise ValueError("period_group_size_dict must not be empty: give at least {period: group size}")
    levels = [
        (positive_integer("a period", p), positive_integer("a group size", n)) for p, n in sizes.items()
    ]
    for (period, size), (next_period, next_size) in pairwise(levels):
        if next_period <= period:
            raise ValueError(f"periods must ascend, got {period} before {next_period}: sort the mapping")
        if next_size % size:
            raise ValueError(
                f"each group size must divide the next, got {size} before {next_size}: groups would not nest"
            )
    if levels[-1][1] != group_size:
        raise ValueError(
            f"the last group size must be the size of process_group, {group_size}, got {levels[-1][1]}"
        )
