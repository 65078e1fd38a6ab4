"""Which tensors are compressed, and from when on: policies that wrap each other.

A policy answers one question: with which codec does this tensor travel at this step? None means uncompressed.

Example:
    >>> import torch
    >>> from tensorplay.compression.codec import Identity
    >>> policy = StartAfter(OnlyLarge(Uniform(Identity(torch.bfloat16)), 100), 2)
    >>> policy.codec_for("weight", (10, 10), 0), policy.codec_for("bias", (10,), 5)
    (None, None)
    >>> policy.codec_for("weight", (10, 10), 2)
    <codec bfloat16>
"""

import math
from collections.abc import Callable, Hashable
from typing import Protocol

from tensorplay.compression.codec import Codec

__all__ = ["Exempt", "OnlyLarge", "Policy", "StartAfter", "Uniform"]

Shape = tuple[int, ...]


class Policy(Protocol):
    """Chooses a codec for each tensor and step."""

    def codec_for(self, name: str | None, shape: Shape, step: int) -> Codec | None:
        """The codec of a tensor at a step, or None: it travels uncompressed. `name` is None while unknown."""

    def phase(self, step: int) -> Hashable:
        """Equal for two steps exactly when every tensor has the same codec at both."""


class Uniform:
    """Every tensor with one codec."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def codec_for(self, name: str | None, shape: Shape, step: int) -> Codec | None:
        """See `Policy`."""
        return self._codec

    def phase(self, step: int) -> Hashable:
        """See `Policy`."""
        return 0


class StartAfter:
    """Nothing is compressed in the first `steps` steps.

    Raises: ValueError: `steps` is negative.
    """

    def __init__(self, policy: Policy, steps: int) -> None:
        if steps < 0:
            raise ValueError(f"steps must be >= 0, got {steps}")
        self._policy, self._steps = policy, steps

    def codec_for(self, name: str | None, shape: Shape, step: int) -> Codec | None:
        """See `Policy`."""
        return self._policy.codec_for(name, shape, step) if step >= self._steps else None

    def phase(self, step: int) -> Hashable:
        """See `Policy`."""
        return (True, self._policy.phase(step)) if step >= self._steps else (False, None)


class OnlyLarge:
    """Tensors of fewer than `min_elements` elements travel uncompressed.

    Raises: ValueError: `min_elements` is negative.
    """

    def __init__(self, policy: Policy, min_elements: int) -> None:
        if min_elements < 0:
            raise ValueError(f"min_elements must be >= 0, got {min_elements}")
        self._policy, self._min_elements = policy, min_elements

    def codec_for(self, name: str | None, shape: Shape, step: int) -> Codec | None:
        """See `Policy`."""
        return self._policy.codec_for(name, shape, step) if math.prod(shape) >= self._min_elements else None

    def phase(self, step: int) -> Hashable:
        """See `Policy`."""
        return self._policy.phase(step)


class Exempt:
    """Tensors for which `predicate(name, shape)` is true travel uncompressed.

    The predicate must answer alike on all ranks. `name` is None for a model whose names the state doesn't know.
    """

    def __init__(self, policy: Policy, predicate: Callable[[str | None, Shape], bool]) -> None:
        self._policy, self._predicate = policy, predicate

    def codec_for(self, name: str | None, shape: Shape, step: int) -> Codec | None:
        """See `Policy`."""
        return None if self._predicate(name, shape) else self._policy.codec_for(name, shape, step)

    def phase(self, step: int) -> Hashable:
        """See `Policy`."""
        return self._policy.phase(step)
