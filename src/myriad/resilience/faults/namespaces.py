"""Machines on one machine: network namespaces, joined by switches, with cables that can be pulled.

        host 0                     switches                      host 1
         eth0 ═════════ port0 ═══ bridge0 ═══ port1 ═════════ eth0      10.77.0.1, 10.77.0.2
         eth1 ═════════ port0-1 ═ bridge1 ═ port1-1 ═════════ eth1      10.78.0.1, 10.78.0.2    (networks=2)

The switches are in a namespace of their own. So nothing is added to the machine's own network, any number of
`Namespaces` live side by side in the same addresses, and taking them away takes everything. That happens on
leaving the block, by an exception, SIGINT, SIGTERM or at exit; what a killed owner leaves behind (its
processes die with it) is removed by the next. Needs root, and ip of iproute2.

A process enters a host as ``ip netns exec`` would let it: the host's network, its own mounts with the host's
files of /etc/netns over those of /etc, and its own host name. Names of hosts resolve by a hosts file, without
a name server. It dies with the process that started it.

    python -m myriad.resilience.faults.namespaces NAMESPACE HOSTNAME COMMAND...
"""

import atexit
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["Namespaces", "enter_host", "missing", "run"]

_PREFIX = "myriad"
_NAMESPACES, _ETC = Path("/run/netns"), Path("/etc/netns")
_SERIALS = count()
_NEW_NETWORK, _NEW_MOUNTS, _NEW_HOSTNAME = 0x40000000, 0x00020000, 0x04000000
_BIND, _SLAVE_ALL, _DETACH = 4096, (1 << 19) | 16384, 2
_DIE_WITH_PARENT = 1


def missing(tools: Sequence[str] = ("ip",)) -> str | None:
    """Why hosts cannot be made here; ``None`` where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in tools:
        if shutil.which(tool) is None:
            return f"no {tool} (iproute2) here"
    probe = f"{_PREFIX}-{os.getpid()}-{next(_SERIALS)}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode == 0:
        run("ip", "netns", "delete", probe)
        return None
    return f"no network namespaces here: {made.stderr.strip()}"


def run(*words: str) -> str:
    """What a command prints. Raises ``OSError`` with what it complains of."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _end_all(namespace: str) -> None:
    """Ends every process of a namespace."""
    for _ in range(250):
        found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout
        if not found.split():
            break
        for process in found.split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        time.sleep(0.02)


def _remove(namespace: str) -> None:
    """Ends every process of a namespace and takes it away, with the interfaces in it."""
    _end_all(namespace)
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)
    shutil.rmtree(_ETC / namespace, ignore_errors=True)


def _sweep() -> None:
    """Removes what processes that are gone have left."""
    for folder in (_NAMESPACES, _ETC):
        for path in folder.glob(f"{_PREFIX}-*-*-*"):
            owner = path.name.split("-")[1]
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                _remove(path.name)


