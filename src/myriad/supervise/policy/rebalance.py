"""Reactions to slow ranks: report them, move work away from them, or replace their node with a spare. Pure.

    equal     rank 0  4 x 10 ms                 rank 1  4 x 15 ms     a step takes 60 ms
    moved     rank 0  5 x 10 ms                 rank 1  3 x 15 ms                  50 ms

Micro-batches per replica are whole numbers. Of all allowed divisions, the one with the shortest step is used.
Ranks end after a step, with a snapshot in memory, and restart with the new numbers. So a move must pay for
itself, and the next one is made five minutes later at the earliest. When the slow rank is as fast as the
others again, work moves back in the same way.

If no other replica can take the work, other pipeline stages take some of its layers. That is so if there is
no other replica, or all are on the slow node. A rank that takes longer than before may be on a slow node, or
its layers may have more work. A move shows which: each of three explanations predicts the time of every rank
with the new cuts, and the nearest prediction is taken.

    before   rank 0  e b b b b  40 ms     rank 1  b b b b h  60 ms, 1.5 times as long as before
    after    rank 0  e b b b b b          rank 1  b b b h
               the node     50 ms                 45 ms          the layers that stayed are as slow
               the layers   55 ms                 45 ms          moved layers are slow on the new rank
               neither      50 ms                 30 ms          the slowness has passed

If the layers were slow, that is reported and they count as longer from then on: no node is a suspect.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from statistics import median
from typing import Literal

from myriad.comm.attempt_layout import AttemptLayout
from myriad.supervise.observations import RankStatus
from myriad.supervise.policy.policy_actions import RULES_OF_LEAVING, ReportSlow, RestartAtStep
from myriad.supervise.policy.step_work import (
    LayerMove,
    Pipeline,
    StepWork,
    best_cuts,
    layer_seconds,
    pipeline_seconds,
)
from myriad.supervise.policy.straggler_detector import StragglerDetector, StragglerFinding
from myriad.units import format_ranks

__all__ = ["Rebalancer", "best_shares", "step_seconds"]

_SLOW_RATIO = 1.2
AS_GOOD_RATIO = 1.05
"""If the job's own layer cuts or micro-batch counts are within this ratio of the best, they are used
instead."""
_SURELY = 0.5
"""The layers must explain the times with at most this share of the node's error, because slow nodes are far
more common."""


@dataclass(frozen=True)
class BetterCuts:
    """Better layer cuts, and what they gain."""

    cuts: tuple[int, ...]
    moved: LayerMove
    old_seconds: float
    """Seconds of a step with the current cuts."""
    new_seconds: float
    paces: tuple[float, ...]
    """Current seconds per micro-batch of each rank of the pipeline."""


Verdict = Literal["node", "layers", "neither"]


class LayerRebalancer:
    """Decides on moves of layers between the stages of a run, and judges what a move showed."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.cuts = pipeline.cuts
        self.moved: LayerMove | None = None
        self._to_judge = False

    def begin(self, layout: AttemptLayout, moved: LayerMove | None, *, judge: bool) -> None:
        """Begin an attempt. ``judge``: it is the first one with these cuts, as far as is known."""
        text = layout.partition
        self.cuts = self._pipeline.cuts if text is None else _cuts_of(text)
        self.moved = moved
        self._to_judge = judge and moved is not None and max(moved.times) >= _SLOW_RATIO

    @property
    def has_moved(self) -> bool:
        """Whether layers are placed differently than in the job."""
        return self.cuts != self._pipeline.cuts

    def partition(self, cuts: tuple[int, ...]) -> str | None:
        """Return cuts in the form of `AttemptLayout.partition`; ``None`` for the job's own cuts."""
        return None if cuts == self._pipeline.cuts else f"manual:{','.join(map(str, cuts))}"

    def evaluate(self, stragglers: StragglerDetector) -> Verdict | None:
        """Return once what a move has shown, as soon as there are enough steps. From then on ranks are
        compared with the time that they would take if they were not slow."""
        moved = self.moved
        if not self._to_judge or moved is None or not stragglers.baseline:
            return None
        self._to_judge = False
        paces = self._paces(stragglers)
        verdict = self._nearest(moved, paces)
        if verdict == "layers":
            self.moved = moved = replace(moved, seconds=tuple(self._longer(moved)))
        usual = self._pipeline.sums(moved.seconds, self.cuts)
        for stage, ranks in stragglers.stages.items():
            if paces[stage] >= _SLOW_RATIO * usual[stage]:
                stragglers.rebase(dict.fromkeys(ranks, usual[stage]))
        return verdict

    def slow_layers(self) -> tuple[int, ...]:
        """Return the layers that were on slow ranks when layers were moved."""
        moved = self.moved
        assert moved is not None, "they were"
        owners = self._pipeline.owner_of_layer(moved.cuts)
        return tuple(layer for layer, owner in enumerate(owners) if moved.times[owner] >= _SLOW_RATIO)

    def _longer(self, moved: LayerMove) -> list[float]:
        """Return the seconds of each layer under the assumption that the layers were slow, not the node."""
        owners = self._pipeline.owner_of_layer(moved.cuts)
        return [one * moved.times[owner] for one, owner in zip(moved.seconds, owners, strict=True)]

    def _nearest(self, moved: LayerMove, paces: Sequence[float]) -> Verdict:
        usual = self._pipeline.sums(moved.seconds, self.cuts)
        as_slow = [one * times for one, times in zip(usual, moved.times, strict=True)]
        node, neither = _distance(paces, as_slow), _distance(paces, usual)
        layers = _distance(paces, self._pipeline.sums(self._longer(moved), self.cuts))
        if layers < min(_SURELY * node, neither):
            return "layers"
        return "node" if node < neither else "neither"

    def _paces(self, stragglers: StragglerDetector) -> list[float]:
        stages = stragglers.stages
        return [max(stragglers.usual(rank) for rank in stages[stage]) for stage in sorted(stages)]

    def better(self, stragglers: StragglerDetector, share: int) -> BetterCuts | None:
        """Return the best cuts for a step of ``share`` micro-batches; ``None``: too little is known."""
        pipeline, before = self._pipeline, stragglers.baseline
        if not before:
            return None
        paces = self._paces(stragglers)
        if self.moved is None:
            stages = stragglers.stages
            usual = [median(before[rank] for rank in stages[stage]) for stage in sorted(stages)]
            seconds = layer_seconds(pipeline, usual, self.cuts)
        else:
            seconds = self.moved.seconds
        times = [pace / one for pace, one in zip(paces, pipeline.sums(seconds, self.cuts), strict=True)]

        def step(cuts: Sequence[int]) -> float:
            of_ranks = zip(times, pipeline.sums(seconds, cuts), strict=True)
            return pipeline_seconds([one * total for one, total in of_ranks], share, len(pipeline.owners))

        best = best_cuts(pipeline, seconds, times, share)
        if step(pipeline.cuts) <= AS_GOOD_RATIO * step(best):
            best = pipeline.cuts
        moved = LayerMove(self.cuts, tuple(seconds), tuple(times))
        return BetterCuts(best, moved, step(self.cuts), step(best), tuple(paces))


