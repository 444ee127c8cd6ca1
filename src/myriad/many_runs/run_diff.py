"""What differs between two runs: their jobs, their environments, and what resumes changed in each.

The environment is what a run records of it: the newest ``start`` event (ranks, device, precision, threads,
and of rank 0 the host, software versions and commits), the newest peak, and RUN/nodes (hosts, processors,
accelerators, interfaces, versions of kernel and drivers). A fact of several nodes is the list of its
different values.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from myriad.errors import plain_value
from myriad.job.job_changes import JobChange, changes_between
from myriad.run import Run
from myriad.run.run_speed import Peaks
from myriad.supervise.driver.node_inventory import read_nodes
from myriad.supervise.observations import NodeFacts
from myriad.system.jsonl import Record
from myriad.units import format_bytes, format_flops, format_number

__all__ = ["RunDiff", "diff_runs", "environment_of", "shown_value"]

_OF_START = ("world", "device", "precision", "threads", "parameters", "peak_flops", "peak_source")


@dataclass(frozen=True)
class RunDiff:
    """The differences between two runs, each as (key, value of the first, value of the second)."""

    job: list[JobChange]
    environment: list[tuple[str, Any, Any]]
    resumes: tuple[list[Record], list[Record]]
    """``job_changed`` events of each run."""

    def as_json(self) -> dict[str, Any]:
        """Return plain values for ``--json``."""
        return {
            "job": {one.key: [one.before, one.after] for one in self.job},
            "environment": {key: [first, second] for key, first, second in self.environment},
            "changed_by_resumes": [
                [{name: one.get(name) for name in ("step", "key", "before", "after")} for one in events]
                for events in self.resumes
            ],
        }


def diff_runs(first: Run, second: Run) -> RunDiff:
    """Compare two runs. Raises `BadInputError` if a job cannot be read."""
    jobs = [run.job() for run in (first, second)]
    events = [run.read_events() for run in (first, second)]
    before, after = (
        environment_of(found, read_nodes(run.nodes_path))
        for run, found in zip((first, second), events, strict=True)
    )
    keys = dict.fromkeys((*before, *after))
    changed = [[one for one in found if one["event"] == "job_changed"] for found in events]
    return RunDiff(
        changes_between(jobs[0], jobs[1]),
        [(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)],
        (changed[0], changed[1]),
    )


def shown_value(key: str, value: Any) -> Any:
    """Return a fact of the environment as text with its unit; any other value as it is."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return value
    if key == "peak_flops":
        return format_flops(value)
    if key.endswith("_bytes"):
        return format_bytes(value)
    return f"{value:,}" if isinstance(value, int) else format_number(value, 6)


def environment_of(events: Sequence[Record], nodes: Mapping[int, NodeFacts]) -> dict[str, Any]:
    """Return the facts of a run's environment by name; unknown ones are left out."""
    starts = [event for event in events if event["event"] == "start"]
    start = starts[-1] if starts else {}
    found = {key: start[key] for key in _OF_START if start.get(key) is not None}
    if (peaks := Peaks(events)).flops_per_second is not None:
        found |= {"peak_flops": peaks.flops_per_second, "peak_source": peaks.source}
    found |= {f"software.{name}": text for name, text in start.get("software", {}).items()}
    facts = list(nodes.values())
    hosts = [[one.host] for one in facts] or [[str(start.get("host", ""))]]
    found |= _shared("hosts", hosts)
    found |= _shared("cpu", ([one.cpu] for one in facts))
    found |= _shared("memory_bytes", ([one.memory_bytes] for one in facts))
    found |= _shared("gpus", ([f"{len(one.gpus)} x {gpu.model}" for gpu in one.gpus[:1]] for one in facts))
    found |= _shared("interfaces", ([nic.driver for nic in one.nics] for one in facts))
    for name in sorted({name for one in facts for name in one.versions}):
        found |= _shared(f"versions.{name}", ([one.versions.get(name, "")] for one in facts))
    return found


def _shared(name: str, values: Iterable[Iterable[Any]]) -> dict[str, Any]:
    """Return the different values of the nodes: one as it is, several as text."""
    different = sorted({value for each in values for value in each if value}, key=str)
    if not different:
        return {}
    return {name: different[0] if len(different) == 1 else ", ".join(map(plain_value, different))}
