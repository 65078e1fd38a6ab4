"""How a failed call is told: which rank, why, where, and what it printed."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Exited", "RankFailure", "RankReport", "lost_its_peer", "waiting_places"]

_LOST_PEER = re.compile(
    r"connection closed by peer|connection reset|broken pipe|connection refused|socket closed"
    r"|connection was (?:likely )?closed|application timeout caused pair closure|failed to recv|software caused",
    re.IGNORECASE,
)
_SHOWN_OUTPUT_CHARACTERS = 8000


@dataclass(frozen=True)
class Exited:
    """The result of a rank that ended its own process: `exit_code`, or the `signal` that ended it.

    Example:
        >>> print(Exited(rank=1, exit_code=None, signal=9))
        rank 1 exited with signal 9 (SIGKILL)
        >>> print(Exited(rank=0, exit_code=3, signal=None))
        rank 0 exited with exit code 3
    """

    rank: int
    exit_code: int | None
    signal: int | None

    def __str__(self) -> str:
        if self.signal is None:
            return f"rank {self.rank} exited with exit code {self.exit_code}"
        try:
            name = f" ({signal.Signals(self.signal).name})"
        except ValueError:
            name = ""
        return f"rank {self.rank} exited with signal {self.signal}{name}"


@dataclass(frozen=True)
class RankReport:
    """What happened to one rank.

    `kind` is "raised", "exited", "timeout" (still running when the call's time was up), "ended" (still running
    some seconds after another rank had failed), or "returned" (although it was expected to exit).
    `exception` is what it raised, where that can be pickled. `consequence`: it only lost its peers.
    """

    rank: int
    kind: str
    headline: str
    details: str = ""
    output: str = ""
    at_seconds: float = 0.0
    consequence: bool = False
    exception: BaseException | None = None

    def __str__(self) -> str:
        parts = [self.headline]
        if self.details:
            parts.append(_indent(self.details, "    "))
        if self.output:
            shown = self.output
            if len(shown) > _SHOWN_OUTPUT_CHARACTERS:
                shown = f"[{len(shown)} characters, the last of them:]\n" + shown[-_SHOWN_OUTPUT_CHARACTERS:]
            parts.append(f"  what rank {self.rank} printed:\n" + _indent(shown, "  | "))
        return "\n".join(parts)


class RankFailure(RuntimeError):  # noqa: N818 - it reports failed ranks
    """Some ranks of a `run_ranks` call failed. The message shows each with its own traceback, the first one first.

    `reports` holds a `RankReport` for each failed rank in that order; `ranks` their numbers; `exceptions` what they
    raised, by rank, where it could be brought back; `returned` the ranks that did not fail.

    Example:
        >>> failure = RankFailure("f", 2, [RankReport(1, "raised", "rank 1 raised ValueError: no")], returned=[0])
        >>> failure.ranks
        (1,)
        >>> print(failure)
        1 of 2 ranks failed in f (returned: rank 0)
        <BLANKLINE>
        rank 1 raised ValueError: no
    """

    def __init__(
        self, function_name: str, world_size: int, reports: list[RankReport], returned: Sequence[int] = ()
    ) -> None:
        self.function_name = function_name
        self.world_size = world_size
        self.returned = tuple(returned)
        self.reports = sorted(
            reports, key=lambda report: (report.consequence, report.at_seconds, report.rank)
        )
        heading = f"{len(reports)} of {world_size} ranks failed in {function_name}"
        if returned:
            heading += f" (returned: {', '.join(f'rank {rank}' for rank in returned)})"
        super().__init__("\n\n".join([heading, *map(str, self.reports)]))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The failed ranks, the first one to fail first, those that only lost their peers last."""
        return tuple(report.rank for report in self.reports)

    @property
    def exceptions(self) -> dict[int, BaseException]:
        """What each failed rank raised."""
        return {report.rank: report.exception for report in self.reports if report.exception is not None}

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.function_name, self.world_size, self.reports, self.returned)


def lost_its_peer(text: str) -> bool:
    """Whether an error only says that another rank is gone.

    Example:
        >>> lost_its_peer("RuntimeError: [...] Connection closed by peer [127.0.0.1]:1234")
        True
        >>> lost_its_peer("ValueError: fraction must be in (0, 1], got 2")
        False
    """
    return _LOST_PEER.search(text) is not None


def waiting_places(stack: str, own_folder: str) -> str:
    """A faulthandler dump as `file:line function`, innermost first, without the frames in `own_folder`.

    Example:
        >>> print(waiting_places('''Current thread 0x01 (most recent call first):
        ...   File "/usr/lib/threading.py", line 12 in wait
        ...   File "/code/test_a.py", line 3 in work
        ...   File "/code/testing/worker.py", line 9 in serve
        ... ''', "/code/testing"))
        main thread:
            /usr/lib/threading.py:12 wait
            /code/test_a.py:3 work
    """
    threads: list[list[str]] = []
    main = -1
    for line in stack.splitlines():
        if re.match(r"(Current )?[Tt]hread 0x", line):
            threads.append([])
        elif threads and (frame := re.match(r'\s+File "(.*)", line (\S+) in (.*)', line)):
            file, number, function = frame.groups()
            if file.startswith(own_folder):
                main = len(threads) - 1
            elif main != len(threads) - 1:
                threads[-1].append(f"    {file}:{number} {function}")
    lines = []
    order = sorted(range(len(threads)), key=lambda index: index != main)
    for index in order:
        lines.append("main thread:" if index == main else "another thread:")
        lines.extend(threads[index] or ["    (no frames of its own)"])
    return "\n".join(lines) or "(it did not say where: it answers no signal)"


def _indent(text: str, prefix: str) -> str:
    return "\n".join(prefix + line for line in text.rstrip("\n").splitlines())
