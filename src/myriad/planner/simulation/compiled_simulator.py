"""One pipeline's iteration compiled to a linear list of steps, for layouts whose replicas are all alike.

The order in which the ranks of one pipeline reach their actions does not change the times. Each rank runs its
list in order, messages between two ranks arrive in order, and a waiting rank waits for the latest input. So
the compiler derives the order once per program, without times, and writes it down as steps. Every step comes
after all steps that it depends on. Layouts that share a program, and every question about one layout
(`plan_explanation`), then only add up seconds. The additions are those of
`myriad.planner.simulation.simulator.CostModelRun` in the same order, so the results are equal to the last
bit.

    rank 0   F s0 m0  SEND a0.0            compute 0 s0, post 0 a0.0, compute 1 s1 ...
    rank 1   RECEIVE a0.0  WAIT  F s1 m0   meet 1 a0.0, wait 1 a0.0, compute 1 s1

Actions that cost nothing and wait for nothing are left out. The first iteration differs from all later ones:
in the first, no parameter gather was issued behind the previous optimizer step.
"""

from collections import defaultdict, deque
from dataclasses import dataclass

from myriad.planner.cost.layout_costs import Costs
from myriad.program.actions import (
    SEMANTICS,
    Action,
    Collective,
    Copy,
    Kind,
    Payload,
    PipelineTransfer,
    Program,
    Semantics,
)

__all__ = ["CompiledProgram", "ProgramCosts"]

_Step = tuple[int, int, int, int]
"""A step: its kind, the rank, and two operands whose meaning depends on the kind."""

_COMPUTE, _POST, _MEET, _WAIT, _TRAVEL, _AWAIT, _PASS, _COPY_IN, _COPY_OUT, _AWAIT_COPY = range(10)
_JOIN_TIED, _JOIN_ALL, _CROSS = 10, 11, 12
"""Operands by kind. compute: index of its seconds. post: place of a transfer. meet: place, channel. wait:
place. travel: place of a gather or reduction, index of its seconds. await: that place. pass: index of
seconds. copy: its number, index of its seconds. await copy: its number.
cross: as travel, for a sum across groups."""
_COPIES = (Kind.START_OFFLOAD, Kind.START_FETCH, Kind.START_OFFLOAD_STATE, Kind.START_FETCH_STATE)
_COMPUTES = (
    Kind.FORWARD,
    Kind.BACKWARD,
    Kind.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT,
    Kind.PAIRED_FORWARD,
    Kind.PAIRED_BACKWARD,
)
_PER_STAGE = (
    *_COMPUTES,
    Kind.UPDATE,
    Kind.GATHER,
    Kind.REDUCE,
    Kind.REDUCE_ACROSS,
    Kind.START_GATHER_MOMENTUM,
    Kind.ORTHOGONALIZE,
    Kind.START_SCATTER_UPDATE,
    *_COPIES,
)
"""Kinds with one cost for each stage, in the order of the table of seconds. Loading, an exchange, and the
whole optimizer step of each rank follow them in that table."""
_ROW = {kind: row for row, kind in enumerate(_PER_STAGE)}
_COMPUTE_ROW = {kind: _ROW[kind] for kind in _COMPUTES}

_COLLECTIVES = {
    Collective.GATHER: Kind.GATHER,
    Collective.REDUCE: Kind.REDUCE,
    Collective.REDUCE_ACROSS: Kind.REDUCE_ACROSS,
    Collective.GATHER_MOMENTUM: Kind.START_GATHER_MOMENTUM,
    Collective.SCATTER_UPDATE: Kind.START_SCATTER_UPDATE,
}
"""The kind that stands for the cost of each collective. A sum across groups comes directly after the
reduction that it follows."""
_COLLECTIVE_ROW = {collective: row for row, collective in enumerate(_COLLECTIVES)}


@dataclass(frozen=True)
class ProgramCosts:
    """The costs of a layout in the form that its compiled program uses, in seconds."""

    of_steps: tuple[float, ...]
    messages: tuple[float, ...]
    """Seconds of a message, by channel."""
    clip: float
    tied: float
    copies_block: bool
    """Whether a rank waits for each copy between device and host where it starts."""
    busy_ratios: tuple[float, ...]
    """Share of overlapped gather and reduction time by which the overlapping compute slows down, by compute
    action as in ``of_steps``."""
    across_busy_ratio: float = 0.0
    """The same of sums across groups."""


