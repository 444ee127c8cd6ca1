"""What breaks for the user: needless gathers and reductions, parameters kept that ZeRO 3 should free."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from program_shapes import lowered

from myriad.program.actions import COMPUTE, Kind, Program
from myriad.program.lower import lower
from myriad.program.passes import PASSES, apply_passes, decouple
from myriad.program.schedules import schedule
from myriad.program.timeline import timeline, unit_costs


def count(program: Program, rank: int) -> Counter[Kind]:
    return Counter(action.kind for action in program.ranks[rank])


def test_zero_0_gathers_nothing_and_still_reduces():
    kinds = count(lower(schedule("1f1b", 2, 1, 4), zero=0, reduce="last", tied=False), 0)
    assert (kinds[Kind.GATHER], kinds[Kind.RELEASE], kinds[Kind.REDUCE]) == (0, 0, 1)


@pytest.mark.parametrize("zero", [1, 2])
def test_zero_1_and_2_gather_each_stage_once(zero):
    kinds = count(lower(schedule("interleaved", 2, 3, 4), zero=zero, reduce="last", tied=False), 0)
    assert (kinds[Kind.GATHER], kinds[Kind.RELEASE], kinds[Kind.REDUCE]) == (3, 0, 3)


def test_zero_3_with_one_stage_gathers_once_and_frees_after_the_last_backward():
    actions = lower(schedule("1f1b", 2, 1, 4), zero=3, reduce="last", tied=False).ranks[0]
    kinds = [a.kind for a in actions]
    assert kinds.count(Kind.GATHER) == kinds.count(Kind.RELEASE) == 1
    last = max(i for i, kind in enumerate(kinds) if kind in COMPUTE)
    assert kinds.index(Kind.RELEASE) == last + 1


def test_zero_3_never_holds_two_stages_whole():
    program = lower(schedule("interleaved", 2, 3, 6), zero=3, reduce="last", tied=False)
    for actions in program.ranks:
        whole: set[int] = set()
        for action in actions:
            if action.kind is Kind.GATHER:
                whole.add(action.stage)
            elif action.kind is Kind.RELEASE:
                whole.remove(action.stage)
            assert len(whole) <= 1


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble"])
def test_reduce_each_follows_every_backward(name):
    program = lower(schedule(name, 3, 1, 5), zero=2, reduce="each", tied=True)
    for rank in range(3):
        assert count(program, rank)[Kind.REDUCE] == 5
    ends = [[str(a) for a in actions[-3:]] for actions in program.ranks]
    assert ends[0] == ["sync_tied(0)", "reduce(0)", "step"]
    assert ends[2] == ["sync_tied(2)", "reduce(2)", "step"]
    assert count(program, 1)[Kind.SYNC_TIED] == 0


def test_tied_parameters_on_one_rank_need_no_sum_between_ranks():
    kinds = count(lower(schedule("interleaved", 1, 3, 2), zero=0, reduce="last", tied=True), 0)
    assert kinds[Kind.SYNC_TIED] == 0


def test_1f1b_is_coupled_as_in_megatron():
    """In the steady state: send forward + receive backward, send backward + receive forward."""
    actions = lower(schedule("1f1b", 3, 1, 6), zero=0, reduce="last", tied=False).ranks[1]
    exchanges = [str(a) for a in actions if a.kind is Kind.EXCHANGE]
    assert exchanges[2:4] == ["exchange(g2.0<-2, a1.1->2)", "exchange(a0.2<-0, g1.0->0)"]


def test_interleaving_is_coupled_as_in_megatron():
    """Nothing is exchanged between a forward and the backward that it is paired with."""
    program = lower(schedule("interleaved", 4, 2, 16), zero=0, reduce="last", tied=False)
    for actions in program.ranks:
        kinds = [a.kind for a in actions if a.kind in COMPUTE or a.kind is Kind.EXCHANGE]
        steady = kinds[len(kinds) // 3 : len(kinds) // 2]
        neighbours = set(pairwise(steady))
        assert {(Kind.FORWARD, Kind.BACKWARD), (Kind.BACKWARD, Kind.EXCHANGE)} <= neighbours
        assert (Kind.FORWARD, Kind.EXCHANGE) not in neighbours


@given(lowered())
@settings(max_examples=100, deadline=None)
def test_decoupling_keeps_what_is_computed_and_what_travels(program):
    after = decouple(program)
    assert decouple(after) == after
    for before_rank, after_rank in zip(program.ranks, after.ranks, strict=True):
        stays = [a for a in before_rank if a.kind in COMPUTE]
        assert [a for a in after_rank if a.kind in COMPUTE] == stays
        moved = Counter(t for a in before_rank if a.kind is not Kind.WAIT for t in a.transfers)
        assert Counter(t for a in after_rank if a.kind is not Kind.WAIT for t in a.transfers) == moved


def test_a_decoupled_receive_is_posted_one_compute_before_its_use():
    program = decouple(lower(schedule("1f1b", 2, 1, 4), zero=0, reduce="last", tied=False))
    text = " ".join(str(action) for action in program.ranks[1])
    assert text.startswith("load receive(a0.0<-0) wait(a0.0<-0) forward(1.0) receive(a0.1<-0) backward(1.0)")
    assert "send(g1.0->0) wait(a0.1<-0) forward(1.1)" in text


def test_decoupling_hides_transfers_that_the_coupled_program_waits_for():
    coupled = lower(schedule("interleaved", 4, 2, 16), zero=0, reduce="last", tied=False)
    cost = unit_costs(coupled)
    slow = timeline(coupled, cost, lambda transfer: 0.25).makespan
    fast = timeline(decouple(coupled), cost, lambda transfer: 0.25).makespan
    assert fast < slow - 3


def test_passes_are_found_by_name():
    program = lower(schedule("gpipe", 2, 2, 4), zero=1, reduce="last", tied=False)
    assert apply_passes(program, PASSES) == decouple(program)
