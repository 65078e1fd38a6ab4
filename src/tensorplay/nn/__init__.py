"""`torch.nn` under this name; `nn.parallel` holds our DistributedDataParallel."""

from typing import TYPE_CHECKING

import torch.nn

from tensorplay import _alias

if TYPE_CHECKING:
    from torch.nn import (
        Buffer as Buffer,
        DataParallel as DataParallel,
        Parameter as Parameter,
        UninitializedBuffer as UninitializedBuffer,
        UninitializedParameter as UninitializedParameter,
        attention as attention,
        common_types as common_types,
        factory_kwargs as factory_kwargs,
        functional as functional,
        init as init,
        intrinsic as intrinsic,
        modules as modules,
        parameter as parameter,
        qat as qat,
        quantizable as quantizable,
        quantized as quantized,
        utils as utils,
    )
    from torch.nn.modules import *

    from tensorplay.nn import parallel as parallel

__all__ = _alias.stand_for(__name__, torch.nn)
