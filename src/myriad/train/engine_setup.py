"""Build a rank's engine, with what is measured once for it.

    layout.partition = profile   seconds of each layer
    overlap.tensor               the fastest way of overlapping tensor parallelism
    comm.hierarchy = auto        the fastest hierarchy of data parallelism

Measurements are stored in the run folder, so that a resumed run is cut alike and adds in the same order.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from myriad.comm.config import CommConfig
from myriad.comm.groups import Groups
from myriad.comm.hierarchy import HIERARCHIES
from myriad.comm.hierarchy_choice import agree_on_hierarchy
from myriad.comm.layout import AXES, Layout
from myriad.comm.typed_collectives import broadcast_value
from myriad.job import Job
from myriad.job.job_steps import JobSteps
from myriad.kernels.documents import Documents
from myriad.model.definition import Definition
from myriad.model.gpt import GPT
from myriad.optim.loss_scale import LossScaler
from myriad.optim.precision import resolve_float8
from myriad.parallel.batch import Batch
from myriad.parallel.engine import Engine
from myriad.parallel.routing_tape import RoutingFolders
from myriad.program.partition import partition_layers
from myriad.train.autotune.layer_profile import parameters_per_layer, seconds_per_layer
from myriad.train.autotune.measurement_files import keep_measured, read_measured
from myriad.train.autotune.tp_overlap import TuningContext, choose_tp_overlap
from myriad.train.rank_context import RankContext

__all__ = ["build_engine", "choose_links", "sample_batch", "stage_layers"]

_PLACEMENT = {"node_size", "switch_size", "node_bandwidth", "network_bandwidth", "switch_bandwidth"}


def build_engine(rank: RankContext, append_event: Callable[..., None]) -> Engine:
    """Build this rank's part of the job's model with its optimizer. Initial values are not drawn.

    All ranks call it together. ``append_event(event, **fields)`` writes an event.
    """
    job, groups, device, dtype, folder = rank.job, rank.groups, rank.device, rank.dtype, rank.run.path
    definition = GPT(job.model, job.train.seed)
    sample = sample_batch(job, device)
    layers = stage_layers(definition, job.layout, groups, sample, dtype, folder / "profile.json")
    where = TuningContext(job, groups, device, dtype, rank.kernels)
    overlap = choose_tp_overlap(where, folder / "tensor_overlap.json", append_event)
    links = choose_links(job, groups, device, folder / "hierarchy.json")
    return Engine(
        definition,
        groups,
        layers,
        sample,
        job.shares[groups.grid.index("dp")],
        job.optimizer,
        seed=job.train.seed,
        dtype=dtype,
        device=device,
        recorder=rank.recorder,
        overlap=overlap,
        comm=links,
        kernels=rank.kernels,
        float8=resolve_float8(job.train.precision, rank.kernels),
        keeps_float8=job.train.keep_float8_weights,
        loss_scaler=LossScaler(job.loss_scale, job.targets) if dtype == torch.float16 else None,
        draws_initial=False,
        keeps_addresses=job.train.cuda_graphs and device.type == "cuda",
        telemetry=job.telemetry,
        most_micro_batches=JobSteps(job).most_micro_batches,
        routing=RoutingFolders(
            folder / "routing" if job.telemetry.routing else None,
            None if job.train.replay_routing is None else Path(job.train.replay_routing),
        ),
    )


def sample_batch(job: Job, device: torch.device) -> Batch:
    """Return a micro-batch of zeros with the shapes of the job."""
    tokens = torch.zeros((job.layout.micro_batch, job.model.sequence), dtype=torch.int64, device=device)
    documents = None
    if job.data.documents == "packed":
        positions = torch.arange(job.model.sequence, device=device).expand_as(tokens)
        documents = Documents(positions, [[job.model.sequence]] * len(tokens), job.document_sharing)
    return Batch(tokens, tokens, tokens[:, 0], documents)


def stage_layers(
    definition: Definition,
    layout: Layout,
    groups: Groups,
    sample: Batch,
    dtype: torch.dtype,
    kept: Path | None = None,
) -> Sequence[range]:
    """Return the layers of each stage. A profile is measured once and stored in ``kept``, so that a
    resumed run is partitioned alike."""
    costs: Sequence[float] | None = None
    if layout.partition == "parameters":
        costs = parameters_per_layer(definition)
    elif layout.partition == "profile":
        costs = _profile(definition, groups, sample, dtype, kept)
    return partition_layers(layout.partition, layout.num_stages, definition.kinds, costs)


def _profile(
    definition: Definition, groups: Groups, sample: Batch, dtype: torch.dtype, kept: Path | None
) -> Sequence[float]:
    """Read or measure the seconds of each layer on rank 0, and broadcast them."""
    costs: Sequence[float] = []
    if groups.grid.rank == 0:
        costs = read_measured(kept, partial(_are_costs, len(definition.names))) or []
        if not costs:
            costs = seconds_per_layer(definition, sample, dtype)
            keep_measured(kept, costs)
    return broadcast_value(costs, list[float], groups.world)


def choose_links(job: Job, groups: Groups, device: torch.device, kept: Path | None = None) -> CommConfig:
    """Return ``job.comm`` with the hierarchy chosen.

    Measurements are stored in ``kept`` for each layout and placement, so that a resumed run adds in the same
    order.
    """
    comm = job.comm
    if comm.hierarchy != "auto" or comm.sync_every > 1:
        return comm
    if job.layout.reduces_across:
        return comm.model_copy(update={"hierarchy": "flat"})  # the groups are levels already
    where = comm.model_dump(mode="json", include=_PLACEMENT) | {
        "layout": [getattr(job.layout, axis) for axis in AXES],
        "ranks_of_node": int(os.environ.get("LOCAL_WORLD_SIZE", str(job.layout.world))),
    }
    if comm.node_order is not None:
        where["node_order"] = list(comm.node_order)
    first = groups.grid.rank == 0
    choices = (read_measured(kept, _are_choices) or []) if first else []
    known = next((choice["hierarchy"] for choice in choices if choice["where"] == where), None)
    known = broadcast_value(known, Any, groups.world)
    if known is None:
        known, _ = agree_on_hierarchy(groups, "dp_cp", comm, device)
        if first:
            keep_measured(kept, [*choices, {"where": where, "hierarchy": known}])
    return comm.model_copy(update={"hierarchy": known})


def _are_costs(num_layers: int, value: Any) -> bool:
    """Return whether the value is a list of seconds, one for each layer."""
    if not isinstance(value, list) or len(value) != num_layers:
        return False
    return all(isinstance(one, float | int) and 0 <= one < float("inf") for one in value)


def _are_choices(value: Any) -> bool:
    """Return whether the value is a list of choices that `choose_links` stored."""
    return isinstance(value, list) and all(
        isinstance(one, dict) and "where" in one and one.get("hierarchy") in HIERARCHIES for one in value
    )
