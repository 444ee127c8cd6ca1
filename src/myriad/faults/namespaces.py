"""Several hosts on one machine: network namespaces, joined by switches, with links that can be taken down.

        host 0                     switches                      host 1
         eth0 ═════════ port0 ═══ bridge0 ═══ port1 ═════════ eth0      10.77.0.1, 10.77.0.2
         eth1 ═════════ port0-1 ═ bridge1 ═ port1-1 ═════════ eth1      10.78.0.1, 10.78.0.2    (networks=2)

`myriad faults run` uses them for scenarios with ``hosts = true``. The switches are in a namespace of their
own. So the machine's own network is not changed, and removing the namespaces removes everything. Any number
of `Namespaces` can exist at the same time with the same addresses. They are removed on leaving the block, by
an exception, SIGINT, SIGTERM or at exit; the next owner removes what a killed owner leaves behind (its
processes die with it). Needs root, and ip of iproute2.

A process enters a host as with ``ip netns exec``: the host's network, its own mounts with the host's files of
/etc/netns over those of /etc, and its own host name. A hosts file resolves the names of hosts, without a name
server. The process dies with the process that started it.

    python -m myriad.faults.namespaces NAMESPACE HOSTNAME COMMAND...
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

__all__ = ["Namespaces", "enter_host", "run", "why_unavailable"]

_PREFIX = "myriad"
_NAMESPACES, _ETC = Path("/run/netns"), Path("/etc/netns")
_SERIALS = count()
_NEW_NETWORK, _NEW_MOUNTS, _NEW_HOSTNAME = 0x40000000, 0x00020000, 0x04000000
_BIND, _SLAVE_ALL, _DETACH = 4096, (1 << 19) | 16384, 2
_DIE_WITH_PARENT = 1


def why_unavailable(tools: Sequence[str] = ("ip",)) -> str | None:
    """Return why hosts cannot be created here; ``None`` if they can."""
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
    """Run a command and return its output. Raises ``OSError`` with its error output."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _end_all(namespace: str) -> None:
    """Kill every process of a namespace."""
    for _ in range(250):
        found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout
        if not found.split():
            break
        for process in found.split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        time.sleep(0.02)


def _remove(namespace: str) -> None:
    """Kill every process of a namespace and delete it, with the interfaces in it."""
    _end_all(namespace)
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)
    shutil.rmtree(_ETC / namespace, ignore_errors=True)


def _sweep() -> None:
    """Remove the namespaces that dead owners left."""
    for folder in (_NAMESPACES, _ETC):
        for path in folder.glob(f"{_PREFIX}-*-*-*"):
            owner = path.name.split("-")[1]
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                _remove(path.name)


def _exit_by(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


class Namespaces:
    """``num_hosts`` hosts on each of ``networks`` switches, as a context manager of one thread."""

    TOOLS: tuple[str, ...] = ("ip",)
    """Programs that must be installed."""

    def __init__(self, num_hosts: int, *, networks: int = 1) -> None:
        if num_hosts < 1:
            raise ValueError(f"num_hosts = {num_hosts}: at least 1")
        self.num_hosts, self.networks = num_hosts, networks
        self._tag = f"{_PREFIX}-{os.getpid()}-{next(_SERIALS)}"
        self.switch = f"{self._tag}-switch"
        """The namespace of all switches."""
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if problem := why_unavailable(self.TOOLS):
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
        """Kill every process in the hosts and delete the hosts; repeated calls are harmless."""
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
        """Return the name of a host's namespace; -1 is the switch."""
        return self.switch if host < 0 else f"{self._tag}-{host}"

    def address(self, host: int, network: int = 0) -> str:
        """Return the address of the host's eth0, or eth1."""
        return f"10.{77 + network}.0.{host + 1}"

    @staticmethod
    def port(host: int, network: int = 0) -> str:
        """Return the port of the switch to which the host is connected."""
        return f"port{host}" + (f"-{network}" if network else "")

    def build(self) -> None:
        """Create the switches and hosts."""
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
        """Take a host's link up or down, at the switch."""
        run("ip", "-n", self.switch, "link", "set", self.port(host, network), "up" if up else "down")

    def kill_all(self, host: int) -> None:
        """Kill all processes in a host, as when its machine is lost; the host stays, empty."""
        _end_all(self.namespace(host))

    def start(
        self, host: int, command: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
    ) -> "subprocess.Popen[Any]":
        """Start a command in a host; it is killed with the host."""
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", **(environment or {})}
        enter = partial(enter_host, self.namespace(host), f"host{host}", os.getpid())
        return subprocess.Popen(command, env=environment, preexec_fn=enter, **options)

    def entering(self, host: int) -> list[str]:
        """Return the words to put before a command that is to run in a host."""
        return [sys.executable, "-Pm", __spec__.name, self.namespace(host), f"host{host}"]

    @contextmanager
    def network_of(self, host: int) -> Iterator[None]:
        """Move this thread, and what it starts, into the network of a host during the block."""
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
    """Move this process (of one thread) into a host for good."""
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
