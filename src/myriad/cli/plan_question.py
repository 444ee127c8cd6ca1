"""What ``myriad plan`` was asked, read and checked: first all that needs no cluster, which may have to be
measured first, then the rest."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import typer

from myriad.cli.measure import cluster_path, measure_to_file
from myriad.cli.overrides import OverrideCommand
from myriad.cli.plan_job import as_written, given_layout
from myriad.comm.layout import MOST_RANKS
from myriad.errors import BadInputError
from myriad.job import Job, load_job_to_plan
from myriad.planner.cluster import Cluster
from myriad.planner.space import Candidate
from myriad.recipes.cluster import load_cluster, scale_cluster
from myriad.train.cluster_file import CLUSTER_NAME

__all__ = ["Asked", "Wanted"]

_MOST_DIGITS = 18
"""Most digits of a number; a longer one is refused as a whole."""
_SLOWEST = 1000
"""Times as long as other nodes."""


@dataclass(frozen=True)
class Wanted:
    """As far as it can be checked without the cluster."""

    job: Job
    """Its layout holds only what was given on the command line."""
    written: Candidate | None
    """The layout in its file."""
    cluster: str
    gpus: tuple[int, ...] | None
    """One number, or both ends of a range."""
    changes: tuple[str, ...]
    stragglers: tuple[tuple[int, float], ...]

    @property
    def is_range(self) -> bool:
        """Whether a curve is asked for."""
        return self.gpus is not None and len(self.gpus) > 1

    @classmethod
    def read(
        cls,
        context: typer.Context,
        job: str,
        cluster: str,
        gpus: str | None,
        what_if: Sequence[str] | None,
        straggler: Sequence[str] | None,
    ) -> "Wanted":
        """Raises `BadInputError`."""
        overrides = OverrideCommand.of(context)
        loaded = load_job_to_plan(job, overrides)
        given_layout(loaded)
        changes = tuple(what_if or ())
        slower = tuple(_straggler(text) for text in straggler or ())
        if cluster == CLUSTER_NAME:
            load_cluster("laptop", changes)  # has the same keys
        written = as_written(job, overrides)
        return cls(loaded, written, cluster, None if gpus is None else _sizes(gpus), changes, slower)


@dataclass(frozen=True)
class Asked:
    """The same on the cluster that it is for."""

    job: Job
    written: Candidate | None
    cluster: Cluster
    plain: Cluster | None
    """Without --what-if, where there is one."""
    sizes: tuple[int, ...]
    """Numbers of accelerators."""
    slower: dict[int, float]

    @classmethod
    def of(cls, wanted: Wanted, *, measure: bool) -> "Asked":
        """Measures where that is asked for, or needed. Raises `BadInputError`."""
        path = str(measure_to_file()[1]) if measure else cluster_path(wanted.cluster)
        cluster = load_cluster(path, wanted.changes)
        plain = load_cluster(path) if wanted.changes else None
        sizes = wanted.gpus or (cluster.world,)
        if len(sizes) == 1:
            cluster = scale_cluster(cluster, sizes[0])
            plain = plain and scale_cluster(plain, sizes[0])
        for node, factor in wanted.stragglers:
            if node >= cluster.nodes:
                allowed = f"the cluster has the nodes 0 to {cluster.nodes - 1}"
                raise BadInputError("--straggler", f"node={node}:{factor:g}x", allowed)
            if cluster.nodes == 1:
                allowed = "more than one node to order; `myriad simulate --straggler` predicts what one costs"
                raise BadInputError("--straggler", f"node={node}:{factor:g}x", allowed)
        return cls(wanted.job, wanted.written, cluster, plain, sizes, dict(wanted.stragglers))


def _sizes(gpus: str) -> tuple[int, ...]:
    """One number, or both ends of a range."""
    match = re.fullmatch(r"0*(\d+)(?:\.\.0*(\d+))?", gpus, re.ASCII)
    if match is None or match.group(1) == "0":
        raise BadInputError("--gpus", gpus, "a number, or a range such as 256..12288")
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
