"""What the advisor answers."""

from dataclasses import asdict, dataclass
from typing import Any

from tensorplay.distributed.algorithms.ddp_comm_hooks._risk import RISKS
from tensorplay.distributed.algorithms.ddp_comm_hooks._step_time import ComputeTrace, ExchangeCost

__all__ = ["Advice", "AdviseSettings", "Link", "Prediction"]


@dataclass(frozen=True)
class AdviseSettings:
    """How advice is found.

    Args:
        max_risk: "safe", "usually-safe", "check" or "risky": the advised hook's class is at most this.
        trial: run the most promising hooks for a few steps on a copy of the model, and rank them by what was measured.
        trials: hooks that are tried. budget_seconds: for everything; trials that would not fit are left out.
        min_gain: share of plain all-reduce's step that a hook must save to be advised.
    Raises: ValueError: a value out of its range, named in the text.
    Example:
        >>> AdviseSettings(max_risk="safe").trial
        True
    """

    max_risk: str = "check"
    trial: bool = True
    trials: int = 3
    budget_seconds: float = 45.0
    min_gain: float = 0.05

    def __post_init__(self) -> None:
        if self.max_risk not in RISKS:
            raise ValueError(f"max_risk must be one of {', '.join(RISKS)}, got {self.max_risk!r}")
        if self.trials < 0:
            raise ValueError(f"trials must be >= 0, got {self.trials}")
        if self.budget_seconds <= 0:
            raise ValueError(f"budget_seconds must be > 0, got {self.budget_seconds}")
        if not 0 <= self.min_gain < 1:
            raise ValueError(f"min_gain must be in [0, 1), got {self.min_gain}")


@dataclass(frozen=True)
class Link:
    """How fast two ranks, or all, exchange.

    Attributes:
        between: "group" (all-reduce by all ranks), "within a host" or "between hosts" (one pair's messages).
        latency_seconds: of a message of one value there, or of an all-reduce of one value.
        bytes_per_second: a rank sends; of a large message, or of a large all-reduce, 2 (W-1)/W of its size.
    """

    between: str
    latency_seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class Prediction:
    """One hook's step time.

    Attributes:
        hook: its name. formula_seconds: a step by the formula, NaN where its exchange could not be measured.
        tried_seconds: a step as measured in a trial, or None.
        gain: plain all-reduce's step divided by this hook's; above 1 is faster.
        sent_bytes: by a rank and step; None where nobody counts them.
        risk: its class. allowed: whether that is within `max_risk`.
        reason: what decides. caution: on accuracy, with its source; '' where nothing is lost.
        cost: of the exchange alone; None where it failed.
    """

    hook: str
    formula_seconds: float
    tried_seconds: float | None
    gain: float
    sent_bytes: float | None
    risk: str
    allowed: bool
    reason: str
    caution: str
    cost: ExchangeCost | None

    @property
    def step_seconds(self) -> float:
        """What it is ranked by: measured where it was tried, else the formula's."""
        return self.formula_seconds if self.tried_seconds is None else self.tried_seconds

    @property
    def basis(self) -> str:
        """ "tried" or "formula": where `step_seconds` comes from."""
        return "formula" if self.tried_seconds is None else "tried"


@dataclass(frozen=True)
class Advice:
    """The answer of `advise`, the same on every rank.

    Attributes:
        best: the hook to use. predictions: all, fastest first.
        world_size, cores, ranks_on_host, threads, contention: of the machine with least room; see the formula.
        links: what was measured of the network. trace: the step with nothing exchanged.
        parameters, gradient_bytes: of the model. seconds: that finding the advice took.
    """

    best: Prediction
    predictions: tuple[Prediction, ...]
    world_size: int
    hosts: int
    cores: float
    ranks_on_host: int
    threads: int
    contention: float
    links: tuple[Link, ...]
    trace: ComputeTrace
    parameters: int
    gradient_bytes: int
    max_risk: str
    seconds: float

    def lines_to_paste(self) -> str:
        """The lines that put the advice to work."""
        if self.best.hook == "allreduce":
            return "model = tp.nn.parallel.DistributedDataParallel(model)  # no hook: plain all-reduce is best here"
        return (
            "from tensorplay.distributed.algorithms.ddp_comm_hooks import register_ddp_comm_hook\n\n"
            "model = tp.nn.parallel.DistributedDataParallel(model)\n"
            f'register_ddp_comm_hook("{self.best.hook}", model)'
        )

    def to_dict(self) -> dict[str, Any]:
        """Numbers, strings, lists and dicts, for JSON: the ranking, the advice, and all that was measured.

        A prediction that could not be made has None for its seconds.
        """
        trace, links = asdict(self.trace), [asdict(link) for link in self.links]
        return {
            "best": self.best.hook,
            "predicted_seconds": {p.hook: _number(p.formula_seconds) for p in self.predictions},
            "predictions": [
                {
                    **{key: _number(value) for key, value in asdict(p).items()},
                    "step_seconds": _number(p.step_seconds),
                    "basis": p.basis,
                }
                for p in self.predictions
            ],
            "max_risk": self.max_risk,
            "paste": self.lines_to_paste(),
            "probed": {
                "world_size": self.world_size,
                "hosts": self.hosts,
                "cores": self.cores,
                "ranks_on_host": self.ranks_on_host,
                "threads": self.threads,
                "contention": self.contention,
                "links": links,
                "compute": {
                    key: list(value) if isinstance(value, tuple) else value for key, value in trace.items()
                },
                "parameters": self.parameters,
                "gradient_bytes": self.gradient_bytes,
            },
            "seconds": self.seconds,
        }


def _number(value: Any) -> Any:
    """NaN is no JSON."""
    return None if isinstance(value, float) and value != value else value
