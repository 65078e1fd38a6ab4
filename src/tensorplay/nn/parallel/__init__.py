"""`torch.nn.parallel` under this name, with our DistributedDataParallel."""

from typing import TYPE_CHECKING

import torch.nn.parallel

from tensorplay import _alias
from tensorplay.nn.parallel.distributed import DistributedDataParallel as DistributedDataParallel

if TYPE_CHECKING:
    from torch.nn.parallel import (
        DataParallel as DataParallel,
        data_parallel as data_parallel,
        gather as gather,
        parallel_apply as parallel_apply,
        replicate as replicate,
        scatter as scatter,
    )

__all__ = _alias.stand_for(__name__, torch.nn.parallel)
