"""What a rank without data does in place of one iteration of DistributedDataParallel.

A rank with data issues these collectives on DDP's group, in this order:

    1. the new bucket layout, once                  (forward, when gradients are recorded)
    2. the owner of the buffers, the buffers        (forward, modules with buffers)
    3. whether gradients will be averaged           (forward; only where the presence check can't say it)
    4. each bucket's hook, in order of the buckets  (backward, when gradients are averaged)
    5. which parameters were used                   (backward, find_unused_parameters or a static graph's first;
                                                     a static graph's first backward does 5 before 4)

`DDPShadow.forward` issues 1 to 3, `DDPShadow.backward` 4 and 5 with gradients of zero.
"""

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tensorplay.compression.bucket import read_bucket
from tensorplay.distributed.algorithms._join_presence import Notice

__all__ = ["DDPShadow"]

BeforeForward = Callable[[bool, bool], Notice | None]

_used_in_static_graph: "weakref.WeakKeyDictionary[DistributedDataParallel, torch.Tensor]" = (
    weakref.WeakKeyDictionary()
)
"""How many ranks use each parameter of a static graph, where this rank only shadowed the backward that found it out."""


def shadow_obstacle(ddp: Any) -> str | None:
    """Say why a rank without data could not do this DDP's collectives; None when it can."""
    if ddp._use_python_reducer:
        return (
            "its gradients are averaged by the Python reducer (torch._dynamo.config.optimize_ddp = "
            '"python_reducer"), which knows no Join; use "ddp_optimizer"'
        )
    if ddp._delay_all_reduce_params:
        return "it has delay_all_reduce_named_params, whose all-reduce no other rank can know of"
    if ddp.skip_all_reduce_unused_params:
        return "it has skip_all_reduce_unused_params=True, so which buckets travel is known only to ranks with data"
    if hasattr(ddp, "buffer_hook"):
        return "it has a buffer communication hook, whose collectives are unknown"
    if ddp.process_group.size() > 1:
        for name, module in ddp.module.named_modules():
            if isinstance(module, torch.nn.SyncBatchNorm):
                return f"{name or 'the module'} is a SyncBatchNorm, which communicates inside forward and backward"
    if any(ddp._build_params_for_reducer()[1]) and not _joins_sparse_gradients(ddp):
        return (
            "it has sparse gradients, for which a rank that never had data has no bucket; use "
            "tensorplay.nn.parallel.DistributedDataParallel or sparse=False"
        )
    return None


def _joins_sparse_gradients(ddp: Any) -> bool:
    own = sys.modules.get("tensorplay.nn.parallel.distributed")  # loaded if `ddp` is one of ours
    return own is not None and isinstance(ddp, own.DistributedDataParallel)


