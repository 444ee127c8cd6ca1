"""The request of ``myriad plan``, parsed and checked.

A wrong option is refused before the cluster is loaded: ``this-machine`` may have to be measured first.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from myriad.comm.layout import MOST_RANKS
from myriad.errors import BadInputError
from myriad.forecasts.measured_loads import MeasuredLoads
from myriad.forecasts.planned_job import as_written, given_layout, problem_of
from myriad.job import Job, load_job_to_plan
from myriad.planner import Cluster, Framework, LayoutCandidate, LayoutProblem, scale_cluster
from myriad.recipes.cluster import load_cluster
from myriad.recipes.framework import load_framework
from myriad.train.calibration.cluster_file import CLUSTER_NAME

__all__ = ["PlanProblem", "PlanRequest"]

_MOST_DIGITS = 18
"""Largest number of digits of a number; a longer one is refused as a whole."""
_SLOWEST = 1000
"""Largest slowdown of a node."""


@dataclass(frozen=True)
class PlanRequest:
    """The command line of ``myriad plan``, checked as far as possible without a cluster.

    `PlanProblem.of` adds the cluster, which may have to be measured first."""

    job: Job
    """The job; its layout holds only the keys that were given on the command line."""
    written: LayoutCandidate | None
    """The layout in the job's file."""
    cluster: str
    gpus: tuple[int, ...] | None
    """Value of ``--gpus``: one number, or both ends of a range."""
    changes: tuple[str, ...]
    """Values of ``--what-if``, as ``KEY=VALUE``."""
    stragglers: tuple[tuple[int, float], ...]
    """Slow nodes and their slowdowns."""
    framework: Framework | None = None
    """The framework that the plan is for; off: Myriad."""
    loads: MeasuredLoads | None = None
    """Loads of experts that a run measured."""

    @property
    def is_range(self) -> bool:
        """Whether ``--gpus`` asks for a curve."""
        return self.gpus is not None and len(self.gpus) > 1

    @classmethod
    def read(
        cls,
        job: str,
        overrides: Sequence[str],
        cluster: str,
        gpus: str | None,
        what_if: Sequence[str] | None,
        straggler: Sequence[str] | None,
        framework: str | None = None,
        expert_load_from: str | None = None,
    ) -> "PlanRequest":
        """Read and check the texts of the command line. Raises `BadInputError`."""
        loaded = load_job_to_plan(job, overrides)
        given_layout(loaded)
        changes = tuple(what_if or ())
        slower = tuple(_straggler(text) for text in straggler or ())
        if cluster == CLUSTER_NAME:
            load_cluster("laptop", changes)  # Both clusters have the same keys.
        used = None if framework in (None, "myriad") else load_framework(str(framework))
        written = as_written(job, overrides) if used is None else None
        loads = None
        if expert_load_from is not None:
            loads = MeasuredLoads.read(expert_load_from, loaded, overrides)
            written = None if written is None else loads.of_candidate(written)
        sizes = None if gpus is None else _sizes(gpus)
        return cls(loaded, written, cluster, sizes, changes, slower, used, loads)


@dataclass(frozen=True)
class PlanProblem:
    """A planning request on a loaded cluster."""

    job: Job
    written: LayoutCandidate | None
    """The layout in the job's file."""
    cluster: Cluster
    plain: Cluster | None
    """The cluster without ``--what-if``, where that option was given."""
    sizes: tuple[int, ...]
    """Numbers of accelerators: one, or both ends of a range."""
    slower: dict[int, float]
    """Factor on the compute time of each slow node, by its number."""
    framework: Framework | None = None
    """The framework that the plan is for; off: Myriad."""
    loads: MeasuredLoads | None = None
    """Loads of experts that a run measured."""

    def layouts_on(self, cluster: Cluster) -> LayoutProblem:
        """Return the search of the job's layouts on a cluster. Raises `BadInputError`."""
        problem = problem_of(self.job, cluster)
        if self.loads is not None:
            problem = replace(problem, measured_loads=self.loads.by_ranks)
        return problem if self.framework is None else _as_framework(problem, self.framework)

    @classmethod
    def of(cls, request: PlanRequest, cluster_file: str) -> "PlanProblem":
        """Load the cluster and check the rest of the request. Raises `BadInputError`."""
        cluster = load_cluster(cluster_file, request.changes)
        plain = load_cluster(cluster_file) if request.changes else None
        sizes = request.gpus or (cluster.world,)
        if len(sizes) == 1:
            cluster = scale_cluster(cluster, sizes[0])
            plain = plain and scale_cluster(plain, sizes[0])
        for node, factor in request.stragglers:
            if node >= cluster.nodes:
                allowed = f"the cluster has the nodes 0 to {cluster.nodes - 1}"
                raise BadInputError("--straggler", f"node={node}:{factor:g}x", allowed)
            if cluster.nodes == 1:
                allowed = "needs more than one node to order; `myriad simulate --straggler` predicts the cost"
                raise BadInputError("--straggler", f"node={node}:{factor:g}x", allowed)
        slower = dict(request.stragglers)
        own = request.framework, request.loads
        return cls(request.job, request.written, cluster, plain, sizes, slower, *own)


