"""What the advisor predicts for a cell of a comparison, so that its table stands beside what was measured."""

import math
from collections.abc import Sequence
from typing import Any

from tensorplay.cli.compare_hooks import AUTO
from tensorplay.cli.hooks import COMPUTE_ALONE, RECIPES
from tensorplay.cli.workload import Workload
from tensorplay.distributed.algorithms.ddp_comm_hooks import known_hooks

__all__ = ["cell_advice", "hooks_to_advise"]


def hooks_to_advise(hooks: Sequence[str]) -> list[str]:
    """Those of `hooks` that the advisor can be asked about: registered names, but compute alone, "auto" and local SGD.

    Example:
        >>> hooks_to_advise(["noop", "torch:fp16", "int8", "topk:0.05", "diloco:period=5", "auto", "mine:hook"])
        ['int8', 'topk:0.05']
    """
    known = {name.partition(":")[0] for name in known_hooks()} - {AUTO, COMPUTE_ALONE, *RECIPES}
    return [name for name in hooks if name.partition(":")[0] in known]


def cell_advice(workload: Workload, hooks: Sequence[str]) -> dict[str, Any]:
    """Ask `tensorplay.advisor` about these hooks here; a collective over the default group.

    Returns:
        best: the hook it would take. predicted_seconds: a step's by hook, None where it has no answer; of the hooks
        that it tried, what the trial took. probe: all that it measured. Numbers that aren't finite become None.

    Example:
        >>> cell_advice(workload, ["allreduce", "int8"])["best"]           # doctest: +SKIP
        'int8'
    """
    from tensorplay.advisor import advise

    batches = workload.endless()
    advice = advise(workload.model, batches, workload.loss, hooks=list(hooks), optimizer=workload.optimizer)
    predicted = {prediction.hook: prediction.step_seconds for prediction in advice.predictions}
    found = {"best": advice.best.hook, "predicted_seconds": predicted, "probe": advice.to_dict()}
    return {key: _for_json(value) for key, value in found.items()}


def _for_json(value: Any) -> Any:
    """NaN and infinity are no JSON.

    Example:
        >>> _for_json({"a": [1.0, float("nan")], "b": (float("inf"), "text")})
        {'a': [1.0, None], 'b': [None, 'text']}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _for_json(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_for_json(one) for one in value]
    return value
