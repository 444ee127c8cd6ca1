"""Reads the hardware facts of a node (address, GPUs, NICs, driver versions) and the state of its links.

    NVIDIA     /proc/driver/nvidia/gpus/*/information, serial numbers by NVML if nvidia-ml-py is installed
    NICs       ethtool's ioctl (driver, firmware, speed), /sys/class/net/*/address
    RDMA       /sys/class/infiniband/*/{fw_ver,node_guid,hca_type}, ports/*/rate
    pod        MYRIAD_POD or POD_NAME; else the host's name where Kubernetes started this process

No device is required, and a fact that cannot be read is empty.

The state of links is from the kernel: up or down, how often they went down, damaged packets.

    names    the interface to the driver, and those that gloo and NCCL are configured to use
    source   netlink, which uses the network namespace of this process (/sys may show another's);
             RDMA ports from /sys/class/infiniband

The kernel counts how often a carrier was lost. So an outage between two looks, or one of the only link to
the driver, is reported afterwards. A link that has never been up since the watch began is not reported: it
may be a second port without a cable.
"""

import os
import platform
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from myriad.doctor.hardware import SYS, cpu_key, find_nics, read_number, read_text
from myriad.supervise.observations import GpuFacts, LinkStatus, NicFacts, NodeFacts
from myriad.system.machine import memory_bytes
from myriad.telemetry.links.ethtool import driver_info, link_bytes_per_second
from myriad.telemetry.links.netlink import Kernel, LinkCounters

__all__ = ["LinkStateReader", "changes_of", "chosen_interfaces", "node_facts", "rdma_ports"]

_MOST = 64
_WHAT_CHANGES = ("cpu", "memory_bytes")
_UUID = "GPU-"
_MAC_BYTES, _IPOIB_BYTES = 6, 20
_DRAWN = frozenset("2367abef")
"""Second hexadecimal digits of locally administered MAC addresses (IEEE 802)."""
_MEMORY_SHARE = 0.01
"""A kernel update changes the available memory by less than this share."""


def node_facts(
    node: int, address: str, *, root: Path = Path("/"), environment: Mapping[str, str] = os.environ
) -> NodeFacts:
    """Read the facts of this node. ``address``: address at which the driver reaches it. ``root``: folder of
    /sys and /proc."""
    sys, proc = root / "sys", root / "proc"
    return NodeFacts(
        node=node,
        host=socket.gethostname(),
        address=address,
        pod=_pod(environment),
        cpu=cpu_key(proc).removeprefix("cpu "),
        memory_bytes=memory_bytes(),
        gpus=tuple(_gpus(proc))[:_MOST],
        nics=(*_nics(sys), *_rdma(sys))[:_MOST],
        versions=_versions(sys, proc),
    )


def _pod(environment: Mapping[str, str]) -> str:
    given = environment.get("MYRIAD_POD") or environment.get("POD_NAME")
    return given or (socket.gethostname() if "KUBERNETES_SERVICE_HOST" in environment else "")


def _gpus(proc: Path) -> Iterator[GpuFacts]:
    serials = _serials()
    for folder in sorted((proc / "driver/nvidia/gpus").glob("*")):
        pairs = (line.partition(":") for line in (read_text(folder / "information") or "").splitlines())
        known = {name.strip(): value.strip() for name, _, value in pairs}
        bus = folder.name.lower()
        yield GpuFacts(known.get("Model", ""), serials.get(bus) or known.get("GPU UUID", ""), bus)


def _serials() -> dict[str, str]:
    """Return the serial number of each board by its place on the PCI bus; empty without NVML."""
    found: dict[str, str] = {}
    try:
        import pynvml  # type: ignore[import-not-found,unused-ignore]

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except Exception:  # NVML is not installed, there is no driver, or the driver fails
        return found
    for index in range(count):
        with suppress(pynvml.NVMLError):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            bus = pynvml.nvmlDeviceGetPciInfo(handle).busId
            text = (bus.decode() if isinstance(bus, bytes) else bus).lower()
            serial = pynvml.nvmlDeviceGetSerial(handle)
            found[text[-12:]] = serial.decode() if isinstance(serial, bytes) else str(serial)
    return found


