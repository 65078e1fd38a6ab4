"""One call while its ranks run: who has answered, who has failed, and who has to be ended."""

import os
import pickle
import signal
import time
from dataclasses import dataclass
from typing import Any

from tensorplay.testing.failures import Exited, RankFailure, RankReport, lost_its_peer, waiting_places
from tensorplay.testing.pool import Pool, Rank
from tensorplay.testing.wire import Failed, Finished

__all__ = ["Limits", "Running"]

_HOLD_SECONDS = 0.3  # a failed rank's connections stay open this long: others may be failing on their own
_STACK_SECONDS = 2.0
_POLL_SECONDS = 0.2
_BUSY_KINDS = ("timeout", "ended")
_OWN_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep


@dataclass(frozen=True)
class Limits:
    """How long a call may take, how long after a first failure, and which ranks must end their process."""

    timeout_seconds: float
    grace_seconds: float
    expected_exits: frozenset[int]


class Running:
    """Collects a result or a report for every rank of one call."""

    def __init__(self, pool: Pool, ranks: list[Rank], limits: Limits) -> None:
        self._pool = pool
        self._ranks = ranks
        self._limits = limits
        self._results: dict[int, Finished | Exited] = {}
        self._reports: dict[int, RankReport] = {}
        self._start_seconds = time.monotonic()

    def wait(self) -> None:
        """Wait until every rank has a result or a report.

        Steps, repeated:
          1. end ranks that have failed, shortly after the first failure: their connections close;
          2. when the time or the grace is over, ask the others where they are, and end them;
          3. wait for an answer or the end of a rank, and note it.
        """
        deadline = self._start_seconds + self._limits.timeout_seconds
        while pending := self._pending():
            now = time.monotonic()
            ends = deadline
            if self._reports:
                failed_at = min(report.at_seconds for report in self._reports.values())
                ends = min(deadline, failed_at + self._limits.grace_seconds)
                if now >= failed_at + _HOLD_SECONDS:
                    self._end_failed()
            if now >= ends:
                self._end(pending, timed_out=ends == deadline)
                continue
            self._pool.wait(min(_POLL_SECONDS, ends - now), [self._ranks[number] for number in pending])
            self._collect(pending)
        self._end_failed()

    def check_ends(self) -> None:
        """A rank that returned, and then ended before it was let go, has failed after all."""
        for number, rank in enumerate(self._ranks):
            if not rank.alive and isinstance(self._results.get(number), Finished):
                self._report(number, "exited", f"{self._exit(number)}, after it had returned")

    def failure(self, function_name: str) -> RankFailure | None:
        """The error to raise, or None when no rank failed."""
        if not self._reports:
            return None
        returned = [number for number in range(len(self._ranks)) if number not in self._reports]
        return RankFailure(function_name, len(self._ranks), list(self._reports.values()), returned)

    def results(self) -> list[Any]:
        """What each rank returned."""
        answers = [self._results[number] for number in range(len(self._ranks))]
        return [
            pickle.loads(answer.payload) if isinstance(answer, Finished) else answer for answer in answers
        ]

    def returned_output(self) -> str:
        """What the ranks without a report printed, each line behind its rank."""
        return "".join(
            f"[rank {number}] {line}\n"
            for number, rank in enumerate(self._ranks)
            if number not in self._reports
            for line in rank.output().splitlines()
        )

    def _pending(self) -> list[int]:
        return [n for n in range(len(self._ranks)) if n not in self._results and n not in self._reports]

    def _collect(self, numbers: list[int]) -> None:
        for number in numbers:
            rank = self._ranks[number]
            alive = rank.alive  # asked before reading: the last message of an ended rank has arrived by then
            for message in rank.reader.read():
                if isinstance(message, Failed):
                    self._note_failure(number, message)
                elif number in self._limits.expected_exits:
                    self._report(number, "returned", f"rank {number} returned although expect_exit names it")
                else:
                    self._results[number] = message
            if not alive and number in self._pending():
                exited = self._exit(number)
                if number in self._limits.expected_exits:
                    self._results[number] = exited
                else:
                    self._report(number, "exited", str(exited))

    def _exit(self, number: int) -> Exited:
        status = self._ranks[number].wait_status
        assert status is not None
        code = os.waitstatus_to_exitcode(status)
        return Exited(number, code if code >= 0 else None, -code if code < 0 else None)

    def _note_failure(self, number: int, message: Failed) -> None:
        others = bool(self._reports) or any(isinstance(result, Exited) for result in self._results.values())
        consequence = others and lost_its_peer(message.summary)
        after = f"after {max(0.0, message.at_seconds - self._start_seconds):.2f} s"
        headline = f"rank {number} {'lost its peers' if consequence else 'raised'} {after}: {message.summary}"
        details = message.traceback + ("" if consequence else message.variables)
        exception = None
        if message.exception is not None:
            try:
                exception = pickle.loads(message.exception)
            except Exception as error:
                details += f"(the exception itself did not come back: {error!r})\n"
        self._report(number, "raised", headline, details, message.at_seconds, consequence, exception)

    def _report(
        self,
        number: int,
        kind: str,
        headline: str,
        details: str = "",
        at_seconds: float | None = None,
        consequence: bool = False,
        exception: BaseException | None = None,
    ) -> None:
        at = time.monotonic() if at_seconds is None else at_seconds
        output = self._ranks[number].output()
        self._reports[number] = RankReport(
            number, kind, headline, details, output, at, consequence, exception
        )

    def _end_failed(self) -> None:
        """A failed rank's process is not used again; its end closes its connections, as a program's end would."""
        failed = [self._ranks[number] for number in self._reports if self._ranks[number].alive]
        self._pool.kill([self._ranks[n] for n, report in self._reports.items() if report.kind in _BUSY_KINDS])
        self._pool.end(failed)

    def _end(self, pending: list[int], timed_out: bool) -> None:
        """Steps: 1. ask for the stacks; 2. a last look for answers; 3. report the others; 4. end them."""
        stacks = self._stacks(pending)
        self._pool.wait(0.0)
        self._collect(pending)
        for number in self._pending():
            where = waiting_places(stacks[number], _OWN_FOLDER)
            if timed_out:
                limit = self._limits.timeout_seconds
                self._report(
                    number, "timeout", f"rank {number} was still running after {limit:g} s, at:", where
                )
            else:
                limit = self._limits.grace_seconds
                headline = (
                    f"rank {number} was still running {limit:g} s after the first failure, and was ended, at:"
                )
                self._report(number, "ended", headline, where, consequence=True)
        self._end_failed()

    def _stacks(self, numbers: list[int]) -> dict[int, str]:
        """Have each rank write its threads' stacks; wait until all have, and what they wrote stays the same."""
        for number in numbers:
            self._pool.signal(self._ranks[number], signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_SECONDS
        stacks = dict.fromkeys(numbers, "")
        while time.monotonic() < deadline:
            time.sleep(0.1)
            before, stacks = stacks, {number: self._ranks[number].stack() for number in numbers}
            if stacks == before and all(stacks.values()):
                break
        return stacks
