"""What describes a kind of fault: its targets, how it is observed, and its aims.

An aim says how a run must react. Grading (`myriad.faults.fault_grades`) reads only aims; the table of all
kinds is in `myriad.faults.fault_kinds`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["FaultKind", "KindName", "ObservedBy", "RecoveryTarget", "Target"]

KindName = Literal[
    "kill",
    "segv",
    "abort",
    "stop",
    "freeze",
    "slow-process",
    "pause",
    "exception",
    "hang",
    "slow",
    "host-memory",
    "disk-full",
    "damage",
    "flip",
    "nan-once",
    "nan-always",
    "spike",
    "link-down",
    "link-flap",
    "link-flapping",
    "partition",
    "device-fault",
    "device-lost",
    "device-complaint",
]
Target = Literal[
    "rank",
    "driver",
    "executor",
    "fork-server",
    "node",
    "loader",
    "keeper",
    "storage",
    "checkpoint",
    "standby",
    "redis",
    "watch",
    "run",
    "corpus",
]
ObservedBy = Literal["driver", "successor", "storage", "load", "diagnosis", "ranks", "health", "nothing"]


@dataclass(frozen=True, kw_only=True)
class RecoveryTarget:
    """The aim of a fault: how a run must react to it."""

    seen: ObservedBy = "driver"
    """How the fault is observed.

    driver           the driver reports a `fault` with a cause
    successor        the process that starts a successor observes it
    storage, load    the process that stores or loads a checkpoint reports it
    diagnosis        the driver reports a slow rank, and the run continues
    health           the driver reports a link or device, and lets the run continue
    ranks            all ranks report a `spike` in the step
    nothing          there is no report and no effect
    """
    causes: tuple[str, ...] = ()
    """Accepted causes; the driver must report one of them."""
    detected_seconds: float
    median_steps: float = 0.0
    """Limit of the time to detection in median steps, if that is longer."""
    trains_seconds: float | None = None
    """Seconds from detection until all ranks train again."""
    steps_lost: int | None = None
    """Most steps that may be lost."""
    verified: bool = False
    """Whether the fault must be found at the next comparison of replicas."""
    restarts: bool = True
    """Whether all ranks must restart."""
    stops: bool = False
    """Whether the run must stop with the reason."""
    gives_way: bool = False
    """Whether a spare must replace the node."""
    fenced_seconds: float | None = None
    """Seconds after which a node that is cut off has ended its ranks by itself."""
    same_bits: bool = True
    """Whether the result must equal the undisturbed run bit for bit; otherwise sums may have another
    order."""
    also: str = ""
    """The rest of the aim in words. It follows from the other fields, or holds for every fault."""


@dataclass(frozen=True)
class FaultKind:
    """One kind of fault."""

    what: str
    how: str
    aims: Mapping[Target, RecoveryTarget]
    """What recovery must achieve for each allowed victim."""
    inside: bool = False
    """Whether the rank causes the fault itself, armed at its start. Otherwise it comes from outside."""
    needs_root: bool = False
    needs_hosts: bool = False
    """Whether it needs nodes in network namespaces."""
