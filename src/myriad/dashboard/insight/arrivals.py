"""Find the last arriver of each message and collective: for the arrows of a timeline, and to divide each wait
into waiting for the arriver and waiting for the transfer.

    wait       [a ............ b]                 for a send that was posted at t
               a to t: the sender had not arrived   (a bubble, or a slower rank)
               t to b: the message was in flight    (exposed communication)

All ranks with the same program are analysed together, action by action.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from myriad.dashboard.insight.needs import Need, ProgramNeeds
from myriad.dashboard.insight.rank_arrays import Array
from myriad.dashboard.insight.step_spans import StepSpans
from myriad.telemetry.span_io.span_records import class_of

__all__ = [
    "LAST_ARRIVER",
    "NOT_BEFORE_NS",
    "SEND",
    "Arrows",
    "BubbleShares",
    "WaitArrivals",
    "arrows",
    "held_up",
    "waits_of",
]

NOT_BEFORE_NS = 1_000_000
"""A post that begins later than the end of a wait by more than this is not its cause: the clocks of nodes
agree better, and a gather of parameters that are already complete does nothing."""
SEND, LAST_ARRIVER = 0, 1
"""Kinds of arrows: a message between stages, and the last rank to reach a collective."""


@dataclass(frozen=True)
class WaitArrivals:
    """One action of some ranks, with the last post that each of them needed for it."""

    need: Need
    name: str
    spans: Array
    posts: Array
    """(W) For each wait, the index of the span that ended it."""


@dataclass(frozen=True)
class Arrows:
    """Arrows from the rank that was waited for to the rank that waited; times in nanoseconds since the
    epoch."""

    from_rank: Array
    to_rank: Array
    from_ns: Array
    to_ns: Array
    kind: Array
    """(A) `SEND` or `LAST_ARRIVER` of each arrow."""


@dataclass(frozen=True)
class BubbleShares:
    """Seconds of each rank in a step in which it waited for a rank that had not arrived, by the class of the
    span."""

    bubble: dict[str, Array]
    """Waits for another place of the pipeline."""
    slower: dict[str, Array]
    """Waits for a rank that does the same work."""


def held_up(step: StepSpans) -> BubbleShares:
    """Return the waits of all matched ranks."""
    start, end, owner = step.spans.start, step.spans.end, step.spans.records["rank"]
    found = BubbleShares({}, {})
    for wait in waits_of(step):
        seconds = (
            np.clip(start[wait.posts] - start[wait.spans], 0, end[wait.spans] - start[wait.spans]) * 1e-9
        )
        to = found.bubble if _is_pipeline(wait.need, step) else found.slower
        each = to.setdefault(class_of(wait.name), np.zeros(step.ranks.world))
        np.add.at(each, owner[wait.spans], seconds)
    return found


def _is_pipeline(need: Need, step: StepSpans) -> bool:
    return need.axis in ("pp", "ends") or (need.axis == "world" and step.ranks.layout.pp > 1)


def arrows(step: StepSpans, ranks: Array | None = None, limit: int = 20_000) -> Arrows:
    """Return the arrows to ``ranks``, or to all: of each message, and of each collective from its last
    arriver. If there are more than ``limit``, those of the longest waits are returned."""
    spans, posts, kinds = [], [], []
    for wait in waits_of(step, ranks):
        spans.append(wait.spans)
        posts.append(wait.posts)
        kinds.append(np.full(len(wait.spans), SEND if wait.need.axis == "pp" else LAST_ARRIVER))
    if not spans:
        none = np.zeros(0, dtype=np.int64)
        return Arrows(none, none, none, none, none)
    to, of, kind = (np.concatenate(parts) for parts in (spans, posts, kinds))
    owner, start, end = step.spans.records["rank"], step.spans.start, step.spans.end
    keep = np.flatnonzero((owner[to] != owner[of]) & (start[of] <= end[to]))
    if len(keep) > limit:
        longest = np.argpartition(start[to[keep]] - end[to[keep]], limit)[:limit]
        keep = np.sort(keep[longest])
    to, of, kind = to[keep], of[keep], kind[keep]
    return Arrows(owner[of], owner[to], start[of], end[to], kind.astype(np.uint8))


def waits_of(step: StepSpans, only: Array | None = None) -> Iterator[WaitArrivals]:
    """Yield the waits of matched ranks, or of ``only`` these ranks, action by action."""
    for program, place, ranks in step.alike:
        some = ranks if only is None else ranks[np.isin(ranks, only)]
        if len(some):
            yield from _of_alike(step, program, place, some)


def _of_alike(step: StepSpans, program: ProgramNeeds, place: int, ranks: Array) -> Iterator[WaitArrivals]:
    actions = program.program.ranks[place]
    spans, start, end = step.of_actions(ranks, len(actions)), step.spans.start, step.spans.end
    for at, needs in enumerate(program.needs[place]):
        for need in needs:
            if need.post[0] == "receive":
                continue  # only the sender waits until its send is received
            if need.before:
                continue
            posts = _last_posts(step, ranks, need)
            known = (posts >= 0) & (start[posts] <= end[spans[:, at]] + NOT_BEFORE_NS)
            if known.any():
                yield WaitArrivals(need, str(actions[at].kind), spans[known, at], posts[known])


def _last_posts(step: StepSpans, ranks: Array, need: Need) -> Array:
    """Return, for each rank of one place, the span of the last post that it needs; -1 if unknown."""
    grid, start = step.ranks, step.spans.start
    if need.axis == "pp" or need.axis == "ends":
        offsets = np.array(need.peers) - grid.pipeline[ranks[0]]
        table = np.stack([step.post_span(ranks + offset * grid.sharers, need.post) for offset in offsets])
    elif need.axis in ("world", "dp tp"):
        meets = np.full(grid.world, need.axis == "world") | (grid.pipeline == grid.pipeline[ranks[0]])
        table = step.post_span(np.flatnonzero(meets), need.post)[:, None]
        table = np.broadcast_to(_latest(table, start)[None], (1, len(ranks)))
    else:
        # Ranks that differ only in the replica, in columns by their group and their place in the replica.
        within = grid.world // grid.layout.dp
        replica, place = np.divmod(ranks, within)
        groups = [grid.replicas_of(one, need.axis) for one in range(grid.layout.dp)]
        first = np.array([members[0] for members in groups])
        column = first[replica] * within + place
        columns = np.unique(column)
        members = np.stack([groups[one] for one in columns // within], axis=1)
        of_all = members * within + columns % within
        posts = step.post_span(of_all.ravel(), need.post).reshape(of_all.shape)
        return np.asarray(_latest(posts, start)[np.searchsorted(columns, column)])
    return _latest(table, start)


def _latest(spans: Array, start: Array) -> Array:
    """Return, for spans ``[candidate, rank]``, the candidate of each rank that began last."""
    when = np.where(spans >= 0, start[spans], np.iinfo(np.int64).min)
    return np.asarray(np.take_along_axis(spans, when.argmax(axis=0)[None], axis=0)[0])
