"""Bytes that a rank's captured stages reserve, from its first step to its last
(`myriad.parallel.cuda_graphs`).

in turn          one memory pool for all stages: the peak of one micro-batch in its forward and backward
else             a pool for each slot, a micro-batch in flight of a stage: what its layers keep, and their
                 peak in the forward or backward
each slot        its tokens and targets; a message for each output and gradient that is written or read
                 there, apart from the input, which the layers keep anyway
validation       runs operator by operator, in separate memory
"""

from collections.abc import Sequence

from myriad.planner.memory.stage_memory import MicroBatchBytes, StageMemory
from myriad.program.actions import Action
from myriad.program.in_flight import InFlight

__all__ = ["captured_bytes"]


def captured_bytes(model: StageMemory, actions: Sequence[Action], num_stages: int) -> float:
    """Return the bytes that the stages of a rank with these actions reserve."""
    in_flight = InFlight.of(actions)
    held = {
        stage: model.held(stage, turns=model.full and stage in in_flight.ends_next)
        for stage in sorted(in_flight.slots)
    }
    validates = max(one.in_forward[0] - one.kept - one.head_bytes for one in held.values())
    if in_flight.in_turn:
        return max(validates, 0.0) + _in_turn(list(held.values())) + _tokens(model)
    splits = in_flight.splits
    slots = (
        in_flight.slots[stage]
        * (
            max(one.in_forward[0], _backward(one, model.products(stage)) if splits else _backward(one))
            + model.message * _messages(stage, num_stages)
            + _tokens(model)
        )
        for stage, one in held.items()
    )
    return max(validates, 0.0) + sum(slots)


def _backward(held: MicroBatchBytes, left: float | None = None) -> float:
    """Return the peak in the backward. ``left``: what the first half of a split one leaves for the second."""
    if left is None:
        return _kept(held) + held.in_backward[0]
    return max(_kept(held) + held.in_split_backward[0], left)


def _kept(held: MicroBatchBytes) -> float:
    return held.kept + held.head_bytes


def _in_turn(held: Sequence[MicroBatchBytes]) -> float:
    most = so_far = 0.0
    for one in held:
        most = max(most, so_far + one.in_forward[0])
        so_far += _kept(one)
    for one in reversed(held):
        most = max(most, so_far + one.in_backward[0])
        so_far -= _kept(one)
    return most


def _messages(stage: int, num_stages: int) -> int:
    """Return the number of messages in a slot: the output and the incoming gradient, and the outgoing
    gradient."""
    return 2 * (stage < num_stages - 1) + (stage > 0)


def _tokens(model: StageMemory) -> float:
    """Return the bytes of a slot's targets and tokens, counted twice for every stage."""
    return 2.0 * 8 * model.workload.layout.micro_batch * model.workload.model.sequence
