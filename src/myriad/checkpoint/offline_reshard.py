"""Reshard a checkpoint offline, holding one target rank's shards in memory at a time.

Every layout can read every checkpoint, so no run requires this. It reduces the number of reads at the next
start, and serves other tools that need one file per rank.
"""

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from myriad.checkpoint.checkpoint_files import constant_manifest, load, write_rank
from myriad.checkpoint.format.checkpoint_manifest import MANIFEST, CheckpointManifest, StoredFile
from myriad.checkpoint.format.dcp_archive import make_stored_shards
from myriad.checkpoint.format.dcp_metadata import METADATA, make_metadata
from myriad.checkpoint.format.stored_shard import StoredShard
from myriad.checkpoint.format.trainer_state import progress_shard
from myriad.checkpoint.storage.checkpoint_folder import Checkpoint
from myriad.checkpoint.storage.staged_folder import locked_folder
from myriad.checkpoint.storage.storage_backends import LocalStorage
from myriad.checkpoint.storage.verified_files import put_and_check
from myriad.errors import BadInputError, RunFailedError
from myriad.model.tensor_shard import TensorShard

__all__ = ["Cut", "reshard"]

Cut = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Name, offsets and shape of a shard of a tensor."""
_WRITER = "writer"
"""File in the target that identifies the process that writes it."""


def reshard(
    source: Checkpoint,
    target: Checkpoint,
    cuts_of_rank: Sequence[Sequence[Cut]],
    layout: Mapping[str, Any],
    show: Callable[[int, int], None],
) -> CheckpointManifest:
    """Write ``target`` with one file for each rank's shards, verify every byte read and written.

    ``show(bytes_done, bytes_total)`` reports progress. Raises `BadInputError` if the target exists or another
    process writes it, and `RunFailedError` if the source is incomplete or the target cannot be written; then
    nothing of the target is left."""
    with _alone(target):
        try:
            if MANIFEST in target.storage.names(target.name):
                raise BadInputError("OUT", target.where, "must not exist: it has a checkpoint of this step")
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
                    f"{target.where}: not written; partial files were removed: {error}"
                ) from None
            raise
    return manifest


@contextlib.contextmanager
def _alone(target: Checkpoint) -> Iterator[None]:
    """Lock a local target against other processes of this machine."""
    if not isinstance(target.storage, LocalStorage):
        yield
        return
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked_folder(target.storage.root / target.name, target.where))
        except (OSError, ValueError) as error:
            raise BadInputError("OUT", target.where, f"cannot be written: {error}") from None
        yield


def _begin(target: Checkpoint) -> bytes:
    """Remove the files of a killed process, and return the content of `_WRITER`.

    If `_WRITER` changes later, another process, which the lock may not reach, writes the same target."""
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
        raise RunFailedError(f"{target.where}: another process is writing it")


def _write(
    source: Checkpoint,
    target: Checkpoint,
    cuts_of_rank: Sequence[Sequence[Cut]],
    layout: Mapping[str, Any],
    show: Callable[[int, int], None],
    token: bytes,
) -> CheckpointManifest:
    manifest = source.manifest()
    files: dict[str, StoredFile] = {}
    shards_of_rank: list[Sequence[StoredShard]] = []
    for rank, cuts in enumerate(cuts_of_rank):
        parts = _load_parts(source.where, manifest, cuts)
        if rank == 0:
            parts.append(progress_shard(manifest.progress))
        shards_of_rank.append(make_stored_shards(parts))
        _check_ours(target, token)
        files |= write_rank(target, rank, parts, shards_of_rank[-1])
        show(sum(file.bytes for file in files.values()), manifest.num_bytes)
    plain = {METADATA: make_metadata(shards_of_rank)}
    plain |= {name: source.storage.read(source.at(name)) for name in ("job.toml",) if name in manifest.files}
    for name, content in plain.items():
        files[name] = put_and_check(target.storage, target.at(name), content)
    return replace(manifest, files=files, **constant_manifest(shards_of_rank, layout))


def _load_parts(where: Path | str, manifest: CheckpointManifest, cuts: Sequence[Cut]) -> list[TensorShard]:
    parts = [
        TensorShard(
            name,
            manifest.shapes[name],
            offsets,
            torch.empty(shape, dtype=getattr(torch, manifest.tensors[name]["dtype"])),
        )
        for name, offsets, shape in cuts
    ]
    load(where, parts)
    return parts
