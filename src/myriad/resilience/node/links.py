"""The links of a node, as its kernel has them: up or down, how often they went down, damaged packets.

    names    the interface by which the driver is reached, and those that gloo and NCCL are told to use
    asked    by netlink, which knows the network namespace of this process (/sys may show another's);
             ports of RDMA in /sys/class/infiniband

The kernel counts how often a carrier was lost. So a cable that was out between two looks, or while the
driver could not be told because it was the only one, is told afterwards. What has never been up since the
watch began is nobody's loss: a second port that no cable was ever put in.
"""

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from myriad.resilience.doctor.hardware import SYS, read_number, read_text
from myriad.resilience.facts import LinkSeen
from myriad.telemetry.links import Kernel, LinkCounters
from myriad.telemetry.links import parse_link as parse_counters

__all__ = ["LinkWatch", "chosen_interfaces", "parse_link", "rdma_ports"]


class LinkWatch:
    """Of one executor."""

    def __init__(self, interface: Callable[[], str | None], *, rdma: bool, sys: Path = SYS) -> None:
        """``interface``: by which the driver is reached now; ``rdma``: ranks may go by it."""
        self._interface, self._rdma, self._sys = interface, rdma, sys
        self._were_up: set[str] = set()

    def look(self) -> tuple[LinkSeen, ...]:
        """All that have been up."""
        names = chosen_interfaces(os.environ, [name for _, name in socket.if_nameindex()])
        if (own := self._interface()) is not None:
            names.add(own)
        found = [*_ask(sorted(names - {"lo"})), *(rdma_ports(os.environ, self._sys) if self._rdma else ())]
        self._were_up.update(link.name for link in found if link.up)
        return tuple(link for link in found if link.name in self._were_up)


def chosen_interfaces(environment: Mapping[str, str], there: Iterable[str]) -> set[str]:
    """Those of ``there`` that gloo and NCCL are told to use: by name, and for NCCL by how it begins
    (``eth``), exactly (``=eth0``), or all but some (``^docker``), which says nothing of those that are
    used."""
    gloo = set(environment.get("GLOO_SOCKET_IFNAME", "").split(","))
    nccl = environment.get("NCCL_SOCKET_IFNAME", "")
    exact = set(nccl.removeprefix("=").split(",")) if nccl.startswith("=") else set()
    begins = () if nccl.startswith(("=", "^")) else tuple(filter(None, nccl.split(",")))
    return {name for name in there if name in gloo | exact or name.startswith(begins)}


def _ask(names: Sequence[str]) -> Iterator[LinkSeen]:
    if not names:
        return
    with suppress(OSError):
        kernel = Kernel()
        try:
            yield from map(_seen, kernel.ask(names))
        finally:
            kernel.close()


def _seen(link: LinkCounters) -> LinkSeen:
    return LinkSeen(link.name, link.up, link.downs, link.errors)


def parse_link(message: bytes) -> LinkSeen | None:
    """What the kernel says of an interface; ``None``: nothing, or an error."""
    found = parse_counters(message)
    return None if found is None else _seen(found)


def rdma_ports(environment: Mapping[str, str], sys: Path = SYS) -> list[LinkSeen]:
    """Of InfiniBand and RoCE, as far as NCCL_IB_HCA and NCCL_IB_DISABLE have NCCL use them."""
    if environment.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        return []
    ports = sorted((sys / "class/infiniband").glob("*/ports/*"))
    return [_rdma_port(path) for path in ports if _is_chosen(path, environment.get("NCCL_IB_HCA", ""))]


def _is_chosen(port: Path, chosen: str) -> bool:
    """``mlx5`` by how it begins, ``=mlx5_0:1`` exactly, ``^mlx5_3`` all but that."""
    names = (port.parts[-3], f"{port.parts[-3]}:{port.name}")
    exact, words = "=" in chosen[:2], chosen.lstrip("^=").split(",")
    if not any(words):
        return True
    listed = any(name == word if exact else name.startswith(word) for word in words for name in names)
    return listed != chosen.startswith("^")


def _rdma_port(path: Path) -> LinkSeen:
    def number(name: str) -> int:
        return int(read_number(path / "counters" / name) or 0)

    return LinkSeen(
        name=f"{path.parts[-3]}:{path.name}",
        up=(read_text(path / "state") or "").startswith("4"),  # "4: ACTIVE"
        downs=number("link_downed"),
        errors=number("symbol_error") + number("port_rcv_errors"),
    )
