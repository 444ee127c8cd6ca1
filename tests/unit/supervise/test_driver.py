"""If these fail, a disk that hangs or a peer that misbehaves takes the driver, and with it the run's watch,
away. The driver is the real one, in this process; executors are connections without ranks."""

import asyncio
import json
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import myriad.supervise.driver.driver as driver_module
import myriad.wire.stream_channel as wire_module
from myriad.run import Run
from myriad.supervise.authenticated_link import MAX_BYTES, AuthenticatedLink
from myriad.supervise.background import AsyncWriter
from myriad.supervise.clock_exchange import ClockComparison
from myriad.supervise.driver.driver import Driver
from myriad.supervise.driver.journal import Journal
from myriad.supervise.driver.leadership import SoleLeadership
from myriad.supervise.driver_address import read_address
from myriad.supervise.messages import ORDERS, Beat, ClockAnswer, End, NodeJoined, Start, StopAsked
from myriad.supervise.observations import DeviceTrouble, LinkStatus, RankExited, RankStatus
from myriad.supervise.policy.run_state import RunPlan
from myriad.wire.frame_codes import MESSAGE_CODE_BYTES
from myriad.wire.framing import FrameKind, pack_header
from myriad.wire.message_codec import encode, write_message
from myriad.wire.pending_connections import PendingConnections
from myriad.wire.run_secret import run_secret

SECONDS = 60.0
"""Of patience with this machine; nothing here takes one."""


class Executor:
    """A connection of a node with one rank."""

    def __init__(self, run: Run, node: int) -> None:
        self.run, self.node = run, node

    async def connect(self, address: tuple[str, int]) -> "Executor":
        self.reader, self.writer = await asyncio.open_connection(*address)
        self.link = AuthenticatedLink(self.reader, self.writer)
        await self.link.connect(run_secret(self.run.path / "secret"))
        return self

    def join(self, epoch: int = 0, running: tuple[int, ...] = ()) -> None:
        self.link.send(NodeJoined(self.node, epoch, "127.0.0.1", 1, 1, 1, running, (), False))

    async def order(self, kind: type) -> Any:
        """The next of this kind."""
        while True:
            order = await self.link.receive(ORDERS)
            if isinstance(order, kind):
                return order


@asynccontextmanager
async def driving(folder: Path, nodes: int) -> AsyncIterator[tuple[Run, tuple[str, int]]]:
    run = Run(folder)
    Journal(folder / "journal.jsonl").begin(RunPlan(nodes, nodes, first_epoch=1))
    disk_writer = AsyncWriter()
    driver = Driver(run, disk_writer, to_launcher=lambda message: None)
    server: list[tuple[str, int]] = []
    start = asyncio.start_server

    async def note_address(*arguments: Any, **options: Any) -> asyncio.Server:
        made = await start(*arguments, **options)
        server.append(made.sockets[0].getsockname()[:2])
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "start_server", note_address)
        task = asyncio.create_task(driver.drive())
        while not server:
            await asyncio.sleep(0.001)
        try:
            async with asyncio.timeout(SECONDS):
                yield run, server[0]
        finally:
            assert not task.done(), "the driver is gone"
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            disk_writer.wait_written()


def test_a_disk_that_hangs_does_not_keep_the_driver_from_repairing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on = threading.Event()

    async def drive() -> None:
        async with driving(tmp_path, nodes=1) as (run, address):
            executor = await Executor(run, 0).connect(address)
            monkeypatch.setattr(os, "fsync", lambda handle: goes_on.wait(SECONDS))
            executor.join()
            assert (await executor.order(Start)).epoch == 1
            for epoch in (1, 2):
                executor.link.send(RankExited(0, epoch, 0, -9, "killed", epoch, "", "a.log"))
                assert (await executor.order(End)).epoch == epoch
                assert (await executor.order(Start)).epoch == epoch + 1
            assert "not in the journal yet" in caplog.text
            goes_on.set()
            _, state = Journal(tmp_path / "journal.jsonl").replay()
            while state is None or state.epoch < 3:  # in the end all of it is written
                await asyncio.sleep(0.01)
                _, state = Journal(tmp_path / "journal.jsonl").replay()
            while len(run.read_events()) < 4:
                await asyncio.sleep(0.01)
            assert [event["event"] for event in run.read_events()] == 2 * ["fault", "restart"]

    asyncio.run(drive())


