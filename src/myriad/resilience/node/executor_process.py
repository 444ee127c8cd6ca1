"""``python -m myriad.resilience.node.executor_process RUN NODE THREADS [COMMAND...]``: a node's executor.

What ranks are forked from is started before all else: its imports take longest. Meanwhile the keeper of the
node comes up, which the ranks would else wait for. Where a run has several nodes, MYRIAD_NODE names this one
to the ranks: they find its keeper by it, whatever place they take.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from myriad.checkpoint.keeper_start import node_keeper, start_keeper
from myriad.resilience.engines.child import die_with_parent
from myriad.resilience.node.warm_parent import WarmParent
from myriad.run import Run
from myriad.telemetry.progress_page import ProgressPage
from myriad.telemetry.ring import SpanRings

__all__ = ["main", "run_node"]

_MOST_RANKS = 512


def run_node(
    path: Path, node: int, threads: int, command: Sequence[str] = (), lonely_seconds: float | None = None
) -> str | None:
    """Executes until the driver says that the run is over; gives what went wrong."""
    page, rings = ProgressPage(_MOST_RANKS), SpanRings(_MOST_RANKS)
    log = Run(path).logs_path / f"executor-{node}.log"

    def start_warm() -> WarmParent:
        return WarmParent(path, command, (page.descriptor, rings.descriptor), threads, log)

    warm = start_warm()
    if not command:
        start_keeper(node_keeper(path), Run(path).logs_path / f"keeper-{node}.log")
    from myriad.resilience.node.executor import execute

    return execute(Run(path), node, page, rings, warm, start_warm, lonely_seconds=lonely_seconds)


def main(arguments: list[str]) -> int:
    """Of an engine, with which it ends."""
    die_with_parent(int(os.environ.get("MYRIAD_ENGINE_PID", os.getppid())))
    run, node, threads, *command = arguments
    problem = run_node(Path(run), int(node), int(threads), command)
    if problem is not None:
        sys.stderr.write(f"{problem}\n")
    return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
