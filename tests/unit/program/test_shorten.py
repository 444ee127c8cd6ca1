"""What breaks for the user: with unequal shares a replica waits for ever, sums too early or too late."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program_shapes import lowered

from myriad.comm.layout import Layout
from myriad.program.actions import COMPUTE, Kind, Program
from myriad.program.build import DATA_PARALLEL, build_program, shorten
from myriad.program.checker import check
from myriad.program.config import OverlapConfig


def meetings(program: Program) -> list[list[tuple[str, int]]]:
    """What each rank posts together with its data-parallel peers, in order."""
    gathers = (Kind.GATHER, Kind.START_GATHER)
    return [
        [("gather" if a.kind in gathers else "reduce", a.stage) for a in actions if a.kind in DATA_PARALLEL]
        for actions in program.ranks
    ]


def computes(program: Program) -> list[list[str]]:
    return [[str(action) for action in actions if action.kind in COMPUTE] for actions in program.ranks]


@settings(max_examples=200, deadline=None)
@given(lowered(), st.data())
def test_replicas_with_fewer_micro_batches_post_the_same_in_the_same_order(
    program: Program, data: st.DataObject
) -> None:
    shorter = shorten(program, data.draw(st.integers(1, program.num_micro_batches)))
    check(shorter)
    assert meetings(shorter) == meetings(program)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
def test_a_shorter_program_computes_in_the_order_of_its_own_schedule(name: str) -> None:
    layout = Layout(dp=2, pp=3, schedule=name)
    own, shorter = (
        build_program(layout, OverlapConfig(), 5, tied=True, training=True, most_micro_batches=most)
        for most in (0, 9)
    )
    assert computes(shorter) == computes(own)


def test_gradients_leave_as_soon_as_a_replica_has_them_all() -> None:
    layout = Layout(dp=2, pp=2, zero=2)
    program = build_program(
        layout, OverlapConfig(), 3, tied=False, training=True, num_chunks=4, most_micro_batches=8
    )
    for actions in program.ranks:
        behind = [
            (before.kind, before.stage == after.stage)
            for before, after in pairwise(actions)
            if after.kind is Kind.START_REDUCE
        ]
        assert len(behind) == 4 and set(behind) <= {(Kind.BACKWARD, True), (Kind.SEND, False)}


def test_a_reduction_before_the_last_micro_batch_is_refused() -> None:
    """The checker holds a shorter program to its own number of micro-batches."""
    program = build_program(
        Layout(dp=2, zero=1), OverlapConfig(data=False), 3, tied=False, training=True, most_micro_batches=4
    )
    kinds = [action.kind for action in program.ranks[0]]
    assert kinds.count(Kind.REDUCE) == 1 and kinds.count(Kind.BACKWARD) == 3
    assert kinds.index(Kind.REDUCE) > max(i for i, kind in enumerate(kinds) if kind is Kind.BACKWARD)
