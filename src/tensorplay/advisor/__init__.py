"""Which hook pays on this cluster, with this model: measured, predicted, and said with reasons."""

from tensorplay.advisor.advice import Advice, AdviseSettings, Link, Prediction
from tensorplay.advisor.advise import DEFAULT_HOOKS, advise

__all__ = ["DEFAULT_HOOKS", "Advice", "AdviseSettings", "Link", "Prediction", "advise"]
