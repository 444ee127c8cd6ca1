"""Conversion between job files and the planner: a job as a planning problem, and a plan as a job."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from myriad.comm.layout import Layout, check_layout, lacks_for_graphs
from myriad.comm.node_order import check_node_order
from myriad.errors import BadInputError
from myriad.forecasts.packed_documents import attended_shares
from myriad.job import Job, dump_toml, load_job
from myriad.job.job_rules import lacks_for_context
from myriad.job.job_steps import JobSteps
from myriad.job.job_values import newton_schulz_of
from myriad.optim.config import float8_scaling
from myriad.planner import (
    Cluster,
    FrameworkProfile,
    LayoutCandidate,
    LayoutProblem,
    SimulatedPlan,
    describe_layout,
)
from myriad.planner.cost.snapshot_costs import SnapshotSchedule
from myriad.planner.fabric.placement_search import PlacementResult
from myriad.planner.search.layout_problem import Offload, Sharding
from myriad.planner.search.layout_space import LONG, tensor_degrees
from myriad.program.schedules import check_virtual_stages
from myriad.units import format_bytes, format_number

__all__ = [
    "PLAN_HEAD",
    "as_written",
    "framework_profile_of",
    "given_layout",
    "job_of",
    "plan_head",
    "plan_text",
    "planned_phase",
    "planned_precision",
    "planned_steps",
    "problem_of",
    "snapshot_schedule_of",
]

PLAN_HEAD = "# A plan by `myriad plan`"
"""First words of a job file that `plan_text` wrote."""


def problem_of(job: Job, cluster: Cluster) -> LayoutProblem:
    """Return the planning problem of a job. Of its layout only the given keys count (``model_fields_set``),
    as `load_job_to_plan` sets them. Raises `BadInputError` for a layout that the cluster cannot have."""
    planned, fixed = planned_phase(job), given_layout(job)
    _check_grid([key for key in (*_GRID, "cp") if key in fixed], job, cluster)
    _check_nodes(job, cluster)
    precision = planned_precision(job, cluster)
    given = LayoutProblem(
        model=planned.model,
        global_batch=planned.train.global_batch,
        cluster=cluster,
        overlap=job.overlap.model_copy(update={"pairs": False}),
        searches_pairs=planned.model.experts is not None and job.train.memory_budget is None,
        comm=job.comm,
        snapshots=snapshot_schedule_of(job),
        optimizer=job.optimizer.name,
        newton_schulz=newton_schulz_of(job),
        qk_clip=job.optimizer.qk_clip is not None,
        ema_every=job.optimizer.ema_steps,
        attended=attended_shares(planned),
        generates=job.generates,
        value_bytes=4 if precision == "float32" else 2,
        profile=framework_profile_of(job),
        partition=job.layout.partition,
        searches_context=not lacks_for_context(planned),
    )
    zero, reduce = fixed.get("zero"), fixed.pop("reduce", None)
    again = fixed.pop("recompute", None)
    offloads = _offloads(job, cluster, fixed)
    shards = tuple(
        shard
        for shard in given.shards
        if _allows(job, shard) and zero in (None, shard[0]) and reduce in (None, shard[1])
    )
    if not shards:
        raise BadInputError(
            "layout.zero", zero, "not possible with this layout.reduce and these keys of comm"
        )
    recomputes = given.recomputes if again is None else (again,)
    return replace(given, shards=shards, recomputes=recomputes, offloads=offloads, fixed=fixed)


_SHARES = (0.0, 0.25, 0.5, 1.0)
"""Searched values of `offload_activations`."""


def _offloads(job: Job, cluster: Cluster, fixed: dict[str, Any]) -> tuple[Offload, ...]:
    """Return what a plan may keep in host memory, and remove the keys from the given ones. Accelerators have
    a memory apart from their host's; a CPU has not."""
    activations, optimizer = fixed.pop("offload_activations", None), fixed.pop("offload_optimizer", None)
    every = [(ratio, state) for ratio in _SHARES for state in (False, True)]
    if activations not in (None, *_SHARES):
        every = [(activations, state) for state in (False, True)]
    return tuple(
        one
        for one in every
        if activations in (None, one[0])
        and optimizer in (None, one[1])
        and not (one[1] and job.optimizer.name == "lamb")
        and not (cluster.on_cpu and one != (0.0, False))
    ) or ((0.0, False),)


