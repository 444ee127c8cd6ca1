"""If these fail, the piece of a fabric that a report shows congestion on is not where flows meet."""

import numpy as np
import pytest

from myriad.network.crowded import crowd, cut_out
from myriad.network.exposure import expose, node_order, on_ports, ring_flows
from myriad.network.fabric import Fabric
from myriad.network.flows import Flows
from myriad.network.max_min import max_min
from myriad.network.routing import Routes, ecmp
from myriad.network.shape import FabricShape
from myriad.network.shapes import build


def _fabric() -> Fabric:
    shape = FabricShape(kind="clos2", nodes_per_switch=8)
    return build(shape, name="one", num_nodes=64, ports_per_node=1, nic_bytes_per_second=25e9)


def test_rates_on_the_piece_are_those_on_the_whole_fabric() -> None:
    fabric = _fabric()
    routes = Routes(fabric)
    flows = ring_flows(fabric, node_order(routes, "spread"), 64)
    paths = ecmp(routes, flows, 1)
    whole = max_min(fabric.bytes_per_second, paths)
    chosen = crowd(fabric, flows, paths, 1000)
    assert whole[chosen].min() == whole.min() < 24e9
    piece, few, ways = cut_out(fabric, flows, paths, chosen)
    assert max_min(piece.bytes_per_second, ways) == pytest.approx(whole[chosen])
    assert piece.num_links < fabric.num_links and piece.num_ports == len({*few.source, *few.target})
    worst = crowd(fabric, flows, paths, 2)
    assert len(worst) == 2 and set(worst) <= set(chosen)


def test_what_ports_hold_up_is_no_conflict() -> None:
    """Messages to both neighbours leave by one port: each has half of it, which no switch is to blame for."""
    fabric = _fabric()
    ring = ring_flows(fabric, np.arange(64), 8)
    both = Flows(
        source=np.concatenate([ring.source, ring.target]),
        target=np.concatenate([ring.target, ring.source]),
        num_bytes=np.ones(128),
        start_seconds=np.zeros(128),
        entropy=np.zeros(128, dtype=np.uint16),
    )
    assert on_ports(fabric, both) == pytest.approx(12.5e9)
    routes = Routes(fabric)
    assert expose(routes, both).slowest_ratio == pytest.approx(1)
    assert len(crowd(fabric, both, ecmp(routes, both), 10)) == 0
