"""The spans of one step beside the program that made them: which span is which action.

A rank records a span for each action of its program, in order. So the k-th of its outer spans that bear an
action's name is action k, and what it waited for follows from the program. A rank whose names do not agree (a
span was dropped, the ring overflowed) is not ``matched`` and left out of what needs the program. What comes
after the last action, such as an evaluation's forwards, belongs to no action.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from myriad.comm.layout import Layout
from myriad.dashboard.insight.needs import Post, ProgramNeeds, step_programs
from myriad.dashboard.insight.nesting import Nested, nested
from myriad.dashboard.insight.ranks import Array, Ranks
from myriad.program.actions import Kind
from myriad.program.config import OverlapConfig
from myriad.telemetry.records import Records

__all__ = ["StepSpans", "programs_seen", "step_spans"]

_MOST_CHUNKS = 64
_KINDS = frozenset(str(kind) for kind in Kind)


@dataclass(frozen=True)
class StepSpans:
    """One step of all ranks."""

    ranks: Ranks
    names: tuple[str, ...]
    spans: Nested
    programs: tuple[ProgramNeeds, ...]
    """Of each replica."""

    @cached_property
    def outer(self) -> Array:
        """Indices of spans that lie in no other, by rank and start."""
        return np.flatnonzero(self.spans.parent < 0)

    @cached_property
    def first_outer(self) -> Array:
        """Of each rank, where its own begin in ``outer``; one more than there are ranks."""
        return np.searchsorted(self.spans.records["rank"][self.outer], np.arange(self.ranks.world + 1))

    @cached_property
    def _actions(self) -> Array:
        """Indices of outer spans that bear an action's name."""
        is_action = np.array([name in _KINDS for name in self.names], dtype=bool)
        return self.outer[is_action[self.spans.records["name"][self.outer]]]

    @cached_property
    def _first_action(self) -> Array:
        return np.searchsorted(self.spans.records["rank"][self._actions], np.arange(self.ranks.world + 1))

    def program_of(self, rank: int) -> ProgramNeeds:
        """What a rank runs."""
        return self.programs[int(self.ranks.replica[rank])]

    @cached_property
    def alike(self) -> tuple[tuple[ProgramNeeds, int, Array], ...]:
        """Program, place in the pipeline, and the matched ranks that run that."""
        found = []
        for program in dict.fromkeys(self.programs):
            runs = np.array([one is program for one in self.programs])[self.ranks.replica]
            for place in range(self.ranks.layout.pp):
                ranks = np.flatnonzero(runs & (self.ranks.pipeline == place))
                found.append((program, place, ranks[self._agree(program, place, ranks)]))
        return tuple(found)

    def _agree(self, program: ProgramNeeds, place: int, ranks: Array) -> Array:
        codes = {name: code for code, name in enumerate(self.names)}
        wanted = [codes.get(str(action.kind), -1) for action in program.program.ranks[place]]
        count = self._first_action[ranks + 1] - self._first_action[ranks]
        agree = count >= len(wanted)
        seen = self.spans.records["name"][self.of_actions(ranks[agree], len(wanted))]
        agree[agree] = (seen == np.array(wanted)).all(axis=1)
        return agree

    def of_actions(self, ranks: Array, count: int) -> Array:
        """``[rank, action]``: index of the span; of ranks that have so many."""
        return self._actions[self._first_action[ranks][:, None] + np.arange(count)]

    @cached_property
    def matched(self) -> Array:
        """Of each rank."""
        found = np.zeros(self.ranks.world, dtype=bool)
        for _, _, ranks in self.alike:
            found[ranks] = True
        return found

    @cached_property
    def num_done(self) -> Array:
        """Of each rank, how many actions of the step it has finished."""
        return np.diff(self._first_action)

    @cached_property
    def action_of(self) -> Array:
        """Of each span the index of its action; -1: none, or its rank is not matched."""
        found = np.full(len(self.spans.records), -1, dtype=np.int64)
        for program, place, ranks in self.alike:
            count = len(program.program.ranks[place])
            found[self.of_actions(ranks, count)] = np.arange(count)
        return found

    @cached_property
    def outer_place(self) -> Array:
        """Of each span its place in ``outer``, or that of the one around it."""
        return np.cumsum(self.spans.parent < 0) - 1

    @cached_property
    def begin_ns(self) -> int:
        """First start of all ranks."""
        return int(self.spans.start.min()) if len(self.spans.records) else 0

    @cached_property
    def end_ns(self) -> int:
        """Last end of an action; of any span where none is matched. What follows, such as an evaluation, is
        no part of the iteration."""
        actions = self.action_of >= 0
        ends = self.spans.end[actions] if actions.any() else self.spans.end
        return int(ends.max()) if len(ends) else 0

    def post_span(self, ranks: Array, post: Post) -> Array:
        """Index of the span with which each of some ranks posts; -1 where that is not known."""
        found = np.full(len(ranks), -1, dtype=np.int64)
        known = self.matched[ranks]
        for program in dict.fromkeys(self.programs):
            runs = np.array([one is program for one in self.programs])[self.ranks.replica[ranks]]
            for place in np.unique(self.ranks.pipeline[ranks]):
                at = program.posted_at[int(place)].get(post)
                some = known & runs & (self.ranks.pipeline[ranks] == place)
                if at is not None:
                    found[some] = self._actions[self._first_action[ranks[some]] + at]
        return found

    def posters(self, rank: int, axis: str, peers: tuple[int, ...]) -> Array:
        """Ranks of whom an action of ``rank`` needs a post."""
        ranks = self.ranks
        if axis == "dp":
            return ranks.group(rank, "dp")
        if axis == "world":
            return np.arange(ranks.world)
        offset = np.array(sorted(set(peers))) - ranks.pipeline[rank]
        return rank + offset * ranks.sharers


def step_spans(
    records: Records, names: Sequence[str], ranks: Ranks, programs: Sequence[ProgramNeeds]
) -> StepSpans:
    """Of the records of one step, in any order."""
    return StepSpans(ranks, tuple(names), nested(records[records["rank"] < ranks.world]), tuple(programs))


def programs_seen(
    records: Records,
    names: Sequence[str],
    layout: Layout,
    overlap: OverlapConfig,
    shares: Sequence[int],
    *,
    tied: bool,
) -> tuple[ProgramNeeds, ...]:
    """The programs of an attempt, as its spans tell: stages may be cut in chunks, and replicas may have got
    other shares than the job's. Raises ``ValueError`` for spans that no attempt of the job can have."""
    codes = [code for code, name in enumerate(names) if name == Kind.FORWARD]
    forwards = records[np.isin(records["name"], codes)]
    if len(forwards) == 0:
        return step_programs(layout, overlap, shares, tied=tied, num_chunks=1)
    stages = int(forwards["stage"].max()) + 1
    replica = forwards["rank"] // (layout.world // layout.dp)
    seen = np.full(layout.dp, -1, dtype=np.int64)
    known = replica < layout.dp
    np.maximum.at(seen, replica[known], forwards["micro_batch"][known])
    if stages > _MOST_CHUNKS * layout.num_stages or seen.max() >= sum(shares):
        raise ValueError(f"{stages} stages, {seen.max() + 1} micro-batches: spans of another job")
    counts = [int(most) + 1 if most >= 0 else share for most, share in zip(seen, shares, strict=True)]
    return step_programs(layout, overlap, counts, tied=tied, num_chunks=max(1, stages // layout.num_stages))
