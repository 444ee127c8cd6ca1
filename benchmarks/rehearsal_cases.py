"""Layouts that are rehearsed, and what each takes on real processes.

A case is a layout of one small GPT, between 2 and 8 ranks, each a process of one thread. ``loopback``: all in
one host. A rate: each in a host of its own, with a link so fast. Rank r runs on core r modulo the cores.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt_ranks import make_job, train
from hosts import Hosts
from myriad.job import Job

__all__ = ["CASES", "LOOPBACK", "MODEL", "Case", "Measured", "measure", "read", "write"]

LOOPBACK = "loopback"
MODEL: Mapping[str, object] = {
    "model.layers": 6,
    "model.hidden": 256,
    "model.sequence": 256,
    "model.vocabulary": 1024,
    "data.vocabulary": 1024,
    "train.global_batch": 8,
}
_NOTHING_OVERLAPS = {f"overlap.{name}": False for name in ("pipeline", "data", "tensor", "optimizer")}


@dataclass(frozen=True)
class Case:
    """One layout."""

    name: str
    keys: Mapping[str, object]

    @property
    def job(self) -> Job:
        return make_job({**MODEL, **self.keys})


def _case(words: str) -> Case:
    """``dp2 zero2 mb2 off``: a name that says the layout."""
    keys: dict[str, object] = {}
    for word in words.split():
        if word == "off":
            keys |= _NOTHING_OVERLAPS
            continue
        letters = word.rstrip("0123456789")
        known = {"mb": "micro_batch", "vs": "virtual_stages"}
        if letters == word or word in ("1f1b", "eager-1f1b"):
            keys["layout.schedule"] = word
        else:
            keys[f"layout.{known.get(letters, letters)}"] = int(word[len(letters) :])
    return Case(words, keys)


CASES = tuple(
    map(
        _case,
        (
            "dp2 off",
            "dp2 zero2",
            "dp2 zero3 mb2",
            "tp2 mb4 off",
            "tp2 mb4",
            "tp2 mb2",
            "pp2 off",
            "pp2 mb2",
            "pp2 vs2",
            "pp2 vs4 mb2",
            "pp2 zero-bubble",
            "dp4 zero1",
            "dp4 zero3 mb2 off",
            "dp2 tp2 mb2",
            "dp2 pp2 zero2",
            "dp2 pp2 vs2 zero2 off",
            "tp2 pp2 mb2",
            "tp4 mb8",
            "pp4",
            "pp4 vs2",
            "pp4 gpipe mb2 off",
            "dp2 tp2 pp2 zero2 mb2",
            "dp4 pp2 zero1",
            "dp2 pp4 zero2",
            "dp8 zero2",
            "tp4 pp2 mb4",
            "pp8",
        ),
    )
)


@dataclass(frozen=True)
class Measured:
    """Seconds of an iteration of one case over one kind of link: the median of each visit."""

    case: str
    links: str
    visits: list[float]

    @property
    def seconds(self) -> float:
        return statistics.median(self.visits)


def measure(cases: Sequence[Case], links: Sequence[str], rounds: int, steps: int) -> Iterator[Measured]:
    """Each case and link; visits to all of them are interleaved, so that what else the machine does meets
    all of them. Gives a case when it has been visited once more."""
    visits: dict[tuple[str, str], list[float]] = {}
    with Hosts(1) as one, Hosts(8) as many:
        for _ in range(rounds):
            for link in links:
                hosts = one if link == LOOPBACK else many
                hosts.set_rate(None if link == LOOPBACK else link)
                for case in cases:
                    job = case.job
                    ranks_per_host = job.layout.world if link == LOOPBACK else 1
                    first = train(hosts, job, steps, ranks_per_host=ranks_per_host)[0]
                    visits.setdefault((case.name, link), []).append(statistics.median(first.step_seconds))
                    yield Measured(case.name, link, list(visits[case.name, link]))


def read(path: Path) -> list[Measured]:
    """What `write` has written."""
    return [Measured(**row) for row in json.loads(path.read_text())] if path.exists() else []


def write(path: Path, found: Sequence[Measured]) -> None:
    """To go on from, or to predict again without measuring again."""
    path.write_text(json.dumps([vars(one) for one in found], indent=1) + "\n")
