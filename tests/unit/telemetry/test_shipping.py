"""If these fail, a disk or a collector that is full, slow or gone costs a run time, or spans that nobody
counts. Rings, files, threads and HTTP are the real ones."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_spans import made_batch

from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.run import Run
from myriad.supervise.agent.rank_processes import NodeSpans
from myriad.telemetry.config import TelemetryConfig
from myriad.telemetry.shipping import outlets as outlet_module
from myriad.telemetry.shipping.clock_offset import ClockOffset
from myriad.telemetry.shipping.outlets import Collector, FileWriter, Outlet, RefusedError
from myriad.telemetry.shipping.page_token import TOKEN, sender_tokens
from myriad.telemetry.shipping.shipper import Shipper, open_outlets
from myriad.telemetry.span_io.span_batch import SpanBatch, decode
from myriad.telemetry.span_io.span_files import read_span_file, span_files
from myriad.telemetry.span_io.span_records import RECORD
from myriad.telemetry.span_io.span_ring import SpanRings, ring_at
from myriad.telemetry.spans import Recorder

SECONDS = 20.0
Told = list[tuple[str, str, int]]


def numbered(first: int, count: int) -> SpanBatch:
    """Spans whose steps are numbers in a row."""
    records = np.zeros(count, RECORD)
    records["step"] = range(first, first + count)
    return SpanBatch(0, 1, ("forward",), records)


def steps_of(batches: Sequence[SpanBatch]) -> list[int]:
    return [int(step) for batch in batches for step in batch.records["step"]]


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second between two tries."""
    monkeypatch.setattr(outlet_module, "_FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(outlet_module, "_REPORT_SECONDS", 0.0)


@pytest.fixture
def told() -> Told:
    return []


def teller(told: Told) -> Callable[[str, str, int], None]:
    return lambda place, problem, lost: told.append((place, problem, lost))


def test_who_offers_does_not_wait_for_a_place_that_hangs_and_what_found_no_room_is_counted(
    told: Told,
) -> None:
    goes_on, came = threading.Event(), list[SpanBatch]()

    def deliver(batches: Sequence[SpanBatch]) -> None:
        goes_on.wait(SECONDS)
        came.extend(batches)

    outlet = Outlet("spans", deliver, teller(told), max_waiting=100)
    outlet.offer(numbered(0, 10))
    until(lambda: not outlet._waiting)  # the place hangs with these
    for first in range(10, 500, 10):
        outlet.offer(numbered(first, 10))
    assert not came and outlet._num_waiting <= 100
    goes_on.set()
    outlet.close(SECONDS)
    steps = steps_of(came)
    assert steps == [*range(10), *range(400, 500)], "the oldest are dropped, the newest arrive"
    assert sum(batch.num_dropped for batch in came) == 500 - len(steps) == sum(lost for *_, lost in told)


def test_what_fails_for_a_while_arrives_later_and_both_is_reported_once(quick: None, told: Told) -> None:
    came, fails = list[SpanBatch](), threading.Event()
    fails.set()

    def deliver(batches: Sequence[SpanBatch]) -> None:
        if fails.is_set():
            raise OSError(28, "No space left on device")
        came.extend(batches)

    outlet = Outlet("spans", deliver, teller(told))
    for first in (0, 5, 10):
        outlet.offer(numbered(first, 5))
    until(lambda: told)
    fails.clear()
    until(lambda: len(told) == 2)
    outlet.close(SECONDS)
    assert steps_of(came) == list(range(15)) and sum(batch.num_dropped for batch in came) == 0
    assert [(bool(problem), lost) for _, problem, lost in told] == [(True, 0), (False, 0)]


def test_what_is_refused_or_breaks_the_sender_is_counted_and_the_next_is_sent(
    quick: None, told: Told
) -> None:
    came = list[SpanBatch]()

    def deliver(batches: Sequence[SpanBatch]) -> None:
        if steps_of(batches)[0] == 0:
            raise RefusedError("400: not this")
        came.extend(batches)

    outlet = Outlet("collector", deliver, teller(told))
    outlet.offer(numbered(0, 7))
    until(lambda: told)
    outlet.offer(numbered(7, 3))
    outlet.close(SECONDS)
    assert steps_of(came) == [7, 8, 9] and came[0].num_dropped == 7
    assert told[0] == ("collector", "400: not this", 7)


def test_the_end_waits_no_longer_than_allowed(told: Told) -> None:
    outlet = Outlet("spans", lambda batches: threading.Event().wait(SECONDS), teller(told))
    outlet.offer(numbered(0, 1))
    began = time.monotonic()
    outlet.close(0.05)
    assert time.monotonic() - began < SECONDS / 2


def test_spans_of_ranks_come_into_files_with_their_attempt_and_the_common_clock(tmp_path: Path) -> None:
    rings, ahead_ns = SpanRings(4, 1024), 5 * 10**9
    how = TelemetryConfig(file_seconds=1)
    outlets = open_outlets(tmp_path / "spans", "node-3", "run", how, lambda *told: None)
    shipper = Shipper(rings, 3, outlets, lambda now_ns: (-ahead_ns, 0.002))
    for attempt, num_ranks in ((1, 3), (2, 2)):
        shipper.begin(num_ranks)
        for rank in range(num_ranks):
            recorder = Recorder(ring=ring_at(rings.address(rank), attempt), rank=rank)
            recorder.step(attempt * 10)
            with recorder.span("forward", stage=rank):
                pass
    began = time.time_ns()
    shipper.close(SECONDS)
    batches = [read_span_file(path) for path in span_files(tmp_path / "spans")]
    found = {(b.attempt, int(r["rank"]), int(r["step"])) for b in batches for r in b.records}
    assert found == {(1, 0, 10), (1, 1, 10), (1, 2, 10), (2, 0, 20), (2, 1, 20)}
    assert {batch.clock_error_seconds for batch in batches} == {0.002} and {b.node for b in batches} == {3}
    starts = np.concatenate([batch.records["start_ns"] for batch in batches])
    assert (abs(starts + ahead_ns - began) < 10**9 * SECONDS).all()


def test_a_node_that_starts_again_writes_beside_its_files_and_removes_what_a_kill_left(
    tmp_path: Path,
) -> None:
    FileWriter(tmp_path, "node-1", None).write([numbered(0, 5)])
    (tmp_path / ".attempt-1-node-1-1.parquet.77").write_bytes(b"half")
    (tmp_path / ".attempt-1-node-11-1.parquet.77").write_bytes(b"another node's")
    FileWriter(tmp_path, "node-1", None).write([numbered(5, 5)])
    assert [path.name for path in span_files(tmp_path)] == [f"attempt-1-node-1-{k}.parquet" for k in (0, 1)]
    assert [path.name for path in tmp_path.glob(".*")] == [".attempt-1-node-11-1.parquet.77"]


def test_files_stay_below_their_limit_and_the_newest_stay(tmp_path: Path) -> None:
    FileWriter(tmp_path, "node-0", None).write([made_batch(1, 1)])
    size = span_files(tmp_path)[0].stat().st_size
    writer = FileWriter(tmp_path, "node-0", keep=3 * size)
    for _ in range(6):
        writer.write([made_batch(1, 1)])
    left = [path.name for path in span_files(tmp_path)]
    assert left == [f"attempt-2-node-0-{k}.parquet" for k in (4, 5, 6)]


def test_a_folder_that_cannot_be_written_is_an_error_that_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "spans").write_text("a file where the folder is to be")
    writer = FileWriter(tmp_path / "spans", "node-0", None)
    with pytest.raises(OSError):
        writer.write([numbered(0, 1)])
    (tmp_path / "spans").unlink()
    writer.write([numbered(0, 1)])
    assert len(span_files(tmp_path / "spans")) == 1


