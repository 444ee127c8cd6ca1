"""The messages of a run: plain values, the same on the wire, in the journal and in the decisions.

    agent ──NodeJoined, RankExited, Beat, StopAsked, Examined, ClockAsked──► driver
    driver ──Start, End, Turn, Dump, Agreed, ExamineNode, Stop, ClockAnswer, Leave──► agent
    a machine that joins       ──NodeWanted──► driver ──NodeNumber──► the machine, which starts an agent
    a person who evicts a node ──EvictionAsked──► driver ──EvictionAnswer──► the person
    a person who traces ranks  ──TraceAsked──► driver ──Trace──► agents ──► ranks
                              ◄─TraceAnswer──        ◄─Traced──

``epoch`` is the number of an attempt. A message about another attempt than the receiver's is ignored. What
nodes observe is in `myriad.supervise.observations`.
"""

from dataclasses import dataclass
from typing import get_args

from myriad.comm.attempt_layout import AS_THE_JOB, AttemptLayout
from myriad.supervise.observations import (
    DeviceTrouble,
    Examined,
    How,
    LinkStatus,
    LinkTraffic,
    NodeFacts,
    RankExited,
    RankStatus,
)
from myriad.telemetry.traces.trace_request import MOST_SECONDS, What

__all__ = [
    "MOST_RANKS",
    "OBSERVED",
    "ORDERS",
    "STOP_ASKED",
    "Agreed",
    "Beat",
    "ClockAnswer",
    "ClockAsked",
    "Dump",
    "End",
    "EvictionAnswer",
    "EvictionAsked",
    "ExamineNode",
    "KeepCounters",
    "Leave",
    "NodeJoined",
    "NodeLeft",
    "NodeNumber",
    "NodeRefused",
    "NodeTaken",
    "NodeWanted",
    "Observation",
    "Observed",
    "Order",
    "Start",
    "Stop",
    "StopAsked",
    "Trace",
    "TraceAnswer",
    "TraceAsked",
    "Traced",
    "Turn",
    "exceeded_limit",
]

STOP_ASKED = "MYRIAD_STOP_ASKED"
"""Environment variable of an agent: a person asked the run to stop before the agent started."""


@dataclass(frozen=True)
class NodeJoined:
    """A node agent has connected, for the first time or again."""

    node: int
    epoch: int
    """Attempt of its last ranks; 0: it had none."""
    host: str
    port: int
    """Free port for the ranks' rendezvous."""
    cores: int
    memory_bytes: int
    running: tuple[int, ...]
    exits: tuple[RankExited, ...]
    """Exits of ranks in that attempt."""
    stop_asked: bool
    by: str = ""
    """Host and process of the agent. Another agent may not take its number while it sends heartbeats."""
    machine: str = ""
    """Machine name that is recorded beyond the run if it causes faults; empty: unknown."""
    layout: AttemptLayout = AS_THE_JOB
    """Layout of that attempt."""


@dataclass(frozen=True)
class NodeWanted:
    """A machine asks to become a node."""

    host: str
    machine: str
    node: int
    """Node number that it wants; -1: any."""


@dataclass(frozen=True)
class NodeNumber:
    """The assigned node number; a host that asks again gets the same number."""

    node: int


@dataclass(frozen=True)
class NodeLeft:
    """The connection to an agent is lost."""

    node: int


@dataclass(frozen=True)
class Beat:
    """A heartbeat of an agent, with the state of its ranks."""

    node: int
    epoch: int
    port: int
    ranks: tuple[RankStatus, ...]
    links: tuple[LinkStatus, ...] = ()
    """Links that have been up since the agent started."""
    devices: tuple[DeviceTrouble, ...] = ()
    """Troubles while these ranks ran, and lost devices."""
    clock_seconds: float = 0.0
    """Seconds since 1970 by the clock of its machine, only for reports about the clock; 0: unknown."""
    traffic: tuple[LinkTraffic, ...] = ()
    """Traffic of the links through which ranks reach other nodes."""


@dataclass(frozen=True)
class StopAsked:
    """A person wants the run to save and stop. The ranks of the node were notified (-1: no node's ranks
    yet)."""

    node: int


@dataclass(frozen=True)
class EvictionAsked:
    """A person wants a node to leave the run."""

    node: int
    who: str
    reason: str
    """Reason that the person gave; may be empty."""
    anyway: bool
    """Whether to do it without a spare: the run then waits for another node."""


