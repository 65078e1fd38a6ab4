"""Any registered codec as a communication hook."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from tensorplay.compression.bucket import GradBucket
from tensorplay.compression.codec import Codec
from tensorplay.compression.compressed import CodecState
from tensorplay.compression.registry import make_codec
from tensorplay.compression.schedule import Exempt, OnlyLarge, Policy, StartAfter, Uniform
from tensorplay.distributed.algorithms.ddp_comm_hooks._protocol import describe

__all__ = ["CompressedHookState", "compressed_hook"]


class CompressedHookState(CodecState):
    """State of `compressed_hook`: a codec and how it is used.

        sent_t = codec(g_t + r_t);   result_t = mean over ranks of sent_t;   r_{t+1} = g_t + r_t - sent_t

    Args:
        codec: a registered name ("int8", "int4:group_size=64", "topk:0.01"; `tensorplay codecs` lists them) or a Codec.
        process_group: the ranks; None: DDP's own group when registered through our DDP or `register_ddp_comm_hook`,
            the world on plain torch DDP.
        error_feedback: keep what the codec loses, float32 a compressed parameter, and add it at the next step.
        route: "auto" sends the fewest bytes; "gather", "two-shot" and "sum" force one (see tensorplay.compression).
        second_codec: encodes the mean on the two-shot route, by name or as a Codec; None: the same codec.
        start_iter: steps of plain averaging before the codec is used.
        min_elements: smaller tensors travel uncompressed.
        exempt: `(name, shape) -> bool`; True: the tensor travels uncompressed. Must answer alike on all ranks; the name
            is None on plain torch DDP until `state.bind(model)`.
        seed: of stochastic rounding and random choices.
    Raises: ValueError: an unknown codec or route, or a negative number. TypeError: `exempt` isn't callable.
    Example:
        >>> state = CompressedHookState("int4", min_elements=2048)
        >>> state.codec
        <codec int4>

    Papers: Seide et al. 2014 (error feedback); Karimireddy et al. 2019.
    """

    def __init__(
        self,
        codec: str | Codec = "int8",
        process_group: dist.ProcessGroup | None = None,
        error_feedback: bool = True,
        route: str = "auto",
        second_codec: str | Codec | None = None,
        start_iter: int = 0,
        min_elements: int = 1024,
        exempt: Callable[[str | None, tuple[int, ...]], bool] | None = None,
        seed: int = 0,
    ) -> None:
        if start_iter < 0:
            raise ValueError(f"start_iter must be >= 0, got {start_iter}")
        if min_elements < 0:
            raise ValueError(f"min_elements must be >= 0, got {min_elements}")
        if exempt is not None and not callable(exempt):
            raise TypeError(f"exempt must be callable (name, shape) -> bool, got {type(exempt).__name__}")
        made = make_codec(codec)
        policy: Policy = OnlyLarge(Uniform(made), min_elements)
        if exempt is not None:
            policy = Exempt(policy, exempt)
        if start_iter:
            policy = StartAfter(policy, start_iter)
        super().__init__(
            made,
            process_group,
            policy=policy,
            error_feedback=error_feedback,
            route=route,
            second_codec=None if second_codec is None else make_codec(second_codec),
            seed=seed,
        )


def _cast(
    state: CompressedHookState, bucket: GradBucket, dtype: torch.dtype
) -> torch.futures.Future[torch.Tensor]:
    return state.exchange(bucket, dtype)


@describe(cast=_cast)
def compressed_hook(state: CompressedHookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients through a codec.

    Args:
        state: a `CompressedHookState`. bucket: any dtype; compressed in float32.
    Wire: N b/8 (W-1) bytes by gather, N (b + b2)/8 (W-1)/W by two-shot, for N values of b bits on W ranks.
    Raises: TypeError: `state` isn't a CompressedHookState. RuntimeError: the exchange failed on a rank, which is named.
    Example:
        >>> import tensorplay as tp
        >>> def wrap(model):
        ...     ddp = tp.nn.parallel.DistributedDataParallel(model)
        ...     ddp.register_comm_hook(CompressedHookState("int8"), compressed_hook)
        ...     return ddp
    """
    if not isinstance(state, CodecState):
        raise TypeError(
            f"compressed_hook needs a CompressedHookState as its state, got {type(state).__name__}: "
            'register_comm_hook(CompressedHookState("int8"), compressed_hook)'
        )
    return state.exchange(bucket)
