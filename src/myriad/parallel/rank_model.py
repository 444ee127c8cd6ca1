"""The part of the model that one rank holds: builds its layers, lays their parameters into chunks and draws
initial values.

A rank owns the layers of its stages (one per virtual stage). Each stage's parameters are one chunk.
Parameters that the first and the last stage share (tied embeddings) are a separate chunk. It has the same
layout on both ranks, so that the two copies get bitwise equal updates.

The matrices of all layers but the first and the last may be multiplied in float8. The token embedding and the
output projection keep their precision, as in torchtitan's float8 training (its page docs/float8.md): rounding
hurts most there, and they are a small part of a large model."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from myriad.comm.comm_scheduler import CommScheduler
from myriad.comm.config import CommConfig
from myriad.comm.groups import Groups
from myriad.kernels.float8 import MULTIPLE, Float8, KeptForms
from myriad.kernels.gradient import sink_of
from myriad.model.boundary import Boundary
from myriad.model.definition import (
    Context,
    Definition,
    Shard,
    StatesShapes,
    is_expert,
    is_hidden_matrix,
    rate_of,
    shard_of,
    values_of_rank,
)
from myriad.parallel.chunk import Chunk, ChunkMemory, Sharing
from myriad.parallel.parameter_table import Entry
from myriad.parallel.transient_buffer import FixedMemory
from myriad.program.actions import Action
from myriad.program.config import OverlapConfig
from myriad.program.static_buffers import TIED, assign_buffers

__all__ = [
    "RankModel",
    "Stage",
    "build_rank_model",
    "draw_initial",
    "make_expert_sharing",
    "make_sharing",
    "mark_float8_weights",
    "shape_of_loss",
    "shapes_between_stages",
]


@dataclass
class Stage:
    """One model piece: consecutive layers, and the chunks that hold their parameters."""

    index: int
    layers: dict[int, nn.Module]
    """Layers by their index in the model's list."""
    chunks: list[Chunk]


@dataclass
class RankModel:
    """The part of the model that one rank holds."""

    stages: dict[int, Stage]
    chunks: list[Chunk]
    """Every chunk once, in the order of the parameter table."""
    tied: Chunk | None
    tied_stages: tuple[int, ...]
    """Stages of this rank that hold the tied chunk, ascending."""
    tied_peer: tuple[int, ...]
    """Ranks (this one included) that hold the tied chunk for another stage. Only this rank if no other one
    holds it."""
    counts_tied: bool
    """Whether this rank counts the tied parameters in the global norm and saves them."""


def make_sharing(
    groups: Groups,
    overlap: OverlapConfig,
    comm: CommConfig,
    device: torch.device,
    *,
    trains_alone: bool,
    has_gradients: bool,
    frees_grad_buffer: bool,
) -> Sharing:
    """Return how this rank shares its chunks, and open the communication. A collective call of all ranks."""
    grid, zero = groups.grid, groups.grid.layout.zero
    num_groups = grid.layout.num_shard_groups
    axis, copies = ("dp_shard" if zero else "dp_cp"), "dp_replicate"
    if trains_alone:  # with ZeRO 0: a job's rule
        axis = copies = "cp"
    scheduler = CommScheduler(groups, axis, overlap, comm, device)
    across = None
    if grid.layout.reduces_across and has_gradients:
        across = CommScheduler(groups, "dp_replicate", overlap, comm, device)
    return Sharing(
        scheduler,
        grid.index(axis),
        grid.size(axis),
        zero,
        exact=comm.compress_parameters is None,
        has_gradients=has_gradients,
        frees_grad_buffer=frees_grad_buffer,
        across=across,
        num_groups=num_groups if zero else 1,
        copy=grid.index(copies),
        num_copies=grid.size(copies),
    )


