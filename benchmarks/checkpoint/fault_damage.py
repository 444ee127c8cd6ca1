"""Damage to checkpoints at rest, on disk and in memory, and whether any of it is taken for the state.

Two steps are stored. One file of the newer one is damaged; `verify` must name it, a load must not fill in
anything but the state of the step, and the search that a run begins with must find a good state: the same
step, of which the damaged byte was no part or is in memory too, or the older one. Then the file is put right.
"""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fault_kills import Outcome
from fault_state import CPU, State, open_session
from myriad.checkpoint.checkpoint_files import load, save
from myriad.checkpoint.checkpoint_world import CheckpointWorld
from myriad.checkpoint.config import CheckpointConfig
from myriad.checkpoint.format.trainer_state import random_shard
from myriad.checkpoint.load.start_over import RunHistory
from myriad.checkpoint.load.state_search import StateSearch
from myriad.checkpoint.session import CheckpointSession
from myriad.checkpoint.snapshots.snapshot_taker import SnapshotPurpose
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder, verify
from myriad.checkpoint.storage.folder_owner import AcquiredFolder
from myriad.errors import RunFailedError

__all__ = ["damage_files", "damage_memory", "damage_plain_files", "swap_ranks", "swap_steps"]

OLDER, NEWER = 10, 20
_HOLE_BYTES = 4096

Told = Callable[[int], None]


class _NoMemory:
    """A snapshot server that has nothing."""

    def snapshots(self) -> list[dict[str, Any]]:
        return []


@dataclass(frozen=True)
class _Files:
    """A folder with two steps, in whose newer one files are damaged."""

    folder: CheckpointFolder
    state: State

    @property
    def newer(self) -> Path:
        return self.folder.of_step(NEWER)

    def try_damaged(self, file: Path, outcome: Outcome) -> None:
        """Judges the folder as it is."""
        outcome.tried += 1
        if not any(file.name in problem for problem in verify(self.newer)):
            outcome.wrong += 1
            outcome.notes.append(f"{file.name}: not noticed")
            return
        if self._loads_wrong():
            outcome.wrong += 1
            outcome.notes.append(f"{file.name}: loaded as step {NEWER}")
            return
        try:
            found = self._search()
        except RunFailedError:
            outcome.lost += 1
            return
        if found.step is None or self.state.wrong(found.step):
            outcome.wrong += 1
            outcome.notes.append(f"{file.name}: went on from a wrong step {found.step}")
        else:
            outcome.recovered += 1

    def _loads_wrong(self) -> bool:
        self.state.forget()
        try:
            progress = load(self.newer, self.state.all_shards())
        except RunFailedError:
            return False
        return bool(self.state.wrong(NEWER)) or progress["step"] != NEWER

    def _search(self) -> Any:
        self.state.forget()
        rectangle = random_shard(0, CPU)
        wanted = self.state.all_shards()
        durable = self.folder.trained_steps()
        claimed, past = AcquiredFolder(1, tuple(durable)), RunHistory(stored_step=max(durable, default=0))
        search = StateSearch(self.folder, claimed, _NoMemory(), CheckpointWorld(), Path("run"))  # type: ignore[arg-type]
        return search.load(wanted, rectangle, past)

    @contextmanager
    def restored(self, file: Path) -> Iterator[bytes]:
        """The file as it is, which it is again at the end."""
        kept = file.read_bytes()
        try:
            yield kept
        finally:
            aside = self.newer.with_name(f"{self.newer.name}.damaged")
            if aside.exists():
                aside.rename(self.newer)
            file.write_bytes(kept)


def _make_files(where: Path) -> _Files:
    folder, state = CheckpointFolder(where / "checkpoints"), State()
    session = open_session(where, CheckpointConfig(every=1, linger_seconds=0))
    session.acquire(0)
    session.begin(state.shards(0, 1))
    for step in (OLDER, NEWER):
        _store(session, state, step)
    session.close()
    return _Files(folder, state)


