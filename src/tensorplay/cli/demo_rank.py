"""One rank of the demo, as a process: `python -m tensorplay.cli.demo_rank <out>/plan.json` under the launcher.

Ends at once on Ctrl-C or when the launcher is gone, and leaves the error that ended it in a file.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback

from tensorplay.cli.demo_plan import DemoPlan

__all__ = ["follow_launcher", "main"]

_LOOK_SECONDS = 0.25


def follow_launcher(launcher_process: int) -> None:
    """End this process at once when the launcher is gone, whatever ended it."""

    def watch() -> None:
        while os.getppid() == launcher_process:
            time.sleep(_LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="follow-launcher", daemon=True).start()


def main(plan_path: str) -> None:
    """Run one rank to its end; what ends it early is left in the plan's error file.

    Args:
        plan_path: the file that DemoPlan.save wrote.

    Raises:
        BaseException: whatever training raised.

    Example:
        >>> main("runs/demo/plan.json")                                    # doctest: +SKIP
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends at once, also inside a blocked collective
    plan = DemoPlan.load(plan_path)
    follow_launcher(plan.launcher_process)
    try:
        from tensorplay.cli.demo_training import train_under_each_hook  # a failing import is told, too

        train_under_each_hook(plan)
    except BaseException as error:
        record = {
            "time_seconds": time.time(),
            "error": "".join(traceback.format_exception_only(error)).strip(),
            "traceback": traceback.format_exc(),
        }
        plan.error_path(int(os.environ["RANK"])).write_text(json.dumps(record), encoding="utf-8")
        raise


if __name__ == "__main__":
    main(sys.argv[1])
