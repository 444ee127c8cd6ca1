"""The node agent's end of the process that searches the logs of its ranks: starts it, sends it the files, and
writes its findings as events.

    log_scan ──{"what": "NCCL", "rank": 3, "text": ..., "count": 1}──► LogMonitor ──► RUN/events.jsonl
                 with the step that the rank is in, by its row of the progress page

The process is started with the first ranks, and again a minute after it ended. Another
thread writes the events, so a disk that hangs does not block the agent.
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
from myriad.run import Run
from myriad.supervise.agent.log_scan import KERNEL
from myriad.supervise.background import AsyncWriter

__all__ = ["LogMonitor"]

_LOG = logging.getLogger(__name__)
_AGAIN_SECONDS = 60.0
_MOST_RANKS = 16
"""Most ranks that an event lists."""
StepOf = Callable[[int], int]


class LogMonitor:
    """Searches the logs of one node's ranks."""

    def __init__(
        self,
        run: Run,
        node: int,
        step_of: StepOf,
        rank_of: Callable[[int], int],
        disk_writer: AsyncWriter | None = None,
    ) -> None:
        """``step_of``: returns the step of a rank, or -1. ``rank_of``: returns the rank with a process id, or
        -1."""
        self._run, self._node, self._step_of, self._rank_of = run, node, step_of, rank_of
        self._disk_writer = disk_writer or AsyncWriter()
        self._begun = asyncio.Event()
        self._epoch, self._files = 0, list[tuple[int, Path]]()
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = list[subprocess.Popen[bytes]]()

    def begin(self, epoch: int, ranks: Sequence[int]) -> None:
        """Search the logs of the ranks of a new attempt from now on."""
        self._epoch = epoch
        self._files = [(rank, self._run.log_path(rank, epoch)) for rank in ranks]
        self._begun.set()
        self._send_files()

    async def watch(self) -> None:
        """Read what the process finds until the node agent ends."""
        await self._begun.wait()
        from_end = False
        while True:
            with suppress(OSError, ValueError, KeyError, TypeError):
                await self._listen(from_end=from_end)
            from_end = True  # messages that were already found are not reported again
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _listen(self, *, from_end: bool) -> None:
        words = [sys.executable, "-Pm", "myriad.supervise.agent.log_scan", str(os.getpid())]
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
            # Do not wait for it: it may hang in a disk access, in which it cannot be killed.
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
        except OSError:  # the process has ended or hangs; another one is started
            self._process.kill()

    def _note(self, found: dict[str, Any]) -> None:
        """Write an event about a line that matches."""
        rank, ranks = int(found["rank"]), [int(one) for one in found["ranks"] if int(one) != KERNEL]
        epoch = int(found["epoch"])  # a message of the last attempt may arrive after the next one has begun
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
        self._disk_writer.enter_event(
            self._run, "log_match", **fields, count=int(found["count"]), problem=str(found["text"])
        )
