"""Runs as telemetry wrote them, read back and summed up."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from tensorplay.cli.command import UsageError

__all__ = ["FORMAT", "Run", "Summary", "read_run", "read_runs", "summarise", "tell_apart"]

FORMAT = "tensorplay.telemetry/1"
"""The format of a run's first record that this version reads."""


@dataclass(frozen=True)
class Run:
    """One rank's records of one run.

    Attributes:
        path: the file. name: how the report calls it. about: its first record.
        steps, errors: its records of these kinds. losses: step -> what `log(loss=…)` was given.

    Example:
        >>> Run(Path("run.jsonl"), "int8", {"hook": "int8"}).steps
        []
    """

    path: Path
    name: str
    about: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)


def read_run(path: Path) -> Run:
    """Read a file that holds one run; see `read_runs`.

    Raises: UsageError: as `read_runs`, or it holds several.
    Example:
        >>> read_run(Path("run.jsonl")).name                               # doctest: +SKIP
        'int8'
    """
    runs = read_runs(path)
    if len(runs) > 1:
        raise UsageError(f"{path}: holds {len(runs)} runs, one is expected")
    return runs[0]


def read_runs(path: Path) -> list[Run]:
    """Read a file of JSON lines; where files were put together, each first record begins another run.

    A last line that was cut off, as by a run that was killed, is left out, and so is a run without a step beside
    others. Values that aren't finite count as unknown.

    Raises: UsageError: it can't be read, a line isn't a record of `FORMAT`, or there is no step in it.
    Example:
        >>> [run.name for run in read_runs(Path("runs.jsonl"))]            # doctest: +SKIP
        ['int8', 'allreduce']
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not a text file; give what JSONLinesSink wrote") from None
    runs: list[Run] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            _take(json.loads(line, parse_constant=lambda _: None), runs, path)
        except (json.JSONDecodeError, KeyError, TypeError, RecursionError):
            if runs and number == len(lines):
                break
            raise UsageError(
                f"{path}:{number}: not a record of {FORMAT}; give a file that JSONLinesSink wrote"
            ) from None
    with_steps = [run for run in runs if run.steps]
    if not with_steps:
        what = "no step in it" if runs else "empty"
        raise UsageError(f"{path}: {what}; a step is written when the next one begins, or by remove()")
    return with_steps


def _take(record: Any, runs: list[Run], path: Path) -> None:
    """Put a record where it belongs. Raises: KeyError, TypeError: it isn't one, or lacks what its kind has."""
    event = record["event"]
    if event == "run":
        if record["format"] != FORMAT:
            raise KeyError(record["format"])
        _check(record, {"world_size": int, "error_every": int, "backend": str, "torch": str, "hook": str})
        if record["world_size"] < 1:
            raise TypeError("world_size")
        runs.append(Run(path, record["hook"], record))
        return
    if not runs:
        raise KeyError("run")
    if event == "step":
        _check(record, dict.fromkeys(_STEP_NUMBERS, (int, float)))
        _check(record, {name: (int, float, type(None)) for name in _STEP_MAY_LACK})
        record["nonfinite"]
        runs[-1].steps.append(record)
    elif event == "error":
        _check(record, {"step": int, "parameter": str})
        _check(record, {name: (int, float, type(None)) for name in ("relative_error", "mean_norm")})
        runs[-1].errors.append(record)
    elif event == "scalars" and isinstance(record.get("loss"), int | float):
        _check(record, {"step": int})
        runs[-1].losses[record["step"]] = float(record["loss"])


_STEP_NUMBERS = (
    "step",
    "time_seconds",
    "exposed_seconds",
    "raw_bytes",
    "encode_seconds",
    "wait_seconds",
    "decode_seconds",
)
_STEP_MAY_LACK = ("step_seconds", "sent_bytes", "received_bytes")


def _check(record: dict[str, Any], kinds: dict[str, Any]) -> None:
    for name, kind in kinds.items():
        if not isinstance(record[name], kind):
            raise TypeError(f"{name}: {record[name]!r}")


