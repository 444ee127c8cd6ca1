"""List the saved states of a run: stored, unfinished, set aside, and in memory."""

from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from myriad.checkpoint.snapshots.snapshot_client import held_steps, list_in_memory
from myriad.checkpoint.storage.checkpoint_folder import (
    REPLACED,
    Checkpoint,
    CheckpointFolder,
    is_removed,
    verify,
)
from myriad.errors import RunFailedError

__all__ = ["Row", "list_checkpoint", "list_checkpoints", "resume_point"]

Row = dict[str, Any]
"""``step``, ``tier`` (storage, memory), ``path``, ``state`` (verified, complete, damaged, unfinished, set
aside, held), ``problems``, ``time``, ``bytes``."""
_NOTHING_KNOWN: Row = {"problems": [], "time": None, "bytes": None}


def list_checkpoints(run: Path | None, folder: CheckpointFolder, *, every_byte: bool = False) -> list[Row]:
    """List the checkpoints and snapshots of a run, by step. Checkpoints pruned meanwhile are left out.

    ``run``: folder of the run. ``folder``: where it saves. ``every_byte``: verify all bytes, not only file
    sizes."""
    rows = [_complete(folder.at_step(step), step, every_byte) for step in folder.steps()]
    rows = [row for row in rows if not (row["problems"] and is_removed(folder.at_step(row["step"])))]
    rows += [_unfinished(folder.at_step(step), step) for step in folder.unfinished()]
    rows += [_set_aside(folder, step) for step in folder.damaged()]
    rows = [row for row in rows if not (row["problems"] and row["problems"][0].endswith(REPLACED))]
    rows += [] if run is None else _in_memory(run)
    return sorted(rows, key=lambda row: int(row["step"]))


def list_checkpoint(checkpoint: Checkpoint, *, every_byte: bool = False) -> Row:
    """Return the row of one checkpoint, whatever its name. A damaged manifest gives step -1."""
    try:
        step = checkpoint.manifest().step
    except (OSError, ValueError, KeyError, TypeError):
        step = -1
    return _complete(checkpoint, step, every_byte)


def resume_point(run: Path, folder: CheckpointFolder) -> tuple[int, str] | None:
    """Return the step and tier (memory, storage) that the next start resumes from; ``None``: no saved state.

    At the same step, memory is preferred to storage, as in `myriad.checkpoint.load.state_search`."""
    found = [(int(step), "memory") for step, _ in list_in_memory(run)]
    with suppress(OSError, RunFailedError):  # storage unavailable
        complete = (
            step for step in reversed(folder.steps()) if not verify(folder.at_step(step), sizes_only=True)
        )
        found += [(step, "storage") for step in islice(complete, 1)]
    return max(found, key=lambda one: (one[0], one[1] == "memory"), default=None)


def _complete(checkpoint: Checkpoint, step: int, every_byte: bool) -> Row:
    problems = verify(checkpoint, sizes_only=not every_byte)
    state = "damaged" if problems else "verified" if every_byte else "complete"
    row = {"step": step, "tier": "storage", "path": checkpoint.where, "state": state, "problems": problems}
    try:
        manifest = checkpoint.manifest()
    except (OSError, ValueError):
        return row | {"time": None, "bytes": None}
    return row | {"time": manifest.time, "bytes": manifest.num_bytes}


def _unfinished(checkpoint: Checkpoint, step: int) -> Row:
    return {"step": step, "tier": "storage", "path": checkpoint.where, "state": "unfinished"} | _NOTHING_KNOWN


def _set_aside(folder: CheckpointFolder, step: int) -> Row:
    path = folder.at_damaged(step).where
    return {"step": step, "tier": "storage", "path": path, "state": "set aside"} | _NOTHING_KNOWN


def _in_memory(run: Path) -> list[Row]:
    """List the snapshots on this machine's snapshot servers, which run somewhat longer than the run."""
    held = held_steps(run)
    return [
        {"step": step, "tier": "memory", "path": None, "problems": []}
        | {"state": "held" if step in held else "complete"}
        | {"time": None, "bytes": num_bytes}
        for step, num_bytes in dict(list_in_memory(run)).items()  # one row a step, not one an attempt
    ]
