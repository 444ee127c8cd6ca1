"""If these fail, a trace fills a disk, cannot be opened, or replaces one that was taken before."""

import gzip
import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myriad.telemetry.progress.progress_page import PROGRESS, ProgressPage, own_row
from myriad.telemetry.span_io.span_ring import SpanRing
from myriad.telemetry.spans import Recorder
from myriad.telemetry.traces.trace_files import pack_profile, trace_path, write_bounded
from myriad.telemetry.traces.trace_formats import SpanLane
from myriad.telemetry.traces.trace_request import TraceAnswerWord, TraceWord

BASE_NS = 1_700_000_000 * 10**9


def chrome_trace(path: Path, count: int) -> None:
    """As torch writes it."""
    event = '\n  {\n    "ph": "X",\n    "name": "aten::mm %d",\n    "ts": %d.1\n  }'
    events = ",".join(event % (number, number) for number in range(count))
    head = f'{{\n "schemaVersion": 1,\n "baseTimeNanoseconds": {BASE_NS},\n "traceEvents": [\n'
    path.write_text(head + events + '\n  ],"traceName": "x" }')


def test_a_profile_that_is_too_long_ends_early_and_can_be_opened(tmp_path: Path) -> None:
    chrome_trace(tmp_path / "trace.json", 60_000)
    assert not pack_profile(tmp_path / "trace.json", tmp_path / "short.json.gz", 300_000)
    events = json.loads(gzip.decompress((tmp_path / "short.json.gz").read_bytes()))["traceEvents"]
    assert 1000 < len(events) < 60_000 and events[-1]["name"] == f"aten::mm {len(events) - 1}"
    assert pack_profile(tmp_path / "trace.json", tmp_path / "whole.json.gz")
    assert (
        len(json.loads(gzip.decompress((tmp_path / "whole.json.gz").read_bytes()))["traceEvents"]) == 60_000
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "short.json.gz",
        "trace.json",
        "whole.json.gz",
    ]


def test_spans_are_put_before_the_operators_with_times_that_count_from_the_same_moment(
    tmp_path: Path,
) -> None:
    chrome_trace(tmp_path / "trace.json", 40_000)
    ring = SpanRing.of_its_own(128)
    recorder = Recorder(ring=ring)
    with recorder.span("before"):
        pass
    lane = SpanLane(ring)
    for number in range(300):
        with recorder.span("forward", 1, number % 4):
            pass
        if number % 100 == 99:
            lane.collect()
    before = time.time_ns()
    assert pack_profile(tmp_path / "trace.json", tmp_path / "whole.json.gz", more=lane.events)
    events = json.loads(gzip.decompress((tmp_path / "whole.json.gz").read_bytes()))["traceEvents"]
    spans = [one for one in events if one["name"] == "forward"]
    assert len(spans) == 300 and len(events) == 40_000 + 300 + 2
    assert {one["args"]["micro_batch"] for one in spans} == {0, 1, 2, 3}
    assert 0 <= before / 1e3 - BASE_NS / 1e3 - spans[-1]["ts"] < 60e6


def test_what_was_traced_before_stays(tmp_path: Path) -> None:
    first = trace_path(tmp_path / "traces", 3, 7, "stacks")
    write_bounded(first, b"first")
    second = trace_path(tmp_path / "traces", 3, 7, "stacks")
    write_bounded(second, b"a" * 100, most_bytes=10)
    assert (first.name, second.name) == ("rank-3-step-7-stacks.txt", "rank-3-step-7-2-stacks.txt")
    assert first.read_bytes() == b"first" and second.read_bytes().startswith(b"a" * 10 + b"\n... cut off")


@given(
    number=st.integers(1, 2**27 - 1),
    what=st.sampled_from(["profile", "flight", "stacks", "network"]),
    tenths=st.integers(1, 600),
    step=st.integers(0, 2**31 - 1),
    outcome=st.sampled_from(["begun", "done", "failed"]),
)
def test_a_rank_receives_what_was_asked_and_answers_it(number, what, tenths, step, outcome) -> None:
    asked = TraceWord(number, what, tenths / 10)
    assert 0 < asked.pack() < 2**63 and TraceWord.unpack(asked.pack()) == asked
    answer = TraceAnswerWord(number, outcome, step)
    assert 0 < answer.pack() < 2**63 and TraceAnswerWord.unpack(answer.pack()) == answer


def test_a_word_goes_there_and_back_by_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    page = ProgressPage(2)
    monkeypatch.setenv(PROGRESS, page.address(1))
    row = own_row()
    assert row.trace_word == 0 and page.trace_answer(1) == 0
    page.ask_trace(1, 77)
    row.answer_trace(88)
    assert (row.trace_word, page.trace_answer(1), page.trace_answer(0)) == (77, 88, 0)
    assert not row.restart_requested and page.read(1).busy_ns == 0, "its neighbours are not touched"
    page.clear(1)
    assert page.trace_answer(1) == 0
