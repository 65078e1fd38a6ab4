"""What an exchange costs and what it loses, measured from outside: the exchanges don't know they are watched.

`observe(model_or_state, sinks=[…])` writes records of every bucket and step, and now and then of every parameter.
"""

from tensorplay.telemetry.observe import Observation, observe
from tensorplay.telemetry.sinks import CallableSink, JSONLinesSink, MemorySink, Sink, TensorBoardSink

__all__ = [
    "CallableSink",
    "JSONLinesSink",
    "MemorySink",
    "Observation",
    "Sink",
    "TensorBoardSink",
    "observe",
]
