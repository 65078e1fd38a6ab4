from torch.amp import *
