"""If these fail, anyone who reaches a node's snapshot server takes its memory, and the snapshots with it."""

import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from myriad.checkpoint.wire import Wire

SECONDS = 60.0
"""Of patience with this machine; nothing here takes one."""
IDLE, ALLOWED = 150, 64


@pytest.fixture
def server() -> Iterator[tuple[int, int]]:
    """The TCP port and the process id of a snapshot server with one local client."""
    name = f"myriad-test-{id(object())}-{__name__}"
    process = subprocess.Popen([sys.executable, "-m", "myriad.checkpoint.keeper_process", name])
    try:
        with closing(Wire(_connect_local(name, process))) as client:
            client.send({"op": "port"})
            yield client.receive()[0]["port"], process.pid
    finally:
        process.kill()
        process.wait()


def _connect_local(name: str, process: subprocess.Popen[bytes]) -> socket.socket:
    while process.poll() is None:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(SECONDS)
        try:
            connection.connect(f"\0{name}")
        except OSError:
            connection.close()
        else:
            return connection
    raise AssertionError("the snapshot server has ended")


def _connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=SECONDS)


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_a_length_that_is_only_claimed_takes_no_memory(server: tuple[int, int]) -> None:
    port, pid = server
    before = _resident_bytes(pid)
    with _connect(port) as stranger:
        stranger.sendall(struct.pack("<IQ", 3 * 2**30, 0))
        assert stranger.recv(1) == b"", "the server closes the connection without reading more"
    assert _resident_bytes(pid) - before < 2**26


@pytest.mark.parametrize("text", [b"[]", b"{}", b"no", b'{"op": "keeper"}', b'{"op": "keeper", "token": []}'])
def test_a_first_message_without_the_token_ends_the_connection(server: tuple[int, int], text: bytes) -> None:
    with _connect(server[0]) as stranger:
        stranger.sendall(struct.pack("<IQ", len(text), 0) + text)
        assert stranger.recv(1) == b""


def test_idle_connections_are_bounded_and_the_oldest_are_closed(server: tuple[int, int]) -> None:
    strangers = [_connect(server[0]) for _ in range(IDLE)]
    try:
        for oldest in strangers[: IDLE - ALLOWED]:
            assert oldest.recv(1) == b""
        strangers[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            strangers[-1].recv(1)
    finally:
        for stranger in strangers:
            stranger.close()
