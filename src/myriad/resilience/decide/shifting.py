"""Whether layers are moved between the stages of a pipeline, and what a move has shown. Pure.

A rank of the pipeline that takes longer than before may be on a slow node, or its layers may have more to do.
A move tells: each of three explanations says what every rank is to take with the new cuts, and the nearest
to what they take is believed.

    before   rank 0  e b b b b  40 ms     rank 1  b b b b h  60 ms, 1.5 times as long as before
    after    rank 0  e b b b b b          rank 1  b b b h
               the node     50 ms                 45 ms          what stayed is as slow, what left is not
               the layers   55 ms                 45 ms          what left is slow where it is now
               neither      50 ms                 30 ms          it has passed

If it was the layers, that is told, and they count as longer ones from then on: they lie where the step is
shortest, and no node is suspected.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from statistics import median
from typing import Literal

from myriad.comm.attempt_layout import AttemptLayout
from myriad.resilience.decide.layers import Moved, Pipeline, best_cuts, layer_seconds, pipeline_seconds
from myriad.resilience.decide.stragglers import Stragglers

__all__ = ["AS_GOOD_RATIO", "Better", "Shifting", "Verdict"]

_SLOW_RATIO = 1.2
AS_GOOD_RATIO = 1.05
"""Cuts, and shares, of the job that are nearly the best are taken before the best."""
_SURELY = 0.5
"""How much nearer the layers must be than the node, of which there are many cases more."""


@dataclass(frozen=True)
class Better:
    """Other cuts, and what they gain."""

    cuts: tuple[int, ...]
    moved: Moved
    old_seconds: float
    """Of a step."""
    new_seconds: float
    paces: tuple[float, ...]
    """Seconds of a micro-batch of each rank of the pipeline, now."""


Verdict = Literal["node", "layers", "neither"]


class Shifting:
    """Of one run."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.cuts = pipeline.cuts
        self.moved: Moved | None = None
        self._to_judge = False

    def begin(self, layout: AttemptLayout, moved: Moved | None, *, judge: bool) -> None:
        """A new attempt; ``judge``: it is the first with these cuts, as far as is known."""
        text = layout.partition
        self.cuts = self._pipeline.cuts if text is None else _cuts_of(text)
        self.moved = moved
        self._to_judge = judge and moved is not None and max(moved.times) >= _SLOW_RATIO

    @property
    def has_moved(self) -> bool:
        """Layers do not lie as in the job."""
        return self.cuts != self._pipeline.cuts

    def partition(self, cuts: tuple[int, ...]) -> str | None:
        """As a layout has it; the job's: ``None``."""
        return None if cuts == self._pipeline.cuts else f"manual:{','.join(map(str, cuts))}"

    def judge(self, stragglers: Stragglers) -> Verdict | None:
        """What a move has shown, once, as soon as it can be known. From then on ranks are compared with what
        they would take if they were not slow."""
        moved = self.moved
        if not self._to_judge or moved is None or not stragglers.before.seconds:
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
        """That were on slow ranks when layers were moved."""
        moved = self.moved
        assert moved is not None, "they were"
        owners = self._pipeline.owner_of_layer(moved.cuts)
        return tuple(layer for layer, owner in enumerate(owners) if moved.times[owner] >= _SLOW_RATIO)

    def _longer(self, moved: Moved) -> list[float]:
        """Seconds of each layer, if what was slow are the layers."""
        owners = self._pipeline.owner_of_layer(moved.cuts)
        return [one * moved.times[owner] for one, owner in zip(moved.seconds, owners, strict=True)]

    def _nearest(self, moved: Moved, paces: Sequence[float]) -> Verdict:
        usual = self._pipeline.sums(moved.seconds, self.cuts)
        as_slow = [one * times for one, times in zip(usual, moved.times, strict=True)]
        node, neither = _distance(paces, as_slow), _distance(paces, usual)
        layers = _distance(paces, self._pipeline.sums(self._longer(moved), self.cuts))
        if layers < min(_SURELY * node, neither):
            return "layers"
        return "node" if node < neither else "neither"

    def _paces(self, stragglers: Stragglers) -> list[float]:
        stages = stragglers.stages
        return [max(stragglers.usual(rank) for rank in stages[stage]) for stage in sorted(stages)]

    def better(self, stragglers: Stragglers, share: int) -> Better | None:
        """The best cuts for a step of ``share`` micro-batches; ``None``: too little is known."""
        pipeline, before = self._pipeline, stragglers.before.seconds
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
        moved = Moved(self.cuts, tuple(seconds), tuple(times))
        return Better(best, moved, step(self.cuts), step(best), tuple(paces))


def _cuts_of(partition: str) -> tuple[int, ...]:
    return tuple(int(cut) for cut in partition.removeprefix("manual:").split(","))


def _distance(found: Sequence[float], said: Sequence[float]) -> float:
    return sum(abs(log(one / other)) for one, other in zip(found, said, strict=True))
