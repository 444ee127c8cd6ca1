"""If these fail, a stranger's bytes can end a driver or an executor, or be taken for a message."""

import asyncio
import json
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myriad.supervise.authenticated_link import MAX_UNREAD_BYTES, AuthenticatedLink
from myriad.supervise.messages import OBSERVED, ORDERS, Beat, End, NodeJoined, NodeTaken, Start, Stop
from myriad.supervise.observations import DeviceTrouble, LinkStatus, RankExited, RankStatus
from myriad.wire.framing import Refused
from myriad.wire.message_codec import encode, read_message, write_message
from myriad.wire.run_secret import run_secret

SEEN = RankStatus(1, 77, "S", "step", "reduce", 4, 9, 8, 0.25, 0.5)
ENDED = RankExited(0, 3, 1, -9, "killed", 12, "a\nb", "/x.log")
MESSAGES = (
    Beat(0, 3, 4000, (SEEN, SEEN)),
    Beat(
        0, 3, 4000, (), (LinkStatus("eth1", True, 3, 0),), (DeviceTrouble(1, 5, 3, "user", "Xid 31"),), 1.7e9
    ),
    ENDED,
    NodeJoined(1, 3, "::1", 9, 2, 10**12, (1, 2), (ENDED,), False, "rack2:77"),
    NodeTaken("rack2:77"),
    Stop(),
    Start(3, 8, (4, 5), "127.0.0.1", 29500),
    End(3),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message: Any) -> None:
    assert read_message(write_message(message), (*OBSERVED, *ORDERS)) == message


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        read_message(data, OBSERVED)


@given(st.sampled_from(MESSAGES), st.data())
def test_a_message_with_anything_in_a_field_is_refused_or_whole(message: Any, data: st.DataObject) -> None:
    record = encode(message)
    key = data.draw(st.sampled_from(sorted(record)))
    record[key] = data.draw(JSON)
    try:
        found = read_message(json.dumps(record).encode(), (*OBSERVED, *ORDERS))
    except ValueError:
        return
    assert encode(found)["kind"] == record["kind"]


@pytest.mark.parametrize(
    "data",
    [b"[]", b"{]}", b"[" * 10**5, b'{"kind": "Other"}', b'{"kind": 7}', b"\xff", b'{"kind": "End", "a": 1}'],
    ids=["no object", "no JSON", "deep", "kind", "no kind", "no text", "a missing field"],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        read_message(data, (*OBSERVED, *ORDERS))


def test_the_secret_is_made_once_and_for_its_user_alone(tmp_path: Path) -> None:
    secret = run_secret(tmp_path / "secret")
    assert len(secret) == 64 and run_secret(tmp_path / "secret") == secret
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_both_ends_must_know_the_secret() -> None:
    async def meet(ours: bytes, theirs: bytes) -> list[object]:
        met: asyncio.Queue[object] = asyncio.Queue()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            link = AuthenticatedLink(reader, writer)
            try:
                await link.accept(ours)
                met.put_nowait(await link.receive(OBSERVED))
            except (Refused, OSError) as error:
                met.put_nowait(error)
            link.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            link = AuthenticatedLink(*await asyncio.open_connection(*server.sockets[0].getsockname()[:2]))
            found: list[object] = []
            try:
                await link.connect(theirs)
                link.send(MESSAGES[0])
            except (Refused, OSError) as error:
                found.append(error)
            found.append(await met.get())
            link.close()
        return found

    assert asyncio.run(meet(b"one", b"one")) == [MESSAGES[0]]
    assert [type(error) for error in asyncio.run(meet(b"one", b"two"))] == [Refused, Refused]


def test_a_connection_whose_other_end_reads_nothing_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    async def fill() -> int:
        held: list[asyncio.StreamWriter] = []

        async def read_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            held.append(writer)
            await AuthenticatedLink(reader, writer).accept(b"secret")
            writer.transport.pause_reading()  # type: ignore[attr-defined]

        server = await asyncio.start_server(read_nothing, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
            link, sent = AuthenticatedLink(reader, writer), 0
            await link.connect(b"secret")
            big = RankExited(0, 3, 1, 1, "user", 12, "x" * 2**20, "/x.log")
            while not writer.is_closing():
                link.send(big)
                sent += 2**20
                await asyncio.sleep(0)
                assert sent < 8 * MAX_UNREAD_BYTES, "all of it is kept"
            link.send(big)  # does nothing more
            with pytest.raises(OSError):
                await link.receive(OBSERVED)
            link.close()
            for one in held:
                one.close()
        return sent

    assert asyncio.run(fill()) > MAX_UNREAD_BYTES
    assert "reads nothing" in caplog.text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, "1", None, True, [1.0]])
def test_a_time_that_is_no_number_is_refused(value: Any) -> None:
    record = encode(MESSAGES[0])
    record["ranks"][0]["idle_seconds"] = value
    with pytest.raises(ValueError, match=r"float|out of range"):
        read_message(json.dumps(record).encode(), OBSERVED)


def test_a_secret_that_a_full_disk_cut_short_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"")
    secret = run_secret(path)
    assert len(secret) == 64 and run_secret(path) == secret
    assert path.stat().st_mode & 0o077 == 0
