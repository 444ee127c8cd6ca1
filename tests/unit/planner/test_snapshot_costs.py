"""If these fail, `myriad plan` hides what checkpoints cost, or charges time for which no rank waits."""

from dataclasses import replace
from math import lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import MODEL, cluster_of, problem_of

from myriad.comm.layout import Layout
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.cost.snapshot_costs import SnapshotCosts, SnapshotSchedule
from myriad.planner.search.layout_problem import LayoutCandidate, LayoutProblem
from myriad.planner.search.layout_search import score_layout
from myriad.planner.search.plan_explanation import waterfall
from myriad.planner.simulation.simulation_cache import SimulationCache
from myriad.planner.workload import Workload
from myriad.program.config import OverlapConfig

SLOW_HOST = "accelerator.host_bytes_per_second=1e8"
EVERY_STEP = SnapshotSchedule(memory_every=1)


def candidate_of(problem: LayoutProblem, layout: Layout, **overlap: bool) -> LayoutCandidate:
    switches = problem.overlap.model_copy(update=overlap)
    return score_layout(problem, LayoutCandidate(layout, switches, 0.0, 0.0, 0.0))


@settings(deadline=None)
@given(
    st.integers(0, 12),
    st.integers(0, 6),
    st.integers(0, 8),
    st.integers(1, 3),
    st.floats(0.1, 10),
    st.booleans(),
)
def test_stalls_are_those_of_each_step_in_turn(
    every: int, memory_every: int, copies_every: int, nodes: int, host: float, waits: bool
) -> None:
    """The rules of `checkpoint.session.Session.wants`, for as many steps as it takes them to repeat."""
    cluster = cluster_of(
        f"accelerator.host_bytes_per_second={host}e9", "storage_bytes_per_second=1e9", nodes=nodes
    )
    snapshots = SnapshotSchedule(every, None, memory_every, 0.0, copies_every)
    snapshot_costs = SnapshotCosts(cluster, snapshots, parameters=4e9, waits=waits)
    seconds, update, own = 5.0, 0.5, 1e9
    copy, store = float(snapshot_costs.copy_seconds(own)), snapshot_costs.store_seconds
    assert copy == pytest.approx(12.0 / (0.78 * host)) and store == pytest.approx(48.0)
    total, steps = 0.0, lcm(every or 1, memory_every or 1, copies_every or 1)
    for step in range(1, steps + 1):
        durable = bool(every) and step % every == 0
        copied = bool(copies_every) and nodes > 1 and step % copies_every == 0
        if durable and waits:
            total += copy + store
        elif durable or copied or (memory_every and step % memory_every == 0):
            total += max(0.0, copy - 4.5)
    assert float(snapshot_costs.stall_seconds(seconds, update, own)) == pytest.approx(total / steps)


def test_seconds_and_minutes_make_snapshots_rarer() -> None:
    cluster = cluster_of(SLOW_HOST)
    stall = {
        snapshots: float(SnapshotCosts(cluster, snapshots, 1e9, waits=False).stall_seconds(0.1, 0.01, 1e8))
        for snapshots in (
            EVERY_STEP,
            SnapshotSchedule(memory_every=1, memory_seconds=0.5),
            SnapshotSchedule(minutes=1.0),
        )
    }
    once = float(SnapshotCosts(cluster, EVERY_STEP, 1e9, waits=False).copy_seconds(1e8)) - 0.09
    assert list(stall.values()) == pytest.approx([once, once / 5, once / 600])


def test_a_copy_that_is_done_before_the_update_costs_nothing() -> None:
    problem = replace(problem_of(), snapshots=replace(EVERY_STEP, every=10, copies_every=2))
    layout = Layout(dp=16, zero=2, micro_batch=2)
    plain = candidate_of(problem_of(), layout)
    assert candidate_of(problem, layout).seconds == plain.seconds
    assert waterfall(problem, plain, SimulationCache())["checkpoints"] == 0


@pytest.mark.parametrize(
    "layout", [Layout(dp=16, zero=2), Layout(dp=16), Layout(dp=8, tp=2, zero=1)], ids=str
)
def test_closed_form_simulator_and_waterfall_agree(layout: Layout) -> None:
    plain, simulations = problem_of(SLOW_HOST), SimulationCache()
    problem = replace(plain, snapshots=EVERY_STEP)
    found, without = candidate_of(problem, layout), candidate_of(plain, layout)
    seconds = simulations.seconds(Costs(found.workload(problem), problem.cluster))
    before = simulations.seconds(Costs(found.workload(plain), plain.cluster))
    assert seconds > 1.1 * before
    # what an iteration lacks of the copy is added: both end at the same time
    assert found.seconds == pytest.approx(seconds, rel=1e-3)
    assert found.seconds > without.seconds
    parts = waterfall(problem, found, simulations)
    assert parts["checkpoints"] == pytest.approx(seconds - before)
    assert sum(parts.values()) == pytest.approx(seconds)


def test_training_waits_for_storage_only_if_configured() -> None:
    cluster = cluster_of("storage_bytes_per_second=1e9")
    goes_on, waits = (
        Costs(
            Workload(
                MODEL,
                Layout(dp=16),
                32,
                OverlapConfig(checkpoint=overlap),
                snapshots=SnapshotSchedule(every=10),
            ),
            cluster,
        )
        for overlap in (True, False)
    )
    assert goes_on.stall(1.0) == 0
    stored = waits.snapshot_costs.store_seconds
    assert stored is not None and stored > 12e-9 * MODEL.num_parameters()
    assert waits.stall(1.0) == pytest.approx(
        (stored + float(waits.snapshot_costs.copy_seconds(waits.most_parameters[1]))) / 10
    )
