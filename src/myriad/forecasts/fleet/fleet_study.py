"""Study of many runs: what each policy reaches under the same faults, and the effect of each time or rate."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import fmean, quantiles

from myriad.forecasts.fleet.fault_mix import DrawnFault, Mix, draw_faults
from myriad.forecasts.fleet.policy_times import PolicyTimes, load_published
from myriad.forecasts.fleet.published_policies import published_ledger
from myriad.forecasts.fleet.virtual_cluster import VirtualCluster
from myriad.supervise.accounting.ledger import KINDS, Kind, Ledger

__all__ = [
    "PolicyOutcome",
    "SensitivityEffect",
    "StudySetting",
    "compare",
    "num_policies",
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
        """Average over runs."""
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
