"""Orders of nodes for a job on a fabric: what is tried, and by what it is judged.

There is one search for orders (`myriad.planner.placement`): by fluid sharing, which knows slow nodes, unequal
links and narrow ways up, but no hashes. Where all links are alike it has nothing to choose by, and yet orders
differ: each flow above a first-tier switch may meet another one. So here its block orders (a replicas by b
parts, block by block) and the order that it finds are judged once more, by the iteration that the simulator
has under a few seeds of the hashes. Of the block orders only those are simulated that no other one beats both
in ring and in message bytes above the first tier.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from myriad.network.exchange import Seats
from myriad.network.placement import Neighbourhoods
from myriad.network.routing import Routes
from myriad.planner.costs import Costs
from myriad.planner.exposure import JobExposure, Known, Routing, Tenant
from myriad.planner.fabric import Fabric
from myriad.planner.placement import block_orders, place
from myriad.planner.traffic import fills_nodes, traffic_of

__all__ = ["num_slots", "optimised_order", "seats_of"]

_Ints = npt.NDArray[np.int64]
_MOST_SIMULATED = 8
_SEEDS = 4
"""Draws by which orders are compared."""


def num_slots(costs: Costs) -> int:
    """Nodes that a job needs."""
    return -(-costs.work.layout.world // costs.cluster.accelerators_per_node)


def seats_of(costs: Costs, routes: Routes, nodes: Sequence[int] | _Ints) -> Seats:
    """``nodes``: slot by slot."""
    ports = routes.fabric.ports_per_node
    return Seats(np.asarray(nodes, dtype=np.int64), costs.cluster.accelerators_per_node, ports)


def optimised_order(
    tenant: Tenant,
    nodes: Sequence[int],
    routes: Routes,
    judge: Callable[[Costs], float],
    *,
    queue_pairs: int = 1,
    routing: Routing = "ecmp",
    slower: dict[int, float] | None = None,
    known: Known | None = None,
) -> list[int]:
    """Of a job's nodes, slot by slot; as given where none of those that are tried is better. ``known``: of
    `JobExposure`."""
    costs, own = tenant.costs, np.asarray(nodes, dtype=np.int64)
    layout, cluster = costs.work.layout, costs.cluster
    per_node = cluster.accelerators_per_node
    if layout.world % per_node or not fills_nodes(layout, per_node):
        return list(nodes)

    def seconds(order: _Ints) -> float:
        own_tenant = [tenant.at(seats_of(costs, routes, order))]
        moved = JobExposure(routes, own_tenant, queue_pairs=queue_pairs, routing=routing, known=known)
        return float(np.mean(moved.seconds(judge, range(_SEEDS))))

    tried = [own, *_blocks(costs, own, routes)]
    placed = place(cluster, traffic_of(costs), slower, list(nodes))
    if not placed.is_plain:
        tried.append(own[list(placed.order)])
    found = [seconds(order) for order in tried]
    best = int(np.argmin(found))
    return [int(node) for node in (tried[best] if found[best] < found[0] * (1 - 1e-6) else own)]


def _blocks(costs: Costs, own: _Ints, routes: Routes) -> list[_Ints]:
    """Block orders that no other beats in what rings and messages carry above the first tier."""
    traffic, set_of = traffic_of(costs), Neighbourhoods(routes.fabric).set_of[own]
    orders = np.unique(np.array(list(block_orders(Fabric(costs.cluster, traffic, {}, list(own))))), axis=0)
    shape = (len(orders), traffic.replicas, traffic.parts, traffic.width)
    sets = set_of[orders].reshape(shape)
    rings = (sets != np.roll(sets, -1, axis=1)).sum((1, 3)) @ np.array(traffic.ring_bytes)
    messages = np.zeros(len(orders))
    for one in traffic.messages:
        messages += one.num_bytes * (sets[:, :, one.source] != sets[:, :, one.target]).sum((1, 2))
    chosen, least = [], np.inf
    for number in np.lexsort((messages, rings)):
        if messages[number] < least:
            chosen.append(number)
            least = messages[number]
    step = max(1, -(-len(chosen) // _MOST_SIMULATED))
    return [own[orders[number]] for number in chosen[::step]]
