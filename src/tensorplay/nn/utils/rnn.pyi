from torch.nn.utils.rnn import *
