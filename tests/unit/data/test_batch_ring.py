"""If these fail, a rank computes on half a batch, or memory stays taken when a run has died."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.data import batch_ring as module
from myriad.data.batch_ring import Geometry, Ring, rendezvous_paths
from myriad.errors import RunFailedError
from myriad.system.processes import process_start_ticks

NAME = f"test-ring-{os.getpid()}"


def make(num_slots: int = 3, num_readers: int = 2, first_step: int = 0) -> Ring:
    ring, descriptor = Ring.create(NAME, Geometry(num_slots, 2, 5, num_readers), first_step)
    os.close(descriptor)
    ring.remove_name()
    return ring


def fill(ring: Ring) -> list[int]:
    """What an ideal writer would fill now."""
    filled = []
    while (step := ring.next_to_fill()) is not None:
        slot = ring.begin(step)
        assert slot is not None
        slot[:] = step
        ring.commit(step)
        filled.append(step)
    return filled


@settings(deadline=None)
@given(
    num_slots=st.integers(2, 4),
    moves=st.lists(st.tuples(st.integers(0, 2), st.one_of(st.none(), st.integers(0, 40))), max_size=40),
)
def test_what_a_reader_holds_is_never_written_over(
    num_slots: int, moves: list[tuple[int, int | None]]
) -> None:
    ring = make(num_slots, num_readers=3)
    asked, held = [0, 0, 0], {}
    for reader, seek in moves:
        asked[reader] = asked[reader] + 1 if seek is None else seek
        held.pop(reader, None)
        ring.ask(reader, asked[reader])
        fill(ring)
        for other, step in enumerate(asked):
            if ring.is_ready(step):
                held[other] = step
        assert all((ring.view(step) == step).all() and ring.is_ready(step) for step in held.values())
    for reader in range(3):
        ring.ask(reader, 50)
    fill(ring)
    assert (ring.view(50) == 50).all() and ring.is_ready(50)


def test_steps_are_prepared_ahead_as_far_as_there_are_slots() -> None:
    ring = make(num_slots=3, first_step=7)
    assert fill(ring) == [7, 8, 9]
    ring.ask(0, 8)
    assert fill(ring) == []  # the other reader may still need 7
    ring.ask(1, 8)
    assert fill(ring) == [10]


def test_a_slot_asked_for_while_the_writer_takes_it_is_given_back() -> None:
    ring = make(num_slots=2)
    assert fill(ring) == [0, 1]
    for reader in (0, 1):
        ring.ask(reader, 2)
    assert ring.next_to_fill() == 2
    ring.ask(1, 0)  # a seek back, between the writer's look and its write
    assert ring.begin(2) is None and ring.is_ready(0)


def test_a_half_written_slot_is_not_ready() -> None:
    ring = make()
    assert ring.begin(0) is not None
    assert not ring.is_ready(0) and ring.next_to_fill() == 0


def test_an_error_reaches_all(tmp_path: Path) -> None:
    ring = make()
    assert ring.error is None
    ring.fail("shard 漢 is gone")
    assert ring.error == "shard 漢 is gone"


def test_the_name_goes_when_all_have_attached() -> None:
    ring, descriptor = Ring.create(NAME, Geometry(2, 1, 2, 2), 0)
    os.close(descriptor)
    ring.mark_attached(0)
    ring.remove_name_when_attached()
    other = Ring.attach(NAME)
    assert other is not None and other.geometry == ring.geometry
    other.mark_attached(1)
    ring.remove_name_when_attached()
    assert Ring.attach(NAME) is None and not any(path.exists() for path in rendezvous_paths(NAME))


def test_what_a_killed_owner_left_is_not_attached_to_and_is_cleared_by_the_next() -> None:
    code = "import os; from myriad.data.batch_ring import *; "
    code += f"Ring.create('{NAME}-dead', Geometry(2, 1, 2, 2), 0)"
    subprocess.run([sys.executable, "-c", code + "; os._exit(9)"], check=False, timeout=60)
    left = [path for path in rendezvous_paths(f"{NAME}-dead") if path.exists()]
    assert len(left) == 1 and Ring.attach(f"{NAME}-dead") is None
    make()
    assert not left[0].exists()


def test_a_small_shared_memory_falls_back_to_a_file_and_a_full_disk_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_folders", lambda: [tmp_path / "none", tmp_path])
    ring, descriptor = Ring.create(NAME, Geometry(2, 1, 2, 1), 0)
    os.close(descriptor)
    assert [path.parent for path in tmp_path.iterdir()] == [tmp_path]
    assert np.array_equal(ring.view(0), [[0, 0]])
    monkeypatch.setattr(module, "_folders", lambda: [tmp_path / "none"])
    with pytest.raises(RunFailedError, match="no room for"):
        Ring.create(NAME, Geometry(2, 1, 2, 1), 0)


def test_a_process_is_known_by_its_start() -> None:
    assert process_start_ticks(os.getpid()) is not None
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(60)
    assert process_start_ticks(gone.pid) is None


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_ring_that_another_user_laid_there_is_no_training_data(kind: str, tmp_path: Path) -> None:
    ring, descriptor = Ring.create(NAME, Geometry(3, 2, 5, 2), 0)
    os.close(descriptor)
    (path,) = [one for one in rendezvous_paths(NAME) if one.exists()]
    try:
        if kind == "file":
            os.chown(path, 65534, 65534)
        else:
            kept = tmp_path / "kept"
            kept.write_bytes(path.read_bytes())
            path.unlink()
            path.symlink_to(kept)
        assert Ring.attach(NAME) is None
    finally:
        path.unlink()
        ring.remove_name()
