"""``python -m myriad.resilience.node.warm PARENT_PID CHANNEL RUN [COMMAND...]``: what ranks are forked from.

It has imported what a rank imports (a second or two) and nothing else: one thread, no process group, no
device touched, so that a fork of it is a rank in milliseconds. Ranks share its memory. They die with it, as
it dies with the executor.

    executor ──{"fork": rank, ...}, {"signal": n, "ranks": [...]}, {"ping": n}─────► warm
    executor ◄──{"forked": rank, "pid": ...}, {"ended": rank, ...}, {"pong": n}── warm

It reaps the ranks, so it alone can signal them without meeting a number that the kernel has given away. With
a COMMAND ranks are that program instead; it, too, gets the run folder as its last argument.
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
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from myriad.processes import log_stream, open_log
from myriad.resilience.engines.child import die_with_parent
from myriad.run import Run

__all__ = ["DUMP_SIGNAL", "main"]

DUMP_SIGNAL = signal.SIGUSR1
"""Makes a rank write the stacks of its threads into its log."""
_WORKER = "myriad.train.worker"
"""By name: it stands on the same floor, and no other process of this one needs it."""
_MESSAGE_BYTES = 2**16
_PR_SET_NAME = 15


class _Warm:
    """Forks, signals and reaps."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        self._ranks: dict[int, tuple[int, int]] = {}
        """Descriptor of a rank's process to its rank and number."""

    def serve(self) -> dict[str, Any] | None:
        """Gives, in a rank, what was asked of it; in this process ``None``, when the executor is gone."""
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
                    self._tell({"pong": message["ping"]})
                elif "fork" in message:
                    if self._fork(message) == 0:
                        return dict(message)
                else:
                    self._signal(message["ranks"], message["signal"])

    def _fork(self, message: dict[str, Any]) -> int:
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            os.setsid()  # the rank and what it starts can be ended together
            die_with_parent(parent)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the rank knows better
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            for descriptor in self._ranks:
                os.close(descriptor)
            self._channel.close()
            return 0
        descriptor = os.pidfd_open(pid)
        self._ranks[descriptor] = message["fork"], pid
        self._poll.register(descriptor, select.POLLIN)
        self._tell({"forked": message["fork"], "pid": pid})
        return pid

    def _reap(self, descriptor: int) -> None:
        """Ends what the rank has left behind while its number is still its own."""
        rank, pid = self._ranks.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        self._tell({"ended": rank, "pid": pid, "code": os.waitstatus_to_exitcode(status)})

    def _signal(self, ranks: list[int], number: int) -> None:
        for rank, pid in self._ranks.values():
            if rank in ranks:
                try:
                    os.kill(pid, number) if number == DUMP_SIGNAL else os.killpg(pid, number)
                except ProcessLookupError:  # it has no group of its own yet
                    os.kill(pid, number)

    def _tell(self, message: dict[str, Any]) -> None:
        self._channel.send(json.dumps(message).encode())


def _become_rank(request: dict[str, Any]) -> None:
    """Name, output and surroundings of its own."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"myriad-rank-{request['fork']}".encode())
    os.environ |= request["environment"]
    log = open_log(Path(request["log"]), anew=True)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout, sys.stderr = log_stream(1), log_stream(2)


def _train(worker: Any, run: str) -> NoReturn:
    """A rank's life. It ends at once: taking its modules apart one by one would take most of a second, in
    which nobody knows that it is dying."""
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
    """A rank's exit code in a rank."""
    die_with_parent(int(arguments[0]))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a Ctrl-C must not be lost in a fork
    signal.signal(DUMP_SIGNAL, signal.SIG_IGN)  # a COMMAND that does not know it shall live
    channel = socket.socket(fileno=int(arguments[1]))
    run, command = arguments[2], arguments[3:]
    gc.disable()  # an import makes much that stays: to look for garbage in it takes a fifth of its time
    worker = None if command else importlib.import_module(_WORKER)
    if worker is not None and Run(run).job().layout.pp > 1:
        importlib.import_module("torch._dynamo")  # to find the shapes between stages; half a second
    gc.freeze()  # a collection in a rank need not copy the pages of what all share
    gc.enable()
    request = _Warm(channel).serve()
    if request is None:
        return 0
    _become_rank(request)
    if worker is None:
        os.execvp(command[0], [*command, run])
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    if planned := os.environ.get("MYRIAD_FAULTS"):  # broken on purpose: `myriad faults run`
        importlib.import_module("myriad.resilience.faults.inside").arm(planned)
    _train(worker, run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
