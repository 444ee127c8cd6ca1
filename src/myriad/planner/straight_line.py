"""One pipeline's iteration as a straight line of steps, for layouts whose replicas cannot differ.

In which order the ranks of one pipeline come to their actions does not matter for the times: each list is
done in order, what one rank sends another arrives in order, and whoever waits, waits for the latest. So the
order is found once for a program, with no times at all, and written down as steps, each of which has all it
needs when it comes. Layouts that share a program, and every question asked of one (`explain`), then only do
the sums: the same ones in the same order as `myriad.planner.simulator.Run`, so the seconds are equal to the
last bit.

    rank 0   F s0 m0  SEND a0.0            compute 0 s0, post 0 a0.0, compute 1 s1 ...
    rank 1   RECEIVE a0.0  WAIT  F s1 m0   meet 1 a0.0, wait 1 a0.0, compute 1 s1

What costs nothing and waits for nothing is left out. The first iteration differs from all later ones: there
no parameters have travelled behind the optimizer.
"""

from collections import defaultdict, deque
from dataclasses import dataclass

from myriad.planner.costs import Costs
from myriad.program.actions import COMPUTE, Action, Kind, Payload, Program, Transfer

__all__ = ["Figures", "StraightLine"]

_Step = tuple[int, int, int, int]
"""What is done, rank, and two numbers that say with what."""

_COMPUTE, _POST, _MEET, _WAIT, _TRAVEL, _AWAIT, _PASS, _JOIN_TIED, _JOIN_ALL = range(9)
"""compute: index of its seconds. post: place of a transfer. meet: place, channel. wait: place.
travel: place of a gather or reduction, index of its seconds. await: that place. pass: index of seconds."""
_GATHERS = (Kind.GATHER, Kind.START_GATHER)
_REDUCES = (Kind.REDUCE, Kind.START_REDUCE)
_AT_ONCE = (Kind.GATHER, Kind.REDUCE)
_PER_STAGE = (
    Kind.FORWARD,
    Kind.BACKWARD,
    Kind.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT,
    Kind.UPDATE,
    Kind.GATHER,
    Kind.REDUCE,
)
"""Kinds with seconds for each stage, in the order of the table of seconds; after them come loading, an
exchange, and the whole step of each rank."""


@dataclass(frozen=True)
class Figures:
    """All that a layout's costs mean to its program; seconds."""

    of_steps: tuple[float, ...]
    messages: tuple[float, ...]
    """By channel."""
    clip: float
    tied: float
    busy_ratio: float
    """How much gathers and reductions slow the compute that they hide behind."""


