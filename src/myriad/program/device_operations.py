"""The operations that each rank of a program issues to its GPU streams, as the runtime does with NCCL.

    action           operations: stream (the operations its stream waits for)
    forward(1.0)     compute
    send(a1.0->1)    activation up 0-1 (all compute issued so far)
    receive(..)      gradient 0-1, likewise;  wait(..): compute (that receive, and the sends that it proves)
    start_reduce(1)  courier (compute), dp level 0 (courier), courier (that)
    await_reduce(1)  compute (courier)
    start_across(1)  the same on streams of its own, after the reduction
    clip             world (compute), compute (that); the host waits until compute is done

PyTorch gives each NCCL communicator a stream. A point-to-point operation outside a batch uses a communicator
of its two ranks in its group (torch 2.11, ProcessGroupNCCL::pointToPoint; `myriad.comm.channel` has a group
for each payload, and with several stages per rank one for each direction). Posting makes that stream wait for
the current one, and waiting makes the current one wait for it (`myriad.comm.nccl_transport` does both around
its collectives); neither blocks the host. Two actions do: the copy of a batch (LOAD) and the norm (CLIP).

Data- and tensor-parallel peers run the same list on the same streams, so one rank represents all of them:
their collectives match no other rank here, but keep their position in the stream. Replicas with different
numbers of micro-batches are separate programs.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from myriad.program.actions import (
    SEMANTICS,
    Action,
    Collective,
    Copy,
    Kind,
    Lowering,
    PipelineTransfer,
    Program,
    Resource,
)
from myriad.program.proved_sends import Message, ProvedSends, message_of, proved_sends

__all__ = ["COMPUTE_STREAM", "DeviceOperation", "StreamUse", "list_operations", "streams_of"]

COMPUTE_STREAM = "compute"
"""The current stream of the runtime when it runs an action."""
_COURIER, _ACROSS, _MATRICES, _SNAPSHOT, _TO_HOST, _FROM_HOST, _TENSOR, _TIED, _WORLD = (
    *("courier", "courier across", "matrices", "snapshot", "to host", "from host"),
    *("tp", "tied", "world"),
)


_OF_MATRICES = (Collective.GATHER_MOMENTUM, Collective.SCATTER_UPDATE)
"""Collectives of the data- and tensor-parallel ranks, which share the matrices."""


@dataclass(frozen=True, slots=True)
class StreamUse:
    """The settings that decide, with the program, which streams a rank uses."""

    both_ways: bool
    """Whether a payload is sent up and down between two ranks (the layout has several stages per rank)."""
    dp: int = 1
    """Number of data-parallel replicas; with more than 1, gathers and reductions communicate."""
    levels: int = 1
    """Number of levels of the data-parallel hierarchy."""
    tp: int = 1
    """Number of tensor-parallel ranks; with more than 1, they communicate in each compute action."""
    shares_transfers: bool = False
    """Whether each tensor-parallel rank sends a share of a transfer, and gathers the received shares."""


@dataclass(slots=True)
class DeviceOperation:
    """One operation that a rank issues to its device."""

    rank: int
    """Pipeline rank. Ranks of further replicas are numbered after those of the first one."""
    action: Action
    """The action of the operation; for an exchange, an action with the one transfer."""
    stream: str
    after: tuple[int, ...] = ()
    """Numbers of the operations of the same rank that its stream waits for."""
    meets: Hashable = None
    """Operations of different ranks with the same key run together: none ends before all have begun."""
    connects: Hashable = None
    """Communicator that the first such operation creates. The host then waits until all members use it."""
    loads: Hashable = None
    """Kernels that the first such operation loads. The host then waits until the device has finished all
    earlier work."""
    holds_host: bool = False
    """Whether the host waits until the operation is done."""

    @property
    def is_transfer(self) -> bool:
        """Whether the operation is a message between two pipeline ranks."""
        return self.action.kind in (Kind.SEND, Kind.RECEIVE)


def streams_of(operations: Sequence[DeviceOperation]) -> list[list[str]]:
    """Return the streams of each rank in the order of their creation: the current one, those of groups, then
    those of pairs."""
    used: dict[int, set[str]] = {}
    for one in operations:
        used.setdefault(one.rank, set()).add(one.stream)
    firsts = (
        *(COMPUTE_STREAM, _WORLD, _TENSOR, _TIED, _COURIER, _ACROSS, _MATRICES, _SNAPSHOT),
        *(_TO_HOST, _FROM_HOST),
    )
    order = {name: index for index, name in enumerate(firsts)}
    return [sorted(used[rank], key=lambda name: (order.get(name, len(order)), name)) for rank in sorted(used)]


def list_operations(replicas: Sequence[Sequence[Program]], use: StreamUse) -> list[DeviceOperation]:
    """Return the operations of all ranks, rank by rank, in the order in which the host issues them.

    ``replicas``: for each number of micro-batches among the replicas, the lowered programs that run one after
    the other. The first program begins on idle devices.
    """
    operations: list[DeviceOperation] = []
    for number, programs in enumerate(replicas):
        for rank in range(programs[0].num_ranks):
            writer = _Writer(operations, rank, number * programs[0].num_ranks, number, use)
            for iteration, program in enumerate(programs):
                writer.write(program, iteration)
    return operations


class _Writer:
    """Appends the operations of one rank."""

    program: Program
    lowering: Lowering
    proved_sends: ProvedSends
    stages: list[int]
    action: Action
    iteration: int

    def __init__(
        self, operations: list[DeviceOperation], rank: int, first_rank: int, replica: int, use: StreamUse
    ) -> None:
        """``first_rank``: number of the replica's first rank among all ranks."""
        self.operations, self.use = operations, use
        self.rank, self.number, self.replica = rank, first_rank + rank, replica
        self.newest: dict[str, int] = {}
        """Newest operation of each stream."""
        self.posted: dict[PipelineTransfer, int] = {}
        self.sent: dict[Message, int] = {}
        self.in_flight: dict[tuple[Collective, int], int] = {}
        """Newest operation of each collective that is not waited for yet."""
        self.copies: dict[tuple[Copy, int, int], int] = {}
        """Copies between device and host that are not waited for yet."""
        self.snapshot: int | None = None
        self.whole: set[int] = set()
        """Stages whose parameters are gathered or are being gathered."""
        self.counts: dict[Hashable, int] = {}
        """Number of collectives so far, by key."""
        self.loaded: set[Hashable] = set()
        self.summed = -1
        """Number of operations just after tensor-parallel ranks last communicated."""

    def write(self, program: Program, iteration: int) -> None:
        """Append the operations of one run of a program."""
        assert program.lowering is not None
        self.program, self.lowering, self.iteration = program, program.lowering, iteration
        self.proved_sends = proved_sends(program, self.rank)
        self.stages = [stage for stage, owner in enumerate(program.stage_rank) if owner == self.rank]
        for action in program.ranks[self.rank]:
            self.action = action
            self._do(action)
        self._end()

    def _do(self, action: Action) -> None:
        does, stage = SEMANTICS[action.kind], action.stage
        if does.computes:
            self._compute(action)
        elif action.kind is Kind.LOAD:
            self._give(COMPUTE_STREAM, holds_host=True)
        elif does.posts or does.waits:
            self._transfers(action.transfers, posts=does.posts, waits=does.waits)
        elif does.joins == "ends":
            self._sync_tied(stage)
        elif does.joins == "world":
            self._clip()
        if copy := does.starts_copy:
            stream = _TO_HOST if copy.is_to_host else _FROM_HOST
            self.copies[copy, stage, action.micro_batch] = self._give(stream)
        if does.ends_copy:
            self._wait(self.copies.pop((does.ends_copy, stage, action.micro_batch)))
        if does.starts is not None:
            self._start(does.starts, stage)
        if does.ends is not None:
            self._await(does.ends, stage)
        if does.orthogonalizes:
            self._run(str(action.kind), stage)
        if does.updates:
            for one in [stage] if stage >= 0 else self.stages:
                self._update(one)
        if Resource.PARAMETERS in does.frees:
            self.whole.discard(stage)

    def _give(
        self,
        stream: str,
        after: Sequence[int] = (),
        *,
        meets: Hashable = None,
        connects: Hashable = None,
        loads: Hashable = None,
        holds_host: bool = False,
    ) -> int:
        """Append an operation and return its number. A stream other than the current one also waits for the
        current one."""
        waits = tuple(after)
        if stream != COMPUTE_STREAM and COMPUTE_STREAM in self.newest and not waits:
            waits = (self.newest[COMPUTE_STREAM],)
        number = len(self.operations)
        self.operations.append(
            DeviceOperation(self.number, self.action, stream, waits, meets, connects, loads, holds_host)
        )
        self.newest[stream] = number
        return number

    def _run(self, name: str, stage: int) -> None:
        """Append kernels on the current stream. Directly after other loaded kernels of this stream they count
        as one operation."""
        loads = (name, stage)
        last = self.operations[-1] if self.operations else None
        mine = last is not None and last.rank == self.number
        if loads in self.loaded and mine and last is not None and last.stream == COMPUTE_STREAM:
            return
        self.loaded.add(loads)
        self._give(COMPUTE_STREAM, loads=loads)

    def _wait(self, *operations: int) -> None:
        """Append a wait of the current stream for the operations."""
        self._give(COMPUTE_STREAM, operations)

    def _collective(
        self, stream: str, members: Hashable, what: str, after: Sequence[int] = (), stage: int = -1
    ) -> int:
        """Append a collective. ``members`` must be equal on all ranks that take part, and different on
        others."""
        connects = (stream, members, what)
        key = (connects, stage)
        self.counts[key] = count = self.counts.get(key, -1) + 1
        return self._give(stream, after, meets=(key, count), connects=connects)

    # Compute actions and the step.

    def _compute(self, action: Action) -> None:
        self._run(str(action.kind), action.stage)
        if self.use.tp > 1 and action.kind is not Kind.BACKWARD_WEIGHT:
            self._sum_over_tp()
            self._run(str(action.kind), action.stage)

    def _sum_over_tp(self) -> None:
        """Append a collective of tensor-parallel ranks. Consecutive ones count as one."""
        if self.use.tp > 1 and self.summed != len(self.operations):
            self._wait(self._collective(_TENSOR, (self.replica, self.rank), "tp"))
            self.summed = len(self.operations)

    def _clip(self) -> None:
        self._run("clip", -1)
        if not self.lowering.updates_early:
            self._sum_over_tp()
        self._over_world()

    def _over_world(self) -> None:
        """Append a sum over all ranks whose result the host reads."""
        total = self._collective(_WORLD, None, "sum")
        self._give(COMPUTE_STREAM, (total,), holds_host=True)

    def _update(self, stage: int) -> None:
        if self.snapshot is not None:
            self._wait(self.snapshot)
            self.snapshot = None
        if self.lowering.updates_early:
            self._sum_over_tp()
        self._run("update", stage)
        self.whole.discard(stage)

    def _end(self) -> None:
        """End the program: wait for unanswered sends, then take a snapshot or, in a validation, sum the
        loss."""
        for number in self.sent.values():
            self.action = Action(Kind.WAIT, transfers=self.operations[number].action.transfers)
            self._wait(number)
        self.sent.clear()
        self.action = Action(Kind.STEP)
        if self.lowering.training:
            self.snapshot = self._give(_SNAPSHOT)
        else:
            self._over_world()

    # Data parallelism.

    def _over_dp(self, collective: Collective, stage: int) -> int:
        """Append a data-parallel collective on its scheduler's stream, level by level."""
        courier, name, after = _COURIER, "dp", list[int]()
        if collective is Collective.REDUCE_ACROSS:
            courier, name = _ACROSS, "dp across"
            after = [*filter(None, [self.in_flight.get((Collective.REDUCE, stage))])]
        if after:
            after.append(self.newest[COMPUTE_STREAM])
        number = self._give(courier, after)
        for level in range(self.use.levels):
            number = self._collective(f"{name} level {level}", self.rank, str(collective), (number,), stage)
            number = self._give(courier, (number,))
        return number

    def _start(self, collective: Collective, stage: int) -> None:
        if collective is Collective.GATHER:
            if stage in self.whole:
                return
            self.whole.add(stage)
        self._run(str(collective), stage)
        if collective in _OF_MATRICES:
            if self.use.dp * self.use.tp > 1:
                members = self.rank if self.use.dp > 1 else (self.replica, self.rank)
                self.in_flight[collective, stage] = self._collective(_MATRICES, members, str(collective))
        elif self.use.dp > 1:
            self.in_flight[collective, stage] = self._over_dp(collective, stage)

    def _await(self, collective: Collective, stage: int) -> None:
        if (collective, stage) in self.in_flight:
            self._wait(self.in_flight.pop((collective, stage)))

    def _sync_tied(self, stage: int) -> None:
        self._run("sync_tied", stage)
        self._wait(self._collective(_TIED, self.replica, "sum"))

    # Transfers between stages.

    def _transfers(self, transfers: Sequence[PipelineTransfer], *, posts: bool, waits: bool) -> None:
        """Append transfers as `myriad.parallel.pipeline_transfers` runs them: all receives, all
        sends, then the waits."""
        receives = [one for one in transfers if not one.sends]
        sends = [one for one in transfers if one.sends]
        for one in receives if posts else ():
            self._receive(one)
        numbers = {one: self._send(one) for one in sends}
        if not waits:
            self.sent |= {message_of(one): numbers[one] for one in sends}
            return
        for one in receives:
            self._arrive(one)
        for one in sends:
            self.action = Action(Kind.WAIT, transfers=(one,))
            self._wait(numbers[one])

    def _send(self, transfer: PipelineTransfer) -> int:
        self.action = Action(Kind.SEND, transfers=(transfer,))
        return self._transfer(transfer)

    def _receive(self, transfer: PipelineTransfer) -> None:
        self.action = Action(Kind.RECEIVE, transfers=(transfer,))
        self.posted[transfer] = self._transfer(transfer)

    def _transfer(self, transfer: PipelineTransfer) -> int:
        stream = self._pair_stream(transfer)
        return self._give(
            stream,
            meets=(self.replica, self.iteration, message_of(transfer)),
            connects=(self.replica, stream),
        )

    def _pair_stream(self, transfer: PipelineTransfer) -> str:
        low, high = sorted((self.rank, transfer.peer))
        upwards = (transfer.peer > self.rank) == transfer.sends
        way = (" up" if upwards else " down") if self.use.both_ways else ""
        return f"{transfer.payload}{way} {low}-{high}"

    def _arrive(self, transfer: PipelineTransfer) -> None:
        """Append the wait for a receive, and those for the sends that it proves to be complete."""
        self.action = Action(Kind.WAIT, transfers=(transfer,))
        self._wait(self.posted.pop(transfer))
        if self.use.shares_transfers:
            self._wait(self._collective(f"{_TENSOR} transfers", (self.replica, self.rank), "gather"))
        for message in self.proved_sends.get(message_of(transfer), ()):
            if message in self.sent:
                self._wait(self.sent.pop(message))