def test_a_node_agent_whose_disk_takes_no_spans_continues_and_the_run_states_how_many_are_lost(
    tmp_path: Path, quick: None
) -> None:
    run = Run(tmp_path / "run")
    run.create_or_resume(load_job("tiny", ["telemetry.file_seconds=1"]))
    run.spans_path.write_text("a file where the folder is to be")
    rings, clock = SpanRings(2, 1024), ClockOffset()
    spans = NodeSpans(run, 4, rings, clock)
    spans.begin(2)
    recorder = Recorder(ring=ring_at(spans.address(1), attempt=1), rank=1)
    for _ in range(10):
        with recorder.span("forward"):
            pass
    spans.begin(2)
    spans.close()
    told = [event for event in run.read_events() if event["event"] == "telemetry"]
    assert [(event["node"], event["place"]) for event in told] == [(4, "files")] * len(told)
    assert sum(event["num_dropped"] for event in told) == 10 and told[-1]["problem"]


def test_a_job_that_keeps_no_spans_has_no_threads_and_no_files(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.create_or_resume(load_job("tiny", ["telemetry.spans=false"]))
    threads = threading.active_count()
    spans = NodeSpans(run, 0, SpanRings(1, 1024), ClockOffset())
    spans.begin(1)
    assert threading.active_count() == threads
    spans.close()
    assert not run.spans_path.exists()


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server.asked.append((self.path, dict(self.headers), body))
        status, text = server.answers.pop(0) if server.answers else (204, b"")
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    server.asked, server.answers = [], []
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    server.address = f"http://127.0.0.1:{server.server_port}"
    yield server
    server.shutdown()
    server.server_close()


def test_a_collector_gets_batches_that_decode_over_one_connection(
    collector: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN, "a-token")
    sender = Collector(collector.address, "big-run", lambda: sender_tokens(tmp_path, collector.address))
    batch = made_batch(2, 2)
    sender.post([batch])
    connection = sender._connection.sock
    sender.post([batch])
    assert sender._connection.sock is connection is not None
    path, headers, body = collector.asked[0]
    assert path == "/api/spans" and decode(body).names == batch.names
    assert np.array_equal(decode(body).records, batch.records)
    assert headers["Authorization"] == "Bearer a-token" and headers["Myriad-Run"] == "big-run"


def test_a_collector_that_wants_another_token_gets_it_without_loss(collector: Any) -> None:
    """It was restarted, and has drawn a new one."""
    tokens = ["old"]
    sender = Collector(collector.address, "run", lambda: tokens)
    tokens[:] = ["wrong", "new"]
    collector.answers += [(401, b"no"), (401, b"no"), (204, b"")]
    sender.post([made_batch(1, 1)])
    sender.post([made_batch(1, 1)])
    sent = [headers["Authorization"].removeprefix("Bearer ") for _, headers, _ in collector.asked]
    assert sent == ["old", "wrong", "new", "new"]


def test_many_spans_are_sent_in_parts_and_what_was_dropped_is_reported_once(
    collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("myriad.telemetry.shipping.outlets._MAX_POSTED", 100)
    batch = made_batch(1, 3)
    Collector(collector.address, "run").post([batch])
    parts = [decode(body) for *_, body in collector.asked]
    assert max(len(part.records) for part in parts) == 100
    assert np.array_equal(np.concatenate([part.records for part in parts]), batch.records)
    assert [part.num_dropped for part in parts] == [5] + [0] * (len(parts) - 1)


def test_a_batch_that_is_sent_again_states_that_it_is_the_same(
    collector: Any, quick: None, told: Told
) -> None:
    """Else a collector whose answer was lost shows its time twice."""
    rings = SpanRings(1)
    outlet = Outlet("collector", Collector(collector.address, "run").post, teller(told), at_once=1)
    collector.answers += [(503, b"lost"), (503, b"lost")]
    shipper = Shipper(rings, 0, [outlet], ClockOffset().at)
    shipper.begin(1)
    recorder = Recorder(ring=ring_at(rings.address(0), 1))
    for step in (1, 2):
        recorder.step(step)
        with recorder.span("forward"):
            pass
        with shipper._drains:
            shipper._drain()
    until(lambda: len(collector.asked) >= 4)
    shipper.close()
    first, again, once_more, second = (decode(body).origin for *_, body in collector.asked)
    assert first is not None and second is not None
    assert first == again == once_more and first.sender == second.sender and first.place < second.place


@pytest.mark.parametrize(
    ("answer", "error"), [((400, b"no batch\n<html>"), RefusedError), ((429, b"later"), OSError)]
)
def test_a_collector_that_refuses_is_not_asked_again_and_one_that_is_busy_is(
    collector: Any, answer: tuple[int, bytes], error: type[Exception]
) -> None:
    collector.answers.append(answer)
    sender = Collector(collector.address, "run")
    with pytest.raises(error, match=f"{answer[0]}: {answer[1].decode().splitlines()[0]}$"):
        sender.post([numbered(0, 1)])
    sender.post([numbered(0, 1)])
    assert len(collector.asked) == 2


def test_a_collector_that_goes_and_comes_back_gets_what_was_sent_meanwhile(
    collector: Any, quick: None, told: Told
) -> None:
    sender = Collector(collector.address, "run")
    sender.post([numbered(0, 1)])
    collector.shutdown()
    collector.server_close()
    sender._connection.close()
    outlet = Outlet("collector", sender.post, teller(told))
    outlet.offer(numbered(1, 4))
    until(lambda: told)
    assert "cannot be reached" in told[0][1]
    again: Any = ThreadingHTTPServer(("127.0.0.1", collector.server_port), _Answers)
    again.asked, again.answers = [], []
    threading.Thread(target=again.serve_forever, args=(0.02,), daemon=True).start()
    until(lambda: again.asked)
    outlet.close(SECONDS)
    again.shutdown()
    again.server_close()
    assert decode(again.asked[0][2]).records["step"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "address", ["localhost:80", "ftp://host:1", "http://", "http://h:99999", "http://u:p@h:1"]
)
def test_a_collector_that_is_no_address_is_refused_before_anything_starts(address: str) -> None:
    with pytest.raises(BadInputError, match=r"telemetry\.collector = .*http://HOST:PORT"):
        load_job("tiny", [f"telemetry.collector={address}"])
