"""What breaks for the user: needless gathers and reductions, parameters kept that ZeRO 3 should free."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program_shapes import lowered

from myriad.program.actions import COMPUTE, Kind, Program
from myriad.program.checker import check
from myriad.program.config import OverlapConfig
from myriad.program.lower import lower
from myriad.program.passes import apply_passes, cut_stages, decouple, orthogonalize, reduce_across
from myriad.program.schedules import schedule
from myriad.program.timeline import ProgramError, timeline, unit_costs


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


@given(lowered(), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_decoupling_keeps_what_is_computed_and_what_travels(program, ahead):
    after = decouple(program, ahead)
    for before_rank, after_rank in zip(program.ranks, after.ranks, strict=True):
        stays = [a for a in before_rank if a.kind in COMPUTE]
        assert [a for a in after_rank if a.kind in COMPUTE] == stays
        moved = Counter(t for a in before_rank if a.kind is not Kind.WAIT for t in a.transfers)
        assert Counter(t for a in after_rank if a.kind is not Kind.WAIT for t in a.transfers) == moved


def test_a_decoupled_receive_is_posted_one_compute_before_its_use():
    program = decouple(lower(schedule("1f1b", 2, 1, 4), zero=0, reduce="last", tied=False))
    text = " ".join(str(action) for action in program.ranks[1])
    assert text.startswith("receive(a0.0<-0) load wait(a0.0<-0) forward(1.0) receive(a0.1<-0) backward(1.0)")
    assert "send(g1.0->0) wait(a0.1<-0) forward(1.1)" in text


def test_decoupling_hides_transfers_that_the_coupled_program_waits_for():
    coupled = lower(schedule("interleaved", 4, 2, 16), zero=0, reduce="last", tied=False)
    cost = unit_costs(coupled)
    slow = timeline(coupled, cost, lambda transfer: 0.25).makespan
    fast = timeline(decouple(coupled), cost, lambda transfer: 0.25).makespan
    assert fast < slow - 3


def one_rank(chunks: int, **keys: object) -> list[str]:
    program = lower(schedule("1f1b", 1, 1, 2), zero=1, reduce="last", tied=False)
    overlap = OverlapConfig(**keys)
    return [str(action) for action in apply_passes(program, overlap, chunks).ranks[0]]


def test_gathers_start_before_the_batch_is_loaded_and_in_the_order_of_need():
    actions = one_rank(3)
    assert actions[:4] == ["start_gather(0)", "start_gather(1)", "start_gather(2)", "load"]
    assert actions[4:8] == ["await_gather(0)", "forward(0.0)", "await_gather(1)", "forward(1.0)"]


def test_a_chunk_is_reduced_as_soon_as_its_last_backward_is_done():
    actions = one_rank(2, optimizer=False)
    after = actions[actions.index("backward(1.1)") :]
    assert after[1:4] == ["start_reduce(1)", "backward(0.1)", "start_reduce(0)"]
    assert after[4:] == ["await_reduce(1)", "await_reduce(0)", "step"]


def test_new_parameters_travel_while_the_next_chunk_is_updated():
    assert one_rank(2)[-5:] == ["clip", "update(0)", "start_gather(0)", "update(1)", "start_gather(1)"]


def test_shards_are_summed_across_groups_while_later_backwards_run() -> None:
    program = lower(schedule("1f1b", 1, 1, 2), zero=2, reduce="each", tied=False)
    program = reduce_across(apply_passes(program, OverlapConfig(optimizer=False), 2))
    check(program)
    shown = [str(action) for action in program.ranks[0]]
    assert [one for one in shown if "across" in one] == [
        *("start_across(1)", "start_across(0)", "await_across(1)", "await_across(0)")
    ]
    last = shown.index("backward(1.1)")
    assert shown[last + 1 : last + 4] == ["start_reduce(1)", "start_across(1)", "backward(0.1)"]
    for wrong in ("start_across(0)", "await_across(1)"):
        left = tuple(action for action in program.ranks[0] if str(action) != wrong)
        with pytest.raises(ProgramError, match="across groups"):
            check(replace(program, ranks=(left,)))


def test_matrices_come_and_go_while_those_of_another_chunk_are_orthogonalized():
    program = lower(schedule("1f1b", 1, 1, 2), zero=0, reduce="last", tied=False)
    actions = orthogonalize(apply_passes(program, OverlapConfig(), 3)).ranks[0]
    shown = [str(action) for action in actions]
    assert shown[shown.index("clip") + 1 :] == [
        *("start_momentum(0)", "start_momentum(1)"),
        *("await_momentum(0)", "orthogonalize(0)", "start_scatter(0)"),
        "start_momentum(2)",
        *("await_momentum(1)", "orthogonalize(1)", "start_scatter(1)"),
        *("await_scatter(0)", "update(0)"),
        *("await_momentum(2)", "orthogonalize(2)", "start_scatter(2)"),
        *("await_scatter(1)", "update(1)", "await_scatter(2)", "update(2)"),
    ]


def test_ranks_without_matrices_of_a_chunk_go_on_to_the_next_chunks():
    """Three chunks of updates are in flight, so that four owners work at a time."""
    program = lower(schedule("1f1b", 1, 1, 2), zero=1, reduce="last", tied=False)
    program = orthogonalize(apply_passes(program, OverlapConfig(), 6), ahead=3)
    check(program)
    shown = [str(action) for action in program.ranks[0]]
    shown = shown[shown.index("clip") + 1 :]
    for stage in range(6):
        before = shown[: shown.index(f"orthogonalize({stage})")]
        assert [f"start_momentum({one})" in before for one in range(6)] == [
            one <= stage + 3 for one in range(6)
        ]
        assert [f"await_scatter({one})" in before for one in range(6)] == [
            one < stage - 3 for one in range(6)
        ]


def test_with_everything_off_communication_stays_where_lowering_put_it():
    program = lower(schedule("interleaved", 2, 2, 4), zero=3, reduce="each", tied=True)
    assert apply_passes(program, OverlapConfig(pipeline=False, data=False, optimizer=False)) == program


def test_zero_3_holds_few_chunks_whole_when_it_gathers_ahead():
    """Each stage is one compute here and there; two chunks ahead, the one in use, and the one just used."""
    program = lower(schedule("interleaved", 2, 3, 6), zero=3, reduce="last", tied=False)
    for actions in apply_passes(program, OverlapConfig()).ranks:
        whole: set[int] = set()
        for action in actions:
            if action.kind is Kind.START_GATHER:
                whole.add(action.stage)
            elif action.kind is Kind.RELEASE:
                whole.remove(action.stage)
            assert len(whole) <= 3


@given(lowered(4, 6))
@settings(max_examples=100, deadline=None)
def test_the_chunks_of_a_stage_compute_what_the_stage_did(program):
    cut = cut_stages(program, 3)
    for before, after in zip(program.ranks, cut.ranks, strict=True):
        whole = [(a.kind, a.stage, a.micro_batch) for a in before if a.kind in COMPUTE]
        parts = [(a.kind, a.stage // 3, a.micro_batch) for a in after if a.kind in COMPUTE]
        assert parts == [compute for compute in whole for _ in range(3)]


@pytest.mark.parametrize(("name", "virtual_stages"), [("1f1b", 1), ("interleaved", 3), ("zero-bubble", 1)])
def test_a_decoupled_send_leaves_before_the_next_compute(name, virtual_stages):
    """Else the next stage waits for a compute that has nothing to do with it."""
    computes = schedule(name, 4, virtual_stages, 8)
    program = decouple(lower(computes, zero=0, reduce="last", tied=False), 2)
    for actions in program.ranks:
        last = None
        for action in actions:
            if action.kind in COMPUTE and action.kind is not Kind.BACKWARD_WEIGHT:
                last = action
            elif action.kind is Kind.SEND:
                (sent,) = action.transfers
                assert last is not None and (sent.stage, sent.micro_batch) == (last.stage, last.micro_batch)
