"""DiLoCo: local training whose movement, every few steps, is the gradient of an outer optimizer."""

import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tensorplay.compression.codec import Codec
from tensorplay.compression.collective import Traffic
from tensorplay.compression.rounds import Scratch
from tensorplay.distributed.algorithms.model_averaging.averagers import ModelAverager, positive_integer
from tensorplay.distributed.algorithms.model_averaging.fragments import Fragment, outer_copy, split_evenly
from tensorplay.distributed.algorithms.model_averaging.groups import is_member
from tensorplay.distributed.algorithms.model_averaging.outer_exchange import (
    CodecExchange,
    OuterExchange,
    OuterGradient,
    PlainExchange,
    Wait,
)
from tensorplay.distributed.algorithms.model_averaging.outer_optimizer import (
    OuterOptimizer,
    make_outer_optimizer,
)
from tensorplay.distributed.algorithms.model_averaging.utils import Parameters, named_tensors

__all__ = ["DiLoCoAverager"]

_logger = logging.getLogger(__name__)


@dataclass
class _Pending:
    """An exchange that has started: its result is mixed in at step `due`."""

    due: int
    gradient: OuterGradient
    slot: int
    wait: Wait | None

    def finish(self) -> None:
        if self.wait is not None:
            self.wait()
            self.wait = None


