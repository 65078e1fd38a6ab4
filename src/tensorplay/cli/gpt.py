"""A byte-level GPT: small enough to train on a laptop, built like the large ones.

Every byte is a token, so there is no tokenizer and the loss converts to bits per byte directly:

    bits per byte = mean cross-entropy in nats / ln 2

Structure (Radford et al. 2019, pre-norm): byte and position embeddings -> `layers` x (causal attention,
MLP), each added to its input -> norm -> scores over the 256 next bytes, with the byte embedding's matrix.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

__all__ = ["GPT", "SIZES", "GPTSize"]

_BYTE_VALUES = 256


@dataclass(frozen=True)
class GPTSize:
    """The model's shape and the settings that go with it.

    Attributes:
        layers, heads, width: blocks, attention heads a block, and numbers that represent one byte.
        context_bytes: bytes the model sees.
        batch_size: windows of context_bytes a rank and step.
        learning_rate: peak of AdamW's rate.
        validation_bytes: validation text scored at the end of a run.
    """

    layers: int
    heads: int
    width: int
    context_bytes: int
    batch_size: int
    learning_rate: float
    validation_bytes: int


SIZES: dict[str, GPTSize] = {
    "tiny": GPTSize(1, 2, 32, 32, 4, 4e-3, 4_096),
    "small": GPTSize(3, 6, 192, 128, 4, 3e-3, 131_072),
    "base": GPTSize(4, 8, 256, 128, 4, 2e-3, 65_536),
    "large": GPTSize(8, 8, 512, 256, 4, 1e-3, 65_536),
}
"""By name: about 22 thousand, 1.4 million, 3.2 million and 25 million parameters."""


class GPT(nn.Module):
    """Predicts each next byte from those before it.

    Args:
        size: the shape, for example SIZES["base"].
        seed: of the initial weights; the same seed gives the same weights, and the global generator is left
            as found.

    Shapes: input int64 (batch, n), n <= context_bytes; output float32 (batch, n, 256), scores before softmax.

    Raises:
        ValueError: width not a multiple of heads; an input longer than context_bytes.

    Example:
        >>> model = GPT(SIZES["tiny"], seed=1)
        >>> model(torch.zeros(2, 8, dtype=torch.long)).shape
        torch.Size([2, 8, 256])

    Paper: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """

    def __init__(self, size: GPTSize, seed: int) -> None:
        super().__init__()
        if size.width % size.heads:
            raise ValueError(f"width must be a multiple of heads, got {size.width} and {size.heads}")
        self.size = size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.bytes = nn.Embedding(_BYTE_VALUES, size.width)
            self.positions = nn.Embedding(size.context_bytes, size.width)
            self.blocks = nn.ModuleList(_Block(size) for _ in range(size.layers))
            self.norm = nn.LayerNorm(size.width)
            self._initialise()

    def _initialise(self) -> None:
        """Normal weights of 0.02; those that add into the residual stream are scaled by its depth."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            deviation = 0.02
            if name.endswith(("attention.out.weight", "mlp.2.weight")):
                deviation /= (2 * self.size.layers) ** 0.5
            nn.init.normal_(parameter, std=deviation)

    def forward(self, text: Tensor) -> Tensor:
        """Scores for the byte after each byte of `text`; shapes as in the class."""
        length = text.shape[1]
        if length > self.size.context_bytes:
            raise ValueError(f"the input must be <= {self.size.context_bytes} bytes long, got {length}")
        hidden = self.bytes(text) + self.positions(torch.arange(length, device=text.device))
        for block in self.blocks:
            hidden = block(hidden)
        return functional.linear(self.norm(hidden), self.bytes.weight)


class _Block(nn.Module):
    """Attention, then MLP, each on a normalised copy and added back."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size.width)
        self.attention = _Attention(size)
        self.mlp_norm = nn.LayerNorm(size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden.add(self.attention(self.attention_norm(hidden)))
        return hidden.add(self.mlp(self.mlp_norm(hidden)))


class _Attention(nn.Module):
    """Causal multi-head attention: every byte looks at itself and the bytes before it."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        split = self.query_key_value(hidden).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        added: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return added
