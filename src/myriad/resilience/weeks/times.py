"""How long things take, by policy: from the tables in ``policies/``, which say where each figure is from."""

import tomllib
from importlib import resources
from typing import Any, Literal

from pydantic import Field

from myriad.config import Config

__all__ = ["RivalTimes", "Times", "load_aims", "load_rival", "load_times"]


class Times(Config):
    """Of Myriad: what its decisions do not decide."""

    step_seconds: float = Field(gt=0)
    crash_seen_seconds: float = Field(ge=0)
    end_seconds: float = Field(ge=0)
    restart_seconds: float = Field(ge=0)
    cold_start_seconds: float = Field(ge=0)
    saving_ratio: float = Field(ge=0, lt=1)
    memory_every: float = Field(gt=0)
    copies_every: float = Field(gt=0)
    durable_seconds: float = Field(gt=0)
    save_seconds: float = Field(ge=0)
    culprit_wrong_ratio: float = Field(ge=0, le=1)
    repair_seconds: float = Field(ge=0)
    corrupt_found_seconds: float = Field(0, ge=0)
    slow_found_seconds: float = Field(0, ge=0)
    """By a detector; 0: there is none."""
    unseen_seconds: float = Field(ge=0)
    person_seconds: float = Field(ge=0)
    slower_ratio: float = Field(ge=0)


class RivalTimes(Config):
    """Of a policy that is known from its paper alone."""

    title: str
    seen_seconds: dict[Literal["exit", "hang", "silent", "planned"], float]
    diagnosing_seconds: float = Field(ge=0)
    restart_seconds: float = Field(ge=0)
    saved_every_seconds: float = Field(gt=0)
    saving_ratio: float = Field(ge=0, lt=1)
    alone_ratio: float = Field(ge=0, le=1)
    found_ratio: float = Field(ge=0, le=1)


def load_times(**changes: float) -> Times:
    """Myriad's, with changes."""
    return Times.model_validate(_read("myriad") | changes)


def load_aims() -> dict[str, float]:
    """What is aimed at and not there yet, as changes of Myriad's times."""
    return _read("aims")


def load_rival(name: Literal["megascale", "byterobust"]) -> RivalTimes:
    """A rival's."""
    return RivalTimes.model_validate(_read(name))


def _read(name: str) -> dict[str, Any]:
    folder = resources.files("myriad.resilience.weeks") / "policies"
    return tomllib.loads((folder / f"{name}.toml").read_text(encoding="utf-8"))
