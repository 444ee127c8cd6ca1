"""What cannot stand by, or be written in Redis, is reported in one line before anything starts. If these
fail, a person believes in a second driver that there is not."""

import importlib.util
import socket
from pathlib import Path

import pytest

from myriad.cli.train.start_checks import check_standby_options
from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.launchers.run_start import check_journal
from myriad.run import Run
from myriad.wire.run_secret import run_secret

NOBODY = "redis://127.0.0.1:1/0"
"""At that port nothing listens."""
JOINED = ["resilience.engine=join", f"resilience.journal={NOBODY}"]

needs_redis = pytest.mark.skipif(
    importlib.util.find_spec("redis") is None,
    reason="needs the package redis (pip install 'myriad-train[redis]')",
)


def refusal(path: Path, keys: list[str], *overrides: str) -> BadInputError:
    run = Run(path)
    run.create_or_resume(load_job("tiny", keys))
    run_secret(run.path / "secret")
    with pytest.raises(BadInputError) as refused:
        check_standby_options(str(path), run, run.job(), list(overrides))
    return refused.value


@needs_redis
@pytest.mark.parametrize(
    ("keys", "key", "allowed"),
    [
        ([f"resilience.journal={NOBODY}"], "--standby", "needs the engine join"),
        (["resilience.engine=slurm", f"resilience.journal={NOBODY}"], "--standby", "needs the engine join"),
        (["resilience.engine=join"], "--standby", "needs resilience.journal = redis://HOST:PORT"),
        (JOINED, "resilience.journal", "must be a Redis server that answers"),
        ([*JOINED, "resilience.listen=192.0.2.1"], "resilience.listen", "no address of this machine"),
    ],
)
def test_a_standby_that_cannot_start_gets_the_reason(
    tmp_path: Path, keys: list[str], key: str, allowed: str
) -> None:
    told = refusal(tmp_path / "run", keys)
    assert told.key == key and allowed in told.allowed and "\n" not in str(told)


@needs_redis
def test_another_job_than_the_run_s_cannot_be_stood_by_for(tmp_path: Path) -> None:
    assert refusal(tmp_path / "run", JOINED, "train.steps=7").key == "train.steps"
    job = load_job("tiny", JOINED)
    with pytest.raises(BadInputError, match="must be the folder of a run"):
        check_standby_options("tiny", Run(tmp_path / "run"), job, [])


@needs_redis
def test_an_address_that_is_in_use_is_refused_where_one_would_stand_by(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"resilience.listen=127.0.0.1:{taken.getsockname()[1]}"
        assert "another program listens" in refusal(tmp_path / "run", [*JOINED, listen]).allowed


@needs_redis
def test_redis_that_does_not_answer_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    with pytest.raises(BadInputError, match=r"resilience.journal = .*must be a Redis server that answers"):
        check_journal(run, load_job("tiny", JOINED).resilience)
    assert not run.path.exists()


@pytest.mark.parametrize("journal", ["", "redis", "redis://", "redis://host", "http://host:6379", "folder"])
def test_a_journal_that_cannot_be_is_refused_with_the_job(journal: str) -> None:
    with pytest.raises(BadInputError, match=r"file, or redis\[s\]://\[USER@\]HOST:PORT\[/DB\]"):
        load_job("tiny", [f'resilience.journal="{journal}"'])


def test_without_the_package_a_journal_in_redis_is_refused_with_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInputError, match=r"pip install 'myriad-train\[redis\]'"):
        load_job("tiny", [f'resilience.journal="{NOBODY}"'])
