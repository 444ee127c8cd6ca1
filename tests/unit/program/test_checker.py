"""What breaks for the user: a wrong program hangs or trains on wrong gradients instead of being refused."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from program_shapes import lowered, paired

from myriad.program.actions import COMPUTE, Action, Kind, PipelineTransfer, Program
from myriad.program.build import update_early
from myriad.program.checker import check
from myriad.program.config import OverlapConfig
from myriad.program.lower import lower
from myriad.program.passes import apply_passes, decouple
from myriad.program.schedules import schedule
from myriad.program.timeline import ProgramError


def with_rank(program: Program, rank: int, actions: list[Action]) -> Program:
    ranks = list(program.ranks)
    ranks[rank] = tuple(actions)
    return replace(program, ranks=tuple(ranks))


@given(lowered() | paired())
@settings(max_examples=250, deadline=None)
def test_everything_that_lowering_and_passes_write_is_proved(program):
    check(program)


@given(lowered(4, 6) | paired(4, 6), st.data())
@settings(max_examples=250, deadline=None)
def test_a_missing_action_is_found(program, data):
    rank = data.draw(st.integers(0, program.num_ranks - 1))
    actions = list(program.ranks[rank])
    del actions[data.draw(st.integers(0, len(actions) - 1))]
    with pytest.raises(ProgramError):
        check(with_rank(program, rank, actions))


def test_a_missing_norm_is_found_where_stages_are_updated_before_it():
    """No action after the norm shows it there: the list ends."""
    lowered = lower(schedule("1f1b", 2, 1, 2), zero=0, reduce="last", tied=False, training=True)
    program = update_early(apply_passes(lowered, OverlapConfig(optimizer=True), 1), travels=False)
    assert program.ranks[0][-1].kind is Kind.CLIP
    with pytest.raises(ProgramError, match="never finds the gradients' norm"):
        check(with_rank(program, 0, list(program.ranks[0][:-1])))


@given(lowered(4, 6) | paired(4, 6), st.data())
@settings(max_examples=250, deadline=None)
def test_an_action_done_twice_is_found(program, data):
    rank = data.draw(st.integers(0, program.num_ranks - 1))
    actions = list(program.ranks[rank])
    index = data.draw(st.integers(0, len(actions) - 1))
    actions.insert(data.draw(st.integers(0, len(actions))), actions[index])
    with pytest.raises(ProgramError):
        check(with_rank(program, rank, actions))


@given(lowered(4, 6) | paired(4, 6), st.data())
@settings(max_examples=250, deadline=None)
def test_a_compute_before_its_input_is_found(program, data):
    """Moves a compute that needs something before what it needs: its wait, its exchange, or its own
    forward."""
    rank = data.draw(st.integers(0, program.num_ranks - 1))
    actions = list(program.ranks[rank])
    index = data.draw(st.sampled_from([i for i, a in enumerate(actions) if a.kind in COMPUTE]))
    actions.insert(0, actions.pop(index))
    with pytest.raises(ProgramError):
        check(with_rank(program, rank, actions))


@given(lowered(4, 6) | paired(4, 6), st.data())
@settings(max_examples=200, deadline=None)
def test_swapping_two_transfers_of_one_channel_is_found(program, data):
    """NCCL has no tags: what is sent first is received first, so one side alone may not change the order."""
    sides = [
        (rank, transfers)
        for rank in range(program.num_ranks)
        for sends in (True, False)
        for peer in range(program.num_ranks)
        if len(transfers := channel(program, rank, peer, sends)) > 1
    ]
    if not sides:
        return
    rank, transfers = data.draw(st.sampled_from(sides))
    first = data.draw(st.integers(0, len(transfers) - 2))
    swap = {transfers[first]: transfers[first + 1], transfers[first + 1]: transfers[first]}
    actions = [
        action if action.kind is Kind.WAIT else swapped(action, swap) for action in program.ranks[rank]
    ]
    with pytest.raises(ProgramError):
        check(with_rank(program, rank, actions))


def channel(program: Program, rank: int, peer: int, sends: bool) -> list[PipelineTransfer]:
    found = (t for a in program.ranks[rank] if a.kind is not Kind.WAIT for t in a.transfers)
    return [t for t in found if t.peer == peer and t.sends is sends]


def swapped(action: Action, swap: dict[PipelineTransfer, PipelineTransfer]) -> Action:
    return structs.replace(action, transfers=tuple(swap.get(t, t) for t in action.transfers))


def test_sends_that_block_each_other_are_a_deadlock_and_both_ranks_are_named():
    """The last activation and the first gradient cross; each rank sends before it receives, and blocks."""
    program = lower(schedule("1f1b", 2, 1, 2), zero=0, reduce="last", tied=False)
    one_by_one = []
    for actions in program.ranks:
        row: list[Action] = []
        for action in actions:
            parts = sorted(action.transfers, key=lambda t: not t.sends)
            row += [structs.replace(action, transfers=(t,)) for t in parts] if parts else [action]
        one_by_one.append(tuple(row))
    with pytest.raises(ProgramError, match=r"rank 0, action .*deadlock.*rank 1 at exchange"):
        check(replace(program, ranks=tuple(one_by_one)))


def test_decoupled_sends_may_cross():
    program = decouple(lower(schedule("1f1b", 2, 1, 2), zero=0, reduce="last", tied=False))
    check(program)
    assert not any(action.kind is Kind.EXCHANGE for _, action in program)


@pytest.mark.parametrize("kind", [Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT])
def test_a_half_backward_beside_a_whole_one_is_found(kind):
    program = schedule("1f1b", 1, 1, 2)
    extra = Action(kind, 0, 1)
    with pytest.raises(ProgramError):
        check(with_rank(program, 0, [*program.ranks[0], extra]))


def test_the_weight_half_before_the_input_half_is_found():
    program = schedule("zero-bubble", 1, 1, 1)
    forward, first, second = program.ranks[0]
    with pytest.raises(ProgramError, match=r"rank 0, action 1 backward_weight\(0\.0\)"):
        check(with_rank(program, 0, [forward, second, first]))


def test_tied_gradients_reduced_before_they_are_summed_are_found():
    program = lower(schedule("1f1b", 2, 1, 2), zero=0, reduce="last", tied=True)
    actions = list(program.ranks[1])
    place = next(i for i, a in enumerate(actions) if a.kind is Kind.SYNC_TIED)
    actions[place], actions[place + 1] = actions[place + 1], actions[place]
    with pytest.raises(ProgramError, match="tied"):
        check(with_rank(program, 1, actions))


def test_a_tied_sum_that_only_one_rank_reaches_is_found():
    program = lower(schedule("1f1b", 2, 1, 2), zero=0, reduce="last", tied=True)
    actions = [a for a in program.ranks[1] if a.kind is not Kind.SYNC_TIED]
    with pytest.raises(ProgramError):
        check(with_rank(program, 1, actions))


def test_a_stage_on_the_wrong_rank_is_found():
    program = schedule("1f1b", 2, 1, 2)
    with pytest.raises(ProgramError, match="not a stage of this rank"):
        check(replace(program, ranks=(program.ranks[1], program.ranks[0])))


def test_parameters_left_whole_with_zero_3_are_found():
    program = lower(schedule("1f1b", 2, 1, 2), zero=3, reduce="last", tied=False)
    actions = [a for a in program.ranks[0] if a.kind is not Kind.RELEASE]
    with pytest.raises(ProgramError, match="never released"):
        check(with_rank(program, 0, actions))


def test_validation_computes_forwards_only():
    program = lower(schedule("interleaved", 3, 2, 5), zero=3, reduce="last", tied=False, training=False)
    check(program)
    kinds = {action.kind for _, action in program}
    assert kinds == {Kind.LOAD, Kind.GATHER, Kind.RELEASE, Kind.FORWARD, Kind.EXCHANGE}
    again = lower(program, zero=3, reduce="last", tied=False, training=False)
    assert check(again).peak_in_flight == (0.5, 0.5, 0.5)


def test_a_program_for_thousands_of_actions_a_rank_is_proved():
    report = check(decouple(lower(schedule("interleaved", 7, 15, 28), zero=2, reduce="last", tied=True)))
    assert report.bubble == pytest.approx([3 * 6 / 15] * 7)