class CompiledProgram:
    """The steps of one program, in an order in which each step follows its inputs."""

    def __init__(self, program: Program) -> None:
        self.program = program
        compiled = _Compiler(program)
        self.num_places, self.channels = compiled.num_places, tuple(compiled.channels)
        self.num_copies = len(compiled.copies)
        self.iterations = compiled.steps, compiled.later_steps()

    def costs_of(self, costs: Costs) -> ProgramCosts:
        """Return the costs of a layout that runs this program."""
        stages, owners, factor = costs.stages, self.program.stage_rank, costs.cluster.expected_slowdown
        held = [
            [stages[s] for s, r in enumerate(owners) if r == rank] for rank in range(self.program.num_ranks)
        ]
        copies = [copy for kind in _COPIES if (copy := SEMANTICS[kind].starts_copy)]
        slower = factor if costs.copies_block else 1.0
        of_steps = (
            *(stage.forward * factor for stage in stages),
            *(stage.backward * factor for stage in stages),
            *(stage.backward_input * factor for stage in stages),
            *(stage.backward_weight * factor for stage in stages),
            *(stage.paired_forward * factor for stage in stages),
            *(stage.paired_backward * factor for stage in stages),
            *(stage.update for stage in stages),
            *(stage.gather for stage in stages),
            *(stage.reduce for stage in stages),
            *(stage.reduce_across for stage in stages),
            *(stage.gather_momentum for stage in stages),
            *(stage.orthogonalize for stage in stages),
            *(stage.scatter_update for stage in stages),
            *(stage.copy_seconds(copy) * slower for copy in copies for stage in stages),
            costs.load,
            costs.workload.exchange_seconds,
            *(sum(stage.whole_update for stage in own) for own in held),
        )
        clip = max(costs.clip(sum(stage.own_parameters for stage in own)) for own in held)
        messages = tuple(costs.message_between(*ends) for ends in self.channels)
        across = 0.0 if costs.across_groups is None else float(costs.across_groups.ring.busy_ratio)
        return ProgramCosts(
            of_steps,
            messages,
            clip,
            costs.tied,
            costs.copies_block,
            tuple(costs.busy_ratio_of(s, kind) for kind in _COMPUTES for s in range(len(stages))),
            across,
        )

    def seconds(self, figures: ProgramCosts) -> float:
        """Return the seconds of an iteration that follows another one."""
        walk = _Execution(self, figures)
        first, second = (walk.end_of(steps) for steps in self.iterations)
        return second - first


