"""State of a node's links, from its kernel: up or down, how often they went down, damaged packets.

    names    the interface to the driver, and those that gloo and NCCL are configured to use
    source   netlink, which uses the network namespace of this process (/sys may show another's);
             RDMA ports from /sys/class/infiniband

The kernel counts how often a carrier was lost. So an outage between two looks, or one of the only link to the
driver, is reported afterwards. A link that has never been up since the watch began is not reported: it may be
a second port without a cable.
"""

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from myriad.doctor.hardware import SYS, read_number, read_text
from myriad.supervise.observations import LinkStatus
from myriad.telemetry.links.netlink import Kernel, LinkCounters

__all__ = ["LinkStateReader", "chosen_interfaces", "rdma_ports"]


class LinkStateReader:
    """Watches the links of one node."""

    def __init__(self, interface: Callable[[], str | None], *, rdma: bool, sys: Path = SYS) -> None:
        """``interface``: returns the interface to the driver. ``rdma``: whether ranks may use RDMA."""
        self._interface, self._rdma, self._sys = interface, rdma, sys
        self._were_up: set[str] = set()

    def poll(self) -> tuple[LinkStatus, ...]:
        """Return all links that have been up."""
        names = chosen_interfaces(os.environ, [name for _, name in socket.if_nameindex()])
        if (own := self._interface()) is not None:
            names.add(own)
        found = [*_ask(sorted(names - {"lo"})), *(rdma_ports(os.environ, self._sys) if self._rdma else ())]
        self._were_up.update(link.name for link in found if link.up)
        return tuple(link for link in found if link.name in self._were_up)


def chosen_interfaces(environment: Mapping[str, str], there: Iterable[str]) -> set[str]:
    """Return the interfaces of ``there`` that gloo and NCCL are configured to use. NCCL matches by prefix
    (``eth``) or exactly (``=eth0``). An exclusion (``^docker``) does not name the used ones, so it selects no
    interface."""
    gloo = set(environment.get("GLOO_SOCKET_IFNAME", "").split(","))
    nccl = environment.get("NCCL_SOCKET_IFNAME", "")
    exact = set(nccl.removeprefix("=").split(",")) if nccl.startswith("=") else set()
    begins = () if nccl.startswith(("=", "^")) else tuple(filter(None, nccl.split(",")))
    return {name for name in there if name in gloo | exact or name.startswith(begins)}


def _ask(names: Sequence[str]) -> Iterator[LinkStatus]:
    if not names:
        return
    with suppress(OSError):
        kernel = Kernel()
        try:
            yield from map(_seen, kernel.ask(names))
        finally:
            kernel.close()


def _seen(link: LinkCounters) -> LinkStatus:
    return LinkStatus(link.name, link.up, link.downs, link.errors)


def rdma_ports(environment: Mapping[str, str], sys: Path = SYS) -> list[LinkStatus]:
    """Return the InfiniBand and RoCE ports that NCCL_IB_HCA and NCCL_IB_DISABLE let NCCL use."""
    if environment.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        return []
    ports = sorted((sys / "class/infiniband").glob("*/ports/*"))
    return [_rdma_port(path) for path in ports if _is_chosen(path, environment.get("NCCL_IB_HCA", ""))]


def _is_chosen(port: Path, chosen: str) -> bool:
    """Match a port with NCCL_IB_HCA: ``mlx5`` by prefix, ``=mlx5_0:1`` exactly, ``^mlx5_3`` all but that."""
    names = (port.parts[-3], f"{port.parts[-3]}:{port.name}")
    exact, words = "=" in chosen[:2], chosen.lstrip("^=").split(",")
    if not any(words):
        return True
    listed = any(name == word if exact else name.startswith(word) for word in words for name in names)
    return listed != chosen.startswith("^")


def _rdma_port(path: Path) -> LinkStatus:
    def number(name: str) -> int:
        return int(read_number(path / "counters" / name) or 0)

    return LinkStatus(
        name=f"{path.parts[-3]}:{path.name}",
        up=(read_text(path / "state") or "").startswith("4"),  # "4: ACTIVE"
        downs=number("link_downed"),
        errors=number("symbol_error") + number("port_rcv_errors"),
    )
