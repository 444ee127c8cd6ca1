"""If these fail, a fault comes at another moment than was written, to another rank, or never stops coming."""

import json
from pathlib import Path

import pytest

from myriad.faults.rank_faults import CAUSED, MemoryLimit, arm
from myriad.faults.storage_faults import committed_steps, flip_a_bit
from myriad.system.jsonl import JsonlTail
from myriad.telemetry.progress.progress_page import ProgressRow

ERROR = {"number": 0, "kind": "exception", "rank": 1, "step": 3, "during": "backward", "group": "None"}


@pytest.fixture
def armed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A row of a rank that is to cause something; what is wrapped is put right afterwards."""
    for name in ("step", "enter"):
        monkeypatch.setattr(ProgressRow, name, getattr(ProgressRow, name))

    def begin(rank: int, *faults: dict) -> ProgressRow:
        monkeypatch.setenv("RANK", str(rank))
        (tmp_path / "planned.json").write_text(json.dumps(faults))
        arm(str(tmp_path / "planned.json"))
        return ProgressRow.unseen()

    return begin


def train(row: ProgressRow, steps: int) -> None:
    for step in range(1, steps + 1):
        row.step(step)
        for part in ("forward", "backward"):
            row.leave(row.enter(part, None, 0), None, 0)
        row.step_done()


def test_an_error_comes_at_its_step_and_its_part_in_every_attempt(armed, tmp_path: Path) -> None:
    for attempt in (1, 2):
        row = armed(1, ERROR)
        train(row, 2)
        row.step(3)
        row.enter("forward", None, 0)
        with pytest.raises(RuntimeError, match="on purpose"):
            row.enter("backward", None, 0)
        lines = JsonlTail(tmp_path / CAUSED).poll()
        assert [line["step"] for line in lines] == [3] * attempt


def test_another_rank_trains_on(armed) -> None:
    train(armed(0, ERROR), 5)


def test_what_was_caused_once_does_not_come_again(armed, tmp_path: Path) -> None:
    (tmp_path / CAUSED).write_text('{"number": 0, "time": 1.0, "step": 3}\n')
    train(armed(1, ERROR | {"kind": "hang"}), 5)


def test_one_bit_of_the_largest_tensor_file_flips(tmp_path: Path) -> None:
    small, large = tmp_path / "__1_0.distcp", tmp_path / "__0_0.distcp"
    small.write_bytes(bytes(10))
    large.write_bytes(bytes(1001))
    flip_a_bit(tmp_path)
    assert small.read_bytes() == bytes(10)
    changed = large.read_bytes()
    assert len(changed) == 1001 and sum(byte.bit_count() for byte in changed) == 1


def test_only_committed_steps_are_damaged_the_newest_last(tmp_path: Path) -> None:
    for name in ("step-9", "step-10", "step-20.damaged"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").touch()
    (tmp_path / "step-30").mkdir()
    assert committed_steps(tmp_path) == [9, 10]


def test_a_limit_of_memory_is_set_and_lifted_in_either_version(tmp_path: Path) -> None:
    for files, none in ((("memory.max", "memory.current"), "max"), (("memory.limit_in_bytes",), "-1")):
        group = tmp_path / files[0]
        group.mkdir()
        (group / files[0]).touch()
        limit = MemoryLimit(group)
        limit.set(2**20)
        assert (group / files[0]).read_text() == "1048576"
        limit.set(None)
        assert (group / files[0]).read_text() == none