class DDPShadow:
    """Announces the iterations of one DDP while it has data, and repeats their collectives afterwards.

    Args:
        ddp: a DistributedDataParallel, torch's or ours.
    """

    def __init__(self, ddp: Any) -> None:
        self.ddp = ddp
        syncs = getattr(ddp, "forward_sync_buffers", None)  # broadcast_buffers before torch 2.13
        self.has_buffers = bool((ddp.broadcast_buffers if syncs is None else syncs) and ddp.modules_buffers)
        self.asks_for_synchronization = True
        self._parameters, self._expects_sparse = ddp._build_params_for_reducer()
        self._before_forward: BeforeForward | None = None
        self._by_active_ranks = False
        self._muted = False
        self._handles: list[Any] = []
        self._zeros: dict[Any, torch.Tensor] = {}

    # While this rank has data

    def open(
        self,
        before_forward: BeforeForward,
        announces: bool,
        at_first_gradient: Callable[[torch.Tensor], None] | None,
    ) -> None:
        """Listen to the DDP's forwards.

        Args:
            before_forward: called with (records gradients, averages gradients); returns the iteration's notice.
            announces: the notice starts here, and tells the ranks without data what they need; a DDP without buffers
                then needs no other collective.
            at_first_gradient: called before a gradient is accumulated; None to divide by the size of the group.
        """
        ddp = self.ddp
        self._before_forward = before_forward
        self._by_active_ranks = at_first_gradient is not None
        self.asks_for_synchronization = not announces or self.has_buffers
        ddp.reducer._set_forward_pass_work_handle(None, True)
        self._handles = [
            ddp.register_forward_pre_hook(self._at_forward, prepend=True),
            ddp.register_forward_hook(self._after_forward, always_call=True),
        ]
        if at_first_gradient is not None:
            self._handles += [
                parameter.register_hook(at_first_gradient)
                for parameter in self._parameters
                if parameter.requires_grad
            ]

    def close(self) -> None:
        """Take everything back: listeners, and the divisor the reducer would go on using."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._before_forward = None
        self._zeros.clear()
        self._unmute()
        self.ddp.reducer._set_forward_pass_work_handle(None, True)

    def _at_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        assert self._before_forward is not None
        trains = torch.is_grad_enabled()
        notice = self._before_forward(trains, trains and self.ddp.require_backward_grad_sync)
        if notice is not None and self._by_active_ranks:
            # Without a hook the reducer divides by this sum, once its first gradient is ready.
            self.ddp.reducer._set_forward_pass_work_handle(notice.work, False)
        if not trains and self.ddp.require_backward_grad_sync:
            # DDP would announce a backward that never comes.
            self.ddp.require_backward_grad_sync = False
            self._muted = True

    def _after_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self._unmute()

    def _unmute(self) -> None:
        if self._muted:
            self.ddp.require_backward_grad_sync = True
            self._muted = False

    # Once it has run out

    @torch.no_grad()
    def forward(self, notice: Notice) -> bool:
        """Do the forward's collectives; returns whether the others will average gradients."""
        ddp = self.ddp
        if notice.training:
            ddp.reducer._rebuild_buckets()
        ddp._assign_modules_buffers()
        ddp._check_and_sync_module_buffers()
        if self.asks_for_synchronization:
            synchronizes = bool(ddp._check_global_requires_backward_grad_sync(is_joined_rank=True))
        else:
            synchronizes = notice.synchronizing > 0
        ddp.require_forward_param_sync = synchronizes
        return synchronizes

    def backward(self) -> None:
        """Do the backward's collectives with gradients of zero, and keep the averaged gradients in `.grad`.

        1. A rank that has averaged no gradient yet runs a backward of zeros, through the reducer itself: the order in
           which gradients come decides DDP's buckets. So does one whose sparse buckets have no memory yet.
        2. Later: run each bucket's hook on zeros, in order, and write each average to the parameters' `.grad`, but
           where no rank used a parameter. With a static graph's first backward the used parameters go first.
        """
        ddp = self.ddp
        first_of_static = self._is_first_of_static_graph()
        buckets = None if self._decides_buckets() else self._zero_buckets()
        if buckets is None:
            self._backward_of_zeros(first_of_static)
            return
        used: torch.Tensor | None = None
        if first_of_static:
            used = _used_in_static_graph[ddp] = self._reduce_used_parameters()
            ddp.register_forward_pre_hook(_refuse_late_start)
        elif ddp.static_graph:
            used = _used_in_static_graph.get(ddp, ddp.reducer._get_local_used_map())
        futures = [ddp.reducer._run_comm_hook(bucket) for bucket in buckets]
        if ddp.find_unused_parameters and not ddp.static_graph:
            used = self._reduce_used_parameters()
        for bucket, future in zip(buckets, futures, strict=True):
            averaged = future.wait()
            bucket.set_buffer(averaged[0] if isinstance(averaged, list | tuple) else averaged)
        self._keep_gradients(buckets, used)
        if not first_of_static:
            ddp.reducer._push_all_rebuilt_params()

    def _decides_buckets(self) -> bool:
        """Whether DDP will rebuild its buckets after this backward, which is this rank's first."""
        ddp = self.ddp
        if ddp.find_unused_parameters or ddp.static_graph:  # zeros would mark every parameter as used
            return False
        return not any(ddp.reducer.get_backward_stats())  # when each gradient was ready in the last backward

    def _is_first_of_static_graph(self) -> bool:
        ddp = self.ddp
        return bool(
            ddp.static_graph
            and not ddp._static_graph_delay_allreduce_enqueued
            and ddp not in _used_in_static_graph
        )

    def _zero_buckets(self) -> list[Any] | None:
        """A bucket of zeros for each of the reducer's, in the same memory every time: hooks keep plans by address.

        None if a sparse bucket has no memory, which it gets in a backward and loses when buckets are rebuilt.
        """
        try:
            buckets = list(self.ddp.reducer._get_zeros_like_grad_buckets())
        except RuntimeError:
            if any(self._expects_sparse):
                return None
            raise
        for bucket in buckets:
            fresh = bucket.buffer()
            if fresh.layout != torch.strided:
                continue
            key = (bucket.index(), fresh.numel(), fresh.dtype, fresh.device)
            kept = self._zeros.setdefault(key, fresh)
            if kept is not fresh:
                bucket.set_buffer(kept.zero_())
        return buckets

    def _reduce_used_parameters(self) -> torch.Tensor:
        """Sum which parameters were used where; this rank used none."""
        used = torch.zeros_like(self.ddp.reducer._get_local_used_map())
        dist.all_reduce(used, group=self.ddp.process_group)
        return used

    @torch.no_grad()
    def _keep_gradients(self, buckets: list[Any], used: torch.Tensor | None) -> None:
        unused: set[int] = set()
        if used is not None and used.numel() == len(self._parameters):
            counts = used.tolist()
            unused = {
                id(parameter) for parameter, count in zip(self._parameters, counts, strict=True) if count == 0
            }
        for bucket in buckets:
            averaged = read_bucket(bucket)
            if averaged.is_sparse:
                (parameter,) = bucket.parameters()
                parameter.grad = averaged.buffer.clone()
                continue
            for piece in averaged.slices:
                parameter = piece.key
                assert isinstance(parameter, torch.Tensor)
                if id(parameter) in unused:
                    continue
                gradient = piece.shaped()
                if parameter.is_complex() and not gradient.is_complex():
                    gradient = torch.view_as_complex(gradient)
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(gradient)

    def _backward_of_zeros(self, first_of_static: bool) -> None:
        """Let the reducer itself average: every parameter gets a gradient of zero, sparse where it expects that."""
        ddp = self.ddp
        for parameter in self._parameters:
            parameter.grad = None
        nothing = torch.zeros(0, dtype=torch.long, device=ddp.device)
        with torch.enable_grad():
            zeros = [
                torch.nn.functional.embedding(nothing, parameter, sparse=True).sum()
                if sparse
                else _real(parameter * 0).sum()
                for parameter, sparse in zip(self._parameters, self._expects_sparse, strict=True)
            ]
            ddp.reducer.prepare_for_forward()
            ddp.reducer.prepare_for_backward(zeros if ddp.find_unused_parameters else [])
            torch.autograd.backward(zeros)
        if first_of_static:
            ddp.reducer._delay_all_reduce()
            ddp._static_graph_delay_allreduce_enqueued = True

    # Once all have

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give every rank the parameters and buffers of the last one that had data (the highest, if several)."""
        self.ddp._sync_final_model(is_last_joiner)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _refuse_late_start(ddp: Any, inputs: Any) -> None:
    """A static graph is read from its first backward; the other ranks are past theirs and won't repeat it."""
    if torch.is_grad_enabled() and ddp.require_backward_grad_sync:
        raise RuntimeError(
            "this rank had no data when the other ranks ran the first backward of a DDP with static_graph=True, so it "
            "can't train this DDP any more: give every rank a batch at the start, or make a new DDP on all ranks"
        )
