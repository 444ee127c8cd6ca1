"""Run a module as the ranks of this machine, once, for a command that computes in ranks without a run.

    command ──request, an unnamed file──► python -Pm MODULE    one process a rank
    command ◄──lines of JSON── rank       {"progress": ...}, {"warning": text}, {"result": ...} of rank 0
                                          {"refused": [key, value, allowed]}, {"failed": text} of any rank

Ranks have sessions of their own, so a Ctrl-C in the terminal reaches the command alone, which kills them.
If the command dies, the kernel kills them (`myriad.system.child_process`). There is no restart: the first
rank that fails ends all. What a rank prints is shown only if it ends without a message.
"""

import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from myriad.comm.free_port import free_port
from myriad.comm.groups import local_rank
from myriad.comm.rendezvous.store_secret import new_store_secret
from myriad.errors import BadInputError, MyriadError, RunFailedError
from myriad.supervise.exit_causes import count_memory_kills, error_excerpt, is_secondary
from myriad.system import child_process

__all__ = ["run_ranks_here"]

_LOG = logging.getLogger(__name__)

_CAUSE_SECONDS = 1.0
"""How long the others' messages are awaited after a rank has failed: the first to be noticed may have failed
because another one had."""
_END_SECONDS = 5.0


def run_ranks_here(module: str, world: int, request: bytes, show: Callable[[str, int, int], None]) -> Any:
    """Run ``world`` ranks and return the result of rank 0. ``request``: their input. ``show(stage, done,
    total)`` gets the progress. Raises `BadInputError` and `RunFailedError` as the ranks do, and
    `RunFailedError` for a rank that ended without a result."""
    kills, port, secret = count_memory_kills(), free_port(), new_store_secret()
    with ExitStack() as at_close:
        file = at_close.enter_context(tempfile.TemporaryFile())
        file.write(request)
        file.flush()
        ranks: list[_Rank] = []
        at_close.callback(lambda: _end(ranks))
        for number in range(world):
            log = at_close.enter_context(tempfile.TemporaryFile())
            ranks.append(_start(module, number, local_rank(number, world, port, secret), file, log))
        try:
            return _watch(ranks, show)
        except _RanksFailedError:
            raise _error(ranks, memory_killed=count_memory_kills() > kills) from None


class _RanksFailedError(Exception):
    """A rank has failed."""


@dataclass
class _Rank:
    """The process of a rank, and its last message that is not progress."""

    number: int
    process: "subprocess.Popen[bytes]"
    log: IO[bytes]
    unread: bytes = b""
    outcome: dict[str, Any] = field(default_factory=dict)

    def read(self) -> list[dict[str, Any]] | None:
        """Return the messages that have arrived; ``None``: the rank has ended."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 1 << 20)
        *lines, self.unread = (self.unread + data).split(b"\n")
        if not data:
            self.process.wait(_END_SECONDS)
            return None
        return [json.loads(line) for line in lines]

    @property
    def has_failed(self) -> bool:
        """Whether it has sent an error, or ended too early: rank 0 does so without a result."""
        code = self.process.returncode
        return bool(self.outcome) or (code is not None and (code != 0 or self.number == 0))

    @property
    def error(self) -> str:
        """The text of its error."""
        path = Path(f"/proc/self/fd/{self.log.fileno()}")  # the log has no name of its own
        return str(self.outcome.get("failed", "")) or error_excerpt(path)


def _start(
    module: str, number: int, environment: dict[str, str], request: IO[bytes], log: IO[bytes]
) -> _Rank:
    """Start a rank. The main thread calls it: a rank dies with the thread that starts it."""
    dying = [sys.executable, "-S", child_process.__file__, str(os.getpid())]
    process = subprocess.Popen(
        [*dying, sys.executable, "-Pm", module],
        env=os.environ | environment,
        stdin=request,
        stdout=subprocess.PIPE,
        stderr=log,
        start_new_session=True,
    )
    return _Rank(number, process, log)


def _watch(ranks: list[_Rank], show: Callable[[str, int, int], None]) -> Any:
    """Return the result as soon as rank 0 has sent it. Raises `_RanksFailedError`."""
    failed_at: float | None = None
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            assert rank.process.stdout is not None
            selector.register(rank.process.stdout, selectors.EVENT_READ, rank)
        while selector.get_map():
            left = None if failed_at is None else max(0.0, failed_at + _CAUSE_SECONDS - time.monotonic())
            for key, _ in (ready := selector.select(left)):
                messages = key.data.read()
                if messages is None:
                    selector.unregister(key.fileobj)
                for message in messages or ():
                    if "result" in message:
                        return message["result"]
                    if "progress" in message:
                        show(*message["progress"])
                    elif "warning" in message:
                        _LOG.warning("%s", message["warning"])
                    else:
                        key.data.outcome = message
            if failed_at is None and any(rank.has_failed for rank in ranks):
                failed_at = time.monotonic()
            if failed_at is not None and not ready:
                break
    raise _RanksFailedError


def _error(ranks: list[_Rank], *, memory_killed: bool) -> MyriadError:
    """Return the error of the rank that made the others fail: one that was killed, else one with an error of
    its own."""

    def severity(rank: _Rank) -> tuple[int, int]:
        secondary = is_secondary(rank.error)
        killed = (rank.process.returncode or 0) < 0 and not secondary
        return (0 if killed else 1 if "refused" in rank.outcome else 3 if secondary else 2), rank.number

    rank = min((rank for rank in ranks if rank.has_failed), key=severity, default=ranks[0])
    code, name = rank.process.returncode, f"rank {rank.number}"
    if "refused" in rank.outcome:
        return BadInputError(*rank.outcome["refused"])
    if "failed" in rank.outcome:
        return RunFailedError(f"{name}: {rank.error}")
    if code is not None and code < 0:
        full = ": this machine has no memory left" if memory_killed and -code == signal.SIGKILL else ""
        return RunFailedError(f"{name} was killed by {signal.Signals(-code).name}{full}")
    return RunFailedError(f"{name} failed: {rank.error}" if rank.error else f"{name} ended with {code}")


def _end(ranks: list[_Rank]) -> None:
    """Kill the ranks that still run, and wait for all."""
    for rank in ranks:
        rank.process.kill()
    for rank in ranks:
        with suppress(subprocess.TimeoutExpired):  # it hangs in the kernel, for example in a disk access
            rank.process.wait(_END_SECONDS)
        assert rank.process.stdout is not None
        rank.process.stdout.close()
