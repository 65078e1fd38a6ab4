from torch.distributed.tensor import *
