"""If these fail, a kind of action means one thing to the checker or planner and another to what shows it."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from program_shapes import KINDS_OF_SCHEDULES

from myriad.comm.layout import Layout
from myriad.program.actions import SEMANTICS, Collective, Kind, Resource, input_of, kinds_where, output_of
from myriad.program.build import build_program
from myriad.program.config import OverlapConfig
from myriad.telemetry.span_io.span_records import PHASES
from myriad.telemetry.spans import COMMUNICATION


def test_spans_are_classed_as_what_their_action_does() -> None:
    assert set(SEMANTICS) == set(Kind)
    waits = kinds_where(lambda does: does.waits or bool(does.ends or does.joins))
    updates = kinds_where(lambda does: does.updates)
    assert {kind for kind in Kind if kind in COMMUNICATION} == waits - updates
    for kind, does in SEMANTICS.items():
        of_parameters = does.starts or does.ends or does.joins == "ends" or Resource.PARAMETERS in does.frees
        expected = {
            "compute": does.computes,
            "pp": does.posts or does.waits,
            "dp": bool(of_parameters),
            "optimizer": does.updates or does.orthogonalizes or does.joins == "world",
            "data": kind is Kind.LOAD,
            "offload": bool(does.starts_copy or does.ends_copy),
        }
        assert [name for name, holds in expected.items() if holds] == [PHASES[kind][1]], kind


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(KINDS_OF_SCHEDULES),
    st.sampled_from([2, 4]),
    st.sampled_from([0, 1, 3]),
    st.sampled_from(["last", "each"]),
    st.booleans(),
    st.integers(1, 3),
    st.booleans(),
)
def test_what_a_program_allocates_and_issues_it_frees_and_waits_for(
    schedule: tuple[str, int],
    pp: int,
    zero: int,
    reduce: str,
    overlaps: bool,
    num_chunks: int,
    offloads: bool,
) -> None:
    """With the table as the only source of what an action does."""
    name, virtual_stages = schedule
    layout = Layout(dp=2, pp=pp, zero=zero, reduce=reduce, schedule=name, virtual_stages=virtual_stages)  # type: ignore[arg-type]
    updates = offloads and zero == 0  # otherwise the next iteration's gathers are in flight at the end
    layout = layout.model_copy(update={"offload_activations": float(offloads), "offload_optimizer": updates})
    layout = layout.model_copy(update={"offload_optimizer_ratio": 0.5 if pp == 2 else 1.0})
    overlap = OverlapConfig(pipeline=overlaps, data=overlaps, optimizer=updates)
    program = build_program(layout, overlap, 4, tied=True, training=True, num_chunks=num_chunks)
    made, used = Counter(), Counter()
    for actions in program.ranks:
        held: Counter[tuple[Resource, int, int]] = Counter()
        flying: Counter[tuple[Collective, int]] = Counter()
        for action in actions:
            does = SEMANTICS[action.kind]
            if needed := input_of(action, program.num_stages):
                used[*needed, action.micro_batch] += 1
            if output := output_of(action, program.num_stages):
                made[output[0], action.stage, action.micro_batch] += 1
            for resource in does.allocates:
                held[resource, action.stage, action.micro_batch] += 1
            for resource in does.frees:
                held[resource, action.stage, action.micro_batch] -= 1
            if does.starts:
                flying[does.starts, action.stage] += 1
            if does.ends:
                flying[does.ends, action.stage] -= 1
                assert flying[does.ends, action.stage] == 0, action
        assert not any(
            count for (resource, *_), count in held.items() if resource is Resource.OPTIMIZER_STATE
        )
        per_micro_batch = (Resource.ACTIVATIONS, Resource.WEIGHT_OPERANDS)
        assert not any(count for (resource, *_), count in held.items() if resource in per_micro_batch)
        if zero == 3:
            assert not any(count for (resource, *_), count in held.items() if resource is Resource.PARAMETERS)
        assert not any(flying.values())
    assert made == used and set(made.values()) == {1}
