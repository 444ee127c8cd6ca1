"""If these fail, two runs store in one place, and each resumes from the other's state or removes it; or a run
whose machine was lost cannot go on from its bucket."""

import shutil
from pathlib import Path

import pytest

from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.checkpoint.storage.folder_owner import AcquiredFolder, acquire_folder


def make_run(path: Path) -> Path:
    path.mkdir()
    (path / "job.toml").write_text("")
    return path


def claim(place: Path, run: Path) -> AcquiredFolder:
    return acquire_folder(str(place), 0, 60.0, str(run))


def test_a_second_run_in_one_place_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    first, second, place = make_run(tmp_path / "first"), make_run(tmp_path / "second"), tmp_path / "place"
    assert claim(place, first).problem is None
    refused = claim(place, second)
    assert refused.problem is not None and f"is where the run {first} stores" in refused.problem
    assert CheckpointFolder(place).owner() == 1, "the first one's attempt still owns it"
    assert claim(place, tmp_path / "second" / ".." / "first") == AcquiredFolder(2)


def test_the_checkpoints_of_another_run_are_not_a_place(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "first"), make_run(tmp_path / "second")
    refused = claim(first / "checkpoints", second)
    assert refused.problem is not None and str(first) in refused.problem
    assert not (first / "checkpoints").exists()
    assert claim(first / "checkpoints", first).problem is None


@pytest.mark.parametrize("gone", ["moved", "lost", "damaged note", "deep note"])
def test_what_a_run_left_that_is_not_there_is_taken_over(tmp_path: Path, gone: str) -> None:
    first, place = make_run(tmp_path / "first"), tmp_path / "place"
    claim(place, first)
    if gone == "moved":
        first.rename(second := tmp_path / "second")
    else:
        shutil.rmtree(first)
        second = make_run(tmp_path / "second")
    if gone == "damaged note":
        (place / "run.json").write_bytes(b"\xff{")
    if gone == "deep note":
        (place / "run.json").write_bytes(b"[" * 100_000)
    taken = claim(place, second)
    assert taken.problem is None and taken.attempt == 2
    assert gone.endswith("note") or str(first) in str(taken.taken_from)
    assert claim(place, second).taken_from is None
