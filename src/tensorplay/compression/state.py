"""The base of every hook state that exchanges through a lane.

A state owns what a hook remembers (per parameter, see memory.py), counts steps, finds its lane, and turns a DDP bucket
into exchanges. A subclass says which: `starts(bucket, wire_dtype)`.
"""

import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tensorplay.compression.bucket import Bucket, GradBucket, read_bucket
from tensorplay.compression.collective import all_reduce_sum
from tensorplay.compression.driver import Lane, LaneError, Start, lane_for
from tensorplay.compression.memory import ParameterMemory, Tensors
from tensorplay.compression.participation import divisor, resolve_group

__all__ = ["HookState", "StateDict"]

StateDict = dict[str, Any]
"""What `HookState.state_dict` returns: tensors, numbers and strings."""
Wrapper = Callable[[Bucket, int, Start], Start]

_FORMAT = "tensorplay.hook_state/1"


class HookState:
    """State of a communication hook whose exchange has several rounds.

    Args:
        process_group: the ranks that exchange. None: the group of the DDP module the state is registered with through
            our DDP or `register_ddp_comm_hook`; on plain torch DDP the world, since a bucket carries no group.
    """

    #: State tensors that are equal on all ranks, as against this rank's own.
    replicated_kinds: frozenset[str] = frozenset()
    #: State tensors that are made again from the others, bit by bit, where they are missing: they are not saved.
    derived_kinds: frozenset[str] = frozenset()

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self._explicit_group = process_group
        self._bound_group: dist.ProcessGroup | None = None
        self.memory = ParameterMemory()
        self.iteration = 0
        self._steps_are_explicit = False
        self._lane: tuple[weakref.ref[dist.ProcessGroup], torch.device, Lane] | None = None
        #: Called around every exchange, outermost last: `wrapper(bucket, unit number, start) -> start`.
        self.wrappers: list[Wrapper] = []

    # Where ----------------------------------------------------------------------------------------------------

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group the state exchanges in."""
        return resolve_group(self._explicit_group or self._bound_group)

    def bind(self, model: torch.nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
        """Learn parameter names from `model` and, from a DDP module, the group; `register_ddp_comm_hook` does it.

        Raises: ValueError: a state loaded before names parameters the model lacks.
        """
        self.memory.bind(model)
        if process_group is None and isinstance(model, torch.nn.parallel.DistributedDataParallel):
            process_group = model.process_group
        self._bound_group = process_group

    def lane(self, bucket: Bucket) -> Lane:
        """The lane this state's exchanges run in; made at the first bucket, alike on all ranks."""
        group, device = self.process_group, bucket.buffer.device
        if self._lane is None or self._lane[0]() is not group or self._lane[1] != device:
            shapes = [
                (entry.key if isinstance(entry.key, str) else "", entry.shape) for entry in bucket.slices
            ]
            key = f"{self.kind()}-{zlib.crc32(repr((shapes, self.config())).encode()):08x}"
            self._lane = (weakref.ref(group), device, lane_for(group, key, device))
        return self._lane[2]

    # Steps ----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Count an optimizer step explicitly.

        Without it every backward pass that exchanges counts as a step; with gradient accumulation and no `no_sync`
        several passes make one. Call it after each optimizer step from the first on: the first call sets the count
        to 1, whatever the passes before it had counted.
        """
        self.iteration = self.iteration + 1 if self._steps_are_explicit else 1
        self._steps_are_explicit = True

    def _pass_ended(self) -> None:
        if not self._steps_are_explicit:
            self.iteration += 1

    # Exchange -------------------------------------------------------------------------------------------------

    def starts(self, bucket: Bucket, wire_dtype: torch.dtype | None) -> Sequence[Start]:
        """The exchanges that average `bucket` in place, each as a function from scratch to generator.

        `wire_dtype`: float16 or bfloat16 when a cast wrapper asks that float values enter collectives in it.
        """
        raise NotImplementedError

    def exchange(
        self, grad_bucket: GradBucket, wire_dtype: torch.dtype | None = None
    ) -> torch.futures.Future[torch.Tensor]:
        """Average the bucket over the ranks; what a hook returns to DDP.

        1. Read the bucket; a sparse gradient travels as it is.
        2. Queue its exchanges on the lane, in the order DDP hands out buckets.
        3. Return a future that is done when all of them are.

        Raises: RuntimeError: the lane failed before; the text names the rank that did. What fails here before
            anything is sent reaches the other ranks too.
        """
        bucket = read_bucket(grad_bucket)
        if bucket.is_sparse:
            future = average_sparse(bucket.buffer, self.process_group)
            if bucket.is_last:
                self._pass_ended()
            return future
        return self.average(bucket, wire_dtype)

    def average(
        self, bucket: Bucket, wire_dtype: torch.dtype | None = None
    ) -> torch.futures.Future[torch.Tensor]:
        """Average a dense bucket in place; the future's value is its buffer."""
        lane = self.lane(bucket)
        try:
            if not bucket.slices or bucket.buffer.numel() == 0:
                starts: Sequence[Start] = ()
            else:
                starts = self.starts(bucket, wire_dtype)
            for wrapper in self.wrappers:
                starts = [wrapper(bucket, number, start) for number, start in enumerate(starts)]
        except BaseException as error:
            lane.fail(error)
            raise
        done = [lane.submit(start) for start in starts]
        if bucket.is_last:
            self._pass_ended()
        buffer = bucket.buffer
        if not done:
            empty: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            empty.set_result(buffer)
            return empty

        def finish(all_done: torch.futures.Future[Any]) -> torch.Tensor:
            for one in all_done.value():
                error = one.value()
                if error is not None:
                    raise error if isinstance(error, LaneError) else LaneError(str(error))
            return buffer

        return torch.futures.collect_all(done).then(finish)

    # Saving ---------------------------------------------------------------------------------------------------

    def kind(self) -> str:
        """The class' name, kept in saved states."""
        return type(self).__name__

    def config(self) -> dict[str, Any]:
        """Settings that a saved state must match: numbers and strings."""
        return {}

    def state_dict(self) -> StateDict:
        """This rank's state: tensors, numbers and strings, so `torch.load(weights_only=True)` reads it.

        Residuals differ on every rank: save one file a rank.

        Raises: RuntimeError: parameter names are unknown (plain torch DDP: call `state.bind(model)`).
        """
        group = self.process_group
        return {
            "format": _FORMAT,
            "kind": self.kind(),
            "config": self.config(),
            "rank": group.rank(),
            "world_size": group.size(),
            "iteration": self.iteration,
            "explicit_steps": self._steps_are_explicit,
            "tensors": {
                name: {
                    kind: tensor.detach().clone()
                    for kind, tensor in entry.items()
                    if kind not in self.derived_kinds
                }
                for name, entry in self.memory.by_name().items()
            },
        }

    def load_state_dict(self, state: StateDict | Sequence[StateDict]) -> None:
        """Continue from a saved state.

        Args:
            state: the state this rank saved; or the states of all ranks, in any order. With all of them the number of
                ranks may have changed: new rank r takes the residuals of old ranks r, r + W', r + 2 W', … (their
                sum over the ranks is kept), and ranks beyond the old number start from zero.
        Raises:
            ValueError: saved by another kind of state, with other settings, by another rank, for another number of
                ranks (when given alone), for parameters the model lacks; the message says what differs.
        """
        group = self.process_group
        rank, world_size = group.rank(), group.size()
        if isinstance(state, Mapping):
            self._check(state)
            if state["world_size"] != world_size:
                raise ValueError(
                    f"the state was saved by {state['world_size']} ranks, this group has {world_size}: "
                    "pass the list of all ranks' states, so that their residuals can be shared out"
                )
            if state["rank"] != rank:
                raise ValueError(
                    f"the state is rank {state['rank']}'s, this is rank {rank}: residuals differ on every rank, "
                    "load this rank's own file, or pass the list of all ranks' states"
                )
            chosen: StateDict = dict(state)
        else:
            chosen = self._share_out(list(state), rank, world_size)
        self.memory.load(chosen["tensors"])
        self.iteration = int(chosen["iteration"])
        self._steps_are_explicit = bool(chosen["explicit_steps"])

    def _check(self, state: Mapping[str, Any]) -> None:
        if state.get("format") != _FORMAT:
            raise ValueError(f"not a hook state: format is {state.get('format')!r}, expected {_FORMAT!r}")
        if state["kind"] != self.kind():
            raise ValueError(f"the state was saved by {state['kind']}, this is {self.kind()}")
        different = [
            f"{name}: saved {state['config'].get(name)!r}, here {mine!r}"
            for name, mine in sorted(self.config().items())  # what else was saved no longer matters
            if state["config"].get(name) != mine
        ]
        if different:
            raise ValueError(f"the state was saved with other settings: {'; '.join(different)}")

    def _share_out(self, states: list[StateDict], rank: int, world_size: int) -> StateDict:
        if not states:
            raise ValueError("load_state_dict got an empty list: pass the states of all ranks")
        for state in states:
            self._check(state)
        by_rank = {state["rank"]: state for state in states}
        old_size = states[0]["world_size"]
        if sorted(by_rank) != list(range(old_size)) or len(states) != old_size:
            missing = sorted(set(range(old_size)) - set(by_rank))
            raise ValueError(
                f"the states of all {old_size} ranks are needed; missing: {missing or 'none'}, "
                f"got {len(states)}"
            )
        if old_size == world_size:
            return by_rank[rank]
        folded = {old: self.fold(by_rank[old]) for old in range(old_size)}
        tensors: dict[str, Tensors] = {}
        for old in range(rank, old_size, world_size):
            for name, entry in folded[old].items():
                mine = tensors.setdefault(name, {})
                for kind, tensor in entry.items():
                    if kind not in self.replicated_kinds:
                        mine[kind] = mine[kind] + tensor if kind in mine else tensor.clone()
        for name, entry in folded[0].items():
            for kind, tensor in entry.items():
                if kind in self.replicated_kinds:
                    tensors.setdefault(name, {})[kind] = tensor
        return {**by_rank[0], "tensors": tensors}

    def fold(self, state: StateDict) -> dict[str, Tensors]:
        """A saved rank's tensors in a form that may be added over ranks and given to another number of ranks."""
        tensors: dict[str, Tensors] = state["tensors"]
        return tensors


def average_sparse(gradient: torch.Tensor, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    """Average a sparse gradient over `group` by the backend's own all-reduce, in the caller's order."""
    shared = (gradient.coalesce() * (1.0 / divisor(group))).coalesce()
    work = all_reduce_sum(shared, group)

    def unwrap(future: torch.futures.Future[Any]) -> torch.Tensor:
        result = future.value()
        averaged: torch.Tensor = result[0] if isinstance(result, list) else result
        return averaged

    return work.get_future().then(unwrap)  # type: ignore[no-any-return]