def test_the_driver_answers_clock_requests_without_a_decision(tmp_path: Path) -> None:
    async def drive() -> None:
        async with driving(tmp_path, nodes=1) as (_, address):
            executor = await Executor(Run(tmp_path), 0).connect(address)
            executor.join()
            clocks, before = ClockComparison(0), time.time_ns()
            executor.link.send(clocks.ask())
            told = await executor.order(ClockAnswer)
            assert before <= told.asked_ns <= told.heard_ns <= told.answered_ns <= time.time_ns()
            clocks.receive(told)
            assert clocks.offset.at(time.time_ns()) == (0, 0.0), "it is this machine"

    asyncio.run(drive())


def test_an_error_text_that_is_not_valid_utf8_is_still_reported(tmp_path: Path) -> None:
    async def drive() -> None:
        async with driving(tmp_path, nodes=1) as (run, address):
            executor = await Executor(run, 0).connect(address)
            executor.join()
            await executor.order(Start)
            executor.link.send(RankExited(0, 1, 0, 1, "crash", 4, "half of \ud800", "a.log"))
            assert (await executor.order(End)).epoch == 1
            (fault,) = [event for event in run.read_events() if event["event"] == "fault"]
            assert "half of ?" in fault["problem"]
            executor.link.close()

    asyncio.run(drive())


def test_nodes_join_while_idle_and_torn_connections_flood_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 60
    monkeypatch.setattr(driver_module, "PendingConnections", partial(PendingConnections, most, most))

    async def drive() -> None:
        async with driving(tmp_path, nodes=1) as (run, address):
            held = []
            for number in range(3 * most):
                reader, writer = await asyncio.open_connection(*address)
                writer.write([b"", b"MY\0", b"MY\0\1\0\0\4\0{", b"MY\0\1\0\7\0\0{"][number % 4])
                held.append((reader, writer))
            executor = await Executor(run, 0).connect(address)
            executor.join()
            assert (await executor.order(Start)).epoch == 1
            for reader, _ in held[:most]:  # the oldest made room; the driver's greeting may come first
                with suppress(ConnectionError):
                    while await reader.read(4096):
                        pass
            executor.link.send(RankExited(0, 1, 0, -9, "killed", 4, "", "a.log"))
            assert (await executor.order(End)).epoch == 1, "a node that is in stays in"
            for _, writer in held:
                writer.close()

    asyncio.run(drive())


def test_a_connection_that_proves_nothing_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_module, "AUTHENTICATION_SECONDS", 0.2)

    async def drive() -> None:
        async with driving(tmp_path, nodes=1) as (_, address):
            for torn in (b"", pack_header(FrameKind.ANSWER, 64) + b"{"):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(torn)
                with suppress(ConnectionError):
                    while await reader.read(4096):
                        pass
                writer.close()

    asyncio.run(drive())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
SEEN = RankStatus(1, 77, "S", "step", "reduce", 4, 9, 8, 0.25, 0.5)
VALID = (
    Beat(1, 1, 4000, (SEEN,)),
    Beat(
        0,
        1,
        4000,
        (),
        (LinkStatus("eth1", False, -3, 9),),
        (DeviceTrouble(7, 99, 1, "hardware", "Xid"),),
        1e300,
    ),
    RankExited(1, 1, 1, 1, "user", 12, "a\nb \ud800", "/x.log"),
    RankExited(1, 1, 99, 0, "done", 12, "", "/x.log"),
    RankExited(0, 1, 0, 1, "user", 12, "", "/x.log"),
    NodeJoined(1, 1, "::1", 9, 2, 10**12, (1, 2), (), False),
    NodeJoined(-1, -7, "", -9, -2, -1, (5,), (RankExited(5, 5, 5, 5, "done", 5, "", ""),), False),
    StopAsked(0),
)


