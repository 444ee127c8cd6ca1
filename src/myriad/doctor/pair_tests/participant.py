"""Each node's part in a pairwise test, and `pairwise`, which runs the whole test.

    findings = pairwise(nodes, index, secret)       on each of the nodes; returns the same result on all

The first node coordinates (`coordinator`) and is tested like the others. A node listens only while its pair
waits for the other half, on its own address of the list, and connects only to addresses of the list: a
message names a node by its index there.
"""

import asyncio
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from myriad.comm.free_port import free_port
from myriad.comm.rendezvous.store_secret import attempt_secret
from myriad.doctor.hardware import find_nics
from myriad.doctor.pair_tests.coordinator import Coordinator, PairTestOptions
from myriad.doctor.pair_tests.pair_findings import Findings, read_findings
from myriad.doctor.pair_tests.pair_hosts import PairHost
from myriad.doctor.pair_tests.pair_protocol import MOST_BYTES, PROTOCOL, Message, pair_protocol
from myriad.doctor.probes.collective_probe import CollectiveRank, start_rank, wait_for_rank
from myriad.doctor.probes.rdma_probe import count_gpus, find_ports
from myriad.doctor.probes.tcp_flow import Received, exchange, receive, send_for, trickle
from myriad.errors import RunFailedError
from myriad.wire.socket_channel import SocketChannel

__all__ = ["pairwise"]

_CONNECT_SECONDS, _RETRY_SECONDS = 5.0, 0.1
_MOST_SECONDS = 30.0
"""Longest time of one test, whatever a message says."""
_SILENCE_SECONDS = 3600.0
"""Longest time between two messages: collective rounds and examinations without this node."""
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 15, socket.TCP_KEEPCNT: 8}
"""With these values a dead first node is noticed within three minutes."""


def pairwise(
    nodes: Sequence[PairHost],
    index: int,
    secret: bytes,
    *,
    complaints: Sequence[str] = (),
    seconds: float = 0.5,
    wait_seconds: float = 60.0,
    expected: float | None = None,
    links: bool = False,
    collectives: bool = False,
    per_switch: int = 4,
    rails: Sequence[str] = (),
) -> Findings:
    """Run the pairwise test and return its findings, on every node.

    ``complaints``: names of this node's failed checks; ``seconds`` of each test; ``wait_seconds`` for the
    other nodes to connect; ``expected``: bytes per second of a good pair; ``links``: test every pair;
    ``collectives``: also all-reduce and all-to-all, among ``per_switch`` neighbours in the list and across,
    on each of ``rails`` (RDMA ports or interfaces; by default those that all nodes have). The first node's
    options count. Raises `BadInputError` if the first node's address cannot be listened on, `RunFailedError`
    if the first node cannot be reached.
    """
    if index:
        return _participate(nodes, index, secret, complaints, wait_seconds)
    options = PairTestOptions(
        seconds=seconds,
        wait_seconds=wait_seconds,
        expected=expected,
        links=links,
        collectives=collectives,
        per_switch=per_switch,
        rails=tuple(rails),
    )
    return asyncio.run(_coordinate(nodes, secret, complaints, options))


async def _coordinate(
    nodes: Sequence[PairHost], secret: bytes, complaints: Sequence[str], options: PairTestOptions
) -> Findings:
    """Coordinate, beside a thread in which this node takes part like any other."""
    coordinator = Coordinator(nodes, secret, options)
    server = await coordinator.listen()
    arguments = (nodes, 0, secret, complaints, options.wait_seconds)
    threading.Thread(target=_quietly, args=arguments, daemon=True).start()
    return await coordinator.run(server)


def _quietly(*arguments: object) -> None:
    """Take part; the coordinator notices a failure as with any other node."""
    with suppress(RunFailedError):
        _participate(*arguments)  # type: ignore[arg-type]


def _participate(
    nodes: Sequence[PairHost], index: int, secret: bytes, complaints: Sequence[str], wait_seconds: float
) -> Findings:
    connection = _connect_to_first(nodes[0], wait_seconds)
    try:
        with connection:
            return _Participant(nodes, index, secret, connection).serve(complaints)
    except OSError as error:
        raise RunFailedError(
            f"the pairwise test ended early: {nodes[0]} is gone, or has another secret ({error})"
        ) from None


def _connect_to_first(first: PairHost, wait_seconds: float) -> socket.socket:
    """Connect to the first node; retry, because it may still be testing itself."""
    end = time.monotonic() + wait_seconds
    while True:
        try:
            return socket.create_connection((first.host, first.port), _CONNECT_SECONDS)
        except OSError as error:
            if time.monotonic() > end:
                text = f"{first}, the first of the cluster, cannot be reached: {error}"
                raise RunFailedError(text) from None
            time.sleep(_RETRY_SECONDS)


