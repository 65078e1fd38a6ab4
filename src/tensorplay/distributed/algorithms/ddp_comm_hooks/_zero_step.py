"""The optimizer's step made within a communication hook, bucket by bucket."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tensorplay.compression.bucket import GradBucket
from tensorplay.compression.driver import Lane
from tensorplay.compression.memory import ParameterMemory
from tensorplay.compression.participation import divisor
from tensorplay.compression.rounds import Exchange, Scratch
from tensorplay.distributed.algorithms.ddp_comm_hooks._protocol import HookFunction, as_future
from tensorplay.distributed.algorithms.ddp_comm_hooks._zero_bucket import (
    BucketWork,
    after_gradients_are_written,
    after_last_node,
    gradient_round,
    used_round,
)
from tensorplay.distributed.algorithms.ddp_comm_hooks._zero_hazard import late_reads
from tensorplay.distributed.algorithms.ddp_comm_hooks._zero_norms import prepare_gradients
from tensorplay.distributed.algorithms.ddp_comm_hooks._zero_pass import (
    Done,
    Pass,
    Stage,
    ZeroOptions,
    bucket_result,
    wait_for_gradient,
)
from tensorplay.distributed.optim._zero_exchange import parameter_round
from tensorplay.distributed.optim._zero_state import move_states
from tensorplay.distributed.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__all__ = ["ZeroStep"]

_INSPECTED_FORWARDS = 2


class ZeroStep:
    """Exchanges a bucket's gradients, updates its parameters on their owners, and sends them to every rank.

    Steps for each bucket, in a lane of the optimizer:
      1. which parameters any rank used, where that can differ;
      2. state of parameters whose owner changed (DDP's new buckets);
      3. wait for the wrapped hook's gradient, or bring each gradient to its owner;
      4. owners update                              } once for all buckets, after the last,
      5. owners send, everyone else receives        } where updates need every gradient
    The future that DDP waits for is done after 5; so backward returns when everything is in place.

    The hook holds the optimizer and, weakly, the DDP module.
    """

    def __init__(
        self,
        hook: HookFunction,
        ddp: torch.nn.parallel.DistributedDataParallel,
        zero: ZeroRedundancyOptimizer,
        options: ZeroOptions,
    ) -> None:
        self._hook, self._zero, self._options = hook, zero, options
        self._ddp = weakref.ref(ddp)
        self._shards = zero.shards
        self._pass: Pass | None = None
        self._memory = ParameterMemory()
        self._forwards = 0
        if self._use_differs():
            self._watch()
        zero.hand_over(unscales=options.grad_scaler is not None)
        self._inspection: Any = ddp.register_forward_hook(_inspection(weakref.ref(self)))

    # At the first forwards ------------------------------------------------------------------------------------------

    def _use_differs(self) -> bool:
        """Whether a backward may leave parameters without a gradient."""
        ddp: Any = self._ddp()
        return ddp is not None and bool(ddp.find_unused_parameters or ddp.static_graph)

    def _watch(self) -> None:
        for parameter in self._shards.parameters:
            self._memory.watch(parameter)

    def inspect(self, ddp: torch.nn.parallel.DistributedDataParallel, outputs: Any) -> None:
        """Look at the graph of the first forwards.

        Raises: RuntimeError: backward will read a parameter that an update may have changed by then.
        """
        if self._use_differs():
            self._watch()
        if not torch.is_grad_enabled():
            return
        self._forwards += 1
        if self._forwards >= _INSPECTED_FORWARDS:
            self._inspection.remove()
        if self._options.update == "after_backward":
            return
        names = late_reads(
            outputs,
            {
                name: parameter
                for name, parameter in ddp.module.named_parameters()
                if self._shards.number_of(parameter) is not None and parameter.requires_grad
            },
        )
        if names:
            raise RuntimeError(
                f"backward reads {', '.join(names)} where no gradient flows to it (a detached use), which may be after "
                'its update: "modified by an inplace operation". Give the hook update="after_backward"'
            )

    # The hook -------------------------------------------------------------------------------------------------------

    def exchange(self, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Do what the class says for one bucket; called by DDP, bucket by bucket."""
        options = self._options
        if bucket.index() == 0 or self._pass is None:
            self._begin()
        step = self._pass
        assert step is not None
        pieces = BucketWork.of(
            bucket,
            self._shards,
            None if options.shard_buckets else self._next_owner,
            self._memory.take_used if self._use_differs() else None,
        )
        read = pieces[0].read
        lane = self._zero.lane(pieces[0].device)
        gradient: torch.futures.Future[Any] | None = None
        if not options.reduce_scatter or read.is_sparse:
            try:
                gradient = as_future(self._hook(state, bucket))
            except BaseException as error:
                lane.fail(error)
                raise
        waits = [self._submit(step, work, gradient, lane) for work in pieces]
        if read.is_last:
            self._pass = None
            if options.reduce_scatter:
                after_gradients_are_written(lambda: self._drop_foreign_gradients(step))
            if options.update == "after_backward":
                after_last_node(lambda: self._finish(step))
            elif not self._sends_at_once:
                self._finish(step)
        return torch.futures.collect_all(waits).then(lambda futures: bucket_result(pieces, futures.value()))

    @property
    def _sends_at_once(self) -> bool:
        return self._options.interleaved and not self._options.needs_all_gradients

    def _submit(
        self, step: Pass, work: BucketWork, gradient: "torch.futures.Future[Any] | None", lane: Lane
    ) -> Done:
        """Start a piece; returns what is done when its parameters have arrived."""
        work.gradient = gradient
        share = 1.0 / divisor(self._zero.process_group)
        gathered = Stage()
        step.works.append(work)
        step.stages.append(gathered)
        done = lane.submit(lambda scratch: gathered.run(self._gather(work, lane, scratch, share)))
        return done if self._sends_at_once else work.arrived

    def _begin(self) -> None:
        scaler = self._options.grad_scaler
        scale = scaler.get_scale() if scaler is not None and scaler.is_enabled() else None
        self._pass = Pass(scale, loads=[0] * self._shards.world_size)
        self._zero.updates_begin()

    def _next_owner(self, size_bytes: int) -> int:
        """The rank that has least to update in this backward so far."""
        assert self._pass is not None
        loads = self._pass.loads
        owner = loads.index(min(loads))
        loads[owner] += size_bytes
        return owner

    def _gather(self, work: BucketWork, lane: Lane, scratch: Scratch, share: float) -> Exchange:
        """Steps 1 to 3 of the class, and 4 and 5 where they need no other bucket."""
        if work.used is not None:
            yield used_round(work, lane.rank, lane.world_size)
        if work.moves:
            yield from move_states(self._shards, work.moves, work.device)
        if work.gradient is None:
            yield gradient_round(work, lane.rank, lane.world_size, scratch, self._options.wire_dtype, share)
            work.result = work.read.buffer
        else:
            work.result = wait_for_gradient(work)
        if not self._options.needs_all_gradients:
            self._shards.step_with(dict(work.gradients(self._shards, lane.rank)), at_once=False)
        if self._sends_at_once:
            yield parameter_round(work.parts(self._shards), lane.rank, scratch, work.device)

    # After the last bucket ------------------------------------------------------------------------------------------

    def _finish(self, step: Pass) -> None:
        """Make the updates that needed every gradient, and send parameters bucket by bucket."""
        ready = step.stages
        if self._options.needs_all_gradients:
            updated = Stage()
            ready = [updated]
            lane = self._zero.lane(step.works[0].device)
            lane.submit(lambda scratch: updated.run(self._update_all(step)))
        for work in step.works:
            lane = self._zero.lane(work.device)
            sent = lane.submit(_sending(self._shards, step, work, ready, lane.rank))
            sent.then(_passing_on(work.arrived))

    def _update_all(self, step: Pass) -> Exchange:
        for gathered in step.stages:
            gathered.wait()
        options, shards = self._options, self._shards
        if options.max_grad_norm is not None or step.scale is not None:
            good = yield from prepare_gradients(
                step.works,
                shards,
                options.max_grad_norm,
                step.scale,
                options.reduce_scatter,
                step.works[0].device,
            )
            if not good:
                step.skipped = True
                return
        gradients: dict[int, torch.Tensor | None] = {}
        for work in step.works:
            gradients.update(work.gradients(shards, shards.rank))
        shards.step_with(gradients, at_once=True)

    def _drop_foreign_gradients(self, step: Pass) -> None:
        """Leave no `.grad` that is not an average; GradScaler must still find what made it skip, on every rank."""
        shards = self._shards
        mine = []
        for work in step.works:
            for number, _ in work.places:
                if work.read.is_sparse:
                    continue
                if work.owners[number] == shards.rank:
                    mine.append(shards.parameters[number])
                else:
                    shards.parameters[number].grad = None
        if step.scale is None:
            return
        witnesses = [parameter for parameter in mine if parameter.grad is not None and parameter.numel()]
        if not witnesses:
            witnesses = [
                min((p for p in shards.parameters if p.requires_grad and p.numel()), key=torch.numel)
            ]
            witnesses[0].grad = torch.zeros_like(witnesses[0])
        gradient = witnesses[0].grad
        if step.skipped and gradient is not None:
            gradient.fill_(torch.inf)


def _inspection(hook_step: "weakref.ref[ZeroStep]") -> Callable[[Any, Any, Any], None]:
    def look(ddp: Any, inputs: Any, outputs: Any) -> None:
        step = hook_step()
        if step is not None:
            step.inspect(ddp, outputs)

    return look


def _sending(
    shards: Any, step: Pass, work: BucketWork, ready: Sequence[Stage], rank: int
) -> Callable[[Scratch], Exchange]:
    def exchange(scratch: Scratch) -> Exchange:
        for stage in ready:
            stage.wait()
        if not step.skipped:
            yield parameter_round(work.parts(shards), rank, scratch, work.device)

    return exchange


def _passing_on(arrived: Done) -> Callable[[Done], None]:
    def pass_on(sent: Done) -> None:
        arrived.set_result(sent.value())

    return pass_on