_PLAIN = (0.0, False)
"""No copies to host memory. Other frameworks have copies of their own, which are not predicted."""


def _as_framework(problem: LayoutProblem, framework: Framework) -> LayoutProblem:
    """Return the search of layouts that a framework can have, with its profile and its overlap. Raises
    `BadInputError`."""
    habits, own = framework.habits, problem.profile
    by_layer = habits.by_layer and habits.zero == 3
    degrees = {3} if by_layer else {0, habits.zero}
    reduces = ("each",) if by_layer or habits.reduce_each else ("each", "last")
    shards = tuple(one for one in problem.shards if one.zero in degrees and one.reduce in reduces)
    if not shards:
        allowed = f"with --framework {framework.name} one of {', '.join(map(str, sorted(degrees)))}"
        raise BadInputError("layout.zero", problem.fixed.get("zero"), allowed)
    limits, fixed = framework.limits, _limited(problem, framework)
    schedules = {*(limits.schedules or ("gpipe", "1f1b", "interleaved")), habits.schedule}
    recomputes = tuple(one for one in problem.recomputes if one in (limits.recompute or problem.recomputes))
    if not recomputes:
        allowed = f"with --framework {framework.name} one of {', '.join(limits.recompute or ())}"
        raise BadInputError("layout.recompute", problem.recomputes[0], allowed)
    return replace(
        problem,
        framework=framework.name,
        profile=replace(
            framework.profile,
            quantization=framework.profile.quantization or own.quantization,
            keeps_quantized=own.keeps_quantized,
        ),
        overlap=framework.overlap,
        searches_overlap=False,
        searches_pairs=False,
        searches_groups=limits.shard_groups,
        gathers_blocks=by_layer,
        limits=limits,
        recomputes=recomputes,
        shards=shards,
        schedules=tuple(name for name in problem.schedules if name in schedules),
        offloads=tuple(one for one in problem.offloads if one == _PLAIN) or problem.offloads,
        fixed={"expert_dispatch": habits.expert_dispatch, **fixed, **problem.fixed},
    )


def _limited(problem: LayoutProblem, framework: Framework) -> dict[str, int]:
    """Return the keys of the layout that a framework's plans have at one value. Raises `BadInputError` if
    the job gives another."""
    limits = framework.limits
    found: dict[str, int] = {}
    for key, has, lacks in (
        ("pp", framework.habits.has_pipelines, f"no pipelines with ZeRO {framework.habits.zero}"),
        ("tp", limits.tensor != "none", "no tensor parallelism in its plans"),
        ("cp", limits.context != "none", "no context parallelism in its plans"),
        ("ep", limits.experts != "alone", "no expert parallelism in its plans"),
    ):
        if has:
            continue
        if problem.fixed.get(key, 1) != 1:
            allowed = f"1 with --framework {framework.name}, which has {lacks}"
            raise BadInputError(f"layout.{key}", problem.fixed[key], allowed)
        found[key] = 1
    if not limits.shard_groups and problem.fixed.get("shard_group") is not None:
        allowed = f"none with --framework {framework.name}, which shards over all replicas"
        raise BadInputError("layout.shard_group", problem.fixed["shard_group"], allowed)
    return found


def _sizes(gpus: str) -> tuple[int, ...]:
    """Parse one number, or both ends of a range."""
    match = re.fullmatch(r"0*(\d+)(?:\.\.0*(\d+))?", gpus, re.ASCII)
    if match is None or match.group(1) == "0":
        raise BadInputError("--gpus", gpus, "a whole number of at least 1, or a range such as 256..12288")
    numbers = [int(number[:_MOST_DIGITS]) for number in match.groups() if number is not None]
    if max(numbers) > MOST_RANKS:
        raise BadInputError("--gpus", gpus, f"at most {MOST_RANKS:,}: a search holds an entry for each rank")
    if len(numbers) == 1:
        return (numbers[0],)
    first, last = numbers
    if first >= last:
        raise BadInputError("--gpus", gpus, "a range rises, such as 256..12288")
    return first, last


def _straggler(text: str) -> tuple[int, float]:
    match = re.fullmatch(r"node=(\d{1,9}):(\d{1,6}(?:\.\d+)?)x", text, re.ASCII)
    if match is None or not 1 <= float(match.group(2)) <= _SLOWEST:
        raise BadInputError("--straggler", text, f"written as node=17:1.1x, 1x to {_SLOWEST}x")
    return int(match.group(1)), float(match.group(2))
