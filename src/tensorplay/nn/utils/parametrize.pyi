from torch.nn.utils.parametrize import *
