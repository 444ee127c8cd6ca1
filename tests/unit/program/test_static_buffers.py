"""If these fail, captured stages compute with parameters of another chunk, or more memory is reserved than is
needed."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program_shapes import KINDS_OF_SCHEDULES

from myriad.comm.layout import Layout
from myriad.program.actions import Action, Kind
from myriad.program.build import build_program
from myriad.program.config import OverlapConfig
from myriad.program.static_buffers import TIED, BufferAssignment, assign_buffers
from myriad.program.warm_up import warm_up_actions


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(KINDS_OF_SCHEDULES),
    st.sampled_from([1, 2]),
    st.sampled_from([2, 3]),
    st.sampled_from(["last", "each"]),
    st.integers(1, 3),
    st.booleans(),
)
def test_no_two_chunks_are_whole_at_the_same_place(
    schedule: tuple[str, int], pp: int, zero: int, reduce: str, num_chunks: int, tied: bool
) -> None:
    name, virtual_stages = schedule
    if pp == 1 and virtual_stages == 2:
        return
    layout = Layout(
        dp=2,
        pp=pp,
        zero=zero,
        reduce=reduce,
        schedule=name,
        virtual_stages=virtual_stages,  # type: ignore[arg-type]
    )
    programs = [
        build_program(layout, OverlapConfig(), 4, tied=tied, training=training, num_chunks=num_chunks)
        for training in (True, False)
    ]
    for rank in range(pp):
        stages = [stage for stage, owner in enumerate(programs[0].stage_rank) if owner == rank]
        ends = {0, programs[0].num_stages - 1} if tied else set()
        chunks_of = {stage: [stage, TIED] if stage in ends else [stage] for stage in stages}
        runs = [one.ranks[rank] for one in programs]
        runs += [warm_up_actions(one, rank) for one in programs]
        places = assign_buffers(runs, chunks_of, zero)
        for run in (runs[0], runs[1], runs[2], runs[0], runs[0], runs[3], runs[1]):
            assert_apart(run, chunks_of, places, zero)
        assert len(set(places.values.values())) <= len(stages) + tied
        # A plan counts the places of training alone.
        trained = assign_buffers([runs[0], runs[2]], chunks_of, zero)
        for some, all_runs in ((trained.values, places.values), (trained.grad_buffers, places.grad_buffers)):
            assert len(set(some.values())) == len(set(all_runs.values()))


def assert_apart(
    run: Sequence[Action], chunks_of: dict[int, list[int]], places: BufferAssignment, zero: int
) -> None:
    """By the gathers and releases of parameters alone, in words of their own."""
    whole: dict[int, set[int]] = {}
    for action in run:
        for key in chunks_of.get(action.stage, []) if zero == 3 else []:
            if action.kind in (Kind.GATHER, Kind.START_GATHER):
                whole.setdefault(key, set()).add(action.stage)
            elif action.kind is Kind.RELEASE:
                whole[key].discard(action.stage)
        now = [places.values[key] for key, users in whole.items() if users]
        assert len(set(now)) == len(now)


def test_only_chunks_with_disjoint_lifetimes_share_a_buffer() -> None:
    layout = Layout(dp=2, zero=3, reduce="each")
    program = build_program(layout, OverlapConfig(), 2, tied=False, training=True, num_chunks=8)
    chunks_of = {stage: [stage] for stage in range(8)}
    places = assign_buffers([program.ranks[0]], chunks_of, 3)
    assert len(set(places.grad_buffers.values())) == 2
    assert len(set(places.values.values())) == 8


@pytest.mark.parametrize(("zero", "values", "sums"), [(1, False, False), (2, False, True), (3, True, True)])
def test_memory_that_is_never_freed_has_no_slot(zero: int, values: bool, sums: bool) -> None:
    program = build_program(Layout(dp=2, zero=zero), OverlapConfig(), 2, tied=False, training=True)
    places = assign_buffers([program.ranks[0]], {0: [0]}, zero)
    assert (bool(places.values), bool(places.grad_buffers)) == (values, sums)
    assert BufferAssignment.largest(places.grad_buffers, {0: 5.0}) == ({0: 5.0} if sums else {})
