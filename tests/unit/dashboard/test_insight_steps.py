"""If these break: losses do not add up to the step, the path that decided it is not the step's length, or
what healing a rank would bring is wrong."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_run import costs_of, records_of, simulated_run

from myriad.comm.layout import Layout
from myriad.dashboard.insight.arrivals import LAST_ARRIVER, SEND, arrows
from myriad.dashboard.insight.critical_path import critical_path
from myriad.dashboard.insight.hang_analysis import analyze_hang
from myriad.dashboard.insight.losses import LOSSES, losses, losses_at_speed
from myriad.dashboard.insight.phase_table import phase_table
from myriad.dashboard.insight.predicted_step import predicted_losses
from myriad.dashboard.insight.step_spans import programs_seen
from myriad.dashboard.insight.what_if import what_if
from myriad.planner.simulation.simulator import simulate
from myriad.program.actions import Kind
from myriad.run.run_speed import Speed

layouts = st.sampled_from(
    [
        Layout(dp=2, pp=2, tp=2),
        Layout(dp=3, pp=4, zero=1),
        Layout(dp=2, pp=2, virtual_stages=2, zero=3),
        Layout(dp=3, tp=2, zero=2),
        Layout(dp=2, pp=4, schedule="zero-bubble"),
        Layout(pp=4, schedule="gpipe"),
        Layout(),
    ]
)
factors = st.sampled_from([1.0, 1.07, 1.5])


def slow_lane(layout: Layout, factor: float) -> dict[tuple[int, int], float]:
    return {(layout.dp - 1, layout.pp - 1): factor}


def lane_ranks(run, replica: int, place: int) -> list[int]:
    here = (run.ranks.replica == replica) & (run.ranks.pipeline == place)
    return [int(rank) for rank in np.flatnonzero(here)]


@settings(max_examples=25, deadline=None)
@given(layouts, factors, st.sampled_from([0.0, 0.05]))
def test_losses_and_the_mfu_are_the_whole_peak(layout: Layout, factor: float, jitter: float) -> None:
    run = simulated_run(layout, steps=2, slower=slow_lane(layout, factor), jitter=jitter)
    table = phase_table(run.records, run.names, layout.world)
    found = losses(table, [run.step(1)], ideal_seconds=1e-3)
    assert found is not None and found.mfu is not None and found.split
    assert sum(found.shares.values()) + found.mfu == pytest.approx(1.0, abs=1e-12)
    assert set(found.shares) == set(LOSSES)
    assert min(found.shares.values()) >= 0
    assert found.waterfall()[-1][2] == pytest.approx(found.mfu, abs=1e-12)


def test_what_happens_between_steps_is_no_loss_of_a_step() -> None:
    run = simulated_run(Layout(dp=2, pp=2), steps=3)
    speed = Speed(1, 90, step_seconds=0.8, tokens_per_second=None, mfu=0.3)

    def found(spans: dict[str, int]) -> dict[str, float]:
        names, parts = (*run.names, *spans), [run.records]
        for code, seconds in enumerate(spans.values(), len(run.names)):
            for rank in range(4):
                own = run.records[(run.records["rank"] == rank) & (run.records["step"] == 3)]
                last = own[-1:].copy()
                last["start_ns"] = (own["start_ns"] + own["duration_ns"]).max() + code
                last["duration_ns"], last["name"] = seconds * 10**9, code
                parts.append(last)
        table = phase_table(np.concatenate(parts), names, 4)
        told = losses_at_speed(table, [run.step(1)], speed, {})
        assert told is not None and told.mfu == pytest.approx(0.3)
        return dict(told.shares)

    usual = found({})
    assert sum(usual.values()) == pytest.approx(0.7)
    assert found({"evaluate": 40}) == pytest.approx(usual, abs=1e-6)
    assert found({"collect_garbage": 5}) == pytest.approx(usual, abs=1e-6)
    assert found({"my_span": 5})["other"] > usual["other"] + 0.1


@settings(max_examples=25, deadline=None)
@given(layouts, factors, st.sampled_from([0.0, 0.05]))
def test_the_critical_path_is_as_long_as_the_step(layout: Layout, factor: float, jitter: float) -> None:
    run = simulated_run(layout, slower=slow_lane(layout, factor), jitter=jitter)
    step = run.step(1)
    path = critical_path(step)
    assert path.seconds == pytest.approx((step.end_ns - step.begin_ns) * 1e-9, abs=1e-12)
    for link, after in zip(path.links, path.links[1:], strict=False):
        assert link.end_ns == after.start_ns
    assert sum(path.by_class().values()) == pytest.approx(path.seconds)
    assert sum(path.by_rank().values()) == pytest.approx(path.seconds)


def test_the_critical_path_goes_through_the_slow_rank() -> None:
    run = simulated_run(Layout(dp=4, pp=4), slower={(2, 1): 2.0})
    path = critical_path(run.step(1))
    assert next(iter(path.by_rank())) == 2 * 4 + 1
    assert path.by_class()["compute"] > 0.6 * path.seconds


@settings(max_examples=20, deadline=None)
@given(layouts, st.data())
def test_healing_a_healthy_rank_changes_nothing(layout: Layout, data: st.DataObject) -> None:
    run = simulated_run(layout)
    answer = what_if(run.step(1), [data.draw(st.integers(0, layout.world - 1))], run.step_seconds[1])
    assert answer is not None
    assert answer.without_seconds == pytest.approx(answer.measured_seconds, abs=1e-9)


@pytest.mark.parametrize(
    "layout", [Layout(dp=3, pp=2, tp=2), Layout(dp=3, pp=4, zero=1), Layout(dp=4, zero=2), Layout(dp=8, pp=2)]
)
def test_healing_the_slow_ranks_gives_the_healthy_step(layout: Layout) -> None:
    slow = {(1, layout.pp - 1): 1.4}
    run, healthy = simulated_run(layout, slower=slow), simulate(costs_of(layout))
    answer = what_if(run.step(1), lane_ranks(run, 1, layout.pp - 1), run.step_seconds[1])
    assert answer is not None
    assert run.step_seconds[1] > 1.1 * healthy.seconds
    assert answer.without_seconds == pytest.approx(healthy.seconds, rel=0.02)
    assert answer.sentence.startswith("without rank")


def test_a_pipeline_s_bubble_is_reported_from_its_messages() -> None:
    """1F1B of m micro-batches on p equal ranks idles (p - 1) / (m + p - 1)."""
    found = predicted_losses(costs_of(Layout(pp=2, tp=2), 8))
    assert found.split
    assert found.shares["bubble"] == pytest.approx(1 / 9, abs=0.02)
    assert found.shares["pipeline"] < 0.01


def test_what_waits_for_a_slow_replica_is_no_communication() -> None:
    run = simulated_run(Layout(dp=4), slower={(1, 0): 1.5})
    table = phase_table(run.records, run.names, 4)
    found = losses(table, [run.step(1)], ideal_seconds=1e-3)
    healthy = simulated_run(Layout(dp=4))
    before = losses(phase_table(healthy.records, healthy.names, 4), [healthy.step(1)], ideal_seconds=1e-3)
    assert found is not None and before is not None
    assert found.shares["slower ranks"] > 0.15
    assert before.shares["slower ranks"] < 0.01
    assert found.shares["data parallel"] < found.shares["slower ranks"]


def test_predicted_losses_are_those_of_the_measured_spans() -> None:
    """A measured run that is exactly the prediction has the same waterfall."""
    layout = Layout(dp=2, pp=2, tp=2)
    run, predicted = simulated_run(layout, steps=3), predicted_losses(costs_of(layout))
    table = phase_table(run.records, run.names, 8)
    measured = losses(table.window(1, 2), [run.step(1)], ideal_seconds=predicted.ideal_seconds)
    assert measured is not None
    for name, share in predicted.shares.items():
        assert measured.shares[name] == pytest.approx(share, abs=0.02), name


def test_without_a_program_the_losses_still_add_up() -> None:
    records, names = records_of(
        (1, 0, "forward", 0.0, 1.0), (1, 0, "wait", 1.0, 0.5), (1, 0, "ours", 1.5, 0.5)
    )
    found = losses(phase_table(records, names, 1), ideal_seconds=0.5)
    assert found is not None and not found.split
    assert found.shares["bubble"] == 0.25 and found.shares["other"] == 0.25
    assert losses(phase_table(records[:0], names, 1)) is None


def test_arrows_come_from_who_was_waited_for() -> None:
    run = simulated_run(Layout(dp=4, pp=2), slower={(2, 0): 1.5})
    step = run.step(1)
    found = arrows(step, np.array([1, 5]))
    assert set(found.to_rank.tolist()) == {1, 5}
    sends = found.kind == SEND
    assert sends.any() and (found.kind == LAST_ARRIVER).any()
    for to, of in zip(found.to_rank[sends], found.from_rank[sends], strict=True):
        assert of == to - 1, "stage 1 receives from stage 0 of its replica"
    reduces = [of for of, kind in zip(found.from_rank, found.kind, strict=True) if kind == LAST_ARRIVER]
    assert max(set(reduces), key=reduces.count) in (4, 5), "the slow replica comes last"
    assert len(arrows(step, limit=5).kind) == 5


def test_a_rank_that_lost_spans_is_left_out_and_not_misread() -> None:
    run = simulated_run(Layout(dp=3, pp=2))
    records = run.records
    step = run.step(1)
    assert step.matched.all()
    whole = what_if(step, [0])
    lost = records[~((records["rank"] == 3) & (np.arange(len(records)) % 7 == 0))]
    damaged = type(run)(lost, run.names, run.ranks, run.costs, run.step_seconds).step(1)
    assert damaged.matched.tolist() == [True, True, True, False, True, True]
    assert critical_path(damaged).seconds == pytest.approx(critical_path(step).seconds, rel=1e-6)
    assert what_if(damaged, [0]).without_seconds == pytest.approx(whole.without_seconds, rel=1e-6)


def test_programs_are_read_off_the_spans() -> None:
    layout = Layout(dp=2, pp=2, zero=1)
    run = simulated_run(layout, micro_batches=6)
    overlap, shares = run.costs.workload.overlap, (4, 4)  # what the job said, before work moved
    programs = programs_seen(
        run.records, run.names, layout, overlap, shares, tied=run.costs.workload.model.tied
    )
    assert [one.program.num_micro_batches for one in programs] == [6, 6]
    assert programs[0].program.ranks == run.step(1).programs[0].program.ranks


@pytest.mark.parametrize(("field", "value"), [("stage", 30_000), ("micro_batch", 30_000)])
def test_spans_of_another_job_are_given_up_at_once(field: str, value: int) -> None:
    """Else a program of a million actions would be built."""
    layout = Layout(dp=2, pp=2)
    run = simulated_run(layout)
    records = run.records.copy()
    records[field][records["name"] == run.names.index("forward")] = value
    with pytest.raises(ValueError, match="another job"):
        programs_seen(records, run.names, layout, run.costs.workload.overlap, (4, 4), tied=False)


def test_a_hang_names_the_rank_that_waits_for_no_other() -> None:
    """Rank 5 dies in its second forward: every other rank continues until it waits for rank 5."""
    run = simulated_run(Layout(dp=3, pp=2))
    step = run.step(1)
    lists = [step.program_of(rank).program.ranks[int(run.ranks.pipeline[rank])] for rank in range(6)]
    dies_in = [at for at, action in enumerate(lists[5]) if action.kind is Kind.FORWARD][1]
    done = np.zeros(6, dtype=np.int64)
    moved = True
    while moved:
        found = analyze_hang(run.ranks, step.programs, np.ones(6), done)
        can = [
            rank
            for rank in range(6)
            if done[rank] < len(lists[rank])
            and not (rank == 5 and done[rank] == dies_in)
            and not found.waits_for(rank)
        ]
        done[can] += 1
        moved = bool(can)
    found = analyze_hang(run.ranks, step.programs, np.ones(6), done)
    assert found.silent == (5,)
    assert found.waits_for(5) == []
    assert found.waited_for_by[5] == 5
    assert found.sentence == "5 ranks wait for rank 5 on node 1, in forward of step 1"