def _cuts_of(partition: str) -> tuple[int, ...]:
    return tuple(int(cut) for cut in partition.removeprefix("manual:").split(","))


def _distance(found: Sequence[float], said: Sequence[float]) -> float:
    return sum(abs(log(one / other)) for one, other in zip(found, said, strict=True))


_LEAST_GAIN_RATIO, _LEAST_GAIN_BACK_RATIO = 0.1, 0.03
"""Least gain as a share of a step time; the second value holds for going back to the job's layout."""
_BETWEEN_SECONDS = 300.0
_POLL_SECONDS = 5.0
"""Seconds between two searches for better cuts: with many layers and stages a search takes a tenth of a
second."""
_QUIET_SECONDS = 600.0
"""Seconds in which a finding is not reported again; they double with each report."""
_LEAST_START_SECONDS, _PAYS_TIMES = 3.0, 2.0
"""A move must gain this many times the start time of an attempt; that time counts as at least this long."""


def step_seconds(paces: Sequence[float], shares: Sequence[int], depth: int) -> float:
    """Return the seconds of a step. ``paces``: seconds of a replica's micro-batch, in a pipeline of
    ``depth``."""
    return max(pace * (share + depth - 1) for pace, share in zip(paces, shares, strict=True))


def best_shares(paces: Sequence[float], total: int, most: int, depth: int) -> tuple[int, ...]:
    """Divide ``total`` micro-batches for the shortest step, at least one and at most ``most`` to each
    replica. Each further micro-batch goes to the replica that would then finish first."""
    shares = [1] * len(paces)
    ends = [(pace * (1 + depth), replica) for replica, pace in enumerate(paces)]
    heapq.heapify(ends)
    for _ in range(total - len(paces)):
        _, replica = heapq.heappop(ends)
        shares[replica] += 1
        if shares[replica] < most:
            heapq.heappush(ends, (paces[replica] * (shares[replica] + depth), replica))
    return tuple(shares)


