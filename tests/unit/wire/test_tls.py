"""If these fail, a host between two nodes can read weights, or take the place of a node in spite of TLS."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from myriad.wire.framing import Refused
from myriad.wire.socket_channel import Closed, SocketChannel
from myriad.wire.stream_channel import StreamChannel
from myriad.wire.tls import connector_context, tls_identity

SECRET = b"a secret of many letters"
WEIGHTS = b"these are the weights of the model" * 60_000
"""Two pieces."""


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connector = socket.create_connection(server.getsockname(), 30)
        listener, _ = server.accept()
        listener.settimeout(30)
        yield connector, listener
        connector.close()
        listener.close()


def in_thread(act: Any, errors: list[OSError]) -> threading.Thread:
    def run() -> None:
        try:
            act()
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_weights_arrive_and_do_not_cross_the_network_as_they_are() -> None:
    seen, errors = bytearray(), []
    with connected() as (connector, near), connected() as (far, listener):

        def listen_in(source: socket.socket, target: socket.socket) -> None:
            while data := source.recv(2**16):
                seen.extend(data)
                target.sendall(data)

        sender, receiver = SocketChannel(connector), SocketChannel(listener)

        def send() -> None:
            sender.connect("snapshots", SECRET, encrypts=True)
            sender.send({"op": "copy of"}, WEIGHTS)
            assert sender.receive()[0] == {"op": "done"}

        threads = [
            in_thread(lambda: listen_in(near, far), errors),
            in_thread(lambda: listen_in(far, near), errors),
            in_thread(send, errors),
        ]
        receiver.accept("snapshots", [SECRET], tls=tls_identity())
        message, payload, _ = receiver.receive()
        receiver.send({"op": "done"})
        threads[2].join(30)
        assert message == {"op": "copy of"} and bytes(payload) == WEIGHTS and not errors
        assert len(seen) > len(WEIGHTS) and WEIGHTS[:34] not in seen and b"copy of" not in seen
        receiver.close()
        sender.close()


def test_a_man_in_the_middle_with_a_certificate_of_his_own_is_refused_by_both_ends() -> None:
    """He passes on every byte inside, so both ends prove the same secret with the same nonces."""
    tls_identity.cache_clear()
    his = tls_identity()
    tls_identity.cache_clear()
    errors: list[OSError] = []
    with connected() as (connector, near), connected() as (far, listener):

        def be_in_the_middle() -> None:
            near.sendall(far.recv(40))
            to_connector = his.context.wrap_socket(near, server_side=True)
            to_listener = connector_context().wrap_socket(far)
            to_listener.sendall(to_connector.recv(100))
            to_connector.sendall(to_listener.recv(100))
            to_connector.close()
            to_listener.close()

        middle = in_thread(be_in_the_middle, errors)
        refused: list[OSError] = []
        end = in_thread(lambda: SocketChannel(connector).connect("snapshots", SECRET, encrypts=True), refused)
        with pytest.raises(Closed, match="does not know the secret"):
            SocketChannel(listener).accept("snapshots", [SECRET], tls=tls_identity())
        end.join(30)
        middle.join(30)
        assert [str(error) for error in refused] == ["the peer does not know the secret"]


@pytest.mark.parametrize("listener_encrypts", [True, False])
def test_an_end_without_tls_is_refused(listener_encrypts: bool) -> None:
    """Whoever strips TLS from a connection gets nothing."""
    errors: list[OSError] = []
    with connected() as (connector, listener):
        end = in_thread(
            lambda: SocketChannel(connector).connect(
                "snapshots", SECRET, seconds=2, encrypts=not listener_encrypts
            ),
            errors,
        )
        tls = tls_identity() if listener_encrypts else None
        with pytest.raises(Closed):
            SocketChannel(listener).accept("snapshots", [SECRET], seconds=2, tls=tls)
        listener.close()
        end.join(30)
        assert len(errors) == 1


def test_streams_speak_tls_and_a_peer_without_it_is_refused() -> None:
    async def meet(encrypts: bool) -> list[object]:
        heard: list[object] = []
        over = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            channel = StreamChannel(reader, writer, most_bytes=2**20, most_unread_bytes=2**22)
            try:
                await channel.accept("driver", [SECRET], tls_identity())
                for _ in range(20):
                    heard.append(await channel.receive())
                    channel.send(b"yes")
            except (Refused, OSError) as error:
                heard.append(type(error))
            over.set()
            channel.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            streams = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
            channel = StreamChannel(*streams, most_bytes=2**20, most_unread_bytes=2**22)
            with suppress(Refused, OSError):
                await channel.connect("driver", SECRET, encrypts=encrypts)
                for number in range(20):
                    channel.send(bytes(number * 10_000))
                    assert await channel.receive() == b"yes"
            await asyncio.wait_for(over.wait(), 30)
            channel.close()
        return heard

    assert asyncio.run(meet(True)) == [bytes(number * 10_000) for number in range(20)]
    (error,) = asyncio.run(meet(False))
    assert isinstance(error, type) and issubclass(error, OSError)


def test_a_listener_without_tls_is_left_by_a_connector_that_wants_it() -> None:
    async def meet() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            channel = StreamChannel(reader, writer, most_bytes=2**20, most_unread_bytes=2**22)
            with suppress(Refused, OSError):
                await channel.accept("driver", [SECRET])
            channel.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            streams = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
            channel = StreamChannel(*streams, most_bytes=2**20, most_unread_bytes=2**22)
            with pytest.raises(OSError):
                await channel.connect("driver", SECRET, encrypts=True)
            channel.close()

    asyncio.run(meet())


def test_only_tls_1_3_is_spoken() -> None:
    old = connector_context.__wrapped__()
    old.minimum_version = ssl.TLSVersion.TLSv1_2
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with connected() as (connector, listener):
        errors: list[OSError] = []
        end = in_thread(lambda: connector.recv(40) and old.wrap_socket(connector), errors)
        with pytest.raises(Closed, match="UNSUPPORTED_PROTOCOL"):
            SocketChannel(listener).accept("snapshots", [SECRET], tls=tls_identity())
        end.join(30)
        assert errors
