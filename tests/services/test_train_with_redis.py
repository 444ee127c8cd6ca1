"""`myriad train` with its ranks meeting in Redis: what the person sees when Redis is not there, or dies."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import free_port
from same_run import slow_steps
from tiny_corpora import make_corpus

ONCE = ("--resilience.restarts", "0")
"""Each attempt waits some seconds for Redis."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"), count=300)


def start_training(
    folder: Path, corpus: Path, store: str, *more: str, environment: dict[str, str] | None = None
) -> "subprocess.Popen[str]":
    keys = {
        "data.corpus": corpus, "model.layers": 2, "model.hidden": 32, "model.sequence": 32,
        "train.threads": 1, "layout.dp": 2, "comm.store": store,
    }  # fmt: skip
    options = [part for key, value in keys.items() for part in (f"--{key}", str(value))]
    train = [sys.executable, "-m", "myriad.cli.main", "train", "tiny", "--run", str(folder)]
    command = [*train, "--oversubscribe", *options, *more]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, cwd=folder.parent, env=os.environ | (environment or {})
    )


def ranks_alive(run: Path) -> list[str]:
    """Processes of this run."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(run).encode() in command and int(path.name) != os.getpid():
            found.append(path.name)
    return found


def assert_one_line(process: "subprocess.Popen[str]", run: Path, code: int, *expected: str) -> None:
    _, errors = process.communicate(timeout=200)
    assert process.returncode == code, errors
    [line] = errors.strip().splitlines()
    assert all(text in line for text in expected), line
    assert ranks_alive(run) == []


def test_redis_that_is_not_there_ends_the_run_with_one_line(tmp_path, corpus):
    port = free_port()
    process = start_training(tmp_path / "run", corpus, f"redis://127.0.0.1:{port}", *ONCE)
    assert_one_line(process, tmp_path / "run", 1, f"Redis at 127.0.0.1:{port} does not answer", "refused")


def test_redis_that_dies_while_ranks_meet_ends_the_run_with_one_line(tmp_path, corpus, server):
    server.client.execute_command("CLIENT", "PAUSE", 300_000, "WRITE")
    process = start_training(tmp_path / "run", corpus, server.url, *ONCE)
    monitor = server.client
    while sum(client["cmd"] == "set" for client in monitor.client_list()) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    server.kill()
    assert_one_line(process, tmp_path / "run", 1, f"Redis at 127.0.0.1:{server.port} does not answer")


def test_a_run_whose_ranks_have_met_does_not_need_redis_any_more(tmp_path, corpus, server):
    """Nor does its driver, if there is no standby. Steps are slow: the driver sees it before the last."""
    more = ("--train.steps", "24", "--checkpoint.every", "10", "--resilience.journal", server.url)
    slow = slow_steps(tmp_path / "faults", 20.0)
    process = start_training(tmp_path / "run", corpus, server.url, *more, environment=slow)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    server.kill()
    assert process.wait(timeout=200) == 0, process.communicate()
    process.communicate()
    assert "is away, and training goes on" in (tmp_path / "run" / "logs" / "driver.log").read_text()
    assert ranks_alive(tmp_path / "run") == []


def test_a_store_that_cannot_be_is_refused_before_a_rank_starts(tmp_path, corpus):
    process = start_training(tmp_path / "run", corpus, "redis://somewhere")
    assert_one_line(
        process, tmp_path / "run", 2, 'comm.store = "redis://somewhere": tcp, or redis[s]://[USER@]HOST:PORT'
    )
    assert not (tmp_path / "run").exists()
