"""What sockets the processes of a command really listen on, and which rows docs/security.md has for them.

A command and all that it starts carry a mark in their environment, also when they get another parent. A
`Watch` looks at their descriptors some times a second, in each process's own network namespace.
"""

import os
import re
import secrets
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

SECURITY = Path(__file__).parents[2] / "docs" / "security.md"
MARK = "MYRIAD_TEST_SOCKETS"
_LOOK_SECONDS = 0.05
_LISTENS, _UNIX_LISTENS = "0A", 0x10000


@dataclass(frozen=True)
class Row:
    """A row of the table "What listens where"."""

    started_by: str
    socket: str
    address: str
    proves: str


def table_rows() -> list[Row]:
    """The table, as a person reads it."""
    text = SECURITY.read_text().partition("## What listens where")[2].partition("Shared memory")[0]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines()]
    return [Row(*each[:4]) for each in cells if len(each) == 5 and each[0] != "started by"]


@dataclass(frozen=True)
class Listener:
    """A socket of a process that others could reach."""

    role: str
    """Which process of Myriad it is."""
    kind: str
    """tcp, udp, or unix."""
    host: str
    port: int
    name: str = ""
    """Of a unix socket; an abstract one begins with @."""


GLOO, STORE = "each rank: gloo", "rank 0: the rendezvous store of an attempt"
DRIVER = "`myriad train`, `run`, launchers: the driver"
LOCAL = "each node: the snapshot server, for its ranks"
COPIES = "each node of several: the snapshot server, for other nodes"
MACHINE = "`myriad doctor`: loopback and links of this machine"
TORCHRUN = "torchrun's own store"
ROWS_OF = {
    "launcher": (),
    "driver": (DRIVER,),
    "agent": (),
    "rank": (STORE, GLOO),
    "other rank": (GLOO,),
    "torchrun's rank": (STORE, GLOO),
    "loader": (),
    "snapshot server": (LOCAL, COPIES),
    "watch": ("`myriad watch`",),
    "doctor": (
        MACHINE,
        "`myriad doctor --cluster`: first node",
        "`myriad doctor --cluster`: each pair",
    ),
    "doctor's probe": (MACHINE, STORE, GLOO),
    "doctor's rank": (STORE, GLOO),
    "torchrun": (TORCHRUN,),
    "redis": ("`myriad faults` with Redis",),
}
"""The rows of the sockets that each process may have."""


def allows(row: Row, found: Listener, node: str) -> bool:
    """Whether a row describes a socket. ``node``: the address of the node, if the run has several."""
    if found.kind == "unix":
        return row.socket == "abstract unix socket" and found.name.startswith("@myriad-")
    if row.socket.partition(",")[0] not in ("TCP", "HTTP") or found.kind != "tcp":
        return False
    if "`MASTER_PORT`" in row.address:
        return True
    words, _, under_torchrun = row.address.partition(". Under torchrun")
    hosts = re.findall(r"`(\d+\.\d+\.\d+\.\d+)", words)
    if re.search(r"the node's address|address that|one of the machine's|resilience.listen", words) and node:
        hosts.append(node)
    if found.role == "torchrun's rank" and "any port" in under_torchrun:
        right_port = True
    elif ports := re.search(r"port in (\d+)-(\d+)", words):
        right_port = int(ports[1]) <= found.port <= int(ports[2])
    else:
        right_port = any(word in words for word in ("any port", "the one given", "`--port`", "for one test"))
        if row.started_by == "each rank: gloo":  # the kernel's choice; the store's ports lie below
            right_port &= found.port >= _first_ephemeral()
    return right_port and found.host in hosts


def _first_ephemeral() -> int:
    return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def row_of(found: Listener, node: str = "") -> Row | None:
    """The row of the table for a socket; ``None``: it is not in the table."""
    rows = [row for row in table_rows() if row.started_by in ROWS_OF.get(found.role, ())]
    return next((row for row in rows if allows(row, found, node)), None)


def assert_in_table(watch: "Watch", node: str = "") -> set[str]:
    """Each socket has a row; what the rows that were seen begin with."""
    assert [each for each in watch.found if row_of(each, node) is None] == []
    assert all(mode == 0o600 for mode in watch.shared_files.values()), watch.shared_files
    return {row.started_by for each in watch.found if (row := row_of(each, node)) is not None}


