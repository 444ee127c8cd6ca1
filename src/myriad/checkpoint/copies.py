"""Copies of snapshots in the memory of other nodes, and the keepers' talk. No torch here.

A rank's copy should survive what takes the rank: it lies on another node, and where there is a choice on one
none of whose ranks shares a parallel group with it (ByteRobust, arXiv 2509.16293, section 6), since ranks of
one group are often lost together.

    pp 2, dp 2, tp 2, two ranks a node     nodes (0 1) (2 3) (4 5) (6 7); rank 0 is with 1 in a tensor group,
                                           with 2 in a data-parallel and with 4 in a pipeline group: copy on
                                           node 3, which has none of them
"""

import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from myriad.checkpoint.direct import Buffer
from myriad.checkpoint.member import Member
from myriad.checkpoint.piece import join_pieces, snapshot_bytes
from myriad.checkpoint.wire import Closed, Message, Wire

__all__ = ["Copies", "choose_node", "new_token"]

_ANSWER_SECONDS = 600.0
_CONNECT_SECONDS = 10.0
_REPLACED_SECONDS, _RETRY_SECONDS = 10.0, 0.1
"""How long a node is without a keeper when one takes another's place; how often that is looked for."""

Address = tuple[str, int]


def new_token() -> str:
    """What the keepers of one attempt know each other by."""
    return secrets.token_hex(16)


def choose_node(node: int, ranks_of_node: Sequence[Sequence[int]], peers: frozenset[int]) -> int | None:
    """Where the copy of a rank of ``node`` goes; ``peers``: all ranks that share a group with it. ``None``
    when there is one node only."""
    num_nodes = len(ranks_of_node)
    others = [(node + distance) % num_nodes for distance in range(1, num_nodes)]
    return min(others, key=lambda other: len(peers & set(ranks_of_node[other])), default=None)


class Copies:
    """This node's lines to the other keepers."""

    def __init__(
        self, nodes: Sequence[Sequence[Any]], node: int, token: str, target_of: Mapping[int, int]
    ) -> None:
        """``nodes``: host and port of each keeper; ``target_of``: the node of the copy of each rank."""
        self._addresses: list[Address] = [(host, port) for host, port in nodes]
        self._node, self._token, self._target_of = node, token, dict(target_of)
        self._lines = {(other, kind): _Line() for other in range(len(nodes)) for kind in _KINDS}
        self._introduced: set[tuple[int, int]] = set()

    @property
    def has_targets(self) -> bool:
        """Whether any rank of this node has a copy elsewhere."""
        return any(target is not None for target in self._target_of.values())

    def request(self, node: int, message: Message, payload: Buffer = b"") -> Message:
        """Asks one keeper. Raises ``OSError`` when it is gone, or answers with a problem."""
        kind = _KIND_OF.get(message["op"], "orders")
        line = self._lines[node, kind]
        with line.lock:
            try:
                if line.wire is None or line.address != self._addresses[node]:
                    line.close()
                    self._connect(line, node, _REPLACED_SECONDS if kind == "store" else 0.0)
                assert line.wire is not None, "connected"
                line.wire.send(message, payload)
                answer, _, _ = line.wire.receive()
            except OSError as error:
                line.close()
                raise OSError(f"keeper of node {node}: {error or 'no answer'}") from error
        if "problem" in answer:
            raise OSError(f"node {node}: {answer['problem']}")
        return answer

    def _connect(self, line: "_Line", node: int, seconds: float) -> None:
        """``seconds``: how long to wait for a keeper to take the place of one that died."""
        deadline = time.monotonic() + seconds
        while True:
            address = self._addresses[node]
            try:
                connection = socket.create_connection(address, _CONNECT_SECONDS)
                break
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.wire, line.address = Wire(connection), address
        line.wire.patience(_ANSWER_SECONDS)
        line.wire.send({"op": "keeper", "token": self._token})

    def move(self, node: int, address: Address) -> None:
        """A new keeper has taken the place of one: it knows nothing yet."""
        self._addresses[node] = address
        self._introduced = {(target, rank) for target, rank in self._introduced if target != node}

    def ask_all(self, message: Message) -> list[Callable[[], Message]]:
        """Asks every other keeper at once; each call waits for an answer, or raises ``OSError``."""
        others = (node for node in range(len(self._addresses)) if node != self._node)
        return [self.ask(node, message) for node in others]

    def ask(self, node: int, message: Message) -> Callable[[], Message]:
        """One of them."""
        return _Asking(self, node, message)

    def send_own(self, step: int, members: Sequence[Member]) -> None:
        """The snapshots of a step to where their copies are kept. Raises ``OSError``."""
        for member in members:
            target, slot = self._target_of.get(member.rank), member.slot_of(step)
            if target is None:
                continue
            hashes = None if slot is None else member.hashes(slot, step)
            if slot is None or hashes is None:
                raise OSError(f"rank {member.rank} has no snapshot of step {step}")
            who = {"attempt": member.attempt, "world": member.world, "rank": member.rank, "step": step}
            if (target, member.rank) not in self._introduced:
                values, envelopes = join_pieces(member.pieces)
                self.request(target, {"op": "begin copies", "pieces": values, **who}, envelopes)
                self._introduced.add((target, member.rank))
            data = member.memory.view(slot, 0, snapshot_bytes(member.pieces))
            self.request(target, {"op": "copy of", "hashes": hashes, **who}, data)


@dataclass
class _Line:
    """A connection for one kind of request: data and storing take long, orders do not wait behind them."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    wire: Wire | None = None
    address: Address | None = None

    def close(self) -> None:
        """The next request connects anew."""
        if self.wire is not None:
            self.wire.close()
        self.wire = None


_KINDS = ("orders", "store", "copy", "data")
_KIND_OF = {"store": "store", "copy": "copy", "begin copies": "data", "copy of": "data"}


class _Asking:
    """A question under way."""

    def __init__(self, copies: Copies, node: int, message: Message) -> None:
        self._answer: Message | None = None
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._ask, args=(copies, node, message), daemon=True)
        self._thread.start()

    def _ask(self, copies: Copies, node: int, message: Message) -> None:
        try:
            self._answer = copies.request(node, message)
        except OSError as error:
            self._error = error

    def __call__(self) -> Message:
        self._thread.join()
        if self._answer is None:
            raise self._error or Closed("no answer")
        return self._answer
