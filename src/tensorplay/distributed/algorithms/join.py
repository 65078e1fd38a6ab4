"""Uneven inputs: ranks that run out of data keep the others going.

    with Join([ddp, optimizer]):
        for batch in batches:                     # a different number on each rank
            optimizer.zero_grad()
            loss(ddp(batch)).backward()
            optimizer.step()

A rank that leaves its loop while others have data stands in for itself: it repeats the collectives of their
iterations and contributes gradients of zero, until every rank has left.
"""

from abc import abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed.algorithms.join as torch_join
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed.algorithms._join_block import Block, BlockSettings, Hook, Membership, Phase
from tensorplay.distributed.algorithms._join_checks import (
    check_ddps,
    check_joinables,
    common_group,
    no_constructor,
)
from tensorplay.distributed.algorithms._join_ddp import DDPShadow

__all__ = ["Join", "JoinHook", "Joinable"]

Shadow = TypeVar("Shadow", bound=Callable[[], object])


class JoinHook(torch_join.JoinHook):
    """What one joinable does on a rank that has run out of data.

    `join` is the block that runs the hook, or None inside torch's own Join: `join.synchronizes` tells whether the
    iteration that is being repeated averages gradients.

    Example:
        >>> class Counting(JoinHook):
        ...     def __init__(self):
        ...         self.iterations = 0
        ...
        ...     def main_hook(self):
        ...         self.iterations += 1
        >>> hook = Counting()
        >>> hook.main_hook()
        >>> hook.iterations, hook.join
        (1, None)

    Differs: torch's has no `join`.
    """

    join: "Join | None" = None

    def main_hook(self) -> None:
        """Repeat the collectives of one iteration of a rank that has data. Called once an iteration of theirs."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Finish, once no rank has data.

        Args:
            is_last_joiner: this rank was among the last to have data.
        """


class Joinable(torch_join.Joinable):
    """Something with collectives in each iteration that a rank without data can repeat.

    A subclass calls `super().__init__()`, and `Join.notify_join_context(self)` before its first collective of an
    iteration, and says how to repeat them in `join_hook`. It works inside this package's Join and inside torch's.
    """

    @abstractmethod
    def __init__(self) -> None:
        super().__init__()

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> torch_join.JoinHook:
        """Return the hook for one block.

        Args:
            kwargs: the keyword arguments given to Join, the same for every joinable.
        """

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """The device for the block's own collectives."""

    @property
    @abstractmethod
    def join_process_group(self) -> Any:
        """The group whose ranks take part; the same for every joinable of a block."""


