"""The state behind every codec hook: codec, policy, route and error feedback put together."""

import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tensorplay.compression.bucket import Bucket, Key
from tensorplay.compression.codec import Codec, Identity
from tensorplay.compression.driver import Start
from tensorplay.compression.error_feedback import ErrorFeedback, GradientPort, Port
from tensorplay.compression.exchange import ROUTES, Terms, choose_route, exchange_unit
from tensorplay.compression.memory import Tensors
from tensorplay.compression.participation import divisor
from tensorplay.compression.plan import UNIT_ELEMENTS, Entry, Unit, owned_ranges, plan_units
from tensorplay.compression.rounds import Exchange, Scratch
from tensorplay.compression.schedule import Policy, Uniform
from tensorplay.compression.state import HookState, StateDict

__all__ = ["CodecState"]


@dataclass(frozen=True)
class _Plan:
    units: tuple[Unit, ...]
    entries: tuple[Entry, ...]
    route: str
    second: Codec


class CodecState(HookState):
    """Averages gradients through a codec.

    Args:
        codec: what compresses. second_codec: encodes the mean on the two-shot route; None: the same codec.
        policy: which tensors, and from when on; None: all with `codec`.
        error_feedback: keep what the codec loses and add it at the next step.
        route: "auto", "gather", "two-shot" or "sum". seed: of stochastic rounding and random choices.
        whole_buckets: the codec sees a whole bucket at once; costs scratch of the bucket's size.
        process_group: see `HookState`.
    """

    def __init__(
        self,
        codec: Codec,
        process_group: dist.ProcessGroup | None = None,
        *,
        policy: Policy | None = None,
        error_feedback: bool = True,
        route: str = "auto",
        second_codec: Codec | None = None,
        seed: int = 0,
        whole_buckets: bool = False,
    ) -> None:
        super().__init__(process_group)
        if route not in ROUTES:
            raise ValueError(f"route must be one of {', '.join(ROUTES)}, got {route!r}")
        if route == "sum" and codec.sums_as is None:
            raise ValueError(
                f"route 'sum' needs a codec whose payloads can be added, {codec.name} has none: "
                "use 'auto', 'gather' or 'two-shot'"
            )
        if route in ("sum", "gather") and second_codec is not None:
            raise ValueError(f"second_codec needs route 'two-shot' or 'auto', got route {route!r}")
        self.codec, self.second_codec = codec, second_codec
        self.route, self.error_feedback, self.seed = route, error_feedback, seed
        self.policy: Policy = policy or Uniform(codec)
        self._whole_buckets = whole_buckets
        self._plans: dict[Hashable, _Plan] = {}

    def config(self) -> dict[str, Any]:
        return {
            "codec": self.codec.name,
            "second_codec": self.second_codec.name if self.second_codec else "",
            "error_feedback": self.error_feedback,
            "route": self.route,
            "seed": self.seed,
            "unit_elements": UNIT_ELEMENTS,
        }

    # Planning -------------------------------------------------------------------------------------------------

    def plan(self, bucket: Bucket, wire_dtype: torch.dtype | None) -> _Plan:
        """How this bucket is cut at this step; kept until the bucket or the policy's phase changes."""
        key = (bucket.signature(), self.policy.phase(self.iteration), wire_dtype, self.process_group.size())
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) > 256:  # buckets of models long gone
                self._plans.clear()
            plan = self._plans[key] = self._make_plan(bucket, wire_dtype)
        return plan

    def _make_plan(self, bucket: Bucket, wire_dtype: torch.dtype | None) -> _Plan:
        world_size = self.process_group.size()
        second = self.second_codec or self.codec
        route = self.route
        if route == "auto":
            route = choose_route(self.codec, second, world_size, bucket.buffer.device, self.error_feedback)
            if self.second_codec is not None:
                route = "two-shot"
        wide = torch.float64 if bucket.buffer.dtype == torch.float64 else torch.float32
        plain = Identity(wire_dtype or bucket.buffer.dtype)
        entries = []
        for index, entry in enumerate(bucket.slices):
            name = self.memory.name_of(entry.key)
            codec = self.policy.codec_for(name, entry.shape, self.iteration) if entry.values.numel() else None
            seed = zlib.crc32((name or f"{index}/{entry.shape}").encode())
            entries.append(Entry(entry.values.numel(), codec, self.second_codec if codec else None, seed))
        parts = world_size if route == "two-shot" else 1
        return _Plan(
            tuple(plan_units(entries, parts, plain, wide, self._whole_buckets)), tuple(entries), route, second
        )

    # Exchange -------------------------------------------------------------------------------------------------

    def starts(self, bucket: Bucket, wire_dtype: torch.dtype | None) -> Sequence[Start]:
        plan = self.plan(bucket, wire_dtype)
        group = self.process_group
        terms = Terms(
            rank=group.rank(),
            world_size=group.size(),
            divisor=divisor(group),
            seed=zlib.crc32(f"{self.seed}/{self.iteration}".encode()),
            used=self.memory.take_used([entry.key for entry in bucket.slices]),
            label=f"codec {self.codec.name}, step {self.iteration}",
        )
        gradients = GradientPort(bucket.slices)
        port: Port = gradients
        owned: list[torch.Tensor | None] | None = None
        if self.error_feedback:
            port, owned = self._feedback(bucket, plan, gradients, terms)
        starts: list[Start] = []
        for unit in plan.units:

            def start(scratch: Scratch, unit: Unit = unit) -> Exchange:
                return exchange_unit(plan.route, unit, port, gradients, owned, terms, scratch)

            starts.append(start)
        return starts

    def _feedback(
        self, bucket: Bucket, plan: _Plan, gradients: GradientPort, terms: Terms
    ) -> tuple[ErrorFeedback, list[torch.Tensor | None] | None]:
        residuals: list[torch.Tensor | None] = []
        owned: list[torch.Tensor | None] = []
        for entry, part in zip(bucket.slices, plan.entries, strict=True):
            if part.codec is None:
                residuals.append(None)
                owned.append(None)
                continue
            tensors = self.memory.of(entry.key)
            device = entry.values.device
            residuals.append(_held(tensors, "residual", part.numel, entry.key, device))
            if plan.route == "two-shot":
                ranges = owned_ranges(part.numel, part.group_size, terms.world_size, terms.rank)
                owned.append(_held(tensors, "owner_residual", sum(n for _, n in ranges), entry.key, device))
        return ErrorFeedback(gradients, residuals), owned if plan.route == "two-shot" else None

    # Saving ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        state = super().state_dict()
        state["group_size"] = self._group_size()
        return state

    def _group_size(self) -> int:
        entry = Entry(0, self.codec, self.second_codec, 0)
        return entry.group_size

    def fold(self, state: StateDict) -> dict[str, Tensors]:
        """Second residuals join the first ones, where they count once for every rank that took part."""
        folded: dict[str, Tensors] = {}
        for name, entry in state["tensors"].items():
            residual = entry["residual"].clone()
            owned = entry.get("owner_residual")
            if owned is not None:
                at = 0
                for start, length in owned_ranges(
                    residual.numel(), state["group_size"], state["world_size"], state["rank"]
                ):
                    residual[start : start + length].add_(owned[at : at + length], alpha=state["world_size"])
                    at += length
            folded[name] = {"residual": residual}
        return folded


def _held(tensors: Tensors, kind: str, numel: int, key: Key, device: torch.device) -> torch.Tensor:
    """The float32 state tensor of a parameter, zero at first."""
    held = tensors.get(kind)
    if held is None:
        held = tensors[kind] = torch.zeros(numel, dtype=torch.float32, device=device)
    elif held.numel() != numel:
        what = key if isinstance(key, str) else f"a parameter of shape {tuple(key.shape)}"
        raise ValueError(
            f"the {kind} of {what} has {held.numel()} values, {numel} are needed: "
            "the state belongs to another model or another number of ranks"
        )
    elif held.device != device:
        held = tensors[kind] = held.to(device)
    return held
