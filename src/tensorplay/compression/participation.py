"""How many ranks take part in an average.

Every mean of this package divides by `divisor(group)`: the size of the group, or, while a Join block with
`divide_by_initial_world_size=False` is open, the number of ranks that still have data. Join sets the number when
it opens and takes it back when it closes; nobody else writes it.
"""

import weakref

import torch.distributed as dist

__all__ = ["divisor", "resolve_group", "set_active"]

_active: "weakref.WeakKeyDictionary[dist.ProcessGroup, int]" = weakref.WeakKeyDictionary()


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return `group`, or the default group when it is None.

    Raises: RuntimeError: torch.distributed has no default group yet.
    """
    if group is not None:
        return group
    if not dist.is_initialized():
        raise RuntimeError(
            "no process group given and torch.distributed is not initialised: call init_process_group first"
        )
    world = dist.group.WORLD
    assert world is not None
    return world


def divisor(group: dist.ProcessGroup | None) -> int:
    """Return the number a sum over `group` is divided by to make the mean of the ranks that take part."""
    group = resolve_group(group)
    return _active.get(group) or group.size()


def set_active(group: dist.ProcessGroup | None, active_ranks: int | None) -> None:
    """Set how many ranks of `group` take part in averages; None goes back to all of them.

    Raises: ValueError: `active_ranks` is outside 1 .. size of the group.
    """
    group = resolve_group(group)
    if active_ranks is None:
        _active.pop(group, None)
        return
    if not 1 <= active_ranks <= group.size():
        raise ValueError(f"active_ranks must be between 1 and {group.size()}, got {active_ranks}")
    _active[group] = active_ranks
