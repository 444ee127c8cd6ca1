"""If these fail, there is an order of messages, deaths and storage faults in which a step is lost, or one
that is not whole is offered, or the snapshot server of a node ends.

A state machine drives the real server over real sockets and real shared memory, as two ranks of one node do;
the storage is an object store in memory that fails or is full when the machine says so.
"""

import gc
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from myriad.checkpoint.checkpoint_files import constant_manifest, load_model
from myriad.checkpoint.format.dcp_archive import make_stored_shards
from myriad.checkpoint.format.stored_shard import StoredShard
from myriad.checkpoint.format.trainer_state import progress_shard, write_progress
from myriad.checkpoint.snapshots import rank_entry, snapshot_server_process
from myriad.checkpoint.snapshots.snapshot_client import SnapshotClient, ask_server
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder, verify
from myriad.errors import RunFailedError
from myriad.model.tensor_shard import TensorShard
from myriad.wire.framing import FrameKind, pack_header

RANKS, SIZE, SLOTS, EVERY = 2, 64, 4, 3
HOME, OTHER = "flaky://run", "flaky://elsewhere"


class Flaky(MemoryFileSystem):
    """Fails at the write that `left` counts down to, or at every one while it is full."""

    protocol = "flaky"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    left, full = -1, False
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("flaky://", "/"))

    def written(self) -> None:
        type(self).left -= 1
        if self.full or self.left == 0:
            raise OSError(28, "No space left on device")

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode != "wb":
            return super()._open(path, mode, **kwargs)
        self.written()
        self.store[self._strip_protocol(path)] = file = _File(self, self._strip_protocol(path))
        file.write(kwargs.get("data") or b"")
        return file

    def rm_file(self, path: str) -> None:
        self.written() if self.left >= 0 else None
        super().rm_file(path)


class _File(MemoryFile):
    def write(self, content: Any) -> int:
        if len(content):
            self.fs.written()  # what was written before stays: half a file
        return super().write(content)


def pieces_of(rank: int) -> list[StoredShard]:
    part = TensorShard("model.w", (RANKS * SIZE,), (rank * SIZE,), torch.zeros(SIZE, dtype=torch.int64))
    return make_stored_shards([part] if rank else [part, progress_shard({})])


PIECES = [pieces_of(rank) for rank in range(RANKS)]


class Rank:
    """A process of an attempt: joined, until it is gone."""

    def __init__(self, name: str, attempt: int, rank: int, step: int) -> None:
        self.attempt, self.rank, self.step, self.resumed = attempt, rank, step, step
        self.client = SnapshotClient(name, starts=False, log=Path("/dev/null"))
        self.memory: Any = None

    def join(self, resumed: int | None) -> None:
        self.memory = self.client.join(
            PIECES[self.rank], attempt=self.attempt, rank=self.rank, holds=[self.rank], world=RANKS,
            num_local=RANKS, num_slots=SLOTS, resumed=resumed,
        )  # fmt: skip

    def fill(self, slot: int, step: int) -> None:
        for piece in PIECES[self.rank]:
            into = torch.frombuffer(
                self.memory.view(slot, piece.memory_start, piece.num_bytes), dtype=torch.uint8
            )
            if piece.tensor == "progress":
                write_progress(into, {"step": step, "data": {}})
            else:
                into.view(torch.int64).fill_(value(self.attempt, self.rank, step))

    def die(self) -> None:
        self.client._wire.close()
        del self.memory


def _memories() -> set[int]:
    """Inodes of the snapshot memories that this process has."""
    held = set()
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            path = f"/proc/self/fd/{entry}"
            if "myriad-snapshots" in os.readlink(path):
                held.add(os.stat(path).st_ino)
    return held


def value(attempt: int, rank: int, step: int) -> int:
    """What a rank's state is: of another attempt it is another, though of the same step."""
    return attempt * 10**6 + step * 10 + rank


