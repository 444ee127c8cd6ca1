"""What is to be driven, and how far it has come: what outlives a driver, in the journal."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from myriad.comm.attempt_layout import AS_THE_JOB, AttemptLayout
from myriad.resilience.decide.actions import Accused, Outcome
from myriad.resilience.decide.fewer import Fewer
from myriad.resilience.decide.incidents import Incident
from myriad.resilience.decide.layers import Moved
from myriad.resilience.decide.numbers import OnNan, Trial
from myriad.resilience.decide.work import Work
from myriad.resilience.facts import EvictionAsked

__all__ = ["Plan", "State"]


@dataclass(frozen=True)
class Plan:
    """What the run needs."""

    world: int
    nodes: int
    """On which the ranks run; whatever else joins is a spare."""
    first_epoch: int
    patience: float = 1.0
    restarts: int = 3
    saving_seconds: float = 600.0
    gather_seconds: float = 300.0
    """How long nodes are waited for."""
    late_seconds: float = 0.0
    """How much longer than spares the nodes 0, 1, ... may take to come at the very start."""
    listen: str = "127.0.0.1"
    """Where the driver is reached: ADDRESS or ADDRESS:PORT of its machine."""
    replicas: tuple[tuple[int, ...], ...] = ()
    """Ranks that are to hold the same parameters, bit for bit; none: nothing is compared."""
    on_nan: OnNan = "replay"
    spike_steps: tuple[int, int] = (0, 0)
    """How far before a spike the run goes on from, and to how far after it batches are skipped."""
    doctor: Literal["off", "spares", "start"] = "off"
    """Whom it is to see by itself."""
    skipped_steps: tuple[int, ...] = ()
    """That earlier starts of the run have found to give no finite numbers."""
    newest_step: int | None = None
    """An earlier start of the run ended before it had gone back to a step that can be trusted: to this."""
    work: Work | None = None
    """What ranks do in a step; ``None``: nobody is compared."""
    dp: int = 1
    """Data-parallel replicas of the job."""
    traffic: tuple[tuple[float, float], ...] = ()
    """Bytes that the program sends and receives over the edge of a node in a step, by the block of ranks that
    it has; none: not known."""
    fewer: Fewer | None = None
    """With which it may go on while nodes are missing; ``None``: it waits for them."""

    def world_of(self, layout: AttemptLayout) -> int:
        """Ranks of an attempt."""
        return self.world if layout.dp is None else self.world // self.dp * layout.dp

    def nodes_of(self, layout: AttemptLayout) -> int:
        """That its ranks fill."""
        return self.world_of(layout) // (self.world // self.nodes)

    def replicas_of(self, layout: AttemptLayout) -> Sequence[Sequence[int]]:
        """Ranks of an attempt that are to hold the same."""
        if layout.dp is None or not self.replicas:
            return self.replicas
        each = self.world // self.dp
        return [range(rank, layout.dp * each, each) for rank in range(each)] if layout.dp > 1 else ()


@dataclass
class State:
    """What outlives a driver."""

    phase: Literal["gathering", "running", "ending", "over"]
    epoch: int
    """Of the newest attempt; before the first: one less."""
    placement: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Node to its ranks, of that attempt."""
    exits: dict[int, int] = field(default_factory=dict)
    """Of that attempt: rank to exit code, or minus the signal. What it said is told once, in an incident: of
    12,288 ranks that lost a peer each has a traceback."""
    incident: Incident | None = None
    """Of that attempt."""
    repeats: dict[str, int] = field(default_factory=dict)
    """How often each fault has come since the last step of progress."""
    best_step: int = -1
    """The highest that was under way."""
    fault_step: int = -1
    """The same when the last fault came."""
    agreed_step: int = -1
    """The newest after which all replicas were told to hold the same."""
    newest_step: int | None = None
    """The newest whose state can be trusted, until the ranks have gone back to it; ``None``: all can."""
    wrong_step: int = -1
    """What `agreed_step` was when replicas last differed."""
    wrong_on: dict[int, int] = field(default_factory=dict)
    """Node to how often wrong numbers were found on it."""
    trial: Trial | None = None
    """Of numbers that are not finite."""
    skipped_steps: tuple[int, ...] = ()
    """In which nothing moves: their batches give no finite numbers, wherever they are computed."""
    layout: AttemptLayout = AS_THE_JOB
    """Of that attempt."""
    next_layout: AttemptLayout | None = None
    """Of the next one, where that was decided; ``None``: as this one has it."""
    full_places: tuple[int, ...] = ()
    """Nodes in the order of their ranks, of the newest attempt with all replicas: where they go back to."""
    too_few: int = 0
    """With so many replicas memory was full: an attempt with fewer than the job's has more than these."""
    moved: Moved | None = None
    """What was known when its layers were moved, or when it was decided that they will be."""
    layers_stay: bool = False
    """With layers elsewhere than the job has them a rank had too little memory: none is moved any more."""
    turning: bool = False
    """It is to end after a step, for another one."""
    leaving: int = -1
    """The node that then gives way to a spare; -1: none."""
    leaving_as: Accused = ""
    """Of what it is the cause."""
    asked: EvictionAsked | None = None
    """By whom, if a person wants it to leave."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Machine, or executor where a machine has several nodes, to why it takes part no more."""
    stop_asked: bool = False
    outcome: Outcome | None = None
    reason: str = ""

    def node_of(self, rank: int) -> int:
        """Where it is in this attempt."""
        return next(node for node, ranks in self.placement.items() if rank in ranks)
