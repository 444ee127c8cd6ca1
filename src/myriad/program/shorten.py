"""The program of a replica that has fewer micro-batches than another replica.

Data-parallel replicas meet in gathers and reductions: each pipeline rank must issue the same ones in the same
order, however many micro-batches its replica has. So the shorter program is the longest one without the
compute actions and transfers of the last micro-batches:

    4 micro-batches    GATHER  F0 F1 F2 F3  B0 B1 B2 B3  REDUCE  STEP
    3 micro-batches    GATHER  F0 F1 F2     B0 B1 B2     REDUCE  STEP

It is deadlock-free: the remaining actions run in an order in which all replicas could have run the longest
program together. A reduction without a waiting action is issued as soon as its stage's gradients are complete
here and all reductions before it are issued.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from myriad.program.actions import MAKES_WEIGHT_GRADIENT, Action, Kind, Program, kinds_where

__all__ = ["DATA_PARALLEL", "shorten"]

DATA_PARALLEL = kinds_where(lambda does: does.starts is not None)
"""Actions that all replicas issue together."""


def shorten(program: Program, num_micro_batches: int) -> Program:
    """Return a lowered program without the actions of its last micro-batches."""
    lowering = program.lowering
    assert lowering is not None and 0 < num_micro_batches <= program.num_micro_batches
    ranks = (tuple(_kept(actions, num_micro_batches)) for actions in program.ranks)
    if lowering.reduce == "last":
        ranks = (_reduced_early(actions) for actions in ranks)
    return replace(
        program,
        num_micro_batches=num_micro_batches,
        ranks=tuple(ranks),
        lowering=replace(lowering, most_micro_batches=program.num_micro_batches),
    )


def _kept(actions: Sequence[Action], num_micro_batches: int) -> Iterator[Action]:
    for action in actions:
        transfers = tuple(t for t in action.transfers if t.micro_batch < num_micro_batches)
        if action.micro_batch < num_micro_batches and (transfers or not action.transfers):
            yield replace(action, transfers=transfers)


def _reduced_early(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Move each START_REDUCE directly after the last action that adds to its stage's gradients."""
    kept: list[Action] = []
    complete: dict[int, int] = {}
    """Index after the last action that added to a stage's gradients."""
    posted = 0
    """Index after the last action that replicas issue together."""
    for action in actions:
        if action.kind is Kind.START_REDUCE:
            place = max(posted, complete.get(action.stage, 0))
            complete = {stage: at + (at > place) for stage, at in complete.items()}
            kept.insert(place, action)
            posted = place + 1
            continue
        kept.append(action)
        if action.kind in MAKES_WEIGHT_GRADIENT or action.kind is Kind.SYNC_TIED:
            complete[action.stage] = len(kept)
        elif action.kind in DATA_PARALLEL:
            posted = len(kept)
    return tuple(kept)
