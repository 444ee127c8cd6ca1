"""If these fail, one query over a run's spans takes the machine's memory, or its cores for ever."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import pytest

from myriad.cli.main import STOP_SECONDS
from myriad.job import load_job
from myriad.run import Run
from myriad.system.processes import process_cpu_ticks
from myriad.telemetry.span_io.span_query import QueryLimits, limited_memory, open_queries


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("runs") / "one")
    run.create_or_resume(load_job("tiny"))
    for step in range(1, 1001):
        run.append_metrics({"step": step, "loss": 1.0 / step})
    return run


def command(run: Run, *words: str) -> list[str]:
    return [sys.executable, "-m", "myriad.cli.main", "spans", str(run.path), *words]


def refused(run: Run, *words: str) -> str:
    """The one line of a query that exceeds a limit."""
    ended = subprocess.run(command(run, *words), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1, ended.stderr
    return ended.stderr


FOREVER = "SELECT count(*) FROM range(1000000000) a, range(1000000000) b"
WITHOUT_END = "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT count(*) FROM t"
ONE_LONG_CALL = "SELECT levenshtein(repeat('ab', 300000), repeat('ba', 300000))"


@pytest.mark.parametrize("query", [FOREVER, WITHOUT_END, ONE_LONG_CALL])
def test_a_query_that_would_run_for_ever_ends_at_its_limit_of_time(run: Run, query: str) -> None:
    began = time.monotonic()
    line = refused(run, query, "--timeout", "1")
    assert "takes longer than --timeout = 1 s" in line
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    "query",
    [
        "SELECT list(range) FROM range(1000000000)",
        "SELECT a.range, b.range FROM range(100000) a, range(100000) b ORDER BY ALL",
        "SELECT repeat('x', 1000000) FROM range(100000)",
        "SELECT range(100000000) FROM range(10)",
        "SELECT string_agg(repeat('x', 1000)) FROM range(100000000)",
    ],
)
def test_a_query_that_would_take_all_memory_ends_at_its_limit_of_memory(run: Run, query: str) -> None:
    words = command(run, query, "--memory", "256 MiB", "--timeout", "60")
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)  # the peak of this process alone
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 2 and line.count("\n") == 1 and "needs more than --memory = 256" in line
    assert usage.ru_maxrss < 2**20, "1 GiB, in KiB"


def test_rows_that_are_collected_count_and_rows_that_stream_do_not(run: Run) -> None:
    many = "SELECT range FROM range(30000000)"
    assert "--memory" in refused(run, many, "--memory", "256 MiB", "--json")
    with subprocess.Popen(
        command(run, "SELECT range FROM range(1000000)", "--csv", "--memory", "256 MiB", "--timeout", "20"),
        stdout=subprocess.PIPE,
        text=True,
    ) as streaming:
        assert streaming.stdout is not None
        assert sum(1 for _ in streaming.stdout) == 1_000_001
    assert streaming.returncode == 0


def test_the_defaults_are_no_obstacle(run: Run) -> None:
    found = subprocess.run(
        command(run, "SELECT count(*), max(step) FROM metrics", "--json"), capture_output=True, timeout=120
    )
    assert json.loads(found.stdout)["rows"] == [[1000, 1000]]


def test_a_reader_that_takes_its_time_does_not_use_up_the_querys(run: Run) -> None:
    with open_queries(run.spans_path, QueryLimits(seconds=2.0), metrics=run.read_metrics()) as queries:
        rows = iter(queries.ask("SELECT range FROM range(10000)").rows)
        next(rows)
        time.sleep(2.5)
        assert sum(1 for _ in rows) == 9999


def test_the_limit_of_memory_ends_with_its_block() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with limited_memory(2**26):
        with pytest.raises(MemoryError):
            bytearray(2**28)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert len(bytearray(2**28)) == 2**28


STOPS_SOON = "from myriad.cli import main; main.STOP_SECONDS = 2.0; main.main()"


def computing(run: Run, query: str, errors: IO[str]) -> "subprocess.Popen[bytes]":
    """A query that has used the processor for a while, after its imports; its process ends two seconds after
    SIGTERM instead of `STOP_SECONDS`."""
    words = [sys.executable, "-c", STOPS_SOON, "spans", str(run.path), query]
    process = subprocess.Popen(words, stderr=errors)
    ticks = 2 * os.sysconf("SC_CLK_TCK")
    while process.poll() is None and process_cpu_ticks(process.pid) < ticks:
        time.sleep(0.05)
    assert process.poll() is None
    return process


def test_ctrl_c_ends_a_query(run: Run, tmp_path: Path) -> None:
    with (tmp_path / "errors").open("w") as errors:
        process = computing(run, FOREVER, errors)
    process.send_signal(signal.SIGINT)
    process.wait(STOP_SECONDS + 10)
    assert process.returncode != 0


def test_sigterm_ends_a_query_inside_a_function_that_looks_at_no_signal(run: Run, tmp_path: Path) -> None:
    with (tmp_path / "errors").open("w") as errors:
        process = computing(run, ONE_LONG_CALL.replace("300000", "900000"), errors)
    process.terminate()
    assert process.wait(STOP_SECONDS + 10) == 130
    assert "interrupted" in (tmp_path / "errors").read_text()