def _exit_by(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


class Namespaces:
    """``num_hosts`` of them on each of ``networks`` switches. Used as a context manager, by one thread."""

    TOOLS: tuple[str, ...] = ("ip",)
    """That must be there."""

    def __init__(self, num_hosts: int, *, networks: int = 1) -> None:
        if num_hosts < 1:
            raise ValueError(f"num_hosts = {num_hosts}: at least 1")
        self.num_hosts, self.networks = num_hosts, networks
        self._tag = f"{_PREFIX}-{os.getpid()}-{next(_SERIALS)}"
        self.switch = f"{self._tag}-switch"
        """The namespace of all switches."""
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if problem := missing(self.TOOLS):
            raise OSError(problem)
        _sweep()
        atexit.register(self.close)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._handlers[number] = signal.signal(number, _exit_by)
        try:
            self.build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process in the hosts and removes them; more than once does no harm."""
        held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        try:
            for host in (*range(self.num_hosts), -1):
                _remove(self.namespace(host))
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._handlers.clear()
            atexit.unregister(self.close)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)

    def namespace(self, host: int) -> str:
        """What ``ip netns`` calls a host; -1 is the switch."""
        return self.switch if host < 0 else f"{self._tag}-{host}"

    def address(self, host: int, network: int = 0) -> str:
        """Of the host's eth0, or eth1."""
        return f"10.{77 + network}.0.{host + 1}"

    @staticmethod
    def port(host: int, network: int = 0) -> str:
        """Of the switch, into which the host's cable goes."""
        return f"port{host}" + (f"-{network}" if network else "")

    def build(self) -> None:
        """All of it."""
        switch = ("ip", "-n", self.switch)
        run("ip", "netns", "add", self.switch)
        for network in range(self.networks):
            run(*switch, "link", "add", f"bridge{network}", "type", "bridge")
            run(*switch, "link", "set", f"bridge{network}", "up")
        known = [(self.address(host), f"host{host}") for host in range(self.num_hosts)]
        names = "".join(f"{address} {name}\n::ffff:{address} {name}\n" for address, name in known)
        for host in range(self.num_hosts):
            name = self.namespace(host)
            etc = _ETC / name
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
            for network in range(self.networks):
                self._plug_in(host, network)

    def _plug_in(self, host: int, network: int) -> None:
        switch, name = ("ip", "-n", self.switch), self.namespace(host)
        port, device = self.port(host, network), f"eth{network}"
        run(*switch, "link", "add", port, "type", "veth", "peer", "name", device, "netns", name)
        run(*switch, "link", "set", port, "master", f"bridge{network}", "up")
        run("ip", "-n", name, "address", "add", f"{self.address(host, network)}/24", "dev", device)
        run("ip", "-n", name, "link", "set", device, "up")

    def set_link(self, host: int, *, up: bool, network: int = 0) -> None:
        """Plugs a cable of a host in or out, at the switch."""
        run("ip", "-n", self.switch, "link", "set", self.port(host, network), "up" if up else "down")

    def lose(self, host: int) -> None:
        """Kills whatever runs in a host, as when its machine is lost; the host is there again, empty."""
        _end_all(self.namespace(host))

    def start(
        self, host: int, command: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
    ) -> "subprocess.Popen[Any]":
        """Starts a command in a host; it is killed when the hosts go, if it has not ended."""
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", **(environment or {})}
        enter = partial(enter_host, self.namespace(host), f"host{host}", os.getpid())
        return subprocess.Popen(command, env=environment, preexec_fn=enter, **options)

    def entering(self, host: int) -> list[str]:
        """What a command begins with that is to run in a host."""
        return [sys.executable, "-m", __spec__.name, self.namespace(host), f"host{host}"]

    @contextmanager
    def network_of(self, host: int) -> Iterator[None]:
        """This thread, and what it starts, is in the network of a host meanwhile; nothing else of it."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _enter_network(_NAMESPACES / self.namespace(host))
            yield
        finally:
            _call("setns", before, _NEW_NETWORK)
            os.close(before)


def _call(name: str, *arguments: Any) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _enter_network(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        _call("setns", handle, _NEW_NETWORK)
    finally:
        os.close(handle)


def enter_host(namespace: str, hostname: str, parent: int) -> None:
    """Moves this process (of one thread) into a host for good."""
    _call("prctl", _DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    _enter_network(_NAMESPACES / namespace)
    _call("unshare", _NEW_MOUNTS | _NEW_HOSTNAME)
    _call("mount", b"", b"/", b"none", _SLAVE_ALL, None)
    _call("umount2", b"/sys", _DETACH)
    _call("mount", namespace.encode(), b"/sys", b"sysfs", 0, None)
    for path in (_ETC / namespace).iterdir():
        _call("mount", str(path).encode(), f"/etc/{path.name}".encode(), b"none", _BIND, None)
    socket.sethostname(hostname)


if __name__ == "__main__":
    enter_host(sys.argv[1], sys.argv[2], os.getppid())
    os.execvp(sys.argv[3], sys.argv[3:])
