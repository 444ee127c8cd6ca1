"""If these fail, a host on the way between two nodes can give orders to a run. The driver is a real process;
the attacker has the connection of an agent that authenticated, as a host on its path has."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from myriad.run import Run
from myriad.supervise.authenticated_link import AuthenticatedLink
from myriad.supervise.driver.journal import Journal
from myriad.supervise.driver_address import read_address
from myriad.supervise.messages import ORDERS, ClockAnswer, ClockAsked, NodeJoined, Start
from myriad.supervise.policy.run_state import RunPlan
from myriad.wire.framing import FrameKind, Refused, pack_header
from myriad.wire.message_codec import write_message
from myriad.wire.run_secret import run_secret

SECONDS = 60.0
"""Of patience with this machine."""
JOINED = NodeJoined(0, 0, "127.0.0.1", 1, 1, 1, (), (), False)


class Captured:
    """An agent's connection, whose frames are handed to the attacker instead of the network."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.link, self.reader, self.writer = AuthenticatedLink(reader, writer), reader, writer
        self.put = writer.write

    def frames_of(self, *messages: object) -> list[bytes]:
        """The frames that the agent would send."""
        frames: list[bytes] = []
        self.writer.write = frames.append  # type: ignore[method-assign]
        for message in messages:
            self.link.send(message)
        self.writer.write = self.put  # type: ignore[method-assign]
        return frames


def flipped(frame: bytes, place: int) -> bytes:
    return frame[:place] + bytes([frame[place] ^ 1]) + frame[place + 1 :]


def injected(message: object) -> bytes:
    text = write_message(message)
    return pack_header(FrameKind.MESSAGE, len(text)) + text + bytes(32)


ANSWERS = (*ORDERS, ClockAnswer)
CLOCK = ClockAsked(0, 7)
ATTACKS: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "a flipped byte of a body": lambda frames: [flipped(frames[0], 20), frames[1]],
    "a flipped byte of a code": lambda frames: [flipped(frames[0], -1), frames[1]],
    "a replayed frame": lambda frames: [frames[0], frames[0], frames[1]],
    "a reordered frame": lambda frames: [frames[1], frames[0]],
    "a dropped frame": lambda frames: [frames[1]],
    "an injected frame": lambda frames: [injected(CLOCK), *frames],
    "a huge length": lambda frames: [pack_header(FrameKind.MESSAGE, 2**32 - 1), *frames],
}


@pytest.fixture(params=[(), ("--encrypt",)], ids=["plain", "TLS"])
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Run, subprocess.Popen[bytes]]]:
    Journal(tmp_path / "journal.jsonl").begin(RunPlan(1, 1, first_epoch=1, restarts=1000))
    command = [sys.executable, "-m", "myriad.supervise.driver.driver", str(tmp_path), *request.param]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        deadline = time.monotonic() + SECONDS
        while not (tmp_path / "driver.json").exists():
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.02)
        yield Run(tmp_path), process
        process.kill()


async def _connect(run: Run, secret: bytes | None = None) -> Captured:
    address = read_address(run.path)
    captured = Captured(*await asyncio.open_connection(address["host"], address["port"]))
    secret = run_secret(run.path / "secret") if secret is None else secret
    await captured.link.connect(secret, encrypts=address.get("encrypt") is True)
    captured.put = captured.writer.write
    return captured


async def _is_served(run: Run) -> bool:
    """Whether an honest agent of the node gets its order and an answer."""
    captured = await _connect(run)
    captured.link.send(JOINED)
    captured.link.send(CLOCK)
    heard: set[type] = set()
    while not heard >= {Start, ClockAnswer}:
        heard.add(type(await captured.link.receive(ANSWERS)))
    captured.link.close()
    return True


def test_no_attack_on_an_authenticated_connection_reaches_the_driver(
    driver: tuple[Run, subprocess.Popen[bytes]],
) -> None:
    run, process = driver

    async def attack(change: Callable[[list[bytes]], list[bytes]]) -> list[type]:
        """What the driver answers to two questions about its clock that were changed on the way."""
        captured, heard = await _connect(run), []
        captured.link.send(JOINED)
        for frame in change(captured.frames_of(CLOCK, CLOCK)):
            captured.put(frame)
        with suppress(OSError):
            while True:
                heard.append(type(await captured.link.receive(ANSWERS)))
        captured.link.close()
        return heard

    async def drive() -> None:
        async with asyncio.timeout(SECONDS):
            for name, change in ATTACKS.items():
                heard = await attack(change)
                assert heard.count(ClockAnswer) <= (name == "a replayed frame"), (name, heard)

    asyncio.run(drive())
    assert process.poll() is None
    assert "has not sent so" in (run.path / "log").read_text()


def test_strangers_are_refused_and_the_run_continues(driver: tuple[Run, subprocess.Popen[bytes]]) -> None:
    run, process = driver

    async def answer_to(data: bytes) -> bytes:
        """What a stranger hears after the challenge."""
        address = read_address(run.path)
        reader, writer = await asyncio.open_connection(address["host"], address["port"])
        await reader.readexactly(40)
        writer.write(data)
        with suppress(ConnectionError):
            return await reader.read()
        return b""

    async def drive() -> None:
        async with asyncio.timeout(SECONDS):
            for huge in (2**32 - 1, 65):
                assert await answer_to(pack_header(FrameKind.ANSWER, huge) + bytes(63)) == b"", huge
            assert await answer_to(injected(CLOCK)) == b""
            with pytest.raises(Refused, match="does not know the secret"):
                await _connect(run, b"0123456789abcdef" * 4)
            began = time.monotonic()
            assert await answer_to(b"") == b""
            assert time.monotonic() - began > 4
            assert await _is_served(run)

    asyncio.run(drive())
    assert process.poll() is None
