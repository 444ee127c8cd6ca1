"""Many runs: what each policy reaches under the same faults, and which time or rate is worth what."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import fmean, quantiles

from myriad.resilience.account.ledger import KINDS, Kind, Ledger
from myriad.resilience.weeks.cluster import VirtualCluster
from myriad.resilience.weeks.faults import Fault, Mix, draw_faults
from myriad.resilience.weeks.rivals import rival_ledger
from myriad.resilience.weeks.times import Times, load_rival

__all__ = ["Effect", "Outcome", "Setting", "compare", "num_policies", "sensitivity", "sensitivity_changes"]

_FACTORS = (0.5, 2.0)
_SHOWN = "corrupt_shown_ratio"
_STEPS = ("memory_every", "verify_every")
"""Halved no further than to a whole step."""
_SET_TO: Mapping[str, Sequence[float]] = {_SHOWN: (0.7, 1.0), "slower_ratio": (0.5,), "copies_every": (1,)}
"""Figures of which there is no half, and some that something hangs on: the share of corruption that another
system says to find (ByteRobust), nodes slow enough to be told, copies of each step."""


@dataclass(frozen=True)
class Setting:
    """What runs, and where."""

    mix: Mix
    accelerators: int
    seconds: float
    spares: int
    times: Times
    seeds: range
    often: float = 1.0
    """So many times the mix's rate of faults."""
    patience: float = 1.0

    @property
    def faults_per_day(self) -> float:
        """On average."""
        return self.often * self.mix.per_day(self.accelerators)

    def faults(self, seed: int) -> list[Fault]:
        """Of one run."""
        return draw_faults(self.mix, self.accelerators, self.seconds, seed, often=self.often)


@dataclass(frozen=True)
class Outcome:
    """Of one policy."""

    title: str
    ledgers: Sequence[Ledger]

    @cached_property
    def ratios(self) -> list[float]:
        """Effective training time ratio of each run."""
        return [ledger.effective_ratio for ledger in self.ledgers]

    @property
    def mean(self) -> float:
        """Of them."""
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
        """Of the wall time, of each class; in all 1."""
        found = [ledger.seconds() for ledger in self.ledgers]
        wall = sum(ledger.wall_seconds for ledger in self.ledgers)
        return {kind: sum(one[kind] for one in found) / wall for kind in KINDS}

    @property
    def spare_node_seconds(self) -> float:
        """A run, on average."""
        return fmean(ledger.spare_node_seconds for ledger in self.ledgers)


@dataclass(frozen=True)
class Effect:
    """What a change does to the mean."""

    name: str
    change: str
    ratio: float
    """Effective training time ratio with it."""


def myriad_ledger(setting: Setting, faults: Sequence[Fault]) -> Ledger:
    """One run."""
    cluster = VirtualCluster(setting.times, faults, spares=setting.spares, patience=setting.patience)
    return cluster.run(setting.seconds)


_RIVALS = ("byterobust", "megascale")


def num_policies() -> int:
    """That `compare` runs."""
    return 2 + len(_RIVALS)


def compare(setting: Setting, done: Callable[[], None]) -> list[Outcome]:
    """Myriad where no corruption shows and where all does, and the others; ``done`` is called after each
    run."""
    shown = replace(setting, times=setting.times.model_copy(update={_SHOWN: 1.0}))
    policies: dict[str, Callable[[Sequence[Fault]], Ledger]] = {
        "Myriad": partial(myriad_ledger, setting),
        "Myriad, corruption shows": partial(myriad_ledger, shown),
    }
    for name in _RIVALS:
        rival = load_rival(name)  # type: ignore[arg-type]
        policies[rival.title] = partial(
            rival_ledger, rival, setting.times, seconds=setting.seconds, spares=setting.spares
        )
    ledgers: dict[str, list[Ledger]] = {title: [] for title in policies}
    for seed in setting.seeds:
        faults = setting.faults(seed)
        for title, policy in policies.items():
            ledgers[title].append(policy(faults))
            done()
    return [Outcome(title, found) for title, found in ledgers.items()]


def sensitivity(setting: Setting, done: Callable[[], None]) -> list[Effect]:
    """Of Myriad as it is: one change at a time, the same seeds; ``done`` is called after each run."""
    found = []
    for name, change, changed in sensitivity_changes(setting):
        ratios = []
        for seed in setting.seeds:
            ratios.append(myriad_ledger(changed, changed.faults(seed)).effective_ratio)
            done()
        found.append(Effect(name, change, fmean(ratios)))
    return found


def sensitivity_changes(setting: Setting) -> Iterator[tuple[str, str, Setting]]:
    """Each time and rate halved and doubled, one at a time."""
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


def _with(setting: Setting, name: str, value: float) -> Setting:
    return replace(setting, times=setting.times.model_copy(update={name: value}))
