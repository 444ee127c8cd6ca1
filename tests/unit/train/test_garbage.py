"""If these break: ranks pause for Python's garbage collector at different steps and wait for each other, or
memory in cycles is never given back."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from myriad.telemetry.spans import Recorder
from myriad.train.step_signals import GarbageSchedule


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """As Python starts, before and after."""
    gc.enable()
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.enable()


def paused_at(schedule: GarbageSchedule, steps: range, generation: int = 1) -> list[int]:
    """Steps after which at least this generation was collected."""
    found, now = [], 0

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] >= generation:
            found.append(now)

    gc.callbacks.append(note)
    try:
        for step in steps:
            now = step
            schedule.after_step(step)
    finally:
        gc.callbacks.remove(note)
    return found


class Knot:
    """Refers to itself: only the collector frees it."""

    def __init__(self) -> None:
        self.own = self


def test_a_resumed_rank_pauses_at_the_steps_of_the_others() -> None:
    first, resumed = GarbageSchedule(4, Recorder()), GarbageSchedule(4, Recorder())
    assert paused_at(first, range(1, 14)) == [1, 4, 8, 12], "once at the start, then by the step's number"
    assert paused_at(resumed, range(7, 14)) == [7, 8, 12]


def test_old_objects_are_looked_at_rarely_but_not_never() -> None:
    schedule = GarbageSchedule(3, Recorder())
    assert paused_at(schedule, range(1, 302), generation=2) == [1, 300]


def test_between_its_steps_nothing_pauses() -> None:
    schedule = GarbageSchedule(10, Recorder())
    schedule.after_step(1)
    collections = [generation["collections"] for generation in gc.get_stats()]
    knots = [weakref.ref(Knot()) for _ in range(5000)]
    assert [generation["collections"] for generation in gc.get_stats()] == collections
    assert all(knot() is not None for knot in knots)
    schedule.after_step(10)
    assert all(knot() is None for knot in knots), "memory in cycles is given back at the step that is due"


def test_what_was_there_at_the_start_is_never_looked_at_again() -> None:
    heap = [[index] for index in range(5000)]
    schedule = GarbageSchedule(10, Recorder())
    schedule.after_step(1)
    assert gc.get_freeze_count() > len(heap)
    assert len(gc.get_objects()) < len(heap)


def test_at_the_end_python_collects_again_if_it_did_before() -> None:
    schedule = GarbageSchedule(10, Recorder())
    schedule.after_step(1)
    assert not gc.isenabled()
    schedule.close()
    assert gc.isenabled() and gc.get_freeze_count() == 0
    gc.disable()
    other = GarbageSchedule(10, Recorder())
    other.after_step(1)
    other.close()
    assert not gc.isenabled(), "whoever had switched it off keeps it off"


def test_a_run_that_never_came_to_a_step_changes_nothing() -> None:
    gc.disable()
    schedule = GarbageSchedule(10, Recorder())
    gc.enable()
    schedule.close()
    assert gc.isenabled()


def test_off_leaves_python_to_it() -> None:
    schedule = GarbageSchedule(0, Recorder())
    assert paused_at(schedule, range(1, 300), generation=2) == []
    assert gc.isenabled() and gc.get_freeze_count() == 0
    schedule.close()


def test_a_pause_is_seen_in_the_spans() -> None:
    recorder = Recorder()
    schedule = GarbageSchedule(2, recorder)
    for step in range(1, 6):
        schedule.after_step(step)
    assert [span.name for span in recorder.newest()] == ["collect_garbage"] * 3