def tell_apart(runs: Sequence[Run]) -> list[Run]:
    """Add the file's name, and where that isn't enough its place in the list, to names that occur twice.

    Example:
        >>> runs = [Run(Path(f"{stem}.jsonl"), "int8", {}) for stem in ("a", "b", "b")]
        >>> [run.name for run in tell_apart(runs)]
        ['int8 (a)', 'int8 (b, 2)', 'int8 (b, 3)']
    """
    names = Counter(run.name for run in runs)
    pairs = Counter((run.name, run.path.stem) for run in runs)
    told = []
    for number, run in enumerate(runs, 1):
        name = run.name
        if names[run.name] > 1:
            place = f", {number}" if pairs[run.name, run.path.stem] > 1 else ""
            name = f"{run.name} ({run.path.stem}{place})"
        told.append(replace(run, name=name))
    return told


@dataclass(frozen=True)
class Summary:
    """A run in numbers: means over its steps, None where unknown.

    Attributes:
        fewer_bytes: plain all-reduce's 2 (W-1)/W raw bytes over the bytes sent.
        compute_seconds: of a step, what is left without the exposed part of its exchange.
        encode_seconds, wait_seconds, decode_seconds: the exposed part, shared out as the exchanges' own times are.
        is_partly_looked_at: some results were not read, so that there may be more non-finite steps.
        error: the relative error of all parameters as one vector, when it was last measured.
        last_loss: the last one logged.
    """

    step_count: int
    nonfinite_steps: int
    is_partly_looked_at: bool
    sent_bytes: float | None
    received_bytes: float | None
    fewer_bytes: float | None
    step_seconds: float | None
    exposed_seconds: float
    compute_seconds: float | None
    encode_seconds: float
    wait_seconds: float
    decode_seconds: float
    error: float | None
    last_loss: float | None


def summarise(run: Run) -> Summary:
    """Sum a run up.

    1. Bytes: means over all steps.
    2. Seconds: means over the steps that have a step before them, so that the parts add up to the step.
    3. The exposed part is shared out between encoding, waiting and decoding as their totals are to each other.

    Example:
        >>> step = dict(raw_bytes=100, sent_bytes=25, received_bytes=25, step_seconds=1.0, exposed_seconds=0.5,
        ...             encode_seconds=1.0, wait_seconds=3.0, decode_seconds=0.0, nonfinite=False)
        >>> summary = summarise(Run(Path("a"), "int8", {"world_size": 2}, [step]))
        >>> summary.fewer_bytes, summary.compute_seconds, summary.wait_seconds
        (4.0, 0.5, 0.375)
    """
    steps = run.steps
    timed = [step for step in steps if step["step_seconds"] is not None] or steps
    step_seconds = _mean([step["step_seconds"] for step in timed])
    exposed = fmean(step["exposed_seconds"] for step in timed)
    if step_seconds is not None:
        exposed = min(exposed, step_seconds)
    totals = [sum(step[f"{part}_seconds"] for step in timed) for part in ("encode", "wait", "decode")]
    whole = sum(totals)
    shares = [exposed * total / whole if whole else 0.0 for total in totals]
    sent = _mean([step["sent_bytes"] for step in steps])
    world_size = run.about["world_size"]
    plain = 2 * (world_size - 1) / world_size * fmean(step["raw_bytes"] for step in steps)
    return Summary(
        step_count=len(steps),
        nonfinite_steps=sum(bool(step["nonfinite"]) for step in steps),
        is_partly_looked_at=any(step["nonfinite"] is None for step in steps),
        sent_bytes=sent,
        received_bytes=_mean([step["received_bytes"] for step in steps]),
        fewer_bytes=plain / sent if sent else None,
        step_seconds=step_seconds,
        exposed_seconds=exposed,
        compute_seconds=None if step_seconds is None else step_seconds - exposed,
        encode_seconds=shares[0],
        wait_seconds=shares[1],
        decode_seconds=shares[2],
        error=_last_error(run),
        last_loss=run.losses[max(run.losses)] if run.losses else None,
    )


def _last_error(run: Run) -> float | None:
    """|result - mean| / |mean| over all parameters, of the last step that measured it."""
    last = max((record["step"] for record in run.errors), default=None)
    measured = [
        (record["relative_error"], record["mean_norm"])
        for record in run.errors
        if record["step"] == last and None not in (record["relative_error"], record["mean_norm"])
    ]
    whole = math.hypot(*(norm for _, norm in measured))
    return math.hypot(*(error * norm for error, norm in measured)) / whole if whole else None


def _mean(values: Sequence[float | None]) -> float | None:
    """None when one of the values is unknown."""
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None
