"""One checkpoint written and read without a keeper: by tools, and by ranks that wait for it.

What a run does while it trains is `myriad.checkpoint.session`; the files are the same.
"""

import platform
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import myriad
from myriad.checkpoint.dcp import make_pieces
from myriad.checkpoint.folder import Checkpoint, CheckpointFolder, open_checkpoint
from myriad.checkpoint.load import Candidate, LoadWorld, load_candidate
from myriad.checkpoint.manifest import FileRecord, Manifest
from myriad.checkpoint.piece import Piece, files_of_rank
from myriad.checkpoint.progress import progress_rectangle
from myriad.checkpoint.sources import parts_of_manifest
from myriad.checkpoint.storing import PROGRESS
from myriad.checkpoint.writing import put_and_check, write_and_check
from myriad.errors import RunFailedError
from myriad.model.rectangle import Rectangle

__all__ = ["constant_manifest", "load", "load_model", "save", "write_rank"]


def constant_manifest(pieces_of_rank: Sequence[Sequence[Piece]], layout: Mapping[str, Any]) -> dict[str, Any]:
    """What a manifest says that does not change from save to save."""
    tensors = {
        piece.tensor: {"shape": list(piece.full_shape), "dtype": piece.dtype}
        for pieces in pieces_of_rank
        for piece in pieces
    }
    versions = {"myriad": myriad.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return {"layout": dict(layout), "versions": versions, "tensors": tensors}


def save(
    folder: CheckpointFolder,
    step: int,
    rectangles: Sequence[Rectangle],
    progress: dict[str, Any],
    group: dist.ProcessGroup | None = None,
    layout: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a checkpoint from live memory; every rank of the world calls it and waits until it is committed.
    Gives its folder.

    ``group``: of all ranks, on the host; off: the world itself, or this process alone. Raises
    `RunFailedError` on every rank when it cannot be written."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = LoadWorld(rank, group=group or (dist.group.WORLD if dist.is_initialized() else None))
    own = [*rectangles, progress_rectangle(progress)] if rank == 0 else list(rectangles)
    pieces = make_pieces(own)
    checkpoint = folder.at_step(step)
    world.gather(None)  # a rank may still be reading what this replaces
    _together(world, step, lambda: rank == 0 and folder.begin(step))
    records = _together(world, step, lambda: write_rank(checkpoint, rank, own, pieces))
    pieces_of_rank = world.gather(pieces)
    commit = partial(_commit, checkpoint, step, records, pieces_of_rank, progress, layout or {})
    _together(world, step, commit if rank == 0 else lambda: None)
    return folder.of_step(step)


def _together(world: LoadWorld, step: int, do: Callable[[], Any]) -> list[Any]:
    """Everybody's result, or everybody's error."""
    result, problem = None, None
    try:
        result = do()
    except Exception as error:
        problem = f"step-{step} cannot be written: {error or type(error).__name__} (rank {world.rank})"
    found = world.gather((result, problem))
    if problems := [told for _, told in found if told]:
        raise RunFailedError(problems[0])
    return [given for given, _ in found]


def write_rank(
    checkpoint: Checkpoint, rank: int, rectangles: Sequence[Rectangle], pieces: Sequence[Piece]
) -> dict[str, FileRecord]:
    """The files of one rank from its live memory, each read back. Raises ``OSError``."""
    data = {id(piece): _bytes_of(part.values) for part, piece in zip(rectangles, pieces, strict=True)}
    records = {}
    for name, own in files_of_rank(rank, pieces):
        path = checkpoint.at(name)
        records[name] = write_and_check(checkpoint.storage, path, own, lambda piece: data[id(piece)])
    return records


def _bytes_of(values: torch.Tensor) -> memoryview:
    """Of a tensor, in C order."""
    flat = values.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return flat.numpy().data


def _commit(
    checkpoint: Checkpoint,
    step: int,
    records: Sequence[dict[str, FileRecord]],
    pieces_of_rank: Sequence[Sequence[Piece]],
    progress: Mapping[str, Any],
    layout: Mapping[str, Any],
) -> None:
    from myriad.checkpoint.dcp_metadata import METADATA, make_metadata  # here: readers do not wait for it

    files = {name: record for own in records for name, record in own.items()}
    metadata = make_metadata(pieces_of_rank)
    files[METADATA] = put_and_check(checkpoint.storage, checkpoint.at(METADATA), metadata)
    constant = constant_manifest(pieces_of_rank, layout)
    data = progress.get("data", {})
    checkpoint.commit(Manifest(step, 0, 0.0, dict(progress), data=data, files=files, **constant))


def _manifest_of(checkpoint: Checkpoint) -> Manifest:
    try:
        return checkpoint.manifest()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFailedError(f"{checkpoint.where}: no readable manifest ({error})") from None


def load(where: Path | str, rectangles: Sequence[Rectangle]) -> dict[str, Any]:
    """Fills the rectangles, each rank by itself, in whatever layout; gives the progress that was saved.

    Raises `RunFailedError` for a checkpoint of another model, or when a byte that is needed is not the one
    that was written."""
    checkpoint = open_checkpoint(where)
    manifest = _manifest_of(checkpoint)
    candidate = Candidate(manifest.step, parts_of_manifest(manifest), checkpoint)
    verdict = load_candidate(candidate, rectangles, LoadWorld())
    if not verdict.good:
        raise RunFailedError(f"{checkpoint.where} cannot be read: {'; '.join(verdict.problems)}")
    return dict(manifest.progress)


def load_model(where: Path | str, prefix: str = "model.") -> dict[str, torch.Tensor]:
    """Every whole tensor whose name starts with ``prefix``, by the rest of its name."""
    tensors = _manifest_of(open_checkpoint(where)).tensors
    full = {
        name: torch.empty(tensor["shape"], dtype=getattr(torch, tensor["dtype"]))
        for name, tensor in tensors.items()
        if name.startswith(prefix) and (prefix or not _is_not_state(name))
    }
    load(where, [Rectangle(name, tuple(x.shape), (0,) * x.dim(), x) for name, x in full.items()])
    return {name.removeprefix(prefix): tensor for name, tensor in full.items()}


def _is_not_state(name: str) -> bool:
    return name == PROGRESS or name.startswith("random.")
