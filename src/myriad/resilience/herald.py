"""Where the driver is: RUN/driver.json, as the driver keeps it and executors read it.

    driver of term 4 ──► {"term": 4, "beat": 7, "host": ...} ──► executors: nobody of a lower term any more
    driver of term 3, which slept as it wrote: written over by the other, within a second; which it sees

Where drivers hold a lease, executors also look for another one while they have one: it may be one that has
lost the lease and does not know, or say, anything any more. And the file has a number that changes each
second: who cannot reach the driver knows by it whether that is lost. Threads of their own, as the folder may
hang.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from myriad.whole_file import read_json, write_whole

__all__ = ["Herald", "read_address", "see_newer"]

_BEAT_SECONDS = _LOOK_SECONDS = 1.0
_MOST_SECONDS = 1e6


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST_SECONDS


_RIGHT: dict[str, Callable[[object], bool]] = {
    "host": lambda value: isinstance(value, str) and value.isprintable(),
    "port": lambda value: _is_count(value, 2**16 - 1),
    "term": lambda value: _is_count(value, 2**53),
    "silent_seconds": _is_seconds,
    "alone_seconds": _is_seconds,
}
"""What another reader of the file relies on."""


def read_address(run: Path) -> dict[str, Any]:
    """Return what the newest driver wrote of itself. Raises ``OSError`` and ``ValueError``."""
    found = read_json(run / "driver.json")
    if found is None:
        raise FileNotFoundError(f"{run} has no driver.json")
    if not isinstance(found, dict):
        raise ValueError("driver.json is no object")
    if wrong := [key for key, is_right in _RIGHT.items() if key in found and not is_right(found[key])]:
        raise ValueError(f"{wrong[0]} of driver.json is {str(found[wrong[0]])[:80]}")
    return found


class Herald:
    """Of one driver."""

    def __init__(self, run: Path, address: Mapping[str, Any]) -> None:
        """Write the file. Raises ``OSError`` where there is no room for it and none of an earlier driver."""
        self._run, self._address = run, dict(address)
        self._write()

    def _write(self) -> None:
        path, content = self._run / "driver.json", json.dumps(self._address)
        try:
            write_whole(path, content)
        except OSError:
            _overwrite(path, content)

    def repeat(self, while_true: Callable[[], bool], lose: Callable[[], object]) -> None:
        """From now on, each second, until there is one of a higher term: then it calls ``lose``."""
        threading.Thread(target=self._repeat, args=(while_true, lose), name="herald", daemon=True).start()

    def _repeat(self, while_true: Callable[[], bool], lose: Callable[[], object]) -> None:
        for beat in count():
            time.sleep(_BEAT_SECONDS)
            if not while_true():
                return
            self._address["beat"] = beat
            with suppress(OSError, ValueError, TypeError, KeyError):
                if read_address(self._run)["term"] > self._address["term"]:
                    lose()
                    return
            with suppress(OSError):
                self._write()


def _overwrite(path: Path, content: str) -> None:
    """Write over a small file in place, which needs no room on a full disk; a reader that finds it torn looks
    again. Raises ``OSError``."""
    with open(path, "r+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        file.write(content.encode().ljust(size))
        os.fsync(file.fileno())


def see_newer(run: Path, term: int, tell: Callable[[], object], is_over: Callable[[], bool]) -> None:
    """Calls ``tell``, from a thread, when there is a driver of a higher term, unless it is over before."""

    def look() -> None:
        while not is_over():
            with suppress(OSError, ValueError, TypeError, KeyError):
                if read_address(run)["term"] > term:
                    tell()
                    return
            time.sleep(_LOOK_SECONDS)

    threading.Thread(target=look, name="newer driver", daemon=True).start()