def make_expert_sharing(
    others: Sharing,
    groups: Groups,
    overlap: OverlapConfig,
    comm: CommConfig,
    device: torch.device,
    *,
    trains_alone: bool,
) -> Sharing:
    """Return how this rank shares the chunks of its experts with the ranks that hold the same ones, and open
    the communication. A collective call of all ranks. ``others``: how it shares the other chunks."""
    if trains_alone:  # the tensor-parallel ranks of a replica hold all experts: a job's rule
        return replace(others, of_experts=True)
    grid, zero = groups.grid, others.zero
    axis = "expert_shard" if zero else "expert_dp"
    index, size = grid.index(axis), grid.size(axis)
    across = others.across
    if across is not None:
        purpose = "experts' groups"
        across = CommScheduler(groups, "dp_replicate", overlap, comm, device, purpose=purpose)
    return replace(
        others,
        scheduler=CommScheduler(
            groups, axis if size > 1 else None, overlap, comm, device, purpose="experts' replicas"
        ),
        group_rank=index,
        group_size=size,
        across=across,
        copy=others.copy if zero else index,
        num_copies=others.num_copies if zero else size,
        of_experts=True,
    )


def build_rank_model(
    definition: Definition,
    layers_of_stage: Sequence[range],
    stage_rank: Sequence[int],
    groups: Groups,
    boundary: Boundary,
    sharing: Sharing,
    expert_sharing: Sharing | None,
    dtype: torch.dtype,
    device: torch.device,
    static_runs: Sequence[Sequence[Action]] = (),
    *,
    orthogonalizes: bool = False,
) -> RankModel:
    """Build this rank's layers on the meta device and allocate their memory, without values.
    ``expert_sharing``: how experts are shared; ``None``: as other parameters. ``static_runs``:
    action lists of this rank for which temporary memory must be at fixed addresses; empty: addresses may
    change. ``orthogonalizes``: the optimizer orthogonalizes the updates of matrices between hidden values."""
    mine = [stage for stage, rank in enumerate(stage_rank) if rank == groups.grid.index("pp")]
    layers: dict[int, nn.Module] = {}
    with torch.device("meta"):
        for stage in mine:
            layers |= {index: definition.build(index, boundary) for index in layers_of_stage[stage]}
    entries = {
        index: _entries(definition, index, layer, boundary, orthogonalizes) for index, layer in layers.items()
    }
    tied_entries = _merge_tied(definition, entries)
    chunks: list[Chunk] = []
    stages = {}

    holders = _tied_stages(definition, layers_of_stage)
    places = _chunk_memory(static_runs, mine, holders if tied_entries else set(), sharing.zero)

    def add(group_of_entries: list[Entry], key: int, how: Sharing = sharing) -> Chunk:
        first_row = sum(len(chunk.rows) for chunk in chunks)
        chunks.append(Chunk(group_of_entries, how, dtype, device, first_row, places.get(key)))
        return chunks[-1]

    for stage in mine:
        own = [entry for index in layers_of_stage[stage] for entry in entries[index]]
        routed = [entry for entry in own if expert_sharing and is_expert(definition, entry.name)]
        rest = [entry for entry in own if entry not in routed]
        of_stage = [add(rest, stage)] if rest else []
        if expert_sharing is not None and routed:
            of_stage.append(add(routed, stage, expert_sharing))
        stages[stage] = Stage(stage, {i: layers[i] for i in layers_of_stage[stage]}, of_stage)
    tied = add(tied_entries, TIED) if tied_entries else None
    tied_stages = tuple(sorted(holders & set(mine)))
    for stage in tied_stages:
        if tied is not None:
            stages[stage].chunks.append(tied)
    model = RankModel(
        stages,
        chunks,
        tied,
        tied_stages,
        _tied_peers(groups, stage_rank, holders),
        tied is not None and min(holders) in mine,
    )
    _refuse_buffers(layers)
    return model


def _chunk_memory(
    runs: Sequence[Sequence[Action]], stages: Sequence[int], holders: set[int], zero: int
) -> dict[int, ChunkMemory]:
    """Return the fixed places of each chunk, by the chunk's key."""
    if not runs:
        return {}
    chunks_of = {stage: [stage, TIED] if stage in holders else [stage] for stage in stages}
    places = assign_buffers(runs, chunks_of, zero)
    values: defaultdict[int, FixedMemory] = defaultdict(FixedMemory)
    grad_buffers: defaultdict[int, FixedMemory] = defaultdict(FixedMemory)
    return {
        key: ChunkMemory(
            values[places.values[key]] if key in places.values else None,
            grad_buffers[places.grad_buffers[key]] if key in places.grad_buffers else None,
        )
        for key in (*stages, TIED)
    }


