"""Read the kernel's counters of network interfaces by netlink, which answers for the network namespace of
this process (/sys may show another namespace).

pyroute2 writes the request and parses the answer. The socket is our own: pyroute2's needs an event loop, and
the node agent asks within one. pyroute2 is imported at the first request, because it takes 0.15 s and 23 MB
and only node agents ask; ranks, the sampler of links and the command line never import it.
"""

import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["Kernel", "LinkCounters", "parse_link"]

_GET_LINK, _REQUEST = 18, 1
_UP, _LOWER_UP = 1, 1 << 16
"""Interface flags: administratively up; lower layer up (carrier present)."""
_MOST_BYTES = 2**16


@dataclass(frozen=True)
class LinkCounters:
    """Counters of one interface since it was created."""

    name: str
    up: bool
    """Whether the interface is administratively up and has a carrier."""
    received_bytes: int
    sent_bytes: int
    received_packets: int
    sent_packets: int
    errors: int
    """Packets with receive or transmit errors."""
    drops: int
    """Packets dropped in either direction."""
    carrier_changes: int
    downs: int
    """Number of times that the interface went down."""


class Kernel:
    """An open netlink connection to the kernel."""

    def __init__(self) -> None:
        """Open the socket. Raises ``OSError``."""
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)

    def ask(self, names: Iterable[str]) -> Iterator[LinkCounters]:
        """Yield the counters of each existing interface. The kernel replies at once. Raises ``OSError``."""
        for name in names:
            self._socket.send(_request(name))
            if (link := parse_link(self._socket.recv(_MOST_BYTES, socket.MSG_DONTWAIT))) is not None:
                yield link

    def close(self) -> None:
        """Close the netlink socket."""
        self._socket.close()


def _request(name: str) -> bytes:
    from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

    message = ifinfmsg()
    message["header"].update(type=_GET_LINK, flags=_REQUEST)
    message["attrs"] = [("IFLA_IFNAME", name)]
    message.encode()
    return bytes(message.data)


def parse_link(message: bytes) -> LinkCounters | None:
    """Parse the kernel's answer about an interface; ``None`` if it is empty or an error."""
    from pyroute2.netlink.rtnl.marshal import MarshalRtnl

    found = next(MarshalRtnl().parse(message), None)
    if found is None or found["header"]["error"] is not None or found.get("event") != "RTM_NEWLINK":
        return None
    counts = found.get("stats64") or {}

    def count(*names: str) -> int:
        return sum(int(counts.get(name, 0)) for name in names)

    return LinkCounters(
        name=found.get("ifname") or "",
        up=bool(found["flags"] & _UP and found["flags"] & _LOWER_UP),
        received_bytes=count("rx_bytes"),
        sent_bytes=count("tx_bytes"),
        received_packets=count("rx_packets"),
        sent_packets=count("tx_packets"),
        errors=count("rx_errors", "tx_errors"),
        drops=count("rx_dropped", "tx_dropped"),
        carrier_changes=int(found.get("carrier_changes") or 0),
        downs=int(found.get("carrier_down_count") or 0),
    )
