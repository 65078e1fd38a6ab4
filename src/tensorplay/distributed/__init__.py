"""`torch.distributed` under this name; `algorithms` and `optim` are ours.

Differs: `init_process_group` says what to use instead when NCCL is asked for and can't work here.
`torch.distributed.algorithms` and `torch.distributed.optim` are never reachable through this name.
"""

from typing import TYPE_CHECKING

import torch.distributed

from tensorplay import _alias
from tensorplay.distributed._start import init_process_group as init_process_group

if TYPE_CHECKING:
    from tensorplay.distributed import algorithms as algorithms
    from tensorplay.distributed._torch import *

__all__ = _alias.stand_for(__name__, torch.distributed, alone=("algorithms", "optim"))
