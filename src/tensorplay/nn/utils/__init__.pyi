from torch.nn.utils import *
