"""kill -9 at random instants of saving and loading, and whether the next start has what was promised.

    life       one run folder: attempts one after the other, each killed, each the next one's test attempt
    one or two forked ranks: load, check every byte, then steps with snapshots and durable saves promise
    the newest durable step that was committed; while all snapshot servers live, also the newest step that
               all ranks had whole in memory; when one of two nodes is lost, the newest that the other has
               with its copies

What is killed: a rank, all ranks, the snapshot server, all of it at once (as when the power fails), one of
two nodes."""

import contextlib
import mmap
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from fault_state import State, open_session, warm_up
from myriad.checkpoint.config import CheckpointConfig
from myriad.checkpoint.session import CheckpointSession
from myriad.checkpoint.snapshots.snapshot_client import list_in_memory, server_name
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder

__all__ = ["KILLS", "Outcome", "kill_often"]

KILLS = ("rank", "all ranks", "keeper", "power", "stored, then power", "node")
SCALE = 3
"""Size of the state: about 300 KB."""
_START_SECONDS, _KILLS_OF_A_LIFE = 60.0, 10
_MIDST = ("loading", "copying", "storing", "committing", "pruning", "else")


@dataclass
class Outcome:
    """What came of one kind of damage."""

    tried: int = 0
    wrong: int = 0
    recovered: int = 0
    lost: int = 0
    notes: list[str] = field(default_factory=list)

    def add(self, other: "Outcome") -> None:
        """Both."""
        for name in ("tried", "wrong", "recovered", "lost"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.notes += other.notes


class _Phase(IntEnum):
    STARTING, LOADING, LOADED, COMPUTING, COPYING = range(5)


class _Board:
    """What the ranks of one attempt have come to, in memory that outlives them."""

    def __init__(self, world: int) -> None:
        words = np.frombuffer(mmap.mmap(-1, 4096), np.int64)
        self.phase, self.loaded, self.wrong, self.whole = words[: 4 * world].reshape(4, world)
        self.loaded[:] = self.whole[:] = -1

    def has_loaded(self) -> bool:
        return bool((self.phase >= _Phase.LOADED).all())


@dataclass(frozen=True)
class Life:
    """One run."""

    path: Path
    every: int
    two_nodes: bool
    copies_every: int = 2

    @property
    def folder(self) -> CheckpointFolder:
        return CheckpointFolder(self.path / "checkpoints")

    def durable(self) -> int:
        """The newest committed step."""
        return max(self.folder.steps(), default=-1)

    def snapshot_servers(self) -> list[tuple[int, int]]:
        """Node and process of each snapshot server."""
        names = {server_name(self.path, node): node or 0 for node in (None, 0, 1)}
        return sorted((names[name], pid) for name, pid in _server_processes() if name in names)


def _server_processes() -> list[tuple[str, int]]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                words = Path(f"/proc/{entry}/cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if "myriad.checkpoint.snapshots.snapshot_server_process" in words:
                found.append(
                    (
                        words[words.index("myriad.checkpoint.snapshots.snapshot_server_process") + 1],
                        int(entry),
                    )
                )
    return found


# One rank


def _train(life: Life, rank: int, world: int, meeting: Path, board: _Board) -> None:
    group = None
    if world > 1:
        dist.init_process_group(
            "gloo", f"file://{meeting}", timedelta(seconds=30), rank=rank, world_size=world
        )
        group = dist.group.WORLD
    config = CheckpointConfig(every=life.every, copies_every=life.copies_every)
    board.phase[rank] = _Phase.LOADING
    session = open_session(life.path, config, rank, world, 0 if life.two_nodes else rank, group)
    session.acquire(0)
    state = State(SCALE)
    state.forget()
    loaded = session.resume(state.all_shards())
    step = loaded.step if loaded else 0
    if loaded:
        board.wrong[rank] = bool(state.wrong(step) or loaded.progress["step"] != step)
    board.loaded[rank] = step
    session.begin(state.shards(rank, world))
    board.phase[rank] = _Phase.LOADED
    _steps(session, state, step, rank, group, board)


def _steps(
    session: CheckpointSession,
    state: State,
    step: int,
    rank: int,
    group: dist.ProcessGroup | None,
    board: _Board,
) -> None:
    skipped = 0
    while True:
        time.sleep(0.002)  # forward and backward
        session.settle()
        snapshots = session._snapshots
        assert snapshots is not None
        if board.phase[rank] == _Phase.COPYING and snapshots.skipped == skipped:
            board.whole[rank] = step
        skipped = snapshots.skipped
        board.phase[rank] = _Phase.COMPUTING
        if group is not None:
            dist.all_reduce(torch.zeros(1), group=group)  # the norm: no rank updates before all have settled
        step += 1
        state.become(step)
        if purpose := session.purpose(step, is_last=False, due=False):
            board.phase[rank] = _Phase.COPYING
            session.take(step, {"step": step}, purpose)


def _fork(life: Life, rank: int, world: int, meeting: Path, board: _Board) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    try:
        _train(life, rank, world, meeting, board)
    except BaseException:
        (life.path / f"error-{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(3)


class _Attempt:
    """One start of all ranks."""

    def __init__(self, life: Life, number: int, world: int) -> None:
        self.life, self.board = life, _Board(world)
        meeting = life.path / f"meeting-{number}"
        self.pids = [_fork(life, rank, world, meeting, self.board) for rank in range(world)]

    def wait(self, done: Callable[[], bool]) -> bool:
        """Whether it came to that with every rank alive."""
        deadline = time.monotonic() + _START_SECONDS
        while not done():
            if time.monotonic() > deadline or any(_ended(pid) for pid in self.pids):
                return False
            time.sleep(0.001)
        return True

    def end(self) -> None:
        """End all ranks, as a launcher does."""
        for pid in self.pids:
            _kill(pid)
        for pid in self.pids:
            os.waitpid(pid, 0)


def _ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


# One life


class _Trial:
    """Kills the attempts of one life, one after the other."""

    def __init__(self, life: Life, draw: random.Random, outcomes: dict[str, Outcome]) -> None:
        self.life, self._draw, self._outcomes = life, draw, outcomes
        self._number, self._pending = 0, list[str]()
        self._in_memory = -1
        self.midst = dict.fromkeys(_MIDST, 0)

    def kill_once(self, what: str) -> None:
        """Starts an attempt, and kills."""
        attempt = self._start()
        while_loading = self._draw.random() < 0.25
        if while_loading:
            attempt.wait(lambda: bool((attempt.board.phase >= _Phase.LOADING).all()))
            time.sleep(self._draw.uniform(0, 0.08))
        elif self._has_come_up(attempt):
            time.sleep(self._draw.uniform(0, 0.35))
        if any(_ended(pid) for pid in attempt.pids):
            self._judge_errors(what)
        self._kill(what, attempt)

    def _judge_errors(self, what: str) -> None:
        """A rank has ended before anybody killed it."""
        for path in self.life.path.glob("error-*"):
            self._outcomes[what].notes.append(f"ended by itself: {path.read_text().splitlines()[-1]}")
            self._outcomes[what].lost += 1

    def _start(self) -> _Attempt:
        self._number += 1
        return _Attempt(self.life, self._number, 2 if self.life.two_nodes else self._draw.choice((1, 2)))

    def _has_come_up(self, attempt: _Attempt) -> bool:
        """Whether it has; judges what the kills before it have left."""
        if not attempt.wait(attempt.board.has_loaded):
            errors = [path.read_text().splitlines()[-1] for path in self.life.path.glob("error-*")]
            self._judge("lost", f"no start: {errors}")
            return False
        return self._judge_loaded(attempt.board)

    def _judge_loaded(self, board: _Board) -> bool:
        loaded, promised = int(board.loaded.min()), max(self._promised, self._in_memory, 0)
        if board.wrong.any() or (board.loaded != loaded).any():
            self._judge("wrong", f"step {loaded} is not the state of that step")
        elif loaded < promised:
            self._judge("lost", f"step {promised} was promised, {loaded} was found")
        else:
            self._judge("recovered", "")
        return True

    def _judge(self, verdict: str, note: str) -> None:
        for what in self._pending:
            outcome = self._outcomes[what]
            setattr(outcome, verdict, getattr(outcome, verdict) + 1)
            if note:
                logs = [path.read_text()[-2000:] for path in self.life.path.glob("keeper-*.log")]
                events = (self.life.path / "events.jsonl").read_text().splitlines()[-4:]
                outcome.notes.append(f"{what} ({self.life}, attempt {self._number}): {note} {events} {logs}")
        self._pending = []

    _promised = -1

    def _kill(self, what: str, attempt: _Attempt) -> None:
        """``what``: one of `KILLS`."""
        snapshot_servers = self.life.snapshot_servers()
        self.midst[self._doing(attempt)] += 1
        if attempt.board.has_loaded() and self._pending:
            self._judge_loaded(attempt.board)
        self._promised = max(self._promised, self.life.durable())
        self._in_memory = max(self._in_memory, int(attempt.board.whole.min()))
        self._outcomes[what].tried += 1
        self._pending.append(what)
        victims = self._victims(what, attempt, snapshot_servers)
        survives = self._whole_at_survivor(snapshot_servers, victims) if what == "node" else -1
        for pid in victims:
            _kill(pid)
        if what == "keeper":
            time.sleep(self._draw.uniform(0, 1.0))  # training continues with a new one
            self._promised = max(self._promised, self.life.durable())
        elif what not in ("all ranks", "power"):
            time.sleep(self._draw.uniform(0, 0.25))  # until the launcher notices
        attempt.end()
        for error in self.life.path.glob("error-*"):
            error.unlink()
        if what == "stored, then power":
            self._await_stored()
            for _, pid in snapshot_servers:
                _kill(pid)
            victims += [pid for _, pid in snapshot_servers]
        if any(pid in victims for _, pid in snapshot_servers):
            self._in_memory = survives
            _await_gone([pid for _, pid in snapshot_servers if pid in victims])

    def _whole_at_survivor(self, snapshot_servers: list[tuple[int, int]], victims: list[int]) -> int:
        """The newest step of which a snapshot server that stays has a snapshot or a copy of every rank. On a
        machine that is overloaded, a node may have a server that is about to end beside its new one."""
        survivors = {node for node, pid in snapshot_servers if pid not in victims}
        if not self.life.two_nodes:
            return -1
        found = (list_in_memory(self.life.path, node, ranks=2) for node in sorted(survivors))
        return max((step for steps in found for step, _ in steps), default=-1)

    def _victims(self, what: str, attempt: _Attempt, snapshot_servers: list[tuple[int, int]]) -> list[int]:
        server_pids = [pid for _, pid in snapshot_servers]
        if what == "keeper":
            return server_pids[:1]
        if what == "power":
            return attempt.pids + server_pids
        if what == "node":
            node = self._draw.randrange(len(attempt.pids))
            lost = node if self.life.two_nodes else 0
            return [attempt.pids[node], *(pid for of, pid in snapshot_servers if of == lost)]
        return [self._draw.choice(attempt.pids)] if what == "rank" else list(attempt.pids)

    def _await_stored(self) -> None:
        """All ranks are dead: what all of them had is stored within seconds."""
        deadline = time.monotonic() + 8
        while self.life.durable() < self._in_memory and time.monotonic() < deadline:
            time.sleep(0.02)
        self._promised = max(self._promised, self.life.durable(), self._in_memory)

    def _doing(self, attempt: _Attempt) -> str:
        """What the kill comes in the midst of, by what can be seen from outside."""
        if not attempt.board.has_loaded():
            return "loading"
        if (attempt.board.phase == _Phase.COPYING).any() and self._draw.random() < 0.5:
            return "copying"
        folder, newest = self.life.folder, self._promised
        unfinished = folder.unfinished()
        if any(step < newest for step in unfinished):
            return "pruning"
        with contextlib.suppress(FileNotFoundError):  # pruned meanwhile
            if next(self.life.path.glob("checkpoints/step-*/.manifest*"), None):
                return "committing"
        return "storing" if unfinished else "else"

    def finish(self) -> None:
        """One more start, which nothing kills; then nobody is left."""
        attempt = self._start()
        self._has_come_up(attempt)
        attempt.end()
        for _, pid in self.life.snapshot_servers():
            _kill(pid)
        shutil.rmtree(self.life.path, ignore_errors=True)


def _await_gone(pids: list[int]) -> None:
    while not all(_gone(pid) for pid in pids):
        time.sleep(0.002)


def kill_often(
    kills: int, seed: int, where: Path, told: Callable[[int], None] = lambda done: None
) -> tuple[dict[str, Outcome], dict[str, int]]:
    """Outcomes by what was killed, and how many kills came in the midst of what."""
    warm_up(SCALE)
    draw = random.Random(seed)
    outcomes = {what: Outcome() for what in KILLS}
    midst = dict.fromkeys(_MIDST, 0)
    done = 0
    while done < kills:
        path = where / f"life-{done}"
        path.mkdir(parents=True)
        life = Life(path, draw.choice((1, 2, 7)), draw.random() < 0.3, draw.choice((2, 10)))
        trial = _Trial(life, draw, outcomes)
        try:
            for _ in range(min(_KILLS_OF_A_LIFE, kills - done)):
                trial.kill_once(KILLS[done % len(KILLS)])
                done += 1
                told(done)
        finally:
            trial.finish()
        for name, count in trial.midst.items():
            midst[name] += count
    return outcomes, midst
