"""Spans of all ranks of a large run, without ranks: its program, action by action, for all replicas at once.

An action ends when its own time is over and what it waits for has come (`ProgramNeeds`), so a slow host is
felt where it would be: its pipeline waits for its sends, other replicas for its gradients. The same arguments
give the same spans, but for when they begin.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from myriad.dashboard.insight.needs import Need, Post, ProgramNeeds, step_programs
from myriad.dashboard.insight.rank_arrays import Ranks
from myriad.program.actions import COMPUTE, Kind
from myriad.program.config import OverlapConfig
from myriad.telemetry.span_io.span_batch import SpanBatch
from myriad.telemetry.span_io.span_records import RECORD, Records

__all__ = ["LAYOUTS", "NAMES", "Player", "Wrong", "batches"]

LAYOUTS = {12288: (192, 8, 8), 1024: (16, 8, 8), 256: (4, 8, 8), 64: (2, 4, 8)}
"""Ranks to dp, pp, tp."""
NAMES = (*map(str, Kind), "tensor_comm")
_TENSOR = len(NAMES) - 1
_CODES = {name: code for code, name in enumerate(NAMES)}
_LATENCY_SECONDS = 2e-4
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Wrong:
    """What is wrong in a played run; -1: nothing."""

    slow_node: int = -1
    slow_from: int = 0
    slow_ratio: float = 1.1
    drift_rank: int = -1
    drift_seconds: float = 2e-4
    """A step."""
    hang_rank: int = -1
    hang_at: int = -1


@dataclass
class Player:
    """Plays one step after the other."""

    ranks: Ranks
    micro_batches: int
    wrong: Wrong
    begin_seconds: float
    """Start of the next step, in seconds since the epoch."""
    step_seconds: float = 6.0
    """About; a slow host makes it longer."""
    hangs: bool = False
    """No later step begins."""
    _random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    def __post_init__(self) -> None:
        layout = self.ranks.layout
        shares = [self.micro_batches] * layout.dp
        self.needs: ProgramNeeds = step_programs(layout, OverlapConfig(), shares, tied=False, num_chunks=1)[0]
        self._shape = (layout.dp, layout.tp)
        slow = np.where(self.ranks.node == self.wrong.slow_node, self.wrong.slow_ratio, 1.0)
        self._slow = self.by_place(slow)
        unit = 0.85 * self.step_seconds / (3 * (self.micro_batches + layout.pp - 1))
        whole = {Kind.LOAD: 0.004, Kind.REDUCE: 0.05, Kind.GATHER: 0.02, Kind.STEP: 0.01, Kind.UPDATE: 0.01}
        whole |= {
            Kind.START_GATHER: 1e-4,
            Kind.START_REDUCE: 1e-4,
            Kind.AWAIT_GATHER: 0.002,
            Kind.AWAIT_REDUCE: 0.01,
        }
        self._seconds = {kind: ratio * self.step_seconds for kind, ratio in whole.items()}
        self._seconds |= {Kind.FORWARD: unit, Kind.BACKWARD: 2 * unit}
        self._seconds |= {Kind.BACKWARD_INPUT: unit, Kind.BACKWARD_WEIGHT: unit}

    def step(self, number: int) -> Records:
        """All spans that end, by rank and in the order in which a rank's ring has them."""
        play = _Step(self, number)
        with np.errstate(invalid="ignore"):  # what never ends
            play.all_actions()
            records = play.records()
        self.hangs = not np.isfinite(play.clock).all()
        if not self.hangs:
            self.begin_seconds += float(play.clock.max())
        return records

    def own_seconds(self, kind: Kind, number: int, place: int) -> Array:
        """Return compute seconds of the ranks of one place, without waits: ``[dp, tp]``."""
        noise = 1.0 + 0.006 * self._random.standard_normal(self._shape).clip(-3, 3)
        seconds = self._seconds.get(kind, 5e-5) * noise
        return seconds * self._slow[place] if kind in COMPUTE and number >= self.wrong.slow_from else seconds

    def by_place(self, values: Array) -> Array:
        """Reshape values of each rank to ``[place, dp, tp]``."""
        layout = self.ranks.layout
        return values.reshape(layout.dp, layout.pp, layout.tp).transpose(1, 0, 2)