class _Participant:
    """Runs the tests that the coordinator requests, until the outcome arrives."""

    def __init__(
        self, nodes: Sequence[PairHost], index: int, secret: bytes, connection: socket.socket
    ) -> None:
        self._nodes, self._index, self._secret = nodes, index, secret
        connection.settimeout(_SILENCE_SECONDS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._channel = SocketChannel(connection, MOST_BYTES)
        self._channel.connect(PROTOCOL, secret)

    def serve(self, complaints: Sequence[str]) -> Findings:
        """Serve requests and return the findings. Raises `OSError` if the coordinator is gone."""
        about = {
            "complaints": [name[:80] for name in complaints[:8]],
            "gpus": count_gpus(),
            "rails": _rails()[:8],
        }
        self._send({"op": "hello", "node": self._index, **about})
        while True:
            message = self._receive()
            op = message.get("op")
            if op == "outcome":
                return read_findings(message.get("findings"))
            if op == "place":
                self._send({"op": "listening", "port": free_port(self._nodes[self._index].host)})
            elif op == "collect":
                self._send({"op": "collected", **self._collect(message)})
            else:
                self._send({"op": "rate", **self._rate(message)})

    def _rate(self, message: Message) -> Message:
        try:
            found = self._test(message, min(float(message["seconds"]), _MOST_SECONDS))
        except (OSError, KeyError, TypeError, ValueError, OverflowError):
            found = Received(0.0, 0)
        rate, wrong = found.bytes_per_second, found.wrong_bytes
        return {"bytes_per_second": rate, "wrong": wrong, "lost": found.lost, "trickled": found.trickled}

    def _collect(self, message: Message) -> Message:
        """Take part in a collective test, in a process of its own; the answer has ``failed`` if it fails."""
        try:
            rail, rails, gpus = str(message["rail"]), _rails(), max(1, count_gpus())
            spec = CollectiveRank(
                rank=int(message["rank"]),
                world=int(message["world"]),
                host=self._nodes[int(message["first"]) % len(self._nodes)].host,
                port=int(message["port"]),
                secret=attempt_secret(self._secret, f"doctor {message['port']}"),
                backend="nccl" if message["backend"] == "nccl" else "gloo",
                rail=rail,
                interface=_interface(self._nodes[self._index].host),
                gpu=rails.index(rail) * gpus // len(rails) if rail in rails else 0,
                seconds=min(float(message["seconds"]), _MOST_SECONDS),
            )
            return wait_for_rank(start_rank(spec), 20 * spec.seconds)
        except (RunFailedError, OSError, KeyError, TypeError, ValueError, OverflowError) as error:
            return {"failed": str(error)[:300]}

    def _test(self, message: Message, seconds: float) -> Received:
        token, how = str(message["token"]), message.get("how")
        if message.get("op") == "listen":
            with self._accept(token) as connection:
                return _run(connection, how, seconds)
        peer = self._nodes[int(message["peer"]) % len(self._nodes)]
        source = (self._nodes[self._index].host, 0)
        with socket.create_connection(
            (peer.host, int(message["port"])), _CONNECT_SECONDS, source
        ) as connection:
            SocketChannel(connection).connect(pair_protocol(token), self._secret)
            return _run(connection, how, seconds)

    def _accept(self, token: str) -> socket.socket:
        """Accept the connection of the peer that knows the token; close others."""
        with socket.create_server((self._nodes[self._index].host, 0)) as server:
            self._send({"op": "listening", "port": server.getsockname()[1]})
            end = time.monotonic() + _CONNECT_SECONDS
            while True:
                server.settimeout(max(0.01, end - time.monotonic()))
                connection, _ = server.accept()
                try:
                    left_seconds = max(0.01, end - time.monotonic())
                    connection.settimeout(left_seconds)
                    SocketChannel(connection).accept(pair_protocol(token), [self._secret], left_seconds)
                except OSError:
                    connection.close()
                    continue
                return connection

    def _send(self, message: Message) -> None:
        self._channel.send(message)

    def _receive(self) -> Message:
        return self._channel.receive()[0]


def _run(connection: socket.socket, how: object, seconds: float) -> Received:
    """Run one test: this end sends ("out"), receives ("in"), does both, or trickles in both directions."""
    if how == "out":
        send_for(connection, seconds)
        return Received(0.0, 0)
    if how == "in":
        return receive(connection, seconds)
    if how == "trickle":
        return Received(0.0, 0, *trickle(connection))
    return exchange(connection, seconds)


def _rails() -> list[str]:
    """Return the active RDMA ports, in the format of NCCL_IB_HCA."""
    return [f"{port.device}:{port.number}" for port in find_ports() if port.is_active]


def _interface(host: str) -> str:
    """Return the interface with the address of a host name; empty if there is none."""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return ""
    return next((nic.name for nic in find_nics() if nic.address == address), "")
