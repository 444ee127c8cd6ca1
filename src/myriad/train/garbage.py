"""Python's garbage collector by step count, so that all ranks pause together or none does.

By default it runs when enough objects were made, on each rank at another time. A full collection takes a
tenth of a second for each million objects. All ranks wait for the one that pauses, with thousands of ranks at
nearly every step (MegaScale, section 6.3).

    step    1                  2 ...  100      101 ...  200    ...  10,000         close
            everything, freeze        young             young       everything     as it was
            off from here on

Objects that exist after the first step (imports, model, programs, indices) stay for the whole run. They are
frozen, so that no collection scans them again. Objects that outlive a collection are scanned only once in a
hundred collections. For a loader that keeps a million samples, each scan takes half a second. Step counts are
the run's, not the process's, so a resumed rank pauses with the others.
"""

import gc

from myriad.telemetry.spans import Recorder

__all__ = ["GarbageSchedule"]

_YOUNG, _EVERYTHING = 1, 2
_EVERYTHING_EVERY = 100
"""Every so many collections, one is full. Cycles among old objects are rare, but they must not fill memory
over weeks."""


class GarbageSchedule:
    """The schedule of this process's garbage collections. With ``every = 0``, Python's own schedule stays."""

    def __init__(self, every: int, recorder: Recorder) -> None:
        """Collections are recorded as spans ``collect_garbage``."""
        self._every, self._recorder = every, recorder
        self._started = False
        self._was_enabled = gc.isenabled()

    def after_step(self, step: int) -> None:
        """Collect garbage if it is due; ``step`` counts the run's completed steps. Every rank calls this
        after each step."""
        if not self._every:
            return
        if not self._started:
            self._started = True
            self._collect(_EVERYTHING)
            gc.freeze()
            gc.disable()
        elif step % self._every == 0:
            self._collect(_YOUNG if step % (self._every * _EVERYTHING_EVERY) else _EVERYTHING)

    def _collect(self, generation: int) -> None:
        with self._recorder.span("collect_garbage"):
            gc.collect(generation)

    def close(self) -> None:
        """Restore the collector's previous state."""
        if self._started:
            self._started = False
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()
