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

from myriad.checkpoint.checkpoint_files import CheckpointWeights, constant_manifest, load, write_rank
from myriad.checkpoint.format.checkpoint_manifest import MANIFEST, CheckpointManifest, StoredFile
from myriad.checkpoint.format.dcp_archive import make_stored_shards
from myriad.checkpoint.format.dcp_metadata import METADATA, make_metadata
from myriad.checkpoint.format.stored_shard import StoredShard
from myriad.checkpoint.format.trainer_state import progress_shard
from myriad.checkpoint.storage.checkpoint_folder import Checkpoint, CheckpointFolder, open_checkpoint
from myriad.checkpoint.storage.staged_folder import locked_folder
from myriad.checkpoint.storage.storage_backends import LocalStorage
from myriad.checkpoint.storage.verified_files import put_and_check
from myriad.config import dump_toml
from myriad.errors import BadInputError, RunFailedError
from myriad.job import Job, parse_job
from myriad.model.boundary import Boundary
from myriad.model.definition import full_shape, shard_of
from myriad.model.gpt import GPT
from myriad.model.tensor_shard import TensorShard, shards_of_flat
from myriad.program.build import build_program
from myriad.program.partition import partition_layers
from myriad.train.autotune.layer_profile import parameters_per_layer
from myriad.train.checkpoint_tools.named_weights import job_of, open_weights

__all__ = ["cuts_of_ranks", "reshard", "reshard_checkpoint"]


def reshard_checkpoint(
    path: str, out: str, overrides: Sequence[str], show: Callable[[int, int], None]
) -> dict[str, Any]:
    """Write a checkpoint into ``out`` for the layout that the overrides set, and return a description.

    The source is the newest checkpoint of a run, or the one at ``path``. Raises `BadInputError`, with nothing
    written.
    """
    weights = open_weights(path, "PATH", every_byte=False)
    job = (
        job_of(open_checkpoint(weights.where), weights.run)
        if isinstance(weights, CheckpointWeights)
        else None
    )
    if job is None:
        raise BadInputError("PATH", path, "must be a run, or a checkpoint with its job.toml")
    job = parse_job(dump_toml(job), path, overrides)
    source = open_checkpoint(weights.where)
    manifest = source.manifest()
    target = CheckpointFolder(out).at_step(manifest.step)
    cuts = cuts_of_ranks(job, sorted(manifest.tensors))
    _refuse_dropped(path, manifest, cuts)
    reshard(source, target, cuts, job.layout.model_dump(mode="json"), show)
    return {"checkpoint": source.where, "out": target.where, "step": manifest.step, "ranks": len(cuts)}


_Cut = TensorShard
"""A shard of a tensor, without values (on the meta device)."""


def _refuse_dropped(path: str, manifest: CheckpointManifest, cuts: Sequence[Sequence[_Cut]]) -> None:
    """Refuse a checkpoint with tensors that no rank of its job's model keeps."""
    kept = {cut.name for own in cuts for cut in own}
    state = {name for name in manifest.tensors if name.startswith(("model.", "optimizer."))}
    if left := sorted(state - kept):
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise BadInputError("PATH", path, f"not the model of its job.toml, which has no {left[0]}{more}")


def cuts_of_ranks(job: Job, tensors: Sequence[str]) -> list[list[_Cut]]:
    """Return the parts of each rank of ``job.layout``: the shards of its stages' tensors.

    Tensor parallelism shards each tensor, and each data-parallel rank keeps an equal share of the shard.
    ``tensors`` are all names that are stored, with the prefix before the parameter's name
    (``optimizer.exp_avg.``). Raises `BadInputError` for a layout that has no such shards.
    """
    if job.comm.sync_every > 1:
        raise BadInputError(
            "comm.sync_every", job.comm.sync_every, "must be 1: replicas have states of their own"
        )
    if job.layout.partition == "profile":
        raise BadInputError(
            "layout.partition",
            "profile",
            "not possible offline, as it needs a measurement; choose another value",
        )
    layout, definition = job.layout, GPT(job.model, job.train.seed)
    costs = parameters_per_layer(definition) if layout.partition == "parameters" else None
    layers = partition_layers(layout.partition, layout.num_stages, definition.kinds, costs)
    program = build_program(
        layout, job.overlap, job.num_micro_batches, tied=bool(definition.tied), training=True, num_chunks=1
    )
    prefixes = _prefixes(tensors)
    ranks: list[list[_Cut]] = []
    for dp in range(layout.dp):
        for pp in range(layout.pp):
            own = [
                index
                for stage, rank in enumerate(program.stage_rank)
                if rank == pp
                for index in layers[stage]
            ]
            for tp in range(layout.tp):
                ranks.append(list(_cuts(definition, own, prefixes, (dp, layout.dp), (tp, layout.tp))))
    return ranks


def _prefixes(tensors: Sequence[str]) -> dict[str, list[str]]:
    """Return for each parameter the full names of its stored tensors."""
    found: dict[str, list[str]] = {}
    for name in tensors:
        kind, _, rest = name.partition(".")
        base = rest.partition(".")[2] if kind == "optimizer" else rest
        if kind in ("model", "optimizer"):
            found.setdefault(base, []).append(name)
    return found


def _cuts(
    definition: GPT,
    layers: Sequence[int],
    names: dict[str, list[str]],
    dp: tuple[int, int],
    tp: tuple[int, int],
) -> Iterator[_Cut]:
    """Yield the parts of one rank. ``dp`` and ``tp`` are the rank's index along the axis, and the axis's
    size."""
    for index in layers:
        with torch.device("meta"):
            layer = definition.build(index, Boundary())
        for path, parameter in layer.named_parameters():
            base = f"{definition.names[index]}.{path}"
            cut = shard_of(definition, base)
            if base in definition.tied or (cut is None and tp[0]):
                continue
            local = list(full_shape(definition, base, parameter.shape))
            if cut is not None:
                local[cut.dim] = cut.local_size(local[cut.dim], tp[1])
            size = torch.Size(local).numel()
            start, stop = (size * place // dp[1] for place in (dp[0], dp[0] + 1))
            flat: Any = torch.empty(stop - start, device="meta")
            for part in shards_of_flat(base, local, start, flat, cut, *tp, owned_only=True):
                for name in names.get(base, ()):
                    yield replace(part, name=name)


_WRITER = "writer"
"""File in the target that identifies the process that writes it."""


def reshard(
    source: Checkpoint,
    target: Checkpoint,
    cuts_of_rank: Sequence[Sequence[_Cut]],
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
    cuts_of_rank: Sequence[Sequence[_Cut]],
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


def _load_parts(where: Path | str, manifest: CheckpointManifest, cuts: Sequence[_Cut]) -> list[TensorShard]:
    parts = [
        replace(
            cut,
            values=torch.empty(cut.values.shape, dtype=getattr(torch, manifest.tensors[cut.name]["dtype"])),
        )
        for cut in cuts
    ]
    load(where, parts)
    return parts
