"""What a node observes of its ranks, links and devices: plain values in messages, journal and decisions.

The agent (`myriad.supervise.agent`) measures them and sends them in a heartbeat
(`myriad.supervise.messages.Beat`) or when a rank ends. Nothing here refers to the driver.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "Cause",
    "CommStatus",
    "DeviceTrouble",
    "Digest",
    "Examined",
    "GpuFacts",
    "How",
    "LinkStatus",
    "LinkTraffic",
    "NicFacts",
    "NodeFacts",
    "RankExited",
    "RankStatus",
]

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
"""Why a rank ended.

    done             it finished
    turned           it ended for a requested restart
    interrupted      SIGINT
    user, input      an error of the user's program, or of its input
    peer             another rank was lost
    killed, crash    SIGKILL from outside; a fatal signal
    host memory, device memory, disk    the memory or disk was full
    device           a fault of its device
    unsaved          the last checkpoint could not be stored, and is only in memory
    nan              the loss or a gradient of some rank was not finite
    spike            the loss or the gradients had a spike, and the run goes back before it
    state            the run has trained, but no state of it can be loaded
    data             tokens of the corpus differ from those that were written
"""


@dataclass(frozen=True)
class Digest:
    """A digest of the state that a rank shares with its replicas."""

    step: int
    """Number of finished steps."""
    value: int


@dataclass(frozen=True)
class CommStatus:
    """Communication that a rank without progress has reached."""

    counters: tuple[int, ...]
    """Operations begun in this attempt, in the order of
    `myriad.telemetry.progress.operation_counters.COUNTERS`."""
    waits: int
    """Bit mask of the counters for which the rank waits in the newest operation."""
    on_device: bool
    """Whether the counters show the GPU's progress; its host may be ahead."""


@dataclass(frozen=True)
class RankStatus:
    """The state of a living rank."""

    rank: int
    pid: int
    state: str
    """State letter of the kernel: R, S, D, T (stopped), ..."""
    phase: str
    activity: str
    step: int
    """Step in progress; -1: none yet."""
    entered: int
    left: int
    """Operations that it has entered and left in this attempt; by its GPU's progress, if that is known."""
    idle_seconds: float
    """Seconds since its row of the progress page changed, by the clock of its own machine."""
    step_seconds: float
    """Seconds of its last step; 0: none yet."""
    busy_seconds: float = 0.0
    """Seconds of that step in which it computed and did not wait, with packed documents divided by their work
    relative to the batch's; 0: unknown."""
    digests: tuple[Digest, ...] = ()
    """Newest digests of its state."""
    comm: CommStatus | None = None
    """Communication that it has reached; ``None``: the rank makes progress."""


@dataclass(frozen=True)
class LinkStatus:
    """Counters of a network interface or RDMA port that ranks or the agent use, from the kernel."""

    name: str
    up: bool
    downs: int
    """How often it has gone down, also while no driver could be reached."""
    errors: int
    """Number of damaged packets, sent or received."""


@dataclass(frozen=True)
class LinkTraffic:
    """Traffic of a link while all ranks of its node trained: in the newest steps that ended since the last
    heartbeat, and so far in the step in progress. Rates are bytes per second at which the average byte was
    transferred."""

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
    """Seconds in the step in progress since the link last carried data."""
    sent_again: int
    """Retransmissions since the last heartbeat: TCP segments of the node, for the interface that carries
    most, or packets of an RDMA port."""
    paused: int
    """Upper limit of the microseconds since the last heartbeat in which the other end paused the link (PFC).
    0 also if the driver does not count them."""


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
    """Bandwidth in one direction, as the network driver reports it; 0: unknown."""


@dataclass(frozen=True)
class NodeFacts:
    """The hardware and software of a node: sent after joining and after a change, not with each heartbeat."""

    node: int
    host: str
    address: str
    """Address at which the driver reaches the node."""
    pod: str
    """Name of the Kubernetes pod; empty: it is not in a pod."""
    cpu: str
    memory_bytes: int
    gpus: tuple[GpuFacts, ...]
    nics: tuple[NicFacts, ...]
    versions: dict[str, str]
    """Versions of the kernel and the drivers, by name."""


@dataclass(frozen=True)
class DeviceTrouble:
    """A report of the accelerators' driver while these ranks ran."""

    device: int
    """Index on the node; -1: the device driver itself does not answer."""
    rank: int
    """Rank that uses the device; -1: no rank, or unknown."""
    epoch: int
    """Attempt of the ranks that ran then."""
    blame: Literal["user", "hardware", "unknown"]
    words: str
    lost: bool = False
    """Whether no rank can use the device any more."""
    can_wait: bool = False
    """Whether ranks can continue for now."""


@dataclass(frozen=True)
class RankExited:
    """The exit of a rank."""

    node: int
    epoch: int
    rank: int
    code: int
    """Exit code, or minus the signal."""
    cause: Cause
    step: int
    """Step in progress; -1: none yet."""
    error: str
    """Error from its log: one line, or the traceback."""
    log: str
    digests: tuple[Digest, ...] = ()
    """Newest digests of its state."""


How = Literal["full", "short"]
"""Extent of an examination: all tests, or only those that disturb nothing else on the machine."""


@dataclass(frozen=True)
class Examined:
    """The doctor's verdict on a node."""

    node: int
    machine: str
    how: How
    verdict: Literal["fit", "unfit", "unknown"]
    """unknown: the doctor itself failed."""
    words: str
    complaints: tuple[str, ...]
    """Descriptions of each item that is slow or bad."""
    seconds: float
