"""The state behind the PowerSGD hooks: plans, per-parameter tensors, steps and saving put together."""

import logging
import zlib
from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tensorplay.compression.bucket import Bucket, GradBucket
from tensorplay.compression.driver import Lane, Start, lane_for
from tensorplay.compression.low_rank import LowRankTerms, check_ranks, low_rank_mean, plain_mean
from tensorplay.compression.low_rank_fused import AHEAD
from tensorplay.compression.low_rank_plan import LowRankPlan, Rule, plan_low_rank
from tensorplay.compression.memory import Tensors
from tensorplay.compression.participation import divisor
from tensorplay.compression.plan import UNIT_ELEMENTS
from tensorplay.compression.rounds import Exchange, Scratch
from tensorplay.compression.state import HookState, StateDict

__all__ = ["LowRankSettings", "LowRankState"]

_logger = logging.getLogger(__name__)
_MAX_PLANS = 256


@dataclass(frozen=True)
class LowRankSettings:
    """What a low-rank exchange can be told.

    Args:
        rank, min_rate: see `Rule`. start_step: plain averaging before. epsilon: see `orthogonalize_`.
        seed: of drawn factors. log_every_steps: steps between two lines of statistics.
    """

    rank: int
    min_rate: float
    start_step: int
    error_feedback: bool
    warm_start: bool
    epsilon: float
    seed: int
    log_every_steps: int


