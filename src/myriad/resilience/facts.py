"""What the driver is told, and what it says: plain values, the same on the wire, in the journal and in the
decisions.

    executor ──NodeJoined, RankExited, Beat, StopAsked, Examined, ClockAsked──► driver
    driver ──Start, End, Turn, Dump, Agreed, ExamineNode, Stop, ClockTold, Leave──► executor
    somebody who wants to be a node ──NodeWanted──► driver ──NodeNumber──► it becomes one
    a person who wants a node to leave ──EvictionAsked──► driver ──EvictionAnswer──► is told
    a person who wants to see what ranks do: `traces`

``epoch`` is the number of an attempt. Whoever is told of another epoch than its own drops what it was told.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from myriad.comm.attempt_layout import AS_THE_JOB, AttemptLayout
from myriad.resilience.traces import Trace, Traced

__all__ = [
    "OBSERVED",
    "ORDERS",
    "STOP_ASKED",
    "Agreed",
    "Beat",
    "Cause",
    "ClockAsked",
    "ClockTold",
    "DeviceTrouble",
    "Digest",
    "Dump",
    "End",
    "EvictionAnswer",
    "EvictionAsked",
    "ExamineNode",
    "Examined",
    "GpuFacts",
    "How",
    "KeepCounters",
    "Leave",
    "LinkSeen",
    "LinkTraffic",
    "NicFacts",
    "NodeFacts",
    "NodeJoined",
    "NodeLeft",
    "NodeNumber",
    "NodeRefused",
    "NodeTaken",
    "NodeWanted",
    "Observation",
    "Observed",
    "Order",
    "RankExited",
    "RankSeen",
    "Start",
    "Stop",
    "StopAsked",
    "Turn",
]

STOP_ASKED = "MYRIAD_STOP_ASKED"
"""Tells an executor, in its environment, that a person wanted the run to stop before it was started."""

Cause = Literal[
    "done",
    "turned",
    "interrupted",
    "user",
    "input",
    "peer",
    "killed",
    "crash",
    "host memory",
    "device memory",
    "device",
    "disk",
    "unsaved",
    "nan",
    "spike",
    "state",
    "data",
]
"""Why a rank ended: by itself and well; as it was asked to, for another attempt; by a SIGINT; by an error of
the user's program, or of its input; because another one was gone; by a SIGKILL from outside; by a fatal
signal; because memory or a disk was full; because the last checkpoint could not be stored, and is held in
memory; by a fault of its device; because some rank's loss or gradient was not finite; because the loss or the
gradients were a spike, and it is to be gone back before it; because no state of a run that has trained can be
loaded; because tokens of the corpus are not those that were written."""


@dataclass(frozen=True)
class Digest:
    """Of what a rank's replicas are to hold alike."""

    step: int
    """Steps done."""
    value: int


@dataclass(frozen=True)
class RankSeen:
    """A rank that lives."""

    rank: int
    pid: int
    state: str
    """The kernel's letter: R, S, D, T (stopped), ..."""
    phase: str
    activity: str
    step: int
    """Under way; -1: none yet."""
    entered: int
    left: int
    """Communication that it has entered and left in this attempt."""
    idle_seconds: float
    """Since its row of the progress page changed, by the clock of its own machine."""
    step_seconds: float
    """Of its last step; 0: none yet."""
    busy_seconds: float = 0.0
    """Of that step, in which it computed and did not wait; 0: nobody knows."""
    digests: tuple[Digest, ...] = ()
    """The newest."""


@dataclass(frozen=True)
class LinkSeen:
    """A network interface, or a port of RDMA, that ranks or the executor go by; the kernel's counts."""

    name: str
    up: bool
    downs: int
    """How often it has gone down: also what happened while nobody could be told."""
    errors: int
    """Packets that arrived or left damaged."""


