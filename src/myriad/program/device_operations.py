"""What each rank of a program gives its GPU, as the runtime over NCCL does it: operations on streams.

    action           operations: stream (what its stream waits for)
    forward(1.0)     compute
    send(a1.0->1)    activation up 0-1 (what compute was given so far)
    receive(..)      gradient 0-1, likewise;  wait(..): compute (that receive, and the send that it answers)
    start_reduce(1)  courier (compute), dp level 0 (courier), courier (that)
    await_reduce(1)  compute (courier)
    clip             world (compute), compute (that); the host waits until compute is done

PyTorch gives each NCCL communicator a stream, and a point-to-point operation that is no batch a communicator
of its two ranks in its group (torch 2.11, ProcessGroupNCCL::pointToPoint; `myriad.comm.channel` has a group
for each payload, and with several stages a rank for each direction). Posting makes that stream wait for the
current one, waiting makes the current one wait for it (`myriad.comm.by_collectives` does both around its
collectives); neither stops the host. What does: the copy of a batch (LOAD) and the norm (CLIP).

Data- and tensor-parallel peers run the same list on the same streams. So one of each stands for all: with
them a collective meets no other rank, but takes its place in its stream. Replicas with unequal shares are
several programs.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from myriad.program.actions import COMPUTE, Action, Kind, Lowering, Payload, Program, Transfer

__all__ = ["COMPUTE_STREAM", "Operation", "StreamUse", "list_operations", "streams_of"]

COMPUTE_STREAM = "compute"
"""The stream that is current where the runtime does an action."""
_COURIER, _SNAPSHOT, _TENSOR, _TIED, _WORLD = "courier", "snapshot", "tp", "tied", "world"


@dataclass(frozen=True, slots=True)
class StreamUse:
    """What decides, beside the program, which streams a rank uses."""

    both_ways: bool
    """A payload travels up and down between two ranks (several stages a rank in the layout)."""
    dp: int = 1
    """Data-parallel replicas; more than 1: gathers and reductions travel."""
    levels: int = 1
    """Levels of the hierarchy of data parallelism."""
    tp: int = 1
    """Tensor-parallel ranks; more than 1: they communicate in each compute."""
    shares_transfers: bool = False
    """Tensor-parallel ranks send a share each, and gather what has arrived."""


@dataclass(slots=True)
class Operation:
    """One thing that a rank gives its device."""

    rank: int
    """Pipeline rank; those of further replicas are numbered behind the first one's."""
    action: Action
    """What it belongs to; of an exchange the one transfer."""
    stream: str
    after: tuple[int, ...] = ()
    """Operations of the same rank, by number, whose end its stream waits for."""
    meets: Hashable = None
    """Operations of different ranks with the same one run together: none ends before all have begun."""
    connects: Hashable = None
    """Communicator that its first use makes, in which case the host waits for the other members to use it."""
    loads: Hashable = None
    """Kernels that its first use loads, in which case the host waits for all that the device was given."""
    holds_host: bool = False
    """The host goes on when it is done."""

    @property
    def is_transfer(self) -> bool:
        """A message between two pipeline ranks."""
        return self.action.kind in (Kind.SEND, Kind.RECEIVE)


def streams_of(operations: Sequence[Operation]) -> list[list[str]]:
    """Streams of each rank, in the order in which they are made: the current one, those of groups, those of
    pairs."""
    used: dict[int, set[str]] = {}
    for one in operations:
        used.setdefault(one.rank, set()).add(one.stream)
    firsts = (COMPUTE_STREAM, _WORLD, _TENSOR, _TIED, _COURIER, _SNAPSHOT)
    order = {name: index for index, name in enumerate(firsts)}
    return [sorted(used[rank], key=lambda name: (order.get(name, len(order)), name)) for rank in sorted(used)]


def list_operations(replicas: Sequence[Sequence[Program]], use: StreamUse) -> list[Operation]:
    """Operations of all ranks, rank after rank, in the order in which the host gives them. ``replicas``: for
    each number of micro-batches that a replica has, the lowered programs that it runs one after the other;
    the first one begins on idle devices."""
    operations: list[Operation] = []
    for number, programs in enumerate(replicas):
        for rank in range(programs[0].num_ranks):
            writer = _Writer(operations, rank, number * programs[0].num_ranks, number, use)
            for iteration, program in enumerate(programs):
                writer.write(program, iteration)
    return operations


