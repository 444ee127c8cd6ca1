"""Progress of a command that may take long, on standard error: one helper for every verb.

In a terminal it is a bar that disappears when the work is done. Elsewhere (a log file, a pipe, CI) it is a
plain line every few seconds. A thread writes the lines, so they also appear during a long step:

    myriad: 5 s: predicting: 12 of 86 (14%)

A command that ends within `_FIRST_LINE_SECONDS` writes no line. Every verb writes progress to standard error,
with and without ``--json``, so standard output stays one JSON object.

    count_bar("searching")      show(stage, done, total)        numbers of anything
    bytes_bar()                 show(stage, done, total)        bytes
    share_bar("measuring")      show(step, share_done)          steps with a known share of the work
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from myriad.units import format_bytes

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

__all__ = ["Counted", "bytes_bar", "count_bar", "share_bar"]

_FIRST_LINE_SECONDS = 5.0
_MANY_LINES = 12
"""Number of lines at the first interval. Each later line waits a tenth of the elapsed time, up to the longest
interval."""
_LONGEST_SECONDS = 60.0

Counted = Callable[[str, int, int], None]
"""Type of ``show(stage, done, total)``; a total of 0 means unknown."""


@contextmanager
def bytes_bar() -> Iterator[Counted]:
    """Yield ``show(stage, done_bytes, total_bytes)``."""
    with _shown(_byte_columns, _bytes_done, "starting") as display:
        yield lambda stage, done, total: display.show(stage, float(done), float(total))


@contextmanager
def count_bar(starting: str) -> Iterator[Counted]:
    """Yield ``show(stage, done, total)``; ``starting`` is the stage before the first call."""
    with _shown(_count_columns, _count_done, starting) as display:
        yield lambda stage, done, total: display.show(stage, float(done), float(total))


@contextmanager
def share_bar(title: str) -> Iterator[Callable[[str, float], None]]:
    """Yield ``show(step, share_done)``, for work with named steps; ``title`` names the whole work."""
    with _shown(_share_columns, _share_done, f"{title}: starting") as display:
        yield lambda step, done: display.show(f"{title}: {step}", done, 1.0)


class _Display(Protocol):
    def show(self, stage: str, done: float, total: float) -> None:
        """Record the progress of the work."""


class _Lines:
    """Writes the latest progress as a line at intervals, from a thread."""

    def __init__(self, starting: str, describe: Callable[[float, float], str]) -> None:
        self._state, self._describe = (starting, 0.0, 0.0), describe
        self._started, self._done = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._write, name="progress", daemon=True)
        self._thread.start()

    def show(self, stage: str, done: float, total: float) -> None:
        """Keep the progress for the next line."""
        self._state = (stage, done, total)

    def close(self) -> None:
        """End the thread that writes the lines."""
        self._done.set()
        self._thread.join()

    def _write(self) -> None:
        count = 0
        while not self._done.wait(self._interval(count)):
            count += 1
            try:
                sys.stderr.write(f"myriad: {self._line()}\n")
                sys.stderr.flush()
            except (OSError, ValueError):  # Standard error is closed; the work continues.
                return

    def _interval(self, count: int) -> float:
        if count < _MANY_LINES:
            return _FIRST_LINE_SECONDS
        elapsed = time.monotonic() - self._started
        return min(max(elapsed / 10, _FIRST_LINE_SECONDS), _LONGEST_SECONDS)

    def _line(self) -> str:
        stage, done, total = self._state
        elapsed = time.monotonic() - self._started
        return f"{_clock(elapsed)}: {stage}" + (self._describe(done, total) if total > 0 else "")


class _Bar:
    """A progress bar in a terminal."""

    def __init__(self, starting: str, columns: "tuple[ProgressColumn, ...]") -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(starting, total=None)
        self._bar.start()

    def show(self, stage: str, done: float, total: float) -> None:
        """Redraw the bar with the stage and its share."""
        self._bar.update(self._task, description=stage, completed=done, total=total or None)

    def close(self) -> None:
        """Remove the bar from the terminal."""
        self._bar.stop()


@contextmanager
def _shown(
    columns: "Callable[[], tuple[ProgressColumn, ...]]",
    describe: Callable[[float, float], str],
    starting: str,
) -> Iterator[_Display]:
    from rich.console import Console

    in_terminal = Console(stderr=True).is_terminal
    display = _Bar(starting, columns()) if in_terminal else _Lines(starting, describe)
    try:
        yield display
    finally:
        display.close()


def _count_columns() -> "tuple[ProgressColumn, ...]":
    from rich import progress as bars

    return _described(), bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeElapsedColumn()


def _byte_columns() -> "tuple[ProgressColumn, ...]":
    from rich import progress as bars

    sizes = bars.DownloadColumn(binary_units=True), bars.TransferSpeedColumn(), bars.TimeRemainingColumn()
    return _described(), bars.BarColumn(), *sizes


def _share_columns() -> "tuple[ProgressColumn, ...]":
    from rich import progress as bars

    return _described(), bars.BarColumn(), bars.TimeElapsedColumn()


def _described() -> "ProgressColumn":
    from rich.progress import TextColumn

    return TextColumn("{task.description}", markup=False)


def _count_done(done: float, total: float) -> str:
    return f": {done:,.0f} of {total:,.0f} ({done / total:.0%})"


def _bytes_done(done: float, total: float) -> str:
    return f": {format_bytes(done)} of {format_bytes(total)} ({done / total:.0%})"


def _share_done(done: float, total: float) -> str:
    return f" ({done / total:.0%})"


def _clock(seconds: float) -> str:
    """Return a duration such as ``35 s`` or ``2 min 05 s``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
