"""How DiLoCo's outer gradients reach the other ranks: one submit, one wait, nothing in between."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tensorplay.compression.bucket import Bucket
from tensorplay.compression.codec import Codec
from tensorplay.compression.collective import Traffic, all_reduce_sum, traffic
from tensorplay.compression.compressed import CodecState
from tensorplay.compression.driver import Lane, lane_for
from tensorplay.compression.registry import make_codec
from tensorplay.compression.rounds import AllReduce, Exchange, Scratch
from tensorplay.compression.schedule import OnlyLarge, Uniform

__all__ = ["CodecExchange", "OuterExchange", "OuterGradient", "PlainExchange", "Wait"]

Wait = Callable[[], None]
"""Called once: returns when the submitted outer gradient holds its mean."""

_MEBIBYTE = 1024 * 1024


@dataclass(frozen=True)
class OuterGradient:
    """One fragment's outer gradient.

    Args:
        tensors: name -> contiguous view of the flat buffers, shaped as the parameter, complex ones as real pairs.
        flats: the buffers, one for each dtype and device; together they hold every value once.
    """

    tensors: Mapping[str, torch.Tensor]
    flats: Sequence[torch.Tensor]


class OuterExchange(Protocol):
    """Averages outer gradients over a group, in place, in the background where it can."""

    def submit(self, gradient: OuterGradient) -> Wait:
        """Start averaging. All ranks submit the same names and shapes in the same order."""

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must keep, residuals for example; empty where there is nothing."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore `state_dict()`; a list of the states of all ranks where the number of ranks changed."""

    @property
    def traffic(self) -> Traffic:
        """Bytes handed to collectives."""


class PlainExchange:
    """The uncompressed mean:  g = sum over ranks of (g / W).

    Args:
        group: the ranks.
        background: False: the group's own all-reduce. True: a lane of its own, so that a transfer that lasts several
            steps neither delays nor reorders the gradients' collectives.
        key: names the lane, equal on all ranks.
        bucket_cap_mb: in the background values travel in parts of this size, in MiB, so the lane's scratch is bounded.
    """

    def __init__(
        self, group: dist.ProcessGroup, background: bool, key: str, bucket_cap_mb: float = 25.0
    ) -> None:
        self._group = group
        self._background = background
        self._key = f"outer/{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        self._part_bytes = int(bucket_cap_mb * _MEBIBYTE)
        self._lane: Lane | None = None
        self._traffic = Traffic(traffic)

    @property
    def traffic(self) -> Traffic:
        """Bytes handed to collectives."""
        return self._traffic if self._lane is None else self._lane.traffic

    def submit(self, gradient: OuterGradient) -> Wait:
        """See `OuterExchange`.

        1. Divide by the number of ranks, so that no sum overflows where the mean would not.
        2. Start the sums; the caller's wait waits for all of them.
        """
        flats = [flat for flat in gradient.flats if flat.numel()]
        for flat in flats:
            flat.mul_(1.0 / self._group.size())
        if self._group.size() == 1:
            return _nothing
        if self._background:
            return self._on_lane(flats)
        works = [all_reduce_sum(flat, self._group, self._traffic) for flat in flats]

        def wait() -> None:
            for work in works:
                work.wait()

        return wait

    def _on_lane(self, flats: Sequence[torch.Tensor]) -> Wait:
        ends = []
        for flat in flats:
            self._lane = lane_for(self._group, self._key, flat.device)
            for part in torch.split(flat, max(1, self._part_bytes // flat.element_size())):
                ends.append(self._lane.submit(_Sum(part)))

        def wait() -> None:
            for end in ends:
                error = end.wait()
                if error is not None:
                    raise error

        return wait

    def state_dict(self) -> dict[str, Any]:
        """Nothing is kept."""
        return {}

    def load_state_dict(self, state_dict: Any) -> None:
        """Nothing to restore."""


class CodecExchange:
    """The mean of compressed outer gradients, with error feedback: what the codec loses is added to the next one.

    It runs on the lane of its state, so in the background; the result is bit-identical on all ranks.

    Args:
        group: the ranks.
        codec: a Codec or its registered name.
        min_elements: smaller tensors travel uncompressed.
    Raises: ValueError: an unknown codec. TypeError: neither a Codec nor a name.
    """

    def __init__(self, group: dist.ProcessGroup, codec: str | Codec, min_elements: int = 1024) -> None:
        made = make_codec(codec)
        self._state = CodecState(made, group, policy=OnlyLarge(Uniform(made), min_elements))
        self._lanes: dict[torch.device, Lane] = {}

    @property
    def traffic(self) -> Traffic:
        """Bytes handed to collectives."""
        total = Traffic()
        for lane in self._lanes.values():
            total.add(lane.traffic.sent_bytes, lane.traffic.received_bytes)
        return total

    def submit(self, gradient: OuterGradient) -> Wait:
        """See `OuterExchange`. Tensors are float32."""
        by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
        for name, tensor in gradient.tensors.items():
            by_device.setdefault(tensor.device, {})[name] = tensor
        ends = []
        for device, tensors in by_device.items():
            bucket = Bucket.of_tensors(tensors)
            self._lanes[device] = self._state.lane(bucket)
            ends.append(self._state.average(bucket))

        def wait() -> None:
            for end in ends:
                end.wait()

        return wait

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals."""
        return self._state.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore residuals; from the list of all ranks' states they are dealt out anew, their sum kept."""
        self._state.load_state_dict(state_dict)


@dataclass(frozen=True)
class _Sum:
    """Starts the exchange that sums one part."""

    part: torch.Tensor

    def __call__(self, scratch: Scratch) -> Exchange:
        yield AllReduce([self.part])


def _nothing() -> None:
    return
