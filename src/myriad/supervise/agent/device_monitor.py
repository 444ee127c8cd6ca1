"""Processes beside the node agent that look at its machine: the query of its devices, and the doctor.

    device_process ──a line each 5 s──► DeviceMonitor ──► heartbeats; warnings: events
                                                      ──► RUN/counters/gpus-N.jsonl, each 15 s
           no line for 30 s: reported as a trouble, too; the process is killed, and another starts a
           minute later

The agent can end the doctor's process (`Examination`) at any time. If the doctor itself fails (a missing
package, a bad file), the verdict is `unknown`.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from myriad.doctor.devices import DEVICES, provider_of
from myriad.run import Run
from myriad.supervise.agent.device_process import DeviceChange, DeviceWarning
from myriad.supervise.background import AsyncWriter
from myriad.supervise.observations import DeviceTrouble, Examined, How
from myriad.system.jsonl import append_line
from myriad.system.machine import machine_name
from myriad.wire.message_codec import read

__all__ = ["DeviceMonitor", "Examination"]

_LOG = logging.getLogger(__name__)
POLL_SECONDS = 5.0
_SILENT_SECONDS, _AGAIN_SECONDS = 30.0, 60.0
_MOST_KEPT = 64
"""Most troubles that are kept, so that a device which reports endlessly does not fill a heartbeat."""
_MOST_LINE_BYTES = 2**20
_WRITE_SECONDS = 15.0
_MOST_FILE_BYTES = 8 * 2**20
"""Size of gpus-N.jsonl: most of a day of eight devices. One older file of this size is kept."""


class DeviceMonitor:
    """Watches the devices of one node."""

    def __init__(
        self,
        node: int,
        silent_seconds: float = _SILENT_SECONDS,
        run: Run | None = None,
        disk_writer: AsyncWriter | None = None,
    ) -> None:
        """``run``: where warnings and measurements are written; ``None``: they are not written."""
        self._node, self._silent_seconds, self._run = node, silent_seconds, run
        self._disk_writer = disk_writer or (None if run is None else AsyncWriter())
        self._write_at = 0.0
        self._epoch, self._ranks = 0, tuple[int, ...]()
        self._lasting: dict[tuple[int, str], DeviceWarning] = {}
        """Warnings that have begun and not ended, by device and kind."""
        self._asked: list[subprocess.Popen[bytes]] = []
        """Device processes that have not ended."""
        self.found: tuple[DeviceTrouble, ...] = ()
        """Troubles reported since the current ranks started, and devices that are lost."""

    def begin(self, epoch: int, ranks: Sequence[int]) -> None:
        """Begin with the ranks of another attempt. Of the troubles found earlier, only lost devices are
        kept."""
        self._epoch, self._ranks = epoch, tuple(ranks)
        self.found = tuple(one for one in self.found if one.lost)

    async def watch(self) -> None:
        """Watch until cancelled; return at once if the node has no devices."""
        if provider_of(self._node) is None:
            return
        while True:
            with suppress(OSError, ValueError):
                await self._listen()
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _listen(self) -> None:
        """Read the lines of one process until it ends or stays silent for too long."""
        words = [
            sys.executable,
            "-Pm",
            "myriad.supervise.agent.device_process",
            str(self._node),
            str(os.getpid()),
            str(POLL_SECONDS),
        ]
        asked = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
        )
        self._asked.append(asked)
        lines, loop = asyncio.StreamReader(limit=_MOST_LINE_BYTES), asyncio.get_running_loop()
        pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), asked.stdout)
        try:
            while line := await asyncio.wait_for(lines.readline(), self._silent_seconds):
                sample = json.loads(line)
                for one in read(list[DeviceChange], sample["news"]):
                    self._add(one)
                for warned in read(list[DeviceWarning], sample["warnings"]):
                    self._warn(warned)
                self._write(sample["devices"])
            self._add(DeviceChange(-1, "unknown", "the process that asks for the devices has ended"))
        except TimeoutError:
            problem = f"the devices' driver has not answered for {self._silent_seconds:g} s"
            self._add(DeviceChange(-1, "unknown", problem))
        finally:
            for one in list(self._lasting.values()):  # no other process reports their end
                self._warn(replace(one, words=f"{one.kind} is not watched any more", over=True))
            pipe.close()
            asked.kill()
            # do not wait for it: it may hang in a state in which it cannot be killed
            self._asked = [one for one in self._asked if one.poll() is None]

    def _add(self, news: DeviceChange) -> None:
        rank = self._rank_of(news.device)
        trouble = DeviceTrouble(
            news.device, rank, self._epoch, news.blame, news.words, news.lost, news.can_wait
        )
        _LOG.warning("device %d (rank %d): %s", news.device, rank, news.words)
        if trouble not in self.found and len(self.found) < _MOST_KEPT:
            self.found += (trouble,)

    def _warn(self, warned: DeviceWarning) -> None:
        """Write an event about a warning, with the rank of the device."""
        rank = self._rank_of(warned.device)
        if warned.over is False:
            self._lasting[warned.device, warned.kind] = warned
        elif warned.over:
            self._lasting.pop((warned.device, warned.kind), None)
        who = f" (rank {rank})" if rank >= 0 else ""
        problem = f"device {warned.device} of node {self._node}{who}: {warned.words}"
        _LOG.warning("%s", problem)
        if self._run is not None and self._disk_writer is not None:
            fields: dict[str, Any] = {"what": "gpu", "node": self._node, "device": str(warned.device)}
            fields |= {"kind": warned.kind, **({} if rank < 0 else {"rank": rank})}
            fields |= {} if warned.over is None else {"over": warned.over}
            self._disk_writer.enter_event(self._run, "health", **fields, problem=problem)

    def _write(self, devices: Sequence[dict[str, Any]]) -> None:
        """Append a line to gpus-N.jsonl if it is due."""
        now = time.monotonic()
        if self._run is None or self._disk_writer is None or not devices or now < self._write_at:
            return
        self._write_at = now + _WRITE_SECONDS - 1.0
        path = self._run.counters_path / f"gpus-{self._node}.jsonl"
        self._disk_writer.enter("", partial(_append, path, {"time": time.time(), "gpus": list(devices)}))

    def _rank_of(self, device: int) -> int:
        """Return the rank of a device. Ranks take the visible devices in order. Simulated devices are visible
        even if CUDA's are hidden."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None or (not visible and DEVICES in os.environ):
            place = device
        else:
            words = [word.strip() for word in visible.split(",")]
            place = words.index(str(device)) if str(device) in words else -1
        return self._ranks[place] if 0 <= place < len(self._ranks) else -1


