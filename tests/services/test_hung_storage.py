"""A storage that hangs, fills up or turns read-only must cost checkpoints, never training; somebody must be
told, and what is in memory must still bring the run back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from mounted import FrozenDisk, SmallDisk, disk_that_hangs, small_disk
from same_run import assert_same_run, train_undisturbed
from watched_runs import (
    TWO_REPLICAS,
    events,
    kill_rank,
    kill_snapshot_server,
    lose_ranks,
    make_run,
    steps_in_memory,
    stored_at,
    train,
    wait_for_event,
    wait_for_snapshot_server_to_end,
    wait_until,
)

from myriad.checkpoint import session
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.job import load_job
from myriad.run import Run

EVERY_5 = [*TWO_REPLICAS, "checkpoint.every=5"]


@pytest.fixture
def start(tmp_path: Path, corpus: Path) -> Iterator[Callable[..., Run]]:
    """Makes runs; their snapshot servers end with the test, once nothing hangs any more."""
    made: list[Run] = []

    def make(name: str, *overrides: str) -> Run:
        made.append(make_run(tmp_path / name, corpus, *overrides))
        return made[-1]

    yield make
    for run in made:
        kill_snapshot_server(run)


@pytest.fixture
def disk(start: Callable[..., Run], tmp_path: Path) -> Iterator[FrozenDisk]:
    with disk_that_hangs(tmp_path) as made:
        yield made


@pytest.fixture
def small(start: Callable[..., Run], tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path, 2**24) as made:
        yield made


def go_on_to(run: Run, steps: int) -> None:
    """What the user types next."""
    run.create_or_resume(load_job(str(run.job_path), [f"train.steps={steps}"]))


def test_training_continues_while_storage_hangs_and_saves_when_it_answers(start, disk):
    run = start("run", *EVERY_5, "train.steps=50", f"checkpoint.url={disk.path}/kept")

    def hang() -> None:
        stored_at(run, 5)()
        disk.freeze()

    def answer() -> None:
        wait_for_event(run, "fault", step=30)
        assert max(steps_in_memory(run)) >= 35, "snapshots in memory went on"
        disk.thaw()
        stored_at(run, 10)()
        stored_at(run, 35)()

    assert train(run, {6: hang, 37: answer, 46: stored_at(run, 45)}) == [0, 0]
    faults = [(fault["step"], "alarm" in fault) for fault in events(run, "fault")]
    assert faults == [(15, False), (20, False), (25, True), (30, True)]
    assert "step 10 is still being stored" in events(run, "fault")[0]["problem"]
    assert CheckpointFolder(run.checkpoints()).newest() == (50, [])


def test_a_run_that_ends_while_storage_hangs_reports_it_and_can_continue_from_memory(start, disk, capfd):
    keys = [*EVERY_5, "train.steps=20", "optimizer.decay=constant"]
    run, undisturbed = start("run", *keys, f"checkpoint.url={disk.path}/kept"), start("undisturbed", *keys)
    run.create_or_resume(load_job(str(run.job_path), ["checkpoint.timeout_seconds=1"]))

    def hang() -> None:
        stored_at(run, 5)()
        disk.freeze()

    assert train(run, {6: hang}) == [1, 1]
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("myriad: error:")]
    expected = "myriad: error: the last checkpoint is in memory only: not stored after 1 s"
    assert told == [expected] * 2
    assert events(run, "finish") == [], "it does not count as done"
    assert max(steps_in_memory(run)) == 20
    disk.thaw()
    for one in (run, undisturbed):
        go_on_to(one, 25)
    run.create_or_resume(load_job(str(run.job_path), ["checkpoint.timeout_seconds=60"]))
    assert train(run) == [0, 0]
    (resumed,) = events(run, "resume")
    assert (resumed["step"], resumed["source"]) == (20, "memory")
    assert_same_run(run, train_undisturbed(undisturbed))


@contextmanager
def impatient() -> Iterator[None]:
    """A start takes storage for hung after a second, which one that is only busy may take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "_ACQUIRE_SECONDS", 1.0)
        yield


def test_a_rank_lost_while_storage_hangs_costs_no_step(start, disk):
    keys = [*EVERY_5, "train.steps=30"]
    run, undisturbed = start("run", *keys, f"checkpoint.url={disk.path}/kept"), start("undisturbed", *keys)

    def hang() -> None:
        stored_at(run, 5)()
        disk.freeze()

    lose_ranks(run, {6: hang, 17: kill_rank})
    newest = max(steps_in_memory(run))
    assert newest >= 15
    with impatient():
        assert train(run, {24: disk.thaw, 26: stored_at(run, 25)}) == [0, 0]
    assert [(event["step"], event["source"]) for event in events(run, "resume")] == [(newest, "memory")]
    assert any("does not answer within 1 s" in fault["problem"] for fault in events(run, "fault"))
    assert_same_run(run, train_undisturbed(undisturbed))


