"""One open Join block: it announces iterations while this rank has data, and repeats the others' afterwards."""

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.algorithms.join as torch_join

from tensorplay.compression import participation
from tensorplay.distributed.algorithms._join_ddp import DDPShadow
from tensorplay.distributed.algorithms._join_presence import Notice, Whereabouts, is_group_failure

__all__ = ["Block", "BlockSettings", "Membership", "Phase", "Shadows"]

Phase = Literal["forward", "backward", "end"]
Hook = DDPShadow | torch_join.JoinHook
Shadows = list[tuple[Callable[[], object], Phase, int]]

_SKEW_WARNING_ITERATIONS = 1000


@dataclass(frozen=True)
class BlockSettings:
    """What a block is made of.

    Args:
        joinables, hooks: in order, a hook for each joinable. shadows: function, phase, place of the joinable; may grow.
        group, device: of the presence check.
        throws: early termination raises. by_active_ranks: means divide by the ranks that have data.
    """

    joinables: Sequence[Any]
    hooks: Sequence[Hook]
    shadows: Shadows
    group: dist.ProcessGroup
    device: torch.device
    throws: bool
    by_active_ranks: bool


class Membership:
    """What `joinable._join_config` holds inside a block; it has the fields of torch's.

    torch's `notify_join_context` reads `enable` and `is_first_joinable` and starts torch's presence check if both
    hold. A joinable that calls it therefore starts ours here, and is then told that there is nothing left to do.
    `enable` also makes DDP ask for the owner of the buffers, and say whether it will average gradients.
    """

    throw_on_early_termination = False

    def __init__(self, block: "Block", announces: bool, enable: bool) -> None:
        self._block = weakref.ref(block)
        self._announces = announces
        self.enable = enable

    @property
    def is_first_joinable(self) -> bool:
        """False, after the presence check was started."""
        self.announce()
        return False

    def announce(self) -> Any:
        """Start the presence check if this joinable is the one to do it; returns its Work or None."""
        block = self._block()
        if not self._announces or block is None:
            return None
        notice = block.announce()
        return None if notice is None else notice.work


class Block:
    """The state of one `with` block on this rank; see `Join` for the order of its steps."""

    def __init__(self, settings: BlockSettings) -> None:
        self._settings = settings
        self._group = settings.group
        self._whereabouts = Whereabouts(settings.group)
        self._unpublished = False
        self._terminated = False
        self.notice: Notice | None = None
        self.joined = False
        self.synchronizes = True

    def open(self) -> None:
        """Tell the joinables that they are in a block."""
        by_active_ranks = self._settings.by_active_ranks and not self._settings.throws
        at_first_gradient = self._at_first_gradient if by_active_ranks else None
        announces = True
        for joinable, hook in zip(self._settings.joinables, self._settings.hooks, strict=True):
            if isinstance(hook, DDPShadow):
                hook.open(self.announce if announces else self._current_notice, announces, at_first_gradient)
                joinable._join_config = Membership(self, False, hook.asks_for_synchronization)
            else:
                joinable._join_config = Membership(self, announces, True)
            announces = False

    def close(self) -> None:
        """Switch everything off again."""
        disabled: Any = torch_join._JoinConfig.construct_disabled_join_config
        for joinable, hook in zip(self._settings.joinables, self._settings.hooks, strict=True):
            joinable._join_config = disabled()
            if isinstance(hook, DDPShadow):
                hook.close()
        participation.set_active(self._group, None)

    def leave(self, error: BaseException) -> None:
        """Tell the others about an error of this rank.

        Raises: RuntimeError: the error is that of a failed collective; names the rank that was lost.
        """
        if self._terminated:
            return
        if not is_group_failure(error):
            self._whereabouts.leave_word(error)
            return
        raise RuntimeError(
            f"rank {self._own_rank()} lost the other ranks inside a Join block: {self._whereabouts.explain()} ({error})"
        ) from error

    def _own_rank(self) -> int:
        return dist.get_process_group_ranks(self._group)[self._group.rank()]

    # While this rank has data

    def announce(self, trains: bool = True, synchronizes: bool = True) -> Notice | None:
        """Start the presence check of an iteration; nothing waits for it unless early termination raises."""
        if self.joined:
            return None
        if self._terminated:
            self._raise_termination()
        settings = self._settings
        self.notice = Notice(self._group, settings.device, settings.throws, True, trains, synchronizes)
        self._unpublished = settings.by_active_ranks
        if settings.throws:
            self._raise_if_uneven()
        return self.notice

    def _current_notice(self, trains: bool, synchronizes: bool) -> Notice | None:
        return None if self.joined else self.notice

    def _at_first_gradient(self, gradient: torch.Tensor) -> None:
        if self._unpublished:
            self._publish()

    def _publish(self) -> None:
        """Let every mean of this package divide by the ranks that have data."""
        self._unpublished = False
        if self._settings.by_active_ranks and self.notice is not None and self.notice.active:
            participation.set_active(self._group, self.notice.active)

    def _raise_if_uneven(self) -> None:
        if self.notice is not None and 0 < self.notice.active < self._group.size():
            self._raise_termination()

    def _raise_termination(self) -> None:
        assert self.notice is not None
        self._terminated = True
        ranks = self.notice.without_data()
        raise RuntimeError(
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} ran out of data while "
            f"{self.notice.active} of {self._group.size()} ranks had some: throw_on_early_termination=True ends the "
            "block on every rank"
        )

    # Once it has run out

    def stand_in(self) -> None:
        """Repeat the others' iterations until no rank has data, then finish."""
        if self._terminated:
            return
        self.joined = True
        iterations = 0
        while True:
            self.notice = Notice(self._group, self._settings.device, self._settings.throws, has_data=False)
            if self.notice.active == 0:
                break
            if self._settings.throws:
                self._raise_if_uneven()
            self._publish()
            if iterations == _SKEW_WARNING_ITERATIONS:
                self._warn_of_skew()
            self._repeat_iteration(self.notice)
            iterations += 1
        participation.set_active(self._group, None)
        for hook in self._settings.hooks:
            hook.post_hook(iterations == 0)

    def _repeat_iteration(self, notice: Notice) -> None:
        self.synchronizes = True
        for place, hook in enumerate(self._settings.hooks):
            if isinstance(hook, DDPShadow):
                self.synchronizes = hook.forward(notice)
                self._run_shadows("forward", place)
                if self.synchronizes:
                    hook.backward()
            else:
                self._run_shadows("forward", place)
                hook.main_hook()
            if self.synchronizes:
                self._run_shadows("backward", place)
        for place in range(len(self._settings.hooks)):
            self._run_shadows("end", place)

    def _run_shadows(self, phase: Phase, place: int) -> None:
        for function, its_phase, its_place in self._settings.shadows:
            if its_phase == phase and its_place == place:
                function()

    def _warn_of_skew(self) -> None:
        warnings.warn(
            f"rank {self._own_rank()} has had no data for {_SKEW_WARNING_ITERATIONS} iterations of the other ranks: "
            "its hardware only helps them communicate. Spread the data more evenly",
            stacklevel=4,
        )
