"""`myriad join` and the keys of several nodes, as a user meets them: what cannot be is told in one line,
before anything starts."""

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from myriad.job import load_job
from myriad.run import Run

Myriad = Callable[..., tuple[int, str]]


@pytest.fixture
def myriad(tmp_path: Path) -> Myriad:
    """Runs a command; gives its exit code and what it wrote to standard error."""

    def call(*arguments: object) -> tuple[int, str]:
        command = [sys.executable, "-m", "myriad.cli.main", *map(str, arguments)]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        return ended.returncode, ended.stderr

    return call


def make_run(path: Path) -> Run:
    run = Run(path)
    run.create_or_resume(load_job("tiny", ["layout.dp=2", "resilience.nodes=2"]))
    return run


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["--resilience.engine", "moon"], "resilience.engine"),
        (["--layout.dp", "2", "--resilience.nodes", "3"], "must divide the 2 ranks: one of 1, 2"),
        (["--resilience.listen", "192.0.2.1"], "no address of this machine"),
        (["--resilience.engine", "join", "--resilience.spares", "1"], "resilience.spares"),
    ],
)
def test_nodes_that_cannot_be_started_are_refused_and_nothing_is(
    myriad: Myriad, tmp_path: Path, keys: list[str], said: str
) -> None:
    code, error = myriad("train", "tiny", "--oversubscribe", *keys)
    assert code == 2 and error.count("\n") == 1 and said in error
    assert not (tmp_path / "runs").exists()


def test_a_port_that_is_in_use_is_refused(myriad: Myriad, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, error = myriad("train", "tiny", "--resilience.listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert (code, error.count("\n")) == (2, 1) and "another program listens" in error
    assert not (tmp_path / "runs").exists()


def test_there_is_nothing_to_join_without_a_run_or_a_driver(myriad: Myriad, tmp_path: Path) -> None:
    code, error = myriad("join", tmp_path / "nowhere")
    assert (code, error.count("\n")) == (2, 1) and "no run here" in error
    run = make_run(tmp_path / "run")
    code, error = myriad("join", run.path, "--wait", 0.5)
    assert (code, error.count("\n")) == (2, 1) and "no driver has begun it" in error
    assert not (run.path / "secret").exists(), "who joins makes no secret"


def test_a_secret_that_cannot_be_read_is_reported_at_once(myriad: Myriad, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run.path / "secret").mkdir()  # root may read any file
    code, error = myriad("join", run.path)
    assert (code, error.count("\n")) == (2, 1) and "secret cannot be read" in error
