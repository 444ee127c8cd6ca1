"""Simulated execution of a program: when each action runs, given its cost. The checker and the drawings use
it.

Ranks run their lists in order. A worklist visits only ranks that can advance, so the run time is linear in
the number of actions. The rules of waiting are those of `actions.py`:

- channel (a, b): the messages from a to b. The n-th send matches the n-th receive (NCCL has no tags); both
  must name the same payload. It arrives when both are posted, plus its transfer time.
- EXCHANGE posts all its transfers and ends when all of them have arrived; WAIT ends when its receive has.
- A program of compute actions only has no transfers: a compute action waits for the one that computes its
  input.

If every rank is blocked and one has actions left, the program deadlocks.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from myriad.errors import MyriadError
from myriad.program.actions import (
    COMPUTE,
    SEMANTICS,
    Action,
    Kind,
    Payload,
    PipelineTransfer,
    Program,
    input_of,
    kinds_where,
    output_of,
)

__all__ = [
    "ActionSpan",
    "Cost",
    "ProgramError",
    "Timeline",
    "TransferCost",
    "needed_transfer",
    "timeline",
    "unit_costs",
]

Cost = Callable[[Action], float]
"""Seconds (or any unit) of one action, without the time it waits for other ranks."""
TransferCost = Callable[[PipelineTransfer], float]
"""Time from the moment both sides are posted until the payload has arrived."""


class ProgramError(MyriadError):
    """Error of a program that is incomplete, out of order or deadlocked, with the rank and the action."""

    def __init__(self, what: str, rank: int = -1, index: int = -1, action: Action | None = None) -> None:
        """``index``: the action's index in the rank's list; -1 if the fault has no single position."""
        place = "program" if rank < 0 else f"rank {rank}"
        if action is not None:
            place += f", action {index} {action}" if index >= 0 else f", {action}"
        super().__init__(f"{place}: {what}")
        self.what, self.rank, self.index, self.action = what, rank, index, action


class ActionSpan(NamedTuple):
    """One action on the time axis, including its waiting."""

    start: float
    duration: float
    action: Action

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans of every pipeline rank, in order."""

    ranks: tuple[tuple[ActionSpan, ...], ...]

    @property
    def makespan(self) -> float:
        """End of the last action."""
        return max((spans[-1].end for spans in self.ranks if spans), default=0.0)

    def busy(self, rank: int) -> float:
        """Return the time in which a rank computes."""
        return sum(span.duration for span in self.ranks[rank] if span.action.kind in COMPUTE)


def unit_costs(program: Program) -> Cost:
    """Return costs in units of a whole rank's forward: forward 1, backward 2, each half 1, everything else
    0."""
    one = 1.0 / program.virtual_stages
    costs = {Kind.FORWARD: one, Kind.BACKWARD: 2 * one, Kind.BACKWARD_INPUT: one, Kind.BACKWARD_WEIGHT: one}
    costs |= {Kind.PAIRED_FORWARD: one, Kind.PAIRED_BACKWARD: 2 * one}
    return lambda action: costs.get(action.kind, 0.0)


def needed_transfer(program: Program, action: Action) -> tuple[Payload, int, int] | None:
    """Return a compute action's input as ``(payload, stage that computes it, that stage's rank)``; None if it
    needs none."""
    needed = input_of(action, program.num_stages)
    return None if needed is None else (*needed, program.stage_rank[needed[1]])


def _no_cost(transfer: PipelineTransfer) -> float:
    return 0.0


def timeline(program: Program, cost: Cost | None = None, transfer_cost: TransferCost = _no_cost) -> Timeline:
    """Simulate a program, by default with unit costs. Raises `ProgramError` if it cannot finish."""
    return _Execution(program, cost or unit_costs(program), transfer_cost).run()


class _Channel:
    """The messages from one rank to another: posted sends and receives, matched in order."""

    __slots__ = ("receives", "sends")

    def __init__(self) -> None:
        self.sends: list[tuple[int, float]] = []
        self.receives: list[tuple[int, float]] = []


_COMMUNICATES = kinds_where(lambda does: does.posts or does.waits or does.joins == "ends")


