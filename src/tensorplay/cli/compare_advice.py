"""What the advisor predicts for a cell of a comparison, so that its table stands beside what was measured."""

from collections.abc import Sequence
from typing import Any

from tensorplay.cli.compare_hooks import AUTO, TORCH
from tensorplay.cli.hooks import COMPUTE_ALONE
from tensorplay.cli.workload import Workload

__all__ = ["cell_advice", "hooks_to_advise"]


def hooks_to_advise(hooks: Sequence[str]) -> list[str]:
    """Those of `hooks` that the advisor can be asked about: not torch's, not compute alone, not "auto" itself.

    Example:
        >>> hooks_to_advise(["noop", "torch:fp16", "int8", "auto"])
        ['int8']
    """
    return [name for name in hooks if not name.startswith(TORCH) and name not in (AUTO, COMPUTE_ALONE)]


def cell_advice(workload: Workload, hooks: Sequence[str]) -> dict[str, Any]:
    """Ask `tensorplay.advisor` about these hooks here; a collective over the default group.

    Returns:
        best: the hook it would take. predicted_seconds: a step's, by hook. probe: all that it measured.

    Example:
        >>> cell_advice(workload, ["allreduce", "int8"])["best"]           # doctest: +SKIP
        'int8'
    """
    from tensorplay.advisor import advise

    advice = advise(workload.model, workload.endless(), hooks=list(hooks), loss=workload.loss)
    return {
        "best": advice.best.hook,
        "predicted_seconds": {prediction.hook: prediction.step_seconds for prediction in advice.predictions},
        "probe": advice.to_dict(),
    }
