"""Readings, items and verdicts: how a measured value becomes a verdict.

A probe returns a `Reading`: a value, and a problem if one is known without a comparison. `evaluate` compares
it with the cluster's baseline, or without one with an absolute floor that healthy hardware of the last ten
years exceeds easily, and returns the `Item` that a person reads:

    rate    value / expected >= 0.8 ok     >= 0.5 slow     else bad
    text    equal to the baseline's ok     else bad        (versions, bits of the mini-model)

Why 0.8: a rank counts as a straggler from 1.3 x the step of its peers, which is 0.77 of their speed, so a
node is called slow just before that. SuperBench (ATC 2024) takes 0.95, which needs an idle machine and
several runs; one run of a second on a busy node varies by 10 % by itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["BAD_RATIO", "SLOW_RATIO", "Diagnosis", "Expected", "Item", "Reading", "Verdict", "evaluate"]

Verdict = Literal["ok", "slow", "bad", "skipped"]
Expected = Mapping[str, Mapping[str, float | str]]
"""Values of a baseline: by hardware, then by measure."""

SLOW_RATIO, BAD_RATIO = 0.8, 0.5


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The result of a probe, not yet compared with the baseline."""

    name: str
    value: float | str | None = None
    unit: str = ""
    floor: float | None = None
    """Lowest value without a baseline; more is better."""
    hardware: str = ""
    """Key in the baseline; empty: the value is never compared."""
    measure: str = ""
    """Name in the baseline; empty: ``name``."""
    problem: str = ""
    """A fault that needs no comparison."""
    skipped: str = ""
    """Reason why there is no value; bad if the baseline of ``hardware`` has one."""
    note: str = ""
    """Shown beside a good value."""
    remedy: str = ""
    """What to do if the value is slow, bad or different."""
    advisory: bool = False
    """Reported, but no decision uses it."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One check and its verdict."""

    name: str
    verdict: Verdict
    words: str
    measured: float | str | None = None
    expected: float | str | None = None
    unit: str = ""
    advisory: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """The items of all checks of a node."""

    items: Sequence[Item]
    readings: Sequence[Reading] = ()
    """Readings for a baseline."""
    seconds: float = 0.0

    @property
    def complaints(self) -> list[Item]:
        """Items that make this node unfit for training."""
        return [item for item in self.items if item.verdict in ("slow", "bad") and not item.advisory]

    @property
    def healthy(self) -> bool:
        """Whether no item is slow or bad."""
        return not self.complaints

    @property
    def words(self) -> str:
        """Summary in one line."""
        passed, skipped = (sum(item.verdict == one for item in self.items) for one in ("ok", "skipped"))
        if self.healthy:
            return f"healthy: {passed} checks passed, {skipped} skipped"
        names = ", ".join(f"{item.name} ({item.verdict})" for item in self.complaints)
        return f"do not use this node: {names}"

    def as_json(self) -> dict[str, Any]:
        """Return the diagnosis as JSON."""
        return {
            "healthy": self.healthy,
            "words": self.words,
            "seconds": round(self.seconds, 3),
            "items": [asdict(item) for item in self.items],
        }


def evaluate(reading: Reading, expected: Expected) -> Item:
    """Return the verdict of a reading; see the head of the module."""
    known = expected.get(reading.hardware, {}).get(reading.measure or reading.name)
    value = reading.value
    if reading.skipped and isinstance(known, int | float):  # it worked on the healthy node
        return _item(
            reading, "bad", _join(reading.skipped, reading.remedy, "the baseline has a value"), known
        )
    if reading.skipped:
        return _item(reading, "skipped", reading.skipped)
    if reading.problem:
        return _item(reading, "bad", _join(reading.problem, reading.remedy), known)
    if isinstance(value, str) and isinstance(known, str) and value != known:
        return _item(reading, "bad", _join(f"the baseline has {known}", reading.remedy), known)
    if isinstance(value, int | float):
        if isinstance(known, int | float) and known > 0:
            return _judge_rate(reading, value / known, known, SLOW_RATIO, "the baseline")
        if reading.floor is not None:
            return _judge_rate(reading, value / reading.floor, reading.floor, 1.0, "its floor")
    return _item(reading, "ok", reading.note, known)


def _judge_rate(reading: Reading, ratio: float, expected: float, slow_ratio: float, source: str) -> Item:
    verdict: Verdict = "ok" if ratio >= slow_ratio else "slow" if ratio >= BAD_RATIO else "bad"
    compared = f"{ratio:.0%} of {source}" if slow_ratio < 1 or verdict != "ok" else f"above {source}"
    words = (
        _join(reading.note, compared) if verdict == "ok" else _join(compared, reading.note, reading.remedy)
    )
    return _item(reading, verdict, words, expected)


def _item(reading: Reading, verdict: Verdict, words: str, expected: float | str | None = None) -> Item:
    return Item(
        name=reading.name,
        verdict=verdict,
        words=words,
        measured=reading.value,
        expected=expected,
        unit=reading.unit,
        advisory=reading.advisory,
    )


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
