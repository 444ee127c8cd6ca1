"""Static check of one rank's list against the whole program: the first half of the checker.

The list is walked once with the state that a runtime would have: what has been computed, received and sent
(`payload_check`), which parameters are whole, and which gradients are not reduced yet (`chunk_check`). Every
input of an action must be available when the action comes. At the end nothing may be missing or left over.
"""

from myriad.program.actions import COMPUTE, SEMANTICS, Action, Kind, Program
from myriad.program.chunk_check import Chunks
from myriad.program.payload_check import Payloads
from myriad.program.timeline import ProgramError

__all__ = ["check_rank"]


def check_rank(program: Program, rank: int) -> None:
    """Raise `ProgramError` at the first wrong action, or for what is missing at the end."""
    state = _RankState(program, rank)
    for index, action in enumerate(program.ranks[rank]):
        if wrong := state.fault(action):
            raise ProgramError(wrong, rank, index, action)
    if wrong := state.fault_at_end():
        raise ProgramError(wrong, rank)


class _RankState:
    """The state of a rank between two actions. A ``..._fault`` method returns what is wrong, or None."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.lowering = program, program.lowering
        self.stages = [stage for stage, owner in enumerate(program.stage_rank) if owner == rank]
        self.done: set[tuple[Kind, int, int]] = set()
        self.payloads, self.chunks = Payloads(program, rank), Chunks(program, self.stages)

    def fault(self, action: Action) -> str | None:
        if action.kind in COMPUTE:
            return self._compute_fault(action)
        if self.lowering is None:
            return "a program that is not lowered holds computes only"
        does = SEMANTICS[action.kind]
        rules = self.payloads if does.posts or does.waits else self.chunks
        return self.chunks.late_fault(action) or rules.fault(action)

    def fault_at_end(self) -> str | None:
        if (wrong := self._missing_computes()) or self.lowering is None:
            return wrong
        return self.chunks.missing_step() or self.payloads.fault_at_end() or self.chunks.fault_at_end()

    def _compute_fault(self, action: Action) -> str | None:
        stage, micro_batch, kind = action.stage, action.micro_batch, action.kind
        if stage not in self.stages or not 0 <= micro_batch < self.program.num_micro_batches:
            return f"not a stage of this rank ({self.stages}) or not a micro-batch of the program"
        if (kind, stage, micro_batch) in self.done:
            return "computed twice"
        if wrong := self._order_fault(action) or self.payloads.input_fault(action):
            return wrong
        if wrong := self.chunks.compute_fault(action):
            return wrong
        self.done.add((kind, stage, micro_batch))
        self.payloads.computed(action)
        self.chunks.computed(action)
        return None

    def _order_fault(self, action: Action) -> str | None:
        where = (action.stage, action.micro_batch)
        if action.kind is Kind.FORWARD:
            return None
        if self.lowering is not None and not self.lowering.training:
            return "a forward-only program has no backward"
        if (Kind.FORWARD, *where) not in self.done:
            return "backward before its forward"
        if action.kind is Kind.BACKWARD_WEIGHT:
            return None if (Kind.BACKWARD_INPUT, *where) in self.done else "weight half before its input half"
        other = Kind.BACKWARD_INPUT if action.kind is Kind.BACKWARD else Kind.BACKWARD
        return "both a whole and a split backward" if (other, *where) in self.done else None

    def _missing_computes(self) -> str | None:
        training = self.lowering is None or self.lowering.training
        for stage in self.stages:
            for micro_batch in range(self.program.num_micro_batches):
                where = (stage, micro_batch)
                if (Kind.FORWARD, *where) not in self.done:
                    return f"forward of stage {stage}, micro-batch {micro_batch} is missing"
                whole, half = (Kind.BACKWARD, *where), (Kind.BACKWARD_WEIGHT, *where)
                if training and whole not in self.done and half not in self.done:
                    return f"backward of stage {stage}, micro-batch {micro_batch} is missing or half"
        return None
