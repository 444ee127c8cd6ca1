"""If these fail, a host on the way between two nodes, or one that reaches the port, can read, change or end
what a snapshot server holds. The server is a real process."""

import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from myriad.checkpoint.checkpoint_files import constant_manifest
from myriad.checkpoint.snapshots.peer_servers import PROTOCOL
from myriad.checkpoint.snapshots.snapshot_client import SnapshotClient, server_name
from myriad.wire.framing import FrameKind, pack_header
from myriad.wire.socket_channel import Closed, SocketChannel

SECONDS = 60.0
TOKEN = secrets.token_hex(16)
HOST = "127.0.0.2"
STEPS = {"op": "steps", "attempt": 1}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[SnapshotClient]:
    made = SnapshotClient(server_name(tmp_path), starts=True, log=tmp_path / "keeper.log")
    made.join([], attempt=1, rank=0, holds=[0], world=1, num_local=1, num_slots=2)
    made.configure(
        {
            "events": str(tmp_path / "events.jsonl"), "linger_seconds": 0, "url": str(tmp_path / "there"),
            "keep": 2, "max_age_seconds": None, "alarm_after": 3, "node": 0, "token": TOKEN, "target_of": {},
            "nodes": [["", 0]], "moved": False, "encrypt": False, "constant": constant_manifest([[]], {}),
        },
        {},
    )  # fmt: skip
    yield made
    with suppress(OSError):
        os.kill(made._connection.process.pid, signal.SIGKILL)


def connect(port: int) -> tuple[socket.socket, SocketChannel]:
    connection = socket.create_connection((HOST, port), SECONDS)
    return connection, SocketChannel(connection)


def frames_of(channel: SocketChannel, count: int) -> list[bytes]:
    """The frames of so many questions, which are not sent."""
    near, far = socket.socketpair()
    own, channel._socket = channel._socket, near
    frames = []
    for _ in range(count):
        channel.send(STEPS)
        frames.append(far.recv(2**16))
    channel._socket = own
    near.close()
    far.close()
    return frames


def flipped(frame: bytes, place: int) -> bytes:
    place %= len(frame)
    return frame[:place] + bytes([frame[place] ^ 1]) + frame[place + 1 :]


ATTACKS: dict[str, tuple[int, Callable[[list[bytes]], list[bytes]]]] = {
    "nothing": (2, lambda f: f),
    "a flipped byte of a message": (0, lambda f: [flipped(f[0], 12), f[1]]),
    "a flipped byte of a code": (0, lambda f: [flipped(f[0], -1), f[1]]),
    "a replayed frame": (1, lambda f: [f[0], f[0]]),
    "a reordered frame": (0, lambda f: f[::-1]),
    "an injected frame": (1, lambda f: [f[0], pack_header(FrameKind.MESSAGE, 2) + b"{}" + bytes(32)]),
    "a huge length": (1, lambda f: [f[0], pack_header(FrameKind.MESSAGE, 2**32 - 1)]),
}


def test_no_attack_on_an_authenticated_connection_is_answered(client: SnapshotClient) -> None:
    port = client.port(HOST)
    for name, (count, attack) in ATTACKS.items():
        connection, channel = connect(port)
        channel.connect(PROTOCOL, TOKEN.encode())
        answers = 0
        for frame in attack(frames_of(channel, 2)):
            with suppress(OSError):
                connection.sendall(frame)
                channel.receive()
                answers += 1
        assert answers == count, name
        channel.close()
    client.check()


def test_with_tls_none_but_a_peer_with_the_secret_is_answered(client: SnapshotClient) -> None:
    plain = client.port(HOST)
    port = client.port(HOST, encrypts=True)
    assert port != plain
    _, channel = connect(port)
    channel.connect(PROTOCOL, TOKEN.encode(), encrypts=True)
    channel.send(STEPS)
    assert channel.receive()[0] == {"steps": []}
    channel.close()
    for secret, encrypts in ((TOKEN, False), (secrets.token_hex(16), True)):
        _, channel = connect(port)
        with pytest.raises(Closed):
            channel.connect(PROTOCOL, secret.encode(), encrypts=encrypts)
    client.check()


def test_strangers_get_no_answer(client: SnapshotClient) -> None:
    port = client.port(HOST)
    connection, channel = connect(port)
    with pytest.raises(Closed, match="does not know the secret"):
        channel.connect(PROTOCOL, secrets.token_hex(16).encode())
    for data in (
        pack_header(FrameKind.ANSWER, 2**32 - 1) + bytes(100),
        pack_header(FrameKind.MESSAGE, 40) + bytes(72),
        b"",  # says nothing
    ):
        connection, _ = connect(port)
        assert connection.recv(40)
        connection.sendall(data)
        with suppress(ConnectionError):
            assert connection.recv(100) == b""
        connection.close()
    client.check()


def test_it_listens_on_the_address_of_its_node_alone(client: SnapshotClient) -> None:
    port = client.port(HOST)
    connect(port)[1].close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), SECONDS)
    assert client.port(HOST) == port
    other = client.port("127.0.0.3")
    socket.create_connection(("127.0.0.3", other), SECONDS).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, port), SECONDS)


def test_a_man_in_the_middle_learns_nothing_that_is_worth_anything_later(client: SnapshotClient) -> None:
    """He passes on a handshake as it is, and then asks by himself."""
    port = client.port(HOST)
    with socket.create_server(("127.0.0.1", 0)) as server:
        found: list[bytes] = []

        def be_in_the_middle() -> None:
            near, _ = server.accept()
            far = socket.create_connection((HOST, port), SECONDS)
            near.sendall(far.recv(40))
            far.sendall(near.recv(100))
            near.sendall(far.recv(40))
            far.sendall(pack_header(FrameKind.MESSAGE, 2) + b"{}" + bytes(32))
            with suppress(ConnectionError):
                found.append(far.recv(100))
            near.close()

        thread = threading.Thread(target=be_in_the_middle)
        thread.start()
        SocketChannel(socket.create_connection(server.getsockname(), SECONDS)).connect(
            PROTOCOL, TOKEN.encode()
        )
        thread.join(SECONDS)
        assert found in ([], [b""])
    client.check()
