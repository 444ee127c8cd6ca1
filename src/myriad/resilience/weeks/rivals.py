"""Other systems' policies under the same faults, as far as their papers tell: one fault after the other, each
with its times. A fault that comes during a repair shows when that is over. Spare nodes never run out."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import floor, inf

from myriad.resilience.account.ledger import Kind as Doing
from myriad.resilience.account.ledger import Ledger
from myriad.resilience.weeks.faults import Fault
from myriad.resilience.weeks.times import RivalTimes, Times
from myriad.resilience.weeks.work import Work

__all__ = ["rival_ledger"]

_SOME = 1e-9
_QUIET = ("nan", "corrupt", "slow")
"""Training goes on: ranks compute, and nothing is at hand that says what."""


@dataclass(order=True)
class _Event:
    at: float
    order: int
    fault: Fault = field(compare=False)
    good_until: float | None = field(default=None, compare=False)
    """Of a fault that was not seen at once, and is now."""


def rival_ledger(
    rival: RivalTimes, times: Times, faults: Sequence[Fault], seconds: float, *, spares: int
) -> Ledger:
    """``times``: of what is no policy's own: people, steps, stragglers."""
    work = Work(times.model_copy(update={"saving_ratio": rival.saving_ratio}))
    events = [_Event(fault.at, order, fault) for order, fault in enumerate(faults)]
    work.ledger.attempt = 1
    _spend(work, "restarting", times.cold_start_seconds, seconds, spares)
    while events:
        event = heapq.heappop(events)
        _spend(work, "training", max(0.0, event.at - work.ledger.now), seconds, spares)
        if work.ledger.now >= seconds:
            return work.ledger
        if event.good_until is None and event.fault.kind.shows in _QUIET:
            heapq.heappush(events, _unseen(event, rival, times, work))
            continue
        for doing, length in _phases(event, rival, times):
            _spend(work, doing, length, seconds, spares)
        work.ledger.attempt += 1
        work.slower_ratio = 0.0
        saved = inf if event.fault.kind.shows == "planned" else work.done
        good = min(saved, inf if event.good_until is None else event.good_until)
        if good < inf:
            work.go_back(floor(good / rival.saved_every_seconds + _SOME) * rival.saved_every_seconds)
    _spend(work, "training", seconds - work.ledger.now, seconds, spares)
    return work.ledger


def _spend(work: Work, doing: Doing, length: float, most: float, spares: int) -> None:
    work.doing = doing
    work.until(min(most, work.ledger.now + length), spares)


def _unseen(event: _Event, rival: RivalTimes, times: Times, work: Work) -> _Event:
    fault = event.fault
    good_until = inf if fault.kind.shows == "slow" else work.done
    if fault.kind.shows == "slow":
        work.slower_ratio = times.slower_ratio
    found = fault.luck < rival.found_ratio
    seconds = rival.seen_seconds["hang"] if found else times.unseen_seconds
    if fault.kind.shows == "slow" and not found:
        seconds += times.person_seconds  # who is slow can be found out while the run goes on
    return _Event(event.at + seconds, event.order, fault, good_until)


def _phases(event: _Event, rival: RivalTimes, times: Times) -> Iterator[tuple[Doing, float]]:
    shows, luck = event.fault.kind.shows, event.fault.luck
    if shows == "planned":
        yield "planned", times.save_seconds + rival.restart_seconds
        return
    if shows in _QUIET:
        alone = luck < rival.found_ratio
    else:
        yield "detecting", rival.seen_seconds[shows]  # type: ignore[index]
        alone = luck < rival.alone_ratio
    if alone or shows != "slow":
        yield "diagnosing", rival.diagnosing_seconds
    if not alone and shows != "slow":
        yield "person", times.person_seconds
    yield "restarting", rival.restart_seconds
