"""Estimate the step time if a rank were not slow: the simulator replays the program with measured times.

Each compute action takes its measured time: among tensor-parallel peers, the longest own time and the
shortest collective (the last arriver waits least). Messages and collectives take the median of those that a
rank waited for. The slow rank gets the medians of its peers. The difference between the two replays is its
cost, which is subtracted from the measured time.

    without = measured - (replayed - replayed healed)

Only a few replicas are replayed: those of the given ranks, and those that compute longest.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from myriad.dashboard.insight.arrivals import waits_of
from myriad.dashboard.insight.needs import DATA_AXES, ProgramNeeds
from myriad.dashboard.insight.rank_arrays import Array
from myriad.dashboard.insight.step_spans import StepSpans
from myriad.planner.simulation.rank_clocks import RankClocks
from myriad.program.actions import COMPUTE, COPIES_ACTIVATIONS, COPIES_STATE, Action, Collective, Copy, Kind
from myriad.units import format_number, format_ranks

__all__ = ["WhatIf", "what_if"]

_MOST_REPLICAS = 6
_MOST_PEERS = 64
_LEAST_WAIT_NS = 20_000
_MEASURED = COMPUTE | COPIES_ACTIVATIONS | COPIES_STATE | {Kind.LOAD, Kind.ORTHOGONALIZE, Kind.UPDATE}


@dataclass(frozen=True)
class WhatIf:
    """The estimated step time without slow ranks."""

    ranks: tuple[int, ...]
    measured_seconds: float
    replayed_seconds: float
    healed_seconds: float
    """Replayed without the ranks being slow."""

    @property
    def without_seconds(self) -> float:
        """Estimated seconds of the step."""
        return self.measured_seconds - (self.replayed_seconds - self.healed_seconds)

    @property
    def sentence(self) -> str:
        """The estimate in a sentence."""
        without, measured = _duration(self.without_seconds), _duration(self.measured_seconds)
        return f"without {format_ranks(self.ranks)} the step would take {without}, not {measured}"


def what_if(step: StepSpans, heal: Collection[int], measured_seconds: float | None = None) -> WhatIf | None:
    """Return the estimate if the ranks in ``heal`` were as fast as their peers; ``None`` if the spans do not
    match the program. ``measured_seconds``: the step time, if spans of successive steps overlap."""
    lanes = _Lanes(step, frozenset(heal))
    if not lanes.known:
        return None
    measured = (step.end_ns - step.begin_ns) * 1e-9 if measured_seconds is None else measured_seconds
    replayed, healed = (lanes.replay(healed=healed) for healed in (False, True))
    return WhatIf(tuple(sorted(heal)), measured, replayed, healed)


def _duration(seconds: float) -> str:
    return f"{format_number(seconds, 4)} s" if seconds >= 1 else f"{format_number(seconds * 1e3, 4)} ms"


class _Lanes:
    """Seconds of each action of the replicas that are replayed."""

    def __init__(self, step: StepSpans, heal: frozenset[int]) -> None:
        self.step, self.ranks, self.heal = step, step.ranks, heal
        self.known = all(len(ranks) for _, _, ranks in step.alike)
        if not self.known:
            return
        self.own, self.tensor = _own_and_tensor(step)
        self.usual = {
            (id(program), place): self._usual(program, place, ranks) for program, place, ranks in step.alike
        }
        self.replicas = self._replicas()

    def _usual(self, program: ProgramNeeds, place: int, ranks: Array) -> tuple[Array, Array]:
        """Return own and tensor-parallel seconds of each action, as medians of healthy peers."""
        healthy = ranks[~np.isin(ranks, list(self.heal))] if self.heal else ranks
        some = healthy if len(healthy) else ranks
        some = some[np.linspace(0, len(some) - 1, min(len(some), _MOST_PEERS)).astype(int)]
        spans = self.step.of_actions(some, len(program.program.ranks[place]))
        own, tensor = (np.median(part[spans], axis=0) * 1e-9 for part in (self.own, self.tensor))
        return own, tensor

    def _replicas(self) -> list[int]:
        """Return the replicas of the healed ranks, and those of the others that compute longest."""
        asked = sorted({int(self.ranks.replica[rank]) for rank in self.heal})
        computes = np.isin(self.step.spans.records["name"], self._codes(COMPUTE))
        owner = self.step.spans.records["rank"]
        busy = np.bincount(owner[computes], self.own[computes], self.ranks.world)
        busy[list(self.heal)] = 0.0
        longest = np.zeros(self.ranks.layout.dp)
        np.maximum.at(longest, self.ranks.replica, busy)
        others = [int(one) for one in np.argsort(-longest, kind="stable") if int(one) not in asked]
        return sorted([*asked, *others[: max(1, _MOST_REPLICAS - len(asked))]])

    def _codes(self, kinds: Collection[Kind]) -> list[int]:
        names = {str(kind) for kind in kinds}
        return [code for code, name in enumerate(self.step.names) if name in names]

    def replay(self, *, healed: bool) -> float:
        """Return the seconds of an iteration that follows another one."""
        programs = [self.step.programs[replica] for replica in self.replicas]
        seconds = [
            self._of_lane(program, replica, place, healed=healed)
            for program, replica in zip(programs, self.replicas, strict=True)
            for place in range(self.ranks.layout.pp)
        ]
        run = _MeasuredRun(programs, _travel(self.step), self.replicas, seconds)
        first = run.iterate()
        second = run.iterate()
        return max(second) - max(first)

    def _of_lane(self, program: ProgramNeeds, replica: int, place: int, *, healed: bool) -> Array:
        first = int(self.ranks.first_of_pipeline[replica, place])
        members = np.arange(first, first + self.ranks.sharers)
        known = members[self.step.matched[members]]
        usual, usual_tensor = self.usual[id(program), place]
        if len(known) == 0 or (healed and self.heal.issuperset(members.tolist())):
            return usual + usual_tensor
        spans = self.step.of_actions(known, len(usual))
        own = self.own[spans] * 1e-9
        if healed:
            own[np.isin(known, list(self.heal))] = usual
        return np.asarray(own.max(axis=0) + self.tensor[spans].min(axis=0) * 1e-9)


def _own_and_tensor(step: StepSpans) -> tuple[Array, Array]:
    """Return nanoseconds of each outer span without, and in, communication of tensor, expert and
    context parallelism."""
    spans = step.spans
    code = [
        code for code, name in enumerate(step.names) if name in ("tensor_comm", "expert_comm", "context_comm")
    ]
    inner = np.flatnonzero(np.isin(spans.records["name"], code) & (spans.parent >= 0))
    tensor = np.bincount(spans.parent[inner], spans.total[inner], len(spans.records))
    return spans.total - tensor, tensor


@dataclass(frozen=True)
class _ChunkSeconds:
    gather: float
    reduce: float
    reduce_across: float
    gather_momentum: float
    scatter_update: float
    own_parameters: float = 0.0
    """Not used, as the seconds of the norm were measured."""

    def copy_seconds(self, copy: Copy) -> float:
        """Return 0: copies between device and host count as measured where a rank waited for them."""
        return 0.0


@dataclass(frozen=True)
class _TravelSeconds:
    """Seconds of messages and collectives that a rank waited for."""

    message: float
    stages: tuple[_ChunkSeconds, ...]
    clipping: float
    tied: float
    copies_block: bool = False

    def message_between(self, source: int, target: int) -> float:
        return self.message

    def clip(self, own: float) -> float:
        return self.clipping


def _travel(step: StepSpans) -> _TravelSeconds:
    """Return the transfer times, from the last post to the end of a wait. Waits that began before the post
    are preferred."""
    start, end = step.spans.start, step.spans.end
    sure: defaultdict[tuple[str, int], list[Array]] = defaultdict(list)
    other: defaultdict[tuple[str, int], list[Array]] = defaultdict(list)
    for wait in waits_of(step):
        of_stage = wait.need.axis in (*DATA_AXES, "dp tp")
        name = {"pp": "message", "ends": "tied", "world": "clip"}.get(wait.need.axis, wait.need.post[0])
        key = name, wait.need.post[1] if of_stage else -1
        long = end[wait.spans] - start[wait.spans] > _LEAST_WAIT_NS
        spans, posts = wait.spans[long], wait.posts[long]
        after, was_there = np.maximum(0, end[spans] - start[posts]), start[posts] >= start[spans]
        if was_there.any():
            sure[key].append(after[was_there])
        elif len(after):
            other[key].append(after)
    usual = {
        key: float(np.median(np.concatenate(sure.get(key) or other[key]))) * 1e-9 for key in {*sure, *other}
    }
    stages = range(step.programs[0].program.num_stages)
    return _TravelSeconds(
        usual.get(("message", -1), 0.0),
        tuple(_ChunkSeconds(*(usual.get((str(one), stage), 0.0) for one in Collective)) for stage in stages),
        usual.get(("clip", -1), 0.0),
        usual.get(("tied", -1), 0.0),
    )


class _MeasuredRun(RankClocks):
    """A simulation with measured seconds."""

    def __init__(
        self,
        programs: Sequence[ProgramNeeds],
        travel: _TravelSeconds,
        replicas: Sequence[int],
        seconds: Sequence[Array],
    ) -> None:
        """``seconds``: seconds of each action, by lane."""
        super().__init__([one.program for one in programs], travel, replicas)
        self.seconds = [row.tolist() for row in seconds]

    def _seconds(self, lane: int, rank: int, action: Action, begin: float) -> float:
        return self.seconds[lane][self.next[lane]] if action.kind in _MEASURED else 0.0