class Join:
    """Let ranks with different numbers of batches share collectives.

    While some ranks have data, with g_r the gradient of rank r and 0 for a rank without data:

        gradient = sum_r g_r / world_size                  (divide_by_initial_world_size=True)
        gradient = sum_r g_r / ranks that have data        (divide_by_initial_world_size=False)

    Steps on a rank that has run out, for each iteration of the others:
      1. presence check: how many ranks have data; none ends the block;
      2. for each joinable in order: the collectives of its iteration. For a DDP: those of its forward, the functions
         of phase "forward", its gradient buckets through its communication hook, the functions of phase "backward"
         (both only if the iteration averages gradients);
      3. the functions of phase "end".
    When no rank has data, DDP gives all ranks the parameters and buffers of the last one that had.

    Args:
        joinables: DDPs (torch's or ours), optimizers, averagers and others, in the order in which an iteration uses
            them: the first one's forward or step starts the iteration.
        enable: False to do nothing at all, when the inputs are known to be even.
        throw_on_early_termination: raise on every rank as soon as one has run out, instead of going on.
        kwargs: given to every joinable's `join_hook`. `divide_by_initial_world_size` (True): what a mean divides by.

    `.grad` on a rank without data holds the same averaged gradient as on the others, so an optimizer that is not a
    joinable can be kept in step: `join.shadow(optimizer.step, phase="backward")`.

    Raises:
        ValueError: no joinable, one given twice, different process groups, or a DDP whose collectives a rank without
            data can't repeat (SyncBatchNorm, sparse gradients of torch's own DDP, …).
        TypeError: something that is no joinable, or a keyword argument that DDP does not know.
        RuntimeError: on entering, a joinable that is already in an open block; on leaving, another rank was lost, or
            `throw_on_early_termination` and a rank ran out. Both name the ranks.

    Example:
        >>> import socket
        >>> import torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> with socket.socket() as probe:
        ...     probe.bind(("127.0.0.1", 0))
        ...     port = probe.getsockname()[1]
        >>> dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
        >>> model = DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> with Join([model], divide_by_initial_world_size=False) as join:
        ...     for batch in torch.ones(3, 4, 2):
        ...         model(batch).sum().backward()
        ...     print(join.active_ranks, join.joined)
        1 False
        >>> join.active_ranks, join.joined
        (0, True)
        >>> dist.destroy_process_group()

    Differs: settings are off again after the block, also after an exception; one all-reduce says what torch needs two
    for; the divisor is kept with communication hooks of this package; `shadow`; errors name ranks; `.grad`.
    """

    def __init__(
        self,
        joinables: list[torch_join.Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        check_joinables(joinables, kwargs)
        group = common_group(joinables)
        if enable and not throw_on_early_termination:
            check_ddps(joinables)
        hooks: list[Hook] = [
            DDPShadow(joinable)
            if isinstance(joinable, DistributedDataParallel)
            else joinable.join_hook(**kwargs)
            for joinable in joinables
        ]
        for hook in hooks:
            if isinstance(hook, JoinHook):
                hook.join = self
        self._enable = enable
        self._is_open = False
        self._block: Block | None = None
        self._settings = BlockSettings(
            joinables=tuple(joinables),
            hooks=tuple(hooks),
            shadows=[],
            group=group,
            device=torch.device(joinables[0].join_device),
            throws=throw_on_early_termination,
            by_active_ranks=not kwargs.get("divide_by_initial_world_size", True),
        )

    # What the user asks

    @property
    def active_ranks(self) -> int:
        """How many ranks have data in the current iteration; waits for the others to say so. 0 after the block."""
        if self._block is None or self._block.notice is None:
            return self._settings.group.size()
        return self._block.notice.active

    @property
    def joined(self) -> bool:
        """Whether this rank has run out of data."""
        return self._block is not None and self._block.joined

    @property
    def synchronizes(self) -> bool:
        """Whether the iteration this rank stands in for averages gradients: False under no_sync and no_grad."""
        return self._block is None or self._block.synchronizes

    def shadow(
        self, function: Shadow, phase: Phase = "forward", joinable: torch_join.Joinable | None = None
    ) -> Shadow:
        """Say what a rank without data must do in each iteration besides the joinables' own collectives.

        Args:
            function: called without arguments; issues the same collectives as the others do there, in order.
            phase: "forward": between a DDP's forward and its backward (a loss that communicates). "backward": once
                gradients are averaged, before the next joinable (clipping, an optimizer's step); left out in
                iterations that average none. "end": after all joinables (a metric); every iteration.
            joinable: whose forward or backward; the first one if None.
        Returns: the function, so that it can decorate one.
        Raises:
            ValueError: an unknown phase, or a joinable that is not in this block.
            TypeError: a function that can't be called.

        Example: a loss that averages its normaliser over the ranks.

            with Join([ddp]) as join:
                join.shadow(lambda: dist.all_reduce(torch.zeros(1)))
                for x, weight in batches:
                    total = weight.sum().reshape(1)
                    work = dist.all_reduce(total)
                    (ddp(x) / total).sum().backward()
        """
        if not callable(function):
            raise TypeError(f"a shadow must be callable without arguments, got {type(function).__name__}")
        if phase not in ("forward", "backward", "end"):
            raise ValueError(f'phase must be "forward", "backward" or "end", got {phase!r}')
        places = [
            i for i, known in enumerate(self._settings.joinables) if known is joinable or joinable is None
        ]
        if not places:
            raise ValueError(f"{type(joinable).__name__} is not a joinable of this block")
        self._settings.shadows.append((function, phase, places[0]))
        return function

    @staticmethod
    def notify_join_context(joinable: torch_join.Joinable) -> Any:
        """Tell the block that this rank has data, before a joinable's first collective of an iteration.

        Returns: the Work of the presence check if `joinable` starts the iteration, else None.
        Raises:
            TypeError: `joinable` did not call Joinable's constructor.
            RuntimeError: `throw_on_early_termination` and a rank ran out of data.

        Differs: for a DDP the block itself listens to its forward, so there is nothing to do.
        """
        config = getattr(joinable, "_join_config", None)
        if isinstance(config, Membership):
            return config.announce()
        if config is None:
            raise TypeError(no_constructor(joinable))
        return torch_join.Join.notify_join_context(joinable)

    # The block

    def __enter__(self) -> "Join":
        if not self._enable:
            return self
        if self._is_open:
            raise RuntimeError("this Join block is already open; make one Join for each `with`")
        for joinable in self._settings.joinables:
            if isinstance(joinable._join_config, Membership):
                raise RuntimeError(
                    f"{type(joinable).__name__} is already in an open Join block: list every joinable in one Join"
                )
        self._block = Block(self._settings)
        self._is_open = True
        self._block.open()
        return self

    def __exit__(
        self,
        type: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        block = self._block
        if not self._enable or block is None:
            return
        try:
            if value is not None:
                block.leave(value)
                return
            try:
                block.stand_in()
            except Exception as error:
                block.leave(error)
                raise
        finally:
            block.close()
            self._settings.shadows.clear()
            self._is_open = False
