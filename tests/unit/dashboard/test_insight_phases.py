"""If these break: seconds of a phase are counted twice, or are missing, in every table, map and report."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_run import records_of, simulated_run

from myriad.comm.layout import Layout
from myriad.dashboard.insight.nesting import nested
from myriad.dashboard.insight.phase_table import phase_table
from myriad.telemetry.span_io.span_records import RECORD, Records

NAMES = ("forward", "tensor_comm", "wait", "made by the job")


@st.composite
def nested_records(draw: st.DrawFn) -> Records:
    """Ranks that open and close spans as code does, gaps between; any order of ranks, each by its ends."""
    rows: list[tuple[int, int, int, int, int]] = []
    for rank in draw(st.permutations(range(draw(st.integers(1, 4))))):
        now = draw(st.integers(0, 10**6))
        for step in range(draw(st.integers(1, 3))):
            for _ in range(draw(st.integers(0, 4))):
                now += draw(st.integers(0, 10**5))
                now = _open(draw, rows, rank, step, now, 0)
    records = np.zeros(len(rows), dtype=RECORD)
    for at, (rank, step, name, start, end) in enumerate(rows):
        records[at] = (1_700_000_000 * 10**9 + start, end - start, step, rank, name, -1, -1, -1)
    return records


def _open(draw: st.DrawFn, rows: list, rank: int, step: int, start: int, depth: int) -> int:
    now = start + draw(st.integers(2_000, 10**5))
    for _ in range(draw(st.integers(0, 2)) if depth < 3 else 0):
        now = _open(draw, rows, rank, step, now, depth + 1) + draw(st.integers(2_000, 10**5))
    now += draw(st.integers(2_000, 10**5))
    rows.append((rank, step, draw(st.integers(0, len(NAMES) - 1)), start, now))
    return now


@settings(max_examples=60, deadline=None)
@given(nested_records(), st.randoms())
def test_own_and_idle_times_are_the_wall_time(records: Records, random: np.random.Generator) -> None:
    order = list(range(len(records)))
    random.shuffle(order)
    for some in (records, records[order]):
        table = phase_table(some, NAMES, 5)
        spent = table.own_seconds.sum(axis=2) + np.where(table.seen, table.idle_seconds, 0)
        assert np.allclose(spent[table.seen], table.wall_seconds[table.seen], rtol=0, atol=1e-12)
        assert (table.own_seconds >= 0).all()
        assert not table.seen.size or (table.idle_seconds[table.seen] >= -1e-12).all()
        assert table.count.sum() == len(records)


@settings(max_examples=25, deadline=None)
@given(nested_records())
def test_every_span_lies_in_the_smallest_one_around_it(records: Records) -> None:
    found = nested(records)
    start, end, rank = found.start, found.end, found.records["rank"]
    for at in range(len(found.records)):
        around = [
            other
            for other in range(len(found.records))
            if other != at and rank[other] == rank[at] and start[other] <= start[at] and end[at] <= end[other]
        ]
        smallest = min(around, key=lambda other: end[other] - start[other], default=-1)
        assert found.parent[at] == smallest


def test_communication_inside_a_forward_is_not_the_forward_s() -> None:
    records, names = records_of(
        (1, 0, "forward", 0.0, 9.0), (1, 0, "tensor_comm", 3.0, 2.0), (1, 0, "tensor_comm", 7.0, 1.0)
    )
    table = phase_table(records, names, 1)
    assert table.of_phase("forward")[0, 0] == 6.0
    assert table.of_phase("tensor")[0, 0] == 3.0
    assert table.total_seconds[0, 0, table.phases.index("forward")] == 9.0


def test_forwards_of_an_evaluation_are_not_training() -> None:
    records, names = records_of(
        (1, 0, "forward", 0.0, 1.0), (1, 0, "evaluate", 2.0, 5.0), (1, 0, "forward", 2.5, 4.0)
    )
    table = phase_table(records, names, 1)
    assert table.of_phase("forward")[0, 0] == 1.0
    assert table.of_phase("evaluate")[0, 0] == 5.0


def test_a_job_with_a_thousand_phases_of_its_own_fills_no_memory() -> None:
    rows = [(1, 0, f"ours {number}", float(number), 0.5) for number in range(1000)]
    records, names = records_of(*rows, (1, 0, "forward", 2000.0, 1.0))
    table = phase_table(records, names, 1)
    assert len(table.phases) < 60
    assert table.of_phase("forward")[0, 0] == 1.0
    assert abs(table.own_seconds.sum() - 501.0) < 1e-9


def test_spans_that_seem_to_overlap_by_a_clock_s_grain_count_once() -> None:
    records, names = records_of((1, 0, "forward", 0.0, 1.0000002), (1, 0, "wait", 1.0, 1.0))
    table = phase_table(records, names, 1)
    assert table.wall_seconds[0, 0] == 2.0
    assert abs(table.idle_seconds[0, 0]) < 1e-12


def test_a_rank_that_reported_nothing_is_unknown_and_not_quick() -> None:
    records, names = records_of((1, 0, "forward", 0.0, 1.0), (3, 2, "forward", 5.0, 1.0))
    table = phase_table(records, names, 3)
    assert list(table.steps) == [1, 3]
    assert np.isnan(table.of_phase("forward")[:, 1]).all()
    assert table.of_phase("forward")[0, 0] == 1.0 and table.of_phase("forward")[1, 2] == 1.0
    assert np.isnan(table.of_phase("no such phase")).all()


def test_a_step_lasts_until_the_next_one_begins() -> None:
    run = simulated_run(Layout(dp=2, pp=2), steps=4)
    table = phase_table(run.records, run.names, 4)
    for step, seconds in zip(table.steps[:-1], table.step_seconds, strict=False):
        assert abs(seconds - run.step_seconds[int(step)]) < 1e-6
