"""Every node's part in a pairwise test, and `pairwise`, which is all of it.

    findings = pairwise(nodes, index, secret)       on each of the nodes; gives all of them the same answer

The first node coordinates (`myriad.resilience.doctor.coordinator`) and is tested like the others. A node
listens only while a pair waits for its other half, on its own address of the list, and connects only to
addresses of the list: a message names a node by its place there.
"""

import asyncio
import hmac
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from myriad.comm.free_port import free_port
from myriad.errors import RunFailedError
from myriad.resilience.doctor.cluster import Node
from myriad.resilience.doctor.collective import Seat, run_seat, start_seat
from myriad.resilience.doctor.coordinator import Coordinator, Wanted
from myriad.resilience.doctor.findings import Findings, read_findings
from myriad.resilience.doctor.flow import Received, exchange, receive, send_for, trickle
from myriad.resilience.doctor.hardware import find_nics
from myriad.resilience.doctor.rdma import count_gpus, find_ports
from myriad.resilience.doctor.sealed import HEADER_BYTES, HELLO_BYTES, Message, Refused, Seal, hello, proof

__all__ = ["pairwise"]

_CONNECT_SECONDS, _RETRY_SECONDS = 5.0, 0.1
_MOST_SECONDS = 30.0
"""Longest time of one test, whatever a message says."""
_SILENCE_SECONDS = 3600.0
"""Longest time between two messages: collective rounds and looks in which this node has no part."""
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 15, socket.TCP_KEEPCNT: 8}
"""A first node whose machine has died is noticed within three minutes."""


def pairwise(
    nodes: Sequence[Node],
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
    """What the rounds found, on every node.

    ``complaints``: names of this node's own checks that failed; ``seconds`` of each test; ``wait_seconds``
    for the others to come; ``expected``: bytes per second of a good pair; ``links``: test every pair;
    ``collectives``: also all-reduce and all-to-all, among ``per_switch`` neighbours in the list and across,
    on each of ``rails`` (RDMA ports or interfaces; when left out those that all nodes have). The first node's
    wishes count. Raises `BadInputError` when the first node's address cannot be listened on,
    `RunFailedError` when the first node is not there."""
    if index:
        return _take_part(nodes, index, secret, complaints, wait_seconds)
    wanted = Wanted(
        seconds=seconds,
        wait_seconds=wait_seconds,
        expected=expected,
        links=links,
        collectives=collectives,
        per_switch=per_switch,
        rails=tuple(rails),
    )
    return asyncio.run(_coordinate(nodes, secret, complaints, wanted))


async def _coordinate(
    nodes: Sequence[Node], secret: bytes, complaints: Sequence[str], wanted: Wanted
) -> Findings:
    """Beside a thread in which this node takes part like any other."""
    coordinator = Coordinator(nodes, secret, wanted)
    server = await coordinator.listen()
    arguments = (nodes, 0, secret, complaints, wanted.wait_seconds)
    threading.Thread(target=_quietly, args=arguments, daemon=True).start()
    return await coordinator.run(server)


def _quietly(*arguments: object) -> None:
    """What fails is seen by the coordinator, as with any other node."""
    with suppress(RunFailedError):
        _take_part(*arguments)  # type: ignore[arg-type]


def _take_part(
    nodes: Sequence[Node], index: int, secret: bytes, complaints: Sequence[str], wait_seconds: float
) -> Findings:
    connection = _reach(nodes[0], wait_seconds)
    try:
        with connection:
            return _Member(nodes, index, secret, connection).serve(complaints)
    except OSError as error:
        raise RunFailedError(
            f"the pairwise test ended early: {nodes[0]} is gone, or has another secret ({error})"
        ) from None


def _reach(first: Node, wait_seconds: float) -> socket.socket:
    """The first node may still be testing itself."""
    end = time.monotonic() + wait_seconds
    while True:
        try:
            return socket.create_connection((first.host, first.port), _CONNECT_SECONDS)
        except OSError as error:
            if time.monotonic() > end:
                told = f"{first}, the first of the cluster, cannot be reached: {error}"
                raise RunFailedError(told) from None
            time.sleep(_RETRY_SECONDS)


class _Member:
    """Does what the coordinator asks, until it tells the outcome."""

    def __init__(self, nodes: Sequence[Node], index: int, secret: bytes, connection: socket.socket) -> None:
        self._nodes, self._index, self._secret, self._connection = nodes, index, secret, connection
        connection.settimeout(_SILENCE_SECONDS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        mine = hello()
        connection.sendall(mine)
        self._seal = Seal(secret, mine, _exactly(connection, HELLO_BYTES), connects=True)

    def serve(self, complaints: Sequence[str]) -> Findings:
        """Raises `OSError` when the coordinator is gone."""
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
            seat = Seat(
                rank=int(message["rank"]),
                world=int(message["world"]),
                host=self._nodes[int(message["first"]) % len(self._nodes)].host,
                port=int(message["port"]),
                backend="nccl" if message["backend"] == "nccl" else "gloo",
                rail=rail,
                interface=_interface(self._nodes[self._index].host),
                gpu=rails.index(rail) * gpus // len(rails) if rail in rails else 0,
                seconds=min(float(message["seconds"]), _MOST_SECONDS),
            )
            return run_seat(start_seat(seat), 20 * seat.seconds)
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
            connection.sendall(proof(self._secret, token, "connects"))
            _check(_exactly(connection, 32), proof(self._secret, token, "listens"))
            return _run(connection, how, seconds)

    def _accept(self, token: str) -> socket.socket:
        """The peer that knows the token; others are sent away."""
        with socket.create_server((self._nodes[self._index].host, 0)) as server:
            self._send({"op": "listening", "port": server.getsockname()[1]})
            end = time.monotonic() + _CONNECT_SECONDS
            while True:
                server.settimeout(max(0.01, end - time.monotonic()))
                connection, _ = server.accept()
                try:
                    connection.settimeout(max(0.01, end - time.monotonic()))
                    _check(_exactly(connection, 32), proof(self._secret, token, "connects"))
                    connection.sendall(proof(self._secret, token, "listens"))
                except OSError:
                    connection.close()
                    continue
                return connection

    def _send(self, message: Message) -> None:
        self._connection.sendall(self._seal.close(message))

    def _receive(self) -> Message:
        header = _exactly(self._connection, HEADER_BYTES)
        return self._seal.open(header, _exactly(self._connection, Seal.length(header)))


def _run(connection: socket.socket, how: object, seconds: float) -> Received:
    """One test: this end sends ("out"), receives ("in"), does both, or trickles both ways."""
    if how == "out":
        send_for(connection, seconds)
        return Received(0.0, 0)
    if how == "in":
        return receive(connection, seconds)
    if how == "trickle":
        return Received(0.0, 0, *trickle(connection))
    return exchange(connection, seconds)


def _rails() -> list[str]:
    """Active RDMA ports, as NCCL_IB_HCA names them."""
    return [f"{port.device}:{port.number}" for port in find_ports() if port.is_active]


def _interface(host: str) -> str:
    """The interface that has the address of a host name; empty where none has."""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return ""
    return next((nic.name for nic in find_nics() if nic.address == address), "")


def _check(found: bytes, right: bytes) -> None:
    if not hmac.compare_digest(found, right):
        raise Refused("a peer that does not know the secret")


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        if not (part := connection.recv(count - len(found))):
            raise Refused("the other end has closed")
        found += part
    return found
