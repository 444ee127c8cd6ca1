"""The model pieces of one rank: layers built, parameters laid into chunks, initial values drawn if wanted.

A rank owns the layers of its stages (one per virtual stage). Each stage's parameters are one chunk;
parameters that the first and the last stage share (tied embeddings) are a chunk of their own, laid out alike
on both, so that the two copies are updated by the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from myriad.comm.groups import Groups
from myriad.model.boundary import Boundary
from myriad.model.definition import Context, Definition, shard_of
from myriad.parallel.chunk import Chunk, Entry, Sharing

__all__ = ["Pieces", "Stage", "build_pieces", "draw_initial", "shapes_between_stages"]


@dataclass
class Stage:
    """One model piece: consecutive layers, and the chunks that hold their parameters."""

    index: int
    layers: dict[int, nn.Module]
    """By index in the model's list."""
    chunks: list[Chunk]


@dataclass
class Pieces:
    """What one rank holds of the model."""

    stages: dict[int, Stage]
    chunks: list[Chunk]
    """Every chunk once, in the order of the table of parameters."""
    tied: Chunk | None
    tied_stages: tuple[int, ...]
    """Stages of this rank that hold the tied chunk, ascending."""
    tied_peer: tuple[int, ...]
    """Ranks (this one among them) that hold the tied chunk for another stage; alone when there is nobody to
    sum with."""
    counts_tied: bool
    """This rank is the one that counts the tied parameters in the global norm and saves them."""


def build_pieces(
    definition: Definition,
    layers_of_stage: Sequence[range],
    stage_rank: Sequence[int],
    groups: Groups,
    boundary: Boundary,
    sharing: Sharing,
    dtype: torch.dtype,
    device: torch.device,
) -> Pieces:
    """Build this rank's layers on the meta device and give them memory, which has no values yet."""
    mine = [stage for stage, rank in enumerate(stage_rank) if rank == groups.grid.index("pp")]
    layers: dict[int, nn.Module] = {}
    with torch.device("meta"):
        for stage in mine:
            layers |= {index: definition.build(index, boundary) for index in layers_of_stage[stage]}
    entries = {index: _entries(definition, index, layer) for index, layer in layers.items()}
    tied_entries = _merge_tied(definition, entries)
    chunks: list[Chunk] = []
    stages = {}

    def add(group_of_entries: list[Entry]) -> Chunk:
        first_row = sum(len(chunk.entries) for chunk in chunks)
        chunks.append(Chunk(group_of_entries, sharing, dtype, device, first_row))
        return chunks[-1]

    for stage in mine:
        own = [entry for index in layers_of_stage[stage] for entry in entries[index]]
        stages[stage] = Stage(
            stage, {i: layers[i] for i in layers_of_stage[stage]}, [add(own)] if own else []
        )
    tied = add(tied_entries) if tied_entries else None
    holders = _tied_stages(definition, layers_of_stage)
    tied_stages = tuple(sorted(holders & set(mine)))
    for stage in tied_stages:
        if tied is not None:
            stages[stage].chunks.append(tied)
    pieces = Pieces(
        stages,
        chunks,
        tied,
        tied_stages,
        _tied_peers(groups, stage_rank, holders),
        tied is not None and min(holders) in mine,
    )
    _refuse_buffers(layers)
    return pieces


def _entries(definition: Definition, index: int, layer: nn.Module) -> list[Entry]:
    prefix = definition.names[index]
    found = []
    for path, parameter in layer.named_parameters():
        owner, _, attribute = path.rpartition(".")
        name = f"{prefix}.{path}"
        cut = shard_of(definition, name)
        partial = definition.sequence_parallel and cut is None
        found.append(Entry(name, ((layer.get_submodule(owner), attribute),), parameter.shape, cut, partial))
    return found


def _merge_tied(definition: Definition, entries: dict[int, list[Entry]]) -> list[Entry]:
    """Takes tied parameters out of ``entries``; one entry for each, with every home that it has on this
    rank."""
    targets = set(definition.tied.values())
    merged: dict[str, Entry] = {}
    for index, found in entries.items():
        for entry in found:
            name = definition.tied.get(entry.name, entry.name)
            if name in targets:
                homes = (merged[name].homes if name in merged else ()) + entry.homes
                merged[name] = replace(entry, name=name, homes=homes)
        entries[index] = [
            entry for entry in found if definition.tied.get(entry.name, entry.name) not in targets
        ]
    return list(merged.values())


def _tied_stages(definition: Definition, layers_of_stage: Sequence[range]) -> set[int]:
    names = {*definition.tied.keys(), *definition.tied.values()}
    layers = {
        index
        for index, layer in enumerate(definition.names)
        if any(name.startswith(f"{layer}.") for name in names)
    }
    return {stage for stage, own in enumerate(layers_of_stage) if layers & set(own)}


def _tied_peers(groups: Groups, stage_rank: Sequence[int], holders: set[int]) -> tuple[int, ...]:
    pipeline = groups.grid.peers("pp")
    return tuple(sorted({pipeline[stage_rank[stage]] for stage in holders}))


def draw_initial(definition: Definition, pieces: Pieces, boundary: Boundary) -> None:
    """Set this rank's parameters to the values of the definition's seed. Tensors of which this rank's slices
    hold nothing are not drawn."""
    where = {
        entry.name: (chunk, row)
        for chunk in pieces.chunks
        for row, entry in enumerate(chunk.entries)
        if chunk.holds(row)
    }
    for index, prefix in enumerate(definition.names):
        own = {name.removeprefix(f"{prefix}.") for name in where if name.startswith(f"{prefix}.")}
        if not own:
            continue
        for path, full in definition.initial(index, own).items():
            name = f"{prefix}.{path}"
            shard = shard_of(definition, name)
            local = full if shard is None else shard.take(full, boundary.rank, boundary.size)
            chunk, row = where[name]
            chunk.load(row, local)
    for chunk in pieces.chunks:
        chunk.mark_stale()


def _refuse_buffers(layers: dict[int, nn.Module]) -> None:
    for layer in layers.values():
        for name, _ in layer.named_buffers():
            raise TypeError(f"buffer {name} of {type(layer).__name__}: layers keep state in parameters only")


def shapes_between_stages(
    definition: Definition,
    layers_of_stage: Sequence[range],
    boundary: Boundary,
    inputs: torch.Tensor,
    dtype: torch.dtype,
) -> list[tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of what each stage but the last sends on, found on the meta device: nothing runs.

    ``inputs``: one micro-batch as the first layer takes it.
    """
    found = []
    with torch.device("meta"), torch.no_grad():
        x = torch.empty_like(inputs, device="meta")
        for own in layers_of_stage[:-1]:
            for index in own:
                x = definition.build(index, boundary).to(dtype).eval()(x, Context())
            found.append((x.shape, x.dtype))
    return found
