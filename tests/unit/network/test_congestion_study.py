"""If these break: levels of the model contradict each other, or the table says what its rows do not."""

from dataclasses import replace

import numpy as np
import pytest

from myriad.errors import BadInputError
from myriad.network.congestion_controls import control
from myriad.network.congestion_scenarios import scenario
from myriad.network.congestion_study import (
    LEVELS,
    CongestionRow,
    check_claims,
    jain,
    measure_scenario,
    steady_queues,
    worse_than_parents,
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "of"), [("incast", "swift"), ("ring", "dcqcn"), ("ring", "hybrid")])
def test_levels_agree_where_all_apply(name: str, of: str) -> None:
    """Time till the last flow is done: flow, fluid and packet level within 5 % of each other."""
    case = scenario(name, 8, scale=0.5)
    seconds = [measure_scenario(case, of, control(of), level).seconds for level in LEVELS]
    assert len(seconds) == 3
    assert max(seconds) / min(seconds) < 1.05


def test_fluid_and_packets_see_the_same_queue() -> None:
    case = scenario("incast", 12)
    fluid, packet = (
        measure_scenario(case, "swift", control("swift"), level) for level in ("fluid", "packet")
    )
    assert fluid.queue_p99_bytes == pytest.approx(packet.queue_p99_bytes, rel=0.1)
    assert fluid.queue_median_bytes == pytest.approx(packet.queue_median_bytes, rel=0.2)


@pytest.mark.parametrize("of", ["dcqcn", "dcqcn-paper"])
def test_fluid_and_packets_see_the_same_dcqcn(of: str) -> None:
    """Its rates fall to almost nothing and rise again: a flow that waits to send at the low rate must not
    miss that, and a mark must not wait in the queue that it tells of."""
    case = scenario("incast", 32, scale=0.5)
    fluid, packet = (measure_scenario(case, of, control(of), level) for level in ("fluid", "packet"))
    assert fluid.seconds == pytest.approx(packet.seconds, rel=0.1)
    assert fluid.queue_p99_bytes == pytest.approx(packet.queue_p99_bytes, rel=0.2)


@pytest.mark.parametrize(
    ("name", "of"), [("incast", "hpcc"), ("all-to-all", "hpcc"), ("many-to-one", "swift")]
)
def test_fluid_and_packets_take_as_long(name: str, of: str) -> None:
    """HPCC's wait for its rate follows the rate; a window below one packet is paced only as long as it is."""
    case = scenario(name, 16, scale=0.5)
    fluid, packet = (measure_scenario(case, of, control(of), level) for level in ("fluid", "packet"))
    assert fluid.seconds == pytest.approx(packet.seconds, rel=0.05)


def test_fairness_is_one_where_all_are_equal_and_1_over_n_where_one_has_all() -> None:
    assert jain(np.ones(5)) == 1
    assert jain(np.array([1.0, 0, 0, 0])) == 0.25


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(BadInputError, match="one of flow, fluid, packet"):
        measure_scenario(scenario("ring", 8), "swift", control("swift"), "quantum")


ROW = CongestionRow(
    scenario="incast", title="", control="hpcc", level="fluid", seconds=1.0, bytes_per_second=1.0,
    throughput_ratio=0.95, queue_median_bytes=1e3, queue_p99_bytes=1e4, pause_seconds=0.0,
    slowdown_median=2.0, slowdown_p99=3.0, fairness=1.0, num_unfinished=0,
)  # fmt: skip


def test_a_claim_that_rows_contradict_is_reported_to_fail() -> None:
    other = replace(ROW, control="dcqcn", queue_median_bytes=5e3, pause_seconds=1.0)
    holds = {verdict.claim.measure: verdict.holds for verdict in check_claims([ROW, other])}
    assert holds == {"median queue, bytes": False, "pauses, s": True}


def test_a_claim_without_its_rows_is_not_made() -> None:
    assert check_claims([ROW]) == []


def test_where_the_hybrid_is_worse_is_listed_by_scenario_and_parent() -> None:
    rows = [
        replace(ROW, control="swift"),
        replace(ROW, control="dcqcn", pause_seconds=2.0),
        replace(ROW, control="hybrid", seconds=1.1, slowdown_p99=3.03, pause_seconds=1.0),
    ]
    assert worse_than_parents(rows) == {"incast": ["time +10% vs swift", "pauses", "time +10% vs dcqcn"]}


def test_only_the_paper_s_rules_have_a_resting_queue() -> None:
    rows = [replace(ROW, control=name) for name in ("dcqcn-paper", "dcqcn", "swift")]
    assert list(steady_queues(rows, 32)) == ["dcqcn-paper"]
