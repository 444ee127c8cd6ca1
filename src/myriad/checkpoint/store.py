"""Ranks write and read a checkpoint together: tensors in torch.distributed.checkpoint's files, and what
`myriad.checkpoint.folder` says of when they count.
"""

import contextlib
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from myriad.checkpoint.folder import CheckpointFolder, commit
from myriad.checkpoint.planners import RectangleLoadPlanner, RectangleSavePlanner, check_same_model
from myriad.errors import RunFailedError
from myriad.model.rectangle import Rectangle

__all__ = ["load", "load_model", "save"]


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
        commit(partial, final, progress)
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
