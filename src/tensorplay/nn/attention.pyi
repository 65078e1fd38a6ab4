from torch.nn.attention import *
