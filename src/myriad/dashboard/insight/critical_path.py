"""The critical path of a step: the chain of spans, over all ranks, that determined when the step ended.

The walk goes backwards from the step's end. While a rank computed, the walk follows that rank. Where it
waited, the walk continues on the rank that it waited for, at the time of that rank's post: the sender of a
message, or the last arriver of a collective.

    rank 0   F0 F1 F2 ─┐                    ┌─ B0 ...
    rank 1             └► F2 B2 ─ message ──┘           B2 decided, not rank 0's own F3

The links are adjacent, so their lengths add up to the step's time. Time without a span is a link too
("other")."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from myriad.dashboard.insight.arrivals import NOT_BEFORE_NS
from myriad.dashboard.insight.rank_arrays import Array
from myriad.dashboard.insight.step_spans import StepSpans
from myriad.telemetry.span_io.span_records import CLASSES, class_of

__all__ = ["CriticalPath", "PathSegment", "critical_path"]

_LEAST_WAIT_NS = 20_000
"""Maximum duration of a wait that did not wait."""
_UNRECORDED = "unrecorded"


@dataclass(frozen=True, slots=True)
class PathSegment:
    """An interval of one rank's time."""

    rank: int
    name: str
    stage: int
    micro_batch: int
    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        """Length of the link."""
        return (self.end_ns - self.start_ns) * 1e-9


@dataclass(frozen=True)
class CriticalPath:
    """The critical path of one step, in the order of time."""

    links: tuple[PathSegment, ...]

    @property
    def seconds(self) -> float:
        """Length of all links, which is the step time."""
        return sum(link.end_ns - link.start_ns for link in self.links) * 1e-9

    def by_class(self) -> Mapping[str, float]:
        """Return the seconds of each of `CLASSES`."""
        found = dict.fromkeys(CLASSES, 0.0)
        for link in self.links:
            found[class_of(link.name)] += link.seconds
        return found

    def by_rank(self) -> Mapping[int, float]:
        """Return the seconds of each rank on the path, most first."""
        found: defaultdict[int, float] = defaultdict(float)
        for link in self.links:
            found[link.rank] += link.seconds
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def critical_path(step: StepSpans, begin_ns: int | None = None, end_ns: int | None = None) -> CriticalPath:
    """Return the critical path between ``begin_ns`` and ``end_ns`` (default: first start and last action's
    end)."""
    if len(step.outer) == 0:
        return CriticalPath(())
    walk = _Walk(step, step.begin_ns if begin_ns is None else begin_ns)
    walk.run(step.end_ns if end_ns is None else end_ns)
    return CriticalPath(tuple(reversed(walk.links)))


