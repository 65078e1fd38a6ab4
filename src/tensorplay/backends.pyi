from torch.backends import *
