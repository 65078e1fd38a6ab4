"""`torch.testing` under this name, and real ranks for tests.

`run_ranks` runs one function on several gloo processes of this machine.
"""

from typing import TYPE_CHECKING

import torch.testing

from tensorplay import _alias
from tensorplay.testing.failures import Exited as Exited, RankFailure as RankFailure, RankReport as RankReport
from tensorplay.testing.ranks import (
    MAX_WORLD_SIZE as MAX_WORLD_SIZE,
    close_ranks as close_ranks,
    run_ranks as run_ranks,
)

if TYPE_CHECKING:
    from torch.testing import (
        FileCheck as FileCheck,
        assert_close as assert_close,
        make_tensor as make_tensor,
    )

_OWN = ("MAX_WORLD_SIZE", "Exited", "RankFailure", "RankReport", "close_ranks", "run_ranks")

__all__ = sorted([*_OWN, *_alias.stand_for(__name__, torch.testing)])
