"""What breaks for the user: a step with pairs hangs, or is slower than one without."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from program_shapes import paired

from myriad.comm.layout import Layout
from myriad.program.actions import Action, Kind, Program
from myriad.program.build import build_program
from myriad.program.checker import check, exchange_order
from myriad.program.config import OverlapConfig
from myriad.program.timeline import ProgramError

SCHEDULES = [("1f1b", 1, 1), ("eager-1f1b", 4, 1), ("interleaved", 4, 2), ("interleaved", 2, 3)]


def program_of(name: str, pp: int, virtual_stages: int, *, pairs: bool, micro_batches: int = 12) -> Program:
    layout = Layout(dp=2, ep=2, pp=pp, schedule=name, virtual_stages=virtual_stages)  # type: ignore[arg-type]
    overlap = OverlapConfig(pairs=pairs)
    return build_program(layout, overlap, micro_batches, tied=False, training=True, num_chunks=2)


def pairs_of(actions: tuple[Action, ...]) -> list[tuple[Action, Action]]:
    return [(a, b) for a, b in pairwise(actions) if a.kind is Kind.PAIRED_FORWARD]


def with_list(program: Program, rank: int, actions: list[Action]) -> Program:
    ranks = [*program.ranks]
    ranks[rank] = tuple(actions)
    return replace(program, ranks=tuple(ranks))


@pytest.mark.parametrize(("name", "pp", "virtual_stages"), SCHEDULES)
def test_pairs_make_no_rank_wait_longer_and_hold_one_more_micro_batch(name, pp, virtual_stages):
    alone, together = (check(program_of(name, pp, virtual_stages, pairs=on)) for on in (False, True))
    assert together.makespan == pytest.approx(alone.makespan)
    more = [b - a for a, b in zip(alone.peak_in_flight, together.peak_in_flight, strict=True)]
    assert max(more) <= 1


@pytest.mark.parametrize(("name", "pp", "virtual_stages"), SCHEDULES)
def test_every_forward_behind_the_first_ones_is_in_a_pair_with_an_older_micro_batch(name, pp, virtual_stages):
    for actions in program_of(name, pp, virtual_stages, pairs=True).ranks:
        found = pairs_of(actions)
        alone = [action for action in actions if action.kind is Kind.FORWARD]
        assert len(found) + len(alone) == 12 * virtual_stages * 2
        assert len(alone) <= 2 * (2 * (pp - 1) + (virtual_stages - 1) * max(pp, 2) + 1)
        assert all(then.kind is Kind.PAIRED_BACKWARD for _, then in found)
        assert all((a.stage, a.micro_batch) != (b.stage, b.micro_batch) for a, b in found)


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_dualpipe_pairs_the_halves_of_a_rank_in_its_whole_steady_part(pp):
    """A pair sends both outputs at its end, which costs the first and last pairs of each rank half a forward
    of the others."""
    program = program_of("dualpipe-v", pp, 2, pairs=True)
    for rank, actions in enumerate(program.ranks):
        found = pairs_of(actions)
        assert all((a.stage // 2, b.stage // 2) in halves_of(rank, pp) for a, b in found)
        steady = 2 * (12 - 2 * pp + rank + 1) + (pp - rank - 1)
        assert len(found) == 2 * (steady - (rank == pp - 1 > 0))
    assert check(program).bubble == pytest.approx([pp - 1] * pp)


def halves_of(rank: int, pp: int) -> set[tuple[int, int]]:
    down, up = rank, 2 * pp - 1 - rank
    return {(down, up), (up, down)}


@given(paired())
@settings(max_examples=100, deadline=None)
def test_pairs_keep_every_compute_action_of_each_rank(program):
    check(program)
    for rank, actions in enumerate(program.ranks):
        stages = [stage for stage, owner in enumerate(program.stage_rank) if owner == rank]
        wanted = len(stages) * program.num_micro_batches
        backwards = (Kind.BACKWARD, Kind.PAIRED_BACKWARD, Kind.BACKWARD_WEIGHT)
        for kinds in ((Kind.FORWARD, Kind.PAIRED_FORWARD), backwards):
            found = {(a.stage, a.micro_batch) for a in actions if a.kind in kinds}
            assert len(found) == wanted


def test_an_action_inside_a_pair_or_half_of_a_pair_is_refused():
    program = program_of("1f1b", 1, 1, pairs=True)
    actions = [*program.ranks[0]]
    at = next(i for i, action in enumerate(actions) if action.kind is Kind.PAIRED_FORWARD)
    forward, backward = actions[at : at + 2]
    between = [*actions[: at + 1], *actions[at + 2 : at + 4], backward, *actions[at + 4 :]]
    swapped = [*actions[:at], backward, forward, *actions[at + 2 :]]
    opened = [*actions[:at], forward, Action(Kind.BACKWARD, backward.stage, backward.micro_batch)]
    for wrong in (between, swapped, opened + actions[at + 2 :]):
        with pytest.raises(ProgramError, match="pair follow each other directly"):
            check(with_list(program, 0, wrong))


def test_a_forward_that_is_paired_with_its_own_backward_is_refused():
    program = program_of("1f1b", 1, 1, pairs=False, micro_batches=1)
    kinds = {Kind.FORWARD: Kind.PAIRED_FORWARD, Kind.BACKWARD: Kind.PAIRED_BACKWARD}
    wrong = [Action(kinds.get(a.kind, a.kind), a.stage, a.micro_batch, a.transfers) for a in program.ranks[0]]
    alone = [a for a in wrong if a.stage < 1]
    one_chunk = replace(program, stage_rank=(0,), ranks=(tuple(alone),))
    with pytest.raises(ProgramError, match="own forward"):
        check(one_chunk)


def test_another_order_of_exchanges_on_one_of_the_ranks_that_share_experts_is_found():
    """The list of each rank is complete and in order by itself: only the comparison shows that they hang."""
    program = program_of("1f1b", 1, 1, pairs=True, micro_batches=4)
    swap = {1: 2, 2: 1}
    other = [Action(a.kind, a.stage, swap.get(a.micro_batch, a.micro_batch)) for a in program.ranks[0]]
    check(with_list(program, 0, other))
    assert exchange_order(other) != exchange_order(program.ranks[0])
