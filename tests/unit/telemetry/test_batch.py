"""What a collector takes from a socket: a batch as it was sent, or a refusal in one line."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from myriad.telemetry.span_io.span_batch import BatchError, SpanBatch, decode, encode
from myriad.telemetry.span_io.span_records import CLASSES, PHASES, RECORD, class_of, phase_of


def batch(num: int = 3) -> SpanBatch:
    records = np.zeros(num, RECORD)
    records["start_ns"] = 1_700_000_000_000_000_000 + np.arange(num)
    records["duration_ns"], records["rank"] = 7, np.arange(num)
    return SpanBatch(4, 2, ("forward", "reduce"), records, 5, 1e-4)


def test_a_batch_arrives_as_it_was_sent() -> None:
    sent = batch()
    found = decode(encode(sent))
    assert (found.node, found.attempt, found.names, found.num_dropped) == (4, 2, ("forward", "reduce"), 5)
    assert found.clock_error_seconds == 1e-4
    np.testing.assert_array_equal(found.records, sent.records)


@given(st.binary(max_size=200))
def test_noise_is_refused_and_never_more(noise: bytes) -> None:
    with pytest.raises(BatchError):
        decode(noise)


@given(st.data())
def test_a_damaged_batch_is_read_or_refused(data: st.DataObject) -> None:
    good = bytearray(encode(batch()))
    at = data.draw(st.integers(0, len(good) - 1))
    good[at] = data.draw(st.integers(0, 255))
    try:
        found = decode(bytes(good))
    except BatchError:
        return
    assert len(found.records) == 3
    assert found.records["name"].max() < len(found.names)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [("name", 2, "name"), ("name", -1, "name"), ("rank", -1, "rank"), ("duration_ns", -1, "duration")],
)
def test_a_span_that_cannot_be_is_refused(field: str, value: int, said: str) -> None:
    wrong = batch()
    wrong.records[field][1] = value
    with pytest.raises(BatchError, match=said):
        decode(encode(wrong))


@pytest.mark.parametrize(
    "head",
    [
        {},
        [],
        {"node": "x", "attempt": 1, "names": [], "num_dropped": 0, "clock_error_seconds": 0},
        {
            "node": 0,
            "attempt": 1,
            "names": [],
            "num_dropped": 0,
            "clock_error_seconds": 0,
            "origin": ["a", 1],
        },
        {"node": 0, "attempt": 1, "names": [1], "num_dropped": 0, "clock_error_seconds": 0},
        {"node": 0, "attempt": 1, "names": ["x" * 65], "num_dropped": 0, "clock_error_seconds": 0},
        {"node": 0, "attempt": 1, "names": ["x"] * 1025, "num_dropped": 0, "clock_error_seconds": 0},
    ],
)
def test_a_batch_whose_head_contradicts_its_content_is_refused(head: object) -> None:
    text = json.dumps(head).encode()
    with pytest.raises(BatchError):
        decode(struct.pack("<4sHHI", b"MYSP", 1, len(text), 0) + text)


def test_every_span_of_a_program_has_a_phase_and_a_class() -> None:
    from myriad.program.actions import Kind

    assert {str(kind) for kind in Kind} <= set(PHASES)
    assert {class_of(name) for name in PHASES} <= set(CLASSES)
    assert (phase_of("evaluate"), class_of("evaluate")) == ("evaluate", "other")