def _append(path: Path, line: dict[str, Any]) -> None:
    """Append a line. A file at its size limit replaces the older file first. Raises ``OSError``."""
    if path.exists() and path.stat().st_size > _MOST_FILE_BYTES:
        path.replace(path.with_suffix(f".before{path.suffix}"))
    path.parent.mkdir(parents=True, exist_ok=True)
    append_line(path, line)


_MOST_SECONDS = 300.0
_MOST_COMPLAINTS, _MOST_CHARACTERS = 16, 300


class Examination:
    """Examines one node, one examination at a time."""

    def __init__(self, node: int, folder: Path) -> None:
        self._node, self._folder = node, folder
        self._task: asyncio.Task[None] | None = None

    def begin(self, how: How, report: Callable[[Examined], None]) -> None:
        """Begin an examination, and pass its verdict to ``report``. An examination in progress is cancelled
        and not reported."""
        self.cancel()

        async def work() -> None:
            report(await self.made(how))

        self._task = asyncio.create_task(work())

    def cancel(self) -> None:
        """Cancel an examination, because ranks start here or the agent ends."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def made(self, how: How) -> Examined:
        """Run the doctor and return its verdict."""
        words = ["-Pm", "myriad.doctor.examine", str(self._folder), how, str(os.getpid())]
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(_MOST_SECONDS):
                output, errors = await child.communicate()
        except TimeoutError:
            return self._unknown(how, f"the doctor did not end in {_MOST_SECONDS:g} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        try:
            found = json.loads(output)
            return self._verdict(how, found)
        except (ValueError, KeyError, TypeError):
            last = errors.decode(errors="replace").strip().rpartition("\n")[2]
            return self._unknown(how, f"the doctor failed: {last[:_MOST_CHARACTERS]}")

    def _verdict(self, how: How, found: dict[str, Any]) -> Examined:
        bad = [item for item in found["items"] if item["verdict"] in ("slow", "bad") and not item["advisory"]]
        complaints = tuple(
            f"{item['name']}: {item['words']}"[:_MOST_CHARACTERS] for item in bad[:_MOST_COMPLAINTS]
        )
        verdict: Any = "unfit" if bad else "fit"
        return Examined(
            self._node, machine_name(), how, verdict, str(found["words"]), complaints, float(found["seconds"])
        )

    def _unknown(self, how: How, words: str) -> Examined:
        _LOG.warning("%s", words)
        return Examined(self._node, machine_name(), how, "unknown", words, (), 0.0)
