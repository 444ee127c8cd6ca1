"""The executor has its node examined by the doctor, in a child process that it can end at any time.

A doctor that fails itself (a package that is missing, a file that is none) says nothing about the node: the
verdict is `unknown`, and counts against nobody.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from myriad.machine import machine_name
from myriad.resilience.facts import Examined, How

__all__ = ["Examination"]

_LOG = logging.getLogger(__name__)
_MOST_SECONDS = 300.0
_MOST_COMPLAINTS, _MOST_CHARACTERS = 16, 300


class Examination:
    """Of one node; one at a time."""

    def __init__(self, node: int, folder: Path) -> None:
        self._node, self._folder = node, folder
        self._task: asyncio.Task[None] | None = None

    def begin(self, how: How, tell: Callable[[Examined], None]) -> None:
        """Another one that is under way is ended, and nothing is told of it."""
        self.cancel()

        async def work() -> None:
            tell(await self.made(how))

        self._task = asyncio.create_task(work())

    def cancel(self) -> None:
        """Ranks begin here, or the executor ends."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def made(self, how: How) -> Examined:
        """The verdict."""
        words = ["-m", "myriad.resilience.doctor.examine", str(self._folder), how, str(os.getpid())]
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
        told = tuple(f"{item['name']}: {item['words']}"[:_MOST_CHARACTERS] for item in bad[:_MOST_COMPLAINTS])
        verdict: Any = "unfit" if bad else "fit"
        return Examined(
            self._node, machine_name(), how, verdict, str(found["words"]), told, float(found["seconds"])
        )

    def _unknown(self, how: How, words: str) -> Examined:
        _LOG.warning("%s", words)
        return Examined(self._node, machine_name(), how, "unknown", words, (), 0.0)
