from torch.multiprocessing import *
