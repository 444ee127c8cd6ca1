"""Straggler detection in the driver, from the seconds that each rank itself computed in a step. Pure.

Ranks report the seconds of a step in which they computed (`RankStatus.busy_seconds`). Divided by the rank's
micro-batches, they are compared by `myriad.telemetry.stragglers`, which the dashboard uses too.

A rank is slow if the median of its ratios over ten steps is at least 1.3 and nearly all are at least 1.2. So
no single step counts, whatever made it slow (its data, garbage collection, another program). Saves and
evaluations are outside the measured time. If steps take more than six seconds, the steps of a minute are
enough, at least three. If all ranks of a node are slow, the node is; if a whole stage is slower than before,
its work is, and no node is a suspect. Work that grows in one stage without peers looks like a slow node,
until layers are moved (`rebalance`).

numpy is imported at the first comparison, so that a driver starts quickly and takes over quickly.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Literal

from myriad.supervise.observations import RankStatus
from myriad.supervise.policy.step_work import StepWork
from myriad.units import format_ranks

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from myriad.telemetry.stragglers import Baseline, Comparison, PeerGroups, SlowRanks, StragglerThreshold

__all__ = ["StragglerDetector", "StragglerFinding", "driver_threshold"]

_RATIO, _NEARLY_RATIO, _STEADY_SHARE = 1.3, 1.2, 0.9
_STEPS = 10
_SECONDS, _LEAST_STEPS = 60.0, 3
_WARM_UP_STEPS = 2


def driver_threshold() -> "StragglerThreshold":
    """Return the conditions under which the driver reports and acts."""
    from myriad.telemetry.stragglers import StragglerThreshold

    return StragglerThreshold(
        ratio=_RATIO, baseline_ratio=_RATIO, nearly_ratio=_NEARLY_RATIO, steady_share=_STEADY_SHARE
    )


@dataclass(frozen=True)
class StragglerFinding:
    """A slow rank, node or stage."""

    culprit: Literal["rank", "node", "stage"]
    ranks: tuple[int, ...]
    node: int
    """Slow node; -1 if there is no single one."""
    ratio: float
    """Ratio to the others of the stage; of a whole stage, to its baseline."""
    alone: bool
    """Whether the stage has no peers."""
    first_step: int
    last_step: int
    seconds: float
    """Measured seconds per micro-batch."""
    usual_seconds: float
    one_machine: bool = False
    """Whether all ranks are on one node."""

    @property
    def text(self) -> str:
        """Describe the finding for people."""
        who = format_ranks(self.ranks)
        if self.culprit == "stage":
            return f"a whole stage takes {self.ratio:.2f} times as long as before: {who}"
        what = f"node {self.node} ({who})" if self.culprit == "node" else f"{who} on node {self.node}"
        than = "before, as no other stage does" if self.alone else "others of the same stage"
        cause = "; on one machine, another program may slow a rank" if self.one_machine else ""
        return f"{what} computes {self.ratio:.2f} times as long as {than}{cause}"


@dataclass(frozen=True)
class _Sample:
    """The times of one step."""

    now: float
    step: int
    seconds: Mapping[int, float]
    """Seconds per micro-batch, by rank, in ascending order of ranks."""


class StragglerDetector:
    """Compares the ranks of one attempt."""

    def __init__(
        self,
        work: StepWork,
        placement: Mapping[int, Sequence[int]],
        shares: Sequence[int],
        before: Mapping[int, float] | None = None,
    ) -> None:
        """``shares``: micro-batches of each replica in this attempt. ``before``: seconds per micro-batch, by
        rank, in an earlier attempt with the same layout and placement."""
        self._node_of = {rank: node for node, ranks in placement.items() for rank in ranks}
        world = len(self._node_of)
        self._ranks = sorted(self._node_of)
        places = {rank: work.place(rank, world) for rank in self._node_of}
        self.replica_of = {rank: replica for rank, (replica, _) in places.items()}
        self._share_of = {rank: shares[replica] for rank, replica in self.replica_of.items()}
        self._stage_of = {rank: stage for rank, (_, stage) in places.items()}
        self.stages: dict[int, list[int]] = defaultdict(list)
        for rank, stage in self._stage_of.items():
            self.stages[stage].append(rank)
        self._samples: deque[_Sample] = deque(maxlen=_STEPS)
        self._first_step: int | None = None
        self.baseline: dict[int, float] = dict(before or {})
        """Baseline of each rank in seconds per micro-batch; empty: not known yet."""
        self._groups: PeerGroups | None = None
        self._compared: Comparison | None = None

    def observe(self, seen: Sequence[RankStatus], now: float) -> bool:
        """Record a row of every rank of the attempt; return whether it has a new step."""
        step = min((one.step for one in seen), default=-1)
        known = all(one.busy_seconds > 0 and one.rank in self._node_of for one in seen)
        if not seen or not known or len(seen) != len(self._node_of):
            return False
        if self._first_step is None:
            self._first_step = step
        last = self._samples[-1].step if self._samples else self._first_step + _WARM_UP_STEPS - 1
        if step <= last:
            return False
        seconds = {one.rank: one.busy_seconds / self._share_of[one.rank] for one in sorted(seen, key=_rank)}
        self._samples.append(_Sample(now, step, seconds))
        self._compared = None
        if len(self._samples) == _STEPS:
            self._learn()
        return True

    def _learn(self) -> None:
        """Update the baseline from the newest steps."""
        baseline = self._baseline()
        if baseline.learn(self._table()) and baseline.seconds is not None:
            self.baseline = dict(zip(self._ranks, baseline.seconds.tolist(), strict=True))

    def rebase(self, seconds: Mapping[int, float]) -> None:
        """Replace the baseline by the seconds per micro-batch that each rank would take if it were not
        slow."""
        self.baseline |= seconds
        self._compared = None

    def _baseline(self) -> "Baseline":
        import numpy as np

        from myriad.telemetry.stragglers import Baseline, PeerGroups

        if self._groups is None:
            stage, node = ([of[rank] for rank in self._ranks] for of in (self._stage_of, self._node_of))
            self._groups = PeerGroups(np.array(stage), np.array(node))
        known = np.array([self.baseline[rank] for rank in self._ranks]) if self.baseline else None
        return Baseline(self._groups, known)

    def _table(self) -> "npt.NDArray[np.float64]":
        import numpy as np

        return np.array([list(sample.seconds.values()) for sample in self._samples])

    def _comparison(self) -> "Comparison":
        """Compare the ranks in the newest steps. The result is kept until another step arrives."""
        if self._compared is None:
            from myriad.telemetry.stragglers import Comparison

            baseline = self._baseline()
            assert self._groups is not None, "made with the baseline"
            self._compared = Comparison(self._table(), self._groups, baseline)
        return self._compared

    @property
    def is_sure(self) -> bool:
        """Whether there are enough steps for a finding."""
        samples = self._samples
        long = len(samples) >= _LEAST_STEPS and samples[-1].now - samples[0].now >= _SECONDS
        return len(samples) == _STEPS or long

    @property
    def step(self) -> int:
        """Newest step that was measured."""
        return self._samples[-1].step

    def usual(self, rank: int) -> float:
        """Return the median seconds per micro-batch of a rank."""
        return median(sample.seconds[rank] for sample in self._samples)

    @property
    def all_alike(self) -> bool:
        """Whether no rank is even nearly slow."""
        return self.is_sure and not bool((self._comparison().ratio >= _NEARLY_RATIO).any())

    def found(self) -> StragglerFinding | None:
        """Return the slowest finding, if any rank is slow."""
        if not self.is_sure:
            return None
        found = self._comparison().stragglers(driver_threshold())
        return self._finding(found[0]) if found else None

    def _finding(self, slow: "SlowRanks") -> StragglerFinding:
        first, last = self._samples[0].step, self._samples[-1].step
        ranks = tuple(self._ranks[at] for at in slow.ranks)
        times, one = (slow.seconds, slow.usual_seconds), len(set(self._node_of.values())) == 1
        return StragglerFinding(slow.kind, ranks, slow.node, slow.ratio, slow.alone, first, last, *times, one)

    def paces(self) -> list[float]:
        """Return the seconds per micro-batch of each replica, which are those of its slowest rank."""
        found: dict[int, float] = defaultdict(float)
        for rank, replica in self.replica_of.items():
            found[replica] = max(found[replica], self.usual(rank))
        return [found[replica] for replica in sorted(found)]


def _rank(seen: RankStatus) -> int:
    return seen.rank