@dataclass(frozen=True)
class LinkTraffic:
    """What a link carried while all ranks of its node trained: in the newest steps that have ended since the
    beat before, and so far in the step under way. Rates are bytes per second at which the average byte
    travelled."""

    name: str
    steps: int
    """Steps that have ended; 0: the next five fields have no meaning."""
    step_seconds: float
    """Seconds of each step; the bytes are per step, too."""
    sent_bytes: int
    received_bytes: int
    sent_rate: int
    received_rate: int
    now_step: int
    now_seconds: float
    now_sent_bytes: int
    now_received_bytes: int
    now_sent_rate: int
    now_received_rate: int
    still_seconds: float
    """Since the link last carried anything, in the step under way."""
    sent_again: int
    """Since the beat before: segments of TCP of the node, where this is the interface that carries most, or
    packets of an RDMA port."""
    paused: int
    """Since the beat before: microseconds in which the other end held the link up (PFC), at most; 0 also
    where the driver does not count them."""


@dataclass(frozen=True)
class GpuFacts:
    """One accelerator of a node."""

    model: str
    serial: str
    """Serial number of the board, or its UUID where the driver reports none; empty: unknown."""
    bus: str


@dataclass(frozen=True)
class NicFacts:
    """One network interface or RDMA device."""

    name: str
    address: str
    """MAC address, or the GUID of an RDMA device."""
    driver: str
    firmware: str
    bytes_per_second: float
    """One way, as the driver says; 0: unknown."""


@dataclass(frozen=True)
class NodeFacts:
    """What a node is: sent after joining and when it has changed, not with each beat."""

    node: int
    host: str
    address: str
    """Address at which the driver reaches the node."""
    pod: str
    """Name of the Kubernetes pod; empty: none."""
    cpu: str
    memory_bytes: int
    gpus: tuple[GpuFacts, ...]
    nics: tuple[NicFacts, ...]
    versions: dict[str, str]
    """Versions of the kernel and the drivers, by name."""


@dataclass(frozen=True)
class DeviceTrouble:
    """What the driver of a node's accelerators has reported while these ranks were there."""

    device: int
    """Its index on the node; -1: whoever is to tell of them does not."""
    rank: int
    """That uses it; -1: none, or nobody knows."""
    epoch: int
    """Of the ranks that were there then."""
    blame: Literal["user", "hardware", "unknown"]
    words: str
    lost: bool = False
    """No rank can use it any more."""
    can_wait: bool = False
    """Ranks go on for now."""


@dataclass(frozen=True)
class RankExited:
    """A rank has ended."""

    node: int
    epoch: int
    rank: int
    code: int
    """Exit code, or minus the signal."""
    cause: Cause
    step: int
    """That was under way; -1: none yet."""
    error: str
    """From its log: one line, or the traceback."""
    log: str
    digests: tuple[Digest, ...] = ()
    """The newest."""


@dataclass(frozen=True)
class NodeJoined:
    """An executor has come, or come back."""

    node: int
    epoch: int
    """Of the ranks that it had last; 0: none."""
    host: str
    port: int
    """Free there, for ranks to meet at."""
    cores: int
    memory_bytes: int
    running: tuple[int, ...]
    exits: tuple[RankExited, ...]
    """Of this epoch."""
    stop_asked: bool
    by: str = ""
    """Host and process of the executor: another one may not take its number while it is heard."""
    machine: str = ""
    """That is remembered beyond the run when it causes faults; empty: none is."""
    layout: AttemptLayout = AS_THE_JOB
    """Of this epoch."""


@dataclass(frozen=True)
class NodeWanted:
    """A machine wants to be a node."""

    host: str
    machine: str
    node: int
    """Which; -1: any."""


@dataclass(frozen=True)
class NodeNumber:
    """The node that it may be; the same again for the same host."""

    node: int


@dataclass(frozen=True)
class NodeLeft:
    """The connection to an executor is gone."""

    node: int


@dataclass(frozen=True)
class Beat:
    """An executor lives, and this is what its ranks do."""

    node: int
    epoch: int
    port: int
    ranks: tuple[RankSeen, ...]
    links: tuple[LinkSeen, ...] = ()
    """Those that have been up since the executor began."""
    devices: tuple[DeviceTrouble, ...] = ()
    """Of these ranks; and what is lost."""
    clock_seconds: float = 0.0
    """Since the epoch, by the clock of its machine: to report what is wrong, nothing is decided by it; 0: not
    told."""
    traffic: tuple[LinkTraffic, ...] = ()
    """Traffic of the links through which ranks reach other nodes."""


