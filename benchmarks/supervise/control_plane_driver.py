"""The driver, with a clock around what it hears: ``python control_plane_driver.py RUN LAGS``.

A simulated executor writes into the first rank's pid of a beat when it began to send it, in microseconds of
the clock that all processes of a machine share. The driver knows what the beat tells a moment later: the
difference goes to LAGS, as pairs of float64 (when it was handled, how long after it was sent). All else is
the driver as it is.
"""

import sys
import time
from array import array
from pathlib import Path
from typing import Any

from myriad.supervise.driver import driver
from myriad.supervise.messages import Beat, Observation

WRITE_SECONDS = 1.0


class ClockedDriver(driver.Driver):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._lags = array("d")
        self._written_at = 0.0

    def _hear(self, observation: Observation) -> None:
        super()._hear(observation)
        if isinstance(observation, Beat) and observation.ranks:
            now = time.monotonic()
            self._lags.extend((now, now - observation.ranks[0].pid / 1e6))
            if now - self._written_at > WRITE_SECONDS:
                self._written_at = now
                with Path(sys.argv[2]).open("ab") as out:
                    out.write(self._lags.tobytes())
                self._lags = array("d")


if __name__ == "__main__":
    driver.Driver = ClockedDriver  # type: ignore[misc]
    sys.exit(driver.main(sys.argv[1:2]))
