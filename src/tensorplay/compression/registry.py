"""Codecs by name: `make_codec("int4:group_size=64")`. A new codec is one file, and one line here."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from tensorplay.compression.cast import Float8, Float16
from tensorplay.compression.codec import Codec, Identity
from tensorplay.compression.lloyd_max import LloydMax2
from tensorplay.compression.quantize import AffineUint8, SymmetricInteger
from tensorplay.compression.sign import Sign
from tensorplay.compression.sparsify import RandomK, TopK

__all__ = ["Entry", "codec_entry", "known_codecs", "make_codec", "read_parameters", "register_codec"]

Factory = Callable[..., Codec]


@dataclass(frozen=True)
class Entry:
    """A registered codec: how it is made, and where it is described."""

    factory: Factory
    paper: str


def _float32() -> Codec:
    codec = Identity(torch.float32)
    codec.name = "fp32"
    return codec


_CODECS: dict[str, Entry] = {
    "fp32": Entry(_float32, "as it is"),
    "fp16": Entry(partial(Float16, "fp16"), "Micikevicius et al. 2018"),
    "bf16": Entry(partial(Float16, "bf16"), "Micikevicius et al. 2018"),
    "fp8_e4m3": Entry(partial(Float8, "e4m3"), "Micikevicius et al. 2022"),
    "fp8_e5m2": Entry(partial(Float8, "e5m2"), "Micikevicius et al. 2022"),
    "int8": Entry(partial(SymmetricInteger, 8), "Dettmers et al. 2022"),
    "int4": Entry(partial(SymmetricInteger, 4), "Dettmers et al. 2022"),
    "int2": Entry(LloydMax2, "Max 1960"),
    "uint8": Entry(AffineUint8, "Jacob et al. 2018"),
    "sign": Entry(Sign, "Karimireddy et al. 2019"),
    "topk": Entry(TopK, "Lin et al. 2018"),
    "randomk": Entry(RandomK, "Stich et al. 2018"),
}


def known_codecs() -> tuple[str, ...]:
    """Names that `make_codec` knows, sorted.

    Example:
        >>> "int8" in known_codecs()
        True
    """
    return tuple(sorted(_CODECS))


def codec_entry(name: str) -> Entry:
    """What is registered under `name`. Raises ValueError for an unknown name."""
    if name not in _CODECS:
        raise ValueError(f"codec must be one of {', '.join(known_codecs())}, got {name!r}")
    return _CODECS[name]


def register_codec(name: str, factory: Factory, paper: str = "") -> None:
    """Make `factory` known as `name`, on every rank alike; conformance tests, benchmarks and listings find it there.

    Args:
        name: without ":", ",", "=" or spaces.
        factory: called with the parameters a specification gives, returns a Codec; a Codec subclass will do. Its first
            parameter may be given without its name, and every parameter needs a default.
        paper: where it is described, for `tensorplay codecs`.
    Raises: ValueError: name empty, taken, or with one of those characters. TypeError: factory not callable.
    Example:
        >>> register_codec("half", lambda: Identity(torch.float16))
        >>> make_codec("half").wire_bytes(10)
        20
        >>> del _CODECS["half"]
    """
    if not name or any(character in name for character in ":,= "):
        raise ValueError(f"name must not be empty or contain ':', ',', '=' or spaces, got {name!r}")
    if name in _CODECS:
        raise ValueError(f"name must not be taken, got {name!r}; taken are {', '.join(known_codecs())}")
    if not callable(factory):
        raise TypeError(f"factory must be callable, got {type(factory).__name__}")
    _CODECS[name] = Entry(factory, paper)


def make_codec(spec: str | Codec) -> Codec:
    """Make the codec that `spec` describes.

    Args:
        spec: a name, optionally followed by ":" and parameters, "int8", "int4:group_size=64,rounding=stochastic"; the
            first parameter may stand without its name, "topk:0.01". A Codec is returned as it is.
    Raises: ValueError: unknown name or parameter, or a value against a codec's rule. TypeError: spec is neither.
    Example:
        >>> make_codec("int4:group_size=64")
        <codec int4:group_size=64>

    """
    if isinstance(spec, Codec):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"codec must be a name or a Codec, got {type(spec).__name__}")
    name, _, text = spec.replace(" ", "").partition(":")
    factory = codec_entry(name).factory
    codec = factory(**read_parameters(f"codec {name!r}", factory, text))
    if not isinstance(codec, Codec):
        raise TypeError(f"the factory of codec {name!r} must return a Codec, got {type(codec).__name__}")
    codec.name = codec.name or (f"{name}:{text}" if text else name)
    return codec


def read_parameters(what: str, factory: Callable[..., object], text: str) -> dict[str, object]:
    """Read "0.01" or "group_size=64,rounding=nearest" against the parameters of `factory`.

    Args:
        what: whose parameters they are, for errors. text: what follows the ":" of a specification; "" gives {}.
    Raises: ValueError: a parameter that `factory` has not, or one given twice, or a second one without its name.
    Example:
        >>> read_parameters("hook 'x'", lambda rank=1, warm=True: None, "4,warm=false")
        {'rank': 4, 'warm': False}
    """
    known = list(
        inspect.signature(factory).parameters
    )  # those that a partial has bound by position are left out
    parameters: dict[str, object] = {}
    for position, part in enumerate(text.split(",") if text else []):
        key, equals, value = part.partition("=")
        if not equals:
            if position or not known:
                raise ValueError(f"parameters of {what} must be written name=value, got {part!r}")
            key, value = known[0], part
        if key not in known:
            rule = f"one of {', '.join(known)}" if known else "left out, it has none"
            raise ValueError(f"a parameter of {what} must be {rule}, got {key!r}")
        if key in parameters:
            raise ValueError(f"parameter {key} of {what} must be given once, got {text!r}")
        parameters[key] = _value(value)
    return parameters


def _value(text: str) -> object:
    """The number that `text` spells, None for "none", True and False for "true" and "false", or the text itself."""
    words = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
