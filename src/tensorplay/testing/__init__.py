"""Real ranks for tests: `run_ranks` runs one function on several gloo processes of this machine."""

from tensorplay.testing.failures import Exited, RankFailure, RankReport
from tensorplay.testing.ranks import MAX_WORLD_SIZE, close_ranks, run_ranks

__all__ = ["MAX_WORLD_SIZE", "Exited", "RankFailure", "RankReport", "close_ranks", "run_ranks"]
