"""Layouts that are rehearsed, and what each takes on real processes.

A case is a layout of one small GPT, between 2 and 8 ranks, each a process of one thread. ``loopback``: all in
one host. A rate: each in a host of its own, with a link so fast. Rank r runs on core r modulo the cores.
"""

import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from myriad.job import Job

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from gpt_ranks import make_job, train
from hosts import Hosts
from pace import Pace
from quiet import QUIET_RATIO, others_at_work, wait_for_quiet

__all__ = ["CASES", "LOOPBACK", "MODEL", "Case", "Measured", "Rehearsal", "read", "write"]

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
    """One case over one kind of link."""

    case: str
    links: str
    visits: list[float]
    """Seconds of an iteration, the median of each visit."""
    others: list[float]
    """Share of the cores' time that went to other work during the visit."""
    paces: list[list[float]]
    """Seconds of the product that `pace.py` times, on each core, around the visit."""

    @property
    def seconds(self) -> float:
        """The median of the quiet visits; without any, the quietest."""
        return statistics.median(self.visits[index] for index in self._counted)

    @property
    def pace(self) -> list[float]:
        """Return the seconds of that product on each core around the counted visits."""
        rows = [self.paces[index] for index in self._counted]
        return [statistics.median(core) for core in zip(*rows, strict=True)]

    @property
    def _counted(self) -> list[int]:
        quiet = [index for index, other in enumerate(self.others) if other < QUIET_RATIO]
        return quiet or [self.others.index(min(self.others))]

    @property
    def num_quiet(self) -> int:
        return sum(other < QUIET_RATIO for other in self.others)


class Rehearsal:
    """Hosts, and what was measured on them so far."""

    def __init__(self, found: Sequence[Measured], steps: int, patience_seconds: float) -> None:
        """``patience_seconds``: for how long a visit waits for other work on the machine to end."""
        self.found = {(one.case, one.links): one for one in found}
        self.steps, self.patience_seconds = steps, patience_seconds

    def visit_all(self, cases: Sequence[Case], links: Sequence[str], rounds: int) -> Iterator[Measured]:
        """Each case over each link until it has ``rounds`` quiet visits, at most twice as many in all; in
        turns, so that what else the machine does meets all alike. Gives what has been visited once more."""
        with Hosts(1) as one, Hosts(8) as many, Pace() as pace:
            for turn in range(2 * rounds):
                for case, link in product(cases, links):
                    known = self.found.get((case.name, link))
                    if known is not None and (known.num_quiet >= rounds or len(known.visits) > turn):
                        continue
                    hosts = one if link == LOOPBACK else many
                    hosts.set_rate(None if link == LOOPBACK else link)
                    yield self._visit(hosts, case, link, pace)

    def _visit(self, hosts: Hosts, case: Case, link: str, pace: Pace) -> Measured:
        job = case.job
        ranks_per_host = job.layout.world if link == LOOPBACK else 1
        wait_for_quiet(self.patience_seconds)
        before = pace.seconds()
        with others_at_work() as others:
            first = train(hosts, job, self.steps, ranks_per_host=ranks_per_host)[0]
        around = [(one + other) / 2 for one, other in zip(before, pace.seconds(), strict=True)]
        known = self.found.get((case.name, link), Measured(case.name, link, [], [], []))
        now = Measured(
            case.name,
            link,
            [*known.visits, statistics.median(first.step_seconds)],
            [*known.others, others()],
            [*known.paces, around],
        )
        self.found[case.name, link] = now
        return now


def read(path: Path) -> list[Measured]:
    """What `write` has written."""
    return [Measured(**row) for row in json.loads(path.read_text())] if path.exists() else []


def write(path: Path, found: Iterable[Measured]) -> None:
    """To go on from, or to predict again without measuring again."""
    path.write_text(json.dumps([vars(one) for one in found]) + "\n")
