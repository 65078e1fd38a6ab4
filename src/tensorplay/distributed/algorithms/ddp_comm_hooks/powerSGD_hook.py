"""PowerSGD: gradients travel as two thin factors, more than 100 times smaller on large layers."""

import inspect
import math
from typing import Any

import torch
import torch.distributed as dist

from tensorplay.compression.bucket import GradBucket
from tensorplay.compression.low_rank_state import LowRankSettings, LowRankState
from tensorplay.distributed.algorithms.ddp_comm_hooks._protocol import describe

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]

# DDP compares annotations as objects: this module must not postpone them.

_BATCHED_LAYOUTS = ("same_shape", "bucket")


class PowerSGDState(LowRankState):
    """State of `powerSGD_hook` and `batched_powerSGD_hook`.

        M = g + residual;   P = orthonormal(sum M Q / W);   Q = sum M^T P / W;   result = P Q^T;   residual = M - result

    Args:
        process_group: the ranks; None: DDP's own group when registered through our DDP or `register_ddp_comm_hook`,
            the world on plain torch DDP.
        matrix_approximation_rank: r, columns of P and Q. Bytes grow with it, and so does what gets through in one
            step; 1 to 4 are usual.
        start_powerSGD_iter: steps of plain averaging before. Any number >= 0 works.
        min_compression_rate: a gradient of n x m is factorised if n m > rate x (n + m) r, else travels uncompressed.
        use_error_feedback: keep what was not sent, float32 a factorised value, and add it at the next step.
        warm_start: begin from the last step's Q; False: from a new random one at every step.
        orthogonalization_epsilon: damps directions of P shorter than it; never needed, see `orthogonalize_`.
        random_seed: of the first Q; 0 to 2^32 - 1, equal on all ranks.
        compression_stats_logging_frequency: steps between two lines of statistics in the log.
        batch_tensors_with_same_shape: `powerSGD_hook` multiplies the matrices of one shape in one operation: fewer
            calls, for scratch as large as they are. Results don't change.
        batched_layout: what `batched_powerSGD_hook` factorises. "same_shape": the rows of all tensors of one shape in a
            bucket as one matrix. "bucket": the whole bucket as one square matrix.
    Memory: residual 4 bytes a factorised value; Q 4 r m bytes; scratch for the factors, and, where a matrix isn't the
        bucket's own memory (other dtypes than float32, batched forms), 4 bytes a value of at most two buckets.
    Raises: ValueError: a value out of its range, named in the text. TypeError: of the wrong kind.
    Example:
        >>> state = PowerSGDState(matrix_approximation_rank=2, start_powerSGD_iter=0)
        >>> state.compression_stats()
        (0, 0, 0)

    Steps: every backward pass that exchanges counts as one (`iter`), so gradient accumulation without `no_sync` reaches
        `start_powerSGD_iter` sooner; `state.step()` counts optimizer steps instead.

    Paper: Vogels, Karimireddy, Jaggi 2019, PowerSGD: Practical Low-Rank Gradient Compression.

    Differs: `process_group` may be omitted. State belongs to parameters, not to bucket indexes, so
        `start_powerSGD_iter` of 0 and 1 work. Means are over the ranks that take part in a Join. Epsilon means the same
        at every rank. The logging frequency must be >= 1.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
        batched_layout: str = "same_shape",
    ) -> None:
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise TypeError(
                f"process_group must be a ProcessGroup or None, got {type(process_group).__name__}"
            )
        _check_whole("matrix_approximation_rank", matrix_approximation_rank, 1)
        _check_whole("start_powerSGD_iter", start_powerSGD_iter, 0)
        _check_whole("random_seed", random_seed, 0, 2**32 - 1)
        _check_whole("compression_stats_logging_frequency", compression_stats_logging_frequency, 1)
        _check_number("min_compression_rate", min_compression_rate, above=0)
        _check_number("orthogonalization_epsilon", orthogonalization_epsilon, at_least=0)
        _check_bool("use_error_feedback", use_error_feedback)
        _check_bool("warm_start", warm_start)
        _check_bool("batch_tensors_with_same_shape", batch_tensors_with_same_shape)
        if batched_layout not in _BATCHED_LAYOUTS:
            raise ValueError(
                f"batched_layout must be one of {', '.join(_BATCHED_LAYOUTS)}, got {batched_layout!r}"
            )
        super().__init__(process_group)
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.random_seed = random_seed
        self.compression_stats_logging_frequency = compression_stats_logging_frequency
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self.batched_layout = batched_layout

    @property
    def iter(self) -> int:
        """Steps so far."""
        return self.iteration

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count a step if `bucket` is a pass's last; for hooks of your own, the hooks here do it themselves."""
        if bucket.is_last():
            self._pass_ended()

    def compression_stats(self) -> tuple[float, int, int]:
        """(before / after, before, after): values exchanged by PowerSGD so far, and values sent for them.

        The plain averaging before `start_powerSGD_iter` doesn't count.
        """
        before, after = self.elements_before, self.elements_after
        return (before / after if after else 0, before, after)

    def settings(self) -> LowRankSettings:
        return LowRankSettings(
            rank=self.matrix_approximation_rank,
            min_rate=self.min_compression_rate,
            start_step=self.start_powerSGD_iter,
            error_feedback=self.use_error_feedback,
            warm_start=self.warm_start,
            epsilon=float(self.orthogonalization_epsilon),
            seed=self.random_seed,
            log_every_steps=self.compression_stats_logging_frequency,
        )

    def config(self) -> dict[str, Any]:
        return {
            "matrix_approximation_rank": self.matrix_approximation_rank,
            "min_compression_rate": float(self.min_compression_rate),
            "use_error_feedback": self.use_error_feedback,
            "warm_start": self.warm_start,
            "random_seed": self.random_seed,
            "batched_layout": self.batched_layout,
        }

    def __getstate__(self) -> dict[str, Any]:
        """What pickle and deepcopy keep: settings, steps and this rank's tensors by name; never the group."""
        return {
            "settings": {name: getattr(self, name) for name in _SETTINGS},
            "iteration": self.iteration,
            "explicit_steps": self._steps_are_explicit,
            "counts": self.counts(),
            "tensors": {name: dict(entry) for name, entry in self.memory.by_name().items()},
        }

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self.__init__(**kept["settings"])  # type: ignore[misc]
        self.iteration, self._steps_are_explicit = kept["iteration"], kept["explicit_steps"]
        self.set_counts(kept["counts"])
        self.memory.load(kept["tensors"])