class _Writer:
    """Writes the operations of one rank."""

    program: Program
    lowering: Lowering
    action: Action
    iteration: int

    def __init__(
        self, operations: list[Operation], rank: int, first_rank: int, replica: int, use: StreamUse
    ) -> None:
        """``first_rank``: number of the replica's first rank among all."""
        self.operations, self.use = operations, use
        self.rank, self.number, self.replica = rank, first_rank + rank, replica
        self.newest: dict[str, int] = {}
        """Newest operation of each stream."""
        self.posted: dict[Transfer, int] = {}
        self.sent: dict[tuple[Payload, int, int], int] = {}
        self.gathering: dict[int, int] = {}
        self.reducing: dict[int, int] = {}
        self.snapshot: int | None = None
        self.whole: set[int] = set()
        """Stages whose parameters are gathered, or are about to be."""
        self.counts: dict[Hashable, int] = {}
        """Collectives so far, by what they are."""
        self.loaded: set[Hashable] = set()
        self.summed = -1
        """Number of operations when tensor-parallel ranks last had communicated."""
        self.do: Mapping[Kind, Callable[[Action], None]] = {
            Kind.LOAD: self._load,
            Kind.GATHER: self._gather,
            Kind.START_GATHER: self._start_gather,
            Kind.AWAIT_GATHER: self._await_gather,
            Kind.RELEASE: lambda action: self.whole.discard(action.stage),
            Kind.EXCHANGE: self._exchange,
            Kind.SEND: self._post,
            Kind.RECEIVE: self._post,
            Kind.WAIT: lambda action: self._arrive(action.transfers[0]),
            Kind.SYNC_TIED: self._sync_tied,
            Kind.REDUCE: self._reduce,
            Kind.START_REDUCE: self._start_reduce,
            Kind.AWAIT_REDUCE: self._await_reduce,
            Kind.CLIP: self._clip,
            Kind.UPDATE: self._update,
            Kind.STEP: self._step,
        } | dict.fromkeys(COMPUTE, self._compute)

    def write(self, program: Program, iteration: int) -> None:
        """Append what one run of a program gives."""
        assert program.lowering is not None
        self.program, self.lowering, self.iteration = program, program.lowering, iteration
        for action in program.ranks[self.rank]:
            self.action = action
            self.do[action.kind](action)
        self._end()

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
        """Append an operation; another stream than the current one waits for that one, too."""
        waits = tuple(after)
        if stream != COMPUTE_STREAM and COMPUTE_STREAM in self.newest and not waits:
            waits = (self.newest[COMPUTE_STREAM],)
        number = len(self.operations)
        self.operations.append(
            Operation(self.number, self.action, stream, waits, meets, connects, loads, holds_host)
        )
        self.newest[stream] = number
        return number

    def _run(self, name: str, stage: int) -> None:
        """Kernels on the current stream. Directly behind others whose kernels are loaded they are one with
        them."""
        loads = (name, stage)
        last = self.operations[-1] if self.operations else None
        mine = last is not None and last.rank == self.number
        if loads in self.loaded and mine and last is not None and last.stream == COMPUTE_STREAM:
            return
        self.loaded.add(loads)
        self._give(COMPUTE_STREAM, loads=loads)

    def _wait(self, *operations: int) -> None:
        """The current stream waits."""
        self._give(COMPUTE_STREAM, operations)

    def _collective(
        self, stream: str, members: Hashable, what: str, after: Sequence[int] = (), stage: int = -1
    ) -> int:
        """``members``: the same on all ranks that meet, and no others."""
        connects = (stream, members, what)
        key = (connects, stage)
        self.counts[key] = count = self.counts.get(key, -1) + 1
        return self._give(stream, after, meets=(key, count), connects=connects)

    # computes and the step

    def _compute(self, action: Action) -> None:
        self._run(str(action.kind), action.stage)
        if self.use.tp > 1 and action.kind is not Kind.BACKWARD_WEIGHT:
            self._sum_over_tp()
            self._run(str(action.kind), action.stage)

    def _sum_over_tp(self) -> None:
        """One behind the other they are as one."""
        if self.use.tp > 1 and self.summed != len(self.operations):
            self._wait(self._collective(_TENSOR, (self.replica, self.rank), "tp"))
            self.summed = len(self.operations)

    def _load(self, action: Action) -> None:
        self._give(COMPUTE_STREAM, holds_host=True)

    def _clip(self, action: Action) -> None:
        self._run("clip", -1)
        if not self.lowering.updates_early:
            self._sum_over_tp()
        self._over_world()

    def _over_world(self) -> None:
        """Sum over all ranks, whose result the host reads."""
        total = self._collective(_WORLD, None, "sum")
        self._give(COMPUTE_STREAM, (total,), holds_host=True)

    def _update(self, action: Action) -> None:
        if self.snapshot is not None:
            self._wait(self.snapshot)
            self.snapshot = None
        if self.lowering.updates_early:
            self._sum_over_tp()
        self._run("update", action.stage)
        self.whole.discard(action.stage)

    def _step(self, action: Action) -> None:
        self._clip(action)
        for stage, owner in enumerate(self.program.stage_rank):
            if owner == self.rank:
                self._update(replace(action, stage=stage))

    def _end(self) -> None:
        """End the program: wait for sends that nothing has answered, then take a snapshot, or a validation's
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

    # data parallelism

    def _over_dp(self, what: str, stage: int) -> int:
        """On the courier's stream, level by level."""
        number = self._give(_COURIER)
        for level in range(self.use.levels):
            number = self._collective(f"dp level {level}", self.rank, what, (number,), stage)
            number = self._give(_COURIER, (number,))
        return number

    def _gather(self, action: Action) -> None:
        self._start_gather(action)
        self._await_gather(action)

    def _start_gather(self, action: Action) -> None:
        if action.stage in self.whole:
            return
        self.whole.add(action.stage)
        self._run("gather", action.stage)
        if self.use.dp > 1:
            self.gathering[action.stage] = self._over_dp("gather", action.stage)

    def _await_gather(self, action: Action) -> None:
        if action.stage in self.gathering:
            self._wait(self.gathering.pop(action.stage))

    def _reduce(self, action: Action) -> None:
        self._start_reduce(action)
        self._await_reduce(action)

    def _start_reduce(self, action: Action) -> None:
        self._run("reduce", action.stage)
        if self.use.dp > 1:
            self.reducing[action.stage] = self._over_dp("reduce", action.stage)

    def _await_reduce(self, action: Action) -> None:
        if action.stage in self.reducing:
            self._wait(self.reducing.pop(action.stage))

    def _sync_tied(self, action: Action) -> None:
        self._run("sync_tied", action.stage)
        self._wait(self._collective(_TIED, self.replica, "sum"))

    # transfers between stages

    def _exchange(self, action: Action) -> None:
        """As `myriad.parallel.runtime` does it: all receives, all sends, then it waits for all."""
        receives = [one for one in action.transfers if not one.sends]
        sends = [one for one in action.transfers if one.sends]
        for one in receives:
            self._receive(one)
        numbers = [self._send(one) for one in sends]
        for one in receives:
            self._arrive(one)
        for one, number in zip(sends, numbers, strict=True):
            self.action = Action(Kind.WAIT, transfers=(one,))
            self._wait(number)

    def _post(self, action: Action) -> None:
        for one in action.transfers:
            if one.sends:
                self.sent[one.payload, one.stage, one.micro_batch] = self._send(one)
            else:
                self._receive(one)

    def _send(self, transfer: Transfer) -> int:
        self.action = Action(Kind.SEND, transfers=(transfer,))
        return self._transfer(transfer)

    def _receive(self, transfer: Transfer) -> None:
        self.action = Action(Kind.RECEIVE, transfers=(transfer,))
        self.posted[transfer] = self._transfer(transfer)

    def _transfer(self, transfer: Transfer) -> int:
        name = (transfer.payload, transfer.stage, transfer.micro_batch)
        stream = self._pair_stream(transfer)
        return self._give(
            stream,
            meets=(self.replica, self.iteration, name),
            connects=(self.replica, stream),
        )

    def _pair_stream(self, transfer: Transfer) -> str:
        low, high = sorted((self.rank, transfer.peer))
        upwards = (transfer.peer > self.rank) == transfer.sends
        way = (" up" if upwards else " down") if self.use.both_ways else ""
        return f"{transfer.payload}{way} {low}-{high}"

    def _arrive(self, transfer: Transfer) -> None:
        """A gradient says that the activation it belongs to was received: its send is waited for, too."""
        self.action = Action(Kind.WAIT, transfers=(transfer,))
        self._wait(self.posted.pop(transfer))
        if self.use.shares_transfers:
            self._wait(self._collective(f"{_TENSOR} transfers", (self.replica, self.rank), "gather"))
        answered = (Payload.ACTIVATION, transfer.stage - 1, transfer.micro_batch)
        if transfer.payload is Payload.GRADIENT and answered in self.sent:
            self._wait(self.sent.pop(answered))
