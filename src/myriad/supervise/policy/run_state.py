"""What a run needs (`RunPlan`) and how far it has come (`RunState`): the journal keeps both."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from myriad.comm.attempt_layout import AS_THE_JOB, AttemptLayout
from myriad.supervise.messages import EvictionAsked, NodeJoined
from myriad.supervise.policy.elastic import ElasticLayouts
from myriad.supervise.policy.incidents import Incident
from myriad.supervise.policy.nan_trial import NanTrial, OnNan
from myriad.supervise.policy.policy_actions import EvictionCause, Outcome
from myriad.supervise.policy.step_work import LayerMove, StepWork

__all__ = ["RunPlan", "RunState"]


@dataclass(frozen=True)
class RunPlan:
    """The requirements and settings of a run."""

    world: int
    nodes: int
    """Number of nodes on which the ranks run; any other node that joins is a spare."""
    first_epoch: int
    patience: float = 1.0
    restarts: int = 3
    saving_seconds: float = 600.0
    gather_seconds: float = 300.0
    """How long to wait for nodes."""
    late_seconds: float = 0.0
    """How much later than spares the nodes 0, 1, ... may connect at the first start."""
    listen: str = "127.0.0.1"
    """ADDRESS or ADDRESS:PORT on which the driver listens."""
    replicas: tuple[tuple[int, ...], ...] = ()
    """Groups of ranks that must hold bitwise equal parameters; empty: replicas are not compared."""
    expert_replicas: tuple[tuple[int, ...], ...] = ()
    """Groups of ranks that must hold bitwise equal experts; empty: those of ``replicas`` must."""
    on_nan: OnNan = "replay"
    spike_steps: tuple[int, int] = (0, 0)
    """How many steps before a spike the run restarts, and up to how many steps after it batches are
    skipped."""
    doctor: Literal["off", "spares", "start"] = "off"
    """Which nodes the doctor examines automatically."""
    skipped_steps: tuple[int, ...] = ()
    """Steps at which earlier starts of the run found non-finite numbers."""
    newest_step: int | None = None
    """Newest step that can be trusted, if an earlier start of the run ended before it had gone back to that
    step."""
    work: StepWork | None = None
    """Work of a step; ``None``: ranks are not compared."""
    dp: int = 1
    """Number of data-parallel replicas of the job."""
    traffic: tuple[tuple[float, float], ...] = ()
    """Bytes that the program sends to and receives from other nodes in a step, for each node-sized block of
    ranks; empty: unknown."""
    longer_steps: tuple[int, ...] = ()
    """Steps, counted from 1, that get at least twice the tokens of the step before."""
    fewer: ElasticLayouts | None = None
    """Layouts in which the run may continue while nodes are missing; ``None``: the run waits for them."""

    def world_of(self, layout: AttemptLayout) -> int:
        """Return the number of ranks of an attempt."""
        return self.world if layout.dp is None else self.world // self.dp * layout.dp

    def nodes_of(self, layout: AttemptLayout) -> int:
        """Return the number of nodes that the ranks of an attempt fill."""
        return self.world_of(layout) // (self.world // self.nodes)

    def replicas_of(self, layout: AttemptLayout) -> Sequence[Sequence[int]]:
        """Return the groups of ranks of an attempt that must hold equal parameters."""
        if layout.dp is None or not self.replicas:
            return self.replicas
        world, stride = self.world_of(layout), self.replicas[0][1] - self.replicas[0][0]
        if world % stride or world == stride:
            return ()  # one replica, or state that all remaining replicas shard
        return [range(rank, world, stride) for rank in range(stride)]

    def expert_replicas_of(self, layout: AttemptLayout) -> Sequence[Sequence[int]]:
        """Return the groups of ranks of an attempt that must hold equal experts; with another number of
        replicas these are not compared."""
        return self.expert_replicas if layout.dp is None else ()


@dataclass
class RunState:
    """The state of a run that outlives a driver."""

    phase: Literal["gathering", "running", "ending", "over"]
    epoch: int
    """Number of the newest attempt; before the first attempt, one less than its number."""
    placement: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Ranks of each node in that attempt."""
    exits: dict[int, int] = field(default_factory=dict)
    """Exit code, or minus the signal, of each ended rank of that attempt. Only the incident keeps an error
    text: each of 12,288 ranks that lost a peer has a traceback."""
    incident: Incident | None = None
    """Fault that ended that attempt."""
    repeats: dict[str, int] = field(default_factory=dict)
    """How often each fault has occurred since the last progress."""
    best_step: int = -1
    """Highest step that was in progress."""
    fault_step: int = -1
    """Value of `best_step` at the last fault."""
    agreed_step: int = -1
    """Newest step after which all replicas reported equal digests."""
    newest_step: int | None = None
    """Newest step with trusted state, until the ranks have gone back to it; ``None``: all state is
    trusted."""
    wrong_step: int = -1
    """Value of `agreed_step` when replicas last differed."""
    wrong_on: dict[int, int] = field(default_factory=dict)
    """How often wrong numbers were found on each node."""
    trial: NanTrial | None = None
    """Trial in progress that finds the cause of non-finite numbers."""
    skipped_steps: tuple[int, ...] = ()
    """Steps that change no parameter, because their batches give non-finite numbers on every node."""
    layout: AttemptLayout = AS_THE_JOB
    """Layout of that attempt."""
    next_layout: AttemptLayout | None = None
    """Layout of the next attempt, if it was decided; ``None``: unchanged."""
    full_places: tuple[int, ...] = ()
    """Nodes in the order of their ranks in the newest attempt with all replicas. Returning nodes get these
    places."""
    too_few: int = 0
    """Largest number of replicas with which memory was full; an attempt with fewer than the job's needs
    more."""
    moved: LayerMove | None = None
    """What was known when layers were moved, or when the move was decided."""
    layers_stay: bool = False
    """Whether layers must not be moved any more, because a rank ran out of memory with moved layers."""
    turning: bool = False
    """Whether the ranks restart after the step in progress."""
    leaving: int = -1
    """Node that a spare then replaces; -1: no node."""
    leaving_as: EvictionCause = ""
    """Cause for which that node is evicted."""
    asked: EvictionAsked | None = None
    """Request of a person for that eviction, if there was one."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Reason for which a machine takes no part any more. The key is the agent where a machine has several
    nodes."""
    stop_asked: bool = False
    outcome: Outcome | None = None
    reason: str = ""

    def node_of(self, rank: int) -> int:
        """Return the node of a rank in this attempt."""
        return next(node for node, ranks in self.placement.items() if rank in ranks)

    def why_left_out(self, joined: NodeJoined) -> str:
        """Return why a node was evicted from this run as the cause of a fault; empty if it was not."""
        by_machine = self.left_out.get(joined.machine) if joined.machine else ""
        return self.left_out.get(joined.by) or by_machine or ""
