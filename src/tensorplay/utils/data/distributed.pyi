from torch.utils.data.distributed import *
