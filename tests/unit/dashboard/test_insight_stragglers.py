"""If these break: a slow rank or node is not named, has the wrong phase or step, or a healthy one is
reported."""

import numpy as np
import pytest
from simulated_run import simulated_run

from myriad.comm.layout import Layout
from myriad.dashboard.insight.findings import drift, launches
from myriad.dashboard.insight.nesting import nested
from myriad.dashboard.insight.phase_table import PhaseTable, phase_table
from myriad.dashboard.insight.rank_arrays import Ranks
from myriad.dashboard.insight.straggler_report import changed_at, stragglers, suspects
from myriad.telemetry.stragglers import compare


def table_of(run) -> PhaseTable:
    return phase_table(run.records, run.names, run.ranks.world)


@pytest.mark.parametrize("pipeline_place", [0, 3])
def test_a_planted_slow_rank_is_found_with_its_stage_phase_and_step(pipeline_place: int) -> None:
    slow = {(5, pipeline_place): 1.11}
    run = simulated_run(Layout(dp=8, pp=4), steps=30, slower=slow, since=17, jitter=0.01)
    found = stragglers(table_of(run), run.ranks)
    rank = 5 * 4 + pipeline_place
    assert {one.ranks for one in found} == {(rank,)}
    assert {one.phase for one in found} == {"forward", "backward"}
    for one in found:
        assert one.stage == pipeline_place
        assert one.ratio == pytest.approx(1.11, abs=0.02)
        assert one.since_step == 17
    told = suspects(found)[0].sentence
    assert f"rank {rank} on node {rank // 4} runs backward 11% slower" in told
    assert told.endswith("since step 17")


def test_no_node_is_named_in_a_healthy_run() -> None:
    run = simulated_run(Layout(dp=8, pp=4), steps=20, jitter=0.02)
    assert stragglers(table_of(run), run.ranks) == []


def test_a_slow_node_is_reported_as_a_node() -> None:
    slow = {(replica, place): 1.2 for replica in (2, 3) for place in (0, 1)}
    run = simulated_run(Layout(dp=8, pp=2), steps=12, slower=slow, jitter=0.01)
    found = suspects(stragglers(table_of(run), run.ranks))
    assert [(one.culprit, one.node, one.ranks) for one in found] == [("node", 1, (4, 5, 6, 7))]
    assert found[0].since_step is None
    assert "node 1 (ranks 4 to 7) runs" in found[0].sentence


def test_of_two_replicas_the_slower_one_is_found() -> None:
    run = simulated_run(Layout(dp=2, pp=2), steps=8, node_size=2, slower={(1, 0): 1.3})
    found = suspects(stragglers(table_of(run), run.ranks))
    assert [one.ranks for one in found] == [(2,)]


def test_a_replica_with_more_micro_batches_is_not_slow() -> None:
    ranks = Ranks(Layout(dp=4), 1)
    seconds = np.array([[3.0, 1.0, 1.0, 1.0]] * 6)
    assert compare(seconds, ranks.peers).z[0] > 4
    alike = compare(seconds, ranks.peers, work=np.array([3, 1, 1, 1]))
    assert np.allclose(alike.z, 0.0)


def test_a_stage_with_one_rank_has_no_peers() -> None:
    scores = compare(np.array([[1.0, 9.0]]), Ranks(Layout(pp=2), 1).peers)
    assert np.isnan(scores.z).all()


def test_a_change_is_dated_and_noise_is_not() -> None:
    noise = np.random.default_rng(1).normal(1.0, 0.01, 200)
    assert changed_at(noise, least=0.03) is None
    assert changed_at(np.where(np.arange(200) >= 120, noise + 0.1, noise), least=0.03) == 120
    assert changed_at(np.ones(3), least=0.03) is None


def test_a_rank_that_launches_ever_later_is_found_and_one_pause_is_not() -> None:
    run = simulated_run(Layout(dp=6), steps=20)
    records = run.records.copy()
    step, rank = records["step"].astype(np.int64), records["rank"]
    records["start_ns"] += np.where(rank == 4, step * 100_000, 0)
    records["start_ns"] += np.where((rank == 2) & (step == 9), 50_000_000, 0)
    found = drift(*launches(nested(records), run.names, 6), run.ranks)
    assert found.worst() == [4]
    assert found.slope[4] == pytest.approx(100e-6, rel=0.01)
    assert "rank 4 comes 0.1 ms later" in found.sentence(4)
