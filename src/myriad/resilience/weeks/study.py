"""Many runs: what each policy reaches under the same faults, and which time or rate is worth what."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, quantiles

from myriad.resilience.ledger import KINDS, Kind, Ledger
from myriad.resilience.weeks.cluster import VirtualCluster
from myriad.resilience.weeks.faults import Fault, Mix, draw_faults
from myriad.resilience.weeks.rivals import rival_ledger
from myriad.resilience.weeks.times import Times, load_aims, load_rival

__all__ = ["Effect", "Outcome", "Setting", "compare", "num_policies", "sensitivity", "sensitivity_changes"]

_FACTORS = (0.5, 2.0)
_NOT_VARIED = ("corrupt_found_seconds", "slow_found_seconds")
"""Aims: there, or not."""
_STEPS = ("memory_every",)
"""There is no half of a step."""


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

    @property
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

    @property
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
    """Myriad as it is, Myriad with what it aims at, and the others; ``done`` is called after each run."""
    aims = replace(setting, times=setting.times.model_copy(update=load_aims()))
    policies: dict[str, Callable[[Sequence[Fault]], Ledger]] = {
        "Myriad": partial(myriad_ledger, setting),
        "Myriad, all aims": partial(myriad_ledger, aims),
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
    """Each time and rate halved and doubled, each aim reached."""
    for factor in _FACTORS:
        said = f"x {factor:g}"
        yield "faults a day", said, replace(setting, often=factor)
        yield "spare nodes", said, replace(setting, spares=round(factor * setting.spares))
        yield "patience", said, replace(setting, patience=factor)
        for name, value in setting.times.model_dump().items():
            if name not in _NOT_VARIED and not (name in _STEPS and factor < 1):
                changed = setting.times.model_copy(update={name: factor * value})
                yield name, said, replace(setting, times=changed)
    for name, value in load_aims().items():
        reached = setting.times.model_copy(update={name: value})
        yield name, f"{value:g}", replace(setting, times=reached)
