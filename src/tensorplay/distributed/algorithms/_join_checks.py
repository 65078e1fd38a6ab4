"""What a Join block refuses before its first collective, each with the reason and a way out."""

from typing import Any

import torch.distributed as dist
import torch.distributed.algorithms.join as torch_join
from torch.nn.parallel import DistributedDataParallel

from tensorplay.compression import participation
from tensorplay.distributed.algorithms._join_ddp import shadow_obstacle
from tensorplay.distributed.algorithms._join_presence import MAX_RANKS, describe_group

__all__ = ["check_ddps", "check_joinables", "common_group", "no_constructor"]


def no_constructor(joinable: object) -> str:
    name = type(joinable).__name__
    return f"{name} has no _join_config: its constructor must call Joinable.__init__"


def check_joinables(joinables: list[torch_join.Joinable], kwargs: dict[str, Any]) -> None:
    if not joinables:
        raise ValueError("Join needs at least one joinable, got none")
    for joinable in joinables:
        if not isinstance(joinable, torch_join.Joinable):
            raise TypeError(
                f"{type(joinable).__name__} is not a Joinable; to keep it in step on a rank without data, register "
                'what it does: join.shadow(optimizer.step, phase="backward")'
            )
        if not hasattr(joinable, "_join_config"):
            raise TypeError(no_constructor(joinable))
        if sum(other is joinable for other in joinables) > 1:
            raise ValueError(f"a joinable may be listed once, {type(joinable).__name__} is listed twice")
    unknown = sorted(set(kwargs) - {"divide_by_initial_world_size"})
    if unknown and all(isinstance(joinable, DistributedDataParallel) for joinable in joinables):
        raise TypeError(f"Join knows divide_by_initial_world_size for a DDP, got {', '.join(unknown)}")


def common_group(joinables: list[torch_join.Joinable]) -> dist.ProcessGroup:
    first = joinables[0]
    group = participation.resolve_group(first.join_process_group)
    for joinable in joinables[1:]:
        other = participation.resolve_group(joinable.join_process_group)
        if other != group:
            raise ValueError(
                f"all joinables of a Join block must use one process group: {type(first).__name__} uses "
                f"{describe_group(group)}, {type(joinable).__name__} {describe_group(other)}"
            )
    if group.size() > MAX_RANKS:
        raise ValueError(f"Join supports groups of up to {MAX_RANKS} ranks, got {group.size()}")
    return group


def check_ddps(joinables: list[torch_join.Joinable]) -> None:
    for joinable in joinables:
        if isinstance(joinable, DistributedDataParallel):
            obstacle = shadow_obstacle(joinable)
            if obstacle is not None:
                raise ValueError(
                    f"a rank without data can't repeat the collectives of this DDP: {obstacle}. Or pass "
                    "throw_on_early_termination=True, which stops every rank as soon as one has run out"
                )
