"""Alarms about abnormal traffic of links, from the sums that nodes report each second (`LinkTraffic`). Pure.

    slow      at two polls, the rate of a direction is below half of its own earlier rate, and its peers'
              are not; one poll is enough if a link sends at below a quarter
    swings    it falls and recovers three times in a minute
    stopped   nothing moves for a second (at least a step's time), all ranks wait in communication, and the
              step has not carried the bytes that the program sends in it
    sent again, paused     segments and packets sent again; held up by the other end (PFC): more than peers'

The plan has the bytes that each node exchanges with other nodes in a step (`RunPlan.traffic`); in another
layout, the traffic of the attempt's own steps counts. So silence of a link that has carried all its
bytes is compute time. Nothing is judged while any rank starts, loads, validates, saves or is traced, nor
before five steps of the attempt.

In a synchronous job all links slow down with the slowest: the suspect is the one that fell furthest below its
own rate.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from myriad.comm.attempt_layout import AS_THE_JOB
from myriad.supervise.messages import Beat
from myriad.supervise.observations import LinkTraffic, RankStatus
from myriad.supervise.policy.link_rates import (
    AS_BEFORE,
    DIRECTIONS,
    FURTHEST,
    KNOWN,
    MANY_PEERS,
    REMEMBERED,
    SLOW,
    SWINGS,
    Direction,
    DirectionRates,
    LinkDirection,
    LinkPeers,
    most_fallen,
)
from myriad.supervise.policy.policy_actions import Notice
from myriad.supervise.policy.run_state import RunPlan, RunState
from myriad.units import format_bytes

__all__ = ["TrafficAlarms"]

_Kind = Literal["slow", "swings", "stopped", "sent again", "paused"]
_FRESH_SECONDS, _JUDGE_SECONDS = 2.0, 1.5
_VERY_SLOW = 0.25
_LEAST_BYTES, _LEAST_SHARE = 2**18, 0.3
"""A direction is not judged if it carries fewer bytes in a step, or would be busy for a smaller share of a
step."""
_LEAST_MOVED, _DONE_SHARE = 0.1, 0.9
"""Shares of a step's bytes. Below the first no rate is known; above the second the step has carried its
bytes."""
_STILL_SECONDS = 0.8
_SENT_AGAIN, _PAUSED, _TIMES_PEERS = 50.0, 50_000.0, 5.0
"""Limits per second: segments or packets, and microseconds; and the least ratio to peers."""
_SWING_SECONDS = 60.0
_LOOKS = 2
"""Looks that must agree before an alarm begins, and before it ends."""
_BAD_SECONDS, _BAD_TIMES, _BAD_WITHIN_SECONDS = 30.0, 3, 300.0
_MOST_NOTICES = 6
"""Most notices about a link in five minutes."""


@dataclass
class _Alarm:
    since: float
    node: int
    """Node of the alarm; -1 if there is no single one."""
    problem: str
    good: int = 0
    """Number of successive polls without a problem."""


@dataclass
class _Link:
    seen: LinkTraffic
    at: float
    sides: dict[Direction, DirectionRates] = field(
        default_factory=lambda: {one: DirectionRates() for one in DIRECTIONS}
    )
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """Seconds of each of the last steps."""
    per_second: dict[_Kind, float] = field(default_factory=dict)
    usual: dict[_Kind, deque[float]] = field(default_factory=dict)
    many: dict[_Kind, int] = field(default_factory=dict)
    alarms: dict[_Kind, _Alarm] = field(default_factory=dict)
    began: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_NOTICES))


class TrafficAlarms:
    """Judges the link traffic of the nodes of one run."""

    def __init__(self, plan: RunPlan, state: RunState) -> None:
        self._plan, self._state, self._epoch = plan, state, -1
        self._links: dict[tuple[int, str], _Link] = {}
        self._of_node: dict[int, list[_Link]] = {}
        self._ranks: dict[int, tuple[RankStatus, ...]] = {}
        self._fresh: set[int] = set()
        self._alarmed: set[int] = set()
        """Nodes with any alarm in this attempt: hardly any of 1,536."""
        self._judged_at = 0.0

    def observe(self, beat: Beat, now: float) -> Iterator[Notice]:
        """Record a heartbeat; judge once every node has sent one."""
        if beat.epoch != self._state.epoch or not beat.traffic or beat.node not in self._state.placement:
            return
        if beat.epoch != self._epoch:
            self._epoch = beat.epoch
            self._links.clear()
            self._of_node.clear()
            self._ranks.clear()
            self._fresh.clear()
            self._alarmed.clear()
        self._ranks[beat.node] = beat.ranks
        trains = all(one.phase == "step" for one in beat.ranks)
        for one in beat.traffic:
            self._take(beat.node, one, now, trains=trains)
        self._fresh.add(beat.node)
        if self._fresh >= self._state.placement.keys():
            yield from self._judge(now)

    def due(self, now: float) -> Iterator[Notice]:
        """Yield due notices. Call it regularly: a silent node triggers no other call."""
        if self._fresh and now - self._judged_at > _JUDGE_SECONDS:
            yield from self._judge(now)

    def _take(self, node: int, seen: LinkTraffic, now: float, *, trains: bool) -> None:
        link = self._links.get((node, seen.name))
        if link is None:
            self._links[node, seen.name] = link = _Link(seen, now)
            self._of_node.setdefault(node, []).append(link)
            return
        seconds = max(0.1, now - link.at)
        counts: dict[_Kind, int] = {"sent again": seen.sent_again, "paused": seen.paused}
        link.per_second = {kind: count / seconds if trains else 0.0 for kind, count in counts.items()}
        link.seen, link.at = seen, now
        if seen.steps:
            link.seconds.append(seen.step_seconds)
            link.sides["sent"].carried(seen.sent_bytes)
            link.sides["received"].carried(seen.received_bytes)

    # Judging

    def _judge(self, now: float) -> Iterator[Notice]:
        self._judged_at, fresh = now, self._fresh
        self._fresh = set()
        ranks = [one for node in self._state.placement for one in self._ranks.get(node, ())]
        if self._state.phase != "running" or not ranks or any(one.phase != "step" for one in ranks):
            return
        links = {
            key: link
            for key, link in self._links.items()
            if key[0] in fresh and now - link.at < _FRESH_SECONDS
        }
        if fresh >= self._state.placement.keys():
            yield from self._stopped(links, ranks, now)
        yield from self._slow(links, now)
        yield from self._counted(links, now)

    def _slow(self, links: Mapping[tuple[int, str], _Link], now: float) -> Iterator[Notice]:
        ratios: dict[LinkDirection, float] = {}
        for (node, name), link in links.items():
            for direction in DIRECTIONS:
                if rate := self._rate(node, link, direction):
                    ratio = link.sides[direction].add(rate, now)
                    ratios.update({} if ratio is None else {LinkDirection(node, name, direction): ratio})
        peers = LinkPeers(
            {key: (ratio, links[key[:2]].sides[key.direction]) for key, ratio in ratios.items()}
        )
        low = most_fallen({key for key in ratios if self._fell(key, ratios[key], peers)}, ratios, peers)
        for key, ratio in ratios.items():
            link = links[key[:2]]
            if key in low:
                yield from self._is_slow(key, link, ratio, peers, now)
            else:
                link.sides[key.direction].low = 0
                yield from self._is_as_before(key, link, ratio, now)

    def _rate(self, node: int, link: _Link, direction: Direction) -> float:
        """Return the rate of a direction, in ended steps or in a long step in progress; 0: nothing to
        judge."""
        seen, typical = link.seen, median(link.seconds) if link.seconds else 0.0
        late = typical > 0 and seen.now_seconds > max(1.0, 2 * typical)
        if late and seen.still_seconds >= _STILL_SECONDS:
            return 0.0  # the bytes before the link fell silent do not show its current rate
        if direction == "sent":
            rate, moved = (
                (seen.now_sent_rate, seen.now_sent_bytes) if late else (seen.sent_rate, seen.sent_bytes)
            )
        else:
            rate, moved = seen.received_rate, seen.received_bytes
            if late:
                rate, moved = seen.now_received_rate, seen.now_received_bytes
        if not typical or not (late or seen.steps) or not rate:
            return 0.0
        due = self._due_bytes(node, link, direction)
        return float(rate) if due >= _LEAST_BYTES and moved >= _LEAST_MOVED * due else 0.0

    def _due_bytes(self, node: int, link: _Link, direction: Direction) -> float:
        """Return the bytes of a step over this link: the program's, limited to what its steps carried."""
        carried = link.sides[direction].usual_bytes
        expected = self._expected(node, direction)
        if expected is None:
            return carried
        links = self._of_node[node]
        whole = sum(one.sides[direction].usual_bytes for one in links)
        return min(carried, expected * carried / whole) if whole else expected / len(links)

    def _expected(self, node: int, direction: Direction) -> float | None:
        """Return the bytes that a node's ranks exchange with other nodes in a step, by the program; ``None``:
        unknown."""
        plan, ranks = self._plan, self._state.placement.get(node, ())
        if not plan.traffic or not ranks or self._state.layout != AS_THE_JOB:
            return None
        block = ranks[0] // len(ranks)
        return plan.traffic[block][direction == "received"] if block < len(plan.traffic) else None

    def _fell(self, key: LinkDirection, ratio: float, peers: "LinkPeers") -> bool:
        """Return whether a rate is below half of its own, matters to the step, and fell further than any
        peer's."""
        link, others = self._links[key[:2]], peers.of(key) if ratio < SLOW else None
        if others is None:
            return False
        seconds = self._due_bytes(key.node, link, key.direction) / (ratio * link.sides[key.direction].rate)
        if seconds < _LEAST_SHARE * median(link.seconds):
            return False
        return others.median >= AS_BEFORE or ratio < FURTHEST * others.least

    def _is_slow(
        self, key: LinkDirection, link: _Link, ratio: float, peers: "LinkPeers", now: float
    ) -> Iterator[Notice]:
        side = link.sides[key.direction]
        side.low += 1
        if side.low == 1:
            side.falls.append(now)
        if "slow" in link.alarms:
            link.alarms["slow"].good = 0
            return
        if side.low < _LOOKS and (ratio >= _VERY_SLOW or key.direction == "received"):
            return  # the heartbeat of a slow sender may be in flight
        verb = "sends" if key.direction == "sent" else "receives"
        rate, due = side.rate * ratio, self._due_bytes(key.node, link, key.direction)
        others = peers.of(key)
        assert others is not None, "a link is named by comparison"
        text = (
            f"link {key.link} of node {key.node} {verb} at {_per_second(rate)}, before at"
            f" {_per_second(side.rate)}; peers' links are at {others.median:.0%} of theirs"
        )
        evidence: dict[str, object] = {
            "direction": key.direction,
            "bytes_per_second": round(rate),
            "before_bytes_per_second": round(side.rate),
            "peers_ratio": round(others.median, 2),
            "bytes_of_a_step": round(due),
        }
        yield from self._raise("slow", key.node, link, text, evidence, now)

    def _is_as_before(self, key: LinkDirection, link: _Link, ratio: float, now: float) -> Iterator[Notice]:
        side = link.sides[key.direction]
        falls = [at for at in side.falls if now - at < _SWING_SECONDS]
        if len(falls) >= SWINGS and "slow" not in link.alarms:
            side.falls.clear()
            where = f"link {key.link} of node {key.node}"
            text = f"the rate of {where} swings: it fell {len(falls)} times in a minute"
            yield from self._raise("swings", key.node, link, text, {"direction": key.direction}, now)
        if ratio >= AS_BEFORE and all(self._is_known(key.node, link, one) for one in DIRECTIONS):
            for kind in ("slow", "stopped", "swings"):
                recent = kind == "swings" and side.falls and now - side.falls[-1] < _SWING_SECONDS
                if not recent:
                    yield from self._is_well(kind, link, now)

    def _is_known(self, node: int, link: _Link, direction: Direction) -> bool:
        """Whether the direction's own rate is known, or not needed because it carries hardly any bytes."""
        return link.sides[direction].rate > 0 or self._due_bytes(node, link, direction) < _LEAST_BYTES

    def _counted(self, links: Mapping[tuple[int, str], _Link], now: float) -> Iterator[Notice]:
        """Judge retransmissions, and how long links were paused."""
        words = {"sent again": "sends {:.0f} segments or packets a second again", "paused": ""}
        words["paused"] = "is paused by the other end for {:.0f} us each second"
        limits: dict[_Kind, float] = {"sent again": _SENT_AGAIN, "paused": _PAUSED}
        for kind, limit in limits.items():
            counts = {key: link.per_second.get(kind, 0.0) for key, link in links.items()}
            of_all = median(counts.values()) if counts else 0.0
            for (node, name), link in links.items():
                mine = counts[node, name]
                usual = link.usual.setdefault(kind, deque(maxlen=REMEMBERED))
                is_much = (
                    mine >= limit
                    and mine >= _TIMES_PEERS * (median(usual) if usual else 0.0)
                    and mine >= _TIMES_PEERS * _of_peers(counts, node, of_all)
                )
                link.many[kind] = link.many.get(kind, 0) + 1 if is_much else 0
                if link.many[kind] >= _LOOKS and len(usual) >= KNOWN and kind not in link.alarms:
                    text = (
                        f"link {name} of node {node} {words[kind].format(mine)}; before, {median(usual):.0f}"
                    )
                    yield from self._raise(kind, node, link, text, {"per_second": round(mine)}, now)
                if not is_much:
                    usual.append(mine)
                    yield from self._is_well(kind, link, now)
                elif kind in link.alarms:
                    link.alarms[kind].good = 0

    def _stopped(
        self, links: Mapping[tuple[int, str], _Link], ranks: Iterable[RankStatus], now: float
    ) -> Iterator[Notice]:
        if any(one.entered <= one.left or one.state in "TtZ" for one in ranks):
            return  # some rank computes, or was stopped: the others may wait for it
        still: dict[tuple[int, str], float] = {}
        for key, link in links.items():
            typical, seen = median(link.seconds) if len(link.seconds) >= KNOWN else 0.0, link.seen
            if typical and seen.still_seconds >= max(_STILL_SECONDS, typical) * self._plan.patience:
                share = self._done_share(key[0], link)
                if share < _DONE_SHARE:
                    still[key] = share
        if not still or any("stopped" in link.alarms for link in links.values()):
            return
        worst = self._worst(still, links)
        one = min(still) if worst is None else worst
        link, share, seconds = links[one], still[one], links[one].seen.still_seconds
        where = f"all {len(still)} links" if worst is None else f"link {one[1]} of node {one[0]}"
        text = (
            f"traffic of {where} has stopped for {seconds:.1f} s: step {link.seen.now_step} has carried"
            f" {share:.0%} of its bytes, and every rank waits in communication"
        )
        evidence: dict[str, object] = {
            "still_seconds": seconds,
            "carried_ratio": round(share, 3),
            "step": link.seen.now_step,
        }
        yield from self._raise("stopped", -1 if worst is None else one[0], link, text, evidence, now)

    def _done_share(self, node: int, link: _Link) -> float:
        """Return the share of its expected bytes that the current step carried, in the direction that is
        further behind."""
        seen = link.seen
        moved: dict[Direction, int] = {"sent": seen.now_sent_bytes, "received": seen.now_received_bytes}
        due = {one: self._due_bytes(node, link, one) for one in DIRECTIONS}
        shares = [moved[one] / due[one] for one in DIRECTIONS if due[one] >= _LEAST_BYTES]
        return min(shares, default=1.0)

    def _worst(
        self, still: Mapping[tuple[int, str], float], links: Mapping[tuple[int, str], _Link]
    ) -> tuple[int, str] | None:
        """Return the link that received far less of its bytes than any other, else the one that retransmits
        most. Return ``None`` if the links are alike."""
        if len(still) == 1:
            return next(iter(still))
        first, second = sorted(still, key=still.__getitem__)[:2]
        if still[first] < FURTHEST * still[second]:
            return first
        again = {key: links[key].per_second.get("sent again", 0.0) for key in still}
        first, second = sorted(again, key=again.__getitem__, reverse=True)[:2]
        return first if again[first] > 1.5 * again[second] else None

    # Alarms

    def _raise(
        self, kind: _Kind, node: int, link: _Link, text: str, evidence: dict[str, object], now: float
    ) -> Iterator[Notice]:
        link.alarms[kind] = _Alarm(now, node, text)
        self._alarmed.update([] if node < 0 else [node])
        recent = len(link.began) == _MOST_NOTICES and now - link.began[0] < _BAD_WITHIN_SECONDS
        link.began.append(now)
        if not recent:
            evidence = {"interface": link.seen.name, "kind": kind, **evidence}
            yield Notice(
                rule="traffic is not as the program and the peers have it",
                evidence=evidence,
                what="traffic",
                node=node,
                problem=text,
                level="warning",
            )

    def _is_well(self, kind: _Kind, link: _Link, now: float) -> Iterator[Notice]:
        alarm = link.alarms.get(kind)
        if alarm is None:
            return
        alarm.good += 1
        if alarm.good >= _LOOKS:
            del link.alarms[kind]
            where = f"link {link.seen.name} of node {alarm.node}" if alarm.node >= 0 else "traffic"
            yield Notice(
                rule="traffic is as before",
                evidence={"interface": link.seen.name, "kind": kind, "seconds": round(now - alarm.since, 1)},
                what="traffic",
                node=alarm.node,
                problem=f"{where} is as before again ({kind})",
                level="info",
            )

    # Consequences of alarms

    @property
    def is_calm(self) -> bool:
        """Whether no alarm is active."""
        return not self._alarmed or not any(link.alarms for link in self._links.values())

    def problem(self) -> str:
        """Return the oldest active alarm, as evidence of a fault; empty if no alarm is active."""
        alarms = [alarm for link in self._links.values() for alarm in link.alarms.values()]
        return min(alarms, key=lambda one: one.since).problem if alarms else ""

    def is_bad(self, node: int, now: float) -> bool:
        """Return whether another node would be better: an alarm lasts, or recurs."""
        for (number, _), link in self._links.items() if node in self._alarmed else ():
            if number == node:
                lasts = any(
                    now - one.since >= _BAD_SECONDS * self._plan.patience for one in link.alarms.values()
                )
                if lasts or sum(now - at < _BAD_WITHIN_SECONDS for at in link.began) >= _BAD_TIMES:
                    return True
        return False


def _of_peers(counts: Mapping[tuple[int, str], float], node: int, of_all: float) -> float:
    """Return the median count of other nodes' links. If there are many links, return ``of_all``, the median
    of all links, instead."""
    if len(counts) > MANY_PEERS:
        return of_all
    peers = [count for key, count in counts.items() if key[0] != node]
    return median(peers) if peers else 0.0


def _per_second(rate: float) -> str:
    return f"{format_bytes(int(rate))}/s"
