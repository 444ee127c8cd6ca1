"""Python's garbage collector by step count: all ranks pause together, or none does.

Left to itself it runs when enough objects were made, on each rank at another time, and a collection of
everything takes a tenth of a second for each million objects: everybody waits for whoever pauses, with
thousands of ranks at nearly every step (MegaScale, section 6.3).

    step    1                  2 ...  100      101 ...  200    ...  10,000         close
            everything, freeze        young             young       everything     as it was
            off from here on

What is there after the first step (imports, model, programs, indices) stays for the whole run: frozen, it is
never looked at again. Nor is, but once in a hundred times, what has outlived a collection: of a loader that
keeps a million samples each look at all takes half a second. Step counts are the run's, not the process's, so
a resumed rank pauses with the others.
"""

import gc

from myriad.telemetry.spans import Recorder

__all__ = ["GarbageSchedule"]

_YOUNG, _EVERYTHING = 1, 2
_EVERYTHING_EVERY = 100
"""Collections: cycles among old objects are rare, but a run of weeks must not keep them."""


class GarbageSchedule:
    """When this process collects garbage; off (``every = 0``) it is left as Python does it."""

    def __init__(self, every: int, recorder: Recorder) -> None:
        """Collections are recorded as spans ``collect_garbage``."""
        self._every, self._recorder = every, recorder
        self._started = False
        self._was_enabled = gc.isenabled()

    def after_step(self, step: int) -> None:
        """``step`` counts the steps of the run that are done; every rank calls this after each."""
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
        """The collector is as it was before."""
        if self._started:
            self._started = False
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()
