"""If these fail, a run that lost ranks, a node or its storage resumes from less than it had, or not."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import lost_ranks, run_ranks

from myriad.checkpoint.checkpoint_files import load_model
from myriad.checkpoint.config import CheckpointConfig
from myriad.checkpoint.format.checkpoint_manifest import CheckpointManifest, encode_manifest
from myriad.checkpoint.session import CheckpointSession, LoadedState, SessionSettings
from myriad.checkpoint.snapshots.server_start import server_names
from myriad.checkpoint.snapshots.snapshot_client import SnapshotClient, list_in_memory, server_name
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder, verify
from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.model.tensor_shard import TensorShard
from myriad.system.jsonl import JsonlTail

QUICK = {"linger_seconds": 60.0, "timeout_seconds": 60.0}
ROWS = 6


def value_of(step: int, rank: int) -> torch.Tensor:
    """A rank's part after so many steps."""
    return torch.arange(ROWS * 4, dtype=torch.float32).view(ROWS, 4) + 1000 * rank + step


class Run:
    """One rank of a run whose state is known for every step."""

    def __init__(self, path: Path, world: int, per_node: int | None = None, **config: Any) -> None:
        groups = open_world(Layout(dp=world), torch.device("cpu"))
        self.rank, self.world = groups.grid.rank, world
        settings = SessionSettings(
            CheckpointConfig(**QUICK | config),
            run=path,
            folder=CheckpointFolder(path / "checkpoints"),
            events=path / "events.jsonl",
            log=path / f"keeper-{self.rank}.log",
            job='name = "x"\n',
        )
        local_rank = self.rank % (per_node or world)
        group = groups.on_host("checkpoints")
        self.session = CheckpointSession(settings, groups.grid, local_rank, group, torch.device("cpu"))
        shape = (ROWS * world, 4)
        self.state = TensorShard("model.w", shape, (ROWS * self.rank, 0), torch.zeros(ROWS, 4))
        self.session.acquire(0)

    def resume(self) -> LoadedState | None:
        """Also checks every byte."""
        found = self.session.resume([self.state])
        if found is not None:
            assert torch.equal(self.state.values, value_of(found.step, self.rank)), f"step {found.step}"
            assert found.progress["step"] == found.step
        self.session.begin([self.state])
        return found

    def step(self, step: int, *, is_last: bool = False) -> None:
        """As a trainer does it."""
        self.session.settle()
        self.state.values.copy_(value_of(step, self.rank))
        purpose = self.session.purpose(step, is_last=is_last, due=False)
        if purpose is not None:
            self.session.take(step, {"step": step}, purpose)

    def end(self, step: int) -> None:
        """Waits until the last step is durable."""
        assert self.session.finish(step) is None
        self.session.close()
        close_world()


def all_steps(
    path: Path, world: int, first: int, last: int, per_node: int | None = None, config: Any = None
) -> Any:
    """A whole run; gives what it went on from."""
    run = Run(path, world, per_node, **config or {})
    found = run.resume()
    every = (config or {}).get("every", 0)
    for step in range(first, last + 1):
        run.step(step, is_last=step == last)
        if every and step % every == 0:  # no step is that quick: the one before may still be stored
            assert run.session.finish(step) is None
    run.end(last)
    return found


