"""If these break: a scenario does not put the load where its name says."""

import numpy as np
import pytest

from myriad.errors import BadInputError
from myriad.network.congestion_scenarios import SCENARIOS, fabric_of, scenario

HOSTS = 16


@pytest.mark.parametrize("name", SCENARIOS)
def test_paths_lead_from_source_to_target(name: str) -> None:
    case = scenario(name, HOSTS)
    for flow in range(len(case.flows)):
        links = case.paths.of(flow)
        assert case.fabric.source[links[0]] == case.flows.source[flow]
        assert case.fabric.target[links[-1]] == case.flows.target[flow]
        assert np.array_equal(case.fabric.target[links[:-1]], case.fabric.source[links[1:]])


def test_in_a_ring_no_flows_share_a_link_and_it_takes_as_long_as_an_all_reduce() -> None:
    case = scenario("ring", HOSTS)
    assert len(np.unique(case.paths.link)) == len(case.paths.link)
    closed = 2 * (HOSTS - 1) / HOSTS * 16e6 / 25e9
    assert case.fair_seconds() == pytest.approx(np.full(HOSTS, closed), rel=0.01)
    assert case.alone_seconds() == pytest.approx(np.full(HOSTS, closed), rel=0.01)


def test_the_victim_shares_links_with_the_incast_but_not_the_full_one() -> None:
    case = scenario("victim", HOSTS)
    victim = set(case.paths.of(0).tolist())
    others = [set(case.paths.of(flow).tolist()) for flow in range(1, len(case.flows))]
    full = set.intersection(*others)
    assert len(full) == 1 and not full & victim
    assert any(victim & links for links in others)


def test_an_incast_takes_as_long_as_its_target_s_link() -> None:
    case = scenario("incast", HOSTS, scale=0.5)
    assert case.fair_seconds().max() == pytest.approx((HOSTS - 1) * 1e6 / 25e9, rel=0.01)


@pytest.mark.parametrize(("name", "hosts"), [("incast", 7), ("ring", 1025), ("all-to-all", 129)])
def test_sizes_that_cannot_be_are_refused(name: str, hosts: int) -> None:
    with pytest.raises(BadInputError, match=f"hosts = {hosts}"):
        scenario(name, hosts)


def test_an_unknown_scenario_is_refused_with_those_there_are() -> None:
    with pytest.raises(BadInputError, match="one of incast, many-to-one, all-to-all"):
        scenario("outcast")


def test_as_many_cables_go_up_as_down() -> None:
    fabric = fabric_of(HOSTS)
    up = (fabric.tier[fabric.source] == 1) & (fabric.tier[fabric.target] == 2)
    down = (fabric.tier[fabric.source] == 1) & (fabric.tier[fabric.target] == 0)
    assert fabric.bytes_per_second[up].sum() == fabric.bytes_per_second[down].sum()