class DiLoCoAverager(ModelAverager):
    """Average what `period` local steps changed, and let an outer optimizer step with it.

        outer gradient    d = mean over ranks of (outer - p)
        outer step        outer = outer_optimizer(outer, d)
        back              p = outer

    `outer` are the parameters all ranks agreed on last, bit-identical everywhere. They start as those of the group's
    rank 0, which the constructor gives to every rank; after a warm-up they start as the mean at step `warmup_steps`,
    so that the warm-up is no part of the first outer gradient.

    With `num_fragments` = F the model is cut into F runs of whole parameters, about equal in size, and one fragment is
    exchanged every period / F steps: the same bytes, spread over the period. With `overlap_steps` = n a fragment's
    exchange started at step t travels in the background and is mixed in at step t + n:

        p = mixing_fraction * p + (1 - mixing_fraction) * outer

    An outer gradient that is not finite on any rank is dropped on every rank: its fragment goes back to `outer`.

    Args:
        params: a module, parameters, (name, parameter) pairs or optimizer groups. The ones with `requires_grad` now
            are exchanged, always.
        outer_optimizer: an optimizer made over the same parameters (it is turned to the outer ones), or a callable that
            makes one from a list of outer parameters; None: SGD with lr 0.7, momentum 0.9, Nesterov.
        period: steps between two exchanges of a fragment.
        warmup_steps: steps before the first exchange.
        process_group: None for the default group.
        codec: a codec or its registered name, for example "int4": outer gradients travel compressed, and what is lost
            is added to the next one. None: as they are.
        num_fragments: at most the number of parameters and `period`.
        overlap_steps: less than `period`.
        mixing_fraction: share of the local parameters kept when an exchange is mixed in, in [0, 1). None: 0 without
            overlap, 0.5 with it.
        module, average_buffers, bucket_cap_mb: see `ModelAverager`; buffers are averaged with the first fragment.
    Attributes:
        outer_optimizer: the optimizer over the outer parameters; schedulers work on it.
        dropped_exchanges: outer gradients dropped because they were not finite.
    Dtypes: outer parameters are float32 for half-precision parameters, else of the parameter's dtype. Outer gradients
        travel in the dtype of the outer parameters; with a codec as float32.
    Memory: one outer parameter and one outer optimizer state for every parameter, and one outer gradient of a fragment
        for every exchange in flight.
    Raises:
        TypeError: an integer argument is not one; `outer_optimizer` makes no optimizer.
        ValueError: an argument is out of its range; no parameter has `requires_grad`; an optimizer over others.
    Construct it on every rank of the group at the same point: it is a collective.
    Papers: Douillard et al. 2023, "DiLoCo"; Douillard et al. 2025, "Streaming DiLoCo".
    Differs: fragments are runs of parameters in their given order, not strided layers; the first exchange comes at step
        `warmup_steps`, as every averager's here.
    Example:
        >>> from tensorplay.distributed.optim.post_localSGD_optimizer import PostLocalSGDOptimizer
        >>> def make_optimizer(model):  # within a process group, on every rank
        ...     inner = torch.optim.AdamW(model.parameters(), lr=3e-4)
        ...     return PostLocalSGDOptimizer(inner, DiLoCoAverager(model, period=50, codec="int4"))
    """

    def __init__(
        self,
        params: Parameters,
        outer_optimizer: OuterOptimizer = None,
        period: int = 50,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
        codec: str | Codec | None = None,
        num_fragments: int = 1,
        overlap_steps: int = 0,
        *,
        mixing_fraction: float | None = None,
        module: torch.nn.Module | None = None,
        average_buffers: bool = False,
        bucket_cap_mb: float = 25.0,
    ) -> None:
        super().__init__(
            process_group, module=module, average_buffers=average_buffers, bucket_cap_mb=bucket_cap_mb
        )
        named = [(name, tensor) for name, tensor in named_tensors(params) if tensor.requires_grad]
        if not named:
            raise ValueError("no parameter has requires_grad: there is nothing to exchange")
        if not is_member(self.process_group):
            raise ValueError("this rank is not in process_group: construct the averager on its ranks alone")
        self.period = positive_integer("period", period)
        self.warmup_steps = positive_integer("warmup_steps", warmup_steps, least=0)
        self.num_fragments = positive_integer("num_fragments", num_fragments)
        if num_fragments > min(len(named), period):
            raise ValueError(
                f"num_fragments must be at most the number of parameters ({len(named)}) and the period ({period}), "
                f"got {num_fragments}"
            )
        self.overlap_steps = positive_integer("overlap_steps", overlap_steps, least=0)
        if overlap_steps >= period:
            raise ValueError(
                f"overlap_steps must be less than the period ({period}), got {overlap_steps}: a fragment's exchange "
                "has to end before its next one starts"
            )
        if mixing_fraction is None:
            mixing_fraction = 0.5 if overlap_steps else 0.0
        if not 0.0 <= mixing_fraction < 1.0:
            raise ValueError(f"mixing_fraction must be in [0, 1), got {mixing_fraction}")
        self.mixing_fraction = mixing_fraction
        self.codec = codec
        self.dropped_exchanges = 0
        self._names = [name for name, _ in named]
        self._parameters = self._bound = [tensor for _, tensor in named]
        self._flat.sum_(self._parameters, self.process_group, float(self.process_group.rank() == 0))
        outer = [outer_copy(parameter) for parameter in self._parameters]
        self.outer_optimizer = make_outer_optimizer(outer_optimizer, self._parameters, outer)
        runs = split_evenly([tensor.numel() for tensor in self._parameters], num_fragments)
        self._fragments = [
            Fragment(
                self._names[run],
                self._parameters[run],
                outer[run],
                torch.float32 if codec is not None else None,
            )
            for run in runs
        ]
        self._pending: dict[int, _Pending] = {}
        self._scratch = Scratch()
        self._exchange = self._make_exchange()

    def _make_exchange(self) -> OuterExchange:
        if self.codec is not None:
            return CodecExchange(self.process_group, self.codec)
        key = " ".join(f"{n}{list(p.shape)}" for n, p in zip(self._names, self._parameters, strict=True))
        return PlainExchange(
            self.process_group, self.overlap_steps > 0, key, bucket_cap_mb=self._flat.bucket_cap_mb
        )

    @property
    def traffic(self) -> Traffic:
        """Bytes handed to collectives by this averager, sent and received."""
        total = Traffic()
        for part in (self._flat.traffic, self._exchange.traffic):
            total.add(part.sent_bytes, part.received_bytes)
        return total

    def outer_parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters all ranks agreed on last, by name: the model to evaluate or to keep."""
        outer = [twin.detach() for fragment in self._fragments for twin in fragment.outer]
        return dict(zip(self._names, outer, strict=True))

    def average_parameters(self, params: Parameters | None = None) -> None:
        """Do what the schedule says for this step, then count it.

        1. Exchanges that are due are waited for; outer step; mixed in.
        2. The fragment whose turn it is starts its exchange; without overlap step 1 follows at once.

        Args: params: None, or what the averager was made with (an optimizer passes its groups).
        Raises: ValueError: `params` holds trainable parameters the averager does not know, or lacks some it knows.
        """
        if params is not None:
            self._check_same(params)
        self._begin(self._parameters)
        since = self.step - self.warmup_steps
        if since == 0 and self.warmup_steps:
            self._start_from_mean()
        elif since >= 0:
            self._finish_due()
            for number in range(self.num_fragments):
                if since % self.period == number * self.period // self.num_fragments:
                    self._start(number)
            self._finish_due()
        self.step += 1

    def average_now(self, params: Parameters | None = None) -> None:
        """Exchange every fragment and take its outer step now; parameters become the outer ones. No step is counted.

        Exchanges in flight are mixed in first.

        Args: params: see `average_parameters`.
        """
        if params is not None:
            self._check_same(params)
        for pending in self._pending.values():
            pending.due = self.step
        self._finish_due()
        for number in range(self.num_fragments):
            self._start(number)
            self._pending[number].due = self.step
            self._finish_due()
            self._fragments[number].mix_in(0.0)

    def _start_from_mean(self) -> None:
        self._average_over(self.process_group, self._parameters)
        for fragment in self._fragments:
            for twin, parameter in zip(fragment.outer, fragment.parameters, strict=True):
                twin.data.copy_(parameter.detach())

    def _start(self, number: int) -> None:
        slots = {pending.slot for pending in self._pending.values()}
        slot = next(index for index in range(len(slots) + 1) if index not in slots)
        gradient = self._fragments[number].buffers(self._scratch, slot)
        self._fragments[number].measure(gradient)
        wait = self._exchange.submit(gradient)
        self._pending[number] = _Pending(self.step + self.overlap_steps, gradient, slot, wait)
        if number == 0 and self._buffers_of is not None:
            self._flat.average_(self._averaged_buffers(), self.process_group)

    def _finish_due(self) -> None:
        for number in [number for number, pending in self._pending.items() if pending.due <= self.step]:
            pending = self._pending.pop(number)
            pending.finish()
            fragment = self._fragments[number]
            if not fragment.take_step(pending.gradient, self.outer_optimizer):
                self.dropped_exchanges += 1
                _logger.warning("step %d: outer gradient %d is not finite and is dropped", self.step, number)
                fragment.mix_in(0.0)
            else:
                fragment.mix_in(self.mixing_fraction)

    def _finish_pending(self) -> None:
        for pending in self._pending.values():
            pending.finish()

    def _check_same(self, params: Parameters) -> None:
        known = {id(parameter) for parameter in self._parameters}
        given = named_tensors(params)
        unknown = [name for name, tensor in given if tensor.requires_grad and id(tensor) not in known]
        missing = len(known) - len(known & {id(tensor) for _, tensor in given})
        if unknown or missing:
            raise ValueError(
                f"params must be those the averager was made with: {len(unknown)} are unknown to it "
                f"({', '.join(unknown[:5])}), {missing} are missing; make a new averager"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return step, outer parameters, outer optimizer, exchanges in flight, and this rank's residuals.

        Waits for exchanges in flight. Without a codec it is the same on every rank.
        """
        self._finish_pending()
        return {
            "step": self.step,
            "outer_parameters": self.outer_parameters(),
            "outer_optimizer": self.outer_optimizer.state_dict(),
            "in_flight": {
                number: {
                    "due": pending.due,
                    "mean": {name: view.clone() for name, view in pending.gradient.tensors.items()},
                }
                for number, pending in self._pending.items()
            },
            "exchange": self._exchange.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Restore `state_dict()`; training then goes on bit for bit as if it had not stopped.

        Args: state_dict: this rank's, or the list of all ranks' where the number of ranks changed and a codec is used
            (their residuals are then dealt out anew).
        Raises: ValueError: other parameters, or exchanges in flight for other fragments.
        """
        states = state_dict if isinstance(state_dict, list) else [state_dict]
        saved = states[0]
        self._check_loadable(saved)
        self._finish_pending()
        self.step = int(saved["step"])
        for name, twin in zip(self._names, (t for f in self._fragments for t in f.outer), strict=True):
            twin.data.copy_(saved["outer_parameters"][name])
        self.outer_optimizer.load_state_dict(saved["outer_optimizer"])
        self._exchange.load_state_dict(
            [state["exchange"] for state in states] if isinstance(state_dict, list) else saved["exchange"]
        )
        self._pending = {}
        for slot, (number, entry) in enumerate(saved["in_flight"].items()):
            gradient = self._fragments[int(number)].buffers(self._scratch, slot)
            for name, view in gradient.tensors.items():
                view.copy_(entry["mean"][name])
            self._pending[int(number)] = _Pending(int(entry["due"]), gradient, slot, None)

    def _check_loadable(self, saved: dict[str, Any]) -> None:
        saved_shapes = {name: tensor.shape for name, tensor in saved["outer_parameters"].items()}
        shapes = {name: p.shape for name, p in zip(self._names, self._parameters, strict=True)}
        differ = [n for n in {**shapes, **saved_shapes} if shapes.get(n) != saved_shapes.get(n)]
        if differ:
            raise ValueError(
                f"the saved outer parameters are not this model's: {', '.join(differ[:5])} differ in name or shape"
            )
        for number, entry in saved["in_flight"].items():
            fragment = self._fragments[int(number)] if int(number) < self.num_fragments else None
            if fragment is None or list(entry["mean"]) != fragment.names:
                raise ValueError(
                    "the saved state has exchanges in flight for other fragments: load it with the num_fragments "
                    "it was saved with"
                )

    def _portable_state(self) -> dict[str, Any]:
        self._finish_pending()
        state = super()._portable_state()
        del state["_exchange"]
        return state | {"_exchange_state": self._exchange.state_dict()}

    def _restore(self, state: dict[str, Any], original: "ModelAverager | None") -> None:
        saved = state.pop("_exchange_state")
        super()._restore(state, original)
        self._bound = self._parameters
        self._exchange = self._make_exchange()
        self._exchange.load_state_dict(saved)