def _entries(
    definition: Definition, index: int, layer: nn.Module, boundary: Boundary, orthogonalizes: bool
) -> list[Entry]:
    prefix = definition.names[index]
    found = []
    for path, parameter in layer.named_parameters():
        owner, _, attribute = path.rpartition(".")
        name = f"{prefix}.{path}"
        cut = shard_of(definition, name)
        rate = rate_of(definition, name, parameter.shape)
        sharing = boundary.of_width if is_expert(definition, name) else boundary
        rank, size = sharing.rank, sharing.size
        if cut is None and size < boundary.size:  # so many consecutive ranks hold copies of it
            cut = Shard(0, parts=parameter.shape[:1], heads=(1,))
        partial = definition.sequence_parallel and cut is None
        spans = () if cut is None else cut.spans_of_shard(parameter.shape[cut.dim], rank, size)
        home = layer.get_submodule(owner), attribute
        kind = orthogonalizes and is_hidden_matrix(definition, index, name, parameter.shape)
        found.append(Entry(name, (home,), parameter.shape, cut, partial, rank, size, rate, spans, kind))
    return found


def _merge_tied(definition: Definition, entries: dict[int, list[Entry]]) -> list[Entry]:
    """Remove tied parameters from ``entries``. Return one entry for each, with all its homes on this rank."""
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


def draw_initial(definition: Definition, model: RankModel, names: Collection[str] | None = None) -> None:
    """Set this rank's parameters, or those of ``names``, to the values of the definition's seed. Tensors with
    no part in this rank's slices are not drawn."""
    where = {
        entry.name: (chunk, position)
        for chunk in model.chunks
        for position, entry in enumerate(chunk.entries)
        if chunk.holds(position) and (names is None or entry.name in names)
    }
    for index, prefix in enumerate(definition.names):
        own = {name.removeprefix(f"{prefix}.") for name in where if name.startswith(f"{prefix}.")}
        if not own:
            continue
        for path, full in definition.initial(index, own).items():
            name = f"{prefix}.{path}"
            chunk, position = where[name]
            entry = chunk.entries[position]
            chunk.load(position, values_of_rank(definition, name, full, entry.rank, entry.size))
    for chunk in model.chunks:
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
    """Return the shape and dtype of the output of each stage but the last, as the model states them, or found
    on the meta device: no layer runs.

    ``inputs``: one micro-batch as the first layer takes it.
    """
    ends = layers_of_stage[:-1]
    if isinstance(definition, StatesShapes):
        return [(definition.output_shape(own.stop - 1, inputs.shape, boundary), dtype) for own in ends]
    found = []
    with torch.device("meta"), torch.no_grad():
        x = torch.empty_like(inputs, device="meta")
        for own in ends:
            for index in own:
                x = definition.build(index, boundary).to(dtype).eval()(x, Context())
            found.append((x.shape, x.dtype))
    return found


def shape_of_loss(definition: Definition, boundary: Boundary, inputs: torch.Tensor) -> torch.Size:
    """Return the shape of the last layer's output: a scalar, unless the model states otherwise."""
    if not isinstance(definition, StatesShapes):
        return torch.Size()
    return definition.output_shape(len(definition.names) - 1, inputs.shape, boundary)


def mark_float8_weights(model: RankModel, num_layers: int, float8: Float8, *, keeps: bool = False) -> int:
    """Mark the float8 weights of this rank and return their number. ``keeps``: convert each weight to float8
    once a step, not once per micro-batch."""
    found = 0
    for stage in model.stages.values():
        for index, layer in stage.layers.items():
            if not 0 < index < num_layers - 1:
                continue
            for weight in layer.parameters():
                sink = sink_of(weight)
                if weight.ndim == 2 and sink is not None and all(n % MULTIPLE == 0 for n in weight.shape):
                    sink.float8 = float8
                    sink.forms = KeptForms() if keeps else None
                    found += 1
    return found
