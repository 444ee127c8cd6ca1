"""The node agent's end of the process that asks for the node's devices (`device_process`).

device_process ──a line each 5 s──► DeviceWatch ──► beats; first signs of trouble: events
                                                ──► RUN/counters/gpus-N.jsonl, each 15 s
     no line for 30 s: reported as trouble of its own; the process is killed, and another starts a
     minute later
"""

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from myriad.jsonl import append_line
from myriad.resilience.codec import read
from myriad.resilience.doctor.devices import DEVICES, provider_of
from myriad.resilience.drive.scribe import Scribe
from myriad.resilience.facts import DeviceTrouble
from myriad.resilience.node.device_news import News
from myriad.resilience.node.gpu_warnings import Warned
from myriad.run import Run

__all__ = ["DeviceWatch"]

_LOG = logging.getLogger(__name__)
LOOK_SECONDS = 5.0
_SILENT_SECONDS, _AGAIN_SECONDS = 30.0, 60.0
_MOST_KEPT = 64
"""A device that reports without end fills no beat."""
_MOST_LINE_BYTES = 2**20
_WRITE_SECONDS = 15.0
_MOST_FILE_BYTES = 8 * 2**20
"""Size of gpus-N.jsonl: most of a day of eight devices. One older file of this size is kept."""


class DeviceWatch:
    """Watches the devices of one node."""

    def __init__(
        self,
        node: int,
        silent_seconds: float = _SILENT_SECONDS,
        run: Run | None = None,
        scribe: Scribe | None = None,
    ) -> None:
        """``run``: where warnings and what devices measure are written; off: nowhere."""
        self._node, self._silent_seconds, self._run = node, silent_seconds, run
        self._scribe = scribe or (None if run is None else Scribe())
        self._write_at = 0.0
        self._epoch, self._ranks = 0, tuple[int, ...]()
        self._lasting: dict[tuple[int, str], Warned] = {}
        """Warnings that have begun and not ended."""
        self._asked: list[subprocess.Popen[bytes]] = []
        """Processes that have not ended."""
        self.found: tuple[DeviceTrouble, ...] = ()
        """Trouble reported while these ranks were there, and devices that are lost."""

    def begin(self, epoch: int, ranks: Sequence[int]) -> None:
        """Note that other ranks start: of the trouble of the ranks before, only lost devices are kept."""
        self._epoch, self._ranks = epoch, tuple(ranks)
        self.found = tuple(one for one in self.found if one.lost)

    async def watch(self) -> None:
        """Watch until cancelled; return at once where there are no devices."""
        if provider_of(self._node) is None:
            return
        while True:
            with suppress(OSError, ValueError):
                await self._listen()
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _listen(self) -> None:
        """Read the lines of one process until it ends or writes nothing any more."""
        words = [
            sys.executable,
            "-m",
            "myriad.resilience.node.device_process",
            str(self._node),
            str(os.getpid()),
            str(LOOK_SECONDS),
        ]
        asked = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
        )
        self._asked.append(asked)
        lines, loop = asyncio.StreamReader(limit=_MOST_LINE_BYTES), asyncio.get_running_loop()
        pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), asked.stdout)
        try:
            while line := await asyncio.wait_for(lines.readline(), self._silent_seconds):
                look = json.loads(line)
                for one in read(list[News], look["news"]):
                    self._add(one)
                for warned in read(list[Warned], look["warnings"]):
                    self._warn(warned)
                self._write(look["devices"])
            self._add(News(-1, "unknown", "the process that asks for the devices has ended"))
        except TimeoutError:
            told = f"the devices' driver has not answered for {self._silent_seconds:g} s"
            self._add(News(-1, "unknown", told))
        finally:
            for one in list(self._lasting.values()):  # nothing else would ever end them
                self._warn(replace(one, words=f"{one.kind} is not watched any more", over=True))
            pipe.close()
            asked.kill()
            # it may hang where nothing can be killed: it is not waited for
            self._asked = [one for one in self._asked if one.poll() is None]

    def _add(self, news: News) -> None:
        rank = self._rank_of(news.device)
        trouble = DeviceTrouble(
            news.device, rank, self._epoch, news.blame, news.words, news.lost, news.can_wait
        )
        _LOG.warning("device %d (rank %d): %s", news.device, rank, news.words)
        if trouble not in self.found and len(self.found) < _MOST_KEPT:
            self.found += (trouble,)

    def _warn(self, warned: Warned) -> None:
        """Write an event, which the device's rank is named in."""
        rank = self._rank_of(warned.device)
        if warned.over is False:
            self._lasting[warned.device, warned.kind] = warned
        elif warned.over:
            self._lasting.pop((warned.device, warned.kind), None)
        who = f" (rank {rank})" if rank >= 0 else ""
        problem = f"device {warned.device} of node {self._node}{who}: {warned.words}"
        _LOG.warning("%s", problem)
        if self._run is not None and self._scribe is not None:
            fields: dict[str, Any] = {"what": "gpu", "node": self._node, "device": str(warned.device)}
            fields |= {"kind": warned.kind, **({} if rank < 0 else {"rank": rank})}
            fields |= {} if warned.over is None else {"over": warned.over}
            self._scribe.enter_event(self._run, "health", **fields, problem=problem)

    def _write(self, devices: Sequence[dict[str, Any]]) -> None:
        """Add a line to gpus-N.jsonl, now and then."""
        now = time.monotonic()
        if self._run is None or self._scribe is None or not devices or now < self._write_at:
            return
        self._write_at = now + _WRITE_SECONDS - 1.0
        path = self._run.counters_path / f"gpus-{self._node}.jsonl"
        self._scribe.enter("", partial(_append, path, {"time": time.time(), "gpus": list(devices)}))

    def _rank_of(self, device: int) -> int:
        """Ranks take the devices that they see in their order. Stand-ins are seen though CUDA's be hidden."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None or (not visible and DEVICES in os.environ):
            place = device
        else:
            words = [word.strip() for word in visible.split(",")]
            place = words.index(str(device)) if str(device) in words else -1
        return self._ranks[place] if 0 <= place < len(self._ranks) else -1


def _append(path: Path, line: dict[str, Any]) -> None:
    """Add a line; a file at its limit becomes the one before. Raises ``OSError``."""
    if path.exists() and path.stat().st_size > _MOST_FILE_BYTES:
        path.replace(path.with_suffix(f".before{path.suffix}"))
    path.parent.mkdir(parents=True, exist_ok=True)
    append_line(path, line)
