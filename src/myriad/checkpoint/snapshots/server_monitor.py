"""Detect a snapshot server that is stopped or hung, and continue or kill it. Without torch.

    each second   state in /proc ── T for 1.5 s ──► SIGCONT: its snapshots are intact   "continued"
                                    and again   ──► SIGKILL                             "killed"
                  (a server that has run since the last poll is slow, not stopped)
                  ping ── no answer for 5 s, in which it used no processor time         "killed"
                       ── no answer for 60 s, whatever it does                          "killed"

The node agent watches its node's server this way, even while no rank sends a request. Ranks started by
another launcher have no agent: a request checks the server's state while it waits (`StallDetector`). Its
limits are longer, so that an agent acts first. A rank that needs a server that has ended starts a new one.
The process is addressed by a pidfd, so a process id that the kernel has reused is never signalled.
"""

import os
import signal
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

from myriad.system.processes import PausableClock, StopTimer, process_cpu_ticks
from myriad.wire.socket_channel import Closed, SocketChannel

__all__ = [
    "ServerEvent",
    "ServerKilledError",
    "ServerProcess",
    "SnapshotServerMonitor",
    "StallDetector",
    "await_answer",
]

_STOPPED_SECONDS, _REQUEST_STOPPED_SECONDS = 1.5, 3.5
_IDLE_SECONDS, _BUSY_SECONDS = 5.0, 60.0
_READ_SECONDS, _SLICE_SECONDS = 1.0, 0.5
_LONGEST_POLL_SECONDS = 2.0
"""A check that runs later than this was itself delayed, so its measurements are not used."""