class _Step:
    """One step under way; seconds from its begin. What never ends, ends at infinity."""

    def __init__(self, player: Player, number: int) -> None:
        self.player, self.number = player, number
        layout, wrong = player.ranks.layout, player.wrong
        late = np.zeros(layout.world)
        if wrong.drift_rank >= 0:
            late[wrong.drift_rank] = wrong.drift_seconds * number
        self.clock = player.by_place(late).copy()
        self._hanging = np.zeros(layout.world, bool)
        if 0 <= wrong.hang_at <= number and wrong.hang_rank >= 0:
            self._hanging[wrong.hang_rank] = True
        self._hanging = player.by_place(self._hanging)
        self._posted: dict[tuple[int, Post], Array] = {}
        self._spans: list[list[tuple[int, int, int, Array, Array]]] = [[] for _ in range(layout.pp)]
        """Spans of each place: name, stage, micro-batch, starts and ends."""

    def all_actions(self) -> None:
        """Each place as far as it comes, again and again."""
        program = self.player.needs.program
        at = [0] * program.num_ranks
        posts: list[defaultdict[int, list[Post]]] = [defaultdict(list) for _ in program.ranks]
        for place, posted in enumerate(self.player.needs.posted_at):
            for post, index in posted.items():
                posts[place][index].append(post)
        left = sum(map(len, program.ranks))
        while left:
            before = left
            for place, actions in enumerate(program.ranks):
                while at[place] < len(actions) and self._come_to(place, at[place], posts[place][at[place]]):
                    at[place] += 1
                    left -= 1
            assert left < before, "the checker has proved that a program comes to its end"

    def _come_to(self, place: int, index: int, posts: list[Post]) -> bool:
        """Posts, and acts if all is there that the action needs; what the step before posted always is."""
        for post in posts:
            self._posted[place, post] = self.clock[place].copy()
        needs = [
            need
            for need in self.player.needs.needs[place][index]
            if need.post[0] != "receive" and not need.before
        ]
        if not all((peer, need.post) in self._posted for need in needs for peer in need.peers):
            return False
        self._act(place, index, needs)
        return True

    def _act(self, place: int, index: int, needs: list[Need]) -> None:
        action, start = self.player.needs.program.ranks[place][index], self.clock[place].copy()
        end = start + self.player.own_seconds(action.kind, self.number, place)
        if index > len(self.player.needs.program.ranks[place]) // 3 and action.kind not in COMPUTE:
            end[self._hanging[place]] = np.inf
        if action.kind in COMPUTE:
            end = self._with_tensor(place, action.stage, start, end)
        for need in needs:
            end = np.maximum(end, self._come(need) + _LATENCY_SECONDS)
        code = _CODES[str(action.kind)]
        self._spans[place].append((code, action.stage, action.micro_batch, start, end))
        self.clock[place] = end

    def _with_tensor(self, place: int, stage: int, start: Array, end: Array) -> Array:
        """Ranks that share matrices end together: the quicker ones wait inside."""
        done = end.max(axis=1, keepdims=True) * np.ones_like(end)
        took = 0.06 * (end - start)
        self._spans[place].append((_TENSOR, stage, -1, end - took, done))
        return done

    def _come(self, need: Need) -> Array:
        times = [self._posted[peer, need.post] for peer in need.peers]
        if need.axis == "dp":
            return times[0].max(axis=0, keepdims=True)
        latest = np.maximum.reduce(times)
        return np.full_like(latest, latest.max()) if need.axis == "world" else latest

    def records(self) -> Records:
        """Those that end."""
        parts = []
        layout, begin = self.player.ranks.layout, self.player.begin_seconds
        numbers = self.player.by_place(np.arange(layout.world))
        for place, spans in enumerate(self._spans):
            found = np.zeros((layout.dp * layout.tp, len(spans)), RECORD)
            ends = np.zeros(found.shape)
            for at, (code, stage, micro_batch, start, end) in enumerate(spans):
                column, ends[:, at] = found[:, at], end.ravel()
                column["start_ns"] = ((begin + start.ravel()) * 1e9).astype(np.int64)
                column["duration_ns"] = ((end - start).ravel() * 1e9).astype(np.int64)
                column["name"], column["stage"], column["micro_batch"] = code, stage, micro_batch
            found["rank"] = numbers[place].reshape(-1, 1)
            parts.append(found[np.isfinite(ends)])
        records = np.concatenate(parts)
        records["step"], records["chunk"] = self.number, -1
        return records[np.argsort(records["rank"], kind="stable")]


def batches(
    player: Player, number: int, send_every: float, nodes_each: int = 1
) -> Iterator[tuple[float, SpanBatch]]:
    """A step's spans as nodes send them: when (seconds since the epoch), and what. ``nodes_each``: nodes of
    one batch."""
    records = player.step(number)
    ends = records["start_ns"] + records["duration_ns"]
    slot = (ends // int(send_every * 1e9)).astype(np.int64)
    sender = records["rank"] // (player.ranks.node_size * nodes_each)
    order = np.lexsort((sender, slot))
    records, slot, sender = records[order], slot[order], sender[order]
    cuts = np.flatnonzero((np.diff(slot) != 0) | (np.diff(sender) != 0)) + 1
    for part, first in zip(np.split(records, cuts), [0, *cuts], strict=True):
        when = float(slot[first] + 1) * send_every
        yield when, SpanBatch(int(sender[first]) * nodes_each, 1, NAMES, part, 0, 2e-5)
