"""``python -m myriad.supervise.agent.agent_process RUN NODE THREADS [COMMAND...]``: a node's agent.

The fork server is started before all else, because its imports take longest. Meanwhile the node's snapshot
server starts, so that ranks need not wait for it. In a run with several nodes, MYRIAD_NODE gives ranks the
number of this one: they find its snapshot server by it, whatever place they take.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from myriad.checkpoint.snapshots.server_start import node_server_name, start_snapshot_server
from myriad.run import Run
from myriad.supervise.agent.fork_server import ForkServer
from myriad.system.child_process import die_with_parent
from myriad.system.quick_process import start_quickly
from myriad.telemetry.progress.progress_page import ProgressPage
from myriad.telemetry.span_io.span_ring import SpanRings

__all__ = ["main", "run_node"]

_MOST_RANKS = 512


def run_node(
    path: Path, node: int, threads: int, command: Sequence[str] = (), unattended_seconds: float | None = None
) -> str | None:
    """Run the node agent until the driver reports that the run is over. Return the problem, or ``None``."""
    Run(path).share_as_folder()
    page, rings = ProgressPage(_MOST_RANKS), SpanRings(_MOST_RANKS)
    log = Run(path).logs_path / f"executor-{node}.log"

    def start_warm() -> ForkServer:
        return ForkServer(path, command, (page.descriptor, rings.descriptor), threads, log)

    warm = start_warm()
    if not command:
        start_snapshot_server(node_server_name(path), Run(path).logs_path / f"keeper-{node}.log")
    from myriad.supervise.agent.node_agent import run_agent

    return run_agent(Run(path), node, page, rings, warm, start_warm, unattended_seconds=unattended_seconds)


def main(arguments: list[str]) -> int:
    """Run an agent that ends with its launcher."""
    start_quickly()
    die_with_parent(int(os.environ.get("MYRIAD_ENGINE_PID", os.getppid())))
    run, node, threads, *command = arguments
    problem = run_node(Path(run), int(node), int(threads), command)
    if problem is not None:
        sys.stderr.write(f"{problem}\n")
    return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
