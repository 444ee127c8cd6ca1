"""Reads the hardware facts of a node: its address, GPUs, NICs and driver versions.

    NVIDIA     /proc/driver/nvidia/gpus/*/information, serial numbers by NVML if nvidia-ml-py is installed
    NICs       ethtool's ioctl (driver, firmware, speed), /sys/class/net/*/address
    RDMA       /sys/class/infiniband/*/{fw_ver,node_guid,hca_type}, ports/*/rate
    pod        MYRIAD_POD or POD_NAME; else the host's name where Kubernetes started this process

No device is required, and a fact that cannot be read is empty.
"""

import os
import platform
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from myriad.doctor.hardware import cpu_key, find_nics, read_text
from myriad.supervise.observations import GpuFacts, NicFacts, NodeFacts
from myriad.system.machine import memory_bytes
from myriad.telemetry.links.ethtool import driver_info, link_bytes_per_second

__all__ = ["changes_of", "node_facts"]

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
    """Read the facts of this node. ``address``: at which the driver reaches it. ``root``: folder of /sys and
    /proc."""
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
