"""An executor's way to the driver, and what it means when there is none.

    the driver's process is gone    its machine answers: refused, reset, closed. Ranks go on; another driver
                                    comes
    its machine does not answer     nor does it hear this node's beats. After as long as it waits for them it
                                    gives the node up, so the ranks here are nobody's: they end

Both sides go by their own clock alone. Until then the kernel repeats what is on the way (TCP_USER_TIMEOUT),
so that a cable that was out for two seconds is not noticed. Where another machine may have taken the driver's
place (`tenure.py`), ranks go on for as long as that takes, unless driver.json shows that the driver lives;
who was seen to drive is followed by none before it.
"""

import asyncio
import errno
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path

from myriad.errors import RunFailedError
from myriad.resilience.doctor.hardware import find_nics
from myriad.resilience.herald import read_address, see_newer
from myriad.resilience.wire import Link, run_secret

__all__ = ["DriverLostError", "Reach", "executor_name", "interface_of"]

_CONNECT_SECONDS = 2.0
_PAUSE_RATIO, _MOST_PAUSE_SECONDS = 0.2, 0.1
"""Another driver is looked for when this executor has been alone for so much longer: one takes a sixth of a
second to come where its engine lives, and a rank that has ended meanwhile is told by then."""
_LEAST_PAUSE_SECONDS = 0.01
_BEAT_SECONDS = 1.0
"""Between two beats."""
_NO_ANSWER = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.ETIMEDOUT)


class DriverLostError(RunFailedError):
    """A node without ranks has waited for a driver in vain."""


class Reach:
    """Of one executor."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self.host = "127.0.0.1"
        """This node's address, as the driver and other nodes reach it."""
        self.interface: str | None = None
        """That has it."""
        self._silent_seconds = self._alone_seconds = float("inf")
        self._term = 0
        self._beat: tuple[object, object] | None = None
        """Of the driver that cannot be reached, as driver.json told it first."""
        self._lives = False
        """That one has gone on since."""
        self._answered_at = self._linked_at = time.monotonic()
        self._is_linked = False

    @asynccontextmanager
    async def link(self) -> AsyncIterator[Link]:
        """To the driver that there is now; each has shown the other that it knows the secret. Raises
        ``OSError``, ``ValueError`` and ``KeyError``, also inside: then `failed` is to be told."""
        address = read_address(self._run)
        self._note_beat(address.get("term"), address.get("beat"))
        if 0 < address.get("term", 0) < self._term:
            raise TimeoutError("a driver that has lost its lease; nothing is known of the other yet")
        async with asyncio.timeout(_CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(address["host"], address["port"])
        link = Link(reader, writer)
        try:
            silent = float(address["silent_seconds"])
            # the driver counts from the last beat that it heard, the kernel from the first that it did not
            patience_ms = int((silent - _BEAT_SECONDS) * 1000)
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_ms)
            await link.prove(run_secret(self._run / "secret"), "executor", "driver")
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
        if self._beat is None or self._beat[0] != term:  # of another driver nothing is known yet
            self._beat, self._lives = (term, beat), False
        self._lives |= self._beat[1] != beat

    @staticmethod
    def _abort_from_thread(link: Link) -> Callable[[], object]:
        loop = asyncio.get_running_loop()
        return lambda: loop.call_soon_threadsafe(link.abort)

    def failed(self, error: Exception) -> None:
        """There is no link, or no longer."""
        now = time.monotonic()
        silent = isinstance(error, TimeoutError) or (isinstance(error, OSError) and error.errno in _NO_ANSWER)
        if self._is_linked:
            self._is_linked, self._linked_at = False, now
            self._answered_at = now - self._silent_seconds if silent else now
        elif not silent:
            self._answered_at = now

    def is_cut_off(self) -> bool:
        """The driver's machine has not answered for as long as the driver waits for this one; if that may be
        lost, for as long as another takes to come."""
        patience = self._silent_seconds if self._lives else self._alone_seconds
        return time.monotonic() - self._answered_at >= patience

    def pause_seconds(self) -> float:
        """Until a driver is looked for again."""
        return min(_MOST_PAUSE_SECONDS, max(_LEAST_PAUSE_SECONDS, self.seconds_alone() * _PAUSE_RATIO))

    def seconds_alone(self) -> float:
        """Since there was a driver."""
        return time.monotonic() - self._linked_at


def executor_name() -> str:
    """Of this process, among all of a run."""
    return f"{socket.gethostname()}:{os.getpid()}"


def interface_of(address: str) -> str | None:
    """The network interface that has this address; ``None`` when that cannot be told."""
    if ip_address(address.partition("%")[0]).is_loopback:
        return "lo"
    return next((nic.name for nic in find_nics() if nic.address == address), None)
