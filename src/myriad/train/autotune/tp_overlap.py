"""Choose the kind of tensor-parallel communication: the job's, or the fastest for ``overlap.tensor =
"auto"``.

Measured are blocks of the job's own model, forward and backward, on its own ranks, links and shapes. The
kinds alternate; a kind's time is the slowest rank's. The choice decides the order in which gradients are
summed. It is therefore stored (RUN/tensor_overlap.json) for each layout and shape, and a resumed run sums
alike.
"""

import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from myriad.comm.collectives import all_reduce_max
from myriad.comm.groups import Groups
from myriad.comm.layout import AXES
from myriad.comm.typed_collectives import broadcast_value, gather_values
from myriad.errors import BadInputError
from myriad.job import Job
from myriad.kernels.config import Kernels
from myriad.kernels.gradient import GradientSink, apply_deferred, set_sink, sink_of
from myriad.model.definition import Context
from myriad.model.gpt import GPT
from myriad.model.interleave import run_layers
from myriad.optim.config import float8_scaling
from myriad.parallel.symmetric_memory import lacks_symmetric_memory
from myriad.parallel.tensor_parallel import GroupBoundary, make_boundary
from myriad.program.config import OverlapConfig, TensorKind
from myriad.telemetry.spans import Recorder
from myriad.train.autotune.measurement_files import keep_measured, read_measured

__all__ = ["TuningContext", "choose_tp_overlap", "measure_kinds"]

_LOG = logging.getLogger(__name__)
_ROUNDS, _MOST_BLOCKS = 3, 2
"""Iterations of each kind that count, after a warm-up iteration, and the largest number of blocks."""
_WORTH_IT = 0.97
"""Another kind replaces ``turns`` only if it takes less than this share of their time, because clocks are
noisy."""

Kind = TensorKind | None


@dataclass(frozen=True)
class TuningContext:
    """The ranks of a run, with their device, number type and kernels."""

    job: Job
    groups: Groups
    device: torch.device
    dtype: torch.dtype
    kernels: Kernels


def choose_tp_overlap(where: TuningContext, kept: Path | None, report: Callable[..., None]) -> OverlapConfig:
    """Return ``job.overlap`` with the kind chosen.

    Measurements are stored in ``kept`` and passed to ``report`` as an event. Raises `BadInputError` on every
    rank alike if the job asks for slices and this device cannot use them.
    """
    job, overlap, device = where.job, where.job.overlap, where.device
    if job.layout.tp == 1 or overlap.tensor not in ("auto", "slices"):
        return overlap
    lacks = lacks_symmetric_memory(device, where.dtype, job.layout.tp) if device.type == "cuda" else ""
    lacks = next(filter(None, gather_values(lacks, str, where.groups.world)), "")
    if overlap.tensor == "slices":
        if lacks:
            raise BadInputError("overlap.tensor", "slices", f"turns, auto or off here: {lacks}")
        return overlap
    if not lacks and float8_scaling(job.train.precision) is not None:
        lacks = f"train.precision = {job.train.precision} has no products in slices"
    kinds: list[Kind] = ["turns", None] if lacks else ["turns", "slices", None]
    shape = _shape(where, kinds)
    first = where.groups.grid.rank == 0
    choices = (read_measured(kept, _are_choices) or []) if first else []
    known = next((one for one in choices if one["where"] == shape), None)
    known = broadcast_value(known, dict[str, Any] | None, where.groups.world)
    if known is None:
        seconds = measure_kinds(where, kinds)
        known = {"where": shape, "tensor": _name(_quickest(seconds)), "seconds": _named(seconds)}
        if first:
            keep_measured(kept, [*choices, known])
        problem = f"no slices: {lacks}" if lacks else None
        report("tensor_overlap", tensor=known["tensor"], seconds=known["seconds"], problem=problem)
    chosen = None if known["tensor"] == "off" else known["tensor"]
    return overlap.model_copy(update={"tensor": chosen})


def _shape(where: TuningContext, kinds: Sequence[Kind]) -> dict[str, Any]:
    """Return the conditions for which a choice holds."""
    job = where.job
    return {
        "layout": [getattr(job.layout, axis) for axis in AXES],
        "micro_batch": job.layout.micro_batch,
        "recompute": job.layout.recompute,
        "chunks": job.overlap.tensor_chunks,
        "message": job.overlap.tensor_message,
        "dtype": str(where.dtype).removeprefix("torch."),
        "device": where.device.type,
        "kinds": [_name(kind) for kind in kinds],
    }


