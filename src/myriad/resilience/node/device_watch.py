"""What an executor knows of its node's devices: what a process beside it tells (`device_process`), and
whether it tells anything.

    device_process ──a line each 5 s──► DeviceWatch ──► beats
         no line for 30 s: told as a sign of its own; it is killed, and another is tried a minute later
"""

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from myriad.resilience.codec import read
from myriad.resilience.doctor.devices import provider_of
from myriad.resilience.facts import DeviceTrouble
from myriad.resilience.node.device_news import News

__all__ = ["DeviceWatch"]

_LOG = logging.getLogger(__name__)
_SILENT_SECONDS, _AGAIN_SECONDS = 30.0, 60.0
_MOST_KEPT = 64
"""A device that reports without end fills no beat."""


class DeviceWatch:
    """Of one node."""

    def __init__(self, node: int, silent_seconds: float = _SILENT_SECONDS) -> None:
        self._node, self._silent_seconds = node, silent_seconds
        self._epoch, self._ranks = 0, tuple[int, ...]()
        self._asked: list[subprocess.Popen[bytes]] = []
        """That have not ended."""
        self.found: tuple[DeviceTrouble, ...] = ()
        """While these ranks were there; and what is lost."""

    def begin(self, epoch: int, ranks: Sequence[int]) -> None:
        """Other ranks are there: of what their predecessors saw only what is lost still matters."""
        self._epoch, self._ranks = epoch, tuple(ranks)
        self.found = tuple(one for one in self.found if one.lost)

    async def watch(self) -> None:
        """For ever; at once over where there are no devices."""
        if provider_of(self._node) is None:
            return
        while True:
            with suppress(OSError, ValueError):
                await self._listen()
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _listen(self) -> None:
        """To one process, until it ends, or says nothing any more."""
        words = [
            sys.executable,
            "-m",
            "myriad.resilience.node.device_process",
            str(self._node),
            str(os.getpid()),
        ]
        asked = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
        )
        self._asked.append(asked)
        lines, loop = asyncio.StreamReader(), asyncio.get_running_loop()
        pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), asked.stdout)
        try:
            while line := await asyncio.wait_for(lines.readline(), self._silent_seconds):
                for one in read(list[News], json.loads(line)):
                    self._add(one)
            self._add(News(-1, "unknown", "the process that asks for the devices has ended"))
        except TimeoutError:
            told = f"the devices' driver has not answered for {self._silent_seconds:g} s"
            self._add(News(-1, "unknown", told))
        finally:
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

    def _rank_of(self, device: int) -> int:
        """Ranks take the devices that they see in their order."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            place = device
        else:
            words = [word.strip() for word in visible.split(",")]
            place = words.index(str(device)) if str(device) in words else -1
        return self._ranks[place] if 0 <= place < len(self._ranks) else -1
