"""If these fail, two commands that write one folder destroy each other's work, or what a full disk or a kill
has left looks whole."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from myriad.checkpoint.checkpoint_files import save
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder, verify
from myriad.checkpoint.storage.staged_folder import locked_folder, staged_folder
from myriad.checkpoint.storage.storage_backends import LocalStorage
from myriad.errors import BadInputError, RunFailedError
from myriad.model.tensor_shard import TensorShard
from myriad.train.checkpoint_tools import reshard_run as resharding
from myriad.train.checkpoint_tools.reshard_run import reshard

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
HOLD = """
import sys, pathlib
from myriad.checkpoint.storage.staged_folder import staged_folder
with staged_folder(pathlib.Path(sys.argv[1])) as work:
    (work / "one").write_text("theirs")
    print("at work", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_process(out: Path) -> Iterator["subprocess.Popen[str]"]:
    """Which is writing ``out``."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(out)], **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "at work\n"
        yield process


def test_the_second_of_two_writers_is_refused_and_the_first_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with another_process(out) as first:
        with pytest.raises(BadInputError, match="is being written by another process"), staged_folder(out):
            pass
        first.communicate("")
    assert (out / "one").read_text() == "theirs" and os.listdir(tmp_path) == ["out"]


def test_what_a_killed_writer_has_left_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with another_process(out) as first:
        first.kill()
        first.wait()
    assert (tmp_path / ".out.partial" / "one").exists() and not out.exists()
    with staged_folder(out) as work:
        (work / "two").write_text("ours")
    assert os.listdir(out) == ["two"] and os.listdir(tmp_path) == ["out"]


def test_without_locks_the_first_to_finish_has_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr("fcntl.flock", unsupported)
    out = tmp_path / "out"
    with pytest.raises(BadInputError, match="must be new or an empty folder"), staged_folder(out) as slow:
        (slow / "slow").write_text("")
        with staged_folder(out) as quick:
            (quick / "quick").write_text("")
    assert os.listdir(out) == ["quick"] and os.listdir(tmp_path) == ["out"]


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="not written; partial files were removed: No space") as caught:
        with staged_folder(tmp_path / "out") as work:
            (work / "half").write_text("half")
            raise FULL
    assert "\n" not in str(caught.value) and os.listdir(tmp_path) == []


def test_a_link_to_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    with staged_folder(tmp_path / "link") as work:
        (work / "one").write_text("")
    assert (tmp_path / "link").is_symlink() and os.listdir(tmp_path / "disk") == ["one"]


# A reshard


CUTS = [[TensorShard("model.w", (8,), (start,), torch.empty(4, device="meta"))] for start in (0, 4)]


@pytest.fixture
def source(tmp_path: Path) -> Any:
    part = TensorShard("model.w", (8,), (0,), torch.arange(8.0))
    folder = CheckpointFolder(tmp_path / "source")
    save(folder, 7, [part], {"step": 7})
    return folder.at_step(7)


def cut(source: Any, out: Path, show: Any = lambda done, size: None) -> None:
    reshard(source, CheckpointFolder(out).at_step(7), CUTS, {}, show)


def test_a_reshard_into_a_folder_that_another_process_writes_is_refused(source: Any, tmp_path: Path) -> None:
    with locked_folder(tmp_path / "out" / "step-7", "out"):
        with pytest.raises(BadInputError, match="is being written by another process"):
            cut(source, tmp_path / "out")
    cut(source, tmp_path / "out")
    assert verify(CheckpointFolder(tmp_path / "out").at_step(7)) == []
    assert not (tmp_path / "out" / "step-7" / "writer").exists()


def test_a_full_disk_or_a_kill_leaves_nothing_that_stops_the_next_reshard(
    source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:

        def full(self: LocalStorage, path: str, content: bytes) -> None:
            if path.endswith("manifest.json"):
                raise FULL
            put(self, path, content)

        put = LocalStorage.put
        patch.setattr(LocalStorage, "put", full)
        with pytest.raises(RunFailedError, match=r"partial files were removed.*No space left"):
            cut(source, out)
    assert os.listdir(out) == []
    (out / "step-7").mkdir()
    (out / "step-7" / "__0_0.distcp").write_bytes(b"half, of a process that was killed")
    cut(source, out)
    assert verify(CheckpointFolder(out).at_step(7)) == []


def test_where_no_lock_reaches_the_later_reshard_wins_and_the_earlier_ends(
    source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an object store."""
    monkeypatch.setattr(resharding, "_alone", lambda target: nullcontext())
    begun: list[bool] = []

    def other_begins(done: int, size: int) -> None:
        if not begun:
            begun.append(True)
            cut(source, tmp_path / "out")

    with pytest.raises(RunFailedError, match="another process is writing it"):
        cut(source, tmp_path / "out", other_begins)
    assert verify(CheckpointFolder(tmp_path / "out").at_step(7)) == []
