"""Where the driver of a run is: the address it listens on, RUN/driver.json, and an agent's connection to it.

    10.0.0.7        any free port        host7:7000, [fd00::7]:7000        that port

The driver rewrites driver.json every second with a counter, so an agent that cannot reach the driver can
see whether it lives. Where drivers hold a lease, the file has the driver's term. An agent looks for a newer
driver while it is connected, because the current one may have lost its lease unnoticed. Once an agent
has seen term N, it ignores drivers with a lower term. A stale driver (term 3) may overwrite the file; the
current driver rewrites it within a second, and the stale one then steps down.

    the driver's process is gone      its machine answers: refused, reset, closed. Ranks continue until the
                                      next driver is there
    its machine does not answer       it does not receive this node's heartbeats either. After its time limit
                                      for them it gives the node up, so the ranks here end

Both sides use only their own clock. Until then the kernel retransmits (TCP_USER_TIMEOUT), so a cable that was
out for two seconds is not noticed. Where another machine may take over (`leadership`), ranks continue for as
long as that takes, unless driver.json shows that the driver lives. The file is read and written in threads,
as the folder may hang.
"""

import asyncio
import errno
import json
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address
from itertools import count
from pathlib import Path
from typing import Any

from myriad.doctor.hardware import find_nics
from myriad.errors import BadInputError, RunFailedError
from myriad.supervise.authenticated_link import AuthenticatedLink
from myriad.system.whole_file import read_json, write_whole
from myriad.wire.run_secret import run_secret

__all__ = [
    "AddressFile",
    "DriverConnection",
    "DriverLostError",
    "agent_name",
    "check_listen",
    "interface_of",
    "read_address",
    "see_newer",
    "split_listen",
]

_REWRITE_SECONDS = _POLL_SECONDS = 1.0
_MOST_SECONDS = 1e6


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST_SECONDS


_RIGHT: dict[str, Callable[[object], bool]] = {
    "host": lambda value: isinstance(value, str) and value.isprintable(),
    "port": lambda value: _is_count(value, 2**16 - 1),
    "term": lambda value: _is_count(value, 2**53),
    "silent_seconds": _is_seconds,
    "alone_seconds": _is_seconds,
}
"""Checks of the values on which readers of the file rely."""


def read_address(run: Path) -> dict[str, Any]:
    """Return the address that the newest driver has written. Raises ``OSError`` and ``ValueError``."""
    found = read_json(run / "driver.json")
    if found is None:
        raise FileNotFoundError(f"{run} has no driver.json")
    if not isinstance(found, dict):
        raise ValueError("driver.json is no object")
    if wrong := [key for key, is_right in _RIGHT.items() if key in found and not is_right(found[key])]:
        raise ValueError(f"{wrong[0]} of driver.json is {ascii(found[wrong[0]])[:80]}")
    return found


class AddressFile:
    """Keeps driver.json up to date for one driver."""

    def __init__(self, run: Path, address: Mapping[str, Any]) -> None:
        """Write the file. Raises ``OSError`` if there is no room and no file of an earlier driver to
        overwrite."""
        self._run, self._address = run, dict(address)
        self._write()

    def _write(self) -> None:
        path, content = self._run / "driver.json", json.dumps(self._address)
        try:
            write_whole(path, content)
        except OSError:
            _overwrite(path, content)

    def repeat(self, while_true: Callable[[], bool], lose: Callable[[], object]) -> None:
        """Rewrite the file each second. If another driver with a higher term appears, call ``lose`` and
        stop."""
        threading.Thread(
            target=self._repeat, args=(while_true, lose), name="address file", daemon=True
        ).start()

    def _repeat(self, while_true: Callable[[], bool], lose: Callable[[], object]) -> None:
        for beat in count():
            time.sleep(_REWRITE_SECONDS)
            if not while_true():
                return
            self._address["beat"] = beat
            with suppress(OSError, ValueError, TypeError, KeyError):
                if read_address(self._run)["term"] > self._address["term"]:
                    lose()
                    return
            with suppress(OSError):
                self._write()


def _overwrite(path: Path, content: str) -> None:
    """Overwrite a small file in place, which needs no room on a full disk; a reader that finds a torn file
    tries again. Raises ``OSError``."""
    with open(path, "r+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        file.write(content.encode().ljust(size))
        os.fsync(file.fileno())


def see_newer(run: Path, term: int, report: Callable[[], object], is_over: Callable[[], bool]) -> None:
    """Start a thread that calls ``report`` when a driver has a higher term, unless ``is_over`` returns true
    before."""

    def watch_file() -> None:
        while not is_over():
            with suppress(OSError, ValueError, TypeError, KeyError):
                if read_address(run)["term"] > term:
                    report()
                    return
            time.sleep(_POLL_SECONDS)

    threading.Thread(target=watch_file, name="newer driver", daemon=True).start()


_CONNECT_SECONDS = 2.0
_PAUSE_RATIO, _MOST_PAUSE_SECONDS = 0.2, 0.1
"""Pause between two searches for a driver, as a share of the time without one. Where the launcher lives, a
new driver takes a sixth of a second, and a rank exit in that time is reported after this pause."""
_LEAST_PAUSE_SECONDS = 0.01
_BEAT_SECONDS = 1.0
"""Seconds between two heartbeats."""
_NO_ANSWER = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.ETIMEDOUT)


class DriverLostError(RunFailedError):
    """A node without ranks has waited too long for a driver."""


