"""If these break: a simulated iteration with a flap or a congested uplink has the wrong ranks wait, or for
too long."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.model.config import ModelConfig
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.simulation.simulated_events import NetworkEvents, read_timers
from myriad.planner.simulation.simulator import Prediction, simulate
from myriad.planner.workload import Workload
from myriad.program.actions import Kind
from myriad.recipes.cluster import load_cluster

CLUSTER = load_cluster("megascale-256xa100", ["nodes=8", "nodes_per_switch=2"])
LAYOUT = Layout(dp=4, tp=8, pp=2, zero=2)
"""A rank of the pipeline is a node: replica r on nodes 2 r and 2 r + 1, under switch r."""


@cache
def costs() -> Costs:
    model = ModelConfig(layers=4, hidden=1024, heads=8, sequence=1024, vocabulary=8192)
    return Costs(Workload(model, LAYOUT, 64), CLUSTER)


def events(
    *flaps: str,
    congested: tuple[str, ...] = (),
    timers: str = "18x7",
    layout: Layout = LAYOUT,
    order: tuple[int, ...] | None = None,
) -> NetworkEvents:
    found = read_timers(timers)
    return NetworkEvents(layout, CLUSTER, flaps=flaps, congested=congested, timers=found, order=order)


def run(found: NetworkEvents | None) -> Prediction:
    return simulate(costs(), network=found)


@cache
def plain_seconds() -> float:
    return run(None).seconds


def test_a_transfer_in_flight_when_the_link_goes_down_resumes_after_a_retransmission() -> None:
    found = events("node=2:2s@10s")
    ring, wait = [(0, 0), (1, 0), (-1, 0)], found.wait_seconds(2)
    assert found.travel(9, 3, ring) == pytest.approx(3 + wait)
    assert found.travel(6, 3, ring) == 3  # done before
    assert found.travel(12.1, 3, ring) == 3  # begun after
    late = found.travel(11.5, 3, ring)
    assert late == pytest.approx(3 + found.wait_seconds(0.5))
    assert found.travel(9, 3, [(0, 0), (0, 1)]) == 3  # other nodes
    assert found.travel(9, 3, [(1, 0), (1, 1)]) == pytest.approx(3 + wait)


def test_two_flaps_in_one_transfer_are_waited_for_one_after_the_other() -> None:
    found = events("node=2:2s@1s", "node=0:2s@20s")
    assert found.travel(0, 19, [(0, 0), (1, 0)]) == pytest.approx(19 + 2 * found.wait_seconds(2))


def test_only_what_leaves_a_congested_switch_is_slower() -> None:
    found = events(congested=("switch=1:0.25",))
    assert found.travel(0, 1, [(1, 0), (1, 1)]) == 1  # both under it
    assert found.travel(0, 1, [(0, 0), (0, 1)]) == 1  # none
    assert found.travel(0, 1, [(1, 0), (-1, 0)]) == 4
    assert events(congested=("node=2:0.25",)).travel(0, 1, [(1, 0), (1, 1)]) == 4


def test_nodes_are_the_clusters_wherever_the_job_has_them() -> None:
    order = (5, 1, 2, 3, 4, 0, 7, 6)
    found = events("node=5:2s@10s", congested=("switch=0:0.25",), order=order)
    assert found.replicas == {0, 2}  # nodes 5 and 0, 1: the first replica's, and the third one's second
    assert found.travel(9, 3, [(0, 0), (1, 0)]) == pytest.approx(3 + found.wait_seconds(2))
    assert found.travel(9, 3, [(2, 0), (3, 0)]) == 3  # nodes 4 and 7
    assert found.travel(20, 1, [(0, 1), (2, 1)]) == 1  # nodes 1 and 0, under one switch
    assert found.travel(20, 1, [(0, 1), (1, 1)]) == 4
    with pytest.raises(BadInputError, match="nodes 2-7"):
        events("node=0:1s@0s", layout=Layout(dp=3, tp=8, pp=2), order=(2, 3, 4, 5, 6, 7))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 7), st.floats(0.05, 3), st.floats(0, 1), st.sampled_from(["18x7", "16x7:adaptive"]))
def test_a_flap_costs_no_more_than_itself_and_its_wait_and_never_shortens(
    node: int, down: float, share: float, timers: str
) -> None:
    found = events(f"node={node}:{down:.3f}s@{share * plain_seconds():.4f}s", timers=timers)
    longer = run(found).seconds - plain_seconds()
    assert -1e-9 <= longer <= down + found.wait_seconds(down) * 1.01  # who begins last, waits last


def test_everybody_waits_for_the_node_whose_link_is_down() -> None:
    flap = f"node=3:1s@{0.5 * plain_seconds():.4f}s"
    prediction, found = run(events(flap)), events(flap)
    assert prediction.seconds > plain_seconds() + 0.5 * found.wait_seconds(1)
    waited = {
        (replica, rank): sum(s.waited for s in prediction.spans if (s.replica, s.rank) == (replica, rank))
        for replica, rank in {(s.replica, s.rank) for s in prediction.spans}
    }
    assert set(waited) == {(1, 0), (1, 1), (-1, 0), (-1, 1)}  # the others stand for three
    assert min(waited.values()) > 0.5 * found.wait_seconds(1)


def test_replicas_that_stand_for_others_take_as_long_as_all_of_them() -> None:
    found = events("node=3:1s@0.01s", congested=("node=5:0.5",))
    every = simulate(costs(), network=found, every_replica=True)
    assert every.seconds == pytest.approx(run(found).seconds, rel=1e-9)
    assert {span.replica for span in every.spans} == {0, 1, 2, 3}


def test_a_congested_uplink_lengthens_gathers_and_sums() -> None:
    slow = run(events(congested=("node=3:0.1",)))
    assert slow.seconds > 1.01 * plain_seconds()
    exposed = sum(
        s.waited for s in slow.spans if s.action.kind in (Kind.AWAIT_REDUCE, Kind.AWAIT_GATHER, Kind.WAIT)
    )
    assert exposed > 0


@pytest.mark.parametrize(
    ("flaps", "congested", "said"),
    [
        (["node=8:1s@0s"], [], "nodes 0-7"),
        (["node=1:1s"], [], "like node=17:2s@1.5s"),
        (["node=1:0s@1s"], [], "above 0 s"),
        (["node=1:100s@1s"], [], "the job would fail"),
        ([], ["node=1:0"], "above 0, at most 1"),
        ([], ["node=1:1.5"], "above 0, at most 1"),
        ([], ["switch=4:0.5"], "under 0-3"),
    ],
)
def test_what_cannot_be_is_refused(flaps, congested, said) -> None:
    with pytest.raises(BadInputError, match=said):
        events(*flaps, congested=tuple(congested))


def test_a_job_on_one_node_has_no_network() -> None:
    with pytest.raises(BadInputError, match="on several nodes"):
        events("node=0:1s@0s", layout=Layout(tp=8))
    with pytest.raises(BadInputError, match=r"layout\.tp"):
        events("node=0:1s@0s", layout=Layout(tp=16))


@pytest.mark.parametrize("text", ["", "x", "20x9", "40", "0", "20x7:quick"])
def test_timers_that_no_queue_pair_has_are_refused(text) -> None:
    with pytest.raises(BadInputError, match="--timers"):
        read_timers(text)
