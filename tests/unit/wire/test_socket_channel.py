"""If these fail, a host between two nodes can change, repeat or withhold weights unnoticed, or a stranger
keeps a snapshot server waiting or makes it store what it sends."""

import os
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

import myriad.wire.socket_channel as socket_channel
from myriad.wire.frame_codes import MESSAGE_CODE_BYTES, PAYLOAD_CODE_BYTES
from myriad.wire.framing import HEADER_BYTES, FrameKind, check_header, pack_header
from myriad.wire.socket_channel import Closed, SocketChannel

SECRET = b"a secret of many letters"
Frames = list[bytes]


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The sockets of the connector and of the listener."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as connector:
            listener, _ = server.accept()
            with listener:
                yield connector, listener


def in_thread(act: Callable[[], object]) -> threading.Thread:
    def quietly() -> None:
        with suppress(OSError):
            act()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    return thread


def frames_of(data: bytes) -> Frames:
    frames = []
    while data:
        kind, size = check_header(data[:HEADER_BYTES], tuple(FrameKind), 2**30)
        end = HEADER_BYTES + size
        end += PAYLOAD_CODE_BYTES if kind is FrameKind.PAYLOAD else MESSAGE_CODE_BYTES
        frames.append(data[:end])
        data = data[end:]
    return frames


def flipped(frame: bytes, place: int) -> bytes:
    place %= len(frame)
    return frame[:place] + bytes([frame[place] ^ 1]) + frame[place + 1 :]


CONTENT = os.urandom(2_500_000)
"""Three pieces."""


def sent_through(attack: Callable[[Frames], Frames]) -> list[tuple[dict, bytes]]:
    """What arrives of two messages with payloads, whose frames an attacker changes on the way."""
    arrived: list[tuple[dict, bytes]] = []
    with connected() as (connector, near), connected() as (far, listener):
        sender, receiver = SocketChannel(connector), SocketChannel(listener)

        def relay(source: socket.socket, target: socket.socket, count: int) -> None:
            while count:
                data = source.recv(count)
                target.sendall(data)
                count -= len(data)

        def attack_path() -> None:
            relay(far, near, HEADER_BYTES + 32)
            relay(near, far, HEADER_BYTES + 64)
            relay(far, near, HEADER_BYTES + 32)
            data = bytearray()
            while part := near.recv(2**20):
                data += part
            for frame in attack(frames_of(bytes(data))):
                far.sendall(frame)
            far.shutdown(socket.SHUT_WR)

        def send() -> None:
            sender.connect("snapshots", SECRET)
            for number in (1, 2):
                sender.send({"op": "copy", "number": number}, CONTENT)
            connector.shutdown(socket.SHUT_WR)

        threads = [in_thread(attack_path), in_thread(send)]
        receiver.accept("snapshots", [b"an older attempt's", SECRET])
        receiver.set_timeout(30)
        with suppress(Closed):
            while True:
                message, payload, _ = receiver.receive()
                arrived.append((message, bytes(payload)))
        receiver.close()
        near.close()
        for thread in threads:
            thread.join(30)
    return arrived


BOTH = [({"op": "copy", "number": number}, CONTENT) for number in (1, 2)]


def test_messages_and_payloads_arrive() -> None:
    assert sent_through(lambda frames: frames) == BOTH


