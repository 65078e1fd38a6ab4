"""Times and bytes of one exchange, taken by standing between it and its lane.

An exchange is a generator of rounds. Time inside the generator, and inside a round's `produce` and `consume`, is the
codec's; the rest of a round is waiting. Bytes are counted by a `Traffic` of the exchange's own below the
lane's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

from tensorplay.compression.collective import Channel, Traffic
from tensorplay.compression.driver import Start
from tensorplay.compression.error_feedback import Condition
from tensorplay.compression.rounds import AllReduce, AllToAll, Exchange, Round, Scratch

__all__ = ["Meter", "metered"]


class Meter:
    """What one exchange has taken so far; only the thread that runs the exchange writes it.

    Attributes:
        encode_seconds: in the exchange before its first round, and in `produce`.
        decode_seconds: in the exchange after its first round, and in `consume`; of a two-shot exchange this includes
            averaging and encoding the mean.
        wait_seconds: in rounds, apart from `produce` and `consume`.
        finite: what the exchange itself found out about its result; None where it doesn't say.

    Example:
        >>> meter = Meter()
        >>> meter.wait_seconds, meter.sent_bytes
        (0.0, 0)
    """

    def __init__(self) -> None:
        self.encode_seconds = self.decode_seconds = self.wait_seconds = 0.0
        self.finite: Condition | None = None
        self._traffic: Traffic | None = None
        self._counted: tuple[Channel, Channel] | None = None

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank sent in the exchange."""
        return self._traffic.sent_bytes if self._traffic else 0

    @property
    def received_bytes(self) -> int:
        """Bytes this rank received in the exchange."""
        return self._traffic.received_bytes if self._traffic else 0

    def add(self, sent_bytes: int, received_bytes: int) -> None:
        """Take bytes that were counted elsewhere."""
        self._traffic = self._traffic or Traffic()
        self._traffic.add(sent_bytes, received_bytes)

    def counted(self, channel: Channel) -> Channel:
        """The same channel, counting here as well."""
        if self._counted is None or self._counted[0] is not channel:
            self._traffic = self._traffic or Traffic(channel.traffic)
            counting = object.__new__(type(channel))  # copy.copy takes ten times as long
            vars(counting).update(vars(channel), traffic=self._traffic)
            self._counted = channel, counting
        return self._counted[1]

    def around(self, current: Round) -> Round:
        """The same round, metered."""
        if isinstance(current, AllReduce):
            return _MeteredAllReduce(current.tensors, self)

        def produce(peer: int) -> torch.Tensor | None:
            began = perf_counter()
            message = current.produce(peer)
            self.encode_seconds += perf_counter() - began
            return message

        def consume(source: int) -> None:
            began = perf_counter()
            current.consume(source)
            self.decode_seconds += perf_counter() - began

        return _MeteredAllToAll(produce, current.receives, consume, self)


@dataclass(frozen=True)
class _MeteredAllReduce(AllReduce):
    meter: Meter

    def perform(self, channel: Channel, message: int, scratch: Scratch) -> None:
        began = perf_counter()
        AllReduce.perform(self, self.meter.counted(channel), message, scratch)
        self.meter.wait_seconds += perf_counter() - began


@dataclass(frozen=True)
class _MeteredAllToAll(AllToAll):
    meter: Meter

    def perform(self, channel: Channel, message: int, scratch: Scratch) -> None:
        meter = self.meter
        began, codec = perf_counter(), meter.encode_seconds + meter.decode_seconds
        AllToAll.perform(self, meter.counted(channel), message, scratch)
        meter.wait_seconds += perf_counter() - began - (meter.encode_seconds + meter.decode_seconds - codec)


def metered(start: Start, meter: Meter, done: Callable[[], None]) -> Start:
    """`start` with its exchange metered; `done` is called in the exchange's thread when it has ended without error.

    What the exchange returns is passed on, and kept as `meter.finite` where it is a verdict.

    Example:
        >>> def exchange(scratch):
        ...     yield AllReduce([])
        >>> meter = Meter()
        >>> len(list(metered(exchange, meter, lambda: print("done"))(Scratch())))
        done
        1
    """

    def run(scratch: Scratch) -> Exchange:
        began = perf_counter()
        exchange = start(scratch)
        verdict = None
        is_first = True
        while True:
            try:
                current = next(exchange)
            except StopIteration as end:
                verdict = end.value
                break
            finally:
                seconds = perf_counter() - began
                if is_first:
                    meter.encode_seconds += seconds
                else:
                    meter.decode_seconds += seconds
            is_first = False
            yield meter.around(current)
            began = perf_counter()
        meter.finite = verdict if isinstance(verdict, bool | torch.Tensor) else None
        done()
        return verdict

    return run