class Watch:
    """Looks at the sockets of a command until the block ends."""

    def __init__(self) -> None:
        self.environment = os.environ | {MARK: secrets.token_hex(8)}
        """What the command must be started with."""
        self.found: set[Listener] = set()
        self.shared_files: dict[str, int] = {}
        """Files in /dev/shm that a process has open, with their modes."""
        self.roles: set[str] = set()
        self._mark = f"{MARK}={self.environment[MARK]}".encode()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look_often, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._end.set()
        self._thread.join()

    def _look_often(self) -> None:
        while not self._end.wait(_LOOK_SECONDS):
            tables: dict[str, list[tuple[str, Listener]]] = {}
            for process in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):  # it has ended
                    if self._mark in (process / "environ").read_bytes().split(b"\0"):
                        self._look_at(process, tables)

    def _look_at(self, process: Path, tables: dict[str, list[tuple[str, Listener]]]) -> None:
        """``tables``: the listening sockets of the network namespaces that were read in this look."""
        role = _role(process)
        self.roles.add(role)
        inodes = set()
        for entry in (process / "fd").iterdir():
            with suppress(OSError):
                target = os.readlink(entry)
                if target.startswith("/dev/shm/"):
                    self.shared_files[target] = stat.S_IMODE(entry.stat().st_mode)
                if inode := re.fullmatch(r"socket:\[(\d+)\]", target):
                    inodes.add(inode[1])
        if inodes:
            if (namespace := os.readlink(process / "ns" / "net")) not in tables:
                tables[namespace] = list(_listeners(process))
            self.found |= {replace(found, role=role) for inode, found in tables[namespace] if inode in inodes}


def _role(process: Path) -> str:
    name = (process / "comm").read_text().strip()
    words = (process / "cmdline").read_text().split("\0")
    if name.startswith("myriad-rank-"):
        return "rank" if name == "myriad-rank-0" else "other rank"
    modules = {
        "myriad.supervise.driver.driver": "driver",
        "myriad.supervise.agent.agent_process": "agent",
        "myriad.supervise.agent.fork_server": "agent",
        "myriad.checkpoint.snapshots.snapshot_server_process": "snapshot server",
        "myriad.doctor.probes.collective_probe": "doctor's rank",
        "myriad.doctor.probes.probe_process": "doctor's probe",
    }
    if words[0].endswith("redis-server") or words[0].startswith("redis-server"):
        return "redis"
    for word in words:
        if word in modules:
            return modules[word]
        if word.startswith("myriad.data"):
            return "loader"
    if "torch.distributed.run" in words:
        return "torchrun"
    if "myriad.train.worker" in words:
        ranks = [one for one in (process / "environ").read_bytes().split(b"\0") if one.startswith(b"RANK=")]
        return "torchrun's rank" if ranks == [b"RANK=0"] else "other rank"
    if "myriad.cli.main" in words:
        command = words[words.index("myriad.cli.main") + 1]
        return {"watch": "watch", "doctor": "doctor"}.get(command, "launcher")
    return "other: " + " ".join(words[:6])


def _listeners(process: Path) -> Iterator[tuple[str, Listener]]:
    """Each listening or named socket of the process's network namespace, with its inode."""
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        path = process / "net" / kind
        if not path.exists():
            continue
        for line in path.read_text().splitlines()[1:]:
            words = line.split()
            is_open = words[3] == _LISTENS if kind.startswith("tcp") else words[2].endswith(":0000")
            if is_open:
                host, _, port = words[1].partition(":")
                yield words[9], Listener("", kind[:3], _address(host), int(port, 16))
    for line in (process / "net" / "unix").read_text().splitlines()[1:]:
        words = line.split()
        if len(words) > 7 or int(words[3], 16) & _UNIX_LISTENS:
            yield words[6], Listener("", "unix", "", 0, words[7] if len(words) > 7 else "")


def _address(text: str) -> str:
    """The address that /proc/net/tcp writes in words of 32 bits, each as this machine stores it."""
    words = b"".join(bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    found: IPv4Address | IPv6Address = ip_address(words)
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return str(mapped or found)