def test_a_start_on_a_storage_that_hangs_reports_it_and_leaves_nothing_in_the_way(start, disk, capfd):
    run = start("run", *EVERY_5, "train.steps=10", f"checkpoint.url={disk.path}/kept")
    disk.freeze()
    with impatient():
        assert [train(run), train(run)] == [[2, 2], [2, 2]]
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("myriad: error:")]
    url = run.checkpoints()
    assert told == [f'myriad: error: checkpoint.url = "{url}": does not answer within 1 s'] * 4
    disk.thaw()
    assert train(run) == [0, 0] and events(run, "resume") == []
    assert CheckpointFolder(url).newest() == (10, [])


def _fail_and_recover(run: Run, fail: Callable[[], None], recover: Callable[[], None], reason: str) -> None:
    """Between steps 6 and 22 nothing can be stored."""
    acts = {6: [stored_at(run, 5), fail], 22: [recover], 26: [stored_at(run, 25)]}
    for step in (10, 15, 20):
        acts[step + 1] = [partial(wait_for_event, run, "fault", step=step), partial(_assert_good, run, 5)]
    assert train(run, {step: partial(_all, acts[step]) for step in acts}) == [0, 0]
    faults = events(run, "fault")
    assert [(one["step"], "alarm" in one) for one in faults] == [(10, False), (15, False), (20, True)]
    assert all(reason in one["problem"] for one in faults), faults
    folder = CheckpointFolder(run.checkpoints())
    assert folder.newest() == (30, [])
    wait_until(lambda: folder.unfinished() == [], "an end of what was begun in vain")


def _all(acts: list[Callable[[], None]]) -> None:
    for act in acts:
        act()


def _assert_good(run: Run, step: int) -> None:
    assert CheckpointFolder(run.checkpoints()).newest() == (step, [])


def test_a_full_disk_costs_checkpoints_but_neither_training_nor_older_ones(start, small):
    run = start("run", *EVERY_5, "train.steps=30", f"checkpoint.url={small.path}/kept")
    _fail_and_recover(run, small.fill, small.make_room, "No space left on device")


def test_a_disk_that_turned_read_only_costs_checkpoints_but_neither_training_nor_older_ones(start, small):
    run = start("run", *EVERY_5, "train.steps=30", f"checkpoint.url={small.path}/kept")
    _fail_and_recover(run, partial(small.allow, "ro"), partial(small.allow, "rw"), "Read-only file system")


def test_a_checkpoint_that_did_not_fit_takes_no_room_from_others(start, small):
    run = start(
        "run",
        *EVERY_5,
        "train.steps=20",
        f"checkpoint.url={small.path}/kept",
        "overlap.checkpoint=off",
        "checkpoint.timeout_seconds=5",
    )

    def nearly_fill() -> None:
        small.fill()
        other = small.path / "other people's files"
        with other.open("r+b") as file:
            file.truncate(other.stat().st_size - 2**16)

    assert train(run, {6: nearly_fill}) == [1, 1]
    folder = CheckpointFolder(run.checkpoints())
    assert folder.newest() == (5, [])
    wait_until(lambda: folder.unfinished() == [], "an end of what was begun in vain")
    small.make_room()
    wait_until(lambda: max(steps_in_memory(run)) == 20, "the last step in memory")
    go_on_to(run, 25)
    assert train(run) == [0, 0]
    assert [(event["step"], event["source"]) for event in events(run, "resume")] == [(20, "memory")]
    assert folder.newest() == (25, [])


def test_a_run_whose_own_folder_is_full_continues(start, small, corpus):
    """Lines that cannot be written are lost; steps are not."""
    run = make_run(small.path / "run", corpus, *EVERY_5, "train.steps=30")
    try:
        acts = {6: [stored_at(run, 5), small.fill], 22: [small.make_room], 26: [stored_at(run, 25)]}
        assert train(run, {step: partial(_all, acts[step]) for step in acts}) == [0, 0]
        assert CheckpointFolder(run.checkpoints()).newest() == (30, [])
        steps = [line["step"] for line in run.read_metrics()]
        assert steps[-1] == 30 and set(range(1, 6)) | set(range(23, 31)) <= set(steps)
    finally:
        wait_for_snapshot_server_to_end(run)
