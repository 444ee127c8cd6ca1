"""Study of many runs: what each policy reaches under the same faults, and the effect of each time or rate.

Policies of other systems are simulated as far as their papers describe them (`published_ledger`): faults
are processed one after the other, each with the times of the paper. A fault that comes during a repair
shows when the repair is over. Spare nodes never run out.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import floor, inf
from statistics import fmean, quantiles

from myriad.forecasts.fleet.fault_mix import DrawnFault, Mix, draw_faults
from myriad.forecasts.fleet.policy_times import PolicyTimes, PublishedTimes, load_published
from myriad.forecasts.fleet.simulated_progress import RunProgress
from myriad.forecasts.fleet.virtual_cluster import VirtualCluster
from myriad.supervise.accounting.ledger import KINDS, Kind, Ledger
from myriad.supervise.accounting.ledger import Kind as Doing

__all__ = [
    "PolicyOutcome",
    "SensitivityEffect",
    "StudySetting",
    "compare",
    "num_policies",
    "published_ledger",
    "sensitivity",
    "sensitivity_changes",
]

_FACTORS = (0.5, 2.0)
_SHOWN = "corrupt_shown_ratio"
_STEPS = ("memory_every", "verify_every")
"""Times that are halved no further than to a whole step."""
_SET_TO: Mapping[str, Sequence[float]] = {_SHOWN: (0.7, 1.0), "slower_ratio": (0.5,), "copies_every": (1,)}
"""Values set directly: the share of corruption that another system reports to detect (ByteRobust), nodes
slow enough to be reported, copies of each step."""


@dataclass(frozen=True)
class StudySetting:
    """What runs, and on which cluster."""

    mix: Mix
    accelerators: int
    seconds: float
    spares: int
    times: PolicyTimes
    seeds: range
    often: float = 1.0
    """Factor on the mix's rate of faults."""
    patience: float = 1.0

    @property
    def faults_per_day(self) -> float:
        """Average number of faults a day."""
        return self.often * self.mix.per_day(self.accelerators)

    def faults(self, seed: int) -> list[DrawnFault]:
        """Return the faults of one run."""
        return draw_faults(self.mix, self.accelerators, self.seconds, seed, often=self.often)


@dataclass(frozen=True)
class PolicyOutcome:
    """Results of one policy."""

    title: str
    ledgers: Sequence[Ledger]

    @cached_property
    def ratios(self) -> list[float]:
        """Effective training time ratio of each run."""
        return [ledger.effective_ratio for ledger in self.ledgers]

    @property
    def mean(self) -> float:
        """Mean of the ratios."""
        return fmean(self.ratios)

    @property
    def interval(self) -> tuple[float, float]:
        """5th and 95th percentile of runs."""
        if len(self.ratios) == 1:
            return self.ratios[0], self.ratios[0]
        cuts = quantiles(self.ratios, n=20, method="inclusive")
        return cuts[0], cuts[-1]

    @cached_property
    def shares(self) -> dict[Kind, float]:
        """Share of each class in the wall time; they sum to 1."""
        found = [ledger.seconds() for ledger in self.ledgers]
        wall = sum(ledger.wall_seconds for ledger in self.ledgers)
        return {kind: sum(one[kind] for one in found) / wall for kind in KINDS}

    @property
    def spare_node_seconds(self) -> float:
        """Node-seconds in which spares idle, averaged over the simulated runs."""
        return fmean(ledger.spare_node_seconds for ledger in self.ledgers)


@dataclass(frozen=True)
class SensitivityEffect:
    """Effect of a change on the mean."""

    name: str
    change: str
    ratio: float
    """Effective training time ratio with the change."""


def myriad_ledger(setting: StudySetting, faults: Sequence[DrawnFault]) -> Ledger:
    """Simulate one run under Myriad."""
    cluster = VirtualCluster(setting.times, faults, spares=setting.spares, patience=setting.patience)
    return cluster.run(setting.seconds)


_PUBLISHED = ("byterobust", "megascale")


def num_policies() -> int:
    """Return the number of policies that `compare` runs."""
    return 2 + len(_PUBLISHED)


def compare(setting: StudySetting, done: Callable[[], None]) -> list[PolicyOutcome]:
    """Compare Myriad, with and without visible corruption, and published policies; ``done`` is called after
    each run."""
    shown = replace(setting, times=setting.times.model_copy(update={_SHOWN: 1.0}))
    policies: dict[str, Callable[[Sequence[DrawnFault]], Ledger]] = {
        "Myriad": partial(myriad_ledger, setting),
        "Myriad, corruption shows": partial(myriad_ledger, shown),
    }
    for name in _PUBLISHED:
        rival = load_published(name)  # type: ignore[arg-type]
        policies[rival.title] = partial(
            published_ledger, rival, setting.times, seconds=setting.seconds, spares=setting.spares
        )
    ledgers: dict[str, list[Ledger]] = {title: [] for title in policies}
    for seed in setting.seeds:
        faults = setting.faults(seed)
        for title, policy in policies.items():
            ledgers[title].append(policy(faults))
            done()
    return [PolicyOutcome(title, found) for title, found in ledgers.items()]


def sensitivity(setting: StudySetting, done: Callable[[], None]) -> list[SensitivityEffect]:
    """Simulate Myriad with one change at a time and the same seeds; ``done`` is called after each run."""
    found = []
    for name, change, changed in sensitivity_changes(setting):
        ratios = []
        for seed in setting.seeds:
            ratios.append(myriad_ledger(changed, changed.faults(seed)).effective_ratio)
            done()
        found.append(SensitivityEffect(name, change, fmean(ratios)))
    return found


def sensitivity_changes(setting: StudySetting) -> Iterator[tuple[str, str, StudySetting]]:
    """Yield each time and rate halved and doubled, one at a time."""
    for factor in _FACTORS:
        said = f"x {factor:g}"
        yield "faults a day", said, replace(setting, often=factor)
        yield "spare nodes", said, replace(setting, spares=round(factor * setting.spares))
        yield "patience", said, replace(setting, patience=factor * setting.patience)
        for name, value in setting.times.model_dump().items():
            if name != _SHOWN:
                changed = max(1, round(factor * value)) if name in _STEPS else factor * value
                if changed != value:
                    yield name, said, _with(setting, name, changed)
    for name, values in _SET_TO.items():
        for value in values:
            yield name, f"{value:g}", _with(setting, name, value)


def _with(setting: StudySetting, name: str, value: float) -> StudySetting:
    return replace(setting, times=setting.times.model_copy(update={name: value}))


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
    _spend(progress, "starting", times.cold_start_seconds, seconds, spares)
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