def vanish(path: Path, world: int, last: int) -> None:
    """Steps, then every rank is gone without a word; gives nothing back."""
    run = Run(path, world)
    run.resume()
    for step in range(1, last + 1):
        run.step(step)
    run.session.settle()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def snapshot_servers(path: Path) -> list[int]:
    """Processes that keep this run's snapshots."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
            log = os.readlink(entry / "fd" / "1")
        except OSError:
            continue
        if b"myriad.checkpoint.snapshots.snapshot_server_process" in command and log.startswith(str(path)):
            found.append(int(entry.name))
    return found


def events(path: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in JsonlTail(path / "events.jsonl").poll() if event["event"] == name]


def wait_until(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def no_snapshot_server_stays(tmp_path: Path) -> Any:
    yield
    for pid in snapshot_servers(tmp_path):
        os.kill(pid, signal.SIGKILL)


def test_a_run_stores_every_so_often_and_its_snapshot_server_goes_with_it(tmp_path: Path) -> None:
    assert run_ranks(2, all_steps, tmp_path, 2, 1, 7, None, {"every": 3, "keep": 5}) == [None, None]
    folder = CheckpointFolder(tmp_path / "checkpoints")
    assert folder.steps() == [3, 6, 7] and all(verify(folder.of_step(step)) == [] for step in folder.steps())
    for step in folder.steps():
        whole = torch.cat([value_of(step, rank) for rank in range(2)])
        assert torch.equal(load_model(folder.of_step(step))["w"], whole)
    manifest = folder.at_step(7).manifest()
    assert (manifest.step, manifest.attempt, manifest.layout["dp"]) == (7, 1, 2)
    assert manifest.progress == {"step": 7} and manifest.versions["torch"] == torch.__version__
    assert (folder.of_step(7) / "job.toml").read_text() == 'name = "x"\n'
    assert [event["step"] for event in events(tmp_path, "checkpoint")] == [3, 6, 7]
    wait_until(lambda: not snapshot_servers(tmp_path))


def test_ranks_that_are_gone_leave_every_step_in_memory_and_the_newest_is_stored(tmp_path: Path) -> None:
    lost_ranks(2, vanish, tmp_path, 2, 9)
    assert [step for step, _ in list_in_memory(tmp_path)][-1] == 9
    wait_until(lambda: CheckpointFolder(tmp_path / "checkpoints").steps() == [9])
    (first, second) = run_ranks(2, all_steps, tmp_path, 2, 10, 11)
    assert first.step == second.step == 9 and first.source == "memory" and not first.problems


def test_memory_is_read_by_another_number_of_ranks(tmp_path: Path) -> None:
    lost_ranks(2, vanish, tmp_path, 2, 4)
    wait_until(lambda: CheckpointFolder(tmp_path / "checkpoints").steps() == [4])

    def alone() -> None:
        session = Run(tmp_path, 1).session
        whole = TensorShard("model.w", (2 * ROWS, 4), (0, 0), torch.zeros(2 * ROWS, 4))
        found = session.resume([whole])
        assert found is not None and (found.step, found.source) == (4, "memory")
        assert torch.equal(whole.values, torch.cat([value_of(4, rank) for rank in range(2)]))

    run_ranks(1, alone)


def test_when_the_snapshot_server_dies_too_storage_is_gone_on_from(tmp_path: Path) -> None:
    lost_ranks(2, vanish, tmp_path, 2, 5)
    wait_until(lambda: CheckpointFolder(tmp_path / "checkpoints").steps() == [5])
    for pid in snapshot_servers(tmp_path):
        os.kill(pid, signal.SIGKILL)
    (first, _) = run_ranks(2, all_steps, tmp_path, 2, 6, 6)
    assert (first.step, first.source) == (5, "storage")


def damage_memory(path: Path, step: int, rank: int) -> None:
    """Another byte in the snapshot that a snapshot server holds of a rank."""
    client = SnapshotClient(server_name(path), starts=False, log=path / "log")
    (one,) = (one for one in client.snapshots() if one["rank"] == rank and step in one["steps"])
    opened = client.open(one["attempt"], rank, step, copied=False)
    assert opened is not None
    opened.data(0)[5] ^= 16


def test_a_flipped_bit_in_memory_is_found_and_the_stored_bytes_are_used(tmp_path: Path) -> None:
    lost_ranks(2, vanish, tmp_path, 2, 3)
    wait_until(lambda: CheckpointFolder(tmp_path / "checkpoints").steps() == [3])
    damage_memory(tmp_path, 3, rank=1)
    (first, second) = run_ranks(2, all_steps, tmp_path, 2, 4, 4)
    assert first.step == second.step == 3
    assert [p for p in first.problems if "memory of node 0, rank 1: model.w" in p]


def test_a_bad_chunk_in_storage_is_had_from_memory(tmp_path: Path) -> None:
    lost_ranks(2, vanish, tmp_path, 2, 3)
    folder = CheckpointFolder(tmp_path / "checkpoints")
    wait_until(lambda: folder.steps() == [3])
    for path in folder.of_step(3).glob("*.distcp"):
        path.write_bytes(bytes(path.stat().st_size))
    (first, _) = run_ranks(2, all_steps, tmp_path, 2, 4, 4)
    assert first.step == 3 and first.set_aside == ()


def copied(path: Path, step: int) -> set[int]:
    """Ranks of whose snapshot another node has a copy."""
    clients = [SnapshotClient(name, starts=False, log=path / "log") for name in server_names(path)]
    found = [one for client in clients for one in client.snapshots()]
    return {one["rank"] for one in found if one["copied"] and step in one["steps"]}


def lose_a_node(path: Path, last: int) -> None:
    """Four ranks on two nodes; afterwards those of node 1 are gone, its snapshot server with them."""
    run = Run(path, 4, 2, copies_every=2, memory_every=1)
    run.resume()
    for step in range(1, last + 1):
        run.step(step)
        run.session.settle()
        if run.rank == 0 and step % 2 == 0:
            wait_until(lambda step=step: copied(path, step) == {0, 1, 2, 3})
        dist.barrier()
    if run.rank == 2:
        for pid in snapshot_servers(path):
            if os.readlink(f"/proc/{pid}/fd/1").endswith("keeper-2.log"):
                os.kill(pid, signal.SIGKILL)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_lost_node_comes_back_from_the_memory_of_another(tmp_path: Path) -> None:
    """Nothing was ever stored: what its ranks had is on the other node, at the last step that was copied."""
    lost_ranks(4, lose_a_node, tmp_path, 5)
    found = run_ranks(4, all_steps, tmp_path, 4, 5, 6, 2)
    assert [one.step for one in found] == [4] * 4 and found[0].source == "memory"


def test_ranks_of_several_nodes_store_one_checkpoint(tmp_path: Path) -> None:
    run_ranks(4, all_steps, tmp_path, 4, 1, 4, 2, {"every": 2})
    folder = CheckpointFolder(tmp_path / "checkpoints")
    assert folder.steps() == [2, 4] and verify(folder.of_step(4)) == []
    assert torch.equal(load_model(folder.of_step(4))["w"], torch.cat([value_of(4, r) for r in range(4)]))
    wait_until(lambda: not snapshot_servers(tmp_path))


def test_ranks_that_were_thought_dead_commit_no_more(tmp_path: Path) -> None:
    """A network that was cut in two: the side that was given up must not write over the other."""

    def old_and_new() -> None:
        old = Run(tmp_path, 1, every=1)
        old.resume()
        old.step(1)
        assert old.session.finish(1) is None
        CheckpointFolder(tmp_path / "checkpoints").acquire(7)
        old.step(2, is_last=True)
        problem = old.session.finish(2)
        assert problem is not None and "attempt 7 of the run has taken over" in problem

    run_ranks(1, old_and_new)
    assert CheckpointFolder(tmp_path / "checkpoints").steps() == [1]
    assert events(tmp_path, "superseded")


def test_storage_that_fails_stops_no_rank_and_is_an_alarm_after_a_while(tmp_path: Path) -> None:
    def go() -> int:
        run = Run(tmp_path, 1, every=1, alarm_after=2)
        run.resume()
        for step in range(1, 9):
            (tmp_path / "checkpoints").chmod(0o755)
            if step == 2:
                _break(tmp_path / "checkpoints")
            if step == 6:
                (tmp_path / "checkpoints").unlink()
                (tmp_path / "kept").rename(tmp_path / "checkpoints")
            run.step(step)
            wait_until(lambda step=step: run.session.outcome(step) is not None)
        run.end(8)
        return step

    assert run_ranks(1, go) == [8]
    faults = events(tmp_path, "fault")
    assert [(fault["step"], fault.get("alarm", False)) for fault in faults] == [
        (2, False),
        (3, True),
        (4, True),
        (5, True),
    ]
    assert CheckpointFolder(tmp_path / "checkpoints").steps() == [7, 8]


def _break(folder: Path) -> None:
    """A file where the folder was: whoever writes into it fails, root too."""
    folder.rename(folder.with_name("kept"))
    folder.write_text("not a folder")


def test_a_damaged_checkpoint_is_set_aside_and_never_tried_again(tmp_path: Path) -> None:
    run_ranks(1, all_steps, tmp_path, 1, 1, 4, None, {"every": 2})
    wait_until(lambda: not snapshot_servers(tmp_path))
    folder = CheckpointFolder(tmp_path / "checkpoints")
    (path,) = folder.of_step(4).glob("*.distcp")
    path.write_bytes(bytes(path.stat().st_size))
    (found,) = run_ranks(1, all_steps, tmp_path, 1, 3, 3)
    assert (found.step, found.source, found.set_aside) == (2, "storage", ("step-4.damaged",))
    assert folder.steps() == [2, 3] and any("step-4/__0_0.distcp: model.w" in one for one in found.problems)


def test_a_place_that_cannot_be_written_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")

    def go() -> str:
        with pytest.raises(BadInputError) as caught:
            Run(tmp_path, 1)
        return str(caught.value)

    (told,) = run_ranks(1, go)
    assert told.startswith("checkpoint.url = ") and "cannot be written" in told and json.dumps(told)


SLOW_STORAGE = """
import os, time
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder

ask = CheckpointFolder.owner

def wait_and_ask(folder):
    while os.path.exists(os.environ["HANGS_WHILE"]):
        time.sleep(0.01)
    return ask(folder)

CheckpointFolder.owner = wait_and_ask
"""


@pytest.fixture
def hangs_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """While this file is there, a snapshot server that asks who owns its folder of checkpoints waits."""
    (tmp_path / "patch").mkdir()
    (tmp_path / "patch" / "sitecustomize.py").write_text(SLOW_STORAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "patch"), prepend=os.pathsep)
    monkeypatch.setenv("HANGS_WHILE", str(tmp_path / "hangs"))
    return tmp_path / "hangs"


def test_a_step_for_which_slow_storage_left_no_memory_is_reported(tmp_path: Path, hangs_while: Path) -> None:
    def go() -> None:
        run = Run(tmp_path, 1, every=1, keep=10, memory_every=0)
        run.resume()
        run.step(1)
        assert run.session.finish(1) is None
        hangs_while.touch()
        for step in (2, 3, 4):
            run.step(step)
            run.session.settle()
            time.sleep(0.2)
        hangs_while.unlink()
        run.step(5, is_last=True)
        run.end(5)

    run_ranks(1, go)
    told = [(fault["step"], fault["problem"]) for fault in events(tmp_path, "fault")]
    assert (4, "checkpoint not taken: earlier ones are still being stored") in told


def test_slow_storage_stores_the_newest_it_can_and_states_what_it_left_out(
    tmp_path: Path, hangs_while: Path
) -> None:
    """Training never waits for it: of steps that come while one is being stored, the newest is next."""

    def go() -> None:
        run = Run(tmp_path, 1, every=1, keep=10)
        run.resume()
        run.step(1)
        assert run.session.finish(1) is None
        hangs_while.touch()
        for step in (2, 3, 4, 5):
            run.step(step)
            run.session.settle()
            time.sleep(0.2)
        hangs_while.unlink()
        run.step(6, is_last=True)
        run.end(6)

    run_ranks(1, go)
    stored = CheckpointFolder(tmp_path / "checkpoints").steps()
    assert stored[:2] == [1, 2] and stored[-1] == 6 and len(stored) < 6
    told = [fault["problem"] for fault in events(tmp_path, "fault")]
    assert told and all("step 2 is still being stored" in one for one in told[:2])


def test_a_step_that_a_newer_start_has_stored_is_not_taken_away(tmp_path: Path) -> None:
    """Whoever was paused for long and comes back must not clear what others have stored meanwhile."""

    def go() -> str | None:
        run = Run(tmp_path, 1)
        run.resume()
        folder = CheckpointFolder(tmp_path / "checkpoints")
        manifest = encode_manifest(CheckpointManifest(1, 9, 0.0, {}, {}, {}, {}, {}, {}))
        folder.storage.put("step-1/manifest.json", manifest)
        run.step(1, is_last=True)
        return run.session.finish(1)

    (told,) = run_ranks(1, go)
    assert told is not None and "attempt 9 of the run has stored this step" in told
    assert CheckpointFolder(tmp_path / "checkpoints").at_step(1).manifest().attempt == 9


def one_of_groups(path: Path, first: int, last: int, kills: bool) -> LoadedState | None:
    """A rank of two groups of two, each on a node of its own. It holds what the same rank of the other group
    stores, too. ``kills``: it ends by SIGKILL after its last step, else its last step is stored."""
    groups = open_world(Layout(dp=4, zero=3, shard_group=2), torch.device("cpu"))
    rank = groups.grid.rank
    settings = SessionSettings(
        CheckpointConfig(**QUICK),
        run=path,
        folder=CheckpointFolder(path / "checkpoints"),
        events=path / "events.jsonl",
        log=path / f"keeper-{rank}.log",
        job='name = "x"\n',
        holders=2,
    )
    session = CheckpointSession(settings, groups.grid, 0, groups.on_host("checkpoints"), torch.device("cpu"))
    shape = (ROWS * 4, 4)
    alike = groups.grid.peers("dp_replicate")
    state = {one: TensorShard("model.w", shape, (ROWS * one, 0), torch.zeros(ROWS, 4)) for one in alike}
    session.acquire(0)
    found = session.resume(list(state.values()))
    assert found is None or all(torch.equal(one.values, value_of(found.step, r)) for r, one in state.items())
    session.begin([state[rank]], lambda of_rank: [state[of_rank]])
    for step in range(first, last + 1):
        session.settle()
        for one, shard in state.items():
            shard.values.copy_(value_of(step, one))
        if (purpose := session.purpose(step, is_last=not kills and step == last, due=False)) is not None:
            assert not purpose.copies, "no node sends what another holds"
            session.take(step, {"step": step}, purpose)
    session.settle()
    if kills:
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    assert session.finish(last) is None
    session.close()
    close_world()
    return found


def test_a_whole_group_may_be_lost_where_another_has_snapshots_of_the_same(
    tmp_path: Path,
) -> None:
    """First one group, then the other before a further step: the group that came back empty has a snapshot of
    what it resumed from."""
    lost_ranks(4, one_of_groups, tmp_path, 1, 7, True)
    kill_servers(tmp_path, (0, 1))
    lost_ranks(4, one_of_groups, tmp_path, 8, 7, True)
    kill_servers(tmp_path, (2, 3))
    found = run_ranks(4, one_of_groups, tmp_path, 8, 8, False)
    assert [(one.step, one.source, one.problems) for one in found] == [(7, "memory", ())] * 4
    folder = CheckpointFolder(tmp_path / "checkpoints")
    assert folder.steps()[-1] == 8 and verify(folder.of_step(8)) == []  # servers may have stored 7, too
    assert torch.equal(load_model(folder.of_step(8))["w"], torch.cat([value_of(8, r) for r in range(4)]))


def kill_servers(path: Path, nodes: tuple[int, ...]) -> None:
    """End the snapshot servers of some nodes of one rank each, which have the node's number in their name."""
    for pid in snapshot_servers(path):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if command[command.index(b"myriad.checkpoint.snapshots.snapshot_server_process") + 1].endswith(
            tuple(f"-{node}".encode() for node in nodes)
        ):
            os.kill(pid, signal.SIGKILL)