class Rebalancer:
    """Watches the ranks of a run for stragglers, and decides on moves of work."""

    def __init__(self, work: StepWork, patience: float) -> None:
        self._job, self._work, self._patience = work, work, patience
        self._layout = AttemptLayout()
        self._stragglers: StragglerDetector | None = None
        self._shares = work.shares
        self._reported: set[tuple[str, tuple[int, ...]]] = set()
        self._quiet: dict[tuple[str, tuple[int, ...]], tuple[float, float]] = {}
        """For each finding that was reported: until when it is not reported again, and for how long."""
        self._move_at, self._look_at, self._began = 0.0, 0.0, 0.0
        self._start_seconds: float | None = None
        self._placement: dict[int, tuple[int, ...]] = {}
        self._shifting = None if work.pipeline is None else LayerRebalancer(work.pipeline)

    def begin(
        self,
        placement: Mapping[int, Sequence[int]],
        layout: AttemptLayout,
        now: float,
        moved: LayerMove | None = None,
    ) -> None:
        """Begin an attempt, or continue one under a new driver. ``moved``: what was known when its layers
        were moved."""
        ranks_of = {node: tuple(ranks) for node, ranks in placement.items()}
        alike = ranks_of == self._placement and layout == self._layout
        before = self._stragglers.baseline if alike and self._stragglers is not None else {}
        shares = layout.shares or self._job.in_attempt(layout).shares
        moved_shares = shares != self._shares and len(shares) == len(self._shares)
        if moved_shares or layout.partition != self._layout.partition:
            self._move_at = now + _BETWEEN_SECONDS * self._patience
        self._layout, self._work, self._placement = layout, self._job.in_attempt(layout), ranks_of
        self._shares, self._began, self._start_seconds = shares, now, None
        self._stragglers = StragglerDetector(self._work, placement, shares, before)
        if self._shifting is not None:
            self._shifting.begin(layout, moved, judge=not before)

    def stand_still(self) -> None:
        """Compare no ranks until the next attempt: the division of work in this one is unknown."""
        self._stragglers = None

    def keep_layers(self) -> None:
        """Move no layers any more."""
        self._shifting = None

    def observe(
        self, seen: Sequence[RankStatus], now: float, epoch: int, *, spares: bool
    ) -> Iterator[ReportSlow | RestartAtStep]:
        """Record a row of every rank while they train. ``spares``: whether spares are connected."""
        stragglers = self._stragglers
        if stragglers is None:
            return
        if self._start_seconds is None and all(one.step_seconds > 0 for one in seen):
            self._start_seconds = max(_LEAST_START_SECONDS, now - self._began)
        if not stragglers.observe(seen, now) or not stragglers.is_sure:
            return
        if self._shifting is not None and self._shifting.evaluate(stragglers) == "layers":
            yield _report_layers(self._shifting, stragglers)
        finding = stragglers.found()
        yield from self._report(finding, stragglers, now)
        if self._work.on_slow != "report" and now >= self._move_at:
            yield from self._act(finding, stragglers, now, epoch, spares=spares)

    def _report(
        self, finding: StragglerFinding | None, stragglers: StragglerDetector, now: float
    ) -> Iterator[ReportSlow]:
        """Report a finding once, until no rank is slow any more. A finding that comes and goes is reported
        ever more rarely: other programs may use the same cores."""
        if finding is None:
            if stragglers.all_alike:
                self._reported.clear()
            return
        key = finding.culprit, finding.ranks
        until, pause = self._quiet.get(key, (0.0, _QUIET_SECONDS * self._patience / 2))
        if key in self._reported or now < until:
            return
        self._reported.add(key)
        self._quiet[key] = now + 2 * pause, 2 * pause
        yield ReportSlow(
            rule=_rule(finding),
            evidence=_evidence(finding),
            culprit=finding.culprit,
            ranks=finding.ranks,
            node=finding.node,
            step=finding.last_step,
            problem=finding.text,
        )

    def _act(
        self,
        finding: StragglerFinding | None,
        stragglers: StragglerDetector,
        now: float,
        epoch: int,
        *,
        spares: bool,
    ) -> Iterator[RestartAtStep]:
        blamed = finding is not None and finding.culprit != "stage"
        if finding is not None and blamed and self._work.on_slow == "swap" and spares:
            self._move_at = now + _BETWEEN_SECONDS * self._patience
            rule = RULES_OF_LEAVING["slow"]
            yield RestartAtStep(rule=rule, evidence=_evidence(finding), epoch=epoch, node=finding.node)
            return
        turn = self._other_shares(stragglers, blamed=blamed)
        turn = turn or self._other_layers(finding, stragglers, now)
        if turn is not None:
            self._move_at = now + _BETWEEN_SECONDS * self._patience
            yield replace(turn, epoch=epoch)

    def _other_shares(self, stragglers: StragglerDetector, *, blamed: bool) -> RestartAtStep | None:
        """Return a restart that moves micro-batches between replicas, if it pays."""
        if not blamed and self._shares == self._work.shares:
            return None
        paces, depth = stragglers.paces(), self._work.pp
        shares = self._better(paces)
        old, new = (step_seconds(paces, each, depth) for each in (self._shares, shares))
        if not self._pays(old, new, stragglers):
            return None
        evidence = {
            "seconds_per_micro_batch": [round(pace, 6) for pace in paces],
            "shares_before": list(self._shares),
            "step_seconds": [round(old, 6), round(new, 6)],
        }
        rule = "work moves away from slow ranks" if blamed else "ranks are as fast as others again"
        layout = replace(self._layout, shares=shares)
        moved = None if self._shifting is None else self._shifting.moved
        return RestartAtStep(rule=rule, evidence=evidence, epoch=0, layout=layout, moved=moved)

    def _other_layers(
        self, finding: StragglerFinding | None, stragglers: StragglerDetector, now: float
    ) -> RestartAtStep | None:
        """Return a restart that moves layers between stages, if it pays: where moving micro-batches cannot
        help, or to undo an earlier move."""
        shifting = self._shifting
        blamed = finding is not None and finding.culprit != "stage"
        alone = finding is not None and blamed and (finding.alone or self._work.dp == 1)
        if shifting is None or not (alone or shifting.has_moved) or now < self._look_at:
            return None
        self._look_at = now + _POLL_SECONDS
        better = shifting.better(stragglers, max(self._shares))
        if better is None:
            return None
        goes_back = not blamed and shifting.partition(better.cuts) is None
        least = _LEAST_GAIN_BACK_RATIO if goes_back else _LEAST_GAIN_RATIO
        if not self._pays(better.old_seconds, better.new_seconds, stragglers, least):
            return None
        rule = "layers move away from slow ranks" if blamed else "ranks are as fast as before again"
        layout = replace(self._layout, partition=shifting.partition(better.cuts))
        moved = None if layout.partition is None else better.moved
        return RestartAtStep(
            rule=rule, evidence=_layers_evidence(better), epoch=0, layout=layout, moved=moved
        )

    def _pays(
        self, old: float, new: float, stragglers: StragglerDetector, least: float = _LEAST_GAIN_RATIO
    ) -> bool:
        """Return whether a restart pays that changes the step time from ``old`` to ``new`` seconds."""
        gained = (old - new) * (self._work.steps - stragglers.step)
        cost = _PAYS_TIMES * (self._start_seconds or _LEAST_START_SECONDS)
        return old - new >= least * old and gained >= cost

    def _better(self, paces: Sequence[float]) -> tuple[int, ...]:
        work = self._work
        best = best_shares(paces, sum(work.shares), work.most_share, work.pp)
        longest = AS_GOOD_RATIO * step_seconds(paces, best, work.pp)
        return work.shares if step_seconds(paces, work.shares, work.pp) <= longest else best


