"""Communication hooks: how DDP's gradients are exchanged.

`register_ddp_comm_hook(hook, model)` takes an enum member, a name of `known_hooks()`, or any callable.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorplay.distributed.algorithms.ddp_comm_hooks._attach import HookHandle
    from tensorplay.distributed.algorithms.ddp_comm_hooks.register import (
        DDPCommHookType,
        known_hooks,
        make_hook,
        register_ddp_comm_hook,
    )

__all__ = ["DDPCommHookType", "HookHandle", "known_hooks", "make_hook", "register_ddp_comm_hook"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tensorplay.distributed.algorithms.ddp_comm_hooks import register

    return getattr(register, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
