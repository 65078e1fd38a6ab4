"""A round in which every rank tells the others a few numbers, before an exchange whose sizes depend on them."""

from collections.abc import Generator, Sequence

import torch

from tensorplay.compression.rounds import AllToAll, Round

__all__ = ["require_equal", "tell_all"]


def tell_all(
    facts: Sequence[int], rank: int, world_size: int, device: torch.device
) -> Generator[Round, None, list[list[int]]]:
    """Send `facts` (64-bit integers) to every rank; returns every rank's, in rank order. One round.

    Wire: 8 bytes a fact and peer.
    """
    mine = torch.tensor(list(facts), dtype=torch.int64, device=device)
    inbox = torch.zeros(world_size, mine.numel(), dtype=torch.int64, device=device)
    inbox[rank] = mine
    receives = [None if peer == rank else inbox[peer] for peer in range(world_size)]
    yield AllToAll(lambda peer: mine, receives, lambda source: None)
    told: list[list[int]] = inbox.tolist()
    return told


def require_equal(names: Sequence[str], told: Sequence[Sequence[int]], advice: str) -> None:
    """Check that all ranks told the same.

    Args:
        names: what the facts are called. told: from `tell_all`. advice: ends the error's text.
    Raises: RuntimeError: they differ; the text is the same on all ranks and gives every rank's value.
    Example:
        >>> require_equal(["step"], [[4], [5]], "load one checkpoint on all ranks")
        Traceback (most recent call last):
            ...
        RuntimeError: the ranks disagree on step (rank 0: 4, rank 1: 5): load one checkpoint on all ranks
    """
    different = [
        f"{name} ({', '.join(f'rank {rank}: {facts[at]}' for rank, facts in enumerate(told))})"
        for at, name in enumerate(names)
        if len({facts[at] for facts in told}) > 1
    ]
    if different:
        raise RuntimeError(f"the ranks disagree on {'; '.join(different)}: {advice}")
