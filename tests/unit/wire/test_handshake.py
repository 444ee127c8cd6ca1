"""If these fail, a peer without the secret is taken for one that has it, or a frame that was changed on the
way is taken for one that was sent."""

import os
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myriad.wire.frame_codes import MESSAGE_CODE_BYTES
from myriad.wire.frame_reader import FrameReader
from myriad.wire.framing import VERSION, FrameKind, Refused, check_header, pack_header
from myriad.wire.handshake import ANSWER_BYTES, ConnectorHandshake, ListenerHandshake, SessionCodes

SECRET, OTHER = b"a secret of many letters", b"another secret, as long!"
MOST = 2**12


def meet(
    listener: bytes = SECRET,
    connector: bytes = SECRET,
    protocols: tuple[str, str] = ("driver", "driver"),
    certificates: tuple[bytes, bytes] = (b"", b""),
) -> tuple[SessionCodes, SessionCodes]:
    there = ListenerHandshake(protocols[0], [OTHER[:9], listener], certificates[0])
    here = ConnectorHandshake(protocols[1], connector, certificates[1])
    proof, codes = there.accept(here.answer(there.challenge))
    return here.finish(proof), codes


def frames_of(codes: SessionCodes, *bodies: bytes) -> list[bytes]:
    frames = []
    for body in bodies:
        header = pack_header(FrameKind.MESSAGE, len(body))
        frames.append(header + body + codes.sent.of_message(header, body))
    return frames


def reader_of(codes: SessionCodes) -> FrameReader:
    reader = FrameReader()
    reader.codes = codes.received
    return reader


def read(codes: SessionCodes, *frames: bytes) -> list[bytes]:
    reader, found = reader_of(codes), []
    for frame in frames:
        reader.add(frame)
        while (body := reader.next_body(FrameKind.MESSAGE, MOST)) is not None:
            found.append(body)
    return found


def test_ends_with_one_secret_read_each_other() -> None:
    here, there = meet()
    assert read(there, *frames_of(here, b"a", b"", b"c")) == [b"a", b"", b"c"]
    assert read(here, *frames_of(there, b"d")) == [b"d"]


@pytest.mark.parametrize(
    "others",
    [
        {"connector": OTHER},
        {"protocols": ("driver", "snapshots")},
        {"certificates": (b"one" * 10, b"two" * 10)},
        {"certificates": (b"", b"two" * 10)},
    ],
    ids=["secret", "protocol", "man in the middle", "TLS at one end"],
)
def test_ends_that_do_not_agree_are_refused(others: dict) -> None:
    with pytest.raises(Refused, match="does not know the secret"):
        meet(**others)


def test_the_connector_refuses_a_listener_without_the_secret() -> None:
    here = ConnectorHandshake("driver", SECRET)
    answer = here.answer(os.urandom(32))
    for proof in (answer[32:], os.urandom(32), ListenerHandshake("driver", [OTHER]).refusal, b""):
        with pytest.raises(Refused, match="does not know the secret"):
            here.finish(proof)


def test_an_answer_of_another_connection_is_refused() -> None:
    first, second = ListenerHandshake("driver", [SECRET]), ListenerHandshake("driver", [SECRET])
    answer = ConnectorHandshake("driver", SECRET).answer(first.challenge)
    for wrong in (answer, answer[:-1], bytes(ANSWER_BYTES), b""):
        with pytest.raises(Refused):
            second.accept(wrong)


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_no_flipped_byte_is_read(place: int, difference: int) -> None:
    here, there = meet()
    frames = bytearray(b"".join(frames_of(here, b'{"op": "one"}', b'{"op": "two"}')))
    frames[place % len(frames)] ^= difference
    reader, found = reader_of(there), []
    reader.add(bytes(frames))
    with pytest.raises(Refused):
        while (body := reader.next_body(FrameKind.MESSAGE, MOST)) is not None:
            found.append(body)
        raise Refused("a longer size: the rest of the frame never comes")
    assert found in ([], [b'{"op": "one"}'])


def test_a_replayed_reordered_dropped_injected_or_reflected_frame_is_refused() -> None:
    for attack in (
        lambda one, two, other, back: (one, one),
        lambda one, two, other, back: (two, one),
        lambda one, two, other, back: (two,),
        lambda one, two, other, back: (pack_header(FrameKind.MESSAGE, 2) + b"{}" + bytes(32),),
        lambda one, two, other, back: (other,),
        lambda one, two, other, back: (back,),
    ):
        here, there = meet()
        one, two = frames_of(here, b"one", b"two")
        other, back = frames_of(meet()[0], b"one")[0], frames_of(there, b"one")[0]
        with pytest.raises(Refused, match="has not sent so"):
            read(there, *attack(one, two, other, back))


def test_a_replayed_reordered_or_changed_piece_of_a_payload_is_refused() -> None:
    for attack in ((0, 0), (1,), (1, 0)):
        here, there = meet()
        pieces = [b"first piece", b"second one."]
        codes = [here.sent.of_payload(piece) for piece in pieces]
        with pytest.raises(Refused, match="has not sent so"):
            for number in attack:
                there.received.check_payload(pieces[number], codes[number])
    here, there = meet()
    code = here.sent.of_payload(b"a piece")
    with pytest.raises(Refused):
        there.received.check_payload(b"a pieces", code)


@given(st.lists(st.integers(1, 40), max_size=30))
def test_frames_survive_being_cut_into_pieces_anywhere(cuts: list[int]) -> None:
    here, there = meet()
    bodies = [b"x" * size for size in (0, 1, 50, 100)]
    data, pieces = b"".join(frames_of(here, *bodies)), []
    for cut in [*cuts, len(data)]:
        pieces.append(data[:cut])
        data = data[cut:]
    assert read(there, *pieces) == bodies


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_waited_on(data: bytes) -> None:
    _, there = meet()
    with suppress(Refused):
        assert read(there, data) == []


@pytest.mark.parametrize(
    "header",
    [
        b"GE" + pack_header(FrameKind.MESSAGE, 1)[2:],
        b"MY" + bytes([VERSION + 1]) + pack_header(FrameKind.MESSAGE, 1)[3:],
        pack_header(FrameKind.MESSAGE, MOST + 1),
        pack_header(FrameKind.MESSAGE, 2**32 - 1),
        pack_header(FrameKind.PAYLOAD, 1),
        b"MY" + bytes([VERSION, 99]) + bytes(4),
    ],
    ids=["magic", "version", "size", "huge", "kind", "unknown kind"],
)
def test_a_header_is_refused_before_anything_is_stored_for_it(header: bytes) -> None:
    with pytest.raises(Refused):
        check_header(header, (FrameKind.MESSAGE,), MOST)


def test_the_code_of_a_message_has_the_size_that_readers_expect() -> None:
    here, _ = meet()
    assert len(here.sent.of_message(b"", b"")) == MESSAGE_CODE_BYTES
