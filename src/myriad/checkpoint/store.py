"""A folder of checkpoints: ``step-N`` exists only when complete and verified.

    step-20.partial/   every rank writes its pieces            (DCP's files)
                       rank 0 reads all back, hashes them, writes manifest.json, fsyncs
    step-20/           one rename

A kill at any instant leaves the older checkpoints and at most a ``.partial`` folder, which the next save
replaces.
"""

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from myriad.checkpoint.planners import RectangleLoadPlanner, RectangleSavePlanner, check_same_model
from myriad.errors import RunFailedError
from myriad.model.rectangle import Rectangle

__all__ = ["CheckpointFolder", "load", "load_model", "save", "verify"]

_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class CheckpointFolder:
    """Where a run keeps its checkpoints."""

    path: Path

    def of_step(self, step: int) -> Path:
        """The folder of the checkpoint after ``step`` steps."""
        return self.path / f"step-{step}"

    def steps(self) -> list[int]:
        """Steps with a committed checkpoint, ascending."""
        found = (entry.name.removeprefix("step-") for entry in self.path.glob("step-*") if entry.is_dir())
        return sorted(int(name) for name in found if name.isdigit())

    def newest(self) -> tuple[int, list[str]] | None:
        """Step of the newest checkpoint that verifies, and what is wrong with newer ones; ``None`` when none
        does."""
        problems: list[str] = []
        for step in reversed(self.steps()):
            if not (found := verify(self.of_step(step))):
                return step, problems
            problems += found
        if problems:
            raise RunFailedError(f"no checkpoint verifies: {'; '.join(problems)}")
        return None

    def prune(self, keep: int, newest: int) -> None:
        """Removes all but ``keep`` checkpoints up to step ``newest``, which was just saved.

        One of a later step is of an earlier attempt and did not verify: it counts for nothing, and is
        replaced when the run comes to that step.
        """
        for step in [step for step in self.steps() if step <= newest][:-keep]:
            shutil.rmtree(self.of_step(step), ignore_errors=True)


def save(
    folder: CheckpointFolder,
    step: int,
    rectangles: Sequence[Rectangle],
    progress: dict[str, Any],
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Writes a checkpoint; every rank of the world calls it. Gives its folder once it is committed.

    ``group``: of all ranks, for its messages; off: the world itself."""
    final = folder.of_step(step)
    partial = final.with_name(final.name + ".partial")
    is_first, alone = not dist.is_initialized() or dist.get_rank() == 0, not dist.is_initialized()
    if is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    if not alone:
        dist.barrier(group)
    writer = FileSystemWriter(partial, single_file_per_rank=True, sync_files=True)
    planner = RectangleSavePlanner(rectangles, progress)
    with _one_line(f"{final.name} cannot be written"):
        state_dict_saver.save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=alone)
    if is_first:
        _commit(partial, final, progress)
    if not alone:
        dist.barrier(group)
    return final


@contextlib.contextmanager
def _one_line(what: str) -> Iterator[None]:
    """DCP without its warning, given whenever one process saves or loads alone, and without the tracebacks of
    every rank in an error."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise RunFailedError(f"{what}: {cause} (rank {rank})") from error


def _commit(partial: Path, final: Path, progress: dict[str, Any]) -> None:
    files = {
        entry.name: {"bytes": entry.stat().st_size, "xxh3_128": _hash(entry)}
        for entry in sorted(partial.iterdir())
    }
    manifest = {"version": 1, "progress": progress, "files": files}
    with open(partial / _MANIFEST, "w") as stream:
        json.dump(manifest | {"xxh3_128": _manifest_hash(manifest)}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    _sync_folder(partial)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    _sync_folder(final.parent)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as stream:
        while block := stream.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def _manifest_hash(manifest: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode())


def _read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Raises ``ValueError`` or ``OSError`` for one that is not as it was written."""
    manifest = json.loads((checkpoint / _MANIFEST).read_text())
    if not isinstance(manifest, dict) or manifest.pop("xxh3_128", None) != _manifest_hash(manifest):
        raise ValueError("its bytes changed after it was written")
    return manifest


def verify(checkpoint: Path) -> list[str]:
    """What is wrong with a checkpoint, a line for each file; empty when every byte is as it was written."""
    try:
        manifest = _read_manifest(checkpoint)
    except (OSError, ValueError) as error:
        return [f"{checkpoint.name}/{_MANIFEST}: not readable ({error})"]
    problems = []
    for name, expected in manifest["files"].items():
        path = checkpoint / name
        if not path.is_file():
            problems.append(f"{checkpoint.name}/{name}: missing")
        elif path.stat().st_size != expected["bytes"]:
            problems.append(
                f"{checkpoint.name}/{name}: {path.stat().st_size} bytes instead of {expected['bytes']}"
            )
        elif _hash(path) != expected["xxh3_128"]:
            problems.append(f"{checkpoint.name}/{name}: its bytes changed after it was written")
    return problems


def load(checkpoint: Path, rectangles: Sequence[Rectangle]) -> dict[str, Any]:
    """Fills the rectangles, each rank by itself, in whatever layout; gives the progress that was saved.

    Raises `RunFailedError` for a checkpoint of another model, or one that cannot be read."""
    reader, planner = FileSystemReader(checkpoint), RectangleLoadPlanner(rectangles)
    check_same_model(reader.read_metadata(), rectangles)
    with _one_line(f"{checkpoint.name} cannot be read"):
        state_dict_loader.load({}, storage_reader=reader, planner=planner, no_dist=True)
    return planner.progress


def load_model(checkpoint: Path, prefix: str = "model.") -> dict[str, torch.Tensor]:
    """Every whole tensor whose name starts with ``prefix``, by the rest of its name."""
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    full = {
        name: torch.empty(kept.size, dtype=kept.properties.dtype)
        for name, kept in stored.items()
        if isinstance(kept, TensorStorageMetadata) and name.startswith(prefix)
    }
    load(checkpoint, [Rectangle(name, tuple(x.shape), (0,) * x.dim(), x) for name, x in full.items()])
    return {name.removeprefix(prefix): tensor for name, tensor in full.items()}
