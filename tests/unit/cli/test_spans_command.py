"""If these fail, people cannot ask what ranks did, a question leaves the run, or a trace is broken."""

import csv
import gzip
import io
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from myriad.cli.main import main
from myriad.job import load_job
from myriad.run import Run
from myriad.telemetry.span_io.span_batch import SpanBatch
from myriad.telemetry.span_io.span_files import write_span_file
from myriad.telemetry.span_io.span_records import RECORD

BEGAN_NS = 1_790_000_000 * 10**9
NAMES = ("forward", "backward", "context_comm", "my own\x1b[31m")
MS = 10**6


def records_of(rank: int, steps: range) -> Any:
    """Each step: a forward with communication inside it, a backward, and a span of another thread across."""
    rows = []
    for step in steps:
        at = BEGAN_NS + step * 100 * MS
        rows.append((at, 40 * MS, step, rank, 0, rank, 2, -1))
        rows.append((at + 5 * MS, 35 * MS, step, rank, 2, -1, -1, 3))
        rows.append((at + 40 * MS, 50 * MS + rank * MS, step, rank, 1, rank, 2, -1))
        rows.append((at + 30 * MS, 30 * MS, step, rank, 3, -1, -1, 1))
    return np.array(rows, RECORD)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Of four ranks on two nodes, with a file that is half written."""
    run = Run(tmp_path_factory.mktemp("runs") / "one")
    run.create_or_resume(load_job("tiny"))
    run.spans_path.mkdir()
    for node in (0, 1):
        for part, steps in enumerate((range(1, 4), range(4, 7))):
            records = np.concatenate([records_of(rank, steps) for rank in (2 * node, 2 * node + 1)])
            path = run.spans_path / f"attempt-1-node-{node}-{part}.parquet"
            write_span_file(path, SpanBatch(node, 1, NAMES, records, part, 0.001 * node))
    whole = (run.spans_path / "attempt-1-node-0-0.parquet").read_bytes()
    (run.spans_path / "attempt-1-node-0-2.parquet").write_bytes(whole[: len(whole) // 2])
    for step in range(1, 7):
        run.append_metrics({"step": step, "loss": 5.0 - step, "step_seconds": 0.1})
    run.append_event("start", world=4, device="cpu")
    run.append_event("fault", rank=1, evidence={"idle_seconds": 3.5}, problem="half a \ud800 pair")
    return run


def ask(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["spans", *map(str, words)])
    out = capsys.readouterr()
    return int(ended.value.code or 0), out.out, out.err


def rows(capsys: pytest.CaptureFixture[str], run: Run, query: str) -> list[list[Any]]:
    code, out, err = ask(capsys, run.path, query, "--json")
    assert code == 0, err
    return json.loads(out)["rows"]


def test_spans_have_phases_and_classes_and_join_with_metrics(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    found = rows(capsys, run, "SELECT DISTINCT name, phase, class FROM spans ORDER BY name")
    own = "my own\x1b[31m"
    assert found == [
        ["backward", "backward", "compute"],
        ["context_comm", "context", "cp"],
        ["forward", "forward", "compute"],
        [own, own, "other"],
    ]
    slow = rows(capsys, run, "SELECT rank FROM spans WHERE name = 'backward' AND duration_seconds > 0.0525")
    assert {rank for (rank,) in slow} == {3}
    joined = "SELECT step, loss, count(*) FROM spans JOIN metrics USING (step) WHERE step < 3 GROUP BY ALL"
    assert sorted(rows(capsys, run, joined)) == [[1, 4.0, 16], [2, 3.0, 16]]
    facts = rows(capsys, run, "SELECT evidence ->> 'idle_seconds', world FROM events ORDER BY time")
    assert facts == [[None, 4], ["3.5", None]]
    files = "SELECT node, sum(num_spans), sum(num_dropped), max(clock_error_seconds) FROM files GROUP BY 1"
    assert sorted(rows(capsys, run, files)) == [[0, 48, 1, 0.0], [1, 48, 1, 0.001]]


def test_without_a_query_time_by_phase_is_shown_and_the_half_file_reported(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = ask(capsys, run.path)
    assert code == 0 and "backward" in out and "96" not in err.replace(str(run.path), "")
    assert "attempt-1-node-0-2.parquet is left out: not a complete span file" in err
    assert "\x1b" not in out, "a name is no command to the terminal"


def test_csv_has_a_line_of_names(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ask(capsys, run.path, "SELECT 1 AS a, 'x,y' AS b UNION ALL SELECT 2, NULL", "--csv")
    assert code == 0
    assert sorted(csv.reader(io.StringIO(out))) == [["1", "x,y"], ["2", ""], ["a", "b"]]


@pytest.mark.parametrize(
    "query",
    [
        "COPY spans TO '{folder}/stolen.csv'",
        "SELECT * FROM read_text('{folder}/secret')",
        "SELECT * FROM '{folder}/attempt-1-node-0-0.parquet'",
        "ATTACH '{folder}/other.db'",
        "EXPORT DATABASE '{folder}/out'",
        "SET enable_external_access = true",
        "INSTALL httpfs",
        "SELECT * FROM glob('{folder}/*')",
        "SELECT 1; SELECT 2",
        "",
        "SELEC 1",
        "SELECT nothing FROM spans",
    ],
)
def test_a_query_reads_this_run_and_nothing_else(
    run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path, query: str
) -> None:
    (tmp_path / "secret").write_text("hunter2")
    before = {path for folder in (tmp_path, run.path) for path in folder.rglob("*")}
    code, out, err = ask(capsys, run.path, query.format(folder=tmp_path))
    assert code == 2 and "hunter2" not in out
    assert err.splitlines()[-1].startswith("myriad: error: QUERY = ")
    assert {path for folder in (tmp_path, run.path) for path in folder.rglob("*")} == before


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--csv", "--json"], "--csv"),
        (["SELECT 1", "--chrome", "a.json"], "--chrome"),
        (["--chrome", "a.txt"], "must end in .json"),
        (["--chrome", "a.json", "--perfetto", "a.pftrace"], "nor with both --chrome and --perfetto"),
        (["--perfetto", "a.json"], "must end in .pftrace"),
        (["--steps", "1-2"], "only with --chrome"),
        (["--chrome", "a.json", "--steps", "5-2"], "A-B"),
        (["--chrome", "a.json", "--ranks", "x"], "ranges"),
        (["--chrome", "a.json", "--ranks", "0-9999999"], "--ranks"),
        (["--chrome", "a.json", "--ranks", "77"], "no spans"),
        (["--chrome", "nowhere/a.json"], "cannot be written"),
    ],
)
def test_what_cannot_be_is_one_line(
    run: Run,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = ask(capsys, run.path, *words)
    assert code == 2 and told in err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_spans_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path / "one")
    run.create_or_resume(load_job("tiny"))
    assert rows(capsys, run, "SELECT count(*), max(duration_seconds) FROM spans") == [[0, None]]
    assert rows(capsys, run, "SELECT time, event FROM events UNION ALL SELECT step, '' FROM metrics") == []


def test_without_duckdb_the_error_names_the_package_to_install(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    code, _, err = ask(capsys, run.path, "SELECT 1")
    assert code == 2 and "pip install 'myriad-train[watch]'" in err


def exported(capsys: pytest.CaptureFixture[str], run: Run, path: Path, *words: object) -> dict[str, Any]:
    code, _, err = ask(capsys, run.path, "--chrome", path, *words)
    assert code == 0, err
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def test_a_trace_has_each_span_once_and_threads_whose_spans_nest(
    run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = exported(capsys, run, tmp_path / "t.json.gz", "--steps", "2-5", "--ranks", "1-2")
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 2 * 4 * 4
    assert min(span["ts"] for span in spans) == 0 and trace["otherData"]["clock_error_seconds"] == 0.001
    threads = defaultdict(list)
    for span in spans:
        threads[span["pid"], span["tid"]].append(span)
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert sorted(names.values()) == ["rank 1", "rank 1 (2)", "rank 2", "rank 2 (2)"]
    assert names.keys() == threads.keys()
    for thread in threads.values():
        assert_nested(thread)
    forward = next(span for span in spans if span["name"] == "forward")
    assert forward["cat"] == "compute" and forward["args"] == {"step": 2, "stage": 1, "micro_batch": 2}
    arguments = {span["name"]: span["args"] for span in spans}
    assert arguments["context_comm"] == {"step": 5, "ring_step": 3}
    assert arguments[NAMES[3]] == {"step": 5, "chunk": 1}


def assert_nested(spans: list[dict[str, Any]]) -> None:
    """As Chrome reads complete events: sorted by start, each inside the one that is open, or after it."""
    ends: list[float] = []
    for span in sorted(spans, key=lambda one: (one["ts"], -one["dur"])):
        while ends and ends[-1] <= span["ts"] + 1e-4:
            ends.pop()
        assert span["dur"] >= 0 and all(span["ts"] + span["dur"] <= end + 1e-4 for end in ends)
        ends.append(span["ts"] + span["dur"])


def test_spans_of_every_shape_nest_in_the_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = Run(tmp_path / "one")
    run.create_or_resume(load_job("tiny"))
    run.spans_path.mkdir()
    random = np.random.default_rng(5)
    records = np.zeros(3000, RECORD)
    records["start_ns"] = BEGAN_NS + random.integers(0, 2 * 10**6, len(records))
    records["duration_ns"] = random.integers(0, 300, len(records)) ** 2
    write_span_file(run.spans_path / "a.parquet", SpanBatch(0, 1, ("x",), records))
    trace = exported(capsys, run, tmp_path / "t.json")
    threads = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            threads[event["tid"]].append(event)
    assert sum(map(len, threads.values())) == len(records)
    for thread in threads.values():
        assert_nested(thread)


def test_too_many_spans_are_refused_with_the_steps_that_fit(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("myriad.telemetry.span_io.span_window.MAX_EVENTS", 50)
    code, _, err = ask(capsys, run.path, "--chrome", tmp_path / "t.json", "--steps", "2-6")
    assert code == 2 and "80 spans, and at most 50 are exported: --steps 2-4 fits" in err
    assert list(tmp_path.iterdir()) == []
    assert len(exported(capsys, run, tmp_path / "t.json", "--steps", "2-4")["traceEvents"]) > 48


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Of one message of protocol buffers."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
        else:
            assert key & 7 == 2
            length = varint()
            yield key >> 3, data[at : at + length]
            at += length


def test_perfettos_trace_has_the_same_spans_and_each_track_nests(
    run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "t.pftrace.gz"
    code, _, err = ask(capsys, run.path, "--perfetto", path, "--steps", "2-5", "--ranks", "1-2")
    assert code == 0, err
    packets = [dict(fields(packet)) for _, packet in fields(gzip.decompress(path.read_bytes()))]
    texts = [dict(fields(entry)) for number, entry in fields(packets[0][12]) if number == 2]
    names = {entry[1]: entry[2].decode() for entry in texts}
    places = {
        entry[1]: entry[2].decode()
        for number, data in fields(packets[0][12])
        if number == 3
        for entry in [dict(fields(data))]
    }
    tracks = {(track := dict(fields(p[60])))[1]: track for p in packets if 60 in p}
    assert sorted(track[2] for track in tracks.values()) == [
        b"node 0", b"node 1", b"rank 1", b"rank 1 (2)", b"rank 2", b"rank 2 (2)",
    ]  # fmt: skip
    stacks: defaultdict[int, list[str]] = defaultdict(list)
    found, newest, notes = [], defaultdict(int), {}
    for packet in packets:
        if 11 not in packet:
            continue
        event = dict(fields(packet[11]))
        assert packet[8] >= newest[event[11]], "a track's events follow each other"
        newest[event[11]] = packet[8]
        if event[9] == 1:
            stacks[event[11]].append(names[event[10]])
            found.append((tracks[tracks[event[11]][5]][2], names[event[10]], packet[8]))
            notes[names[event[10]]] = {
                places[note[1]]: note[4]
                for number, data in fields(packet[11])
                if number == 4
                for note in [dict(fields(data))]
            }
        else:
            stacks[event[11]].pop()
    assert not any(stacks.values()) and len(found) == 2 * 4 * 4
    assert notes["context_comm"] == {"step": 5, "ring_step": 3} and "chunk" in notes[NAMES[3]]
    chrome = exported(capsys, run, tmp_path / "t.json", "--steps", "2-5", "--ranks", "1-2")
    spans = [event for event in chrome["traceEvents"] if event["ph"] == "X"]
    expected = [(f"node {s['pid']}".encode(), s["name"], round(s["ts"] * 1000)) for s in spans]
    assert sorted(found) == sorted(expected)
