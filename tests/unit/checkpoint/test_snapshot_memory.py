"""If these fail, the only whole snapshot is overwritten, or one that is still being stored."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myriad.checkpoint.snapshots.snapshot_memory import SnapshotMemory
from myriad.checkpoint.snapshots.snapshot_taker import SlotHolds, SnapshotPurpose

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["take", "hold", "tear", "release"]), st.integers(0, 3)), max_size=40
)


@pytest.fixture
def make():
    made = []

    def create(num_slots: int, slot_bytes: int = 100) -> tuple[SnapshotMemory, SnapshotMemory]:
        """The rank's and the snapshot server's view of the same memory."""
        descriptor = SnapshotMemory.create(num_slots, slot_bytes)
        made.append(descriptor)
        return SnapshotMemory(descriptor), SnapshotMemory(descriptor)

    yield create
    for descriptor in made:
        os.close(descriptor)


@given(st.integers(2, 4), ACTIONS)
def test_a_held_snapshot_stays_and_one_whole_one_is_always_there(num_slots, actions):
    descriptor = SnapshotMemory.create(num_slots, 8)
    rank, server = SnapshotMemory(descriptor), SnapshotMemory(descriptor)
    os.close(descriptor)
    held: set[int] = set()
    newest = step = 0
    for action, number in actions:
        step += 1
        if action == "release":
            known = [slot for slot in server.complete() if slot.held]
            if known:
                chosen = known[number % len(known)]
                server.release(chosen.index)
                held.discard(chosen.step)
            continue
        before = {slot.step for slot in server.complete()}
        slot = rank.begin(step)
        during = {slot.step for slot in server.complete()}
        assert held <= during, "what is held is never overwritten"
        assert not before or during, "one whole snapshot is always there"
        if slot is None:
            assert during == before
            continue
        if before:
            assert newest in during, "the newest is not the one that goes"
        assert server.step_of(slot) is None, "a slot that is being filled holds nothing"
        if action == "tear":
            continue
        rank.view(slot, 0, 8)[:] = step.to_bytes(8, "little")
        rank.end(slot, hold=action == "hold")
        newest = step
        held |= {step} if action == "hold" else set()
        assert server.step_of(slot) == step
    for slot in server.complete():
        assert int.from_bytes(server.view(slot.index, 0, 8), "little") == slot.step


def test_both_sides_see_the_same_bytes_in_slots_of_whole_pages(make):
    rank, server = make(3, 5000)
    assert rank.num_slots == 3 and rank.slot_bytes % os.sysconf("SC_PAGE_SIZE") == 0
    rank.touch()
    rank.view(2, 4990, 5)[:] = b"abcde"
    assert bytes(server.view(2, 4990, 5)) == b"abcde" and not any(server.view(1))
    assert rank.slot_address(1) - rank.slot_address(0) == rank.slot_bytes


def test_the_newest_snapshot_up_to_what_is_trusted_stays_until_there_is_a_newer_one(make):
    rank, server = make(3)
    for step in range(1, 40):
        rank.trust(10 * (step // 10))
        slot = rank.begin(step)
        assert slot is not None, "with one slot more than without, nothing waits"
        rank.end(slot, hold=False)
        steps = [slot.step for slot in server.complete()]
        assert step in steps and (step < 11 or rank.trusted in steps or rank.trusted == step)
    assert server.trusted == 30 and 30 in steps


class Server:
    """Stores one step at a time, and copies one at a time; then comes the newest that waits for the same."""

    def __init__(self, memory: SnapshotMemory) -> None:
        self._memory = memory
        self._in_progress = {"store": -1, "copy": -1}
        self._waiting = {"store": -1, "copy": -1}

    def put(self, what: str, step: int) -> None:
        if self._in_progress[what] < 0:
            self._in_progress[what] = step
        else:
            displaced, self._waiting[what] = self._waiting[what], step
            self._release(displaced)

    def finish(self, what: str) -> int:
        """Returns the step that is stored or copied; -1: none."""
        done, self._in_progress[what] = self._in_progress[what], self._waiting[what]
        self._waiting[what] = -1
        self._release(done)
        return done

    def used(self) -> set[int]:
        return {*self._in_progress.values(), *self._waiting.values()} - {-1}

    def _release(self, step: int) -> None:
        for slot in self._memory.complete():
            if slot.step == step and step not in self.used():
                self._memory.release(slot.index)


PURPOSES = {
    "take": SnapshotPurpose(),
    "store": SnapshotPurpose(durable=True),
    "copy": SnapshotPurpose(copies=True),
    "both": SnapshotPurpose(durable=True, copies=True),
}
EVENTS = st.lists(st.sampled_from([*PURPOSES, "stored", "copied", "trust"]), min_size=1, max_size=60)


@given(st.integers(4, 7), EVENTS)
def test_every_snapshot_finds_a_slot_however_slow_storage_is(num_slots, events):
    """Ranks hold different steps. One that left out what others take would leave no step that all have."""
    descriptor = SnapshotMemory.create(num_slots, 8)
    rank, server = SnapshotMemory(descriptor), SnapshotMemory(descriptor)
    os.close(descriptor)
    holds, machine, step = SlotHolds(rank), Server(server), 0
    if num_slots % 2:
        rank.trust(0)  # replicas are compared
    for event in events:
        if event == "stored":
            machine.finish("store")
        elif event == "copied" and (copied := machine.finish("copy")) >= 0:
            server.keep(copied)
        elif event == "trust" and num_slots % 2:
            rank.trust(step)
        elif event in PURPOSES and not (num_slots < 6 and PURPOSES[event].copies):
            step += 1
            slot = rank.begin(step)
            assert slot is not None, server.complete()
            assert step == 1 or step - 1 in [one.step for one in server.complete()], "the newest stays"
            holds_it = holds.may_hold(slot, PURPOSES[event])
            rank.end(slot, hold=holds_it)
            for what, asked in (("store", PURPOSES[event].durable), ("copy", PURPOSES[event].copies)):
                if holds_it and asked:
                    machine.put(what, step)
        assert machine.used() <= {slot.step for slot in server.complete() if slot.held}


def test_of_steps_that_come_while_one_is_stored_the_newest_is_held(make):
    rank, server = make(4)
    holds = SlotHolds(rank)
    for step in range(1, 8):
        slot = rank.begin(step)
        assert slot is not None and holds.may_hold(slot, SnapshotPurpose(durable=True))
        rank.end(slot, hold=True)
        held = [one.step for one in server.complete() if one.held]
        assert held == [1, step] if step > 1 else [1]
