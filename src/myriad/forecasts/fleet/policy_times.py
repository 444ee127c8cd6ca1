"""Durations of each policy, from the tables in ``policies/``, which give the source of each figure."""

import tomllib
from importlib import resources
from math import ceil
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from myriad.config import Config

if TYPE_CHECKING:
    from myriad.job import Job

__all__ = ["PolicyTimes", "PublishedTimes", "load_published", "load_times", "times_of"]


class PolicyTimes(Config):
    """Durations and rates of Myriad that its decisions do not determine."""

    step_seconds: float = Field(gt=0)
    crash_seen_seconds: float = Field(ge=0)
    device_seen_seconds: float = Field(ge=0)
    end_seconds: float = Field(ge=0)
    restart_seconds: float = Field(ge=0)
    cold_start_seconds: float = Field(ge=0)
    saving_ratio: float = Field(ge=0, lt=1)
    memory_every: float = Field(gt=0)
    copies_every: float = Field(gt=0)
    durable_seconds: float = Field(gt=0)
    save_seconds: float = Field(ge=0)
    culprit_wrong_ratio: float = Field(ge=0, le=1)
    repair_seconds: float = Field(ge=0)
    verify_every: int = Field(ge=0)
    corrupt_shown_ratio: float = Field(ge=0, le=1)
    unseen_seconds: float = Field(ge=0)
    person_seconds: float = Field(ge=0)
    slower_ratio: float = Field(ge=0)


class PublishedTimes(Config):
    """Durations and rates of a policy that is known from its paper."""

    title: str
    seen_seconds: dict[Literal["exit", "hang", "silent", "planned"], float]
    diagnosing_seconds: float = Field(ge=0)
    restart_seconds: float = Field(ge=0)
    saved_every_seconds: float = Field(gt=0)
    saving_ratio: float = Field(ge=0, lt=1)
    alone_ratio: float = Field(ge=0, le=1)
    found_ratio: float = Field(ge=0, le=1)


def load_times(**changes: float) -> PolicyTimes:
    """Return Myriad's times, with changes."""
    return PolicyTimes.model_validate(_read("myriad") | changes)


def times_of(job: "Job", step_seconds: float) -> PolicyTimes:
    """Return Myriad's times with a job's checkpoint intervals and comparisons."""
    kept = job.checkpoint
    durable = [kept.minutes * 60] if kept.minutes else []
    durable += [kept.every * step_seconds] if kept.every else []
    times = load_times(step_seconds=step_seconds, **({"durable_seconds": min(durable)} if durable else {}))
    stored = max(1, round(times.durable_seconds / step_seconds))
    in_memory = max(kept.memory_every, ceil(kept.memory_seconds / step_seconds))
    of_all_nodes = in_memory if kept.memory_every else stored
    has_mirrors = job.snapshot_holders > 1  # other nodes' snapshots have what a lost node's had
    changes = {
        "memory_every": of_all_nodes,
        "copies_every": of_all_nodes if has_mirrors else kept.copies_every or stored,
        "verify_every": job.resilience.verify_every if job.compares_replicas else 0,
    }
    return times.model_copy(update=changes)


def load_published(name: Literal["megascale", "byterobust"]) -> PublishedTimes:
    """Return the times of a published policy."""
    return PublishedTimes.model_validate(_read(name))


def _read(name: str) -> dict[str, Any]:
    folder = resources.files("myriad.forecasts.fleet") / "policies"
    return tomllib.loads((folder / f"{name}.toml").read_text(encoding="utf-8"))