def _quickest(seconds: dict[Kind, float]) -> Kind:
    best = min(seconds, key=lambda kind: seconds[kind])
    return best if seconds[best] < _WORTH_IT * seconds["turns"] else "turns"


def measure_kinds(where: TuningContext, kinds: Sequence[Kind]) -> dict[Kind, float]:
    """Return the seconds of a few blocks of one micro-batch, forward and backward, with each kind.

    A value is the median over iterations of the slowest rank's time. It is infinite if any rank's GPU refuses
    the kind's operators. The result is the same on every rank.
    """
    groups, device, overlap = where.groups, where.device, where.job.overlap
    iterations: dict[Kind, Callable[[], None]] = {}
    blocks: list[nn.Module] = []
    for kind in kinds:
        own = overlap.model_copy(update={"tensor": kind})
        boundary = make_boundary(groups, own, Recorder(), where.kernels, device)
        blocks = _build(where, boundary, blocks)
        iterations[kind] = _iteration(where, blocks, boundary)
    found: dict[Kind, list[float]] = {kind: [] for kind in kinds}
    for number in range(_ROUNDS + 1):
        for kind, iterate in list(iterations.items()):
            dist.barrier(groups.world)
            seconds = torch.tensor([_clocked(iterate, device)], dtype=torch.float64, device=device)
            all_reduce_max(seconds, groups.world)
            if seconds.item() == math.inf:  # refused by a rank: no rank may wait for it there again
                found[kind] = [math.inf]
                del iterations[kind]
            elif number:  # the first iteration opens connections and allocates memory
                found[kind].append(seconds.item())
    return {kind: statistics.median(found[kind]) for kind in kinds}


def _clocked(iterate: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    try:
        iterate()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        if device.type != "cuda":  # a peer is lost
            raise
        _LOG.warning("not measured: %s", str(error).partition("\n")[0])
        return float("inf")
    return time.perf_counter() - start


def _build(where: TuningContext, boundary: GroupBoundary, like: Sequence[nn.Module]) -> list[nn.Module]:
    """Build a few of the job's blocks, with gradient sinks as in training; reuse the memory of ``like``."""
    job, device = where.job, where.device
    count = min(_MOST_BLOCKS, job.model.layers)
    definition = GPT(job.model.model_copy(update={"layers": count, "dropout": 0.0}), seed=1)
    random = torch.Generator(device).manual_seed(1)
    blocks = [definition.build(number, boundary) for number in range(1, count + 1)]
    for number, block in enumerate(blocks):
        for name, parameter in block.named_parameters():
            known = like[number].get_parameter(name) if like else None
            if known is None:
                values = torch.randn(parameter.shape, device=device, generator=random).mul_(0.02)
                parameter.data = values.to(where.dtype)
                set_sink(parameter, GradientSink(torch.zeros(parameter.shape, device=device)))
            else:
                parameter.data = known.data
                set_sink(parameter, sink_of(known))
    return blocks


def _iteration(
    where: TuningContext, blocks: Sequence[nn.Module], boundary: GroupBoundary
) -> Callable[[], None]:
    """Return a function that runs the forward and backward of one micro-batch."""
    model, layout, device, dtype = where.job.model, where.job.layout, where.device, where.dtype
    shape = (layout.micro_batch, model.sequence // layout.tp, model.hidden)
    random = torch.Generator(device).manual_seed(2)
    x = torch.randn(shape, device=device, generator=random).to(dtype).requires_grad_()
    gradient = torch.randn(shape, device=device, generator=random).to(dtype)

    def iterate() -> None:
        run_layers(blocks, x, Context()).backward(gradient)
        apply_deferred(boundary.later or [])

    return iterate


def _name(kind: Kind) -> str:
    return kind or "off"


def _named(seconds: dict[Kind, float]) -> dict[str, float]:
    return {_name(kind): own for kind, own in seconds.items() if math.isfinite(own)}


def _are_choices(value: Any) -> bool:
    """Return whether the value is a list of choices that `choose_tp_overlap` stored."""
    return isinstance(value, list) and all(
        isinstance(one, dict)
        and isinstance(one.get("where"), dict)
        and one.get("tensor") in ("turns", "slices", "off")
        and isinstance(one.get("seconds"), dict)
        and all(isinstance(own, int | float) for own in one["seconds"].values())
        for one in value
    )
