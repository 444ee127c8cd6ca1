"""Runs the doctor on this node in a child process, which the agent can end at any time.

If the doctor itself fails (a missing package, a bad file), the verdict is `unknown`.
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

from myriad.supervise.observations import Examined, How
from myriad.system.machine import machine_name

__all__ = ["Examination"]

_LOG = logging.getLogger(__name__)
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
        words = ["-m", "myriad.doctor.examine", str(self._folder), how, str(os.getpid())]
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
