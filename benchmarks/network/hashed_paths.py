"""Several shaped paths between two hosts, and a route that hashes flows onto them: what `network_real.py`
measures on.

    host 0  10.201.0.1 ══ up0 ══ tbf ══ up0 ══ 10.200.0.2  host 1
                       ══ up1 ══ tbf ══ up1 ══
                       ══ ...

The kernel of host 0 takes the path by a hash of addresses and ports (fib_multipath_hash_policy = 1), as a
switch does; ``ip route get`` says which one without sending anything. What comes back goes by path 0,
unshaped.
"""

import re
import selectors
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from myriad.faults.namespaces import run

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from hosts import Hosts

__all__ = ["PORT", "lay_paths", "measure_rates", "path_of"]

PORT = 5000
_SOURCE, _TARGET = "10.201.0.1", "10.200.0.2"
_POLICY = Path("/proc/sys/net/ipv4/fib_multipath_hash_policy")
_BURST_BYTES = 80_000
"""One segment of 64 KiB as the kernel hands it down: see `hosts`."""


def lay_paths(hosts: Hosts, num_paths: int, rate: str) -> None:
    """From host 0 to host 1, each with its own shaper. Raises ``OSError`` where the kernel has no such
    routes."""
    ends = [hosts.namespace(0), hosts.namespace(1)]
    run("ip", "-n", ends[0], "address", "add", f"{_SOURCE}/32", "dev", "lo")
    run("ip", "-n", ends[1], "address", "add", f"{_TARGET}/32", "dev", "lo")
    hops = []
    for path in range(num_paths):
        device = f"up{path}"
        run(
            "ip",
            "-n",
            ends[0],
            "link",
            "add",
            device,
            "type",
            "veth",
            "peer",
            "name",
            device,
            "netns",
            ends[1],
        )
        for number, end in enumerate(ends, 1):
            run("ip", "-n", end, "address", "add", f"10.100.{path}.{number}/24", "dev", device)
            run("ip", "-n", end, "link", "set", device, "up")
        shape = ("tbf", "rate", rate, "burst", str(_BURST_BYTES), "latency", "50ms")
        run("tc", "-n", ends[0], "qdisc", "replace", "dev", device, "root", *shape)
        hops += ["nexthop", "via", f"10.100.{path}.2", "dev", device]
    run("ip", "-n", ends[0], "route", "add", f"{_TARGET}/32", "src", _SOURCE, *hops)
    run("ip", "-n", ends[1], "route", "add", f"{_SOURCE}/32", "via", "10.100.0.1", "dev", "up0")
    with hosts.network_of(0):
        _POLICY.write_text("1")


def path_of(hosts: Hosts, source_port: int) -> int:
    """The path that the kernel of host 0 takes for a flow from this port."""
    flow = ("ipproto", "tcp", "sport", str(source_port), "dport", str(PORT))
    told = run("ip", "-n", hosts.namespace(0), "route", "get", _TARGET, "from", _SOURCE, *flow)
    found = re.search(r" dev up(\d+)", told)
    if found is None:
        raise OSError(f"no path for port {source_port}: {told.strip()}")
    return int(found[1])


def measure_rates(hosts: Hosts, ports: Sequence[int], seconds: float) -> dict[int, float]:
    """Bytes a second of payload of one TCP flow from each port, all at once; the first third, in which they
    find their rates, is not counted."""
    received = hosts.run_ranks(_one_side, tuple(ports), seconds, world=2)[1]
    assert isinstance(received, dict)
    return received


def _one_side(ports: Sequence[int], seconds: float) -> dict[int, float] | None:
    if socket.gethostname() == "host0":
        _send(ports, seconds)
        return None
    return _receive(len(ports), seconds)


def _send(ports: Sequence[int], seconds: float) -> None:
    waiting, block = selectors.DefaultSelector(), bytes(2**16)
    for port in ports:
        waiting.register(_connect(port), selectors.EVENT_WRITE)
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        for key, _ in waiting.select(left):
            assert isinstance(key.fileobj, socket.socket)
            with suppress(BlockingIOError):
                key.fileobj.send(block)
    for key in list(waiting.get_map().values()):
        assert isinstance(key.fileobj, socket.socket)
        key.fileobj.close()


def _connect(port: int) -> socket.socket:
    for _ in range(200):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind((_SOURCE, port))
        try:
            one.connect((_TARGET, PORT))
        except ConnectionRefusedError:
            one.close()
            time.sleep(0.02)
            continue
        one.setblocking(False)
        return one
    raise OSError(f"nobody listens at {_TARGET}:{PORT}")


def _receive(num_flows: int, seconds: float) -> dict[int, float]:
    """Counts in the middle, and reads until all have ended."""
    waiting, total = selectors.DefaultSelector(), Counter[int]()
    with socket.create_server((_TARGET, PORT), backlog=num_flows) as server:
        for _ in range(num_flows):
            peer, (_, port) = server.accept()
            waiting.register(peer, selectors.EVENT_READ, port)
    begin = time.monotonic() + seconds / 3
    end = begin + seconds / 2
    while waiting.get_map():
        for key, _ in waiting.select():
            assert isinstance(key.fileobj, socket.socket)
            count = len(key.fileobj.recv(2**18))
            if not count:
                waiting.unregister(key.fileobj)
            elif begin <= time.monotonic() < end:
                total[key.data] += count
    return {port: count / (end - begin) for port, count in total.items()}
