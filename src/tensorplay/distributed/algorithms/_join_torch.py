"""Our DistributedDataParallel inside torch's own Join: hooks learn how many ranks have data."""

from typing import Any

from tensorplay.compression import participation
from tensorplay.distributed.algorithms._join_block import Membership
from tensorplay.distributed.algorithms._join_presence import Notice

__all__ = ["count_for_torch_join", "end_of_torch_join"]


def count_for_torch_join(ddp: Any, has_data: bool) -> None:
    """Count the ranks with data, right after DDP has asked whether gradients will be averaged.

    torch's Join counts them too but tells only a reducer without a hook. Does nothing outside torch's Join, or with
    `divide_by_initial_world_size=True`. Waits for the other ranks.
    """
    config = ddp._join_config
    if not config.enable or isinstance(config, Membership):
        return
    if getattr(ddp, "_divide_by_initial_world_size", True):
        return
    active = Notice(ddp.process_group, ddp.device, named=False, has_data=has_data).active
    participation.set_active(ddp.process_group, active or None)


def end_of_torch_join(ddp: Any) -> None:
    """Go back to means over all ranks, once no rank has data."""
    participation.set_active(ddp.process_group, None)
