"""The first node's part in a pairwise test: waits for the nodes, has the pairs of each round measure, tells
all what came of it.

    node -> here    hello {node, complaints}
    here -> a       listen {token}                    a -> here    listening {port}
    here -> b       connect {peer, port, token}
    a, b -> here    rate {bytes_per_second, wrong}    both, at the same time as all other pairs of the round
    here -> node    outcome {...}

A node that does not come, or does not answer in time, counts 0 in all its tests: the rounds name it.
"""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from myriad.errors import BadInputError
from myriad.resilience.doctor.cluster import Node
from myriad.resilience.doctor.findings import Findings
from myriad.resilience.doctor.rounds import Pair, Rounds, better
from myriad.resilience.doctor.sealed import HEADER_BYTES, HELLO_BYTES, Message, Refused, Seal, hello
from myriad.strangers import Strangers

__all__ = ["Coordinator"]

_ANSWER_SECONDS = 10.0
"""Beyond what the test itself takes."""
_HELLO_SECONDS = 5.0
_MOST_STRANGERS = 256
"""Connections beyond the nodes' that have not proved themselves yet."""


class _Line:
    """The connection to one node."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seal: Seal) -> None:
        self._reader, self._writer, self._seal = reader, writer, seal

    async def send(self, message: Message) -> None:
        self._writer.write(self._seal.close(message))
        await self._writer.drain()

    async def receive(self, kind: str) -> Message:
        """Raises `OSError` when the node is gone, or says something else."""
        header = await self._reader.readexactly(HEADER_BYTES)
        message = self._seal.open(header, await self._reader.readexactly(Seal.length(header)))
        if message.get("op") != kind:
            raise Refused(f"{message.get('op')!r} instead of {kind!r}")
        return message

    def close(self) -> None:
        self._writer.close()


class Coordinator:
    """One pairwise test of ``nodes``, of which this is the first."""

    def __init__(
        self, nodes: Sequence[Node], secret: bytes, *, seconds: float, wait_seconds: float, links: bool
    ) -> None:
        self._nodes, self._secret = nodes, secret
        self._seconds, self._wait_seconds, self._links = seconds, wait_seconds, links
        self._lines: dict[int, _Line] = {}
        self._complaints: dict[int, list[str]] = {}
        self._all_here = asyncio.Event()
        most = _MOST_STRANGERS + len(nodes)
        self._strangers = Strangers(most, most)

    async def listen(self) -> asyncio.Server:
        """Raises `BadInputError` when the first node's address cannot be listened on."""
        first = self._nodes[0]
        try:
            return await asyncio.start_server(self._welcome, first.host, first.port, limit=2**17)
        except OSError as error:
            raise BadInputError("--cluster", str(first), f"cannot be listened on: {error.strerror}") from None

    async def run(self, server: asyncio.Server, expected: float | None) -> Findings:
        """What the nodes are told at the end."""
        async with server:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._all_here.wait(), self._wait_seconds)
            rounds = Rounds(len(self._nodes), expected=expected, links=self._links)
            while pairs := rounds.next_round():
                rates = await self._measure(pairs)
                if doubtful := rounds.doubtful(rates):
                    rates = better(rates, await self._measure(doubtful))
                rounds.report(pairs, rates)
            names = [str(node) for node in self._nodes]
            missing = [name for index, name in enumerate(names) if index not in self._complaints]
            complaints = {names[node]: found for node, found in sorted(self._complaints.items()) if found}
            findings = Findings.of(rounds.outcome(), names, complaints, missing)
            message = {"op": "outcome", "findings": findings.model_dump(mode="json")}
            await asyncio.gather(*(self._tell(line, message) for line in self._lines.values()))
            for line in self._lines.values():
                line.close()
        return findings

    async def _tell(self, line: _Line, message: Message) -> None:
        with suppress(OSError, TimeoutError):
            await asyncio.wait_for(line.send(message), _ANSWER_SECONDS)

    # Nodes

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take a connection that proves within seconds that it knows the secret; close any other."""
        self._strangers.admit(writer, writer.get_extra_info("peername", ("",))[0], writer.transport.abort)
        try:
            await asyncio.wait_for(self._take(reader, writer), _HELLO_SECONDS)
        except (OSError, EOFError, TimeoutError):
            writer.close()
        finally:
            self._strangers.leave(writer)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine = hello()
        writer.write(mine)
        seal = Seal(self._secret, mine, await reader.readexactly(HELLO_BYTES), connects=False)
        line = _Line(reader, writer, seal)
        message = await line.receive("hello")
        node = message.get("node")
        if not isinstance(node, int) or node not in range(len(self._nodes)) or node in self._lines:
            raise Refused(f"node {node!r} is not awaited")
        self._lines[node] = line
        self._complaints[node] = _names(message.get("complaints"))
        if len(self._lines) == len(self._nodes):
            self._all_here.set()

    # Tests

    async def _measure(self, pairs: Sequence[Pair]) -> Mapping[Pair, float]:
        rates = await asyncio.gather(*(self._test(*pair) for pair in pairs))
        return dict(zip(pairs, rates, strict=True))

    async def _test(self, a: int, b: int) -> float:
        """The slower direction; 0 when a node does not answer, or something else arrives than was sent."""
        if not self._lines.keys() >= {a, b}:
            return 0.0
        token = secrets.token_hex(16)
        listening = await self._ask(a, {"op": "listen", "token": token}, "listening")
        if listening is None:
            return 0.0
        connect = {"op": "connect", "peer": a, "port": listening.get("port"), "token": token}
        found = await asyncio.gather(self._ask(b, connect, "rate"), self._ask(a, None, "rate"))
        return min(_rate(message) for message in found)

    async def _ask(self, node: int, message: Message | None, kind: str) -> Message | None:
        """A node that fails to answer is not asked again: its next answer would be to an old question."""
        if (line := self._lines.get(node)) is None:
            return None
        try:
            async with asyncio.timeout(_ANSWER_SECONDS + 4 * self._seconds):
                if message is not None:
                    await line.send(message | {"seconds": self._seconds})
                return await line.receive(kind)
        except (OSError, EOFError, TimeoutError):
            line.close()
            del self._lines[node]
            return None


def _rate(message: Message | None) -> float:
    found: Any = None if message is None or message.get("wrong") else message.get("bytes_per_second")
    return float(found) if isinstance(found, int | float) and 0 <= found < 1e18 else 0.0


def _names(found: object) -> list[str]:
    return [str(name)[:80] for name in found[:8]] if isinstance(found, list) else []
