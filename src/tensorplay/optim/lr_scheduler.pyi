from torch.optim.lr_scheduler import *
