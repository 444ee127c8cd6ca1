"""Draw faults from a mix of kinds, which is data: the same faults for every policy.

Faults are a Poisson process whose rate is that of the mix, for each accelerator. Each fault carries its own
random number, so that policies which use it differently meet the same faults.
"""

import random
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, ValidationError

from myriad.config import Config, explain
from myriad.errors import BadInputError
from myriad.recipes import read_recipe
from myriad.supervise.observations import Cause

__all__ = ["DAY", "DrawnFault", "FaultKindShare", "Mix", "Shows", "draw_faults", "load_mix"]

DAY = 86400.0
Shows = Literal["exit", "hang", "silent", "nan", "corrupt", "slow", "planned"]
"""A rank exits; all ranks hang; a node is silent; a loss is non-finite; numbers are wrong but look normal; a
node is slow; a person requests a restart."""


class FaultKindShare(Config):
    """One kind of fault."""

    weight: float = Field(gt=0, le=1e12)
    """Number of faults of this kind, or their share, relative to the other kinds."""
    shows: Shows
    cause: Cause = "crash"
    """Cause that the end of a rank shows."""
    stays: bool = False
    """The node fails again whenever it is used again."""


class Mix(Config):
    """Kinds of faults, and their rate."""

    source: str
    faults: float = Field(ge=0, le=1e9)
    """Number of faults on ``accelerators`` in ``days``; 0: no faults."""
    accelerators: float = Field(ge=1, le=1e9)
    days: float = Field(ge=1e-3, le=1e6)
    kinds: dict[str, FaultKindShare] = Field(min_length=1)

    def per_day(self, accelerators: int) -> float:
        """Return the faults a day on this many accelerators."""
        return self.faults * accelerators / (self.accelerators * self.days)


@dataclass(frozen=True)
class DrawnFault:
    """One fault of a simulated run."""

    at: float
    name: str
    kind: FaultKindShare
    place: float
    """Position of the node among all, 0 to 1."""
    draw: float
    """Random number of the fault, 0 to 1."""


def draw_faults(
    mix: Mix, accelerators: int, seconds: float, seed: int, *, often: float = 1.0
) -> list[DrawnFault]:
    """Draw all faults of a run, in order of time; ``often`` is a factor on the mix's rate."""
    random_source = random.Random(seed)
    rate = often * mix.per_day(accelerators) / DAY
    if rate == 0:
        return []
    names, weights = list(mix.kinds), [kind.weight for kind in mix.kinds.values()]
    found, at = [], random_source.expovariate(1.0) / rate
    while at < seconds:
        (name,) = random_source.choices(names, weights)
        found.append(DrawnFault(at, name, mix.kinds[name], random_source.random(), random_source.random()))
        at += random_source.expovariate(1.0) / rate
    return found


def load_mix(name_or_path: str) -> Mix:
    """Load a mix by name or from a file. Raises `BadInputError`."""
    try:
        return Mix.model_validate(read_recipe("mixes", name_or_path, "--mix"))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise BadInputError(f"{name_or_path}: {key}", first["input"], explain(first)) from None