class _Walk:
    """The walk backwards in time, at one rank at a time."""

    def __init__(self, step: StepSpans, begin_ns: int) -> None:
        self.step, self.begin, self.links = step, begin_ns, list[PathSegment]()
        self.start, self.end = step.spans.start, step.spans.end
        self.records = step.spans.records

    def run(self, end_ns: int) -> None:
        outer = self.step.outer
        within = np.where(self.end[outer] <= end_ns, self.end[outer], np.iinfo(np.int64).min)
        last = int(np.argmax(within))
        self.rank, self.at, self.now = int(self.records["rank"][outer[last]]), last, end_ns
        steps_left = 4 * len(self.records)
        while self.now > self.begin and steps_left > 0:
            steps_left -= 1
            if self.at < self.step.first_outer[self.rank]:
                break
            self._one()
        self._link(_UNRECORDED, -1, -1, self.begin)

    def _one(self) -> None:
        """Follow the outer span at ``at``, or leave it for another rank."""
        span = int(self.step.outer[self.at])
        self._link(_UNRECORDED, -1, -1, int(self.end[span]))
        if self.now - self.start[span] > _LEAST_WAIT_NS and self._leave(span):
            return
        if self._inside(span):
            return
        self._own(span, int(self.start[span]))
        self.at -= 1

    def _leave(self, span: int) -> bool:
        """Continue on the rank that posted last what this action waited for; return whether there is one."""
        action = int(self.step.action_of[span])
        if action < 0:
            return False
        needs = self.step.program_of(self.rank).needs[int(self.step.ranks.pipeline[self.rank])][action]
        posts = [self._last_post(need.axis, need.post, need.peers) for need in needs if not need.before]
        latest = self.end[span] + NOT_BEFORE_NS
        found = [post for post in posts if post >= 0 and self.start[post] <= latest]
        if not found:
            return False
        post = max(found, key=lambda one: int(self.start[one]))
        self._jump(span, post)
        return True

    def _last_post(self, axis: str, post: tuple[str, int, int], peers: tuple[int, ...]) -> int:
        spans = self.step.post_span(self.step.posters(self.rank, axis, peers), post)
        known = spans[spans >= 0]
        return int(known[np.argmax(self.start[known])]) if len(known) else -1

    def _jump(self, span: int, post: int) -> None:
        """Continue before a post on its rank. The time since the post is the transfer's and belongs to this
        rank."""
        self._own(span, min(int(self.start[post]), self.now))
        self.rank = int(self.records["rank"][post])
        self.at = int(self.step.outer_place[post]) - 1

    def _inside(self, span: int) -> bool:
        """Follow the child spans, last first; return whether the walk continues on another rank."""
        for inner in range(self._stop_inside(span), span, -1):
            if self.step.spans.parent[inner] != span or self.start[inner] >= self.now:
                continue
            self._own(span, int(self.end[inner]))
            last = self._last_tensor_peer(inner)
            if last >= 0 and self.start[last] > self.start[inner]:
                self._own(inner, min(int(self.start[last]), self.now))
                self.rank = int(self.records["rank"][last])
                self.at = int(self.step.outer_place[last])
                return True
            self._own(inner, int(self.start[inner]))
        return False

    def _stop_inside(self, span: int) -> int:
        """Return the last descendant of a span."""
        outer, at = self.step.outer, int(self.step.outer_place[span])
        return (int(outer[at + 1]) if at + 1 < len(outer) else len(self.records)) - 1

    def _last_tensor_peer(self, inner: int) -> int:
        """Return the span of the tensor-parallel peer that arrived last at the same collective; -1 if
        unknown."""
        ranks, name = self.step.ranks, self.records["name"][inner]
        if ranks.layout.tp == 1 or self.step.names[int(name)] != "tensor_comm":
            return -1
        own, tables = self.rank, self._exchanges
        where = int(np.searchsorted(tables[own], inner)) if own in tables else -1
        peers = [tables[int(peer)] for peer in ranks.group(own, "tp") if int(peer) in tables]
        same = len(peers) == ranks.layout.tp and len({len(one) for one in peers}) == 1
        if not same:
            return -1
        spans = np.array([one[where] for one in peers])
        return int(spans[np.argmax(self.start[spans])])

    @cached_property
    def _exchanges(self) -> Mapping[int, Array]:
        """Indices of each rank's tensor-parallel collectives."""
        code = next((code for code, name in enumerate(self.step.names) if name == "tensor_comm"), -1)
        spans = np.flatnonzero((self.records["name"] == code) & (self.step.spans.parent >= 0))
        owners = self.records["rank"][spans]
        edges = np.searchsorted(owners, np.arange(self.step.ranks.world + 1))
        return {rank: spans[edges[rank] : edges[rank + 1]] for rank in np.unique(owners).tolist()}

    def _own(self, span: int, until: int) -> None:
        """Add this rank's time in a span, back to ``until``."""
        record = self.records[span]
        name = self.step.names[int(record["name"])]
        self._link(name, int(record["stage"]), int(record["micro_batch"]), until)

    def _link(self, name: str, stage: int, micro_batch: int, until: int) -> None:
        until = max(until, self.begin)
        if until < self.now:
            self.links.append(PathSegment(self.rank, name, stage, micro_batch, until, self.now))
            self.now = until
