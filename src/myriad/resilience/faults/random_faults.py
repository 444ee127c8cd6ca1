"""Incidents at random: one fault each, or two close to each other; drawn by a seed, many in one run.

    step   15        30              45        ...
           kill      stop + segv     hang          each with room for the run to recover before the next

A run has `INCIDENTS` at most: one that fails costs no more than those. The job is `tiny` on two ranks.
"""

import random
from collections.abc import Iterator, Sequence

from myriad.resilience.faults.kinds import KINDS, KindName, Target
from myriad.resilience.faults.scenario import Fault, Scenario

__all__ = ["INCIDENTS", "random_scenarios"]

INCIDENTS = 20
_APART_STEPS = 20
_WORLD = 2
_WEIGHTS: dict[tuple[KindName, Target], int] = {
    ("kill", "rank"): 5,
    ("segv", "rank"): 3,
    ("abort", "rank"): 2,
    ("stop", "rank"): 3,
    ("hang", "rank"): 1,
    ("kill", "executor"): 1,
    ("stop", "executor"): 1,
    ("kill", "node"): 1,
    ("kill", "driver"): 1,
    ("stop", "driver"): 1,
    ("kill", "loader"): 1,
    ("stop", "loader"): 1,
    ("kill", "keeper"): 1,
}
"""Mostly what ends ranks, as in the mixes that others report; all that needs neither root nor a device."""
_LATEST_SECONDS = 2.0
"""Of a second fault: while the first is found, while all begin again, and just after."""


def random_scenarios(singles: int, doubles: int, seed: int) -> Iterator[tuple[str, Scenario]]:
    """Name and scenario; incidents of one kind stay together, so that a run has either."""
    draw = random.Random(seed)
    for name, count, faults_each in (("single", singles, 1), ("double", doubles, 2)):
        for number, first in enumerate(range(0, count, INCIDENTS), 1):
            incidents = min(INCIDENTS, count - first)
            faults = [fault for place in range(incidents) for fault in _incident(draw, place, faults_each)]
            yield f"{name}-{seed}-{number}", _scenario(faults, f"{incidents} {name} faults, seed {seed}")


def _scenario(faults: Sequence[Fault], about: str) -> Scenario:
    steps = _APART_STEPS * (INCIDENTS + 2)  # alike for all: they share the undisturbed run
    overrides = (
        f"layout.dp={_WORLD}",
        "layout.zero=3",
        "layout.micro_batch=2",
        "train.threads=1",
        f"train.steps={steps}",
        "checkpoint.memory_seconds=0",
        "checkpoint.every=10",
    )
    return Scenario(about=about, job="tiny", overrides=overrides, faults=tuple(faults))


def _incident(draw: random.Random, place: int, faults_each: int) -> Iterator[Fault]:
    yield _fault(draw, within=faults_each > 1).model_copy(update={"step": _APART_STEPS * (place + 1)})
    if faults_each > 1:
        after = draw.uniform(0.0, _LATEST_SECONDS)
        yield _fault(draw, within=True).model_copy(update={"after_seconds": after})


def _fault(draw: random.Random, *, within: bool) -> Fault:
    """``within``: of a pair, in which neither may be caused by the rank itself."""
    able = {what: weight for what, weight in _WEIGHTS.items() if not (within and KINDS[what[0]].inside)}
    kind, where = draw.choices(list(able), list(able.values()))[0]
    return Fault(kind=kind, where=where, rank=draw.randrange(_WORLD) if where == "rank" else None)
