"""Groups as averagers and local SGD need them: which one a rank is in, and what can be saved."""

import socket
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tensorplay.compression.participation import resolve_group

__all__ = [
    "check_divides",
    "group_device",
    "host_identity",
    "is_member",
    "refuse_pickled_group",
    "subgroup_by_key",
    "subgroup_by_size",
]


def is_member(group: Any) -> bool:
    """False for what `dist.new_group` returns to a rank outside the group."""
    return bool(group != dist.GroupMember.NON_GROUP_MEMBER)


def group_device(group: dist.ProcessGroup) -> torch.device:
    """Return a device on which the group's backend reduces: the CPU where it can, else the current accelerator."""
    kinds = {device.type for device in group._device_types} if is_member(group) else {"cpu"}
    if "cpu" in kinds or not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def host_identity() -> str:
    """Name this host so that two ranks are equal exactly when they run on one machine under one host name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.is_file() else ''}"


def check_divides(group: dist.ProcessGroup, group_size: int) -> None:
    """Raise ValueError unless `group_size` divides the size of `group`."""
    if group.size() % group_size:
        raise ValueError(
            f"group_size must divide the {group.size()} ranks of the group, got {group_size}: "
            "choose a divisor, or pass a subgroup of your own"
        )


def subgroup_by_size(group: dist.ProcessGroup | None, group_size: int) -> dist.ProcessGroup:
    """Make subgroups of `group_size` consecutive ranks of `group`; return the one this rank is in.

    Every rank of the job must call it at this point, each with the group it is in. Where `group_size` is the size of
    the group, that is `group` itself and nothing is made.

    Raises: ValueError: `group_size` does not divide the group's size.
    """
    group = resolve_group(group)
    check_divides(group, group_size)
    if group_size == group.size():
        return group
    own: dist.ProcessGroup = dist.new_subgroups(group_size=group_size, group=group)[0]  # type: ignore[no-untyped-call]
    return own


def subgroup_by_key(group: dist.ProcessGroup | None, key: Hashable) -> dist.ProcessGroup:
    """Make one subgroup of `group` for each distinct key; return the one this rank is in. A collective.

    1. Every rank learns every rank's key; ranks with one key are a subgroup, in rank order.
    2. All of them in one subgroup: that is `group` itself, nothing is made.
    3. Otherwise all ranks make all subgroups, in one order.

    Args:
        group: None for the default group.
        key: this rank's; compared across ranks, so it must pickle (text, numbers, tuples). None: it has none.
    Raises: ValueError: on all ranks: a rank has no key; step 3 is needed and `group` is not the job's default group (a
        group is made by all ranks of the job, and those outside `group` are not here to take part).
    """
    group = resolve_group(group)
    keys: list[Hashable] = [None] * group.size()
    dist.all_gather_object(keys, key, group=group)
    if None in keys:
        without = [rank for rank, found in enumerate(keys) if found is None]
        raise ValueError(f"ranks {without} know no subgroup they belong to: pass one, or group_size")
    if len(set(keys)) == 1:
        return group
    if group != dist.group.WORLD:
        raise ValueError(
            f"can't make subgroups of a group that is not the default one ({group.size()} ranks): the job's other "
            "ranks would have to take part; make them on all ranks with "
            "torch.distributed.new_subgroups_by_enumeration and pass yours"
        )
    members: dict[Hashable, list[int]] = {}
    for rank, name in enumerate(keys):
        members.setdefault(name, []).append(rank)
    every = list(members.values())
    own: dist.ProcessGroup = dist.new_subgroups_by_enumeration(every)[0]  # type: ignore[no-untyped-call]
    return own


def refuse_pickled_group(owner: str, group: dist.ProcessGroup) -> None:
    """Raise unless `group` is the default one, which the loading process has too.

    Raises: TypeError: it is another group.
    """
    if group != dist.group.WORLD:
        raise TypeError(
            f"{owner} on a group other than the default one can't be pickled, since the loading process may not "
            "have the group: save state_dict() and load it into a new one"
        )
