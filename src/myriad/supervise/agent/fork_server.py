"""``python -m myriad.supervise.agent.fork_server PARENT_PID CHANNEL RUN [COMMAND...]``: forks ranks.

The process has done the imports of a rank (a second or two) and nothing else: one thread, no process group,
no device in use. So a fork of it becomes a rank within milliseconds, and ranks share its memory. Ranks end
with the server, and the server ends with the agent. `ForkServer` is the agent's end of it.

    agent ──{"fork": rank, ...}, {"signal": n, "ranks": [...]}, {"ping": n}─────► fork server
    agent ◄──{"forked": rank, "pid": ...}, {"ended": rank, ...}, {"pong": n}── fork server

It reaps the ranks, so it alone can signal them without hitting a process id that the kernel has reused. With
a COMMAND, ranks run that program instead; it also gets the run folder as its last argument.
"""

import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from myriad.system.child_process import die_with_parent
from myriad.system.processes import PausableClock, log_stream, open_log, process_cpu_ticks

__all__ = ["DUMP_SIGNAL", "ForkServer", "main"]

DUMP_SIGNAL = signal.SIGUSR1
"""Signal on which a rank writes the stacks of its threads into its log."""
_WORKER = "myriad.train.worker"
"""Worker module. It is imported by name because it belongs to the same layer, and only the forked process
needs it."""
_MESSAGE_BYTES = 2**16
_PR_SET_NAME = 15


class _ForkServerProcess:
    """Forks, signals and reaps the ranks."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        self._ranks: dict[int, tuple[int, int]] = {}
        """Rank number and process id, by the pidfd of the process."""

    def serve(self) -> dict[str, Any] | None:
        """Serve requests. Return the fork request in a rank, and ``None`` in this process when the agent is
        gone."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._ranks:
                    self._reap(descriptor)
                    continue
                data = self._channel.recv(_MESSAGE_BYTES)
                if not data:
                    return None
                message = json.loads(data)
                if "ping" in message:
                    self._send({"pong": message["ping"]})
                elif "fork" in message:
                    if self._fork(message) == 0:
                        return dict(message)
                else:
                    self._signal(message["ranks"], message["signal"])

    def _fork(self, message: dict[str, Any]) -> int:
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            os.setsid()  # so that the rank and the processes it starts can be killed together
            die_with_parent(parent)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the rank installs its own handler
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            for descriptor in self._ranks:
                os.close(descriptor)
            self._channel.close()
            return 0
        descriptor = os.pidfd_open(pid)
        self._ranks[descriptor] = message["fork"], pid
        self._poll.register(descriptor, select.POLLIN)
        self._send({"forked": message["fork"], "pid": pid})
        return pid

    def _reap(self, descriptor: int) -> None:
        """Reap a rank. Kill the processes that it has left behind while its process id is not yet reused."""
        rank, pid = self._ranks.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        self._send({"ended": rank, "pid": pid, "code": os.waitstatus_to_exitcode(status)})

    def _signal(self, ranks: list[int], number: int) -> None:
        for rank, pid in self._ranks.values():
            if rank in ranks:
                try:
                    os.kill(pid, number) if number == DUMP_SIGNAL else os.killpg(pid, number)
                except ProcessLookupError:  # the rank has no process group yet
                    os.kill(pid, number)

    def _send(self, message: dict[str, Any]) -> None:
        self._channel.send(json.dumps(message).encode())


def _become_rank(request: dict[str, Any]) -> None:
    """Give the forked process its own name, environment and log."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"myriad-rank-{request['fork']}".encode())
    os.environ |= request["environment"]
    log = open_log(Path(request["log"]), truncate=True)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout, sys.stderr = log_stream(1), log_stream(2)


def _train(worker: Any, run: str) -> NoReturn:
    """Run the worker and exit at once. A normal interpreter shutdown would take most of a second, during
    which the exit would not be visible to any other process."""
    try:
        code = worker.main([run])
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(arguments: list[str]) -> int:
    """Run the fork server until the agent is gone; a forked rank runs the worker instead and exits."""
    die_with_parent(int(arguments[0]))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a Ctrl-C must not be lost during a fork
    signal.signal(DUMP_SIGNAL, signal.SIG_IGN)  # a COMMAND without a handler must survive the signal
    channel = socket.socket(fileno=int(arguments[1]))
    run, command = arguments[2], arguments[3:]
    # imports create many lasting objects: garbage collection would take a fifth of the import time
    gc.disable()
    worker = None if command else importlib.import_module(_WORKER)
    gc.freeze()  # a collection in a rank then does not copy the shared pages
    gc.enable()
    request = _ForkServerProcess(channel).serve()
    if request is None:
        return 0
    _become_rank(request)
    if worker is None:
        os.execvp(command[0], [*command, run])
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    if planned := os.environ.get("MYRIAD_FAULTS"):  # a planned fault of `myriad faults run`
        importlib.import_module("myriad.faults.rank_faults").arm(planned)
    _train(worker, run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


_LONGEST_POLL_SECONDS = 2.0
"""If two polls are further apart, this process itself was held up."""
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Keeps libraries from starting threads on import: a process with threads cannot be forked safely."""


class ForkServer:
    """The agent's end of a fork server. When the server ends, so do its ranks."""

    def __init__(
        self, run: Path, command: Sequence[str], shared: Sequence[int], threads: int, log: Path
    ) -> None:
        """``shared``: file descriptors of memory in which ranks write for the agent."""
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        module = [
            sys.executable,
            "-Pm",
            "myriad.supervise.agent.fork_server",
            str(os.getpid()),
            str(theirs.fileno()),
        ]
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
        self._clock, self._is_asked = PausableClock(_LONGEST_POLL_SECONDS), False
        self._has_answered, self._idle_since, self._ticks = False, 0.0, -1

    def fork(self, rank: int, environment: dict[str, str], log: Path) -> None:
        """Request a fork of a rank; `receive` reports its process id."""
        self._send({"fork": rank, "environment": environment, "log": str(log)})

    def signal(self, ranks: Sequence[int], number: int) -> None:
        """Send a signal to ranks and what they have started."""
        self._send({"signal": number, "ranks": list(ranks)})

    def ping(self) -> float | None:
        """Ping the server; call this method each second. Return the seconds for which it has neither answered
        nor used processor time. Return ``None`` while it still imports, which takes an unknown time."""
        now, ticks = self._clock.read(), process_cpu_ticks(self.pid)
        if ticks != self._ticks or not self._is_asked:
            self._ticks, self._idle_since = ticks, now
        if not self._is_asked:
            self._is_asked = True
            self._send({"ping": 0})
        return now - self._idle_since if self._has_answered else None

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        with suppress(OSError):  # the server is gone, and its ranks with it: `receive` reports that
            while True:
                try:
                    self.channel.send(data)
                    return
                except BlockingIOError:  # the server is still importing, and its queue is full
                    select.select([], [self.channel], [])

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the messages received since the last call; ``None``: the server is gone."""
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
        """Process id of the server."""
        return self._process.pid

    def kill(self) -> None:
        """Kill the server and its ranks; `receive` reports their exits."""
        self._process.kill()

    def close(self) -> None:
        """End the server and its ranks, and wait for the server."""
        self.channel.close()
        self._process.kill()
        self._process.wait()
