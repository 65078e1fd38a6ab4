"""Averagers: replicas kept in sync outside the all-reduce."""

from tensorplay.distributed.algorithms.model_averaging.averagers import ModelAverager, PeriodicModelAverager
from tensorplay.distributed.algorithms.model_averaging.diloco import DiLoCoAverager
from tensorplay.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)
from tensorplay.distributed.algorithms.model_averaging.utils import (
    average_parameters,
    average_parameters_or_parameter_groups,
    get_params_to_average,
)

__all__ = [
    "DiLoCoAverager",
    "HierarchicalModelAverager",
    "ModelAverager",
    "PeriodicModelAverager",
    "average_parameters",
    "average_parameters_or_parameter_groups",
    "get_params_to_average",
]