def _rule(finding: StragglerFinding) -> str:
    if finding.culprit == "stage":
        return "a whole stage is slow"
    return "slower than before, unlike others" if finding.alone else "slower than others of its stage"


def _report_layers(shifting: LayerRebalancer, stragglers: StragglerDetector) -> ReportSlow:
    """Report layers that were moved and are as slow on their new ranks."""
    assert shifting.moved is not None, "it was judged"
    layers, ranks = shifting.slow_layers(), sorted(rank for of in stragglers.stages.values() for rank in of)
    text = f"{len(layers)} layers take as long on other ranks, too: it is their work ({format_ranks(ranks)})"
    return ReportSlow(
        rule="slowness went along with layers",
        evidence={"layers": list(layers)},
        culprit="stage",
        ranks=tuple(ranks),
        node=-1,
        step=stragglers.step,
        problem=text,
    )


def _layers_evidence(better: BetterCuts) -> dict[str, object]:
    return {
        "seconds_per_micro_batch": [round(pace, 6) for pace in better.paces],
        "times": [round(one, 3) for one in better.moved.times],
        "cuts_before": list(better.moved.cuts),
        "step_seconds": [round(better.old_seconds, 6), round(better.new_seconds, 6)],
    }


def _evidence(finding: StragglerFinding) -> dict[str, object]:
    return {
        "ratio": round(finding.ratio, 3),
        "steps": [finding.first_step, finding.last_step],
        "seconds_per_micro_batch": round(finding.seconds, 6),
        "usual_seconds_per_micro_batch": round(finding.usual_seconds, 6),
    }
