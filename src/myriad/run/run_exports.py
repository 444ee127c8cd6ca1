"""What was exported from a run for other tools: a line of RUN/exports.jsonl each.

    {"time": 1764252000.0, "path": "/models/llama-hf", "checkpoint": ".../step-900", "kind": "qwen3, float32"}

Trackers get the paths, and tables of runs do not change: an export is not an event of the training.
"""

import os
import time
from pathlib import Path

from myriad.run.run_folder import Run
from myriad.system.jsonl import JsonlTail, append_line

__all__ = ["exported_paths", "record_export"]

_EXPORTS_FILE = "exports.jsonl"
_MOST_PATHS = 20


def record_export(run: Run, out: Path, checkpoint: str, kind: str) -> None:
    """Record that a checkpoint was written to ``out``. A folder that cannot be written stays as it is."""
    line = {"time": time.time(), "path": os.path.abspath(out), "checkpoint": checkpoint, "kind": kind}
    try:
        with run.shared_as_folder():
            append_line(run.path / _EXPORTS_FILE, line)
    except OSError:
        return


def exported_paths(run: Run) -> list[str]:
    """Return the newest paths, each once, oldest first."""
    found = [
        line["path"] for line in JsonlTail(run.path / _EXPORTS_FILE).poll() if _is_path(line.get("path"))
    ]
    return list(dict.fromkeys(found[::-1]))[:_MOST_PATHS][::-1]


def _is_path(value: object) -> bool:
    return isinstance(value, str) and value.startswith("/")