class LowRankState(HookState):
    """Averages gradients through low-rank factors; a subclass gives the settings."""

    replicated_kinds = frozenset({"q"})
    derived_kinds = frozenset({AHEAD})

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(process_group)
        #: Values of the gradients exchanged through factors so far, and values that entered collectives for them.
        self.elements_before = 0
        self.elements_after = 0
        self._next_log_step = 0
        self._layout = "layer"
        self._lane_key: str | None = None
        self._plans: dict[Hashable, LowRankPlan] = {}
        self._checked_phases: set[str] = set()

    @abstractmethod
    def settings(self) -> LowRankSettings:
        """The settings that hold for the next bucket."""

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group the state exchanges in; may be set."""
        return super().process_group

    @process_group.setter
    def process_group(self, group: dist.ProcessGroup | None) -> None:
        self._explicit_group = group

    def lane(self, bucket: Bucket) -> Lane:
        """The lane this state's exchanges run in.

        Its name leaves the settings out: ranks whose settings differ must meet there, to be told so.
        """
        if self._lane_key is None:
            shapes = [
                (entry.key if isinstance(entry.key, str) else "", entry.shape) for entry in bucket.slices
            ]
            self._lane_key = f"{self.kind()}-{zlib.crc32(repr(shapes).encode()):08x}"
        return lane_for(self.process_group, self._lane_key, bucket.buffer.device)

    # Exchange -------------------------------------------------------------------------------------------------

    def exchange_as(
        self, layout: str, bucket: GradBucket, wire_dtype: torch.dtype | None = None
    ) -> torch.futures.Future[torch.Tensor]:
        """Average a DDP bucket, factorised in one of `low_rank_plan.LAYOUTS`."""
        self._layout = layout
        return self.exchange(bucket, wire_dtype)

    def average_as(
        self, layout: str, bucket: Bucket, wire_dtype: torch.dtype | None = None
    ) -> torch.futures.Future[torch.Tensor]:
        """Average a dense bucket in place, factorised in one of `low_rank_plan.LAYOUTS`."""
        self._layout = layout
        return self.average(bucket, wire_dtype)

    def plan(self, bucket: Bucket, layout: str) -> LowRankPlan:
        """What of this bucket is factorised, and how; kept until its shapes or the settings change."""
        settings = self.settings()
        shapes = tuple((entry.shape, entry.stride, entry.values.numel()) for entry in bucket.slices)
        key = (layout, settings.rank, settings.min_rate, shapes)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:  # buckets of models long gone
                self._plans.clear()
            plan = plan_low_rank(bucket.slices, Rule(settings.rank, settings.min_rate, layout))
            self._plans[key] = plan
        return plan

    def starts(self, bucket: Bucket, wire_dtype: torch.dtype | None) -> Sequence[Start]:
        settings = self.settings()
        group = self.process_group
        used = self.memory.take_used([entry.key for entry in bucket.slices])
        phase = "plain" if self.iteration < settings.start_step else "low rank"
        check = phase not in self._checked_phases
        if bucket.is_last:
            self._checked_phases.add(phase)
        if phase == "plain":
            return self._plain_starts(bucket, wire_dtype, check)
        plan = self.plan(bucket, self._layout)
        memories = self._memories(bucket, plan)
        self._count(plan, bucket.is_last, settings.log_every_steps)
        terms = LowRankTerms(
            rank=group.rank(),
            world_size=group.size(),
            divisor=divisor(group),
            used=used,
            step=self.iteration,
            seed=settings.seed,
            epsilon=settings.epsilon,
            warm_start=settings.warm_start,
            wire_dtype=wire_dtype,
            check=check,
        )

        def start(scratch: Scratch) -> Exchange:
            return low_rank_mean(bucket, plan, memories, terms, scratch)

        return [start]

    def _plain_starts(self, bucket: Bucket, wire_dtype: torch.dtype | None, check: bool) -> list[Start]:
        """Plain averages of the bucket's pieces, so that one is on the wire while another is summed."""
        group, buffer = self.process_group, bucket.buffer
        part = divisor(group)
        starts: list[Start] = []
        if check:
            facts = (self.iteration, self.settings().seed, buffer.numel(), 0, 0, 0)
            rank, world_size = group.rank(), group.size()

            def compare(scratch: Scratch) -> Exchange:
                yield from check_ranks(facts, rank, world_size, buffer.device)

            starts.append(compare)
        for low in range(0, buffer.numel(), UNIT_ELEMENTS):

            def start(scratch: Scratch, piece: torch.Tensor = buffer[low : low + UNIT_ELEMENTS]) -> Exchange:
                return plain_mean(piece, part, wire_dtype, scratch)

            starts.append(start)
        return starts

    def _memories(self, bucket: Bucket, plan: LowRankPlan) -> list[Tensors]:
        """The tensors of every slice; residuals of those that are factorised start from zero."""
        memories = [self.memory.of(entry.key) for entry in bucket.slices]
        for index in plan.members if self.settings().error_feedback else ():
            entry, held = bucket.slices[index], memories[index].get("residual")
            if held is None:
                held = torch.zeros(entry.values.numel(), dtype=torch.float32, device=entry.values.device)
            elif held.numel() != entry.values.numel():
                raise ValueError(
                    f"the residual of a parameter of shape {entry.shape} has {held.numel()} values, "
                    f"{entry.values.numel()} are needed: the state belongs to another model"
                )
            memories[index]["residual"] = held.to(entry.values.device)
        return memories

    def _count(self, plan: LowRankPlan, is_last: bool, log_every_steps: int) -> None:
        self.elements_before += plan.elements
        self.elements_after += plan.sent_elements
        if is_last and self.iteration >= self._next_log_step:
            self._next_log_step = self.iteration + log_every_steps
            _logger.info(
                "PowerSGD at step %d: %d values sent as %d",
                self.iteration,
                self.elements_before,
                self.elements_after,
            )

    # Saving ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        return {**super().state_dict(), "counts": self.counts()}

    def load_state_dict(self, state: StateDict | Sequence[StateDict]) -> None:
        super().load_state_dict(state)
        self.set_counts((state if isinstance(state, Mapping) else state[0])["counts"])
        self._checked_phases.clear()

    def counts(self) -> list[int]:
        """Elements before and after, and the step of the next line of statistics."""
        return [self.elements_before, self.elements_after, self._next_log_step]

    def set_counts(self, counts: Sequence[int]) -> None:
        """Continue from `counts()`."""
        self.elements_before, self.elements_after, self._next_log_step = map(int, counts)
