"""The training recipe that the demo and `examples/train_gpt.py` share: optimizer, schedule, clipping, loss, score."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor, nn

from tensorplay.cli.corpus import Corpus
from tensorplay.cli.gpt import GPT

__all__ = [
    "build_optimizer",
    "clip_gradients",
    "learning_rate_fraction",
    "next_byte_loss",
    "validation_bits_per_byte",
]

_WEIGHT_DECAY = 0.1
_LAST_FRACTION = 0.1
_MOST_GRADIENT_NORM = 1.0


def build_optimizer(model: GPT) -> torch.optim.AdamW:
    """AdamW at the size's learning rate; matrices decay, biases and norms do not.

    Example:
        >>> from tensorplay.cli.gpt import SIZES
        >>> [group["weight_decay"] for group in build_optimizer(GPT(SIZES["tiny"], seed=1)).param_groups]
        [0.1, 0.0]

    Paper: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization".
    """
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": _WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=model.size.learning_rate, betas=(0.9, 0.95))


def learning_rate_fraction(step: int, steps: int) -> float:
    """Share of the peak learning rate at `step` of `steps`: a linear rise over a tenth, then half a cosine.

        rise:  (step + 1) / warmup_steps                                   step < warmup_steps = steps // 10
        fall:  0.1 + 0.9 * (1 + cos(pi * progress)) / 2,   progress from 0 at the peak to 1 at the last step

    Example:
        >>> [round(learning_rate_fraction(step, 100), 2) for step in (0, 9, 99)]
        [0.1, 1.0, 0.1]
    """
    warmup_steps = max(1, steps // 10)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step + 1 - warmup_steps) / max(1, steps - warmup_steps)
    return _LAST_FRACTION + (1 - _LAST_FRACTION) * 0.5 * (1 + math.cos(math.pi * progress))


def next_byte_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte, in nats.

    Example:
        >>> from tensorplay.cli.gpt import SIZES
        >>> text = torch.zeros(1, 9, dtype=torch.long)
        >>> next_byte_loss(GPT(SIZES["tiny"], seed=1), text[:, :-1], text[:, 1:]).item() > 0
        True
    """
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def clip_gradients(model: nn.Module) -> None:
    """Scale gradients down to a norm of 1 where theirs, over all parameters, is larger.

    Without it one seed may end 20 % behind another, and a hook could not be told from chance.

    Example:
        >>> weight = nn.Linear(1, 1, bias=False)
        >>> weight(torch.full((1, 1), 5.0)).sum().backward()
        >>> clip_gradients(weight)
        >>> round(weight.weight.grad.item(), 3)
        1.0

    Paper: Pascanu, Mikolov, Bengio 2013, "On the difficulty of training recurrent neural networks".
    """
    nn.utils.clip_grad_norm_(model.parameters(), _MOST_GRADIENT_NORM)


@torch.no_grad()
def validation_bits_per_byte(model: GPT, corpus: Corpus, rank: int, world_size: int) -> float:
    """Bits per byte of validation text; each rank scores its share, with its own replica.

    1. Every rank scores each world_size-th window.
    2. The sums are added up in float64, so every rank returns the same number.

    The default group is used when world_size > 1.

    Example:
        >>> from tensorplay.cli.corpus import load_corpus
        >>> from tensorplay.cli.gpt import SIZES
        >>> 7 < validation_bits_per_byte(GPT(SIZES["tiny"], seed=1), load_corpus(), rank=0, world_size=1) < 9
        True
    """
    size = model.size
    device = next(model.parameters()).device
    inputs, targets = corpus.validation_windows(size.validation_bytes, size.context_bytes)
    inputs, targets = inputs[rank::world_size], targets[rank::world_size]
    total = torch.zeros(2, dtype=torch.float64)
    for some_inputs, some_targets in zip(torch.split(inputs, 16), torch.split(targets, 16), strict=True):
        mean_nats = next_byte_loss(model, some_inputs.to(device), some_targets.to(device)).double()
        total += torch.tensor([mean_nats.item() * some_targets.numel(), some_targets.numel()])
    if world_size > 1:
        on_device = total.to(device)
        dist.all_reduce(on_device)
        total = on_device.cpu()
    return float(total[0] / total[1] / math.log(2))