class DriverConnection:
    """The connection of one agent to the driver."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self.host = "127.0.0.1"
        """This node's address, as the driver and other nodes reach it."""
        self.interface: str | None = None
        """Network interface that has this address."""
        self._silent_seconds = self._alone_seconds = float("inf")
        self._term = 0
        self._beat: tuple[object, object] | None = None
        """Term and counter that driver.json had when the driver became unreachable."""
        self._lives = False
        """Whether that counter has changed since, so the driver lives."""
        self._answered_at = self._linked_at = time.monotonic()
        self._is_linked = False

    @asynccontextmanager
    async def link(self) -> AsyncIterator[AuthenticatedLink]:
        """Connect to the present driver, with mutual authentication. Raises ``OSError``, ``ValueError`` and
        ``KeyError``, also inside the block; the caller then calls `failed`."""
        address = read_address(self._run)
        self._note_beat(address.get("term"), address.get("beat"))
        if 0 < address.get("term", 0) < self._term:
            raise TimeoutError("the driver has lost its lease, and its successor is not known yet")
        async with asyncio.timeout(_CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(address["host"], address["port"])
        link = AuthenticatedLink(reader, writer)
        try:
            silent = float(address["silent_seconds"])
            # the driver counts from the last heartbeat it received, the kernel from the first one unanswered
            patience_ms = int((silent - _BEAT_SECONDS) * 1000)
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_ms)
            await link.connect(run_secret(self._run / "secret"), encrypts=address.get("encrypt") is True)
            self.host, self._silent_seconds = writer.get_extra_info("sockname")[0], silent
            self.interface = interface_of(self.host)
            self._alone_seconds = float(address.get("alone_seconds", silent))
            self._is_linked, self._term = True, int(address.get("term", 0))
            self._beat, self._lives = None, False
            if self._term:
                see_newer(self._run, self._term, self._abort_from_thread(link), link.is_closing)
            yield link
        finally:
            link.close()

    def _note_beat(self, term: object, beat: object) -> None:
        if self._beat is None or self._beat[0] != term:  # nothing is known yet about another driver
            self._beat, self._lives = (term, beat), False
        self._lives |= self._beat[1] != beat

    @staticmethod
    def _abort_from_thread(link: AuthenticatedLink) -> Callable[[], object]:
        loop = asyncio.get_running_loop()
        return lambda: loop.call_soon_threadsafe(link.abort)

    def failed(self, error: Exception) -> None:
        """Record that a connection failed or was lost."""
        now = time.monotonic()
        silent = isinstance(error, TimeoutError) or (isinstance(error, OSError) and error.errno in _NO_ANSWER)
        if self._is_linked:
            self._is_linked, self._linked_at = False, now
            self._answered_at = now - self._silent_seconds if silent else now
        elif not silent:
            self._answered_at = now

    def is_cut_off(self) -> bool:
        """Return whether the driver's machine has been unreachable for so long that the driver has given this
        node up. If that machine may be lost, allow the time that a takeover needs."""
        patience = self._silent_seconds if self._lives else self._alone_seconds
        return time.monotonic() - self._answered_at >= patience

    def pause_seconds(self) -> float:
        """Return the pause before the next search for a driver."""
        return min(_MOST_PAUSE_SECONDS, max(_LEAST_PAUSE_SECONDS, self.seconds_disconnected() * _PAUSE_RATIO))

    def seconds_disconnected(self) -> float:
        """Return the seconds since the last connection to a driver."""
        return time.monotonic() - self._linked_at


def agent_name() -> str:
    """Return the name of this process among all agents of a run."""
    return f"{socket.gethostname()}:{os.getpid()}"


def interface_of(address: str) -> str | None:
    """Return the network interface that has this address; ``None`` if it is unknown."""
    if ip_address(address.partition("%")[0]).is_loopback:
        return "lo"
    return next((nic.name for nic in find_nics() if nic.address == address), None)


_KEY = "resilience.listen"
_ALLOWED = "an address or a host name of this machine, as in 10.0.0.7 or 10.0.0.7:7000"


def split_listen(listen: str) -> tuple[str, int]:
    """Split an address into host and port; port 0: any. Raises `BadInputError`."""
    host, port = listen, ""
    if listen.startswith("["):
        host, _, port = listen[1:].partition("]")
        port = port.removeprefix(":")
    elif listen.count(":") == 1:
        host, _, port = listen.partition(":")
    if not host or (port and not (port.isascii() and port.isdigit() and int(port) < 2**16)):
        raise BadInputError(_KEY, listen, _ALLOWED)
    return host, int(port or 0)


def check_listen(listen: str) -> None:
    """Check that a driver can listen at this address and be reached at it. Raises `BadInputError`."""
    host, port = split_listen(listen)
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise BadInputError(_KEY, listen, f"{_ALLOWED} ({error.strerror})") from None
    found = ip_address(str(address[0]).partition("%")[0])
    if found.is_unspecified:
        raise BadInputError(_KEY, listen, f"{_ALLOWED}: nodes must know one to connect to")
    if found.is_loopback and host not in (str(found), "localhost"):
        raise BadInputError(
            _KEY, listen, f"means {found} here, which other machines cannot reach; give an address"
        )
    _bind(listen, family, address)


def _bind(listen: str, family: socket.AddressFamily, address: tuple[object, ...]) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise BadInputError(_KEY, listen, "another program listens at this port") from None
            why = "no address of this machine" if error.errno == errno.EADDRNOTAVAIL else error.strerror
            raise BadInputError(_KEY, listen, f"{_ALLOWED} ({why})") from None
