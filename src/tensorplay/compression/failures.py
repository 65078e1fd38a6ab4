"""What the ranks of a lane tell each other when one of them fails: who it was, and why.

A rank that fails writes a verdict to the rendezvous store and closes its connections; the others' waits end, and they
read it. A rank that was killed writes nothing: those whose connection broke call the roll, and the first writes who
did not answer. The first verdict stands.
"""

import os
import socket
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

__all__ = ["FailureBoard", "process_runs"]

_PATIENCE_SECONDS = 5.0
"""How long a rank waits for others to answer, or to read its verdict; less where the group's timeout is."""


class FailureBoard:
    """The verdict on a lane, kept in its store.

    Args:
        store: the lane's own part of the base group's store. rank, world_size: within the group. timeout: the group's.
    """

    def __init__(self, store: c10d.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self._store, self._rank = store, rank
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._patience_seconds = min(_PATIENCE_SECONDS, timeout.total_seconds())
        store.set(f"process/{rank}", f"{socket.gethostname()} {os.getpid()}")

    def report(self, text: str, close: Callable[[], None]) -> None:
        """Tell the peers what failed here, then `close` the lane, and leave them a moment to read it."""
        readers = [f"read/{peer}" for peer in self._peers]
        try:
            verdict = self._store.compare_set("verdict", "", text)
            close()
            if (
                readers and verdict == text.encode()
            ):  # somebody else's failure came first otherwise, and is being read
                self._store.wait(readers, timedelta(seconds=self._patience_seconds))
        except (RuntimeError, dist.DistError):
            close()  # the store's host is gone: nobody is left to tell

    def explain(self) -> str | None:
        """Return who failed and why, as far as the store knows; None when the store can't be reached."""
        try:
            if not self._store.check(["verdict"]):
                missing = self._roll_call()
                if missing:
                    self._store.compare_set("verdict", "", missing)
                elif not self._store.check(["verdict"]):
                    return ""
            text: str = self._store.get("verdict").decode()
            self._store.set(f"read/{self._rank}", "1")
            return text
        except (RuntimeError, dist.DistError):
            return None

    def _roll_call(self) -> str:
        """Ask who is there; returns the text that names the ranks that are not, or ''."""
        self._store.set(f"alive/{self._rank}", "1")
        silent = []
        try:
            self._store.wait(
                [f"alive/{peer}" for peer in self._peers], timedelta(seconds=self._patience_seconds)
            )
        except (RuntimeError, dist.DistError):
            silent = [peer for peer in self._peers if not self._store.check([f"alive/{peer}"])]
        gone = [peer for peer in silent if not self._is_running(peer)]
        named = sorted(gone or silent)
        if not named:
            return ""
        ranks = ", ".join(str(rank) for rank in named)
        return (
            f"rank {ranks} did not answer within {self._patience_seconds:g} s: "
            "its process ended or lost its connection"
        )

    def _is_running(self, peer: int) -> bool:
        """False when `peer` is known to be a process of this host that has ended, or never came."""
        if not self._store.check([f"process/{peer}"]):
            return False
        host, pid = self._store.get(f"process/{peer}").decode().rsplit(" ", 1)
        return host == socket.gethostname() and process_runs(int(pid))


def process_runs(pid: int) -> bool:
    """Whether a process of this host runs; False too where nothing can be known."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