@st.composite
def twisted(draw: st.DrawFn) -> bytes:
    """A message of which one field, at any depth, is anything."""
    record = encode(draw(st.sampled_from(VALID)))
    within = record
    if record.get("ranks") and draw(st.booleans()):
        within = record["ranks"][0]
    within[draw(st.sampled_from(sorted(within)))] = draw(JSON)
    return json.dumps(record).encode()


TEXTS = twisted() | st.sampled_from(VALID).map(write_message) | st.binary(max_size=300)
"""Of messages, from a node that has the secret."""
RAW = st.one_of(
    st.binary(max_size=300),
    TEXTS.map(lambda text: pack_header(FrameKind.MESSAGE, len(text)) + text),
    TEXTS.map(lambda text: pack_header(FrameKind.MESSAGE, len(text)) + text + bytes(MESSAGE_CODE_BYTES)),
    st.sampled_from(FrameKind).map(lambda kind: pack_header(kind, MAX_BYTES + 1) + b" " * 1000),
)
"""From a host on the way."""


@settings(max_examples=25, deadline=None)
@given(st.booleans(), st.lists(TEXTS, max_size=4), st.lists(RAW, max_size=4))
def test_whatever_one_connection_sends_the_driver_serves_the_others(
    knows_the_secret: bool, texts: list[bytes], raw: list[bytes]
) -> None:
    async def drive(folder: Path) -> None:
        async with driving(folder, nodes=1) as (run, address):
            good = await Executor(run, 0).connect(address)
            good.join()
            assert (await good.order(Start)).epoch == 1
            bad = Executor(run, 1)
            if knows_the_secret:
                await bad.connect(address)
                bad.join()
                for text in texts:
                    bad.link.channel.send(text)
            else:
                bad.reader, bad.writer = await asyncio.open_connection(*address)
            with suppress(OSError):
                for piece in raw:
                    bad.writer.write(piece)
                    await bad.writer.drain()
                bad.writer.write_eof()
                while await bad.reader.read(2**16):  # until the driver, too, is done with it
                    pass
            bad.writer.close()
            good.link.send(Beat(0, 1, 1, (RankStatus(0, 7, "S", "step", "", 1, 0, 0, 0.0, 0.5),)))
            good.link.send(RankExited(0, 1, 0, -9, "killed", 1, "", "a.log"))
            assert (await good.order(End)).epoch == 1
            good.link.close()
            await asyncio.sleep(0)

    with TemporaryDirectory() as folder:
        asyncio.run(drive(Path(folder)))


class Tenure(SoleLeadership):
    """Of a driver that may act until it may not."""

    term = 3
    is_mine = True

    def allows(self, record: dict[str, Any]) -> bool:
        return self.is_mine

    def holds(self) -> bool:
        return True  # it does not know yet


def test_a_driver_that_has_lost_its_lease_has_nothing_done_any_more_and_ends(tmp_path: Path) -> None:
    """What it would have done another decides."""

    async def drive() -> None:
        journal = Journal(tmp_path / "journal.jsonl")
        journal.begin(RunPlan(1, 1, first_epoch=1))
        run, leadership = Run(tmp_path), Tenure(journal)
        driver = Driver(run, AsyncWriter(), leadership, to_launcher=lambda message: None)
        task = asyncio.create_task(driver.drive())
        while not (tmp_path / "driver.json").exists():
            await asyncio.sleep(0.001)
        told = read_address(tmp_path)
        executor = await Executor(run, 0).connect((told["host"], told["port"]))
        executor.join()
        await executor.order(Start)
        leadership.is_mine = False
        written, events = len(journal.records()), run.read_events()
        executor.link.send(RankExited(0, 1, 0, -9, "killed", 1, "", "a.log"))
        with pytest.raises(OSError):
            await executor.order(End)
        await asyncio.wait_for(task, SECONDS)
        assert told["term"] == 3 and driver.is_lost
        assert len(journal.records()) == written and run.read_events() == events

    asyncio.run(drive())