@contextmanager
def quick() -> Iterator[None]:
    """The server's waits, without the waiting."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot_server_process, "_LOST_SECONDS", 0.0)
        patch.setattr(snapshot_server_process, "_BUSY_SECONDS", 0.01)
        patch.setattr(snapshot_server_process, "_POLL_SECONDS", 0.002)
        patch.setattr(rank_entry, "_HASH_SECONDS", 0.001)
        patch.setattr("myriad.checkpoint.snapshots.attempt_snapshots._OTHERS_WAIT_SECONDS", 0.05)
        yield


RULES: dict[str, st.SearchStrategy[dict[str, Any]]] = {}
INVARIANTS: list[Callable[["Machine"], None]] = []


def rule(**arguments: st.SearchStrategy[Any]) -> Callable[[Any], Any]:
    """As `hypothesis.stateful` has it, but all that happens is drawn beforehand: what may happen next never
    depends on how far the server's threads have come."""

    def register(method: Any) -> Any:
        RULES[method.__name__] = st.fixed_dictionaries(arguments)
        return method

    return register


def invariant(method: Any) -> Any:
    """Holds after every rule."""
    INVARIANTS.append(method)
    return method


class Machine:
    """Ranks, storage, and whoever else writes to the socket."""

    def __init__(self) -> None:
        fsspec.register_implementation("flaky", Flaky, clobber=True)
        Flaky.store.clear()
        Flaky.left, Flaky.full = -1, False
        self.folder = TemporaryDirectory(ignore_cleanup_errors=True)
        self.events = Path(self.folder.name) / "events.jsonl"
        self.before = _memories()
        self._new_server()
        self.ranks: list[Rank] = []
        self.zombies: list[Rank] = []
        self.attempt, self.best = 0, 0
        """`best`: the newest step of which every rank has said that it is whole."""
        self.said: dict[tuple[int, int], set[int]] = {}
        self.newest: dict[int, int] = {}
        """By attempt: the last step that still counts, of those that a later attempt has gone back behind."""
        self.saved: set[str] = set()

    def _new_server(self) -> None:
        self.name = f"myriad-keeper-test-{secrets.token_hex(8)}"
        self.server = snapshot_server_process._ServerSockets(self.name)
        self.life = threading.Thread(target=self.server.stay, daemon=True)
        self.life.start()
        self.first: SnapshotClient | None = self._client()
        """Until an attempt is configured: before that the server does not wait for another one."""

    def _close_server(self) -> None:
        """As the end of its process does."""
        self.server.close()
        for attempt in self.server.server._attempts():
            attempt.close()

    def _client(self) -> SnapshotClient:
        return SnapshotClient(self.name, starts=False, log=Path("/dev/null"))

    # What ranks do

    def _start(self, joining: int, zombie: bool, back: int = 0) -> None:
        """``back``: how many steps that could be loaded are not trusted."""
        client = self._client()
        claimed = client.acquire(HOME, self.attempt, 5.0)
        whole = self._whole_in_memory(client.snapshots())
        client._wire.close()
        steps = {*claimed.steps, *whole}
        if claimed.problem is None or self.best in whole:
            assert max(steps, default=0) >= self.best, "a step that every rank had is lost"
        elif not whole:
            return  # neither memory nor storage: the start is refused
        self.attempt = max(claimed.attempt, 1 + max(whole.values(), default=0))
        distrusted = sorted(steps, reverse=True)[:back]
        resumed = max(steps - {*distrusted}, default=None)
        for step in {*claimed.steps} & {*distrusted}:
            CheckpointFolder(HOME).set_aside(step)
        for number in range(self.attempt):
            self.newest[number] = min(resumed or 0, self.newest.get(number, resumed or 0))
        for old in self.ranks:
            self.zombies.append(old) if zombie else old.die()
        made = [Rank(self.name, self.attempt, rank, resumed or 0) for rank in range(RANKS)]
        self.ranks = []
        for one in made:
            if joining >> one.rank & 1:
                one.join(resumed)
                self.ranks.append(one)
            else:
                one.die()
        self.best = resumed or 0

    def _whole_in_memory(self, found: list[dict[str, Any]]) -> dict[int, int]:
        having: dict[tuple[int, int], set[int]] = {}
        for one in found:
            for step in one["steps"]:
                having.setdefault((step, one["attempt"]), set()).add(one["rank"])
        return {step: number for (step, number), ranks in sorted(having.items()) if len(ranks) == RANKS}

    @rule(joining=st.sampled_from([3, 3, 3, 1, 2]), configured=st.sampled_from([True, True, True, False]))
    def start(self, joining: int, configured: bool) -> None:
        if not self.ranks:
            self._start(joining, zombie=False)
            self._configure(configured)

    @rule()
    def start_while_an_attempt_that_was_given_up_is_at_work(self) -> None:
        if self.ranks:
            self._start(3, zombie=True)
            self._configure(True)

    @rule(back=st.integers(1, 3), zombie=st.booleans())
    def start_from_an_older_step(self, back: int, zombie: bool) -> None:
        """As after a spike, or where replicas differed: what is newer never counts again."""
        self._settle()
        if Flaky.full or Flaky.left >= 0:
            return  # what is set aside is renamed
        for old in [] if zombie else self.ranks:
            old.die()
        self.ranks = self.ranks if zombie else []
        self._settle()
        self._start(3, zombie, back)
        self._configure(True)

    def _configure(self, configured: bool) -> None:
        if len(self.ranks) < RANKS or not configured:
            for one in self.ranks:
                one.die()
            self.ranks = []
            return
        message = {
            "events": str(self.events), "linger_seconds": 60.0, "url": HOME, "keep": 2,
            "max_age_seconds": None, "alarm_after": 3, "node": 0, "token": "t", "target_of": {},
            "nodes": [["", 0]], "moved": False, "encrypt": False,
            "constant": constant_manifest(PIECES, {}),
        }  # fmt: skip
        if self.first is not None:
            self.first._wire.close()
            self.first = None
        self.ranks[0].client.configure(message, {"job.toml": b""})

    @rule(torn=st.sampled_from([-1, -1, -1, -1, 0, 1]), unsaid=st.booleans(), wait=st.booleans())
    def step(self, torn: int, unsaid: bool, wait: bool) -> None:
        """All ranks take a snapshot; ``torn``: one dies in the middle of it."""
        self.start(3, True)
        if len(self.ranks) < RANKS:
            return  # no step is done without all of them
        for one in list(self.ranks):
            self._take(one, one.step + 1, (one.step + 1) % EVERY == 0, one.rank == torn, unsaid)
        if wait:
            self._settle()

    @rule(count=st.integers(4, 9))
    def several_steps(self, count: int) -> None:
        for _ in range(count):
            self.step(-1, False, False)

    def _take(self, one: Rank, step: int, durable: bool, torn: bool, unsaid: bool) -> None:
        slot = one.memory.begin(step)
        one.step = step
        if slot is None:
            with suppress(OSError):
                one.client.report_skipped(step)
            return
        if not torn:
            one.fill(slot, step)
            one.memory.end(slot, hold=durable)
            if not (unsaid and not durable):
                one.client.report_complete(slot, step, durable=durable, copies=False)
                told = self.said.setdefault((one.attempt, step), set())
                told.add(one.rank)
                if len(told) == RANKS and one.attempt == self.attempt:
                    self.best = step
            return
        one.die()
        self.ranks.remove(one)

    @rule(index=st.integers(0, RANKS - 1), all_of_them=st.booleans())
    def die(self, index: int, all_of_them: bool) -> None:
        if not self.ranks:
            return
        for one in self.ranks if all_of_them else [self.ranks[index % len(self.ranks)]]:
            one.die()
            self.ranks = [rank for rank in self.ranks if rank is not one]
        self._settle()

    @rule(again=st.booleans(), room=st.booleans())
    def finish(self, again: bool, room: bool) -> None:
        """The last step: stored, and a good-bye; or held."""
        if room:
            Flaky.full, Flaky.left = False, -1
        self.start(3, True)
        if len(self.ranks) < RANKS:
            return
        self._settle()
        step, client = max(one.step for one in self.ranks) + 1, self.ranks[0].client
        for one in self.ranks:
            self._take(one, step, True, False, False)
        if self.best != step:
            return  # no memory was left: a trainer would wait
        outcome = client.wait_stored(step, 10.0)
        assert outcome is not None, "a step that is to be stored has an outcome"
        if outcome.problem and again:
            client.retry_store(step)
            outcome = client.wait_stored(step, 10.0)
            assert outcome is not None
        if outcome.problem:
            for one in self.ranks:
                one.client.hold(step)
                one.die()
        else:
            assert step in CheckpointFolder(HOME).steps()
            for one in self.zombies:
                one.die()
            for one in self.ranks:
                one.client.bye()
            self.ranks, self.zombies = [], []
            self.life.join(10)
            assert not self.life.is_alive(), "all is stored, and nobody is there"
            self._close_server()
            self._new_server()
        self.ranks = []
        self._settle()

    @rule(data=st.integers(0, 3), is_alone=st.booleans())
    def zombie(self, data: int, is_alone: bool) -> None:
        """An attempt that was given up goes on, or ends well as it believes; ``is_alone``: then the present
        one dies, and its state must outlive the good-bye of the other."""
        if not self.zombies:
            self.start(3, True)
            self.start_while_an_attempt_that_was_given_up_is_at_work()
        if not self.zombies:
            return
        one = self.zombies[-1]
        with suppress(OSError, RunFailedError):
            if data < 2:
                self._take(one, one.step + 1, bool(data), False, False)
            elif data == 2:
                one.client.bye()
            else:
                one.client.hold(one.step)
        if data >= 2:
            one.die()
            self.zombies.pop()
        if is_alone and self.ranks:
            self.die(0, all_of_them=True)
            if not self.zombies:
                time.sleep(0.05)  # in which a server that nothing needs would end

    # What storage does

    @rule(writes=st.integers(1, 12))
    def storage_fails_once(self, writes: int) -> None:
        Flaky.left = writes

    @rule(full=st.booleans())
    def storage_is_full(self, full: bool) -> None:
        Flaky.full, Flaky.left = full, -1

    # What a person does

    @rule(known=st.booleans())
    def save(self, known: bool) -> None:
        """To a place of its own each time."""
        url = f"{OTHER}/{len(self.saved)}"
        self.saved.add(url)
        answer = ask_server(self.name, {"op": "save", "url": url})
        if "step" in answer:
            assert not self.ranks and answer["step"] >= self.best
            assert verify(CheckpointFolder(url).at_step(answer["step"])) == []
        else:
            assert answer["problem"] and CheckpointFolder(url).steps() == []

    @rule()
    def release_at_work(self) -> None:
        if self.ranks:
            assert ask_server(self.name, {"op": "release held"})["problem"]

    # What anybody may write to the socket

    @rule(content=st.binary(max_size=40))
    def bytes_that_are_no_message(self, content: bytes) -> None:
        with self._raw() as wire:
            wire.sendall(content)

    @rule(
        frame=st.sampled_from(
            [
                pack_header(FrameKind.MESSAGE, 2**32 - 1),
                pack_header(FrameKind.MESSAGE, 4),
                pack_header(FrameKind.MESSAGE_WITH_PAYLOAD, 4),
                pack_header(FrameKind.MESSAGE_WITH_PAYLOAD, 10) + (2**63).to_bytes(8, "big"),
                pack_header(FrameKind.MESSAGE_WITH_PAYLOAD, 10) + (2**40).to_bytes(8, "big"),
                pack_header(FrameKind.PAYLOAD, 2),
            ]
        ),
        text=st.sampled_from([b"[]", b"nul", b"null", b"{}", b"12", b"\xff\xfe"]),
    )
    def headers_that_lie(self, frame: bytes, text: bytes) -> None:
        with self._raw() as wire:
            wire.sendall(frame + text)

    @rule(
        op=st.sampled_from(
            ["whole", "skipped", "join", "configure", "hello", "open", "wait", "hold", "store again", "bye",
             "save", "claim", "port", "snapshots", "what"]
        ),
        fields=st.dictionaries(
            st.sampled_from(["step", "slot", "attempt", "rank", "pieces", "url", "num_slots", "seconds"]),
            st.sampled_from([None, -1, 0, 10**30, "x", [], [{}], {}, True, "nosuch://x"]),
        ),
    )  # fmt: skip
    def messages_with_wrong_fields(self, op: str, fields: dict[str, Any]) -> None:
        text = json.dumps({"op": op, **fields}).encode()
        with self._raw() as wire:
            wire.sendall(pack_header(FrameKind.MESSAGE, len(text)) + text)
            with suppress(OSError):
                wire.recv(1)

    @rule(slot=st.sampled_from([-1, 0, 99, "x", None]), step=st.sampled_from([-1, 0, 3, 10**12, "x", None]))
    def a_rank_says_what_is_not_so(self, slot: Any, step: Any) -> None:
        """It is as dead as one whose memory is wrong: its connection may be closed, no more."""
        if not self.ranks:
            return
        one = self.ranks[-1]
        with suppress(OSError):
            purpose = {"durable": True, "copies": True}
            one.client._wire.send({"op": "whole", "slot": slot, "step": step, **purpose})
        self.die(len(self.ranks) - 1, all_of_them=True)

    @rule(times=st.integers(1, 5))
    def a_rank_joins_again(self, times: int) -> None:
        """As after a lost connection: its memory begins anew, and the old one is given back."""
        if len(self.ranks) < RANKS:
            return
        self._settle()
        one = self.ranks[1]
        for _ in range(times):
            other = Rank(self.name, one.attempt, one.rank, one.step)
            other.join(one.resumed or None)
            one.die()
            one = self.ranks[1] = other
        stored = CheckpointFolder(HOME).steps()
        self.best = max(
            [*stored, *self._whole_in_memory(ask_server(self.name, {"op": "snapshots"})["snapshots"]), 0]
        )

    @contextmanager
    def _raw(self) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as wire:
            wire.settimeout(0.05)
            wire.connect(f"\0{self.name}")
            with suppress(OSError):
                yield wire

    # What holds

    def _settle(self) -> None:
        """Until nothing is stored."""
        self._until(lambda: self.server.server.is_idle)

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, "it never comes to rest"
            time.sleep(0.001)

    @invariant
    def it_answers(self) -> None:
        assert ask_server(self.name, {"op": "hello"}) == {}, self.life.is_alive()
        assert self.life.is_alive()
        if self.server.server.is_idle:
            assert "snapshots" in ask_server(self.name, {"op": "snapshots"})

    @invariant
    def what_is_offered_is_whole(self) -> None:
        client = self._client()
        for one in client.snapshots():
            for step in one["steps"]:
                assert step <= self.newest.get(one["attempt"], step), "a step that was not trusted is back"
                opened = client.open(one["attempt"], one["rank"], step, copied=one["copied"])
                if opened is None:
                    continue
                values = torch.frombuffer(bytearray(opened.data(0)), dtype=torch.int64)
                assert values.unique().tolist() == [value(one["attempt"], one["rank"], step)]
        client._wire.close()

    @invariant
    def what_is_stored_is_whole(self) -> None:
        if not self.server.server.is_idle:
            return
        for url in (HOME, *self.saved):
            folder = CheckpointFolder(url)
            for step in folder.steps():
                assert verify(folder.at_step(step)) == []
                values = load_model(folder.at_step(step).where)["w"].view(RANKS, SIZE)
                attempts = {
                    (int(part.unique().item()) - 10 * step - rank) / 10**6 for rank, part in enumerate(values)
                }
                assert len(attempts) == 1, f"step {step} is of several attempts: {attempts}"

    @invariant
    def memory_is_bounded(self) -> None:
        """Whatever died and began again: the newest attempt's, one that it went on from, and what a rank that
        was given up still has itself."""
        most = (2 + len({one.attempt for one in self.zombies})) * RANKS
        self._until(lambda: len(_memories() - self.before) <= most or gc.collect() < 0)

    def teardown(self) -> None:
        for one in [*self.ranks, *self.zombies]:
            one.die()
        if self.first is not None:
            self.first._wire.close()
        self._settle()
        with self.server._lock:
            self.server._is_ending = True
        self.life.join(5)
        self._close_server()
        self.folder.cleanup()


SCRIPTS = st.lists(
    st.one_of([st.tuples(st.just(name), arguments) for name, arguments in RULES.items()]),
    min_size=6,
    max_size=30,
)


@pytest.mark.slow
@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(SCRIPTS)
def test_no_order_of_messages_deaths_and_faults_loses_a_step(
    script: list[tuple[str, dict[str, Any]]],
) -> None:
    with quick():
        machine = Machine()
        try:
            for name, arguments in script:
                note(f"{name} {arguments}")
                getattr(machine, name)(**arguments)
                for holds in INVARIANTS:
                    holds(machine)
        finally:
            machine.teardown()