class _Execution:
    """The state of one simulated run. Each payload or result is identified by one integer, see ``_code``."""

    def __init__(self, program: Program, cost: Cost, transfer_cost: TransferCost) -> None:
        self.program, self.cost, self.transfer_cost = program, cost, transfer_cost
        self.num_micro_batches, self.lowered = program.num_micro_batches, program.lowering is not None
        self.next_action = [0] * program.num_ranks
        self.clock = [0.0] * program.num_ranks
        self.posted = [False] * program.num_ranks
        self.spans: list[list[ActionSpan]] = [[] for _ in program.ranks]
        self.channels: defaultdict[tuple[int, int], _Channel] = defaultdict(_Channel)
        self.arrived: dict[int, float] = {}
        self.synced: list[float] = []
        self.movable: deque[int] = deque(range(program.num_ranks))
        self.waiting = _COMMUNICATES if self.lowered else frozenset(Kind)

    def run(self) -> Timeline:
        while self.movable:
            self._advance(self.movable.popleft())
        self._refuse_stuck()
        return Timeline(tuple(tuple(spans) for spans in self.spans))

    def _advance(self, rank: int) -> None:
        actions, waiting, cost = self.program.ranks[rank], self.waiting, self.cost
        clock, spans = self.clock, self.spans[rank]
        for index in range(self.next_action[rank], len(actions)):
            action, start = actions[index], clock[rank]
            ready = self._ready(rank, index, action) if action.kind in waiting else start
            if ready is None:
                self.next_action[rank] = index
                return
            ready = ready if ready > start else start
            # An exchange's or a wait's span includes its waiting; a waiting compute action leaves a gap.
            begin = ready if action.kind in COMPUTE else start
            clock[rank] = end = ready + cost(action)
            spans.append(ActionSpan(begin, end - begin, action))
            self.posted[rank] = False
            if not self.lowered:
                self._publish(action, end)
        self.next_action[rank] = len(actions)

    def _ready(self, rank: int, index: int, action: Action) -> float | None:
        """Return when the input of the action is available; None if that is not known yet."""
        does = SEMANTICS[action.kind]
        if does.posts and not self.posted[rank]:
            self.posted[rank] = True
            for transfer in action.transfers:
                self._post(rank, index, action, transfer)
        if does.waits:
            return self._all_arrived(action)
        if does.joins == "ends":
            return self._tied(rank)
        return self._input_ready(rank, action)

    def _code(self, payload: Payload, stage: int, micro_batch: int) -> int:
        return (stage * self.num_micro_batches + micro_batch) * 2 + (payload is Payload.GRADIENT)

    def _post(self, rank: int, index: int, action: Action, transfer: PipelineTransfer) -> None:
        peer = transfer.peer
        code = self._code(transfer.payload, transfer.stage, transfer.micro_batch)
        if transfer.sends:
            channel = self.channels[rank, peer]
            mine, others = channel.sends, channel.receives
        else:
            channel = self.channels[peer, rank]
            mine, others = channel.receives, channel.sends
        place = len(mine)
        mine.append((code, self.clock[rank]))
        if place >= len(others):
            return
        other_code, other_time = others[place]
        if other_code != code:
            verb, other_verb = ("sends", "receives") if transfer.sends else ("receives", "sends")
            other = f"rank {peer} {other_verb} {self._name(other_code)}"
            what = f"as transfer {place} between the two it {verb} {self._name(code)}, but {other}"
            raise ProgramError(what, rank, index, action)
        self.arrived[code] = max(self.clock[rank], other_time) + self.transfer_cost(transfer)
        self.movable.append(peer)

    def _name(self, code: int) -> str:
        place, is_gradient = divmod(code, 2)
        stage, micro_batch = divmod(place, self.num_micro_batches)
        return f"the {Payload.GRADIENT if is_gradient else Payload.ACTIVATION} {stage}.{micro_batch}"

    def _all_arrived(self, action: Action) -> float | None:
        latest = 0.0
        for transfer in action.transfers:
            time = self.arrived.get(self._code(transfer.payload, transfer.stage, transfer.micro_batch))
            if time is None:
                return None
            latest = max(latest, time)
        return latest

    def _tied(self, rank: int) -> float | None:
        if not self.posted[rank]:
            self.posted[rank] = True
            self.synced.append(self.clock[rank])
            if len(self.synced) == 2:
                self.movable.extend((self.program.stage_rank[0], self.program.stage_rank[-1]))
        return max(self.synced) if len(self.synced) == 2 else None

    def _input_ready(self, rank: int, action: Action) -> float | None:
        needed = needed_transfer(self.program, action)
        if needed is None:
            return 0.0
        payload, stage, owner = needed
        time = self.arrived.get(self._code(payload, stage, action.micro_batch))
        if time is None or owner == rank:
            return time
        return time + self.transfer_cost(
            PipelineTransfer(payload, stage, action.micro_batch, owner, sends=False)
        )

    def _publish(self, action: Action, end: float) -> None:
        """Publish the result of a compute action in a program of compute actions only, so that its user can
        advance."""
        if output := output_of(action, self.program.num_stages):
            payload, user = output
            self.arrived[self._code(payload, action.stage, action.micro_batch)] = end
            self.movable.append(self.program.stage_rank[user])

    def _refuse_stuck(self) -> None:
        stuck = [
            rank for rank, actions in enumerate(self.program.ranks) if self.next_action[rank] < len(actions)
        ]
        if not stuck:
            return
        rank = stuck[0]
        index = self.next_action[rank]
        others = (
            f"rank {other} at {self.program.ranks[other][self.next_action[other]]}" for other in stuck[1:4]
        )
        also = ", ".join(others) or "no other rank"
        what = f"deadlock: it waits for ever; so does {also}"
        raise ProgramError(what, rank, index, self.program.ranks[rank][index])
