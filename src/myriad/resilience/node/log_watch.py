"""The node agent's end of the process that searches the logs of its ranks: started, fed, and what it finds
written as events.

    log_scan ──{"what": "NCCL", "rank": 3, "text": ..., "count": 1}──► LogWatch ──► RUN/events.jsonl
                 with the step that the rank is in, by its row of the progress page

The process is started with the first ranks, and again a minute after it ended. Events go through a scribe: a
disk that hangs holds up nothing.
"""

import asyncio
import json
import logging
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from myriad.alerts.config import AlertsConfig
from myriad.resilience.drive.scribe import Scribe
from myriad.resilience.node.log_scan import KERNEL
from myriad.run import Run

__all__ = ["LogWatch"]

_LOG = logging.getLogger(__name__)
_AGAIN_SECONDS = 60.0
_MOST_RANKS = 16
"""Ranks in an event."""
StepOf = Callable[[int], int]


class LogWatch:
    """Searches the logs of one node's ranks."""

    def __init__(
        self,
        run: Run,
        node: int,
        step_of: StepOf,
        rank_of: Callable[[int], int],
        scribe: Scribe | None = None,
    ) -> None:
        """``step_of``: the step that a rank is in, -1: none; ``rank_of``: the rank with a process id, -1:
        none."""
        self._run, self._node, self._step_of, self._rank_of = run, node, step_of, rank_of
        self._scribe = scribe or Scribe()
        self._begun = asyncio.Event()
        self._epoch, self._files = 0, list[tuple[int, Path]]()
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = list[subprocess.Popen[bytes]]()

    def begin(self, epoch: int, ranks: Sequence[int]) -> None:
        """Other ranks start: their logs are searched from now on."""
        self._epoch = epoch
        self._files = [(rank, self._run.log_path(rank, epoch)) for rank in ranks]
        self._begun.set()
        self._send_files()

    async def watch(self) -> None:
        """Read what the process finds, for as long as the node agent lives."""
        await self._begun.wait()
        from_end = False
        while True:
            with suppress(OSError, ValueError, KeyError, TypeError):
                await self._listen(from_end=from_end)
            from_end = True  # what was found before is not reported again
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _listen(self, *, from_end: bool) -> None:
        words = [sys.executable, "-m", "myriad.resilience.node.log_scan", str(os.getpid())]
        process = self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        lines, loop = asyncio.StreamReader(), asyncio.get_running_loop()
        pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), process.stdout)
        try:
            self._send(self._patterns())
            self._send_files(from_end=from_end)
            while line := await lines.readline():
                self._note(json.loads(line))
            _LOG.warning("the process that searches logs for errors has ended")
        finally:
            self._process = None
            pipe.close()
            process.stdin.close()
            process.kill()
            # It may hang in a disk, where nothing can be killed: it is not waited for.
            self._ended = [one for one in (*self._ended, process) if one.poll() is None]

    def _patterns(self) -> dict[str, Any]:
        """Return the job's own patterns, which were checked when the run started."""
        try:
            tree = tomllib.loads(self._run.job_path.read_text())
            alerts = AlertsConfig.model_validate(tree.get("alerts", {}))
        except (OSError, ValueError) as error:
            _LOG.warning("the job's own log patterns are not known: %s", error)
            alerts = AlertsConfig()
        return {"patterns": list(alerts.log_patterns), "ignore": list(alerts.log_ignore)}

    def _send_files(self, *, from_end: bool = False) -> None:
        files = [[rank, str(path)] for rank, path in self._files]
        self._send({"epoch": self._epoch, "files": files, "from_end": from_end})

    def _send(self, message: dict[str, Any]) -> None:
        if self._process is None or self._process.stdin is None:
            return
        try:
            os.write(self._process.stdin.fileno(), json.dumps(message).encode() + b"\n")
        except OSError:  # it has ended, or hangs, and is started again
            self._process.kill()

    def _note(self, found: dict[str, Any]) -> None:
        """Write an event about a line that matches."""
        rank, ranks = int(found["rank"]), [int(one) for one in found["ranks"] if int(one) != KERNEL]
        epoch = int(found["epoch"])  # what is left of the last attempt comes after the next one has begun
        fields: dict[str, Any] = {"what": str(found["what"]), "node": self._node, "epoch": epoch}
        if rank == KERNEL:
            fields["log"] = "kernel"
            rank = self._rank_of(int(found["pid"])) if found["pid"] else -1
        else:
            fields["log"] = self._run.log_path(rank, epoch).name
        if rank >= 0:
            fields["rank"] = rank
        if rank >= 0 and epoch == self._epoch:
            fields["step"] = self._step_of(rank)
        if len(ranks) > 1:
            fields["ranks"] = sorted(ranks)[:_MOST_RANKS]
        self._scribe.enter_event(
            self._run, "log_match", **fields, count=int(found["count"]), problem=str(found["text"])
        )
