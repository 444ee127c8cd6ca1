"""Compute which parts of a run's state each rank of another layout would keep."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from myriad.checkpoint.checkpoint_files import CheckpointWeights
from myriad.checkpoint.format.checkpoint_manifest import CheckpointManifest
from myriad.checkpoint.offline_reshard import Cut, reshard
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder, open_checkpoint
from myriad.config import dump_toml
from myriad.errors import BadInputError
from myriad.job import Job, parse_job
from myriad.model.boundary import Boundary
from myriad.model.definition import shard_of
from myriad.model.gpt import GPT
from myriad.model.tensor_shard import shards_of_flat
from myriad.program.build import build_program
from myriad.program.partition import partition_layers
from myriad.train.autotune.layer_profile import parameters_per_layer
from myriad.train.checkpoint_tools.named_weights import job_of, open_weights

__all__ = ["cuts_of_ranks", "reshard_checkpoint"]


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


def _refuse_dropped(path: str, manifest: CheckpointManifest, cuts: Sequence[Sequence[Cut]]) -> None:
    """Refuse a checkpoint with tensors that no rank of its job's model keeps."""
    kept = {name for own in cuts for name, _, _ in own}
    state = {name for name in manifest.tensors if name.startswith(("model.", "optimizer."))}
    if left := sorted(state - kept):
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise BadInputError("PATH", path, f"not the model of its job.toml, which has no {left[0]}{more}")


def cuts_of_ranks(job: Job, tensors: Sequence[str]) -> list[list[Cut]]:
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
    ranks: list[list[Cut]] = []
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
) -> Iterator[Cut]:
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
            local = list(parameter.shape)
            if cut is not None:
                local[cut.dim] //= tp[1]
            size = torch.Size(local).numel()
            start, stop = (size * place // dp[1] for place in (dp[0], dp[0] + 1))
            flat: Any = torch.empty(stop - start, device="meta")
            for part in shards_of_flat(base, local, start, flat, cut, *tp):
                for name in names.get(base, ()):
                    yield name, part.offsets, tuple(part.values.shape)
