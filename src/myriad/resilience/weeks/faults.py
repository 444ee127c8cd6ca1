"""Which faults come, and when: drawn from a mix of kinds that is data, the same for every policy.

Faults are a Poisson process whose rate is that of the mix, for each accelerator. Each fault carries its own
luck, so that policies which use it differently meet the same faults.
"""

import random
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, ValidationError

from myriad.config import Config, explain
from myriad.errors import BadInputError
from myriad.recipes import read_recipe
from myriad.resilience.facts import Cause

__all__ = ["DAY", "Fault", "Kind", "Mix", "Shows", "draw_faults", "load_mix"]

DAY = 86400.0
Shows = Literal["exit", "hang", "silent", "nan", "corrupt", "slow", "planned"]
"""A rank ends; nobody goes on; a node is gone; a loss is no number; the numbers are wrong and look like any;
a node is slow; a person wants a new start."""


class Kind(Config):
    """One kind of fault."""

    weight: float = Field(gt=0)
    """How many there were, or their share: by what the others have."""
    shows: Shows
    cause: Cause = "crash"
    """That a rank's end tells."""
    stays: bool = False
    """The node fails again whenever it is used again."""


class Mix(Config):
    """Kinds of faults, and how often any of them comes."""

    source: str
    faults: float = Field(ge=0)
    """Seen on so many accelerators in so many days; 0: never."""
    accelerators: float = Field(gt=0)
    days: float = Field(gt=0)
    kinds: dict[str, Kind] = Field(min_length=1)

    def per_day(self, accelerators: int) -> float:
        """Faults a day on so many accelerators."""
        return self.faults * accelerators / (self.accelerators * self.days)


@dataclass(frozen=True)
class Fault:
    """One that comes."""

    at: float
    name: str
    kind: Kind
    place: float
    """Of the node among all, 0 to 1."""
    luck: float
    """0 to 1."""


def draw_faults(mix: Mix, accelerators: int, seconds: float, seed: int, *, often: float = 1.0) -> list[Fault]:
    """All of a run, in order of time; ``often``: so many times the mix's rate."""
    random_source = random.Random(seed)
    rate = often * mix.per_day(accelerators) / DAY
    if rate == 0:
        return []
    names, weights = list(mix.kinds), [kind.weight for kind in mix.kinds.values()]
    found, at = [], random_source.expovariate(1.0) / rate
    while at < seconds:
        (name,) = random_source.choices(names, weights)
        found.append(Fault(at, name, mix.kinds[name], random_source.random(), random_source.random()))
        at += random_source.expovariate(1.0) / rate
    return found


def load_mix(name_or_path: str) -> Mix:
    """By name, or from a file. Raises `BadInputError`."""
    try:
        return Mix.model_validate(read_recipe("mixes", name_or_path, "--mix"))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise BadInputError(f"{name_or_path}: {key}", first["input"], explain(first)) from None
