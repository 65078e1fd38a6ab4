"""Algorithms for a running data-parallel job, each in a package of its own.

* `ddp_comm_hooks`: how gradients are exchanged
* `model_averaging`: keeping replicas in step outside the all-reduce
* `Join`, `Joinable`, `JoinHook`: uneven inputs that share collectives
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorplay.distributed.algorithms.join import Join, Joinable, JoinHook

__all__ = ["Join", "JoinHook", "Joinable"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from tensorplay.distributed.algorithms import join

        return getattr(join, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
