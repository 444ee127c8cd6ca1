"""Which rank waits for which in a run that hangs, from how far each rank has come in the program of its step.

A rank that has finished k actions is in action k. If that needs a post which another rank has not come to, it
waits for that rank, which in turn may wait. A rank that waits for no other is silent: it computes or is dead,
and all chains of waits end there. MegaScale's rule (section 5.2): the silent ranks are the suspects.

    rank 0   in wait(f1.3<-1)        waits for rank 1
    rank 1   in await_reduce(1)      waits for rank 5
    rank 5   in forward(1.3)         silent
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from myriad.dashboard.insight.needs import DATA_AXES, Need, Post, ProgramNeeds
from myriad.dashboard.insight.rank_arrays import Array, Ranks
from myriad.program.actions import Action
from myriad.units import format_ranks

__all__ = ["HangAnalysis", "analyze_hang"]

_MOST_NAMED = 64


@dataclass(frozen=True)
class HangAnalysis:
    """The progress of all ranks at one time."""

    ranks: Ranks
    programs: tuple[ProgramNeeds, ...]
    steps: Array
    """(ranks) Newest step that each rank began."""
    done: Array
    """Number of actions of the step that each rank has finished."""

    def action(self, rank: int) -> Action | None:
        """Return the current action of a rank; ``None`` between two steps."""
        actions = self._program(rank).program.ranks[int(self.ranks.pipeline[rank])]
        at = int(self.done[rank])
        return actions[at] if at < len(actions) else None

    def waits_for(self, rank: int) -> list[int]:
        """Return the ranks that have not reached a post that ``rank`` needs, furthest behind first."""
        if self.action(rank) is None:
            return []
        needs = self._program(rank).needs[int(self.ranks.pipeline[rank])][int(self.done[rank])]
        lacking = [self._missing(rank, need) for need in needs]
        found = np.unique(np.concatenate(lacking)) if lacking else np.zeros(0, dtype=np.int64)
        order = np.lexsort((self.done[found], self.steps[found]))
        return [int(one) for one in found[order][:_MOST_NAMED]]

    def _program(self, rank: int) -> ProgramNeeds:
        return self.programs[int(self.ranks.replica[rank])]

    def _missing(self, rank: int, need: Need) -> Array:
        others = self._posters(rank, need)
        behind = self._behind(need.post, int(self.steps[rank]) - need.before)[others]
        return others[behind & (others != rank)]

    def _posters(self, rank: int, need: Need) -> Array:
        ranks = self.ranks
        if need.axis == "world":
            return np.arange(ranks.world)
        if need.axis == "dp tp":
            return np.flatnonzero(ranks.pipeline == ranks.pipeline[rank])
        if need.axis in DATA_AXES:
            replica, within = divmod(rank, size := ranks.world // ranks.layout.dp)
            return ranks.replicas_of(replica, need.axis) * size + within
        offset = np.array(sorted(set(need.peers))) - ranks.pipeline[rank]
        return np.asarray(rank + offset * ranks.sharers)

    def _behind(self, post: Post, step: int) -> Array:
        """Return which ranks have not reached a post of a step. A rank in the action has reached it: an
        action posts at its begin."""
        if (post, step) not in self._known:
            at = np.full(self.ranks.world, np.iinfo(np.int64).max)
            for program in dict.fromkeys(self.programs):
                runs = np.array([one is program for one in self.programs])[self.ranks.replica]
                for place, posted in enumerate(program.posted_at):
                    if post in posted:
                        at[runs & (self.ranks.pipeline == place)] = posted[post]
            self._known[post, step] = (self.steps < step) | ((self.steps == step) & (self.done < at))
        return self._known[post, step]

    @cached_property
    def _known(self) -> dict[tuple[Post, int], Array]:
        return {}

    @cached_property
    def _first_missing(self) -> Mapping[int, int]:
        """For each waiting rank, the rank that is furthest behind."""
        return {rank: found[0] for rank in range(self.ranks.world) if (found := self.waits_for(rank))}

    @cached_property
    def waited_for_by(self) -> Mapping[int, int]:
        """Ranks at the ends of chains of waiting, with the number of ranks that wait for each, largest
        first."""
        counts: Counter[int] = Counter()
        for rank in self._first_missing:
            at, seen = rank, {rank}
            while at in self._first_missing and self._first_missing[at] not in seen:
                at = self._first_missing[at]
                seen.add(at)
            counts[at] += at != rank
        return dict(counts.most_common())

    @cached_property
    def silent(self) -> tuple[int, ...]:
        """Ranks that do not wait while others wait for them, most waited for first."""
        return tuple(rank for rank in self.waited_for_by if rank not in self._first_missing)

    @property
    def sentence(self) -> str:
        """Description of the rank that most ranks wait for."""
        if not self.silent:
            return "no rank waits for another one"
        first = self.silent[0]
        action = self.action(first)
        doing = "between two steps" if action is None else f"in {str(action.kind).replace('_', ' ')}"
        where = f"rank {first} on node {self.ranks.node[first]}, {doing} of step {int(self.steps[first])}"
        others = self.silent[1:]
        also = f" (and for {format_ranks(others)})" if others else ""
        return f"{self.waited_for_by[first]} ranks wait for {where}{also}"


def analyze_hang(ranks: Ranks, programs: Sequence[ProgramNeeds], steps: Array, done: Array) -> HangAnalysis:
    """Find what each rank waits for, from its newest step and its number of finished actions."""
    return HangAnalysis(ranks, tuple(programs), np.asarray(steps), np.asarray(done))
