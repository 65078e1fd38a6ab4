from torch.jit import *
