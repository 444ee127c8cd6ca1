"""The piece of a fabric on which flows meet most: small enough for the fluid level, with its own links.

Of all links the one that is asked for the most of its rate by what ports send, the flows on it, and those
that these meet on other links which are too narrow for them, until there are enough. Cut out are the cables
that they use; every port is a node of its own there. What else goes over these links has room beside them,
and is left out.

    flows    a ──┐                     a and b are held up by an uplink, b and c by a downlink: a, b and c
             b ──┴─ uplink ──┐         are the piece; what shares wide links with them is none of it
             c ──────────────┴─ downlink

Arrays: F flows, L links.
"""

from collections import deque

import numpy as np
import numpy.typing as npt

from myriad.network.exposure import on_ports
from myriad.network.fabric import Fabric, Numbers
from myriad.network.flows import Flows, Paths

__all__ = ["crowd", "cut_out"]

_Ints = npt.NDArray[np.int64]
_FULL = 1 + 1e-9


def crowd(fabric: Fabric, flows: Flows, paths: Paths, most: int) -> _Ints:
    """Numbers of at most ``most`` flows that meet; none where all links carry all flows in full."""
    rate, owner = fabric.bytes_per_second, np.repeat(np.arange(len(paths)), np.diff(paths.first))
    asked = on_ports(fabric, flows)[owner]
    load: Numbers = np.bincount(paths.link, weights=asked, minlength=len(rate)) / rate
    if not np.any(load > _FULL):
        return np.empty(0, dtype=np.int64)
    chosen: dict[int, None] = {}
    links, seen = deque([int(np.argmax(load))]), {int(np.argmax(load))}
    while links and len(chosen) < most:
        for flow in owner[paths.link == links.popleft()].tolist()[: most - len(chosen)]:
            chosen[flow] = None
            narrow = [int(link) for link in paths.of(flow) if load[link] > _FULL and int(link) not in seen]
            seen.update(narrow)
            links.extend(narrow)
    return np.array(sorted(chosen), dtype=np.int64)


def cut_out(fabric: Fabric, flows: Flows, paths: Paths, chosen: _Ints) -> tuple[Fabric, Flows, Paths]:
    """Those flows on what they use of the fabric."""
    own = [paths.of(int(flow)) for flow in chosen]
    used = np.concatenate(own)
    links = (2 * np.unique(used // 2)[:, None] + np.arange(2)).reshape(-1)
    vertices = np.unique(np.stack([fabric.source[links], fabric.target[links]]))
    piece = Fabric(
        name=fabric.name,
        num_nodes=int((vertices < fabric.num_ports).sum()),
        ports_per_node=1,
        tier=fabric.tier[vertices],
        source=np.searchsorted(vertices, fabric.source[links]).astype(np.int32),
        target=np.searchsorted(vertices, fabric.target[links]).astype(np.int32),
        bytes_per_second=fabric.bytes_per_second[links],
        latency_seconds=fabric.latency_seconds[links],
    )
    inside = Flows(
        source=np.searchsorted(vertices, flows.source[chosen]).astype(np.int32),
        target=np.searchsorted(vertices, flows.target[chosen]).astype(np.int32),
        num_bytes=flows.num_bytes[chosen],
        start_seconds=flows.start_seconds[chosen],
        entropy=flows.entropy[chosen],
    )
    first = np.cumsum([0, *map(len, own)]).astype(np.int64)
    return piece, inside, Paths(first, np.searchsorted(links, used).astype(np.int32))
