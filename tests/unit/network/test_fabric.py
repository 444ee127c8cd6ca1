"""A fabric is refused when it could carry nothing somewhere, before anything is computed on it."""

import numpy as np
import pytest

from myriad.errors import BadInputError
from myriad.network.fabric import Fabric


def make(cables: list[tuple[int, int]], rate: float = 25e9) -> Fabric:
    """Two nodes of two ports (0 to 3) and two switches (4, 5), one port of each node to each switch."""
    ends = [end for a, b in cables for end in ((a, b), (b, a))]
    return Fabric(
        name="test",
        num_nodes=2,
        ports_per_node=2,
        tier=np.array([0, 0, 0, 0, 1, 1], dtype=np.int8),
        source=np.array([a for a, _ in ends], dtype=np.int32),
        target=np.array([b for _, b in ends], dtype=np.int32),
        bytes_per_second=np.full(len(ends), rate),
        latency_seconds=np.full(len(ends), 1e-6),
    )


RAILS = [(0, 4), (1, 5), (2, 4), (3, 5)]


def test_links_are_found_by_where_they_begin() -> None:
    fabric = make([*RAILS, (4, 5)]).check()
    first, links = fabric.leaving
    for vertex in range(fabric.num_vertices):
        found = links[first[vertex] : first[vertex + 1]]
        assert set(found) == set(np.flatnonzero(fabric.source == vertex))


def test_a_port_without_a_way_to_the_others_is_named() -> None:
    with pytest.raises(BadInputError, match="no path from node 0 to port 1 of node 0"):
        make(RAILS).check()


def test_a_link_that_carries_nothing_is_refused() -> None:
    with pytest.raises(BadInputError, match="above 0"):
        make([*RAILS, (4, 5)], rate=0.0).check()
