"""How long a rank may show no progress: learned from the run itself, for each phase of a rank's life.

    limit = patience x max(least, 5 x median, 2 x p99)      where the run has been in the phase before
            patience x first                                where it has not: a first evaluation, a first save
                                                            and always for what differs each time: starting,
                                                            loading (perhaps more than before), compilation

What is learned is how long steps take (an attempt's first counts until there are others), and how long
nothing was seen to happen in each other phase from its beginning to its end.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial
from statistics import median

from myriad.resilience.facts import RankSeen

__all__ = ["Deadlines"]

_SAMPLES = 256
_LEAST = {"step": 13.5}
"""Ranks are heard of once a second: so a hang is known within 15 s."""
_LEAST_ELSEWHERE = 60.0
_FIRST = {"first step": 600.0, "step": 600.0, "validating": 600.0, "ending": 900.0}
_FIRST_ELSEWHERE = 1200.0
_ALWAYS_FIRST = ("starting", "loading", "first step")
_ENOUGH = 3
"""Steps of which more is known than of an attempt's first."""


class Deadlines:
    """Of one run."""

    def __init__(self, patience: float, saving_seconds: float) -> None:
        """``saving_seconds``: how long a rank waits by itself for a save."""
        self._patience, self._saving = patience, saving_seconds
        self._samples: dict[str, deque[float]] = defaultdict(partial(deque, maxlen=_SAMPLES))
        self._phase, self._step = "starting", -1
        self._longest = 0.0
        """Time in this phase without anything that was seen to happen."""

    def saw(self, seen: Sequence[RankSeen]) -> None:
        """All ranks of an attempt."""
        idle, phase = min(one.idle_seconds for one in seen), self.phase_of(seen)
        if phase != self._phase:
            if self._phase not in ("step", *_ALWAYS_FIRST):
                self._samples[self._phase].append(self._longest)
            self._longest = 0.0
        self._longest = max(self._longest, idle)
        slowest = max(seen, key=lambda one: one.step_seconds)
        if slowest.step_seconds and slowest.step != self._step:
            which = "first step" if self._phase == "first step" else "step"
            self._samples[which].append(slowest.step_seconds)
        self._phase, self._step = phase, slowest.step

    def forget_steps(self) -> None:
        """They will take longer, or shorter: there are other replicas for the same batch."""
        for phase in ("first step", "step", "validating"):
            self._samples.pop(phase, None)

    def limit(self, phase: str) -> float:
        """Seconds without progress after which a phase is a hang."""
        samples = sorted(self._samples[phase])
        if phase == "step" and len(samples) < _ENOUGH:  # better than nothing, but it may have compiled
            samples = sorted([*samples, *self._samples["first step"]])
        allowed = self._saving if phase in ("saving", "ending") else 0.0
        if not samples or phase in _ALWAYS_FIRST:
            return self._patience * max(allowed, _FIRST.get(phase, _FIRST_ELSEWHERE))
        p99 = samples[min(len(samples) - 1, int(0.99 * len(samples)))]
        least = _LEAST.get(phase, _LEAST_ELSEWHERE)
        return self._patience * max(allowed, least, 5 * median(samples), 2 * p99)

    @staticmethod
    def phase_of(seen: Sequence[RankSeen]) -> str:
        """What the attempt is in: the ranks are not all in the same, and one that saves or starts holds the
        others up by right."""
        phases = {_phase_of(one) for one in seen}
        return next((phase for phase in _SLOWEST_FIRST if phase in phases), "starting")


_SLOWEST_FIRST = ("starting", "loading", "saving", "ending", "tracing", "validating", "first step", "step")


def _phase_of(one: RankSeen) -> str:
    return "first step" if one.phase == "step" and not one.step_seconds else one.phase or "starting"