def _nics(sys: Path) -> Iterator[NicFacts]:
    for nic in find_nics(sys):
        info = driver_info(nic.name)
        speed = link_bytes_per_second(nic.name)
        mac = read_text(nic.folder / "address") or ""
        driver = " ".join(filter(None, (info.driver, info.version))) if info else ""
        yield NicFacts(nic.name, mac, driver, info.firmware if info else "", speed)


def _rdma(sys: Path) -> Iterator[NicFacts]:
    for device in sorted((sys / "class/infiniband").glob("*")):
        speeds = [(read_text(port / "rate") or "").split()[:1] for port in sorted(device.glob("ports/*"))]
        rate = sum(float(one[0]) for one in speeds if one and one[0].replace(".", "", 1).isdigit())
        kind = read_text(device / "hca_type") or ""
        guid = read_text(device / "node_guid") or ""
        yield NicFacts(device.name, guid, kind, read_text(device / "fw_ver") or "", rate * 1e9 / 8)


def _versions(sys: Path, proc: Path) -> dict[str, str]:
    found = {"kernel": platform.release()}
    for name in ("nvidia", "mlx5_core", "nvidia_peermem"):
        if text := read_text(sys / "module" / name / "version"):
            found[name] = text[:64]
    return found


def changes_of(before: NodeFacts, now: NodeFacts) -> list[str]:
    """Describe what differs between two readings of a machine. Host and address do not count."""
    found = []
    if before.cpu != now.cpu:
        found.append(f"processor: {before.cpu} -> {now.cpu}")
    if abs(before.memory_bytes - now.memory_bytes) > _MEMORY_SHARE * before.memory_bytes:
        found.append(f"memory: {before.memory_bytes >> 20} -> {now.memory_bytes >> 20} MiB")
    found += _differ("GPU", _gpus_beside(before, now), _gpus_beside(now, before))
    found += _differ("NIC", _hardware_addresses(before), _hardware_addresses(now))
    for what in ("driver", "firmware"):
        both = [{one.name: getattr(one, what) for one in facts.nics} for facts in (before, now)]
        both = [{name: one[name] for name in both[0].keys() & both[1].keys()} for one in both]
        found += _differ(f"{what} of NIC", *both)
    return [*found, *_differ("version of", before.versions, now.versions)]


def _gpus_beside(facts: NodeFacts, other: NodeFacts) -> dict[str, str]:
    """Return each GPU by its bus. The number is left out if one reading has a serial number and the other a
    UUID, which is all that is known while NVML does not answer."""
    has_uuid = {one.bus: one.serial.startswith(_UUID) for one in other.gpus}
    return {
        one.bus: one.model
        if has_uuid.get(one.bus, one.serial.startswith(_UUID)) != one.serial.startswith(_UUID)
        else f"{one.model} {one.serial}".strip()
        for one in facts.gpus
    }


def _hardware_addresses(facts: NodeFacts) -> dict[str, str]:
    """Return the permanent hardware address of each NIC. Bridges, tunnels and interfaces of containers have a
    random address, or no address; the first bytes of an IPoIB address are a queue number."""
    found = {}
    for nic in facts.nics:
        words = nic.address.split(":")
        if len(words) == _IPOIB_BYTES:
            found[nic.name] = ":".join(words[-8:])
        elif nic.address and not (len(words) == _MAC_BYTES and words[0][1:2].lower() in _DRAWN):
            found[nic.name] = nic.address
    return found


def _differ(title: str, before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*before, *now}):
        old, new = before.get(name), now.get(name)
        if old != new:
            words = ["none" if text is None else text or "unknown" for text in (old, new)]
            yield f"{title} {name}: {' -> '.join(words)}"


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
