"""Copies of snapshots in the memory of other nodes, and requests between snapshot servers. Without torch.

The copy of a rank's snapshot should survive a failure of the rank's node, so it is on another node. If
possible, no rank of that node shares a parallel group with the copied rank, because the ranks of a group
often fail together. Source: ByteRobust, arXiv 2509.16293, section 6.

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

from myriad.checkpoint.format.stored_shard import encode_shards, snapshot_bytes, without_mirrors
from myriad.checkpoint.snapshots.rank_entry import RankEntry
from myriad.checkpoint.storage.direct_io import Buffer
from myriad.wire.socket_channel import Closed, Message, SocketChannel

__all__ = ["PROTOCOL", "PeerServers", "choose_holders", "choose_node", "new_token"]

PROTOCOL = "snapshots"
_ANSWER_SECONDS = 600.0
_CONNECT_SECONDS, _PROVE_SECONDS = 10.0, 60.0
"""Time to connect, and then to authenticate: a server may be stopped until its node agent continues it."""
_REPLACED_SECONDS, _RETRY_SECONDS = 10.0, 0.1
"""How long a node may be without a snapshot server during a replacement, and the interval of retries."""

Address = tuple[str, int]


def new_token() -> str:
    """Return a random token that authenticates the snapshot servers of one attempt to each other."""
    return secrets.token_hex(16)


def choose_node(node: int, ranks_of_node: Sequence[Sequence[int]], peers: frozenset[int]) -> int | None:
    """Return the node for copies of a rank of ``node``; ``None``: there is only one node.

    ``peers``: all ranks that share a parallel group with the rank."""
    num_nodes = len(ranks_of_node)
    others = [(node + distance) % num_nodes for distance in range(1, num_nodes)]
    return min(others, key=lambda other: len(peers & set(ranks_of_node[other])), default=None)


def choose_holders(rank: int, alike: Sequence[int], node_of_rank: Sequence[int], number: int) -> list[int]:
    """Return the ranks whose snapshots hold the shards of ``rank`` too, so that they are on ``number`` nodes
    if possible: of ``alike``, the ranks that hold the same state, the next ones on other nodes."""
    at, found = alike.index(rank), [rank]
    for other in (*alike[at + 1 :], *alike[:at]):
        if len(found) < number and node_of_rank[other] not in {node_of_rank[one] for one in found}:
            found.append(other)
    return found[1:]


class PeerServers:
    """Connections of this node's snapshot server to those of the other nodes."""

    def __init__(
        self,
        nodes: Sequence[Sequence[Any]],
        node: int,
        token: str,
        target_of: Mapping[int, int],
        *,
        encrypts: bool = False,
    ) -> None:
        """``nodes``: host and port of each server. ``token``: secret of the attempt. ``target_of``: node that
        stores the copy of each rank. ``encrypts``: whether connections have TLS."""
        self._addresses: list[Address] = [(host, port) for host, port in nodes]
        self._node, self._token, self._target_of = node, token, dict(target_of)
        self._encrypts = encrypts
        self._peer_connections = {
            (other, kind): _PeerConnection() for other in range(len(nodes)) for kind in _KINDS
        }
        self._introduced: set[tuple[int, int]] = set()

    @property
    def has_targets(self) -> bool:
        """Whether any rank of this node is copied to another node."""
        return any(target is not None for target in self._target_of.values())

    def request(self, node: int, message: Message, payload: Buffer = b"") -> Message:
        """Send a request to one server and return the answer. Raises ``OSError`` on any failure."""
        kind = _KIND_OF.get(message["op"], "orders")
        peer = self._peer_connections[node, kind]
        with peer.lock:
            try:
                if peer.wire is None or peer.address != self._addresses[node]:
                    peer.close()
                    self._connect(peer, node, _REPLACED_SECONDS if kind == "store" else 0.0)
                assert peer.wire is not None, "connected"
                peer.wire.send(message, payload)
                answer, _, _ = peer.wire.receive()
            except OSError as error:
                peer.close()
                raise OSError(f"snapshot server of node {node}: {error or 'no answer'}") from error
        if "problem" in answer:
            raise OSError(f"node {node}: {answer['problem']}")
        return answer

    def _connect(self, peer: "_PeerConnection", node: int, seconds: float) -> None:
        """Connect to a server. ``seconds``: how long to wait for a replacement of one that died."""
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
        peer.wire, peer.address = SocketChannel(connection), address
        peer.wire.set_timeout(_ANSWER_SECONDS)
        peer.wire.connect(PROTOCOL, self._token.encode(), _PROVE_SECONDS, encrypts=self._encrypts)

    def move(self, node: int, address: Address) -> None:
        """Set the address of a new server that replaced the one of ``node``. It has no copies yet."""
        self._addresses[node] = address
        self._introduced = {(target, rank) for target, rank in self._introduced if target != node}

    def request_all(self, message: Message) -> list[Callable[[], Message]]:
        """Send a request to all other servers. Each returned call waits for an answer."""
        others = (node for node in range(len(self._addresses)) if node != self._node)
        return [self.ask(node, message) for node in others]

    def ask(self, node: int, message: Message) -> Callable[[], Message]:
        """Send a request to one server. The returned call waits for the answer or raises ``OSError``."""
        return _PendingRequest(self, node, message)

    def send_copies(self, step: int, entries: Sequence[RankEntry]) -> None:
        """Send the snapshots of a step to the nodes that store their copies. Raises ``OSError``."""
        for entry in entries:
            target, slot = self._target_of.get(entry.rank), entry.slot_of(step)
            if target is None:
                continue
            hashes = None if slot is None else entry.hashes(slot, step)
            if slot is None or hashes is None:
                raise OSError(f"rank {entry.rank} has no snapshot of step {step}")
            who = {"attempt": entry.attempt, "world": entry.world, "rank": entry.rank, "step": step}
            own = without_mirrors(entry.stored_shards)
            if (target, entry.rank) not in self._introduced:
                values, envelopes = encode_shards(own)
                self.request(target, {"op": "begin copies", "pieces": values, **who}, envelopes)
                self._introduced.add((target, entry.rank))
            data = entry.memory.view(slot, 0, snapshot_bytes(own))
            self.request(target, {"op": "copy of", "hashes": hashes[: len(own)], **who}, data)


@dataclass
class _PeerConnection:
    """A connection for one kind of request, so that short requests do not wait behind data and stores."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    wire: SocketChannel | None = None
    address: Address | None = None

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        if self.wire is not None:
            self.wire.close()
        self.wire = None


_KINDS = ("orders", "store", "copy", "data")
_KIND_OF = {"store": "store", "copy": "copy", "begin copies": "data", "copy of": "data"}


class _PendingRequest:
    """A request in flight; call it to wait for the answer."""

    def __init__(self, copies: PeerServers, node: int, message: Message) -> None:
        self._answer: Message | None = None
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._ask, args=(copies, node, message), daemon=True)
        self._thread.start()

    def _ask(self, copies: PeerServers, node: int, message: Message) -> None:
        try:
            self._answer = copies.request(node, message)
        except OSError as error:
            self._error = error

    def __call__(self) -> Message:
        self._thread.join()
        if self._answer is None:
            raise self._error or Closed("no answer")
        return self._answer