class _Compiler:
    """Executes a program without times and records the steps."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.first_gathers: dict[int, int] = {}
        """Index of the step that issues each stage's first gather ahead of its use."""
        self.ahead: set[int] = set()
        """Stages whose parameters are gathered behind the optimizer, for the next iteration."""
        self.updated: set[int] = set()
        self.copies: dict[tuple[Copy, int, int], int] = {}
        """Number of each copy that was started: its kind, stage and micro-batch."""
        self.steps: list[_Step] = []
        self.channels: dict[tuple[int, int], int] = {}
        """Index of each channel, by sender and receiver."""
        self.open: defaultdict[tuple[int, int, bool], deque[int]] = defaultdict(deque)
        self.arrived: set[int] = set()
        self.num_places = 2 * program.num_stages * program.num_micro_batches
        self.next = [0] * program.num_ranks
        self.posted = [False] * program.num_ranks
        self.at: defaultdict[str, list[int]] = defaultdict(list)
        self.runnable = deque(range(program.num_ranks))
        while self.runnable:
            self._advance(self.runnable.popleft())
        done = [at == len(actions) for at, actions in zip(self.next, program.ranks, strict=True)]
        assert all(done), "no rank of a program waits forever"

    def later_steps(self) -> list[_Step]:
        """Return the steps of an iteration that follows another one, without the gathers that the other one
        issued behind its optimizer. A gather does not change the order of the steps."""
        gone = {self.first_gathers[stage] for stage in self.ahead & self.first_gathers.keys()}
        return [step for index, step in enumerate(self.steps) if index not in gone] if gone else self.steps

    def _advance(self, rank: int) -> None:
        actions, num_stages, add = self.program.ranks[rank], self.program.num_stages, self.steps.append
        for index in range(self.next[rank], len(actions)):
            action = actions[index]
            if (row := _COMPUTE_ROW.get(action.kind)) is not None:
                add((_COMPUTE, rank, row * num_stages + action.stage, 0))
                continue
            if not (self._do_transfers if action.transfers else self._do)(rank, action):
                self.next[rank] = index
                return
            self.posted[rank] = False
        self.next[rank] = len(actions)

    def _do(self, rank: int, action: Action) -> bool:
        """Execute an action that neither computes nor transfers if its inputs are there, and return whether
        it was executed."""
        does, kind, stage = SEMANTICS[action.kind], action.kind, action.stage
        if does.joins and not self._join(rank, does.joins):
            return False
        if does.starts_copy is not None:
            number = self.copies.setdefault((does.starts_copy, stage, action.micro_batch), len(self.copies))
            step = _COPY_OUT if does.starts_copy.is_to_host else _COPY_IN
            self.steps.append((step, rank, number, self._of_stage(kind, stage)))
            return True
        if does.ends_copy is not None:
            number = self.copies[does.ends_copy, stage, action.micro_batch]
            self.steps.append((_AWAIT_COPY, rank, number, 0))
            return True
        if does.starts is not None:
            self._issue(rank, does, stage)
        if does.ends is not None:
            self.steps.append((_AWAIT, rank, self._collective(does.ends, stage), 0))
        if does.orthogonalizes:
            self.steps.append((_PASS, rank, self._of_stage(kind, stage), 0))
        if does.updates:
            self._update(rank, stage)
        if kind is Kind.LOAD:
            self.steps.append((_PASS, rank, len(_PER_STAGE) * self.program.num_stages, 0))
        return True

    def _of_stage(self, kind: Kind, stage: int) -> int:
        return _ROW[kind] * self.program.num_stages + stage

    def _update(self, rank: int, stage: int) -> None:
        """Update one stage, or with -1 all stages of the rank."""
        whole_step = len(_PER_STAGE) * self.program.num_stages + 2 + rank
        self.updated.add(stage)
        self.steps.append((_PASS, rank, self._of_stage(Kind.UPDATE, stage) if stage >= 0 else whole_step, 0))

    def _join(self, rank: int, joins: str) -> bool:
        """Synchronize the rank with those of the first and the last stage, or with all ranks."""
        tied, owners = joins == "ends", self.program.stage_rank
        num_ranks = len({owners[0], owners[-1]}) if tied else self.program.num_ranks
        here = self.at[joins]
        if rank not in here:
            here.append(rank)
            if len(here) == num_ranks:
                self.steps.append((_JOIN_TIED if tied else _JOIN_ALL, rank, 0, 0))
                self.runnable.extend(one for one in here if one != rank)
        return len(here) == num_ranks

    def _collective(self, collective: Collective, stage: int) -> int:
        return stage + self.program.num_stages * _COLLECTIVE_ROW[collective]

    def _issue(self, rank: int, does: Semantics, stage: int) -> None:
        """Issue a gather or reduction."""
        assert does.starts is not None
        if does.starts is Collective.GATHER:
            if does.ends is None:
                self.first_gathers.setdefault(stage, len(self.steps))
            if stage in self.updated:
                self.ahead.add(stage)
        seconds = self._of_stage(_COLLECTIVES[does.starts], stage)
        step = _CROSS if does.starts is Collective.REDUCE_ACROSS else _TRAVEL
        self.steps.append((step, rank, self._collective(does.starts, stage), seconds))

    # Transfers.

    def _do_transfers(self, rank: int, action: Action) -> bool:
        """Execute an action with transfers if its inputs are there, and return whether it was executed."""
        does, count = SEMANTICS[action.kind], self.program.num_micro_batches
        places = [
            (one.stage * count + one.micro_batch) * 2 + (one.payload is Payload.GRADIENT)
            for one in action.transfers
        ]
        if does.posts and not self.posted[rank]:
            self.posted[rank] = True
            for transfer, place in zip(action.transfers, places, strict=True):
                self._post(rank, transfer, place)
        if not does.waits:
            return True
        if not self.arrived.issuperset(places):
            return False
        for place in places:
            self.steps.append((_WAIT, rank, place, 0))
        if does.posts:
            self.steps.append((_PASS, rank, len(_PER_STAGE) * self.program.num_stages + 1, 0))
        return True

    def _post(self, rank: int, transfer: PipelineTransfer, place: int) -> None:
        sends, peer = transfer.sends, transfer.peer
        sender, receiver = (rank, peer) if sends else (peer, rank)
        others = self.open[sender, receiver, not sends]
        if not others:
            self.open[sender, receiver, sends].append(place)
            self.steps.append((_POST, rank, place, 0))
            return
        others.popleft()
        self.arrived.add(place)
        channel = self.channels.setdefault((sender, receiver), len(self.channels))
        self.steps.append((_MEET, rank, place, channel))
        self.runnable.append(peer)