@dataclass(frozen=True)
class EvictionAnswer:
    """The driver's answer to an eviction request."""

    refused: str
    """Why the request is refused; empty: it is accepted."""
    message: str
    """Description of what happens next."""


@dataclass(frozen=True)
class ClockAsked:
    """An agent asks for the driver's time. No decision depends on it."""

    node: int
    asked_ns: int
    """Nanoseconds since 1970, by the agent's clock."""


MOST_RANKS: dict[What, int] = {"profile": 16, "flight": 256, "stacks": 1024, "network": 2**20}
"""Most ranks at a time: each writes a file."""


@dataclass(frozen=True)
class TraceAsked:
    """A person asks for traces of ranks."""

    who: str
    what: What
    ranks: tuple[int, ...]
    """Ranks to trace; empty: all ranks of the run."""
    seconds: float


@dataclass(frozen=True)
class TraceAnswer:
    """The driver's answer when all traces are written or have failed."""

    refused: str
    """Why the request is refused; empty: it is accepted."""
    files: tuple[str, ...]
    """Paths in the run's folder."""
    found: tuple[str, ...]
    """Lines that describe findings."""
    problems: tuple[str, ...]
    """Lines that describe what is missing."""


@dataclass(frozen=True)
class Trace:
    """Trace ranks of this node."""

    epoch: int
    number: int
    """Number of the request."""
    what: What
    ranks: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Traced:
    """The answer of an agent to `Trace`."""

    node: int
    number: int
    files: tuple[str, ...]
    found: tuple[str, ...]
    problems: tuple[str, ...]


def exceeded_limit(what: What, num_ranks: int, seconds: float) -> tuple[str, object, str]:
    """Return key, value and allowed values if the request exceeds a limit; else three empty texts."""
    if not 0 < seconds <= MOST_SECONDS:
        return "--seconds", seconds, f"above 0, at most {MOST_SECONDS:g}"
    if num_ranks > MOST_RANKS[what]:
        return "--ranks", num_ranks, f"at most {MOST_RANKS[what]} at a time for --what {what}"
    return "", "", ""


Observed = NodeJoined | RankExited | Beat | StopAsked | Examined | NodeFacts
Observation = Observed | NodeLeft | EvictionAsked
OBSERVED = (NodeJoined, RankExited, Beat, StopAsked, Examined, Traced, NodeFacts)
"""Messages that an agent may send."""


@dataclass(frozen=True)
class Start:
    """Start the ranks of a new attempt."""

    epoch: int
    world: int
    ranks: tuple[int, ...]
    host: str
    port: int
    """Port of the ranks' rendezvous."""
    newest_step: int | None = None
    """Newest step that may be restored; ``None``: no limit."""
    skipped_steps: tuple[int, ...] = ()
    """Steps in which no parameter changes."""
    layout: AttemptLayout = AS_THE_JOB


@dataclass(frozen=True)
class End:
    """Kill the ranks of an attempt."""

    epoch: int


@dataclass(frozen=True)
class Turn:
    """Have the ranks of an attempt end by themselves after the step in progress."""

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
    """Have the doctor examine this node; a start of ranks cancels the examination."""

    how: How


@dataclass(frozen=True)
class Stop:
    """A person wants the run to save and stop."""


@dataclass(frozen=True)
class NodeTaken:
    """Another agent is this node already: end."""

    by: str


@dataclass(frozen=True)
class NodeRefused:
    """This machine may not take part: end."""

    why: str
    examine: How | None = None
    """First examine it and report the result; ``None``: no examination."""


@dataclass(frozen=True)
class Leave:
    """The run is over: end all ranks and this agent."""


@dataclass(frozen=True)
class Agreed:
    """All replicas agree after this step, so its snapshot can be trusted."""

    epoch: int
    step: int


@dataclass(frozen=True)
class ClockAnswer:
    """The driver's clock readings around a question."""

    asked_ns: int
    """The time that the agent sent."""
    heard_ns: int
    answered_ns: int
    boot: str
    """Boot id of the driver's machine; on the same machine the clocks are equal."""


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
    | ClockAnswer
    | KeepCounters
    | Trace
)
ORDERS = get_args(Order)
