"""Links that go down and come up again: for how long, how often, and what that costs a job in a month.

    flap  ──► all queue pairs heard again ──► every rank has waited so long
          ├─► a queue pair fails          ──► error, new start
          └─► the driver ends the ranks first, where it is told that a node's link is down

Down times are weighed by their quantiles: sums over them are expectations, and nothing is drawn.
"""

from dataclasses import dataclass
from math import exp, inf
from statistics import NormalDist

import numpy as np

from myriad.errors import BadInputError
from myriad.network.fabric import Numbers
from myriad.network.retransmission import (
    MOST_RETRIES,
    Timers,
    heard_probability,
    lost_probability,
    mean_wait_seconds,
)

__all__ = ["DownTimes", "Fate", "Habits", "advise", "fate"]

_QUANTILES = 500
_LEAST_DOWN, _MOST_DOWN = 1e-3, 30 * 86400.0
_SHORTEST_TIMEOUT, _LONGEST_TIMEOUT = 14, 24
"""67 ms, NCCL's first default, and 69 s. Shorter ones fire when packets are only late: pauses and queues of a
large fabric take milliseconds."""
_AS_GOOD = 1.01
_HALVINGS = 30


@dataclass(frozen=True)
class DownTimes:
    """For how long links are down: equally likely ones."""

    name: str
    seconds: Numbers
    """(D) In order."""

    @classmethod
    def parse(cls, text: str) -> "DownTimes":
        """``lognormal:MEDIAN:SIGMA``, or seconds such as ``0.5,2,8``. Raises `BadInputError`."""
        try:
            return cls._lognormal(text) if text.startswith("lognormal") else cls._listed(text)
        except ValueError:
            allowed = "lognormal:MEDIAN:SIGMA, or seconds such as 2 or 0.5,2,8; a millisecond to a month"
            raise BadInputError("--down", text, allowed) from None

    @classmethod
    def _lognormal(cls, text: str) -> "DownTimes":
        _, median, sigma = text.split(":")
        if not (_LEAST_DOWN <= float(median) <= _MOST_DOWN and 0 < float(sigma) < 10):
            raise ValueError
        normal = NormalDist()
        places = [normal.inv_cdf((i + 0.5) / _QUANTILES) for i in range(_QUANTILES)]
        seconds = [float(median) * exp(float(sigma) * place) for place in places]
        return cls(f"lognormal, median {float(median):g} s, sigma {float(sigma):g}", np.array(seconds))

    @classmethod
    def _listed(cls, text: str) -> "DownTimes":
        seconds = sorted(float(one) for one in text.split(","))
        if not all(_LEAST_DOWN <= one <= _MOST_DOWN for one in seconds):
            raise ValueError
        return cls(", ".join(f"{one:g}" for one in seconds) + " s", np.array(seconds))


@dataclass(frozen=True)
class Habits:
    """Of a cluster's links and of who looks after the job."""

    down: DownTimes
    num_links: int
    flaps_per_month: float
    """Of one link."""
    dead_per_month: float
    """Of one link, for good."""
    num_queue_pairs: int
    """Through one link."""
    restart_seconds: float
    """From an error until the job is where it was."""
    driver_seconds: float = inf
    """After which the driver ends the ranks of a node whose link is down; inf: nobody looks."""


@dataclass(frozen=True)
class Fate:
    """Of a job, with some timers."""

    timers: Timers
    lost: float
    """Probability that a flap ends the job."""
    lost_alone: float
    """The same of one queue pair by itself, without a driver."""
    wait_seconds: float
    """For which a flap that the job survives holds everybody up, on average."""
    wait_p95_seconds: float
    """In one of twenty of those longer."""
    dead_seconds: float
    """For which a peer that is gone for good goes unnoticed, on average."""
    aborts_per_month: float
    hours_per_month: float
    """Lost to waiting, to new starts and to peers that are gone."""


def fate(timers: Timers, habits: Habits) -> Fate:
    """What flaps do to a job."""
    down = habits.down.seconds
    tolerated = down <= habits.driver_seconds
    fails = lost_probability(timers, down, habits.num_queue_pairs)
    lost = np.where(tolerated, fails, 1.0)
    waits = mean_wait_seconds(timers, down, habits.num_queue_pairs)
    survived = float((1 - lost).sum())
    wait = float((waits * (1 - lost)).sum()) / survived if survived > 1e-9 else 0.0
    error = min(sum(timers.gives_up_seconds) / 2, habits.driver_seconds)
    gone = float(lost.mean())
    flaps = habits.flaps_per_month * habits.num_links
    deaths = habits.dead_per_month * habits.num_links
    each = (1 - gone) * wait + gone * (error + habits.restart_seconds)
    return Fate(
        timers=timers,
        lost=gone,
        lost_alone=float(lost_probability(timers, down).mean()),
        wait_seconds=wait,
        wait_p95_seconds=_longest_wait(timers, habits, 0.95),
        dead_seconds=error,
        aborts_per_month=flaps * gone,
        hours_per_month=(flaps * each + deaths * (error + habits.restart_seconds)) / 3600,
    )


def _longest_wait(timers: Timers, habits: Habits, share: float) -> float:
    """That this share of the flaps which the job survives stays below."""
    down = habits.down.seconds[habits.down.seconds <= habits.driver_seconds]
    survived = float((1 - lost_probability(timers, down, habits.num_queue_pairs)).sum())
    if survived < 1e-9:
        return 0.0
    low, high = 0.0, timers.longer[1] * float(timers.resends[-1])
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        at = np.full((len(down), 1), middle)
        heard = float(heard_probability(timers, down, at, habits.num_queue_pairs).sum())
        low, high = (middle, high) if heard < share * survived else (low, middle)
    return high


def advise(like: Timers, habits: Habits) -> Fate:
    """The timers with the fewest lost hours; of those within 1 % of that the shortest, so that a peer that is
    gone is noticed soonest. ``like``: what the NIC can do."""
    tried = [
        fate(Timers(timeout, MOST_RETRIES, like.adaptive, like.first_seconds, like.longer), habits)
        for timeout in range(_SHORTEST_TIMEOUT, _LONGEST_TIMEOUT + 1)
    ]
    least = min(one.hours_per_month for one in tried)
    return next(one for one in tried if one.hours_per_month <= least * _AS_GOOD)
