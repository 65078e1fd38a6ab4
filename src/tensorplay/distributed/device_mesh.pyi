from torch.distributed.device_mesh import *
