"""The first node's part in a pairwise test: wait for the nodes, run the rounds, send the findings to all.

    node -> here    hello {node, complaints, gpus, rails}
    here -> a       listen {token, how}               a -> here    listening {port}
    here -> b       connect {peer, port, token, how}
    a, b -> here    rate {bytes_per_second, wrong, lost, trickled}    all pairs of the round at the same time
    here -> each    collect {first, port, rank, world, rail, backend}   -> here    collected {all_reduce, ...}
    here -> node    outcome {...}

A node that does not connect, or does not answer in time, counts 0 in all its tests, so the rounds name it. A
pair that loses packets without a full queue counts half. Each named node or path is then examined more
closely (one direction, the other, both, lost packets), which shows its fault (`pair_findings`). The
collective rounds come last, without the named nodes: groups under one switch, then one node of each switch.
"""

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from myriad.doctor.pair_tests.pair_findings import Findings, GroupResult, PairRates, evaluate_groups
from myriad.doctor.pair_tests.pair_hosts import PairHost
from myriad.doctor.pair_tests.pair_protocol import MOST_BYTES, PROTOCOL, Message
from myriad.doctor.pair_tests.pair_rounds import Pair, PairRounds, PairTestOutcome, Suspect, better
from myriad.doctor.probes.collective_patterns import PatternRates, combine_rates
from myriad.errors import BadInputError
from myriad.wire.framing import Refused
from myriad.wire.pending_connections import PendingConnections
from myriad.wire.stream_channel import StreamChannel

__all__ = ["Coordinator", "PairTestOptions"]

_ANSWER_SECONDS = 10.0
"""Time to answer beyond the duration of the test."""
_HELLO_SECONDS = 5.0
_MOST_UNREAD_BYTES = 2**20
_MOST_STRANGERS = 256
"""Largest number of unauthenticated connections beyond the nodes'."""
_COLLECT_SECONDS = 150.0
"""Time for a collective test: importing torch, forming the group, measuring."""
_LOSSY_RATIO, _LEAST_LOST = 0.004, 2
"""A pair is lossy from this share and number of lost packets, of those sent without a full queue."""
_MOST_LOOKS = 8
_MOST_GROUPED = 1024


@dataclass(frozen=True, kw_only=True)
class PairTestOptions:
    """Options of a pairwise test; `pairwise` has the defaults."""

    seconds: float
    wait_seconds: float
    expected: float | None
    links: bool
    collectives: bool
    per_switch: int
    rails: tuple[str, ...]


@dataclass(frozen=True)
class _PairResult:
    """Result of one test of a pair."""

    bytes_per_second: float
    """Rate of the slower direction."""
    lost: int = 0
    trickled: int = 0

    @property
    def lost_ratio(self) -> float:
        """Share of packets lost, among those sent while no queue was full."""
        return self.lost / self.trickled if self.trickled else 0.0

    @property
    def score(self) -> float:
        """Score that the rounds compare: the rate, halved for a lossy pair."""
        lossy = self.lost >= _LEAST_LOST and self.lost_ratio >= _LOSSY_RATIO
        return self.bytes_per_second * (0.5 if lossy else 1.0)


@dataclass(frozen=True)
class _Hello:
    """What a node reports about itself when it connects."""

    complaints: list[str]
    gpus: int
    rails: list[str]


class _NodeConnection:
    """The connection to one node."""

    def __init__(self, channel: StreamChannel) -> None:
        self._channel = channel

    async def send(self, message: Message) -> None:
        self._channel.send(json.dumps(message).encode())
        await self._channel.drain()

    async def receive(self, kind: str) -> Message:
        """Return the next message. Raises `OSError` if the node is gone, `Refused` if the message is of
        another kind."""
        try:
            message = json.loads(await self._channel.receive())
        except (ValueError, RecursionError) as error:
            raise Refused(f"no message: {error}") from None
        if not isinstance(message, dict) or message.get("op") != kind:
            raise Refused(f"another message instead of {kind!r}")
        return message

    def close(self) -> None:
        self._channel.close()


