"""The package's own modules are collected for their doctests; two of them can't be imported without Numba."""

import importlib.util

collect_ignore = [
    f"src/tensorplay/compression/{name}.py"
    for name in ("loops", "low_rank_loops")
    if importlib.util.find_spec("numba") is None
]
