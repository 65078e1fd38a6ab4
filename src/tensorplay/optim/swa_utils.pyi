from torch.optim.swa_utils import *
