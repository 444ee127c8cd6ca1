"""If these fail, Prometheus finds nothing at a run's page, or the page asks for what cannot be."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from myriad.dashboard.api.export_api import Ask, more_routes
from myriad.dashboard.app import build_app
from myriad.dashboard.request_guard import Access
from myriad.dashboard.run_files import RunFiles
from myriad.dashboard.store.span_store import SpanStore
from myriad.dashboard.watched_run import WatchedRun
from myriad.errors import BadInputError, RunFailedError
from myriad.job import load_job
from myriad.run import Run
from myriad.telemetry.links.network_counters import LINK_FIELDS, CounterFile, CounterSample
from myriad.telemetry.span_io.span_batch import SpanBatch
from myriad.telemetry.span_io.span_records import RECORD

TOKEN = "a" * 32


def client_of(watched: WatchedRun, trace: Ask | None = None) -> TestClient:
    app = build_app(watched, Access(TOKEN), more=more_routes(watched, trace))
    bearer = {"authorization": f"Bearer {TOKEN}"}
    return TestClient(app, base_url="http://127.0.0.1:8765", headers=bearer)


@pytest.fixture
def watched(tmp_path: Path) -> WatchedRun:
    """Four ranks on two nodes; rank 3 takes thrice as long."""
    run = Run(tmp_path / "run")
    run.create_or_resume(load_job("tiny", ["layout.dp=4", "resilience.nodes=2", "train.global_batch=8"]))
    run.append_metrics({"time": 1e9, "step": 1, "loss": 2.0, "tokens": 8})
    files = RunFiles(run)
    store = SpanStore(4, 100)
    records = np.zeros(4, RECORD)
    records["rank"], records["step"] = range(4), 1
    records["start_ns"], records["duration_ns"] = 10**18, [10**8, 10**8, 10**8, 3 * 10**8]
    store.add(SpanBatch(0, 1, ("forward",), records, num_dropped=7))
    return WatchedRun(files, store, lambda: {"effective_ratio": 0.5, "classes": {"training": 1.0}})


def test_prometheus_gets_nodes_from_the_page(watched: WatchedRun) -> None:
    answer = client_of(watched).get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=")
    found = {
        (one.name, one.labels.get("node")): one.value
        for family in text_string_to_metric_families(answer.text)
        for one in family.samples
        if one.labels.get("phase", "forward") == "forward"
    }
    assert found["myriad_spans_dropped_total", None] == 7 and found["myriad_ettr_ratio", None] == 0.5
    assert found["myriad_node_phase_seconds", "0"] == pytest.approx(0.1)
    assert found["myriad_node_phase_seconds", "1"] == pytest.approx(0.2)
    assert found["myriad_node_phase_highest_seconds", "1"] == pytest.approx(0.3)


def test_the_page_can_start_a_trace(watched: WatchedRun) -> None:
    asked: list[Any] = []

    def trace(ranks: Sequence[int], seconds: float, what: str) -> dict[str, Any]:
        asked.append((ranks, seconds, what))
        if what == "flight":
            raise RunFailedError("the driver is not reachable")
        if ranks == [9]:
            raise BadInputError("--ranks", "9", "no rank 9 in this run, which has 0 to 3")
        return {"files": ("traces/a",), "found": (), "problems": ()}

    client = client_of(watched, trace)
    answer = client.post("/api/trace", json={"ranks": [3, 1], "seconds": 5})
    assert (answer.status_code, answer.json()["files"]) == (200, ["traces/a"])
    assert asked == [([3, 1], 5.0, "profile")]
    refused = client.post("/api/trace", json={"ranks": [9], "seconds": 5})
    assert refused.status_code == 400 and "no rank 9" in refused.json()["error"]
    body = {"ranks": [1], "seconds": 5, "what": "flight"}
    assert client.post("/api/trace", json=body).status_code == 502
    for header in ({"origin": "http://evil.example"}, {"host": "evil.example"}):
        assert client.post("/api/trace", json={"ranks": [1], "seconds": 5}, headers=header).status_code == 403
    assert len(asked) == 3 and client.get("/api/trace").status_code == 405


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'{"ranks": [], "seconds": 5}',
        b'{"ranks": "3", "seconds": 5}',
        b'{"ranks": [true], "seconds": 5}',
        b'{"ranks": [-1], "seconds": 5}',
        b'{"ranks": [1], "seconds": 61}',
        b'{"ranks": [1], "seconds": NaN}',
        b'{"ranks": [1], "seconds": 5, "what": "everything"}',
        b'{"ranks": [1], "seconds": 5, "more": "' + b"x" * 2**16 + b'"}',
        b"[" * 60000,
    ],
)
def test_a_wrong_question_reaches_no_run(watched: WatchedRun, body: bytes) -> None:
    def trace(ranks: Sequence[int], seconds: float, what: str) -> dict[str, Any]:
        raise AssertionError("asked")

    answer = client_of(watched, trace).post("/api/trace", content=body)
    assert answer.status_code == 400 and len(answer.json()["error"]) < 300


def test_a_node_counts_as_alive_while_its_agent_sends_heartbeats_though_its_ranks_are_silent(
    watched: WatchedRun,
) -> None:
    """In a hang no rank reports anything, and that does not make a node lost."""
    folder = watched.files.run.counters_path
    folder.mkdir()
    os.mkfifo(folder / "node-0.jsonl")
    numbers = CounterSample(time.time(), {"eth0": (0,) * len(LINK_FIELDS)}, (0, 0), {})
    CounterFile(folder / "node-1.jsonl", {}).append([numbers])
    silent, alive = client_of(watched).get("/api/faults").json()["nodes"]
    assert silent["heartbeat_seconds_ago"] > 1e6 and alive["heartbeat_seconds_ago"] < 60


def test_a_trace_can_be_taken_along_and_nothing_else_can(watched: WatchedRun) -> None:
    """Of the run's folder and this machine nothing is given away by a name."""
    folder = watched.files.run.traces_path
    client = client_of(watched)
    assert client.get("/api/traces/rank-0-step-5.json.gz").status_code == 404
    folder.mkdir()
    (folder / "rank-0-step-5.json.gz").write_bytes(b"packed")
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "inside").mkdir()
    answer = client.get("/api/traces/rank-0-step-5.json.gz")
    assert answer.content == b"packed" and answer.headers["content-type"] == "application/octet-stream"
    assert 'attachment; filename="rank-0-step-5.json.gz"' in answer.headers["content-disposition"]
    for name in ("link", "inside", "..%2Fjob.toml", "../job.toml", "%2Fetc%2Fpasswd", ".", ""):
        assert client.get(f"/api/traces/{name}").status_code == 404


def test_a_server_without_the_run_reports_it(watched: WatchedRun) -> None:
    answer = client_of(watched).post("/api/trace", json={"ranks": [1], "seconds": 5})
    assert answer.status_code == 409
