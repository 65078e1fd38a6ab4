"""One rank of a comparison, as a process: `python -m tensorplay.cli.compare_rank <folder>/job.json`.

Ends at once on Ctrl-C, when the launcher is gone, and on the first error, which it leaves in a file: peers that wait
for this rank are ended by the launcher.
"""

import json
import os
import signal
import sys
import time
import traceback

from tensorplay.cli.compare_plan import Job
from tensorplay.cli.demo_rank import follow_launcher

__all__ = ["main"]


def main(job_path: str) -> None:
    """Run one rank to its end; needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Example:
        >>> main("runs/compare/cells/2-1gbit/job.json")                     # doctest: +SKIP
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends at once, also inside a blocked collective
    job = Job.load(job_path)
    follow_launcher(job.launcher_process)
    try:
        from tensorplay.cli.compare_measure import run_job  # a failing import is told, too

        run_job(job)
    except BaseException as error:
        from tensorplay.cli.command import UsageError

        told = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
        record = {"time_seconds": time.time(), "error": told, "traceback": traceback.format_exc()}
        partial = job.error_path(int(os.environ["RANK"])).with_suffix(".partial")
        partial.write_text(json.dumps(record), encoding="utf-8")
        partial.replace(job.error_path(int(os.environ["RANK"])))
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a broken group may block whatever runs at exit


if __name__ == "__main__":
    main(sys.argv[1])