def _store(session: CheckpointSession, state: State, step: int) -> None:
    state.become(step)
    session.take(step, {"step": step, "data": {}}, SnapshotPurpose(durable=True, last=True))
    problem = session.finish(step)
    assert problem is None, problem


def _kind_of(file: Path) -> str:
    return "data" if file.suffix == ".distcp" else file.name


def damage_files(flips: int, seed: int, where: Path, told: Told = lambda done: None) -> dict[str, Outcome]:
    """Outcomes by the kind of damage and file."""
    torch.set_num_threads(1)
    files, draw = _make_files(where), random.Random(seed)
    assert verify(files.newer) == []
    outcomes: dict[str, Outcome] = {}
    paths = sorted(files.newer.iterdir())
    weights = [path.stat().st_size for path in paths]
    for done in range(flips):
        # half of them by size, half a file each: a bit of the small files is as dear
        path = draw.choice(paths) if done % 2 else draw.choices(paths, weights)[0]
        with files.restored(path) as kept:
            path.write_bytes(_flipped(kept, draw))
            files.try_damaged(path, outcomes.setdefault(f"flipped bit, {_kind_of(path)}", Outcome()))
        told(done + 1)
    for name, damage in _LARGER.items():
        outcome = outcomes.setdefault(name, Outcome())
        for path in paths * max(1, flips // 500):
            with files.restored(path) as kept:
                damage(path, kept, draw, files)
                if not path.exists() or path.read_bytes() != kept:
                    files.try_damaged(path, outcome)
    assert verify(files.newer) == [], "all damage is undone"
    return outcomes


def _flipped(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _zero(path: Path, content: bytes, draw: random.Random, files: _Files) -> None:
    at = draw.randrange(len(content))
    path.write_bytes(content[:at] + bytes(len(content[at : at + _HOLE_BYTES])) + content[at + _HOLE_BYTES :])


def _cut(path: Path, content: bytes, draw: random.Random, files: _Files) -> None:
    path.write_bytes(content[: draw.randrange(len(content))])


def _delete(path: Path, content: bytes, draw: random.Random, files: _Files) -> None:
    path.unlink()


def _from_other_step(path: Path, content: bytes, draw: random.Random, files: _Files) -> None:
    shutil.copyfile(files.folder.of_step(OLDER) / path.name, path)


def _append(path: Path, content: bytes, draw: random.Random, files: _Files) -> None:
    path.write_bytes(content + b"\0")


_LARGER = {
    "4 KiB of zeros": _zero,
    "cut short": _cut,
    "a byte too many": _append,
    "deleted": _delete,
    "file of another step": _from_other_step,
}


def swap_steps(where: Path) -> Outcome:
    """The whole folder of one step has the name of another."""
    files, outcome = _make_files(where), Outcome()
    shutil.rmtree(files.newer)
    shutil.copytree(files.folder.of_step(OLDER), files.newer)
    files.try_damaged(files.newer / "manifest.json", outcome)
    return outcome


def swap_ranks(where: Path) -> Outcome:
    """The files of two ranks have each other's names."""
    files, outcome = _two_ranks(where), Outcome()
    first, second = (files.newer / f"__{rank}_0.distcp" for rank in range(2))
    with files.restored(first) as kept, files.restored(second):
        first.write_bytes(second.read_bytes())
        second.write_bytes(kept)
        files.try_damaged(first, outcome)
    return outcome


def _two_ranks(where: Path) -> _Files:
    """As two ranks would have stored it: the second one's file is made by hand."""
    folder, state = CheckpointFolder(where / "checkpoints"), State()
    for step in (OLDER, NEWER):
        state.become(step)
        _save_by_two(folder, state, step)
    return _Files(folder, state)


def _save_by_two(folder: CheckpointFolder, state: State, step: int) -> None:
    readers, pids = folder.path.parent / f"meeting-{step}", []
    readers.parent.mkdir(parents=True, exist_ok=True)
    for rank in range(2):
        pids.append(os.fork())
        if pids[-1]:
            continue
        try:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            torch.distributed.init_process_group("gloo", f"file://{readers}", rank=rank, world_size=2)
            save(folder, step, state.shards(rank, 2), {"step": step})
            os._exit(0)
        finally:
            os._exit(1)
    assert all(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 for pid in pids)


# In memory


def damage_memory(tries: int, seed: int, where: Path, told: Told = lambda done: None) -> dict[str, Outcome]:
    """Flipped bits in a snapshot server's snapshots, of a step that is durable too, and of one that is
    not."""
    draw, state = random.Random(seed), State()
    session = open_session(where, CheckpointConfig(every=1, linger_seconds=0))
    session.acquire(0)
    session.begin(state.shards(0, 1))
    for step in (OLDER, NEWER):
        _store(session, state, step)
    outcomes = {f"flipped bit, {name}": Outcome() for name in ("memory", "memory and storage")}
    folder = CheckpointFolder(where / "checkpoints")
    session._acquired = replace(session._acquired, steps=(OLDER, NEWER))  # as a new start would find them
    for done in range(tries):
        both = done % 4 == 3
        outcome = outcomes["flipped bit, memory and storage" if both else "flipped bit, memory"]
        _flip_and_resume(session, folder, state, draw, both, outcome)
        told(done + 1)
    session.close()
    return outcomes


def _flip_and_resume(
    session: CheckpointSession,
    folder: CheckpointFolder,
    state: State,
    draw: random.Random,
    both: bool,
    outcome: Outcome,
) -> None:
    opened = session._client.open(session.attempt, 0, NEWER, copied=False)
    assert opened is not None
    names = [shard.tensor for shard in opened.stored_shards]
    index = draw.choice([i for i, name in enumerate(names) if not name.startswith("random")])
    data, bit = opened.data(index), 1 << draw.randrange(8)
    at = draw.randrange(len(data))
    data[at] ^= bit
    files = _Files(folder, state)
    file = files.newer / "__0_0.distcp"
    chunk = json.loads((files.newer / "manifest.json").read_text())["files"][file.name]["chunks"][index]
    with files.restored(file) as kept:
        if both:
            changed = bytearray(kept)
            changed[chunk["start"] + chunk["head"] + at] ^= bit
            file.write_bytes(changed)
        _judge_resume(session, state, OLDER if both else NEWER, outcome)
    data[at] ^= bit


def _judge_resume(session: CheckpointSession, state: State, expected: int, outcome: Outcome) -> None:
    state.forget()
    outcome.tried += 1
    try:
        loaded = session.resume(state.all_shards())
    except RunFailedError as error:
        outcome.lost += 1
        outcome.notes.append(str(error))
        return
    if loaded is None or state.wrong(loaded.step) or not loaded.problems:
        outcome.wrong += 1
        outcome.notes.append(f"{loaded}: {loaded and state.wrong(loaded.step)}")
    elif loaded.step < expected:
        outcome.lost += 1
        outcome.notes.append(f"step {expected} had a good copy, {loaded.step} was found")
    else:
        outcome.recovered += 1


# For comparison


def damage_plain_files(flips: int, seed: int, where: Path, told: Told = lambda done: None) -> Outcome:
    """The same flips in the data files of torch.distributed.checkpoint alone."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    state, draw, outcome = State(), random.Random(seed), Outcome()
    state.become(NEWER)
    dcp.save(dict(state.full), checkpoint_id=where, no_dist=True)
    (file,) = where.glob("*.distcp")
    kept = file.read_bytes()
    for done in range(flips):
        file.write_bytes(_flipped(kept, draw))
        state.forget()
        outcome.tried += 1
        try:
            dcp.load(dict(state.full), checkpoint_id=where, no_dist=True)
        except (Exception, CheckpointException):
            outcome.lost += 1  # refused, and there is no other place
        else:
            wrong = bool(state.wrong(NEWER))
            outcome.wrong += wrong
            outcome.recovered += not wrong
        told(done + 1)
    file.write_bytes(kept)
    return outcome