class Coordinator:
    """Runs one pairwise test of ``nodes``, of which this is the first."""

    def __init__(self, nodes: Sequence[PairHost], secret: bytes, options: PairTestOptions) -> None:
        self._nodes, self._secret, self._options = nodes, secret, options
        self._lines: dict[int, _NodeConnection] = {}
        self._hellos: dict[int, _Hello] = {}
        self._all_here = asyncio.Event()
        most = _MOST_STRANGERS + len(nodes)
        self._pending = PendingConnections(most, most)

    async def listen(self) -> asyncio.Server:
        """Listen for the nodes. Raises `BadInputError` if the first node's address cannot be listened on."""
        first = self._nodes[0]
        try:
            return await asyncio.start_server(self._on_connect, first.host, first.port, limit=2**17)
        except OSError as error:
            raise BadInputError(
                "--cluster", str(first), f"cannot be used to listen: {error.strerror}"
            ) from None

    async def run(self, server: asyncio.Server) -> Findings:
        """Run the test and return its findings, which all nodes receive."""
        options = self._options
        async with server:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._all_here.wait(), options.wait_seconds)
            rounds = PairRounds(len(self._nodes), expected=options.expected, links=options.links)
            while pairs := rounds.next_round():
                rates = await self._measure(pairs)
                if doubtful := rounds.doubtful(rates):
                    rates = better(rates, await self._measure(doubtful))
                rounds.report(pairs, rates)
            findings = await self._conclude(rounds.outcome())
            message = {"op": "outcome", "findings": findings.model_dump(mode="json")}
            await asyncio.gather(*(self._send_quietly(line, message) for line in self._lines.values()))
            for line in self._lines.values():
                line.close()
        return findings

    async def _conclude(self, outcome: PairTestOutcome) -> Findings:
        """Examine the suspects, run the collective rounds, and collect the findings."""
        pair_rates = {
            culprit.nodes: await self._examine_suspect(culprit, outcome)
            for culprit in outcome.culprits[:_MOST_LOOKS]
        }
        groups, skipped = await self._collectives(outcome)
        names = [str(node) for node in self._nodes]
        missing = [name for index, name in enumerate(names) if index not in self._hellos]
        complaints = {
            names[node]: hello.complaints for node, hello in sorted(self._hellos.items()) if hello.complaints
        }
        return Findings.of(outcome, names, complaints, missing, pair_rates, groups, skipped)

    async def _send_quietly(self, line: _NodeConnection, message: Message) -> None:
        with suppress(OSError, TimeoutError):
            await asyncio.wait_for(line.send(message), _ANSWER_SECONDS)

    # Nodes

    async def _on_connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Accept a connection that proves within seconds that it knows the secret; close any other."""
        self._pending.admit(writer, writer.get_extra_info("peername", ("",))[0], writer.transport.abort)
        try:
            await asyncio.wait_for(self._handshake(reader, writer), _HELLO_SECONDS)
        except (OSError, Refused):
            writer.close()
        finally:
            self._pending.leave(writer)

    async def _handshake(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = StreamChannel(reader, writer, most_bytes=MOST_BYTES, most_unread_bytes=_MOST_UNREAD_BYTES)
        await channel.accept(PROTOCOL, [self._secret])
        line = _NodeConnection(channel)
        message = await line.receive("hello")
        node = message.get("node")
        if not isinstance(node, int) or node not in range(len(self._nodes)) or node in self._lines:
            raise Refused(f"node {node!r} is not expected")
        self._lines[node] = line
        gpus = message.get("gpus")
        count = gpus if isinstance(gpus, int) and 0 <= gpus <= 64 else 0
        self._hellos[node] = _Hello(_names(message.get("complaints")), count, _names(message.get("rails")))
        if len(self._lines) == len(self._nodes):
            self._all_here.set()

    # Tests

    async def _measure(self, pairs: Sequence[Pair]) -> Mapping[Pair, float]:
        found = await asyncio.gather(*(self._test(*pair) for pair in pairs))
        return dict(zip(pairs, (one.score for one in found), strict=True))

    async def _test(self, a: int, b: int) -> _PairResult:
        """Return the slower direction when both send, after a trickle that shows lost packets. The trickle
        has a connection of its own, because a connection that has trickled starts more slowly."""
        quiet, full = await self._flow(a, b, "trickle"), await self._flow(a, b, "both")
        lost, trickled = (sum(_count(one, name) for one in quiet) for name in ("lost", "trickled"))
        return _PairResult(min(map(_rate, full)), lost, trickled)

    async def _flow(self, a: int, b: int, how: str) -> tuple[Message | None, Message | None]:
        """Return the answers of ``a`` and ``b`` to one test. ``how`` is "both" directions, a "trickle", or
        "out", from ``a`` to ``b`` alone. The answers are ``None`` if a node does not answer."""
        if not self._lines.keys() >= {a, b}:
            return None, None
        token = secrets.token_hex(16)
        listening = await self._request(a, {"op": "listen", "token": token, "how": how}, "listening")
        if listening is None:
            return None, None
        other = "in" if how == "out" else how
        connect = {"op": "connect", "peer": a, "port": listening.get("port"), "token": token, "how": other}
        theirs, mine = await asyncio.gather(self._request(b, connect, "rate"), self._request(a, None, "rate"))
        return mine, theirs

    async def _examine_suspect(self, culprit: Suspect, outcome: PairTestOutcome) -> PairRates:
        """Examine a node together with a good one, or a path."""
        pair = culprit.nodes
        if culprit.kind == "node":
            well = (node for node in outcome.cleared if node in self._lines)
            pair = (*culprit.nodes, *((partner,) if (partner := next(well, None)) is not None else ()))
        if len(pair) != 2 or not self._lines.keys() >= set(pair):
            return PairRates()
        a, b = pair
        (_, out), (_, back) = await self._flow(a, b, "out"), await self._flow(b, a, "out")
        both = await self._test(a, b)
        return PairRates(_rate(out), _rate(back), both.bytes_per_second, both.lost_ratio)

    # Collective rounds

    async def _collectives(self, outcome: PairTestOutcome) -> tuple[list[GroupResult], list[str]]:
        """Return the results of groups of nodes, and the tests that did not run."""
        named = {node for culprit in outcome.culprits if culprit.kind == "node" for node in culprit.nodes}
        nodes = [node for node in range(len(self._nodes)) if node in self._lines and node not in named]
        if not self._options.collectives:
            return [], ["collective rounds: --no-collectives"]
        if len(nodes) < 2 or len(nodes) > _MOST_GROUPED:
            return [], [f"collective rounds: {len(nodes)} sound nodes, 2 to {_MOST_GROUPED} are needed"]
        names = [str(node) for node in self._nodes]
        skipped = [f"collective rounds: without {names[node]}, which is named" for node in sorted(named)]
        backend, rails, why = self._backend(nodes)
        skipped += why
        size, found = self._options.per_switch, []
        under_one = [nodes[first : first + size] for first in range(0, len(nodes), size)]
        if len(under_one) > 1 and len(under_one[-1]) == 1:
            under_one[-2:] = [under_one[-2] + under_one[-1]]
        across = [[group[place] for group in under_one if place < len(group)] for place in range(size)]
        for kind, groups in (("one switch", under_one), ("across switches", across)):
            if kind == "across switches" and len(under_one) == 1:
                skipped.append("collectives across switches: all nodes are listed under one (--per-switch)")
                continue
            for rail in rails:
                chosen = [group for group in groups if len(group) > 1]
                rates = await asyncio.gather(*(self._collect(group, rail, backend) for group in chosen))
                found += evaluate_groups(kind, rail, backend, [[names[n] for n in g] for g in chosen], rates)
        return found, skipped

    def _backend(self, nodes: Sequence[int]) -> tuple[str, Sequence[str], list[str]]:
        """Return NCCL and every RDMA port that all nodes have, or gloo; and why not more."""
        hellos = [self._hellos[node] for node in nodes]
        without = [str(self._nodes[node]) for node in nodes if not self._hellos[node].gpus]
        if without:
            why = f"NCCL between nodes: no GPU on {', '.join(without[:4])}; gloo over TCP stands in for it"
            return "gloo", self._options.rails or ("",), [why]
        common = [rail for rail in hellos[0].rails if all(rail in hello.rails for hello in hellos)]
        if self._options.rails or common:
            return "nccl", self._options.rails or common, []
        return "nccl", ("",), ["NCCL per rail: no active RDMA port that all nodes have"]

    async def _collect(self, group: Sequence[int], rail: str, backend: str) -> PatternRates | str:
        """Return the rates of one group, or the reason why there are none."""
        first = await self._request(group[0], {"op": "place"}, "listening")
        if first is None:
            return f"{self._nodes[group[0]]} does not answer"
        options = {"op": "collect", "first": group[0], "port": first.get("port"), "world": len(group)}
        asked = [
            self._request(
                node,
                {**options, "rank": rank, "rail": rail, "backend": backend},
                "collected",
                _COLLECT_SECONDS,
            )
            for rank, node in enumerate(group)
        ]
        answers = dict(enumerate(await asyncio.gather(*asked)))
        problems = [
            f"{self._nodes[group[rank]]}: {'no answer' if answer is None else str(answer['failed'])[:200]}"
            for rank, answer in answers.items()
            if answer is None or "failed" in answer
        ]
        if problems:
            return "; ".join(problems[:2])
        try:
            return combine_rates({rank: answer for rank, answer in answers.items() if answer is not None})
        except (KeyError, TypeError, ValueError, AttributeError):
            return "an invalid answer"

    async def _request(
        self, node: int, message: Message | None, kind: str, within: float = _ANSWER_SECONDS
    ) -> Message | None:
        """Send a message to a node and return its answer. A node that fails to answer is dropped: its next
        answer would belong to this request."""
        if (line := self._lines.get(node)) is None:
            return None
        try:
            async with asyncio.timeout(within + 4 * self._options.seconds):
                if message is not None:
                    await line.send(message | {"seconds": self._options.seconds})
                return await line.receive(kind)
        except (OSError, Refused):
            line.close()
            del self._lines[node]
            return None


def _rate(message: Message | None) -> float:
    found: Any = None if message is None or message.get("wrong") else message.get("bytes_per_second")
    return float(found) if isinstance(found, int | float) and 0 <= found < 1e18 else 0.0


def _count(message: Message | None, name: str) -> int:
    found = None if message is None else message.get(name)
    return found if isinstance(found, int) and 0 <= found < 2**31 else 0


def _names(found: object) -> list[str]:
    return [str(name)[:80] for name in found[:8]] if isinstance(found, list) else []
