"""If this fails, a run that was killed leaves spans that cannot be read, or none of what ranks did last."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from same_run import slow_steps
from watching import descendants, process_of, wait_until

from myriad.run import Run
from myriad.telemetry.span_io.span_files import read_span_file, span_files

SMALL = ["--model.layers", "2", "--model.hidden", "32", "--model.sequence", "32", "--train.threads", "1"]
TWO_RANKS = ["--layout.pp", "2", "--layout.micro_batch", "2", "--train.steps", "100000"]
QUICK = ["--telemetry.file_seconds", "1", "--checkpoint.linger_seconds", "1"]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A rank is killed, and begins again; then everything is, at once."""
    run = Run(tmp_path_factory.mktemp("runs") / "killed")
    words = ["train", "tiny", "--run", str(run.path), "--oversubscribe", *SMALL, *TWO_RANKS, *QUICK]
    command = [sys.executable, "-m", "myriad.cli.main", *words]
    around = os.environ | slow_steps(run.path.with_name("faults"), 4.0)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True, env=around) as process:
        try:
            wait_until(lambda: list(run.spans_path.glob("attempt-1-*-2.parquet")), 60)
            os.kill(process_of("rank-1", process.pid), signal.SIGKILL)
            (run.path / "killed").write_text(str(time.time()))
            wait_until(lambda: list(run.spans_path.glob("attempt-2-*.parquet")), 60)
        finally:
            for pid in [process.pid, *descendants(process.pid)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    yield run


def test_every_file_of_a_killed_run_is_whole_and_states_who_did_what(killed: Run) -> None:
    batches = [read_span_file(path) for path in span_files(killed.spans_path)]
    assert {batch.attempt for batch in batches} == {1, 2}
    names = {batch.names[index] for batch in batches for index in set(batch.records["name"])}
    assert {"forward", "backward", "load", "send"} <= names
    for batch in batches:
        assert batch.num_dropped == 0 and batch.clock_error_seconds == 0.0 and batch.node == 0
        assert set(batch.records["rank"]) <= {0, 1}


def test_what_a_rank_did_until_it_was_killed_is_there(killed: Run) -> None:
    restarted = next(event for event in killed.read_events() if event["event"] == "restart")
    ends = [
        (batch.records["start_ns"] + batch.records["duration_ns"]).max() / 1e9
        for batch in (read_span_file(path) for path in span_files(killed.spans_path))
        if batch.attempt == 1
    ]
    at = float((killed.path / "killed").read_text())
    assert at - 1.0 < max(ends) < restarted["time"] + 1.0


def test_sql_reads_spans_beside_metrics_and_events(killed: Run) -> None:
    query = """
        SELECT m.step, m.step_seconds, sum(s.duration_seconds) FILTER (s.class = 'compute') AS compute
        FROM metrics m JOIN spans s ON s.step = m.step AND s.rank = 0 AND s.attempt = 1
        WHERE m.step BETWEEN 3 AND 7 GROUP BY ALL ORDER BY m.step
    """
    command = [sys.executable, "-m", "myriad.cli.main", "spans", str(killed.path), query, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [step for step, _, _ in rows] == [3, 4, 5, 6, 7]
    assert all(0 < compute < step_seconds for _, step_seconds, compute in rows)


def test_arrows_of_a_trace_lead_from_a_send_to_another_rank_that_waited(killed: Run, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    words = ["spans", str(killed.path), "--chrome", str(out), "--steps", "3-4"]
    done = subprocess.run(
        [sys.executable, "-m", "myriad.cli.main", *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    events = json.loads(out.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]

    def around(end: dict[str, Any]) -> set[str]:
        return {
            one["name"]
            for one in slices
            if one["tid"] == end["tid"] and one["ts"] <= end["ts"] <= one["ts"] + one["dur"]
        }

    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins.keys() == ends.keys() and len(begins) > 4
    sends = [number for number, begin in begins.items() if "send" in around(begin)]
    assert sends
    for number, begin in begins.items():
        assert begin["tid"] != ends[number]["tid"] and around(begin) and around(ends[number])
