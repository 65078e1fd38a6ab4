"""Optimizers for data-parallel jobs: local SGD's and the sharded one."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorplay.distributed.optim.post_localSGD_optimizer import (
        ModelAveragingOptimizer,
        PostLocalSGDOptimizer,
    )
    from tensorplay.distributed.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__all__ = ["ModelAveragingOptimizer", "PostLocalSGDOptimizer", "ZeroRedundancyOptimizer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "ZeroRedundancyOptimizer":
        from tensorplay.distributed.optim import zero_redundancy_optimizer

        return zero_redundancy_optimizer.ZeroRedundancyOptimizer
    from tensorplay.distributed.optim import post_localSGD_optimizer

    return getattr(post_localSGD_optimizer, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
