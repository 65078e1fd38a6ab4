"""Where records go. A record is a flat dict of numbers, strings, booleans and None."""

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

__all__ = [
    "CallableSink",
    "JSONLinesSink",
    "MemorySink",
    "Record",
    "Sink",
    "TensorBoardSink",
    "as_sinks",
    "scalars",
]

Record = dict[str, Any]
"""One record: `event`, mostly `step`, and what else the event has."""

_encode = json.JSONEncoder(allow_nan=False).encode
_PARTS_OF_A_STEP = frozenset({"bucket", "error"})
_NOT_SCALARS = frozenset({"event", "step", "rank", "bucket", "parameter"})


@runtime_checkable
class Sink(Protocol):
    """Takes records in the training thread, a step's after it has ended.

    Example:
        >>> isinstance(MemorySink(), Sink)
        True
    """

    def write(self, record: Record) -> None:
        """Take one record; it may be kept, and must not be changed."""

    def close(self) -> None:
        """Flush; nothing is written afterwards."""


class MemorySink:
    """Keeps records in a list.

    Example:
        >>> sink = MemorySink()
        >>> sink.write({"event": "step", "step": 1})
        >>> sink.of("step")
        [{'event': 'step', 'step': 1}]
    """

    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, record: Record) -> None:
        """Append the record."""
        self.records.append(record)

    def close(self) -> None:
        """Keeps the records."""

    def of(self, event: str) -> list[Record]:
        """The records of one kind: "run", "bucket", "step", "error" or "scalars"."""
        return [record for record in self.records if record["event"] == event]


class JSONLinesSink:
    """Writes one JSON object a line; what `tensorplay report` reads. NaN and infinities become null.

    Args:
        path: made anew; its folder must exist. Give every rank that writes its own file.
    Raises: OSError: the file can't be opened.
    Example:
        >>> import os
        >>> sink = JSONLinesSink(os.devnull)
        >>> sink.write({"event": "step", "step": 1})
        >>> sink.close()
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file: TextIO = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self._lines: list[str] = []

    def write(self, record: Record) -> None:
        """Append a line; steps are written out whole, so that a run that ends early leaves them."""
        self._lines.append(_json(record))
        if record["event"] not in _PARTS_OF_A_STEP:
            self._write_out()

    def close(self) -> None:
        """Write out what is left, close the file."""
        if not self._file.closed:
            self._write_out()
        self._file.close()

    def _write_out(self) -> None:
        lines, self._lines = self._lines, []
        if lines:
            self._file.write("".join([f"{line}\n" for line in lines]))
            self._file.flush()


def _json(record: Record) -> str:
    try:
        return _encode(record)
    except ValueError:  # a NaN or an infinity is rare, so that looking for one in every value costs more
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        return _encode(finite)


class TensorBoardSink:
    """Writes numbers as TensorBoard scalars: `step/…`, `bucket 0/…`, `error/<parameter>/…`, `scalars/…`.

    Args:
        log_dir: the folder TensorBoard reads.
    Raises: ModuleNotFoundError: tensorboard isn't installed; the text says how to install it.
    Example:
        >>> sink = TensorBoardSink("runs/int8")                             # doctest: +SKIP
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"TensorBoardSink needs {error.name}: pip install tensorboard", name=error.name
            ) from error
        self._writer: Any = SummaryWriter(os.fspath(log_dir))

    def write(self, record: Record) -> None:
        """Write the record's numbers at its step; other fields and None are left out."""
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record.get("step", 0))

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class CallableSink:
    """Hands numbers to `log(values, step=step)`, as `wandb.log` takes them: one call a record.

    Args:
        log: any callable of that form.
    Raises: TypeError: `log` isn't callable.
    Example:
        >>> sink = CallableSink(lambda values, step: print(step, values))
        >>> sink.write({"event": "step", "step": 3, "sent_bytes": 8, "nonfinite": False, "exposed_seconds": None})
        3 {'step/sent_bytes': 8, 'step/nonfinite': 0}
    """

    def __init__(self, log: Callable[..., Any]) -> None:
        if not callable(log):
            raise TypeError(f"log must be callable as log(values, step=…), got {type(log).__name__}")
        self._log = log

    def write(self, record: Record) -> None:
        """Call `log`, unless the record has no numbers."""
        if values := scalars(record):
            self._log(values, step=record.get("step", 0))

    def close(self) -> None:
        """Nothing to flush."""


def scalars(record: Record) -> dict[str, float]:
    """A record's numbers under names that say what they belong to; booleans as 0 and 1.

    Example:
        >>> scalars({"event": "error", "step": 1, "parameter": "0.weight", "cosine": 0.5})
        {'error/0.weight/cosine': 0.5}
    """
    event = record["event"]
    if event == "run":
        return {}
    group = {"bucket": f"bucket {record.get('bucket')}", "error": f"error/{record.get('parameter')}"}.get(
        event, event
    )
    return {
        f"{group}/{name}": int(value) if isinstance(value, bool) else value
        for name, value in record.items()
        if name not in _NOT_SCALARS and isinstance(value, int | float)
    }


def as_sinks(sinks: Sequence[Any]) -> list[Sink]:
    """Sinks as they are, bare callables in a `CallableSink`.

    Raises: TypeError: an entry is neither.
    """
    made: list[Sink] = []
    for sink in sinks:
        if isinstance(sink, Sink):
            made.append(sink)
        elif callable(sink):
            made.append(CallableSink(sink))
        else:
            raise TypeError(
                "a sink has write(record) and close(), or is callable as log(values, step=…); "
                f"got {type(sink).__name__}"
            )
    return made
