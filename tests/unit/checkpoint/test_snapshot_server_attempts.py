"""If these fail, a run that died twice loses what it had in memory, or resumes from a state that it had
discarded."""

import json
import socket
import threading
import time
from contextlib import suppress

import pytest
import torch

from myriad.checkpoint.checkpoint_files import constant_manifest
from myriad.checkpoint.format.dcp_archive import make_stored_shards
from myriad.checkpoint.format.stored_shard import encode_shards, snapshot_bytes
from myriad.checkpoint.format.trainer_state import progress_shard, write_progress
from myriad.checkpoint.snapshots.peer_servers import PROTOCOL
from myriad.checkpoint.snapshots.snapshot_server import SnapshotServer
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.wire.socket_channel import SocketChannel

PIECES = make_stored_shards([progress_shard()])
SIZE = snapshot_bytes(PIECES)


def join(node_server, attempt, resumed=None):
    values, envelopes = encode_shards(PIECES)
    message = {
        "attempt": attempt, "rank": 0, "holds": [0], "world": 1, "num_local": 1, "num_slots": 3,
        "pieces": values, "resumed": resumed,
    }  # fmt: skip
    return node_server.join(message, memoryview(envelopes))


def take(node_server, entry, *steps, copies=False):
    for step in steps:
        slot = entry.memory.begin(step)
        write_progress(torch.frombuffer(entry.memory.view(slot, 0, SIZE), dtype=torch.uint8), {"step": step})
        entry.memory.end(slot, hold=False)
        purpose = {"durable": False, "copies": copies, "last": False}
        node_server.on_complete(entry, {"step": step, "slot": slot, **purpose})


def known(node_server):
    return sorted((one.attempt, step) for one in node_server.snapshots() for step in one.steps())


def test_attempts_that_die_before_their_first_snapshot_lose_nothing():
    node_server = SnapshotServer()
    take(node_server, join(node_server, 1), 7, 8)
    for attempt in (2, 3, 4):
        join(node_server, attempt, resumed=8)
        assert (1, 8) in known(node_server)
    entry = join(node_server, 5, resumed=8)
    take(node_server, entry, 9, 10)
    assert known(node_server) == [(5, 9), (5, 10)], "the past goes once the present has two"


def test_snapshots_newer_than_the_one_a_run_continued_from_never_come_back():
    node_server = SnapshotServer()
    zombie = join(node_server, 1)
    take(node_server, zombie, 7, 8, 9)
    take(node_server, join(node_server, 2, resumed=8), 9)
    assert known(node_server) == [(1, 7), (1, 8), (2, 9)]
    take(node_server, zombie, 20)
    assert (1, 20) not in known(node_server)


def test_a_run_that_begins_from_nothing_has_no_past():
    node_server = SnapshotServer()
    take(node_server, join(node_server, 1), 7)
    join(node_server, 2)
    assert known(node_server) == []


def test_ranks_of_an_older_attempt_are_turned_away():
    node_server = SnapshotServer()
    old, _ = join(node_server, 1), join(node_server, 3)
    with pytest.raises(OSError, match="attempt 3 has taken over; this is attempt 2"):
        join(node_server, 2)
    take(node_server, old, 9)
    assert known(node_server) == []


def configure(node_server, attempt, folder, *others):
    """``others``: ports of the other nodes' snapshot servers."""
    message = {
        "events": str(folder / "events.jsonl"), "linger_seconds": 0, "url": str(folder / "checkpoints"),
        "keep": 2, "max_age_seconds": None, "alarm_after": 3, "node": 0, "token": "", "target_of": {},
        "nodes": [["", 0], *(["127.0.0.1", port] for port in others)], "moved": False,
        "encrypt": False, "files": [], "constant": constant_manifest([PIECES], {}),
    }  # fmt: skip
    node_server.configure(attempt, message, memoryview(b""))


def flush(node_server):
    node_server.flush()
    while not node_server.is_idle:
        time.sleep(0.001)


@pytest.mark.parametrize("is_configured", [False, True])
def test_what_a_run_that_dies_twice_had_in_memory_becomes_durable(is_configured, tmp_path):
    """The second start dies before it has a snapshot; then the node may lose its power."""
    node_server, folder = SnapshotServer(), CheckpointFolder(str(tmp_path / "checkpoints"))
    entry = join(node_server, 1)
    configure(node_server, 1, tmp_path)
    take(node_server, entry, 7, 8)
    folder.acquire(2)
    join(node_server, 2, resumed=7)
    if is_configured:
        configure(node_server, 2, tmp_path)
    flush(node_server)
    assert folder.newest() == (7, [])
    manifest = folder.at_step(7).manifest()
    assert manifest.attempt == 2 and manifest.progress == {"step": 7}
    assert (1, 7) in known(node_server), "and the snapshot server is there still"