_SETTINGS = tuple(inspect.signature(PowerSGDState).parameters)[1:]


def _check_whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be <= {most}, got {value}")


def _check_number(name: str, value: Any, above: float = -math.inf, at_least: float = -math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not (math.isfinite(value) and value > above and value >= at_least):
        rule = f"> {above}" if above > at_least else f">= {at_least}"
        raise ValueError(f"{name} must be finite and {rule}, got {value}")


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def _state(state: Any, hook: str) -> PowerSGDState:
    if not isinstance(state, PowerSGDState):
        raise TypeError(
            f"{hook} needs a PowerSGDState as its state, got {type(state).__name__}: "
            f"register_comm_hook(PowerSGDState(), {hook})"
        )
    return state


def _layerwise(
    state: PowerSGDState, bucket: GradBucket, dtype: torch.dtype | None = None
) -> torch.futures.Future[torch.Tensor]:
    state = _state(state, "powerSGD_hook")
    layout = "batched" if state.batch_tensors_with_same_shape else "layer"
    return state.exchange_as(layout, bucket, dtype)


def _together(
    state: PowerSGDState, bucket: GradBucket, dtype: torch.dtype | None = None
) -> torch.futures.Future[torch.Tensor]:
    state = _state(state, "batched_powerSGD_hook")
    return state.exchange_as(state.batched_layout, bucket, dtype)


@describe(cast=_layerwise)
def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients through two factors a parameter.

    1. Each gradient is a matrix: its first dimension against the rest, in the parameter's own strides. What
       `min_compression_rate` excludes travels uncompressed.
    2. All-reduce: left factors, and what travels uncompressed.
    3. All-reduce: right factors. The result is their product, the same on all ranks.

    A result that isn't finite on one rank is NaN on all, for this step only: residuals and factors stay as they were.

    Args:
        state: a `PowerSGDState`. bucket: any dtype; factors and residuals are float32.
    Wire: 2 (W-1)/W x 4 x (r sum(n + m) + uncompressed elements + one a factorised parameter) bytes. With the fp16 and
        bf16 wrappers half of it: right factors in float16 scaled by a power of two, the rest in bfloat16, whose
        range is float32's.
    Raises: TypeError: `state` isn't a PowerSGDState. RuntimeError: the exchange failed on a rank, which is named;
        at the first step also where the ranks' steps, seeds or settings differ.
    Example:
        >>> import tensorplay as tp
        >>> def wrap(model):  # within an initialised process group
        ...     ddp = tp.nn.parallel.DistributedDataParallel(model)
        ...     ddp.register_comm_hook(PowerSGDState(start_powerSGD_iter=100), powerSGD_hook)
        ...     return ddp

    Paper: Vogels, Karimireddy, Jaggi 2019, algorithms 1 and 2.

    Differs: any number of buckets on every backend; two collectives instead of three; nothing is waited for in a
        callback. A zero, infinite or unused gradient leaves no trace in the state.
    """
    return _layerwise(state, bucket)


@describe(cast=_together)
def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients through two factors for many parameters at once: fewer operations and bytes, a coarser result.

    `state.batched_layout` says what is put together: "same_shape" stacks the rows of all tensors of one shape in the
    bucket, so that they share a right factor; "bucket" sees the flat bucket as one square matrix, its end padded with
    zeros. Everything else is as in `powerSGD_hook`.

    Args, Raises: see `powerSGD_hook`.
    Wire: as there, with the n + m of the large matrices.
    Example:
        >>> import tensorplay as tp
        >>> def wrap(model):  # within an initialised process group
        ...     ddp = tp.nn.parallel.DistributedDataParallel(model)
        ...     ddp.register_comm_hook(PowerSGDState(batched_layout="bucket"), batched_powerSGD_hook)
        ...     return ddp

    Paper: Vogels, Karimireddy, Jaggi 2019; the batched form is of this kind of hook, not of the paper.

    Differs: torch's hook of this name fails at its first compressed step. Its layout is "bucket" here; rows of padding
        alone are not sent, and a bucket that `min_compression_rate` excludes travels uncompressed.
    """
    return _together(state, bucket)