def planned_phase(job: Job) -> Job:
    """Return the job of the phase that a plan is for: one with the longest sequence, so that the plan fits
    every phase, and of these the one with most tokens."""
    steps = JobSteps(job)
    tokens: dict[int, int] = {}
    ends = [*(one.first_token for one in steps.segments[1:]), steps.tokens_before(job.train.steps)]
    for segment, end in zip(steps.segments, ends, strict=True):
        tokens[segment.phase] = tokens.get(segment.phase, 0) + end - segment.first_token
    sequence = [one.model.sequence for one in steps.phase_jobs]
    return steps.phase_jobs[max(tokens, key=lambda phase: (sequence[phase], tokens[phase]))]


def planned_steps(job: Job) -> int:
    """Return the number of steps with the batch of `planned_phase` that take as many tokens as the run."""
    return -(-JobSteps(job).tokens_before(job.train.steps) // planned_phase(job).targets)


_NOT_SEARCHED = ("shares", "recompute_ratio", "offload_optimizer_ratio")
_GRID = ("dp", "tp", "pp")


def given_layout(job: Job) -> dict[str, Any]:
    """Return the keys of the layout that were given, checked as far as the model alone decides. Raises
    `BadInputError`."""
    layout = job.layout
    searched: dict[str, Any] = {"schedule": None, "virtual_stages": 1, "reduce": "last"}
    keys = layout.model_fields_set
    if not {"dp", "zero"} <= keys and (layout.zero or "zero" not in keys):
        searched["shard_group"] = None
    searches_cp = "cp" not in keys and planned_phase(job).model.sequence >= LONG
    if not {"dp", "tp"} <= keys or searches_cp:
        searched["ep"] = 1
    if "cp" not in keys:
        searched["ulysses"] = 1
    if "tp" not in keys:
        searched["etp"] = None
    elif "etp" not in keys and layout.ep > 1:
        searched["etp"] = 1
    check_layout(layout.model_copy(update=searched))
    given = {key: getattr(layout, key) for key in sorted(layout.model_fields_set - {"partition"})}
    given = {key: value for key, value in given.items() if value is not None}
    for key in _NOT_SEARCHED:
        if given.pop(key, None) not in (None, 1.0):
            allowed = "off: a plan has equal replicas and recomputes whole stages; `myriad simulate` takes it"
            raise BadInputError(f"layout.{key}", getattr(layout, key), allowed)
    if layout.cp > 1 and (lacks := lacks_for_context(job)):
        raise BadInputError("layout.cp", layout.cp, f"more than 1 needs {lacks}")
    degrees, most = tensor_degrees(job.model), job.model.layers + 2
    if "tp" in given and layout.tp not in degrees:
        raise BadInputError("layout.tp", layout.tp, f"for this model one of {', '.join(map(str, degrees))}")
    if layout.etp is not None and all(degree % layout.etp for degree in degrees):
        allowed = f"must divide layout.tp, for this model one of {', '.join(map(str, degrees))}"
        raise BadInputError("layout.etp", layout.etp, allowed)
    if layout.num_stages > most:
        stages = "layout.pp x layout.virtual_stages"
        raise BadInputError(stages, layout.num_stages, f"at most {most}: blocks, embedding and head")
    if "schedule" in given and "virtual_stages" in given:
        check_virtual_stages(layout.schedule_name, layout.virtual_stages)
    return given


def _check_grid(keys: Sequence[str], job: Job, cluster: Cluster) -> None:
    """Raise `BadInputError` unless the given degrees can cover all accelerators."""
    product, world = job.layout.world, cluster.world
    name = " x ".join(f"layout.{key}" for key in keys)
    searches_cp = "cp" not in keys and planned_phase(job).model.sequence >= LONG
    if {*_GRID} <= {*keys} and not searches_cp and product != world:
        allowed = f"must be the {world:,} accelerators: plan on --gpus {product}, or give only some of them"
        raise BadInputError(name, product, allowed)
    if keys and world % product:
        raise BadInputError(name, product, f"must divide the {world:,} accelerators of {cluster.name}")


def _check_nodes(job: Job, cluster: Cluster) -> None:
    """Raise `BadInputError` unless the job's nodes match the cluster's."""
    world, order = cluster.world, job.comm.node_order
    given = {"resilience.nodes": job.resilience.nodes, "comm.node_size": job.comm.node_size}
    for key, number in given.items():
        if number is not None and world % number:
            allowed = f"must divide the {world:,} accelerators of {cluster.name}"
            raise BadInputError(key, number, f"{allowed}, which has {cluster.nodes:,} nodes")
    if order is not None:
        check_node_order(order, world)


def planned_precision(job: Job, cluster: Cluster) -> Literal["float32", "bfloat16", "float16"]:
    """Return the compute type of the job on the cluster's accelerators, as
    `myriad.optim.precision.resolve_precision` would choose it there; float8 products are handled separately.
    Raises `BadInputError` for bfloat16 on accelerators that multiply only float16."""
    asked, accelerator = job.train.precision, cluster.accelerator
    if asked in ("float32", "float16"):
        return asked
    if asked == "auto" and cluster.on_cpu:
        return "float32"
    if accelerator.bfloat16:
        return "bfloat16"
    if asked != "auto":
        allowed = f"float16, float32 or auto: {accelerator.name} multiplies no bfloat16 and no float8"
        raise BadInputError("train.precision", asked, allowed)
    return "float32" if job.overlap.updates_early else "float16"


def framework_profile_of(job: Job) -> FrameworkProfile:
    """Return the framework profile of the job: fused norms, float8, CUDA graphs."""
    scaling = float8_scaling(job.train.precision)
    keeps = job.train.keep_float8_weights
    graphs = job.train.cuda_graphs
    fused = job.train.kernels != "plain"
    return FrameworkProfile(
        fused_add_norm=fused, quantization=scaling, keeps_quantized=keeps, cuda_graphs=graphs
    )


def snapshot_schedule_of(job: Job) -> SnapshotSchedule:
    """Return the job's snapshot schedule."""
    kept = job.checkpoint
    return SnapshotSchedule(
        kept.every,
        kept.minutes,
        kept.memory_every,
        kept.memory_seconds,
        kept.copies_every,
        kept.holders,
    )


def _allows(job: Job, shard: Sharding) -> bool:
    """Return whether the job's lossy communication allows this sharding."""
    if job.comm.compress_parameters is not None:
        return shard[0] in (1, 2)
    return job.comm.sync_every == 1 or shard[0] == 0


def as_written(name: str, overrides: Sequence[str]) -> LayoutCandidate | None:
    """Return the layout of the job's file with the overrides. ``None`` where the file has none, or none that
    is legal for this batch."""
    try:
        job = load_job(name, overrides)
    except BadInputError:
        return None
    if job.layout == Layout():
        return None
    return LayoutCandidate(job.layout, job.overlap, 0.0, 0.0, 0.0)


def job_of(job: Job, candidate: LayoutCandidate, placement: PlacementResult | None = None) -> Job:
    """Return the job with the layout and the node order, checked, and without CUDA graphs where the layout
    cannot be captured. Raises `BadInputError`."""
    order = None if placement is None or placement.is_plain else placement.order
    comm = job.comm.model_copy(update={"node_order": order})
    graphs = job.train.cuda_graphs and not lacks_for_graphs(candidate.layout, candidate.overlap)
    train = job.train.model_copy(update={"cuda_graphs": graphs})
    planned = {"layout": candidate.layout, "overlap": candidate.overlap, "comm": comm, "train": train}
    return job.model_copy(update=planned).check()


def plan_text(
    job: Job, plan: SimulatedPlan, problem: LayoutProblem, placement: PlacementResult | None
) -> str:
    """Return the plan as a complete job file for `myriad train`. Raises `BadInputError`."""
    head = plan_head(job, plan, problem)
    if placement is not None and not placement.is_plain:
        gain = 1 - placement.seconds / placement.plain_seconds
        head += (
            f"# comm.node_order: the cluster's nodes in the order of ranks, {gain:.1%} quicker;\n"
            "# start the nodes numbered as in the cluster file (torchrun --node-rank, Slurm's hosts).\n"
        )
    return head + "\n" + dump_toml(job_of(job, plan.candidate, placement))


def plan_head(job: Job, plan: SimulatedPlan, problem: LayoutProblem) -> str:
    """Return lines of comments that say what a plan is for and what is predicted of it."""
    cluster, candidate = problem.cluster, plan.candidate
    return (
        f"{PLAN_HEAD} of the job {job.name!r} for the cluster {cluster.name!r} "
        f"({cluster.world} accelerators).\n"
        f"# {describe_layout(candidate)}: predicted {format_number(plan.seconds, 4)} s an iteration, "
        f"MFU {plan.mfu:.1%},\n"
        f"# {format_bytes(candidate.memory_bytes)} of an accelerator's memory, which fits with a probability "
        f"of {candidate.fit_probability:.0%}.\n"
    )
