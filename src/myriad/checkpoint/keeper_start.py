"""Starts the keeper of a node: by its first rank, or before, while that rank still imports what it needs."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

__all__ = ["keeper_name", "start_keeper"]


def keeper_name(run: Path, node: int | None = None) -> str:
    """The same in every attempt of a run on a machine; ``node``: where several of its nodes share it."""
    what = f"{run.resolve()}:{os.getuid()}:{'' if node is None else node}"
    return f"myriad-keeper-{hashlib.blake2s(what.encode(), digest_size=12).hexdigest()}"


def start_keeper(name: str, log: Path) -> "subprocess.Popen[bytes]":
    """In a session of its own: what ends this rank, or all ranks, does not end it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    with log.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "myriad.checkpoint.keeper_process", name],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **one_thread},
            start_new_session=True,
        )
