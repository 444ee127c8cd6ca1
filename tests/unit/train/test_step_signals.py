"""If these fail, ranks disagree about which step is saved, or a run forgets to save by time."""

import time

import pytest

from myriad.checkpoint.config import CheckpointConfig
from myriad.checkpoint.snapshots.snapshot_taker import SnapshotPurpose
from myriad.train.step_signals import SaveClock


@pytest.fixture
def at(monkeypatch):
    """Sets the clock."""

    def go(seconds: float) -> None:
        monkeypatch.setattr(time, "monotonic", lambda: seconds)

    go(1000.0)
    return go


def test_all_ranks_receive_the_decisions_of_rank_0s_clock(at):
    config = CheckpointConfig(minutes=10, memory_seconds=2)
    clocks = [SaveClock(config, decides=rank == 0) for rank in range(3)]

    def step(*stops: bool) -> list[tuple[bool, bool, bool]]:
        total = sum(clock.signal(stop) for clock, stop in zip(clocks, stops, strict=True))
        asked = [clock.receive(total) for clock in clocks]
        return [(a, c.save_due, c.memory_due) for a, c in zip(asked, clocks, strict=True)]

    assert step(False, False, False) == [(False, False, True)] * 3
    for clock in clocks:
        clock.taken(SnapshotPurpose())
    at(1001.0)
    assert step(False, True, True) == [(True, False, False)] * 3
    at(1600.0)
    assert step(False, False, False) == [(False, True, True)] * 3
    assert step(True, False, False) == [(True, True, True)] * 3, "what is due stays due until it is taken"
    for clock in clocks:
        clock.taken(SnapshotPurpose(durable=True))
    assert step(False, False, False) == [(False, False, False)] * 3


def test_without_minutes_only_steps_count_and_without_seconds_every_step_is_kept(at):
    clock = SaveClock(CheckpointConfig(memory_seconds=0), decides=True)
    at(1e9)
    assert not clock.receive(clock.signal(False)) and clock.memory_due and not clock.save_due
    clock.taken(SnapshotPurpose())
    clock.receive(clock.signal(False))
    assert clock.memory_due


def test_what_replicas_agreed_on_reaches_all_ranks_with_the_sum_and_stays() -> None:
    clocks = [SaveClock(CheckpointConfig(), decides=rank == 0) for rank in range(3)]
    assert all(clock.agreed_step == -1 for clock in clocks)
    for told, known in ((-1, -1), (0, 0), (2**28, 2**28), (-1, 2**28)):
        total = sum(clock.signal(rank == 2, told if rank == 0 else -1) for rank, clock in enumerate(clocks))
        assert [clock.receive(total) for clock in clocks] == [True] * 3, "somebody asks to stop"
        assert all(clock.agreed_step == known for clock in clocks)


def test_the_end_of_an_attempt_reaches_all_ranks_beside_everything_else() -> None:
    clocks = [SaveClock(CheckpointConfig(), decides=rank == 0) for rank in range(3)]
    for turn in (False, True):
        total = sum(clock.signal(rank == 1, 2**28, turn=turn) for rank, clock in enumerate(clocks))
        assert [clock.receive(total) for clock in clocks] == [True] * 3
        assert all((clock.restart_due, clock.agreed_step) == (turn, 2**28) for clock in clocks)
