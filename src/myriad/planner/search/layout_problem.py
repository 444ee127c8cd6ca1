"""The input of a search of layouts, and one layout that it finds."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from myriad.comm.config import CommConfig
from myriad.comm.layout import ExpertDispatch, Layout, lacks_for_graphs, lacks_for_pairs
from myriad.model.config import ModelConfig
from myriad.optim.config import OptimizerName
from myriad.planner.cluster_config import Cluster
from myriad.planner.cost.snapshot_costs import SnapshotSchedule
from myriad.planner.layout_limits import LayoutLimits
from myriad.planner.memory.layer_memory import RECOMPUTE
from myriad.planner.workload import (
    FULL_WINDOWS,
    AttendedShares,
    FrameworkProfile,
    NewtonSchulz,
    Recompute,
    Workload,
)
from myriad.program.config import OverlapConfig, TensorOverlap
from myriad.program.schedules import SCHEDULES

__all__ = ["LayoutCandidate", "LayoutProblem", "Offload", "Sharding"]

Offload = tuple[float, bool]
"""Values of the layout's keys `offload_activations` and `offload_optimizer`."""


class Sharding(NamedTuple):
    """Values of the layout's keys `zero`, `reduce` and `shard_group`."""

    zero: int
    reduce: Literal["last", "each"]
    shard_group: int | None = None


_SHARDS = (
    *(Sharding(zero, "last") for zero in range(3)),
    Sharding(2, "each"),
    Sharding(3, "last"),
    Sharding(3, "each"),
)


@dataclass(frozen=True)
class LayoutProblem:
    """The input of a search: a model, a batch and a cluster, with the values that are fixed."""

    model: ModelConfig
    global_batch: int
    cluster: Cluster
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    """Values of the keys that are not searched: chunk counts, message sizes, the number of receives posted
    ahead."""
    profile: FrameworkProfile = field(default_factory=FrameworkProfile)
    comm: CommConfig = field(default_factory=CommConfig)
    snapshots: SnapshotSchedule = field(default_factory=SnapshotSchedule)
    optimizer: OptimizerName = "adamw"
    newton_schulz: NewtonSchulz = field(default_factory=NewtonSchulz)
    qk_clip: bool = False
    ema_every: int = 0
    attended: AttendedShares = FULL_WINDOWS
    generates: bool = False
    value_bytes: int = 2
    partition: str = "uniform"
    shards: tuple[Sharding, ...] = _SHARDS
    """Shardings that the rest of the job allows."""
    searches_context: bool = True
    """Whether the rest of the job allows ranks to share sequences."""
    searches_groups: bool = True
    """Whether groups of replicas (`shard_group`) are added to ``shards``."""
    framework: str = "myriad"
    """Name of the framework whose profile this is."""
    searches_overlap: bool = True
    """Whether the switches of ``overlap`` are searched; off: they are as in ``overlap``."""
    searches_pairs: bool = False
    """Whether forwards may be paired with backwards (``overlap.pairs``) where ranks share experts."""
    gathers_blocks: bool = False
    """Whether ZeRO 3 on one pipeline rank gathers one block after another (FSDP), so that such layouts have a
    stage for each block."""
    limits: LayoutLimits = field(default_factory=LayoutLimits)
    """Layouts that the framework can run."""
    schedules: tuple[str, ...] = tuple(SCHEDULES)
    """Pipeline schedules that the search tries."""
    recomputes: tuple[Recompute, ...] = RECOMPUTE
    offloads: tuple[Offload, ...] = ((0.0, False),)
    """Allowed values of `offload_activations` with `offload_optimizer`."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Given keys of the layout: `tp`, `pp`, `dp`, `cp`, `ulysses`, `ep`, `etp`, `micro_batch`, `schedule`,
    `virtual_stages`, `zero`, `shard_group`; and those that all layouts have: `expert_load` and
    `expert_dispatch`."""
    measured_loads: Mapping[int, float] = field(default_factory=dict)
    """Load of the busiest rank by the number of ranks that share experts, as a run measured it; empty: not
    measured."""

    def allows(self, key: str, value: object) -> bool:
        """Return whether a key of the layout may have this value."""
        return bool(self.fixed.get(key, value) == value)

    @property
    def tensors(self) -> tuple[TensorOverlap, ...]:
        """Searched values of overlap.tensor: the requested one, or else turns; and off."""
        if not self.searches_overlap:
            return (self.overlap.tensor,)
        return (self.overlap.tensor or "turns", None)

    def expert_load(self, ep: int) -> float:
        """Return the value of `Layout.expert_load` of layouts in which so many ranks share experts."""
        return float(self.fixed.get("expert_load", self.measured_loads.get(ep, 1.0)))

    @property
    def expert_dispatch(self) -> ExpertDispatch:
        """Value of `Layout.expert_dispatch` where ranks share experts."""
        given: ExpertDispatch = self.fixed.get("expert_dispatch", "expert")
        return given

    def with_cluster(self, cluster: Cluster) -> "LayoutProblem":
        """Return the same problem on another cluster."""
        return replace(self, cluster=cluster)


@dataclass(frozen=True)
class LayoutCandidate:
    """A layout with its closed-form seconds and bytes."""

    layout: Layout
    overlap: OverlapConfig
    seconds: float
    """Predicted seconds of an iteration."""
    memory_bytes: float
    """Predicted bytes of the fullest accelerator."""
    fit_probability: float
    """Probability of not running out of memory."""

    def in_pairs(self, problem: LayoutProblem) -> "LayoutCandidate | None":
        """Return the layout with forwards and backwards in pairs, in the schedule that pairs need; ``None``:
        there can be none, or there are pairs already."""
        if not problem.searches_pairs or self.overlap.pairs:
            return None
        layout = self.layout
        if layout.pp > 1 and layout.virtual_stages == 1:
            layout = layout.model_copy(update={"schedule": "eager-1f1b"})
        elif layout.schedule_name == "zero-bubble-v":
            layout = layout.model_copy(update={"schedule": "dualpipe-v"})
        overlap = self.overlap.model_copy(update={"pairs": True, "pipeline": True})
        several = problem.global_batch // (layout.dp * layout.micro_batch) > 1
        allowed = problem.allows("schedule", layout.schedule_name)
        if lacks_for_pairs(layout, overlap) or not (several and allowed):
            return None
        return replace(self, layout=layout, overlap=overlap)

    def workload(self, problem: LayoutProblem) -> Workload:
        """Return the candidate as a workload for the cost model; one that cannot be captured has no CUDA
        graphs."""
        profile = problem.profile
        if profile.cuda_graphs and lacks_for_graphs(self.layout, self.overlap):
            profile = replace(profile, cuda_graphs=False)
        return Workload(
            model=problem.model,
            layout=self.layout,
            global_batch=problem.global_batch,
            overlap=self.overlap,
            profile=profile,
            comm=problem.comm,
            snapshots=problem.snapshots,
            optimizer=problem.optimizer,
            newton_schulz=problem.newton_schulz,
            qk_clip=problem.qk_clip,
            ema_every=problem.ema_every,
            attended=problem.attended,
            generates=problem.generates,
            value_bytes=problem.value_bytes,
        )
