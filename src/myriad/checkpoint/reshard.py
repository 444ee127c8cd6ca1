"""A checkpoint cut anew, without the ranks that it is for: one rank's share in memory at a time.

Any layout reads any checkpoint, so a run never needs this. It is for whoever wants few reads at the next
start, or other tools with one file for each of their ranks.
"""

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from myriad.checkpoint.dcp import make_pieces
from myriad.checkpoint.dcp_metadata import METADATA, make_metadata
from myriad.checkpoint.folder import Checkpoint
from myriad.checkpoint.manifest import MANIFEST, FileRecord, Manifest
from myriad.checkpoint.piece import Piece
from myriad.checkpoint.progress import progress_rectangle
from myriad.checkpoint.staging import alone_in
from myriad.checkpoint.storage import LocalStorage
from myriad.checkpoint.store import constant_manifest, load, write_rank
from myriad.checkpoint.writing import put_and_check
from myriad.errors import BadInputError, RunFailedError
from myriad.model.rectangle import Rectangle

__all__ = ["Cut", "reshard"]

Cut = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Name, offsets and shape of a part of a tensor."""
_WRITER = "writer"
"""File of the target, while it is written: which process writes it."""


def reshard(
    source: Checkpoint,
    target: Checkpoint,
    cuts_of_rank: Sequence[Sequence[Cut]],
    layout: Mapping[str, Any],
    show: Callable[[int, int], None],
) -> Manifest:
    """Writes ``target`` with one file for each rank's parts; every byte is verified as it is read and read
    back after it was written. ``show``: told the bytes done and all bytes. Raises `BadInputError` when the
    target is there already or another process writes it, `RunFailedError` when the source is not whole or the
    target cannot be written; then nothing of the target is left."""
    with _alone(target):
        try:
            if MANIFEST in target.storage.names(target.name):
                raise BadInputError("OUT", target.where, "must be new: a checkpoint of this step is there")
            token = _begin(target)
        except OSError as error:
            raise BadInputError("OUT", target.where, f"cannot be written: {error}") from None
        try:
            manifest = _write(source, target, cuts_of_rank, layout, show, token)
            _check_ours(target, token)
            target.commit(manifest)
            target.storage.remove(target.at(_WRITER))
        except BaseException as error:
            with contextlib.suppress(OSError):
                if _is_ours(target, token):
                    target.storage.remove(target.at(MANIFEST))
                    target.storage.remove(target.name)
            if isinstance(error, OSError):
                raise RunFailedError(
                    f"{target.where}: not written, and nothing is left of it: {error}"
                ) from None
            raise
    return manifest


@contextlib.contextmanager
def _alone(target: Checkpoint) -> Iterator[None]:
    """Other processes of this machine are refused where the target is local."""
    if not isinstance(target.storage, LocalStorage):
        yield
        return
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(alone_in(target.storage.root / target.name, target.where))
        except OSError as error:
            raise BadInputError("OUT", target.where, f"cannot be written: {error}") from None
        yield


def _begin(target: Checkpoint) -> bytes:
    """Remove what a killed process has left. Gives what `_WRITER` holds as long as no other process, which a
    lock may not reach, has begun the same checkpoint."""
    for name in target.storage.names(target.name):
        target.storage.remove(target.at(name))
    token = secrets.token_hex(16).encode()
    target.storage.put(target.at(_WRITER), token)
    return token


def _is_ours(target: Checkpoint, token: bytes) -> bool:
    try:
        return target.storage.read(target.at(_WRITER)) == token
    except (FileNotFoundError, NotADirectoryError):
        return False


def _check_ours(target: Checkpoint, token: bytes) -> None:
    if not _is_ours(target, token):
        raise RunFailedError(f"{target.where}: another process has begun to write it; this one ends")


def _write(
    source: Checkpoint,
    target: Checkpoint,
    cuts_of_rank: Sequence[Sequence[Cut]],
    layout: Mapping[str, Any],
    show: Callable[[int, int], None],
    token: bytes,
) -> Manifest:
    manifest = source.manifest()
    files: dict[str, FileRecord] = {}
    pieces_of_rank: list[Sequence[Piece]] = []
    for rank, cuts in enumerate(cuts_of_rank):
        parts = _load_parts(source.where, manifest, cuts)
        if rank == 0:
            parts.append(progress_rectangle(manifest.progress))
        pieces_of_rank.append(make_pieces(parts))
        _check_ours(target, token)
        files |= write_rank(target, rank, parts, pieces_of_rank[-1])
        show(sum(file.bytes for file in files.values()), manifest.num_bytes)
    plain = {METADATA: make_metadata(pieces_of_rank)}
    plain |= {name: source.storage.read(source.at(name)) for name in ("job.toml",) if name in manifest.files}
    for name, content in plain.items():
        files[name] = put_and_check(target.storage, target.at(name), content)
    return replace(manifest, files=files, **constant_manifest(pieces_of_rank, layout))


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
