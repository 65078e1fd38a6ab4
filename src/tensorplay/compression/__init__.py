"""Codecs, exchanges and the driver that brings them to the wire.

The parts, from the inside out; `codec.py` is the file to read first:

* `Codec` turns float32 values into bytes and back; `make_codec("int4")` makes a registered one.
* An `Exchange` is a generator of rounds; `exchange_unit` averages gradients by gather, two-shot or sum.
* `ErrorFeedback` and the policies `Uniform`, `StartAfter`, `OnlyLarge`, `Exempt` are wrapped around them.
* A lane (`lane_for`) runs exchanges in an order equal on all ranks.
* `CodecState` and its base `HookState` hold what is remembered of each parameter.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorplay.compression.codec import Codec, Context
    from tensorplay.compression.compressed import CodecState
    from tensorplay.compression.driver import LaneError, lane_for
    from tensorplay.compression.error_feedback import ErrorFeedback
    from tensorplay.compression.exchange import exchange_unit
    from tensorplay.compression.registry import known_codecs, make_codec, register_codec
    from tensorplay.compression.rounds import Exchange
    from tensorplay.compression.schedule import Exempt, OnlyLarge, StartAfter, Uniform
    from tensorplay.compression.state import HookState

_HOMES = {
    "Codec": "codec",
    "CodecState": "compressed",
    "Context": "codec",
    "ErrorFeedback": "error_feedback",
    "Exchange": "rounds",
    "Exempt": "schedule",
    "HookState": "state",
    "LaneError": "driver",
    "OnlyLarge": "schedule",
    "StartAfter": "schedule",
    "Uniform": "schedule",
    "exchange_unit": "exchange",
    "known_codecs": "registry",
    "lane_for": "driver",
    "make_codec": "registry",
    "register_codec": "registry",
}

__all__ = [
    "Codec",
    "CodecState",
    "Context",
    "ErrorFeedback",
    "Exchange",
    "Exempt",
    "HookState",
    "LaneError",
    "OnlyLarge",
    "StartAfter",
    "Uniform",
    "exchange_unit",
    "known_codecs",
    "lane_for",
    "make_codec",
    "register_codec",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
