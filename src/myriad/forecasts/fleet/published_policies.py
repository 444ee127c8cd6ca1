"""Published policies of other systems under the same faults, as far as their papers describe them.

Faults are processed one after the other, each with the times of the paper. A fault that comes during a repair
shows when the repair is over. Spare nodes never run out.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import floor, inf

from myriad.forecasts.fleet.fault_mix import DrawnFault
from myriad.forecasts.fleet.policy_times import PolicyTimes, PublishedTimes
from myriad.forecasts.fleet.simulated_progress import RunProgress
from myriad.supervise.accounting.ledger import Kind as Doing
from myriad.supervise.accounting.ledger import Ledger

__all__ = ["published_ledger"]

_SOME = 1e-9
_SILENT = ("nan", "corrupt", "slow")
"""Silent faults: training continues and nothing reports them."""


@dataclass(order=True)
class _Event:
    at: float
    order: int
    fault: DrawnFault = field(compare=False)
    good_until: float | None = field(default=None, compare=False)
    """Last good progress of a fault that was not detected at once, and is now."""


def published_ledger(
    policy: PublishedTimes, times: PolicyTimes, faults: Sequence[DrawnFault], seconds: float, *, spares: int
) -> Ledger:
    """Return the ledger of a published policy. ``times`` has what is independent of policies: people, steps,
    stragglers."""
    progress = RunProgress(times.model_copy(update={"saving_ratio": policy.saving_ratio}))
    events = [_Event(fault.at, order, fault) for order, fault in enumerate(faults)]
    progress.ledger.attempt = 1
    _spend(progress, "restarting", times.cold_start_seconds, seconds, spares)
    while events:
        event = heapq.heappop(events)
        _spend(progress, "training", max(0.0, event.at - progress.ledger.now), seconds, spares)
        if progress.ledger.now >= seconds:
            return progress.ledger
        if event.good_until is None and event.fault.kind.shows in _SILENT:
            heapq.heappush(events, _unseen(event, policy, times, progress))
            continue
        for doing, length in _phases(event, policy, times):
            _spend(progress, doing, length, seconds, spares)
        progress.ledger.attempt += 1
        progress.slower_ratio = 0.0
        saved = inf if event.fault.kind.shows == "planned" else progress.done
        good = min(saved, inf if event.good_until is None else event.good_until)
        if good < inf:
            progress.roll_back(floor(good / policy.saved_every_seconds + _SOME) * policy.saved_every_seconds)
    _spend(progress, "training", seconds - progress.ledger.now, seconds, spares)
    return progress.ledger


def _spend(progress: RunProgress, doing: Doing, length: float, most: float, spares: int) -> None:
    progress.doing = doing
    progress.until(min(most, progress.ledger.now + length), spares)


def _unseen(event: _Event, policy: PublishedTimes, times: PolicyTimes, progress: RunProgress) -> _Event:
    fault = event.fault
    good_until = inf if fault.kind.shows == "slow" else progress.done
    if fault.kind.shows == "slow":
        progress.slower_ratio = times.slower_ratio
    found = fault.draw < policy.found_ratio
    seconds = policy.seen_seconds["hang"] if found else times.unseen_seconds
    if fault.kind.shows == "slow" and not found:
        seconds += times.person_seconds  # who is slow can be found out while the run goes on
    return _Event(event.at + seconds, event.order, fault, good_until)


def _phases(event: _Event, policy: PublishedTimes, times: PolicyTimes) -> Iterator[tuple[Doing, float]]:
    shows, draw = event.fault.kind.shows, event.fault.draw
    if shows == "planned":
        yield "planned", times.save_seconds + policy.restart_seconds
        return
    if shows in _SILENT:
        alone = draw < policy.found_ratio
    else:
        yield "detecting", policy.seen_seconds[shows]  # type: ignore[index]
        alone = draw < policy.alone_ratio
    if alone or shows != "slow":
        yield "diagnosing", policy.diagnosing_seconds
    if not alone and shows != "slow":
        yield "person", times.person_seconds
    yield "restarting", policy.restart_seconds
