"""The model in fragments, each with the parameters all ranks agreed on last."""

from collections.abc import Sequence
from itertools import pairwise

import torch

from tensorplay.compression.codec import all_finite
from tensorplay.compression.rounds import Scratch
from tensorplay.distributed.algorithms.model_averaging.outer_exchange import OuterGradient

__all__ = ["Fragment", "outer_copy", "split_evenly"]


def split_evenly(sizes: Sequence[int], parts: int) -> list[slice]:
    """Cut a list of tensors into `parts` runs, none empty, as near to equal in total size as whole tensors allow.

    Example:
        >>> split_evenly([4, 4, 100, 4, 4], 3)
        [slice(0, 2, None), slice(2, 3, None), slice(3, 5, None)]
    """
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    borders = [0]
    for part in range(1, parts):
        wanted = ends[-1] * part / parts
        allowed = range(borders[-1] + 1, len(sizes) - (parts - part) + 1)
        borders.append(min(allowed, key=lambda index: abs(ends[index] - wanted)))
    borders.append(len(sizes))
    return [slice(start, end) for start, end in pairwise(borders)]


def outer_copy(parameter: torch.Tensor) -> torch.nn.Parameter:
    """Return the outer twin of a parameter: same values and strides, float32 where the parameter is of a half type."""
    dtype = torch.float32 if parameter.dtype.itemsize < 4 else parameter.dtype
    return torch.nn.Parameter(parameter.detach().to(dtype, copy=True))


class Fragment:
    """Some parameters, whole ones, and their outer twins.

    Args:
        names, parameters, outer: in one order. `outer` as `outer_copy` makes them.
        value_dtype: in which outer gradients travel; None for each parameter's own (that of its twin).
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        outer: Sequence[torch.nn.Parameter],
        value_dtype: torch.dtype | None = None,
    ) -> None:
        self.names, self.parameters, self.outer = list(names), list(parameters), list(outer)
        self.value_dtype = value_dtype

    def buffers(self, scratch: Scratch, slot: int) -> OuterGradient:
        """Borrow the flat buffers of an outer gradient; what they hold is left over from their last use."""
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, twin in enumerate(self.outer):
            real = twin.dtype.to_real() if twin.is_complex() else twin.dtype
            kinds.setdefault((self.value_dtype or real, twin.device), []).append(index)
        views: dict[int, torch.Tensor] = {}
        flats = []
        for (dtype, device), indices in kinds.items():
            shapes = [_real_shape(self.outer[index]) for index in indices]
            flat = scratch.borrow(f"outer gradient {slot}", sum(s.numel() for s in shapes), dtype, device)
            pieces = torch.split(flat, [shape.numel() for shape in shapes])
            views.update(
                (i, piece.view(shape)) for i, piece, shape in zip(indices, pieces, shapes, strict=True)
            )
            flats.append(flat)
        return OuterGradient({self.names[index]: views[index] for index in sorted(views)}, flats)

    @torch.no_grad()
    def measure(self, gradient: OuterGradient) -> None:
        """Write this rank's outer gradient: outer parameters, rounded as the parameters are, minus parameters."""
        for view, twin, parameter in self._triples(gradient):
            view.copy_(_real(twin.to(parameter.dtype)))
            view.sub_(_real(parameter.detach()))

    @torch.no_grad()
    def take_step(self, gradient: OuterGradient, optimizer: torch.optim.Optimizer) -> bool:
        """Step the outer parameters with an averaged gradient, and only this fragment's.

        Returns: False, and does nothing, when the gradient is not finite.
        """
        if not all(bool(all_finite(flat)) for flat in gradient.flats):
            return False
        for view, twin, _ in self._triples(gradient):
            value = torch.view_as_complex(view) if twin.is_complex() else view
            twin.grad = value.to(twin.dtype)
        optimizer.step()
        for twin in self.outer:
            twin.grad = None
        return True

    @torch.no_grad()
    def mix_in(self, local_fraction: float) -> None:
        """parameter = local_fraction * parameter + (1 - local_fraction) * outer parameter."""
        for parameter, twin in zip(self.parameters, self.outer, strict=True):
            if local_fraction == 0.0:
                parameter.detach().copy_(twin)
            else:
                agreed = twin.to(parameter.dtype)
                parameter.detach().mul_(local_fraction).add_(agreed, alpha=1.0 - local_fraction)

    def _triples(
        self, gradient: OuterGradient
    ) -> "zip[tuple[torch.Tensor, torch.nn.Parameter, torch.Tensor]]":
        return zip(gradient.tensors.values(), self.outer, self.parameters, strict=True)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _real_shape(tensor: torch.Tensor) -> torch.Size:
    return torch.Size([*tensor.shape, 2]) if tensor.is_complex() else tensor.shape