class _Execution:
    """The clocks of one pipeline's ranks under given costs."""

    def __init__(self, line: CompiledProgram, figures: ProgramCosts) -> None:
        program = line.program
        self.line, self.figures = line, figures
        self.clock = [0.0] * program.num_ranks
        self.stream = [0.0] * program.num_ranks
        self.hidden_from = [0.0] * program.num_ranks
        self.across = [0.0] * program.num_ranks
        self.across_from = [0.0] * program.num_ranks
        self.places = [0.0] * line.num_places
        self.host_links = [[0.0, 0.0] for _ in range(program.num_ranks)]
        self.copied = [0.0] * line.num_copies
        self.done = [0.0] * (len(_COLLECTIVES) * program.num_stages)

    def end_of(self, steps: list[_Step]) -> float:
        """Execute an iteration and return the second at which its last rank finishes."""
        clock, stream, hidden_from = self.clock, self.stream, self.hidden_from
        places, done, free = self.places, self.done, [0.0] * len(self.line.channels)
        figures, across, across_from = self.figures, self.across, self.across_from
        num_stages, across_busy = self.line.program.num_stages, figures.across_busy_ratio
        seconds, busy, messages = figures.of_steps, figures.busy_ratios, figures.messages
        for step, rank, place, other in steps:
            now = clock[rank]
            if step == _COMPUTE:
                cost = seconds[place]
                more = 0.0
                if stream[rank] > now:
                    hidden = min(stream[rank], now + cost) - max(now, hidden_from[rank])
                    more = busy[place] * max(0.0, hidden)
                if across[rank] > now:
                    hidden = min(across[rank], now + cost) - max(now, across_from[rank])
                    more += across_busy * max(0.0, hidden)
                clock[rank] = now + (cost + more)
            elif step == _POST:
                places[place] = now
            elif step == _MEET:
                free[other] = places[place] = max(now, places[place], free[other]) + messages[other]
            elif step == _WAIT:
                if places[place] > now:
                    clock[rank] = places[place]
            elif step == _PASS:
                clock[rank] = now + seconds[place]
            elif step == _AWAIT:
                if done[place] > now:
                    clock[rank] = done[place]
            elif step == _TRAVEL:
                begin = max(now, stream[rank])
                if stream[rank] < now:
                    hidden_from[rank] = begin
                done[place] = stream[rank] = begin + seconds[other]
            elif step == _CROSS:
                begin = max(done[place - num_stages], now, across[rank])
                if across[rank] < now:
                    across_from[rank] = begin
                done[place] = across[rank] = begin + seconds[other]
            elif step == _AWAIT_COPY:
                if self.copied[place] > now:
                    clock[rank] = self.copied[place]
            elif step in (_COPY_IN, _COPY_OUT):
                self._copy(rank, place, seconds[other], to_host=step == _COPY_OUT)
            else:
                self._join(step)
        return max(clock)

    def _copy(self, rank: int, number: int, seconds: float, *, to_host: bool) -> None:
        """Start a copy on the host link, or make it at once."""
        now, link = self.clock[rank], self.host_links[rank]
        if self.figures.copies_block:
            self.copied[number] = now
            self.clock[rank] = now + seconds
            return
        link[to_host] = self.copied[number] = max(now, link[to_host]) + seconds

    def _join(self, step: int) -> None:
        """Synchronize ranks: all of them, or the two that share tied parameters."""
        owners = self.line.program.stage_rank
        tied = step == _JOIN_TIED
        ranks = {owners[0], owners[-1]} if tied else range(len(self.clock))
        latest = max(self.clock[rank] for rank in ranks) + (self.figures.tied if tied else self.figures.clip)
        for rank in ranks:
            self.clock[rank] = latest
