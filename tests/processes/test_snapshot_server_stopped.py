"""If these fail, a snapshot server that is stopped or hangs ends durability unnoticed, holds ranks up for
ever, or can be kept busy by strangers. The servers are real processes."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from myriad.checkpoint.snapshots import snapshot_client
from myriad.checkpoint.snapshots.server_monitor import ServerEvent, SnapshotServerMonitor
from myriad.checkpoint.snapshots.snapshot_client import SnapshotClient, server_name
from myriad.system.processes import process_state
from myriad.wire.framing import FrameKind, pack_header
from myriad.wire.socket_channel import Closed

SECONDS = 60.0
"""Of patience with this machine."""


@pytest.fixture
def client(tmp_path: Path) -> Iterator[SnapshotClient]:
    made = SnapshotClient(server_name(tmp_path), starts=True, log=tmp_path / "keeper.log")
    yield made
    with suppress(OSError):
        os.kill(pid_of(made), signal.SIGKILL)


def pid_of(client: SnapshotClient) -> int:
    return client._connection.process.pid


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    while any(process_state(int(thread.name)) != "T" for thread in threads.iterdir()):
        time.sleep(0.01)


def until_seen(watch: SnapshotServerMonitor) -> ServerEvent:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if (found := watch.poll()) is not None:
            return found
        time.sleep(0.1)
    raise AssertionError("not noticed")


def test_a_server_that_is_killed_while_it_starts_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, killed = snapshot_client.start_snapshot_server, list[int]()

    def start_and_kill_the_first(name: str, log: Path) -> "subprocess.Popen[bytes]":
        process = start(name, log)
        if not killed:
            process.kill()
            process.wait()
            killed.append(process.pid)
        return process

    monkeypatch.setattr(snapshot_client, "start_snapshot_server", start_and_kill_the_first)
    client = SnapshotClient(server_name(tmp_path), starts=True, log=tmp_path / "keeper.log")
    assert client.is_alive() and killed != [pid_of(client)]
    os.kill(pid_of(client), signal.SIGKILL)


def test_a_stopped_server_is_continued_and_killed_when_it_is_stopped_again(
    client: SnapshotClient, tmp_path: Path
) -> None:
    watch, pid = SnapshotServerMonitor(server_name(tmp_path), timeout_scale=0.3), pid_of(client)
    for _ in range(3):
        assert watch.poll() is None
    stop(pid)
    found = until_seen(watch)
    assert not found.killed and "stopped (SIGSTOP)" in found.problem
    client.check()
    assert process_state(pid) != "T"
    while watch.poll() is not None:
        pass
    stop(pid)
    assert until_seen(watch).killed
    with pytest.raises(Closed):
        client.check()
    client.reconnect()
    assert pid_of(client) != pid


def test_a_server_that_dies_before_a_rank_has_joined_is_replaced(
    client: SnapshotClient, tmp_path: Path
) -> None:
    """As in the middle of a claim: the rank that asks must not end with it."""
    for ask in (lambda: client.acquire(str(tmp_path / "checkpoints"), 3, 60.0).attempt, client.snapshots):
        pid = pid_of(client)
        os.kill(pid, signal.SIGKILL)
        assert ask() in (4, [])
        assert pid_of(client) != pid


def test_a_hung_server_is_killed(client: SnapshotClient, tmp_path: Path) -> None:
    pid = pid_of(client)
    freeze = [sys.executable, "-m", "myriad.faults.freeze", str(pid), str(os.getpid())]
    with subprocess.Popen(freeze) as freezer:
        while process_state(pid) != "t":
            assert freezer.poll() is None, "this machine does not let a process be traced"
            time.sleep(0.01)
        found = until_seen(SnapshotServerMonitor(server_name(tmp_path), timeout_scale=0.3))
        assert found.killed and "has not answered" in found.problem
        with pytest.raises(Closed):
            client.check()


def test_a_request_to_a_stopped_server_is_answered_without_a_node_agent(client: SnapshotClient) -> None:
    stop(pid_of(client))
    client.check()
    stop(pid_of(client))
    with pytest.raises(Closed):
        client.check()
    assert "stopped (SIGSTOP) again" in client.why_killed


def test_an_agent_that_asks_does_not_keep_a_server_alive(client: SnapshotClient, tmp_path: Path) -> None:
    watch = SnapshotServerMonitor(server_name(tmp_path))
    watch.poll()
    client.join([], attempt=1, rank=0, holds=[0], world=1, num_local=1, num_slots=2)
    client.bye()
    deadline = time.monotonic() + SECONDS
    while process_state(pid_of(client)) not in "?Z":
        assert time.monotonic() < deadline, "it stays"
        watch.poll()
        time.sleep(0.02)


def test_strangers_hold_neither_connections_nor_memory_of_a_server(client: SnapshotClient) -> None:
    address = "127.0.0.1", client.port("127.0.0.1")
    held = [socket.create_connection(address) for _ in range(400)]
    for one in held[300:]:
        with suppress(OSError):
            one.sendall(pack_header(FrameKind.ANSWER, 2**31))
    for one in (*held[:100], *held[300:]):  # the oldest made room; what is too long is refused
        one.settimeout(SECONDS)
        with suppress(ConnectionError):
            while one.recv(100):  # the challenge
                pass
    client.check()
    assert len(os.listdir(f"/proc/{pid_of(client)}/fd")) < 300
    for one in held:
        one.close()
