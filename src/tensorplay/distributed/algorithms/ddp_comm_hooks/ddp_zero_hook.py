"""Communication hooks that also make the optimizer's step, bucket by bucket, while backward still runs.

    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=1e-3)
    ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))
    for batch in batches:
        zero.zero_grad()
        loss(ddp(batch)).backward()      # gradients are averaged and parameters updated when it returns

Any hook can be wrapped, with its own state. The parameters after each step are those of the same hook followed by the
whole optimizer.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZeroRedundancyOptimizer

from tensorplay.compression.bucket import GradBucket
from tensorplay.distributed.algorithms.ddp_comm_hooks import default_hooks
from tensorplay.distributed.algorithms.ddp_comm_hooks._protocol import HookFunction, describe, takes_group
from tensorplay.distributed.algorithms.ddp_comm_hooks._zero_pass import Update, ZeroOptions
from tensorplay.distributed.algorithms.ddp_comm_hooks._zero_step import ZeroStep
from tensorplay.distributed.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]

# DDP compares annotations as objects: this module must not postpone them.

_WIRE_DTYPES: dict[Any, torch.dtype | None] = {
    default_hooks.allreduce_hook: None,
    default_hooks.fp16_compress_hook: torch.float16,
    default_hooks.bf16_compress_hook: torch.bfloat16,
    torch_hooks.allreduce_hook: None,
    torch_hooks.fp16_compress_hook: torch.float16,
    torch_hooks.bf16_compress_hook: torch.bfloat16,
}


def hook_with_zero_step(
    hook: HookFunction,
    ddp: torch.nn.parallel.DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
    *,
    update: Update = "in_backward",
    reduce_scatter: bool = False,
    max_grad_norm: float | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> HookFunction:
    """Average gradients by `hook`, update each bucket on its owner, send parameters after the last gradient.

    Gradients never wait behind parameters: the better form where the link is the bottleneck.

    Steps for each bucket, as DDP fills it:
      1. the wrapped hook averages its gradients;
      2. the rank that owns a parameter updates it, while backward goes on for other buckets.
    After the last bucket:
      3. each bucket's parameters travel from their owners to all ranks; then backward returns.

    Args:
        hook: any `(state, bucket) -> Future or Tensor`, ours or the user's; `state` is given at registration.
        ddp: torch's DistributedDataParallel or ours, on the ranks of `zero`.
        zero: this package's, made with `overlap_with_ddp=True` from all or some of `ddp`'s parameters.
        shard_buckets: True: a parameter belongs to one rank, close to even over ranks. False: a bucket does; each
            bucket goes to the rank that updates the fewest bytes so far, so with few buckets ranks are less even. When
            DDP changes its buckets after the first step, optimizer state moves with the parameters.
        update: "after_backward" changes parameters only when backward has computed everything: for models that read a
            parameter in backward where no gradient flows to it (a detached use, a checkpointed segment under no_grad).
        reduce_scatter: bring each gradient only to its owner: gradients and parameters together cost one all-reduce.
            For allreduce_hook, fp16_compress_hook and bf16_compress_hook. After backward `.grad` is None for
            parameters that other ranks own, so call `zero_grad` before each step. Needs all of `ddp`'s parameters.
        max_grad_norm: clip as `clip_grad_norm_` does, over all of `zero`'s parameters. Updates start after the last
            bucket, when the norm is known.
        grad_scaler: unscale gradients; when one on any rank is not finite nobody updates anything. Go on calling
            `scaler.step(zero)` and `scaler.update()`, which lowers the scale. Updates start after the last bucket.

    Returns: a hook for `ddp.register_comm_hook(state, ...)` or `register_ddp_comm_hook`.

    Works with accumulation under `no_sync`, `find_unused_parameters` (a parameter that no rank used is not stepped),
    `static_graph`, uneven inputs in Join, shared and checkpointed modules. `zero.step()` has nothing left to do, but LR
    schedulers and GradScaler go on calling it. `step(closure)` is refused.

    Wire: what `hook` sends, plus P (W-1) sent by all W ranks together for P bytes of parameters, in messages padded to
    16 bytes a parameter; a byte a parameter and peer where parameters may be unused.

    Raises:
        TypeError: `zero` is not this package's optimizer, or another argument of the wrong kind.
        ValueError: an option that does not exist or does not fit the hook or the DDP; the text says which.
        RuntimeError: `zero` has a hook already. At one of the first two forwards: the graph reads a parameter late, see
            `update`. From backward: a rank failed, and which.

    Example:
        >>> from tensorplay.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
        >>> def train(ddp, batches):  # within an initialised process group
        ...     zero = ZeroRedundancyOptimizer(
        ...         ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=1e-3
        ...     )
        ...     ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero, max_grad_norm=1.0))
        ...     for batch in batches:
        ...         zero.zero_grad()
        ...         ddp(batch).sum().backward()

    Paper: Rajbhandari et al. 2020, ZeRO, section 5.
    Differs: every backend; updates from the first step on; any optimizer and groups; clipping and loss scaling; bit for
    bit what the whole optimizer gives.
    """
    options = ZeroOptions(
        interleaved=False,
        shard_buckets=shard_buckets,
        update=update,
        reduce_scatter=reduce_scatter,
        wire_dtype=_wire_dtype(hook) if reduce_scatter else None,
        max_grad_norm=max_grad_norm,
        grad_scaler=grad_scaler,
    )
    return _make(hook, ddp, zero, options, "hook_with_zero_step")


def hook_with_zero_step_interleaved(
    hook: HookFunction,
    ddp: torch.nn.parallel.DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
    *,
    update: Update = "in_backward",
    reduce_scatter: bool = False,
) -> HookFunction:
    """Average gradients, update and send parameters bucket by bucket, while backward still runs.

    Parameters of early buckets travel under the rest of backward: the better form where compute is the bottleneck.

    Steps for each bucket, as DDP fills it:
      1. the wrapped hook averages its gradients, or `reduce_scatter` brings them to their owners;
      2. owners update their parameters;
      3. the parameters travel to all ranks.
    Backward returns when the last bucket's have arrived.

    There is no clipping and no loss scaling here: both need every gradient before the first update, and then nothing is
    left to interleave. Use `hook_with_zero_step`.

    Args: hook, ddp, zero, shard_buckets, update, reduce_scatter: as for `hook_with_zero_step`. With
        update="after_backward" parameters travel after backward too.

    Returns, Wire, Raises: as `hook_with_zero_step`.

    Example:
        >>> from tensorplay.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
        >>> def register(ddp):  # within an initialised process group
        ...     zero = ZeroRedundancyOptimizer(
        ...         ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=1e-3
        ...     )
        ...     hook = hook_with_zero_step_interleaved(
        ...         allreduce_hook, ddp, zero, shard_buckets=True, reduce_scatter=True
        ...     )
        ...     ddp.register_comm_hook(None, hook)

    Paper: Rajbhandari et al. 2020, ZeRO, section 5.
    Differs: as `hook_with_zero_step`.
    """
    options = ZeroOptions(
        interleaved=True,
        shard_buckets=shard_buckets,
        update=update,
        reduce_scatter=reduce_scatter,
        wire_dtype=_wire_dtype(hook) if reduce_scatter else None,
        max_grad_norm=None,
        grad_scaler=None,
    )
    return _make(hook, ddp, zero, options, "hook_with_zero_step_interleaved")


def _wire_dtype(hook: HookFunction) -> torch.dtype | None:
    if hook not in _WIRE_DTYPES:
        raise ValueError(
            "reduce_scatter=True replaces the wrapped hook's exchange and knows how for allreduce_hook, "
            f"fp16_compress_hook and bf16_compress_hook, got {getattr(hook, '__name__', hook)}: leave it out"
        )
    return _WIRE_DTYPES[hook]


def _make(
    hook: HookFunction,
    ddp: torch.nn.parallel.DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    options: ZeroOptions,
    name: str,
) -> HookFunction:
    _check_kinds(hook, ddp, zero)
    _check_options(options)
    _check_ddp(ddp, zero, options)
    step = ZeroStep(hook, ddp, zero, options)

    def zero_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return step.exchange(state, bucket)

    zero_hook.__name__ = f"{name}({getattr(hook, '__name__', type(hook).__name__)})"
    zero_hook.__qualname__ = zero_hook.__name__
    return describe(state_is_group=takes_group(hook))(zero_hook)


def _check_kinds(hook: Any, ddp: Any, zero: Any) -> None:
    if not callable(hook):
        raise TypeError(f"hook must be callable as hook(state, bucket), got {type(hook).__name__}")
    if not isinstance(ddp, torch.nn.parallel.DistributedDataParallel):
        raise TypeError(f"ddp must be a DistributedDataParallel, got {type(ddp).__name__}")
    if isinstance(zero, ZeroRedundancyOptimizer):
        return
    if isinstance(zero, TorchZeroRedundancyOptimizer):
        raise TypeError(
            "zero is torch's ZeroRedundancyOptimizer, which skips the first updates and refuses Gloo: make it with "
            "tensorplay.distributed.optim.ZeroRedundancyOptimizer, which takes the same arguments"
        )
    raise TypeError(
        f"zero must be a tensorplay.distributed.optim.ZeroRedundancyOptimizer, got {type(zero).__name__}"
    )


def _check_options(options: ZeroOptions) -> None:
    if options.update not in ("in_backward", "after_backward"):
        raise ValueError(f'update must be "in_backward" or "after_backward", got {options.update!r}')
    if options.max_grad_norm is not None and not options.max_grad_norm > 0:
        raise ValueError(f"max_grad_norm must be > 0, got {options.max_grad_norm}")
    if options.grad_scaler is not None and not isinstance(options.grad_scaler, torch.amp.GradScaler):
        raise TypeError(
            f"grad_scaler must be a torch.amp.GradScaler, got {type(options.grad_scaler).__name__}"
        )


def _check_ddp(ddp: Any, zero: ZeroRedundancyOptimizer, options: ZeroOptions) -> None:
    """What a hook can't serve is said here, before training starts."""
    ranks = dist.get_process_group_ranks(zero.process_group)
    ddp_ranks = dist.get_process_group_ranks(ddp.process_group)
    if ranks != ddp_ranks:
        raise ValueError(
            f"ddp averages over ranks {ddp_ranks} and zero shares over ranks {ranks}: give zero "
            "process_group=ddp.process_group"
        )
    if getattr(ddp, "_use_python_reducer", False):
        raise ValueError(
            'ddp uses the Python reducer (torch._dynamo.config.optimize_ddp = "python_reducer"), which discards what a '
            'hook returns: set it to "ddp_optimizer" before making the DDP'
        )
    if getattr(ddp, "skip_all_reduce_unused_params", False):
        raise ValueError(
            "ddp has skip_all_reduce_unused_params=True, so buckets may be left out: use find_unused_parameters alone"
        )
    if getattr(ddp, "mixed_precision", None) is not None:
        raise ValueError(
            "ddp has mixed_precision, which swaps parameters for copies of lower precision: use torch.autocast"
        )
    averaged = {}
    ignored = set(ddp.parameters_to_ignore)
    delayed = {id(parameter) for parameter in getattr(ddp, "_delay_all_reduce_params", ())}
    for name, parameter in ddp.module.named_parameters():
        if parameter.requires_grad and name not in ignored and id(parameter) not in delayed:
            averaged[id(parameter)] = name
    known = {id(parameter) for parameter in zero.shards.parameters}
    strangers = [p for p in zero.shards.parameters if p.requires_grad and id(p) not in averaged]
    if strangers:
        raise ValueError(
            f"zero has {len(strangers)} trainable parameters that ddp does not average (the first has shape "
            f"{tuple(strangers[0].shape)}): give it parameters of ddp only, and the others an optimizer of their own"
        )
    missing = [name for parameter_id, name in averaged.items() if parameter_id not in known]
    if missing and options.reduce_scatter:
        raise ValueError(
            f"reduce_scatter=True needs an owner for every parameter of ddp, and zero lacks {missing[0]}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        )
