"""Requirements of a program on GPUs to be deadlock-free, and the check before a job's ranks start.

    job = DeviceJob(layout, overlap, comm, shares=(8,), tied=False)
    find_needs(job).lines()             "on GPUs it is free of deadlock with communicators made before ..."
    check_device_job(job, queues=8)     raises an error of one line that names a proved setting

The smallest number of queues with which every assignment of streams to queues is safe is either one or the
number of streams. Sharing a single queue is a possible assignment for any number of queues, and the one that
blocks the most (`myriad.program.device_check.single_queue`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from myriad.errors import BadInputError
from myriad.program.actions import Program
from myriad.program.build import Shape, build_program
from myriad.program.config import OverlapConfig
from myriad.program.device_check import Deadlock, Device, Moment, find_deadlock, single_queue
from myriad.program.device_operations import DeviceOperation, StreamUse, list_operations, streams_of

__all__ = [
    "MAX_CONNECTIONS",
    "MODULE_LOADING",
    "MOST_QUEUES",
    "DeviceJob",
    "DeviceNeeds",
    "check_device_job",
    "find_needs",
    "posts_early",
    "queues_in",
    "rank_environment",
    "shorter_shares",
]

MAX_CONNECTIONS, MODULE_LOADING = "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"
"""Environment variables that CUDA reads when a process first uses it."""
MOST_QUEUES = 32
"""The largest allowed value of ``CUDA_DEVICE_MAX_CONNECTIONS``."""
_OWN_QUEUES = "8"
"""CUDA's default number of hardware queues."""


