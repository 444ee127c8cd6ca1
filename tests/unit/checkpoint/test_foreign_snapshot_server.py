"""Another user of the machine who takes the name of a run's snapshot server must get no weights, give none,
and not hold up the run."""

import os
import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from myriad.checkpoint.snapshots.server_socket import ForeignServerError
from myriad.checkpoint.snapshots.server_start import leave_taken_names, node_server_name, server_name
from myriad.checkpoint.snapshots.snapshot_client import SnapshotClient, ask_server

NOBODY = 65534


@contextmanager
def another_user_listens(name: str, *, answers: bool = True) -> Iterator[int]:
    """Yields a pipe from which everything can be read that the other user's process receives."""
    received, gives = os.pipe()
    ready, tells = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.setuid(NOBODY)
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(f"\0{name}")
            if answers:
                listener.listen(8)
            os.write(tells, b"!")
            while not answers:
                signal.pause()
            while True:
                connection, _ = listener.accept()
                connection.settimeout(1)
                try:
                    while data := connection.recv(1000):
                        os.write(gives, data)
                except TimeoutError:
                    pass
        finally:
            os._exit(0)
    os.close(gives)
    try:
        assert os.read(ready, 1) == b"!"
        yield received
    finally:
        os.kill(process, 9)
        os.waitpid(process, 0)
        for descriptor in (received, ready, tells):
            os.close(descriptor)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_ranks_neither_send_to_nor_receive_from_a_server_of_another_user(tmp_path: Path) -> None:
    name = server_name(tmp_path)
    with another_user_listens(name) as received:
        with pytest.raises(ForeignServerError, match=f"user {NOBODY} of this machine listens") as refused:
            SnapshotClient(name, starts=True, log=tmp_path / "log")
        assert "\n" not in str(refused.value)
        assert ask_server(name, {"op": "snapshots"}, 1.0) == {}
        os.set_blocking(received, False)
        with pytest.raises(BlockingIOError):
            os.read(received, 1)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
@pytest.mark.parametrize("answers", [True, False])
def test_a_start_leaves_a_name_that_another_user_took_after_the_server_had_ended(
    tmp_path: Path, answers: bool
) -> None:
    name = node_server_name(tmp_path, 0)
    with another_user_listens(name, answers=answers):
        leave_taken_names(tmp_path)
        assert node_server_name(tmp_path, 0) != name
    assert stat.S_IMODE((tmp_path / "id").stat().st_mode) == 0o600


def test_a_start_keeps_the_name_of_its_own_server(tmp_path: Path) -> None:
    name = node_server_name(tmp_path, 0)
    leave_taken_names(tmp_path)
    with socket.socket(socket.AF_UNIX) as own:
        own.bind(f"\0{name}")
        own.listen(8)
        leave_taken_names(tmp_path)
    assert node_server_name(tmp_path, 0) == name


def test_the_name_of_a_server_rests_on_what_only_its_user_can_read(tmp_path: Path) -> None:
    name = node_server_name(tmp_path, 0)
    mode = (tmp_path / "id").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600
    (tmp_path / "id").write_text("another")
    assert node_server_name(tmp_path, 0) != name
