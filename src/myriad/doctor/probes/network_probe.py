"""The node's NICs: link, speed, error counters, and bytes from each to each memory node and to each other.

The kernel hands what a node sends to itself over by itself, whichever of its addresses is named: the
transfers here cross its network stack, the memory and the sockets' limits, not the NIC's own engine or its
cable. Those are what the rounds between nodes (`myriad.doctor.pair_tests.pair_rounds`) cross.
"""

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from myriad.doctor.diagnosis import Reading
from myriad.doctor.hardware import SYS, Nic, find_nics, read_number, read_text
from myriad.doctor.probes.tcp_flow import Received, receive, send_for
from myriad.system.machine import MemoryNode, find_memory_nodes

__all__ = ["check_counters", "check_link", "check_network", "count_errors"]

_SECONDS = 0.2
_FLOOR = 1e8
_COUNTERS = ("rx_errors", "tx_errors", "rx_crc_errors", "tx_carrier_errors", "rx_fifo_errors")
_INFINIBAND = ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "port_xmit_discards")
_MOST_ERROR_RATIO = 1e-5
"""Largest share of packet errors since the link came up: TCP over a link that loses 1 in 100,000 is already
slower."""


def check_network(sys: Path = SYS) -> Iterator[Reading]:
    """Yield all readings of the network; errors that appear during the probe count more than old ones."""
    nics = find_nics(sys)
    before = {nic.name: count_errors(nic, sys) for nic in nics}
    if not nics:
        yield Reading(name="network", skipped="no network interface but lo")
    for nic in nics:
        yield from check_link(nic)
    usable = [nic for nic in nics if nic.address]
    for nic in usable:
        for node in find_memory_nodes(sys):
            yield _loopback(nic, node)
    yield from _between(usable)
    for nic in nics:
        yield check_counters(nic, before[nic.name], count_errors(nic, sys))


def check_link(nic: Nic) -> Iterator[Reading]:
    """Check that the link is up and as fast as in the baseline."""
    name = f"{nic.name} link"
    state = read_text(nic.folder / "operstate") or "unknown"
    if state == "down" and not nic.address:
        yield Reading(name=name, skipped="down and without an address: assumed unused")
        return
    down = state not in ("up", "unknown") or nic.number("carrier") == 0
    changes = nic.number("carrier_changes")
    yield Reading(
        name=name,
        value=state,
        problem="the link is down: check cable, transceiver and switch port" if down else "",
        note="" if changes is None else f"its carrier changed {changes:.0f} times since it came up",
    )
    speed = nic.number("speed")
    if speed is None or speed <= 0:
        yield Reading(name=f"{nic.name} link speed", skipped="the driver reports none")
    else:
        yield Reading(
            name=f"{nic.name} link speed",
            value=speed,
            unit="Mbit/s",
            hardware=nic.hardware,
            remedy="it came up with fewer lanes or an older rate: reseat cable and transceiver",
        )


def count_errors(nic: Nic, sys: Path = SYS) -> float:
    """Return the errors of the interface and of the InfiniBand ports on the same device."""
    statistics = [nic.folder / "statistics" / name for name in _COUNTERS]
    ports = (nic.folder / "device").glob("infiniband/*/ports/*/counters")
    fabric = [folder / name for folder in ports for name in _INFINIBAND]
    return sum(read_number(path) or 0.0 for path in [*statistics, *fabric])


def check_counters(nic: Nic, before: float, after: float) -> Reading:
    """Judge the error counters from before and after the other checks."""
    folder = nic.folder / "statistics"
    packets = sum(read_number(folder / name) or 0.0 for name in ("rx_packets", "tx_packets"))
    problem = ""
    if after > before:
        problem = f"{after - before:.0f} new errors while this ran: check cable and transceiver"
    elif after > _MOST_ERROR_RATIO * packets and after > 1:
        problem = f"{after:.0f} errors in {packets:.0f} packets: check cable and transceiver"
    return Reading(
        name=f"{nic.name} errors",
        value=after,
        unit="errors",
        problem=problem,
        note=f"in {packets:.0f} packets since it came up",
    )


def _loopback(nic: Nic, node: MemoryNode) -> Reading:
    found = _transfer(nic.address, nic.address, node)
    remedy = "look for other work on these cores, or a NIC that hangs on the wrong memory node"
    return _arrived(nic, f"memory node {node.index}", found, remedy, "loopback, one connection")


def _between(nics: list[Nic]) -> Iterator[Reading]:
    """Test each NIC to the next one: every NIC sends and receives once."""
    if len(nics) < 2:
        yield Reading(name="NIC to NIC", skipped="one NIC with an address")
        return
    for source, target in zip(nics, [*nics[1:], nics[0]], strict=True):
        found = _transfer(source.address, target.address, None)
        remedy = "compare with the other pairs: the NIC that is slow in two of them is the one"
        yield _arrived(source, target.name, found, remedy)


def _arrived(source: Nic, target: str, found: Received, remedy: str, note: str = "") -> Reading:
    return Reading(
        name=f"{source.name} to {target}",
        value=found.bytes_per_second,
        unit="bytes/s",
        floor=_FLOOR,
        hardware=source.hardware,
        problem=f"{found.wrong_bytes} bytes arrived different" if found.wrong_bytes else "",
        note=note,
        remedy=remedy,
    )


def _transfer(source: str, target: str, node: MemoryNode | None) -> Received:
    """Transfer over one connection with both ends here; the receiver's buffers are on ``node``."""
    with socket.create_server((target, 0)) as server:
        server.settimeout(5 * _SECONDS)
        connection = socket.create_connection(server.getsockname()[:2], 5 * _SECONDS, (source, 0))
        accepted, peer = server.accept()
    with connection, accepted:
        if peer[1] != connection.getsockname()[1]:  # another process connected first
            return Received(0.0, 0)
        sender = threading.Thread(target=send_for, args=(connection, _SECONDS), daemon=True)
        sender.start()
        found = _receive_on(node, accepted)
        sender.join(2 * _SECONDS)
    return found


def _receive_on(node: MemoryNode | None, connection: socket.socket) -> Received:
    found: list[Received] = []

    def run() -> None:
        if node is not None:
            os.sched_setaffinity(0, node.cpus)  # of this thread
        found.append(receive(connection, _SECONDS))

    receiver = threading.Thread(target=run, daemon=True)
    receiver.start()
    receiver.join(5 * _SECONDS)
    return found[0] if found else Received(0.0, 0)
