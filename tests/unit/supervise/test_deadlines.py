"""If these break: a legal silence is taken for a hang, or a hang is waited for as long as a compilation."""

import dataclasses

from myriad.supervise.observations import RankStatus
from myriad.supervise.policy.hang_detector import Deadlines

ROW = RankStatus(0, 1, "S", "step", "", 1, 0, 0, 0.0, 0.0)


def observe(deadlines: Deadlines, **changes: object) -> None:
    deadlines.observe([dataclasses.replace(ROW, **changes)])  # type: ignore[arg-type]


def test_a_quick_start_does_not_bound_a_slow_one() -> None:
    deadlines = Deadlines(1.0, 60.0)
    for idle in (0.1, 0.5, 0.0):
        observe(deadlines, phase="loading", idle_seconds=idle)
    for idle in (0.5, 1.0, 0.0):
        observe(deadlines, idle_seconds=idle)
    assert deadlines.limit("loading") == 1200.0
    assert deadlines.limit("first step") == 600.0


def test_a_step_that_compiled_is_no_measure_of_the_next() -> None:
    deadlines = Deadlines(1.0, 60.0)
    observe(deadlines, idle_seconds=500.0)
    observe(deadlines, step=2, step_seconds=540.0)
    for step in range(3, 8):
        observe(deadlines, step=step, step_seconds=0.5)
    assert deadlines.limit("step") == 13.5


def test_the_longest_silence_of_a_phase_is_learned_when_it_ends() -> None:
    deadlines = Deadlines(1.0, 60.0)
    for idle in (1.0, 40.0, 0.0, 2.0):
        observe(deadlines, phase="validating", idle_seconds=idle, step_seconds=0.5)
    assert deadlines.limit("validating") == 600.0
    observe(deadlines, step=2, step_seconds=0.5)
    assert deadlines.limit("validating") == 200.0


def test_steps_of_other_replicas_are_learned_again() -> None:
    """A tenth of them takes ten times as long, and nothing hangs."""
    deadlines = Deadlines(1.0, 60.0)
    for step in range(10):
        observe(deadlines, step=step, step_seconds=20.0)
    assert deadlines.limit("step") == 100.0
    deadlines.forget_steps()
    assert deadlines.limit("step") == 600.0


def test_steps_that_get_more_tokens_are_learned_again() -> None:
    """A phase with eight times the sequence makes steps of 1 s take 20 s, and nothing hangs."""
    deadlines = Deadlines(1.0, 60.0, longer_steps=(7,))
    for step in range(2, 7):
        observe(deadlines, step=step, step_seconds=1.0)
    assert deadlines.limit("step") == 13.5
    observe(deadlines, step=7, step_seconds=1.0)
    assert deadlines.limit("step") == 600.0
    for step in range(8, 12):
        observe(deadlines, step=step, step_seconds=20.0)
    assert deadlines.limit("step") == 100.0