@dataclass(frozen=True)
class StopAsked:
    """A person wants the run to save and stop; the ranks of the node know (-1: no node's do yet)."""

    node: int


How = Literal["full", "short"]
"""Of an examination: all that the doctor tests, or what disturbs nobody on the same machine."""


@dataclass(frozen=True)
class Examined:
    """What the doctor says of a node."""

    node: int
    machine: str
    how: How
    verdict: Literal["fit", "unfit", "unknown"]
    """unknown: the doctor failed itself."""
    words: str
    complaints: tuple[str, ...]
    """Each item that is slow or bad, in words."""
    seconds: float


@dataclass(frozen=True)
class EvictionAsked:
    """A person wants a node to leave the run."""

    node: int
    who: str
    reason: str
    """In the person's own words; empty: none was given."""
    anyway: bool
    """Also where no spare stands by: the run then waits for another node."""


@dataclass(frozen=True)
class EvictionAnswer:
    """What the driver says to that."""

    refused: str
    """Why it is not done; empty: it is."""
    told: str
    """What happens now."""


@dataclass(frozen=True)
class ClockAsked:
    """An executor compares clocks: nothing is decided by it."""

    node: int
    asked_ns: int
    """Since the epoch, by its own."""


Observed = NodeJoined | RankExited | Beat | StopAsked | Examined | NodeFacts
Observation = Observed | NodeLeft | EvictionAsked
OBSERVED = (NodeJoined, RankExited, Beat, StopAsked, Examined, Traced, NodeFacts)
"""What an executor may send."""


@dataclass(frozen=True)
class Start:
    """Ranks of a new attempt."""

    epoch: int
    world: int
    ranks: tuple[int, ...]
    host: str
    port: int
    """Where they meet."""
    newest_step: int | None = None
    """No state of a later step is to be trusted; ``None``: any is."""
    skipped_steps: tuple[int, ...] = ()
    """In which nothing is to move."""
    layout: AttemptLayout = AS_THE_JOB


@dataclass(frozen=True)
class End:
    """Kill the ranks of an attempt."""

    epoch: int


@dataclass(frozen=True)
class Turn:
    """End the ranks of an attempt after the step under way, by themselves."""

    epoch: int


@dataclass(frozen=True)
class Dump:
    """Write the stacks of some ranks to their logs."""

    epoch: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class KeepCounters:
    """Store the link counters around this moment."""

    why: str


@dataclass(frozen=True)
class ExamineNode:
    """Have the doctor look at this node; ranks that are to start end it."""

    how: How


@dataclass(frozen=True)
class Stop:
    """A person wants the run to save and stop."""


@dataclass(frozen=True)
class NodeTaken:
    """Another executor is this node: end."""

    by: str


@dataclass(frozen=True)
class NodeRefused:
    """This machine takes no part: end."""

    why: str
    examine: How | None = None
    """First have it examined, and tell what was found; ``None``: nobody asks."""


@dataclass(frozen=True)
class Leave:
    """The run is over: end, and leave no rank behind."""


@dataclass(frozen=True)
class Agreed:
    """After this step all replicas were told to hold the same: its snapshot is one to go back to."""

    epoch: int
    step: int


@dataclass(frozen=True)
class ClockTold:
    """What the driver's clock said when it was asked."""

    asked_ns: int
    """As the executor said."""
    heard_ns: int
    told_ns: int
    boot: str
    """Of the driver's machine: on the same one there is nothing to compare."""


Order = (
    Start
    | End
    | Turn
    | Dump
    | Agreed
    | ExamineNode
    | Stop
    | NodeTaken
    | NodeRefused
    | Leave
    | ClockTold
    | KeepCounters
    | Trace
)
ORDERS = get_args(Order)