def shorter_shares(shares: Sequence[int], pp: int) -> tuple[int, ...]:
    """Return numbers of micro-batches whose programs are proved in place of longer ones.

    A program repeats the same actions for every further ``pp`` micro-batches. At least ``3 pp`` of the
    largest number are kept, and ``pp`` of the smallest. Numbers that are no multiples of ``pp`` stay, because
    their rounds differ.
    """
    if any(share % pp for share in shares):
        return tuple(shares)
    rounds = max(0, min(max(shares) // pp - 3, min(shares) // pp - 1))
    return tuple(share - rounds * pp for share in shares)


class DeviceShape(Shape, Protocol):
    """The values of a layout that its use of devices depends on."""

    @property
    def tp(self) -> int: ...


class Communication(Protocol):
    """The settings of data-parallel communication that the use of devices depends on."""

    @property
    def hierarchy(self) -> str: ...
    @property
    def island_size(self) -> int | None: ...
    @property
    def node_bandwidth(self) -> float | None: ...
    @property
    def sync_every(self) -> int: ...


@dataclass(frozen=True)
class DeviceJob:
    """The settings that decide which operations a job's ranks issue to their devices."""

    shape: DeviceShape
    overlap: OverlapConfig
    comm: Communication
    shares: tuple[int, ...]
    """Number of micro-batches of each replica."""
    tied: bool
    num_chunks: int = 1
    """Number of chunks into which data parallelism cuts each stage."""
    shares_transfers: bool = False
    """Whether tensor-parallel ranks hold equal tensors between stages, and share their transfers."""
    orthogonalizes: bool = False
    """Whether the optimizer orthogonalizes matrices."""

    def runs(self) -> list[list[DeviceOperation]]:
        """Return the operations of two runs: an iteration with a validation after it, and a validation alone.
        All ranks meet in an iteration's norm and in a validation's loss, so earlier programs do not affect
        later ones."""
        shares = shorter_shares(self.shares, self.shape.pp)
        trained, validated = [], []
        for share in sorted(set(shares)):
            step = self._build(share, max(shares), training=True)
            validation = self._build(share, max(shares), training=False)
            trained.append([step, validation])
            validated.append([validation])
        return [list_operations(replicas, self._streams()) for replicas in (trained, validated)]

    def _build(self, num_micro_batches: int, most: int, *, training: bool) -> Program:
        return build_program(
            self.shape,
            self.overlap,
            num_micro_batches,
            tied=self.tied,
            training=training,
            num_chunks=self.num_chunks,
            most_micro_batches=most,
            orthogonalizes=self.orthogonalizes,
        )

    def _streams(self) -> StreamUse:
        """Return the use of streams. With ``comm.hierarchy = auto`` there is one level unless rates are
        declared and one group shards the state, because NCCL chooses its own algorithm."""
        comm, shape = self.comm, self.shape
        declared = 3 if comm.node_bandwidth is not None and not shape.reduces_across else 1
        levels = {"flat": 1, "node": 2, "switch": 3}.get(comm.hierarchy, declared)
        return StreamUse(
            both_ways=shape.virtual_stages > 1,
            dp=1 if comm.sync_every > 1 else shape.dp,
            levels=levels + (levels > 1 and comm.island_size is not None),
            tp=shape.tp,
            shares_transfers=self.shares_transfers,
        )


@dataclass(frozen=True, slots=True)
class DeviceNeeds:
    """The requirements of a job's programs on GPUs and NCCL."""

    communicators_at_start: bool
    """Whether communicators of pairs of ranks must be created before the first iteration."""
    kernels_at_start: bool
    """Whether kernels of forwards and backwards must be loaded before the first iteration."""
    queues: int
    """Number of hardware queues needed for any assignment of streams; 1: any number is enough."""
    streams: int
    """The largest number of streams that a rank uses."""
    deadlock: Deadlock | None = None
    """The deadlock that occurs under every assumption; ``None``: there is none."""

    def lines(self) -> list[str]:
        """Return the requirements as sentences for the user."""
        if self.deadlock is not None:
            return [f"on GPUs it may deadlock: {self.deadlock}"]
        needs = [
            *["communicators made before the first step"] * self.communicators_at_start,
            *["kernels loaded before it"] * self.kernels_at_start,
            *[f"a hardware queue for each of {self.streams} streams"] * (self.queues > 1),
        ]
        if not needs:
            return [
                "on GPUs it is free of deadlock, whatever is loaded late and whichever streams share a queue"
            ]
        listed = needs[0] if len(needs) == 1 else f"{', '.join(needs[:-1])} and {needs[-1]}"
        found = [f"on GPUs it is free of deadlock with {listed}"]
        if self.queues > 1:
            found.append(f"ranks see to that, unless {MAX_CONNECTIONS} is set to less than {self.queues}")
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the requirements as a JSON object."""
        return {
            "free_of_deadlock": self.deadlock is None,
            "communicators_at_start": self.communicators_at_start,
            "kernels_at_start": self.kernels_at_start,
            "queues": self.queues,
            "streams": self.streams,
            "cycle": None if self.deadlock is None else [step._asdict() for step in self.deadlock.waits],
        }


def find_needs(job: DeviceJob) -> DeviceNeeds:
    """Return the smallest requirements that are proved to be enough, for training and validation."""
    runs = job.runs()
    streams = _most_streams(runs)
    if (deadlock := _first_deadlock(runs, Device())) is not None:
        return DeviceNeeds(True, True, streams, streams, deadlock)
    made: Moment = "lazily" if _first_deadlock(runs, Device("lazily")) is None else "at start"
    loaded: Moment = "lazily" if _first_deadlock(runs, Device(made, "lazily")) is None else "at start"
    shared = _first_deadlock(runs, Device(made, loaded, single_queue)) is None
    return DeviceNeeds(made == "at start", loaded == "at start", 1 if shared else streams, streams)


def _most_streams(runs: Sequence[Sequence[DeviceOperation]]) -> int:
    return max(len(names) for run in runs for names in streams_of(run))


def _first_deadlock(runs: Sequence[Sequence[DeviceOperation]], device: Device) -> Deadlock | None:
    return next((deadlock for run in runs if (deadlock := find_deadlock(run, device)) is not None), None)


def posts_early(shape: Shape, overlap: OverlapConfig) -> bool:
    """Return whether messages between pipeline ranks are in flight while these ranks compute."""
    return shape.pp > 1 and overlap.pipeline


def rank_environment(shape: Shape, overlap: OverlapConfig) -> dict[str, str]:
    """Return environment variables that a rank sets before it first uses CUDA, unless they are set. They ask
    for the largest number of queues, and load kernels with their modules. The result is empty if no message
    waits behind compute."""
    if not posts_early(shape, overlap):
        return {}
    return {MAX_CONNECTIONS: str(MOST_QUEUES), MODULE_LOADING: "EAGER"}


def queues_in(environment: Mapping[str, str], shape: Shape, overlap: OverlapConfig) -> int:
    """Return the number of hardware queues of a rank that starts with this environment and adds
    `rank_environment` to it. Raises `BadInputError` for an invalid value."""
    asked = (rank_environment(shape, overlap) | dict(environment)).get(MAX_CONNECTIONS, _OWN_QUEUES)
    if not asked.isdigit() or not 1 <= int(asked) <= MOST_QUEUES:
        raise BadInputError(MAX_CONNECTIONS, asked, f"a whole number from 1 to {MOST_QUEUES}, or unset")
    return int(asked)


def check_device_job(job: DeviceJob, queues: int) -> None:
    """Check that programs are proved deadlock-free on GPUs with this number of hardware queues, with
    communicators and kernels ready before the first step. Raises `BadInputError`, which names settings that
    are proved."""
    if job.shape.pp == 1:
        return
    runs = job.runs()
    if (deadlock := _first_deadlock(runs, Device())) is not None:
        raise BadInputError(
            "overlap.pipeline", job.overlap.pipeline, f"false on GPUs, as it may deadlock: {deadlock}"
        )
    streams = _most_streams(runs)
    if queues >= streams or _first_deadlock(runs, Device(queues=single_queue)) is None:
        return
    proved = [
        f"{key} = {_typed(value)}" for key, value in _ALTERNATIVES if _runs_in_one_queue(job, key, value)
    ]
    other = " or ".join(proved) or "layout.pp = 1"
    allowed = (
        f"unset, or at least {streams}: the pipeline may deadlock on GPUs where some of its {streams} "
        f"streams share a hardware queue. With fewer queues: {other}"
    )
    raise BadInputError(MAX_CONNECTIONS, str(queues), allowed)


_ALTERNATIVES: tuple[tuple[str, object], ...] = (("overlap.receive_ahead", 1), ("overlap.pipeline", False))
"""Keys and values that often need only one queue, the cheapest first."""


def _runs_in_one_queue(job: DeviceJob, key: str, value: object) -> bool:
    changed = job.overlap.model_copy(update={key.removeprefix("overlap."): value})
    return _first_deadlock(replace(job, overlap=changed).runs(), Device(queues=single_queue)) is None


def _typed(value: object) -> str:
    return str(value).lower()
