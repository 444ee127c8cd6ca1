"""If these fail, anyone who reaches a listener keeps nodes out, or has it hold connections for ever."""

import asyncio
import logging

import pytest

from myriad.resilience.admission import Admission

LIMIT, PATIENCE = 8, 60.0


class Door:
    """A listener that authenticates whoever sends a byte."""

    def __init__(self, seconds: float = PATIENCE) -> None:
        self.admission = Admission(LIMIT, seconds)
        self.authenticated = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with self.admission.authenticating(writer):
                await reader.readexactly(1)
            self.authenticated += 1
            writer.write(b"!")
            await reader.read()
        except (OSError, EOFError, TimeoutError):
            pass
        finally:
            writer.close()


async def open_door(door: Door) -> tuple[asyncio.Server, tuple[str, int]]:
    server = await asyncio.start_server(door.serve, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[:2]


def test_a_flood_of_idle_connections_is_bounded_and_nodes_still_get_in(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def flood() -> None:
        door = Door()
        server, address = await open_door(door)
        idle, nodes = [], []
        async with server, asyncio.timeout(PATIENCE):
            for _ in range(10 * LIMIT):
                idle.append(await asyncio.open_connection(*address))
                if len(idle) % LIMIT == 0:
                    reader, writer = await asyncio.open_connection(*address)
                    writer.write(b"?")
                    assert await reader.readexactly(1) == b"!"
                    nodes.append(writer)
                assert door.admission.num_waiting <= LIMIT
            for reader, _ in idle[:-LIMIT]:  # closed by the listener
                with pytest.raises((EOFError, OSError)):
                    await reader.readexactly(1)
            assert door.authenticated == 10
            for writer in [*nodes, *(writer for _, writer in idle)]:
                writer.close()
            while door.admission.num_waiting:
                await asyncio.sleep(0.001)

    with caplog.at_level(logging.WARNING):
        asyncio.run(flood())
    assert caplog.text.count("unauthenticated") == 1, "a flood must not fill the log"


def test_an_idle_connection_is_closed_at_its_deadline() -> None:
    async def wait() -> None:
        server, address = await open_door(door := Door(seconds=0.05))
        async with server, asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection(*address)
            assert await reader.read() == b""
            writer.close()
        assert door.authenticated == door.admission.num_waiting == 0

    asyncio.run(wait())


def test_an_address_with_few_connections_is_not_the_one_that_is_closed() -> None:
    async def crowd() -> None:
        server, (host, port) = await open_door(door := Door())
        async with server, asyncio.timeout(PATIENCE):
            first = await asyncio.open_connection(host, port, local_addr=("127.0.0.2", 0))
            while not door.admission.num_waiting:
                await asyncio.sleep(0.001)
            crowd = [await asyncio.open_connection(host, port) for _ in range(3 * LIMIT)]
            first[1].write(b"?")
            assert await first[0].readexactly(1) == b"!"
            for _, writer in [first, *crowd]:
                writer.close()

    asyncio.run(crowd())
