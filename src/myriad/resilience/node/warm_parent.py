"""The executor's end of the process that ranks are forked from (`myriad.resilience.node.warm`)."""

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from myriad.processes import WatchClock, open_log, process_cpu_ticks

__all__ = ["WarmParent"]

_MESSAGE_BYTES = 2**16
_LONGEST_LOOK_SECONDS = 2.0
"""A look that comes later was held up itself."""
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Libraries that start threads when they are imported: a process with threads cannot be forked safely."""


class WarmParent:
    """One of them; when it is gone, so are its ranks."""

    def __init__(
        self, run: Path, command: Sequence[str], shared: Sequence[int], threads: int, log: Path
    ) -> None:
        """``shared``: descriptors of memory that ranks write for the executor."""
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        module = [sys.executable, "-m", "myriad.resilience.node.warm", str(os.getpid()), str(theirs.fileno())]
        with open(open_log(log), "ab") as stream:
            self._process = subprocess.Popen(
                [*module, str(run), *command],
                pass_fds=[theirs.fileno(), *shared],
                env={**os.environ, **_ONE_THREAD, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        theirs.close()
        self.channel.setblocking(False)
        self._clock, self._is_asked = WatchClock(_LONGEST_LOOK_SECONDS), False
        self._has_answered, self._idle_since, self._ticks = False, 0.0, -1

    def fork(self, rank: int, environment: dict[str, str], log: Path) -> None:
        """A rank; `receive` tells its number."""
        self._send({"fork": rank, "environment": environment, "log": str(log)})

    def signal(self, ranks: Sequence[int], number: int) -> None:
        """To ranks, and to what they have started."""
        self._send({"signal": number, "ranks": list(ranks)})

    def ping(self) -> float | None:
        """Seconds for which it has not answered and has used no processor time; ``None`` while it still
        imports, which takes an unknown time. To be called each second."""
        now, ticks = self._clock.look(), process_cpu_ticks(self.pid)
        if ticks != self._ticks or not self._is_asked:
            self._ticks, self._idle_since = ticks, now
        if not self._is_asked:
            self._is_asked = True
            self._send({"ping": 0})
        return now - self._idle_since if self._has_answered else None

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        with suppress(OSError):  # it is gone, and its ranks with it: `receive` says so
            while True:
                try:
                    self.channel.send(data)
                    return
                except BlockingIOError:  # it is still importing, and many wait
                    select.select([], [self.channel], [])

    def receive(self) -> list[dict[str, Any]] | None:
        """What it has told since; ``None``: it is gone."""
        found: list[dict[str, Any]] = []
        while True:
            try:
                data = self.channel.recv(_MESSAGE_BYTES)
            except BlockingIOError:
                return found
            except OSError:
                return found or None
            if not data:
                return found or None
            message = json.loads(data)
            if "pong" in message:
                self._is_asked, self._has_answered = False, True
            else:
                found.append(message)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def kill(self) -> None:
        """It, and its ranks; `receive` tells the rest."""
        self._process.kill()

    def close(self) -> None:
        """Ends it, and its ranks."""
        self.channel.close()
        self._process.kill()
        self._process.wait()
