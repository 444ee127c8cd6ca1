"""What Ray runs on a machine: an executor, until it ends."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from myriad.checkpoint.keeper_start import NODE
from myriad.processes import open_log
from myriad.run import Run

__all__ = ["execute"]


def execute(run: str, node: int, folder: str, threads: int, command: Sequence[str]) -> int:
    """Its exit code. It dies with this process, and this one with its machine or with the engine.

    ``folder``: where the engine was started, which paths in the job may go from.
    """
    words = ["myriad.resilience.node.executor_process", run, str(node), str(threads), *command]
    log = Run(run).logs_path / f"executor-{node}.log"
    with open(open_log(log), "ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            env=os.environ | {"MYRIAD_ENGINE_PID": str(os.getpid()), NODE: str(node)},
            cwd=folder if Path(folder).is_dir() else None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=output,
            start_new_session=True,
        )
    return process.wait()
