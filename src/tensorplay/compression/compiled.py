"""Whether loops compiled to machine code are at hand.

Most codecs are written with PyTorch's and NumPy's operations, each of which passes over all its values. Where Numba is
installed (`pip install 'tensorplay-distributed[fast]'`) a group's whole arithmetic is one loop instead, two to three
times faster on one core, and Python's lock is not held meanwhile. Payloads, and what is decoded, are the same bytes
either way, so ranks with and without Numba may train together. `NUMBA_DISABLE_JIT=1` in the environment switches the
loops off, as it does all of Numba's.

What is compiled is kept in `__pycache__`, or in the user's cache folder where that can't be written, so that it costs
seconds once, and not once a process. Where nothing can be kept, each process compiles for itself.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, overload

import torch

__all__ = ["FUSED", "KERNELS", "is_compiled", "jit", "loops_for", "numba_version"]

KERNELS = "numba"
"""What compiles the loops."""
FUSED = {"contract"}
"""Rule of arithmetic for `jit`: what is multiplied and added is rounded once, as in torch.addcmul."""
_OLDEST = (0, 61)

_logger = logging.getLogger(__name__)
_Loop = TypeVar("_Loop", bound=Callable[..., Any])


@functools.cache
def is_compiled() -> bool:
    """Whether codecs on a CPU run compiled loops: Numba can be imported and is not switched off.

    Example:
        >>> is_compiled() in (True, False)
        True
    """
    if importlib.util.find_spec(KERNELS) is None:
        return False
    try:
        numba = importlib.import_module(KERNELS)
        release = tuple(int(part) for part in numba.__version__.split(".")[:2])
        is_off = bool(numba.config.DISABLE_JIT)
    except Exception as error:  # it refuses a NumPy newer than it knows; its LLVM can't be loaded; …
        _logger.warning(
            "codecs run without Numba, which can't be imported: %s: %s", type(error).__name__, error
        )
        return False
    if release < _OLDEST:
        _logger.warning("codecs run without Numba: %s is older than 0.61", numba.__version__)
    return not is_off and release >= _OLDEST


def numba_version() -> str | None:
    """Of the Numba that compiles the loops; None where codecs run on PyTorch's operations."""
    return str(importlib.import_module(KERNELS).__version__) if is_compiled() else None


def loops_for(values: torch.Tensor, name: str = "tensorplay.compression.loops") -> Any:
    """The module of compiled loops if they can work on `values`: a float32 vector on a CPU. None otherwise."""
    if values.device.type != "cpu" or values.dtype != torch.float32 or not is_compiled():
        return None
    return _module(name)


@functools.cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(name)


@overload
def jit(function: _Loop, *, fastmath: Any = False, inline: str = "never") -> _Loop: ...


@overload
def jit(
    function: None = None, *, fastmath: Any = False, inline: str = "never"
) -> Callable[[_Loop], _Loop]: ...


def jit(function: Any = None, *, fastmath: Any = False, inline: str = "never") -> Any:
    """`numba.njit` as all loops here use it: without Python's lock, IEEE division, and kept on disk.

    Args:
        fastmath: rules of arithmetic that a loop may bend. Nothing whose result ranks compare may bend any.
        inline: "always" for a function that takes an array and where in it to begin: only where the caller computes
            that does the compiler know that it isn't negative, and makes vector instructions of the loop.
    """
    if function is None:
        return functools.partial(jit, fastmath=fastmath, inline=inline)
    numba = importlib.import_module(KERNELS)
    settings = {"nogil": True, "error_model": "numpy", "fastmath": fastmath, "inline": inline}
    try:
        return _kept_if_possible(numba.njit(cache=True, **settings)(function))
    except (RuntimeError, AttributeError):  # no folder to keep it in, or a release that keeps it otherwise
        return numba.njit(**settings)(function)


@functools.cache
def _fingerprint() -> str:
    """Of the source of all loops here: one module's are put into another's, which Numba's own stamp doesn't see."""
    sources = [Path(__file__), *sorted(Path(__file__).parent.glob("*loops.py"))]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def _kept_if_possible(dispatcher: Any) -> Any:
    """Keep what is compiled until any loop changes, and keep a full disk from ending a training run.

    Numba reads and writes its cache when a loop is first called.
    """
    cache = dispatcher._cache
    with contextlib.suppress(OSError):  # no source to read: then none changes
        cache._cache_file._source_stamp = cache._cache_file._source_stamp, _fingerprint()
    load, save = cache.load_overload, cache.save_overload

    def try_to_load(*arguments: Any) -> Any:
        try:
            return load(*arguments)
        except OSError:
            return None

    def try_to_save(*arguments: Any) -> None:
        try:
            save(*arguments)
        except OSError as error:
            _logger.info("a compiled loop isn't kept: %s", error)

    cache.load_overload, cache.save_overload = try_to_load, try_to_save
    return dispatcher
