"""Between a job and the planner: what is to be planned, and the job file that a plan is."""

from dataclasses import replace
from pathlib import Path

from myriad.comm.layout import Layout, lacks_for_graphs
from myriad.errors import BadInputError
from myriad.job import Job, dump_toml, load_job
from myriad.optim.config import float8_scaling
from myriad.planner.cluster import Cluster
from myriad.planner.placement import Placement
from myriad.planner.questions import describe
from myriad.planner.rescore import Plan
from myriad.planner.saving import Saves
from myriad.planner.space import Candidate, Problem, Shards
from myriad.planner.work import Practice
from myriad.units import format_bytes
from myriad.whole_file import write_whole

__all__ = ["as_written", "check_plan_file", "job_of", "practice_of", "problem_of", "saves_of", "write_plan"]

_HEAD = "# A plan by `myriad plan`"


def problem_of(job: Job, cluster: Cluster) -> Problem:
    """What the job asks, without its layout."""
    on_cpu = cluster.accelerator.name.startswith("CPU")
    precision = job.train.precision
    single = precision == "float32" or (precision == "auto" and on_cpu)
    given = Problem(
        model=job.model,
        global_batch=job.train.global_batch,
        cluster=cluster,
        overlap=job.overlap,
        comm=job.comm,
        saves=saves_of(job),
        optimizer=job.optimizer.name,
        value_bytes=4 if single else 2,
        practice=practice_of(job),
        partition=job.layout.partition,
    )
    shards = tuple(shard for shard in given.shards if _allows(job, shard))
    return replace(given, shards=shards)


def practice_of(job: Job) -> Practice:
    """How it computes."""
    scaling = float8_scaling(job.train.precision)
    return Practice(sums_in_norms=job.train.kernels != "plain", float8=scaling)


def saves_of(job: Job) -> Saves:
    """When the job takes snapshots."""
    kept = job.checkpoint
    return Saves(kept.every, kept.minutes, kept.memory_every, kept.memory_seconds, kept.copies_every)


def _allows(job: Job, shard: Shards) -> bool:
    """Lossy communication allows only some."""
    if job.comm.compress_parameters is not None:
        return shard[0] in (1, 2)
    return job.comm.sync_every == 1 or shard[0] == 0


def as_written(job: Job) -> Candidate | None:
    """The job's own layout; none where it has none."""
    if job.layout == Layout():
        return None
    return Candidate(job.layout, job.overlap, 0.0, 0.0, 0.0)


def job_of(job: Job, candidate: Candidate, placement: Placement | None = None) -> Job:
    """The job with the layout and the order of nodes, checked, without CUDA graphs where the layout cannot be
    captured. Raises `BadInputError`."""
    order = None if placement is None or placement.is_plain else placement.order
    comm = job.comm.model_copy(update={"node_order": order})
    graphs = job.train.cuda_graphs and not lacks_for_graphs(candidate.layout)
    train = job.train.model_copy(update={"cuda_graphs": graphs})
    planned = {"layout": candidate.layout, "overlap": candidate.overlap, "comm": comm, "train": train}
    return job.model_copy(update=planned).check()


def write_plan(path: Path, job: Job, plan: Plan, problem: Problem, placement: Placement | None) -> None:
    """A complete job file that `myriad train` takes. An older plan of the same job is replaced, anything else
    is not."""
    check_plan_file(path, job)
    cluster, candidate = problem.cluster, plan.candidate
    memory = format_bytes(candidate.memory_bytes)
    lines = [
        f"{_HEAD} of the job {job.name!r} for the cluster {cluster.name!r} ({cluster.world} accelerators).",
        f"# {describe(candidate)}: predicted {plan.seconds:.4g} s an iteration, MFU {plan.mfu:.1%},",
        f"# {memory} of an accelerator's memory, which fits with a probability of {candidate.fits:.0%}.",
    ]
    if placement is not None and not placement.is_plain:
        gain = 1 - placement.seconds / placement.plain_seconds
        lines.append(
            f"# comm.node_order: the cluster's nodes in the order that ranks fill, {gain:.1%} quicker;"
        )
        lines.append(
            "# start them numbered as in the cluster file (torchrun --node-rank, Slurm's list of hosts)."
        )
    text = "\n".join(lines) + "\n\n" + dump_toml(job_of(job, candidate, placement))
    try:
        write_whole(path, text)
    except OSError as error:
        raise BadInputError("--out", str(path), f"cannot be written: {error.strerror}") from None


def check_plan_file(path: Path, job: Job) -> None:
    """Raises `BadInputError` for a file that is something else, or another job's plan."""
    if not path.parent.is_dir():
        raise BadInputError("--out", str(path), f"there is no folder {path.parent}")
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    if not text.startswith(_HEAD):
        raise BadInputError("--out", str(path), "a new file, or an older plan: this one is neither")
    other = load_job(str(path))
    if (other.name, other.model) != (job.name, job.model):
        allowed = f"it is the plan of another job ({other.name}, not {job.name}): give another name"
        raise BadInputError("--out", str(path), allowed)
