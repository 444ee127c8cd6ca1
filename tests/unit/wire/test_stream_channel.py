"""If these fail, a stranger's bytes end a driver, keep it waiting or make it store them."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

import myriad.wire.stream_channel as stream_channel
from myriad.wire.framing import FrameKind, Refused, pack_header
from myriad.wire.stream_channel import StreamChannel

SECRET = b"a secret of many letters"


def channel_of(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> StreamChannel:
    return StreamChannel(reader, writer, most_bytes=2**12, most_unread_bytes=2**20)


def served(
    peer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> list[bytes | Exception]:
    """What a listener hears from one peer: messages, and the error that ends the connection."""

    async def serve_one() -> list[bytes | Exception]:
        heard: list[bytes | Exception] = []
        over = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            channel = channel_of(reader, writer)
            try:
                await channel.accept("driver", [SECRET])
                while True:
                    heard.append(await channel.receive())
            except (Refused, OSError) as error:
                heard.append(error)
            channel.close()
            over.set()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
            with suppress(Refused, OSError):
                await peer(reader, writer)
            await asyncio.wait_for(over.wait(), 30)
            writer.close()
        return heard

    return asyncio.run(serve_one())


def test_messages_arrive() -> None:
    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = channel_of(reader, writer)
        await channel.connect("driver", SECRET)
        channel.send(b"one")
        channel.send(b"x" * 2**12)
        channel.close()

    one, two, end = served(peer)
    assert (one, two) == (b"one", b"x" * 2**12) and isinstance(end, ConnectionError)


def test_a_peer_with_another_secret_is_refused_and_learns_it() -> None:
    learned: list[Exception] = []

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await channel_of(reader, writer).connect("driver", SECRET[1:])
        except Refused as error:
            learned.append(error)

    (end,) = served(peer)
    assert isinstance(end, Refused) and "does not know the secret" in str(learned[0])


@pytest.mark.parametrize(
    "data",
    [
        pack_header(FrameKind.ANSWER, 65),
        pack_header(FrameKind.ANSWER, 2**32 - 1) + bytes(100),
        pack_header(FrameKind.MESSAGE, 2) + b"{}",
        pack_header(FrameKind.ANSWER, 64) + bytes(64),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["one byte more", "huge", "a message", "zeros", "another protocol"],
)
def test_a_stranger_is_refused(data: bytes) -> None:
    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await reader.read()

    (end,) = served(peer)
    assert isinstance(end, Refused)


@pytest.mark.parametrize("data", [b"", b"MY", pack_header(FrameKind.ANSWER, 64) + bytes(63)])
def test_a_peer_that_sends_too_little_is_disconnected_after_a_timeout(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_channel, "AUTHENTICATION_SECONDS", 0.2)

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await reader.read()

    (end,) = served(peer)
    assert isinstance(end, TimeoutError)


def test_a_silent_listener_is_disconnected_after_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_channel, "AUTHENTICATION_SECONDS", 0.2)

    async def connect() -> None:
        async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:
            channel = channel_of(*await asyncio.open_connection(*server.sockets[0].getsockname()[:2]))
            with pytest.raises(TimeoutError):
                await channel.connect("driver", SECRET)
            channel.close()

    asyncio.run(connect())


def test_what_is_injected_into_an_authenticated_connection_ends_it() -> None:
    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = channel_of(reader, writer)
        await channel.connect("driver", SECRET)
        channel.send(b"one")
        writer.write(pack_header(FrameKind.MESSAGE, 3) + b"two" + bytes(32))
        channel.send(b"three")
        await reader.read()

    one, end = served(peer)
    assert one == b"one" and isinstance(end, Refused)
