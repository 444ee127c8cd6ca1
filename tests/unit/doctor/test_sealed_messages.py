"""Whoever reaches the port must not be able to make a node test, listen or believe anything."""

import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myriad.doctor.pair_tests.sealed_messages import (
    HEADER_BYTES,
    MOST_BYTES,
    Seal,
    UnauthenticatedError,
    hello,
)

SECRET = b"a secret of many letters"


def ends(secret: bytes = SECRET) -> tuple[Seal, Seal]:
    mine, theirs = hello(), hello()
    return Seal(SECRET, mine, theirs, connects=True), Seal(secret, theirs, mine, connects=False)


def opened(seal: Seal, data: bytes) -> dict:
    header, text = data[:HEADER_BYTES], data[HEADER_BYTES:]
    if Seal.length(header) != len(text):
        raise UnauthenticatedError("torn")
    return seal.open(header, text)


def test_messages_arrive_both_ways_in_order():
    here, there = ends()
    for number in range(3):
        assert opened(there, here.close({"n": number})) == {"n": number}
        assert opened(here, there.close({"n": -number})) == {"n": -number}


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_no_changed_byte_is_taken(place, difference):
    here, there = ends()
    data = bytearray(here.close({"op": "listen", "token": "abc"}))
    data[place % len(data)] ^= difference
    with pytest.raises(UnauthenticatedError):
        opened(there, bytes(data))


def test_what_was_heard_before_or_elsewhere_is_not_taken():
    here, there = ends()
    first = here.close({"n": 1})
    assert opened(there, first) == {"n": 1}
    for seal in (there, here, ends()[1]):
        with pytest.raises(UnauthenticatedError):
            opened(seal, first)


def test_another_secret_or_version_is_not_taken():
    here, there = ends(b"another secret, as long")
    with pytest.raises(UnauthenticatedError):
        opened(there, here.close({"n": 1}))
    for theirs in (os.urandom(22), struct.pack("<4sH16s", b"MYRD", 2, b"x" * 16)):
        with pytest.raises(UnauthenticatedError):
            Seal(SECRET, hello(), theirs, connects=True)


def test_a_length_is_refused_before_anything_is_read_for_it():
    with pytest.raises(UnauthenticatedError):
        Seal.length(struct.pack("<I32s", MOST_BYTES + 1, b""))
