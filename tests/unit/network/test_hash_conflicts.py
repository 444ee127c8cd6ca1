"""If these fail, `myriad network ecmp` prints wrong probabilities, or recommends what does not help."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.errors import BadInputError
from myriad.network import hash_conflicts
from myriad.network.config import FabricShape
from myriad.network.ecmp_remedies import (
    FabricStudy,
    SwitchStudy,
    advice,
    curves,
    fabric_rows,
    switch_rows,
)
from myriad.network.fabric import Flows
from myriad.network.fabric_builder import build
from myriad.network.hash_conflicts import (
    conflicts,
    fullest_bin_probabilities,
    node_order,
    ring_flows,
    sample_conflicts,
)
from myriad.network.routing import Routes
from myriad.planner.fabric.cluster_fabric import builder_of, fabric_of, shape_of
from myriad.recipes.cluster import load_cluster


@pytest.mark.parametrize(
    ("flows", "split", "slowest"), [(32, 1, 0.30), (32, 2, 0.59), (8, 2, 0.98), (64, 2, 0.38), (1, 1, 1.0)]
)
def test_the_slowest_of_flows_on_32_uplinks(flows: int, split: int, slowest: float) -> None:
    assert round(conflicts(flows, 32, split=split).slowest_ratio, 2) == slowest


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
def test_odds_are_those_of_all_ways_to_throw(balls: int, bins: int, split: int) -> None:
    loads = [np.bincount(throw, minlength=bins) for throw in product(range(bins), repeat=balls)]
    most = np.array([load.max() for load in loads])
    exact = np.bincount(most, minlength=balls + 1) / len(loads)
    found = fullest_bin_probabilities(balls, bins)
    assert found == pytest.approx(exact[: len(found)], abs=1e-9)
    assert found.sum() == pytest.approx(1)
    told = conflicts(balls, bins, split=split)
    shared = [np.minimum(1, split / load[load > 0]) @ load[load > 0] / balls for load in loads]
    assert told.slowest_ratio == pytest.approx(np.minimum(1, split / most).mean())
    assert told.mean_ratio == pytest.approx(np.mean(shared))
    assert told.conflict_probability == pytest.approx((most > split).mean(), abs=1e-9)
    crowded = [load[load > split].sum() / balls for load in loads]
    assert told.flow_probability == pytest.approx(np.mean(crowded), abs=1e-9)


def test_queue_pairs_are_hashed_independently() -> None:
    draw = np.random.default_rng(0)
    slowest, mean = [], []
    for _ in range(3000):
        bins = draw.integers(0, 16, (16, 4))
        ratio = np.minimum(1, 4 / np.bincount(bins.ravel(), minlength=16)[bins].max(1))
        slowest.append(ratio.min())
        mean.append(ratio.mean())
    told = conflicts(16, 16, queue_pairs=4)
    assert told.slowest_ratio == pytest.approx(np.mean(slowest), abs=0.01)
    assert told.mean_ratio == pytest.approx(np.mean(mean), rel=0.03)


def test_a_large_switch_has_an_answer_and_a_larger_one_a_line() -> None:
    told = conflicts(4096, 512, split=16)
    assert 0.5 < told.slowest_ratio < told.mean_ratio <= 1
    with pytest.raises(BadInputError, match="at most 65536"):
        conflicts(2**16, 32, queue_pairs=2)


@pytest.mark.parametrize("queue_pairs", [1, 4])
def test_the_fabric_agrees_with_the_odds(queue_pairs: int) -> None:
    """Eight nodes of four ports send to eight under another switch. Each uplink leads to a spine of its own,
    from where one cable goes down: 32 flows are thrown once on 32."""
    shape = FabricShape(kind="clos2", nodes_per_switch=8)
    fabric = build(shape, name="two", num_nodes=16, ports_per_node=4, nic_bytes_per_second=25e9)
    source = np.arange(32, dtype=np.int32)
    zeros = np.zeros(32)
    flows = Flows(source, source + np.int32(32), zeros + 1, zeros, np.zeros(32, dtype=np.uint16))
    found = sample_conflicts(Routes(fabric), flows, draws=600, queue_pairs=queue_pairs)
    told = conflicts(32, 32, queue_pairs=queue_pairs)
    assert found.slowest_ratio.mean() == pytest.approx(told.slowest_ratio, abs=0.01)
    assert found.mean_ratio.mean() == pytest.approx(told.mean_ratio, abs=0.01 if queue_pairs == 1 else 0.02)
    assert found.held_up_ratio.mean() == pytest.approx(told.flow_probability, abs=0.01)


def test_splitting_more_queue_pairs_and_fewer_flows_never_hurt() -> None:
    rows = {row.name: row.slowest_ratio for row in switch_rows(SwitchStudy(32, 32))}
    asked = rows.pop("baseline")
    assert all(ratio > asked for ratio in rows.values())
    assert rows["adaptive routing"] == rows["packet spraying"] == 1
    lines = curves(SwitchStudy(32, 32), points=5)
    assert all(line[0] == (1, pytest.approx(1.0)) for line in lines.values())
    assert all(a >= b for line in lines.values() for (_, a), (_, b) in pairwise(line))


def test_the_advice_names_what_helps_most_first() -> None:
    assert advice(switch_rows(SwitchStudy(2, 32, split=2))).startswith("Little to gain")
    told = advice(switch_rows(SwitchStudy(32, 32)))
    order = [told.index(name) for name in ("adaptive", "16 queue pairs", "split 2, as", "4 queue pairs")]
    assert "0.30 of its rate" in told and order == sorted(order)


def test_packed_rings_stay_under_their_switches_and_spread_ones_do_not() -> None:
    routes = Routes(fabric_of(load_cluster("megascale-12288xa100", ["nodes=256"])))
    under = routes.home[::8]
    for placement, crossing in (("packed", 4), ("spread", 256)):
        order = node_order(routes, placement)
        assert sorted(order) == list(range(256))
        flows = ring_flows(routes.fabric, order, 256)
        assert (
            len(flows) == 2048
            and np.sum(under[flows.source // 8] != under[flows.target // 8]) == 8 * crossing
        )
        assert np.array_equal(flows.source % 8, flows.target % 8)


def test_rings_that_do_not_come_out_even_are_closed_all_the_same() -> None:
    fabric = fabric_of(load_cluster("megascale-256xa100"))
    flows = ring_flows(fabric, np.arange(32), 10)
    assert sorted(flows.source) == sorted(flows.target) and len(flows) == 256
    assert flows.target[-8:].tolist() == list(range(240, 248)), "the last two nodes send to each other"


def test_a_random_order_loses_what_a_packed_one_keeps() -> None:
    cluster = load_cluster("megascale-12288xa100", ["nodes=256"])
    given = FabricStudy(builder_of(cluster), shape_of(cluster), placement="random", draws=5)
    rows = {row.name: row for row in fabric_rows(given)}
    asked = rows["baseline"].slowest_ratio
    assert rows["no split, more uplinks"].slowest_ratio < asked < rows["16 queue pairs a flow"].slowest_ratio
    assert rows["placement packed"].slowest_ratio == 1 and rows["packet spraying"].slowest_ratio > 0.95
    assert [row for row in fabric_rows(given) if row.is_asked] == [rows["baseline"]], "the same seed"


def test_more_flows_than_memory_are_refused_before_they_are_routed(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = fabric_of(load_cluster("megascale-256xa100"))
    flows = ring_flows(fabric, np.arange(32), 32)
    with pytest.raises(BadInputError, match="memory for 256 flows x 1000000000"):
        sample_conflicts(Routes(fabric), flows, queue_pairs=10**9)
    with pytest.raises(BadInputError, match="--draws"):
        sample_conflicts(Routes(fabric), flows, draws=0)
    assert hash_conflicts.sample_conflicts(Routes(fabric), flows).slowest_ratio == 1
