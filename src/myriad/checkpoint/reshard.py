"""A checkpoint cut anew, without the ranks that it is for: one rank's share in memory at a time.

Any layout reads any checkpoint, so a run never needs this. It is for whoever wants few reads at the next
start, or other tools with one file for each of their ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from myriad.checkpoint.dcp import make_pieces
from myriad.checkpoint.dcp_metadata import METADATA, make_metadata
from myriad.checkpoint.folder import Checkpoint
from myriad.checkpoint.manifest import FileRecord, Manifest
from myriad.checkpoint.piece import Piece
from myriad.checkpoint.progress import progress_rectangle
from myriad.checkpoint.store import constant_manifest, load, write_rank
from myriad.checkpoint.writing import put_and_check
from myriad.errors import BadInputError
from myriad.model.rectangle import Rectangle

__all__ = ["Cut", "reshard"]

Cut = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Name, offsets and shape of a part of a tensor."""


def reshard(
    source: Checkpoint,
    target: Checkpoint,
    cuts_of_rank: Sequence[Sequence[Cut]],
    layout: Mapping[str, Any],
    show: Callable[[int, int], None],
) -> Manifest:
    """Writes ``target`` with one file for each rank's parts; every byte is verified as it is read and read
    back after it was written. ``show``: told the bytes done and all bytes. Raises `BadInputError` when the
    target is there already, `RunFailedError` when the source is not whole, ``OSError`` when the target cannot
    be written."""
    if target.storage.names(target.name):
        raise BadInputError("OUT", target.where, "must be new: a checkpoint of this step is there")
    manifest = source.manifest()
    files: dict[str, FileRecord] = {}
    pieces_of_rank: list[Sequence[Piece]] = []
    for rank, cuts in enumerate(cuts_of_rank):
        parts = _load_parts(source.where, manifest, cuts)
        if rank == 0:
            parts.append(progress_rectangle(manifest.progress))
        pieces_of_rank.append(make_pieces(parts))
        files |= write_rank(target, rank, parts, pieces_of_rank[-1])
        show(sum(file.bytes for file in files.values()), manifest.num_bytes)
    plain = {METADATA: make_metadata(pieces_of_rank)}
    plain |= {name: source.storage.read(source.at(name)) for name in ("job.toml",) if name in manifest.files}
    for name, content in plain.items():
        files[name] = put_and_check(target.storage, target.at(name), content)
    made = replace(manifest, files=files, **constant_manifest(pieces_of_rank, layout))
    target.commit(made)
    return made


def _load_parts(where: Path | str, manifest: Manifest, cuts: Sequence[Cut]) -> list[Rectangle]:
    parts = [
        Rectangle(
            name,
            manifest.shapes[name],
            offsets,
            torch.empty(shape, dtype=getattr(torch, manifest.tensors[name]["dtype"])),
        )
        for name, offsets, shape in cuts
    ]
    load(where, parts)
    return parts
