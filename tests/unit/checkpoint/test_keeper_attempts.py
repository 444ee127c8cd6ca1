"""If these fail, a run that died twice loses what it had in memory, or goes on from a past it had left."""

import pytest

from myriad.checkpoint.keeper import Keeper
from myriad.checkpoint.piece import Piece, join_pieces

PIECE = Piece("model.w", (8,), "uint8", (0,), (8,), 8, 0, b"", b"")


def join(keeper, attempt, resumed=None):
    values, envelopes = join_pieces([PIECE])
    message = {
        "attempt": attempt, "rank": 0, "world": 1, "num_local": 1, "num_slots": 3, "pieces": values,
        "resumed": resumed,
    }  # fmt: skip
    return keeper.join(message, memoryview(envelopes))


def take(keeper, member, *steps):
    for step in steps:
        slot = member.memory.begin(step)
        member.memory.view(slot, 0, 8)[:] = step.to_bytes(8, "little")
        member.memory.end(slot, hold=False)
        wants = {"durable": False, "copies": False, "last": False}
        keeper.whole(member, {"step": step, "slot": slot, **wants})


def known(keeper):
    return sorted((one.attempt, step) for one in keeper.snapshots() for step in one.steps())


def test_attempts_that_die_before_their_first_snapshot_lose_nothing():
    keeper = Keeper()
    take(keeper, join(keeper, 1), 7, 8)
    for attempt in (2, 3, 4):
        join(keeper, attempt, resumed=8)
        assert (1, 8) in known(keeper)
    member = join(keeper, 5, resumed=8)
    take(keeper, member, 9, 10)
    assert known(keeper) == [(5, 9), (5, 10)], "the past goes once the present has two"


def test_snapshots_newer_than_the_one_a_run_went_on_from_never_come_back():
    keeper = Keeper()
    zombie = join(keeper, 1)
    take(keeper, zombie, 7, 8, 9)
    take(keeper, join(keeper, 2, resumed=8), 9)
    assert known(keeper) == [(1, 7), (1, 8), (2, 9)]
    take(keeper, zombie, 20)
    assert (1, 20) not in known(keeper)


def test_a_run_that_begins_from_nothing_has_no_past():
    keeper = Keeper()
    take(keeper, join(keeper, 1), 7)
    join(keeper, 2)
    assert known(keeper) == []


def test_ranks_of_an_older_attempt_are_turned_away():
    keeper = Keeper()
    old, _ = join(keeper, 1), join(keeper, 3)
    with pytest.raises(OSError, match="attempt 3 has taken over; this is attempt 2"):
        join(keeper, 2)
    take(keeper, old, 9)
    assert known(keeper) == []


def test_what_is_stored_for_a_dead_attempt_ends_with_it_and_leaves_the_keeper(tmp_path):
    """A new attempt that comes while the newest snapshot of the one before is stored owns the members."""
    keeper = Keeper()
    take(keeper, join(keeper, 1), 7)
    join(keeper, 2, resumed=7)
    with pytest.raises(OSError, match="attempt 2 has taken over; this is attempt 1"):
        keeper.store_own(7, 1)
    keeper.flush()
    while not keeper.is_idle:
        pass
    assert (1, 7) in known(keeper)
