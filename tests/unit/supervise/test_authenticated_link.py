"""If these fail, a stranger's bytes can end a driver or an executor, or be taken for a message."""

import asyncio
import json
import stat
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myriad.supervise.authenticated_link import (
    MAX_BYTES,
    MAX_UNREAD_BYTES,
    AuthenticatedLink,
    FrameReader,
    Refused,
    frame,
    run_secret,
)
from myriad.supervise.message_codec import decode, encode
from myriad.supervise.messages import OBSERVED, ORDERS, Beat, End, NodeJoined, NodeTaken, Start, Stop
from myriad.supervise.observations import DeviceTrouble, LinkStatus, RankExited, RankStatus

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
    (found,) = FrameReader().feed(frame(encode(message)))
    assert decode(found, (*OBSERVED, *ORDERS)) == message


@given(st.lists(st.integers(1, 40), max_size=30))
def test_messages_survive_being_cut_into_pieces_anywhere(cuts: list[int]) -> None:
    data, frames, found = b"".join(frame(encode(message)) for message in MESSAGES), FrameReader(), []
    for cut in [*cuts, len(data)]:
        piece, data = data[:cut], data[cut:]
        found += frames.feed(piece)
    assert [decode(one, (*OBSERVED, *ORDERS)) for one in found] == list(MESSAGES)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_waited_on(data: bytes) -> None:
    try:
        for message in FrameReader().feed(data):
            decode(message, OBSERVED)
    except ValueError:
        pass


@given(st.sampled_from(MESSAGES), st.data())
def test_a_message_with_anything_in_a_field_is_refused_or_whole(message: Any, data: st.DataObject) -> None:
    record = encode(message)
    key = data.draw(st.sampled_from(sorted(record)))
    record[key] = data.draw(JSON)
    try:
        found = decode(json.loads(json.dumps(record)), (*OBSERVED, *ORDERS))
    except ValueError:
        return
    assert encode(found)["kind"] == record["kind"]


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("!2sHI", b"MY", 2, 2) + b"{}",
        struct.pack("!2sHI", b"GE", 1, 2) + b"{}",
        struct.pack("!2sHI", b"MY", 1, MAX_BYTES + 1),
        struct.pack("!2sHI", b"MY", 1, 2) + b"[]",
        struct.pack("!2sHI", b"MY", 1, 3) + b"{]}",
        struct.pack("!2sHI", b"MY", 1, 10**5) + b"[" * 10**5,
    ],
    ids=["version", "magic", "size", "no object", "no JSON", "deep"],
)
def test_what_is_not_of_this_protocol_is_refused(data: bytes) -> None:
    with pytest.raises(Refused):
        list(FrameReader().feed(data))


def test_the_secret_is_made_once_and_for_its_user_alone(tmp_path: Path) -> None:
    secret = run_secret(tmp_path / "secret")
    assert len(secret) == 64 and run_secret(tmp_path / "secret") == secret
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


async def _meet(ours: bytes, theirs: bytes, role: str) -> list[object]:
    met: asyncio.Queue[object] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = AuthenticatedLink(reader, writer)
        try:
            await link.prove(ours, "driver", "executor")
            met.put_nowait(await link.receive(OBSERVED))
        except (Refused, OSError) as error:
            met.put_nowait(error)
        link.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        link = AuthenticatedLink(*await asyncio.open_connection(*server.sockets[0].getsockname()[:2]))
        found: list[object] = []
        try:
            await link.prove(theirs, role, "driver")
            link.send(MESSAGES[0])
        except (Refused, OSError) as error:
            found.append(error)
        found.append(await met.get())
        link.close()
    return found


def test_both_ends_must_know_the_secret() -> None:
    assert asyncio.run(_meet(b"one", b"one", "executor")) == [MESSAGES[0]]
    for error in asyncio.run(_meet(b"one", b"two", "executor")):
        assert isinstance(error, Refused | OSError)


def test_a_proof_cannot_be_sent_back_to_who_made_it() -> None:
    """Whoever mirrors the driver's own messages has its role, not the executor's."""
    assert any(isinstance(error, Refused) for error in asyncio.run(_meet(b"one", b"one", "driver")))


@pytest.mark.parametrize("proof", ["é", "\ud800", "0" * 64])
def test_whatever_a_stranger_calls_its_proof_is_refused(proof: str) -> None:
    async def meet() -> None:
        async def be_strange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(frame({"nonce": proof}) + frame({"proof": proof}))

        server = await asyncio.start_server(be_strange, "127.0.0.1", 0)
        async with server:
            link = AuthenticatedLink(*await asyncio.open_connection(*server.sockets[0].getsockname()[:2]))
            with pytest.raises(Refused):
                await link.prove(b"secret", "executor", "driver")
            link.close()

    asyncio.run(meet())


def test_a_connection_whose_other_end_reads_nothing_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    async def fill() -> int:
        held: list[asyncio.StreamWriter] = []

        async def read_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            held.append(writer)
            writer.transport.pause_reading()  # type: ignore[attr-defined]

        server = await asyncio.start_server(read_nothing, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
            link, sent = AuthenticatedLink(reader, writer), 0
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
    with pytest.raises(ValueError, match="float belongs"):
        decode(json.loads(json.dumps(record)), OBSERVED)


def test_a_secret_that_a_full_disk_cut_short_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"")
    secret = run_secret(path)
    assert len(secret) == 64 and run_secret(path) == secret
    assert path.stat().st_mode & 0o077 == 0
