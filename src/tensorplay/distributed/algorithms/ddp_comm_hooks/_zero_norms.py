"""Clipping and loss scaling, which need every gradient before the first update."""

from collections.abc import Generator, Mapping, Sequence

import torch

from tensorplay.compression.rounds import AllToAll, Round
from tensorplay.distributed.algorithms.ddp_comm_hooks._zero_bucket import BucketWork
from tensorplay.distributed.optim._zero_shards import Shards

__all__ = ["prepare_gradients"]

_NO_GRADIENT = -1.0


def prepare_gradients(
    works: Sequence[BucketWork],
    shards: Shards,
    max_grad_norm: float | None,
    scale: float | None,
    is_shared: bool,
    device: torch.device,
) -> Generator[Round, None, bool]:
    """Unscale and clip the gradients of a step in place; the generator's value is whether the step can be made.

        g = g / scale                                         if every gradient of every rank is finite
        g = g * min(1, max_grad_norm / (norm of all g + 1e-6))

    1. Each owner looks at its gradients: finite or not, and their norms.
    2. One round: everyone gets everyone's norms, a float64 each.
    3. Everyone takes the norm of the norms in the order of the parameters, as `clip_grad_norm_` does.

    Args:
        max_grad_norm: None for no clipping. scale: the loss scale; None for no scaling.
        is_shared: each rank has the gradients of what it owns only.
    """
    own_rank = shards.rank if is_shared else None
    inverse = None if scale is None else float(torch.tensor(scale, dtype=torch.float64).reciprocal().float())
    own: dict[int, torch.Tensor | None] = {}
    for work in works:
        own.update(work.gradients(shards, shards.rank))
    finite = all(gradient is None or _is_finite(gradient) for gradient in own.values()) if inverse else True
    norms = yield from _share_norms(works, shards, own, inverse, finite, device)
    if norms is None:
        return False
    if inverse is not None:
        _multiply(works, shards, own_rank, inverse)
    if max_grad_norm is not None:
        dtypes = {gradient.dtype for gradient in own.values() if gradient is not None}
        wide = torch.float64 if dtypes == {torch.float64} else torch.float32
        present = torch.tensor(
            [norm for _, norm in sorted(norms.items()) if norm != _NO_GRADIENT], dtype=wide
        )
        total = torch.linalg.vector_norm(present)
        _multiply(works, shards, own_rank, float(torch.clamp(max_grad_norm / (total + 1e-6), max=1.0)))
    return True


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.layout == torch.strided else gradient.coalesce().values()


def _is_finite(gradient: torch.Tensor) -> bool:
    return bool(torch.isfinite(_values(gradient)).all())


def _share_norms(
    works: Sequence[BucketWork],
    shards: Shards,
    own: Mapping[int, torch.Tensor | None],
    inverse: float | None,
    finite: bool,
    device: torch.device,
) -> Generator[Round, None, dict[int, float] | None]:
    """Return every parameter's gradient norm, or None when a gradient on any rank is not finite."""
    rank, world_size = shards.rank, shards.world_size
    owned: list[list[int]] = [[] for _ in range(world_size)]
    for work in works:
        for number, _ in work.places:
            owned[work.owners[number]].append(number)
    message = torch.full((1 + len(owned[rank]),), _NO_GRADIENT, dtype=torch.float64)
    message[0] = float(finite)
    for place, number in enumerate(owned[rank], start=1):
        gradient = own[number]
        if gradient is not None:
            values = _values(gradient)
            message[place] = float(torch.linalg.vector_norm(values if inverse is None else values * inverse))
    outgoing = message.to(device)
    received = [
        None if source == rank else torch.empty(1 + len(owned[source]), dtype=torch.float64, device=device)
        for source in range(world_size)
    ]
    yield AllToAll(lambda peer: None if peer == rank else outgoing, received, lambda source: None)
    norms: dict[int, float] = {}
    all_finite = True
    for source in range(world_size):
        theirs = received[source]
        flag, *their_norms = (message if theirs is None else theirs).tolist()
        all_finite = all_finite and bool(flag)
        norms.update(zip(owned[source], their_norms, strict=True))
    return norms if all_finite else None


@torch.no_grad()
def _multiply(works: Sequence[BucketWork], shards: Shards, rank: int | None, factor: float) -> None:
    """Multiply the gradients that `rank` owns, or all; each bucket in one go where it can be."""
    for work in works:
        assert work.result is not None
        in_one_go = rank is None and work.is_whole
        if in_one_go:
            work.result.mul_(factor)
        used = work.used or [True] * len(work.places)
        for (_, gradient), is_used in zip(work.gradients(shards), used, strict=True):
            if gradient is not None and not (in_one_go and is_used):
                gradient.mul_(factor)
