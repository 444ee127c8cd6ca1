"""Match the spans of one step to the actions of the program that produced them.

A rank records a span for each action of its program, in order. So its k-th outer span with an action's name
is action k, and the program says what it waited for. A rank whose names differ (a span was dropped, the ring
overflowed) is not ``matched`` and left out of analyses that need the program. Spans after the last action,
such as an evaluation's forwards, belong to no action."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from myriad.comm.layout import Layout
from myriad.dashboard.insight.needs import DATA_AXES, Post, ProgramNeeds, step_programs
from myriad.dashboard.insight.nesting import Nested, nested
from myriad.dashboard.insight.rank_arrays import Array, Ranks
from myriad.program.actions import Kind
from myriad.program.config import OverlapConfig
from myriad.program.in_flight import FORWARDS
from myriad.telemetry.span_io.span_records import Records

__all__ = ["StepSpans", "programs_seen", "step_spans"]

_MOST_CHUNKS = 64
_KINDS = frozenset(str(kind) for kind in Kind)


@dataclass(frozen=True)
class StepSpans:
    """The spans of one step on all ranks."""

    ranks: Ranks
    names: tuple[str, ...]
    spans: Nested
    programs: tuple[ProgramNeeds, ...]
    """Program of each replica."""

    @cached_property
    def outer(self) -> npt.NDArray[np.intp]:
        """Indices of spans without a parent, by rank and start."""
        return np.flatnonzero(self.spans.parent < 0)

    @cached_property
    def first_outer(self) -> Array:
        """Index in ``outer`` of each rank's first span, with the end as an additional entry."""
        return np.searchsorted(self.spans.records["rank"][self.outer], np.arange(self.ranks.world + 1))

    @cached_property
    def _actions(self) -> Array:
        """Indices of outer spans with an action's name."""
        is_action = np.array([name in _KINDS for name in self.names], dtype=bool)
        names: npt.NDArray[np.int16] = self.spans.records["name"]
        return self.outer[is_action[names[self.outer]]]

    @cached_property
    def _first_action(self) -> Array:
        return np.searchsorted(self.spans.records["rank"][self._actions], np.arange(self.ranks.world + 1))

    def program_of(self, rank: int) -> ProgramNeeds:
        """Return the program of a rank."""
        return self.programs[int(self.ranks.replica[rank])]

    @cached_property
    def alike(self) -> tuple[tuple[ProgramNeeds, int, Array], ...]:
        """Program and pipeline place, with the matched ranks that run them."""
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
        """Return the index of the span of each of the first ``count`` actions, ``[rank, action]``."""
        return self._actions[self._first_action[ranks][:, None] + np.arange(count)]

    @cached_property
    def matched(self) -> Array:
        """Whether the spans of each rank match its program."""
        found = np.zeros(self.ranks.world, dtype=bool)
        for _, _, ranks in self.alike:
            found[ranks] = True
        return found

    @cached_property
    def num_done(self) -> Array:
        """Number of actions of the step that each rank has finished."""
        return np.diff(self._first_action)

    @cached_property
    def action_of(self) -> Array:
        """Index of each span's action; -1 if it has none or its rank is not matched."""
        found = np.full(len(self.spans.records), -1, dtype=np.int64)
        for program, place, ranks in self.alike:
            count = len(program.program.ranks[place])
            found[self.of_actions(ranks, count)] = np.arange(count)
        return found

    @cached_property
    def outer_place(self) -> Array:
        """Index in ``outer`` of each span or of its outermost parent."""
        return np.cumsum(self.spans.parent < 0) - 1

    @cached_property
    def begin_ns(self) -> int:
        """First start on any rank."""
        return int(self.spans.start.min()) if len(self.spans.records) else 0

    @cached_property
    def end_ns(self) -> int:
        """Last end of an action, or of any span if none is matched. Later spans, such as an evaluation, do
        not belong to the iteration."""
        actions = self.action_of >= 0
        ends = self.spans.end[actions] if actions.any() else self.spans.end
        return int(ends.max()) if len(ends) else 0

    def post_span(self, ranks: Array, post: Post) -> Array:
        """Return the index of the span with which each rank posts; -1 if unknown."""
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
        """Return the ranks whose posts an action of ``rank`` needs."""
        ranks = self.ranks
        if axis in DATA_AXES:
            replica, within = divmod(rank, size := ranks.world // ranks.layout.dp)
            return ranks.replicas_of(replica, axis) * size + within
        if axis == "dp tp":
            return ranks.group(rank, "dp", "tp")
        if axis == "world":
            return np.arange(ranks.world)
        offset = np.array(sorted(set(peers))) - ranks.pipeline[rank]
        return rank + offset * ranks.sharers


def step_spans(
    records: Records, names: Sequence[str], ranks: Ranks, programs: Sequence[ProgramNeeds]
) -> StepSpans:
    """Match the records of one step, in any order."""
    return StepSpans(ranks, tuple(names), nested(records[records["rank"] < ranks.world]), tuple(programs))


def programs_seen(
    records: Records,
    names: Sequence[str],
    layout: Layout,
    overlap: OverlapConfig,
    shares: Sequence[int],
    *,
    tied: bool,
    orthogonalizes: bool = False,
) -> tuple[ProgramNeeds, ...]:
    """Return the programs of an attempt according to its spans: stages may be divided into chunks, and the
    micro-batches of replicas may differ from the job's. Raises ``ValueError`` for spans that no attempt of
    the job can have."""
    codes = [code for code, name in enumerate(names) if name in FORWARDS]
    forwards = records[np.isin(records["name"], codes)]
    if len(forwards) == 0:
        return step_programs(layout, overlap, shares, tied=tied, num_chunks=1, orthogonalizes=orthogonalizes)
    stages = int(forwards["stage"].max()) + 1
    replica = forwards["rank"] // (layout.world // layout.dp)
    seen = np.full(layout.dp, -1, dtype=np.int64)
    known = replica < layout.dp
    np.maximum.at(seen, replica[known], forwards["micro_batch"][known])
    if stages > _MOST_CHUNKS * layout.num_stages or seen.max() >= sum(shares):
        raise ValueError(f"{stages} stages, {seen.max() + 1} micro-batches: spans of another job")
    counts = [int(most) + 1 if most >= 0 else share for most, share in zip(seen, shares, strict=True)]
    num_chunks = max(1, stages // layout.num_stages)
    return step_programs(
        layout, overlap, counts, tied=tied, num_chunks=num_chunks, orthogonalizes=orthogonalizes
    )
