"""What the ranks of a Join block tell each other: who still has data, and who left.

One number a rank and iteration says it all, so that one small all-reduce is enough:

    share = 1 + trains * 2^-17 + synchronizes * 2^-34        (0 from a rank that has run out of data)

The sum over the ranks is exact in float64: its integer part counts the ranks that have data, the two fields of its
fraction those whose forward is recorded for a backward, and those whose backward will average gradients.
"""

import contextlib
import os
import socket
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tensorplay.compression.collective import group_store, name_missing_ranks
from tensorplay.compression.failures import process_runs

__all__ = ["MAX_RANKS", "Notice", "Whereabouts", "describe_group", "is_group_failure"]

_FIELD_BITS = 17
_FIELD = 2.0**-_FIELD_BITS
MAX_RANKS = 2**_FIELD_BITS - 1
_ROLL_CALL_SECONDS = 5.0


class Notice:
    """One presence check: the sum of every rank's share, started at once and read when somebody asks.

    Args:
        group, device: of the all-reduce.
        named: send one number a rank instead of one sum, so that the ranks without data can be named.
        has_data: whether this rank runs an iteration. trains, synchronizes: what its backward will do.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        named: bool,
        has_data: bool,
        trains: bool = True,
        synchronizes: bool = True,
    ) -> None:
        share = 1.0 + trains * _FIELD + synchronizes * _FIELD**2 if has_data else 0.0
        if named:
            self._total = torch.zeros(group.size(), dtype=torch.float64, device=device)
            self._total[group.rank()] = share
        else:
            self._total = torch.full((1,), share, dtype=torch.float64, device=device)
        self._group = group
        self._counts: tuple[int, int, int] | None = None
        self.work: Any = dist.all_reduce(self._total, group=group, async_op=True)

    def _read(self) -> tuple[int, int, int]:
        if self._counts is None:
            self.work.wait()
            total = float(self._total.sum().item())
            active = int(total)
            fields = (total - active) / _FIELD
            training = int(fields)
            self._counts = active, training, int((fields - training) / _FIELD)
        return self._counts

    @property
    def active(self) -> int:
        """Ranks that have data; waits for the others' share."""
        return self._read()[0]

    @property
    def training(self) -> int:
        """Ranks whose forward is recorded for a backward."""
        return self._read()[1]

    @property
    def synchronizing(self) -> int:
        """Ranks whose backward averages gradients."""
        return self._read()[2]

    def without_data(self) -> list[int]:
        """Global numbers of the ranks that ran out of data; only where the notice is `named`."""
        self._read()
        members = dist.get_process_group_ranks(self._group)
        return [members[rank] for rank, share in enumerate(self._total.tolist()) if share == 0.0]


class Whereabouts:
    """Where the ranks of one block can leave word of why they left it: the group's store.

    Every rank of the group makes one for each block. The store counts them for each rank, so that a block has the same
    number everywhere, also in processes that belonged to other groups before.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        store = group_store(group)
        number = store.add(f"tensorplay/join/{group.group_name}/blocks/{group.rank()}", 1)
        self._label = f"join/{group.group_name}/{number}"
        self._store = c10d.PrefixStore(f"tensorplay/{self._label}", store)
        self._store.set(f"process/{group.rank()}", f"{os.getpid()} {socket.gethostname()}")

    def leave_word(self, error: BaseException) -> None:
        """Tell the others why this rank left the block early."""
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0][:500]
        with contextlib.suppress(
            RuntimeError, dist.DistError
        ):  # the store's host may be gone: nobody to tell
            self._store.set(f"left/{self._group.rank()}", text)

    def explain(self) -> str:
        """Say who left and why, after a collective failed; the first rank to find out decides for all.

        1. A rank that left word, or a process of this host that has ended.
        2. Else a roll call of up to 5 seconds.
        """
        try:
            if not self._store.check(["verdict"]):
                text = self._known() or self._roll_call()
                self._store.compare_set("verdict", "", text)
            return str(self._store.get("verdict").decode())
        except (RuntimeError, dist.DistError):
            return "the rank that hosts the rendezvous store (usually rank 0) has ended"

    def _roll_call(self) -> str:
        silent = name_missing_ranks(self._group, self._label, _ROLL_CALL_SECONDS)
        known = self._known()
        if known or not silent:
            return (
                known
                or "all ranks answer: a connection was lost, or a rank was later than the group's timeout"
            )
        members = dist.get_process_group_ranks(self._group)
        ranks = ", ".join(str(members[rank]) for rank in silent)
        return f"rank {ranks} did not answer within {_ROLL_CALL_SECONDS:g} s: ended, disconnected or busy"

    def _known(self) -> str:
        """What is known at once: '' if nothing."""
        members = dist.get_process_group_ranks(self._group)
        left = [
            f"rank {member} left the block with {self._store.get(f'left/{rank}').decode()}"
            for rank, member in enumerate(members)
            if rank != self._group.rank() and self._store.check([f"left/{rank}"])
        ]
        ended = [str(member) for rank, member in enumerate(members) if self._has_ended(rank)]
        if ended and not left:
            return f"the process of rank {', '.join(ended)} has ended"
        return "; ".join(left)

    def _has_ended(self, rank: int) -> bool:
        """True when the rank is known to be a process of this host that has ended."""
        if not self._store.check([f"process/{rank}"]):
            return False
        process, host = self._store.get(f"process/{rank}").decode().split(" ", 1)
        return bool(host == socket.gethostname() and not process_runs(int(process)))


def is_group_failure(error: BaseException) -> bool:
    """Whether an error says that a collective failed, and not that this rank did something wrong."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        sign in text
        for sign in (
            "gloo/transport",
            "closed by peer",
            "connection reset",
            "timed out waiting",
            "nccl error",
        )
    )


def describe_group(group: dist.ProcessGroup) -> str:
    """Name a group by its ranks, for errors."""
    return f"group {group.group_name!r} of ranks {dist.get_process_group_ranks(group)}"