class StraightLine:
    """Of one program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        first = _Writer(program, frozenset(), {})
        later = _Writer(program, frozenset(first.ahead), first.channels) if first.ahead else first
        self.num_places, self.channels = first.num_places, tuple(first.channels)
        self.iterations = first.steps, later.steps

    def figures(self, costs: Costs) -> Figures:
        """Of a layout that runs this program."""
        stages, owners, factor = costs.stages, self.program.stage_rank, costs.cluster.expected_slowdown
        held = [
            [stages[s] for s, r in enumerate(owners) if r == rank] for rank in range(self.program.num_ranks)
        ]
        of_steps = (
            *(stage.forward * factor for stage in stages),
            *(stage.backward * factor for stage in stages),
            *(stage.backward_input * factor for stage in stages),
            *(stage.backward_weight * factor for stage in stages),
            *(stage.update for stage in stages),
            *(stage.gather for stage in stages),
            *(stage.reduce for stage in stages),
            costs.load,
            costs.work.practice.exchange_seconds,
            *(sum(stage.update for stage in own) for own in held),
        )
        clip = max(costs.clip(sum(stage.parameters for stage in own)) for own in held)
        messages = tuple(costs.message_between(*ends) for ends in self.channels)
        return Figures(of_steps, messages, clip, costs.tied, float(costs.data.busy_ratio))

    def seconds(self, figures: Figures) -> float:
        """Of an iteration that follows another one."""
        walk = _Walk(self, figures)
        first, second = (walk.end_of(steps) for steps in self.iterations)
        return second - first


class _Writer:
    """Does a program without times, and writes down what it does."""

    def __init__(self, program: Program, ahead: frozenset[int], channels: dict[tuple[int, int], int]) -> None:
        """``ahead``: stages whose parameters the last iteration has sent behind its optimizer; ``channels``:
        those that are known, by sender and receiver, in order."""
        self.program, self.come = program, set(ahead)
        self.ahead: set[int] = set()
        self.updated: set[int] = set()
        self.steps: list[_Step] = []
        self.channels = channels
        self.open: defaultdict[tuple[int, int, bool], deque[int]] = defaultdict(deque)
        self.arrived: set[int] = set()
        self.num_places = 2 * program.num_stages * program.num_micro_batches
        self.next = [0] * program.num_ranks
        self.posted = [False] * program.num_ranks
        self.at: defaultdict[Kind, list[int]] = defaultdict(list)
        self.movable = deque(range(program.num_ranks))
        while self.movable:
            self._advance(self.movable.popleft())
        done = [at == len(actions) for at, actions in zip(self.next, program.ranks, strict=True)]
        assert all(done), "the checker proved that nobody waits for ever"

    def _advance(self, rank: int) -> None:
        actions = self.program.ranks[rank]
        while self.next[rank] < len(actions):
            if not self._do(rank, actions[self.next[rank]]):
                return
            self.next[rank] += 1
            self.posted[rank] = False

    def _do(self, rank: int, action: Action) -> bool:
        """Whether the rank can do it already."""
        kind, stage = action.kind, action.stage
        if kind in COMPUTE:
            self.steps.append((_COMPUTE, rank, self._of_stage(kind, stage), 0))
        elif action.transfers:
            return self._do_transfers(rank, action)
        elif kind in _GATHERS or kind in _REDUCES:
            self._travel(rank, action)
        elif kind is Kind.AWAIT_GATHER or kind is Kind.AWAIT_REDUCE:
            self.steps.append((_AWAIT, rank, self._collective(stage, kind is Kind.AWAIT_REDUCE), 0))
        elif kind is Kind.UPDATE:
            self.updated.add(stage)
            self.steps.append((_PASS, rank, self._of_stage(kind, stage), 0))
        elif kind is Kind.LOAD:
            self.steps.append((_PASS, rank, len(_PER_STAGE) * self.program.num_stages, 0))
        elif kind is Kind.SYNC_TIED:
            ends = {self.program.stage_rank[0], self.program.stage_rank[-1]}
            return self._join(rank, kind, len(ends), _JOIN_TIED)
        elif kind is Kind.CLIP or kind is Kind.STEP:
            return self._clip(rank, kind)
        return True

    def _of_stage(self, kind: Kind, stage: int) -> int:
        return _PER_STAGE.index(kind) * self.program.num_stages + stage

    def _clip(self, rank: int, kind: Kind) -> bool:
        if not self._join(rank, Kind.CLIP, self.program.num_ranks, _JOIN_ALL):
            return False
        if kind is Kind.STEP:
            self.steps.append((_PASS, rank, len(_PER_STAGE) * self.program.num_stages + 2 + rank, 0))
        return True

    def _join(self, rank: int, kind: Kind, num_ranks: int, step: int) -> bool:
        here = self.at[kind]
        if rank not in here:
            here.append(rank)
            if len(here) == num_ranks:
                self.steps.append((step, rank, 0, 0))
                self.movable.extend(one for one in here if one != rank)
        return len(here) == num_ranks

    def _collective(self, stage: int, reduces: bool) -> int:
        return stage + self.program.num_stages * reduces

    def _travel(self, rank: int, action: Action) -> None:
        kind, stage = action.kind, action.stage
        reduces = kind in _REDUCES
        if kind is Kind.START_GATHER and stage in self.come:
            self.come.discard(stage)
            return
        if not reduces and stage in self.updated:
            self.ahead.add(stage)
        place = self._collective(stage, reduces)
        seconds = self._of_stage(Kind.REDUCE if reduces else Kind.GATHER, stage)
        self.steps.append((_TRAVEL, rank, place, seconds))
        if kind in _AT_ONCE:
            self.steps.append((_AWAIT, rank, place, 0))

    # transfers

    def _place(self, transfer: Transfer) -> int:
        place = transfer.stage * self.program.num_micro_batches + transfer.micro_batch
        return place * 2 + (transfer.payload is Payload.GRADIENT)

    def _do_transfers(self, rank: int, action: Action) -> bool:
        kind = action.kind
        if kind is not Kind.WAIT and not self.posted[rank]:
            self.posted[rank] = True
            for transfer in action.transfers:
                self._post(rank, transfer)
        if kind is Kind.SEND or kind is Kind.RECEIVE:
            return True
        places = [self._place(transfer) for transfer in action.transfers]
        if not self.arrived.issuperset(places):
            return False
        self.steps.extend((_WAIT, rank, place, 0) for place in places)
        if kind is Kind.EXCHANGE:
            self.steps.append((_PASS, rank, len(_PER_STAGE) * self.program.num_stages + 1, 0))
        return True

    def _post(self, rank: int, transfer: Transfer) -> None:
        sends, place = transfer.sends, self._place(transfer)
        ends = (rank, transfer.peer) if sends else (transfer.peer, rank)
        others = self.open[*ends, not sends]
        if not others:
            self.open[*ends, sends].append(place)
            self.steps.append((_POST, rank, place, 0))
            return
        others.popleft()
        self.arrived.add(place)
        self.steps.append((_MEET, rank, place, self.channels.setdefault(ends, len(self.channels))))
        self.movable.append(transfer.peer)


class _Walk:
    """Clocks of one pipeline's ranks under given costs."""

    def __init__(self, line: StraightLine, figures: Figures) -> None:
        program = line.program
        self.line, self.figures = line, figures
        self.clock = [0.0] * program.num_ranks
        self.stream = [0.0] * program.num_ranks
        self.hidden_from = [0.0] * program.num_ranks
        self.places = [0.0] * line.num_places
        self.done = [0.0] * (2 * program.num_stages)

    def end_of(self, steps: list[_Step]) -> float:
        """Does an iteration; when its last rank is done."""
        clock, stream, hidden_from = self.clock, self.stream, self.hidden_from
        places, done, free = self.places, self.done, [0.0] * len(self.line.channels)
        figures = self.figures
        seconds, busy, messages = figures.of_steps, figures.busy_ratio, figures.messages
        for step, rank, place, other in steps:
            now = clock[rank]
            if step == _COMPUTE:
                cost = seconds[place]
                if stream[rank] > now:
                    hidden = min(stream[rank], now + cost) - max(now, hidden_from[rank])
                    cost += busy * max(0.0, hidden)
                clock[rank] = now + cost
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
            else:
                self._join(step)
        return max(clock)

    def _join(self, step: int) -> None:
        """Ranks wait for each other: all of them, or the two that share parameters."""
        owners = self.line.program.stage_rank
        tied = step == _JOIN_TIED
        ranks = {owners[0], owners[-1]} if tied else range(len(self.clock))
        latest = max(self.clock[rank] for rank in ranks) + (self.figures.tied if tied else self.figures.clip)
        for rank in ranks:
            self.clock[rank] = latest
