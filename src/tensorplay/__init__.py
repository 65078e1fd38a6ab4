"""TensorPlay Distributed Algorithms: data-parallel PyTorch that communicates less.

`import tensorplay as tp` gives PyTorch's names: `tp.nn.Linear` is `torch.nn.Linear`, and submodules import under
this name too. What is ours lies beside them:

* `tensorplay.distributed.algorithms`: communication hooks, Join, averagers
* `tensorplay.distributed.optim`: optimizers that share their state, or average, between ranks
* `tensorplay.nn.parallel.DistributedDataParallel`: torch's, with registration of hooks mended
* `tensorplay.compression`: the codecs and exchanges behind them

Example:
    >>> import tensorplay as tp
    >>> import torch
    >>> tp.nn.Linear is torch.nn.Linear
    True
"""

from typing import TYPE_CHECKING

import torch

from tensorplay import _alias

if TYPE_CHECKING:
    from tensorplay import (
        compression as compression,
        distributed as distributed,
        nn as nn,
        testing as testing,
    )
    from tensorplay._torch import *

__version__ = "0.1.0"

__all__ = _alias.stand_for(__name__, torch)