ATTACKS: dict[str, tuple[int, Callable[[Frames], Frames]]] = {
    "a flipped byte of a message": (0, lambda f: [flipped(f[0], 30), *f[1:]]),
    "a flipped byte of a header": (0, lambda f: [f[0], flipped(f[1], 6), *f[2:]]),
    "a flipped byte of weights": (0, lambda f: [*f[:2], flipped(f[2], 1000), *f[3:]]),
    "a flipped byte of a code": (0, lambda f: [*f[:3], flipped(f[3], -1), *f[4:]]),
    "replayed weights": (0, lambda f: [*f[:2], f[1], *f[3:]]),
    "reordered weights": (0, lambda f: [f[0], f[2], f[1], *f[3:]]),
    "left out weights": (0, lambda f: [*f[:2], *f[3:]]),
    "weights of the message before": (1, lambda f: [*f[:5], *f[1:4], *f[8:]]),
    "a replayed message": (1, lambda f: [*f[:4], *f[:4]]),
    "reordered messages": (0, lambda f: [*f[4:], *f[:4]]),
    "an injected message": (1, lambda f: [*f[:4], pack_header(FrameKind.MESSAGE, 2) + b"{}" + bytes(32)]),
    "a cut message": (1, lambda f: [*f[:7]]),
    "a huge message": (1, lambda f: [*f[:4], pack_header(FrameKind.MESSAGE, 2**32 - 1), *f[4:]]),
    "a huge piece": (0, lambda f: [f[0], pack_header(FrameKind.PAYLOAD, 2**32 - 1), *f[1:]]),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_on_the_way_is_taken_for_what_was_sent(attack: str) -> None:
    count, change = ATTACKS[attack]
    assert sent_through(change) == BOTH[:count]


@pytest.mark.parametrize("data", [b"", b"MY\2", pack_header(FrameKind.ANSWER, 64) + bytes(63)])
def test_a_peer_that_sends_too_little_is_disconnected_after_a_timeout(data: bytes) -> None:
    with connected() as (connector, listener):
        connector.sendall(data)
        began = time.monotonic()
        with pytest.raises(Closed):
            SocketChannel(listener).accept("snapshots", [SECRET], seconds=0.3)
        assert time.monotonic() - began < 20


def test_a_peer_that_trickles_is_left_in_time() -> None:
    with connected() as (connector, listener):

        def trickle() -> None:
            for byte in pack_header(FrameKind.ANSWER, 64) + bytes(64):
                connector.sendall(bytes([byte]))
                time.sleep(0.1)

        in_thread(trickle)
        with pytest.raises(Closed):
            SocketChannel(listener).accept("snapshots", [SECRET], seconds=0.5)


@pytest.mark.parametrize(
    "data",
    [
        pack_header(FrameKind.ANSWER, 2**32 - 1) + bytes(100),
        pack_header(FrameKind.ANSWER, 63) + bytes(63),
        pack_header(FrameKind.MESSAGE, 20) + b'{"op": "store"}' + bytes(100),
        pack_header(FrameKind.ANSWER, 64) + bytes(64),
    ],
    ids=["huge", "short", "a message", "zeros"],
)
def test_a_stranger_is_refused_without_memory_for_it(data: bytes) -> None:
    with connected() as (connector, listener):
        connector.sendall(data)
        tracemalloc.start()
        with pytest.raises(Closed):
            SocketChannel(listener).accept("snapshots", [SECRET])
        assert tracemalloc.get_traced_memory()[1] < 2**20
        tracemalloc.stop()


def test_a_length_that_was_changed_on_the_way_allocates_nothing() -> None:
    with connected() as (connector, listener):
        sender, receiver = SocketChannel(connector), SocketChannel(listener)
        thread = in_thread(lambda: sender.connect("snapshots", SECRET))
        receiver.accept("snapshots", [SECRET])
        thread.join()
        connector.sendall(pack_header(FrameKind.MESSAGE_WITH_PAYLOAD, 2**28) + b"\xff" * 100)
        connector.shutdown(socket.SHUT_WR)
        tracemalloc.start()
        with pytest.raises(Closed):
            receiver.receive()
        assert tracemalloc.get_traced_memory()[1] < 2**21
        tracemalloc.stop()


def test_both_ends_learn_that_their_secrets_differ() -> None:
    with connected() as (connector, listener):
        learned: list[str] = []

        def connect() -> None:
            try:
                SocketChannel(connector).connect("snapshots", SECRET[1:])
            except Closed as error:
                learned.append(str(error))

        thread = threading.Thread(target=connect)
        thread.start()
        with pytest.raises(Closed, match="does not know the secret"):
            SocketChannel(listener).accept("snapshots", [SECRET, b"x"])
        thread.join()
        assert learned == ["the peer does not know the secret"]


def test_a_payload_that_is_larger_than_allowed_is_refused() -> None:
    one, other = (SocketChannel(end) for end in socket.socketpair())
    other.max_bytes = 100
    thread = in_thread(lambda: one.send({"op": "x"}, bytes(101)))
    with pytest.raises(Closed, match="101 bytes was refused"):
        other.receive()
    thread.join()
    one.close()
    other.close()


def test_a_message_whose_rest_never_comes_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_channel, "_PART_SECONDS", 0.2)
    with connected() as (connector, listener):
        connector.sendall(pack_header(FrameKind.MESSAGE, 20) + b"{")
        with pytest.raises(Closed):
            SocketChannel(listener).receive()
