from torch.utils.tensorboard import *
