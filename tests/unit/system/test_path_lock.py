"""The lock of a path. If it fails, two launchers train one run, or another user keeps a run from starting."""

import hashlib
import multiprocessing
import os
import signal
import socket
from pathlib import Path

import pytest

from myriad.system.path_lock import PathLock


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "myriad"


def test_a_path_has_one_owner_at_a_time(tmp_path: Path, state: Path) -> None:
    lock, other = PathLock(tmp_path / "run"), PathLock(tmp_path / "other")
    with pytest.raises(BlockingIOError):
        PathLock(tmp_path / "x" / ".." / "run")
    assert {path.stat().st_mode & 0o777 for path in (state, state / "locks")} == {0o700}
    assert [path.stat().st_mode & 0o777 for path in (state / "locks").iterdir()] == [0o600, 0o600]
    lock.close()
    PathLock(tmp_path / "run").close()
    other.close()
    assert list((state / "locks").iterdir()) == []


def hold(path: Path, ready: "multiprocessing.synchronize.Event") -> None:
    lock = PathLock(path)
    ready.set()
    signal.pause()
    lock.close()


def test_a_killed_owner_leaves_no_lock(tmp_path: Path, state: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    owner = context.Process(target=hold, args=(tmp_path, ready), daemon=True)
    owner.start()
    assert ready.wait(30)
    with pytest.raises(BlockingIOError):
        PathLock(tmp_path)
    owner.kill()
    owner.join()
    assert len(list((state / "locks").iterdir())) == 1
    PathLock(tmp_path).close()
    assert list((state / "locks").iterdir()) == []


def take_turns(path: Path, log: Path, rounds: int) -> None:
    while rounds:
        try:
            lock = PathLock(path)
        except BlockingIOError:
            continue
        with log.open("a") as file:
            file.write(f"{os.getpid()} in\n")
            file.flush()
            file.write(f"{os.getpid()} out\n")
        lock.close()
        rounds -= 1


def test_no_two_processes_have_it_while_files_come_and_go(tmp_path: Path) -> None:
    context, log = multiprocessing.get_context("fork"), tmp_path / "log"
    owners = [context.Process(target=take_turns, args=(tmp_path, log, 100)) for _ in range(3)]
    for owner in owners:
        owner.start()
    for owner in owners:
        owner.join(120)
    lines = log.read_text().splitlines()
    assert len(lines) == 600
    for entered, left in zip(lines[::2], lines[1::2], strict=True):
        assert entered.replace(" in", " out") == left


def test_a_socket_that_another_user_binds_keeps_nobody_out(tmp_path: Path) -> None:
    """The lock was an abstract socket whose name followed from the path and the user."""
    name = hashlib.blake2s(f"{tmp_path.resolve()}:{os.getuid()}".encode(), digest_size=12).hexdigest()
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(f"\0myriad-run-{name}")
        PathLock(tmp_path).close()


def test_a_folder_that_others_can_write_is_not_used(
    tmp_path: Path, state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state.mkdir(parents=True)
    state.chmod(0o777)
    PathLock(tmp_path).close()
    assert "is not locked" in caplog.text and not (state / "locks").exists()
