"""``python -m myriad.resilience.executor_process RUN NODE THREADS [COMMAND...]``: a node's executor.

What ranks are forked from is started before all else: its imports take longest. Meanwhile the keeper of the
node comes up, which the ranks would else wait for.
"""

import os
import sys
from pathlib import Path

from myriad.checkpoint.keeper_start import keeper_name, start_keeper
from myriad.resilience.engines.child import die_with_parent
from myriad.resilience.warm_parent import WarmParent
from myriad.run import Run
from myriad.telemetry.progress_page import ProgressPage

__all__ = ["main"]

_MOST_RANKS = 512


def main(arguments: list[str]) -> int:
    """Executes until the driver says that the run is over."""
    die_with_parent(int(os.environ.get("MYRIAD_ENGINE_PID", os.getppid())))
    run, node, threads, *command = arguments
    page = ProgressPage(_MOST_RANKS)
    path = Path(run)
    log = Run(path).logs_path / f"executor-{node}.log"

    def start_warm() -> WarmParent:
        return WarmParent(path, command, page, int(threads), log)

    warm = start_warm()
    if not command:
        start_keeper(keeper_name(path), Run(path).logs_path / f"keeper-{node}.log")
    from myriad.resilience.executor import execute

    return execute(Run(path), int(node), page, warm, start_warm)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
