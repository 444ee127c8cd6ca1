"""Write the progress of a GPU onto the rank's row, so that a hang's cause can be found.

On a GPU no collective blocks the host. When one hangs, the host of every rank waits for its own device at the
end of the step, so the rows of all hosts are alike; the positions of the devices differ. A thread of each
rank reads its device's position from events that are recorded anyway. The thread never waits for the device,
and reads only while the host makes no progress: a run without faults pays for reading one word.
"""

import logging
import threading
from collections.abc import Callable

from myriad.telemetry.progress.device_clock import DeviceClock
from myriad.telemetry.progress.progress_page import ProgressRow

__all__ = ["DeviceProgress"]

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.25


class DeviceProgress:
    """A thread that writes one rank's device progress onto the rank's row."""

    def __init__(
        self,
        clock: DeviceClock,
        row: ProgressRow,
        enter: Callable[[], None],
        poll_seconds: float = _POLL_SECONDS,
    ) -> None:
        """Start the thread. It calls ``enter`` first, which selects the device for the thread."""
        self._clock, self._row, self._enter, self._poll_seconds = clock, row, enter, poll_seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="device progress", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        try:
            self._enter()
            seen = self._row.changed_ns
            last: tuple[object, ...] = ()
            while not self._over.wait(self._poll_seconds):
                if (now := self._row.changed_ns) != seen:
                    seen, last = now, ()
                elif (position := self._clock.position()) is not None:
                    at = (position.entered, position.left, *position.counters, position.activity)
                    self._row.device_at(position, moved=bool(last) and at != last)
                    seen, last = self._row.changed_ns, at
        except RuntimeError as error:  # an error of CUDA, which the rank raises and reports too
            _LOG.warning("what the device does is not known any more: %s", error)

    def close(self) -> None:
        """Stop following the device and join the thread."""
        self._over.set()
        self._thread.join()