class ServerProcess:
    """The process that listens at the other end of a unix socket."""

    def __init__(self, connection: socket.socket) -> None:
        size = struct.calcsize("3i")
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        self.pid: int = struct.unpack("3i", credentials)[0]
        """0 if the process is in another PID namespace and cannot be signalled."""
        self._descriptor: int | None = None
        self._stopped = StopTimer()
        if self.pid and self.pid != os.getpid():  # a server in this process is never signalled
            with suppress(OSError):
                self._descriptor = os.pidfd_open(self.pid)

    def seconds_stopped(self, now: float) -> float | None:
        """Return for how long it has been stopped by SIGSTOP or SIGTSTP; ``None``: it is not stopped."""
        return self._stopped.poll(self.pid, now) if self._descriptor is not None else None

    @property
    def cpu_ticks(self) -> int:
        """Processor time that the process has used, in clock ticks; -1: unknown."""
        return process_cpu_ticks(self.pid) if self._descriptor is not None else -1

    def send_signal(self, number: signal.Signals) -> None:
        """Signal this process, and never another one that reuses its process id."""
        if self._descriptor is not None:
            with suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._descriptor, number)

    def close(self) -> None:
        """Close the descriptor of the process."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@dataclass(frozen=True)
class ServerEvent:
    """The problem of a server and the action that was taken."""

    pid: int
    why: str
    killed: bool

    @property
    def problem(self) -> str:
        """Describe the problem and the action. Killing a server loses the snapshots in its memory."""
        done = (
            "it is killed and its snapshots in memory are lost; a rank starts another one"
            if self.killed
            else "it is continued (SIGCONT), and its snapshots in memory are intact"
        )
        return f"the snapshot server (pid {self.pid}) {self.why}: {done}"


class ServerKilledError(Closed):
    """The server did not answer and was killed."""

    def __init__(self, event: ServerEvent) -> None:
        super().__init__(event.problem)
        self.event = event


class StallDetector:
    """Detects that the answer of a server is overdue, for one connection."""

    def __init__(self, process: ServerProcess, timeout_scale: float = 1.0) -> None:
        """``set_timeout`` scales all timeouts."""
        self.process, self._timeout_scale = process, timeout_scale
        self._was_continued = False

    def poll(
        self, now: float, asked_at: float | None, seconds: float, stopped_seconds: float
    ) -> ServerEvent | None:
        """Continue or kill a server that is stopped, or kill one that has not answered.

        ``asked_at``: time of the open request; ``None``: there is none. ``seconds``: its time limit."""
        if (stopped := self.process.seconds_stopped(now)) is not None:
            return self._act(stopped) if stopped >= stopped_seconds * self._timeout_scale else None
        if asked_at is not None and now - asked_at >= seconds * self._timeout_scale:
            return self.kill(f"has not answered for {now - asked_at:.0f} s")
        return None

    def kill(self, why: str) -> ServerEvent:
        """Kill the snapshot server, and return the event that says why."""
        self.process.send_signal(signal.SIGKILL)
        return ServerEvent(self.process.pid, why, killed=True)

    def _act(self, stopped: float) -> ServerEvent:
        if self._was_continued:
            return self.kill(f"was stopped (SIGSTOP) again for {stopped:.1f} s")
        self._was_continued = True
        self.process.send_signal(signal.SIGCONT)
        return ServerEvent(self.process.pid, f"was stopped (SIGSTOP) for {stopped:.1f} s", killed=False)


class SnapshotServerMonitor:
    """Watches the snapshot server of a name, whichever process has it. Each socket call takes 1 s at most."""

    def __init__(self, name: str, timeout_scale: float = 1.0) -> None:
        self._name, self._timeout_scale = name, timeout_scale
        self._clock = PausableClock(_LONGEST_POLL_SECONDS)
        self._wire: SocketChannel | None = None
        self._asked_at: float | None = None
        self._ticks, self._idle_since = -1, 0.0

    def poll(self) -> ServerEvent | None:
        """Check the server and return the problem found, if any. Call it once a second."""
        now = self._clock.read()
        try:
            if self._wire is None and not self._connect():
                return None
            return self._poll(now)
        except OSError:  # the server has ended; a rank that needs one starts another
            self.close()
            return None

    def _connect(self) -> bool:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            connection.connect(f"\0{self._name}")
        except OSError:
            connection.close()
            return False
        self._wire = SocketChannel(connection)
        self._stalled = StallDetector(ServerProcess(connection), self._timeout_scale)
        self._asked_at = None
        return True

    def _poll(self, now: float) -> ServerEvent | None:
        assert self._wire is not None
        if self._asked_at is not None and self._wire.has_arrived(0.0):
            self._wire.set_timeout(_READ_SECONDS)
            self._wire.receive()
            self._asked_at = None
        ticks = self._stalled.process.cpu_ticks
        if ticks != self._ticks or self._asked_at is None:
            self._ticks, self._idle_since = ticks, now
        if self._asked_at is None:
            self._wire.set_timeout(_READ_SECONDS)
            self._wire.send({"op": "ping"})
            self._asked_at = now
        is_idle = now - self._idle_since >= _IDLE_SECONDS * self._timeout_scale
        found = self._stalled.poll(
            now, self._asked_at, _IDLE_SECONDS if is_idle else _BUSY_SECONDS, _STOPPED_SECONDS
        )
        if found is not None and not found.killed:
            self._asked_at = self._idle_since = now
        if found is not None and found.killed:
            self.close()
        return found

    def close(self) -> None:
        """Close the connection; the next `poll` opens another."""
        if self._wire is not None:
            self._wire.close()
            self._stalled.process.close()
            self._wire = None


def await_answer(wire: SocketChannel, stalled: StallDetector, seconds: float) -> ServerEvent | None:
    """Wait until an answer begins to arrive; return the problem found meanwhile, if any.

    Raises `ServerKilledError` if the server was stopped again or did not answer within ``seconds``."""
    clock, wrong = PausableClock(_LONGEST_POLL_SECONDS), None
    while not wire.has_arrived(_SLICE_SECONDS):
        found = stalled.poll(clock.read(), 0.0, seconds, _REQUEST_STOPPED_SECONDS)
        if found is not None and found.killed:
            raise ServerKilledError(found)
        wrong = found or wrong
    return wrong