def test_what_is_stored_for_a_dead_attempt_ends_with_it_and_leaves_the_snapshot_server(tmp_path, monkeypatch):
    """A new attempt comes while the newest snapshot of the one before is about to be stored."""
    node_server, folder = SnapshotServer(), CheckpointFolder(str(tmp_path / "checkpoints"))
    entry = join(node_server, 1)
    configure(node_server, 1, tmp_path)
    take(node_server, entry, 7)
    folder.acquire(1)
    ask, asked, answers = CheckpointFolder.owner, threading.Event(), threading.Event()

    def answer_late(self):
        asked.set()
        assert answers.wait(60)
        return ask(self)

    monkeypatch.setattr(CheckpointFolder, "owner", answer_late)
    node_server.flush()
    assert asked.wait(60), "or the second attempt would store the step as its own"
    join(node_server, 2, resumed=7)
    answers.set()
    while not node_server.is_idle:
        time.sleep(0.001)
    told = (tmp_path / "events.jsonl").read_text()
    assert "another attempt of the run has taken over; this is attempt 1" in told
    assert folder.steps() == [] and (1, 7) in known(node_server)
    with pytest.raises(OSError, match="attempt 2 has taken over; this is attempt 1"):
        join(node_server, 1)


def test_a_dead_attempt_stores_nothing_once_another_has_taken_the_run_over(tmp_path):
    node_server, folder = SnapshotServer(), CheckpointFolder(str(tmp_path / "checkpoints"))
    entry = join(node_server, 1)
    configure(node_server, 1, tmp_path)
    take(node_server, entry, 7)
    folder.acquire(2)  # on another machine
    flush(node_server)
    assert folder.steps() == []
    (told,) = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert told["event"] == "superseded", "an account of the run would count a fault"
    assert "attempt 2 of the run has taken over" in told["problem"]


def test_a_new_snapshot_server_learns_which_attempts_were_over(tmp_path):
    """Its ranks hold snapshots that no rank will request; without memory they would never come to the last
    step."""
    node_server = SnapshotServer()
    entry = join(node_server, 1)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        configure(node_server, 1, tmp_path, nobody.getsockname()[1])
        take(node_server, entry, 7, copies=True)
        while not node_server.is_idle:
            time.sleep(0.001)
        node_server.attempt(1).move(1, *server.getsockname())
        server.settimeout(60)
        with server.accept()[0] as connection:
            wire = SocketChannel(connection)
            wire.accept(PROTOCOL, [b""])
            assert wire.receive()[0] == {"op": "release", "attempt": 1, "step": 7}


def test_a_copy_that_arrived_damaged_keeps_the_hashes_of_what_was_sent():
    """A hash of what arrived would pass it for good."""
    copied, (values, envelopes) = SnapshotServer().copied, encode_shards(PIECES)
    who = {"attempt": 1, "rank": 0, "world": 2, "step": 7}
    copied.begin(who | {"pieces": values}, memoryview(envelopes))
    copied.take(who | {"hashes": ["sent"]}, memoryview(bytes(SIZE)))
    (entry,) = copied.entries()
    assert entry.opened(7)[0]["hashes"] == ["sent"]


def test_a_step_that_a_rank_of_another_node_had_no_memory_for_is_no_fault_until_it_is_a_habit(tmp_path):
    """The next one is copied; a run whose copies are always passed over would be without any."""
    node_server, told = SnapshotServer(), tmp_path / "events.jsonl"
    entry = join(node_server, 1)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer(connection):
            wire = SocketChannel(connection)
            with suppress(OSError):
                wire.accept(PROTOCOL, [b""])
                while message := wire.receive()[0]:
                    wire.send({"has": False} if message["op"] == "copy" else {})

        def accept():
            with suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        configure(node_server, 1, tmp_path, server.getsockname()[1])
        for number in (1, 2, 3):
            assert not told.exists()
            take(node_server, entry, number, copies=True)
            while not node_server.is_idle:
                time.sleep(0.001)
    assert "for 3 steps in a row a rank had no memory left" in told.read_text()


def test_a_rank_that_went_past_a_step_is_not_one_that_died_or_hangs_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr("myriad.checkpoint.snapshots.attempt_snapshots._OTHERS_WAIT_SECONDS", 0.01)
    node_server = SnapshotServer()
    entry = join(node_server, 1)
    configure(node_server, 1, tmp_path)
    take(node_server, entry, 7, 9)
    assert not node_server.attempt(1).copy_local(8)
    with pytest.raises(OSError, match="not all ranks of the node have a snapshot of step 10"):
        node_server.attempt(1).copy_local(10)
    node_server.attempt(1).leave(entry)
    with pytest.raises(OSError, match="not all ranks of the node have a snapshot of step 8"):
        node_server.attempt(1).copy_local(8)
