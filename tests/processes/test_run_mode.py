"""If these fail, other users of a machine read weights, logs or traces; or a group cannot, that should."""

import os
import stat
import subprocess
import sys
from pathlib import Path

from myriad.job import load_job
from myriad.run import Run

SMALL = ("--model.layers", "2", "--model.hidden", "32", "--model.sequence", "32", "--train.threads", "1")
JOB = ("tiny", *SMALL, "--train.steps", "6", "--checkpoint.every", "3", "--layout.dp", "2", "--oversubscribe")


def modes(folder: Path) -> dict[str, int]:
    """The mode of each file and folder, by its path."""
    return {
        str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode)
        for path in (folder, *folder.rglob("*"))
        if not path.is_symlink()
    }


def train(folder: Path, *options: str, umask: int = 0o022) -> None:
    command = [sys.executable, "-m", "myriad.cli.main", "train", *options]
    ended = subprocess.run(
        command, cwd=folder.parent, capture_output=True, text=True, timeout=250, umask=umask
    )
    assert ended.returncode == 0, ended.stderr + ended.stdout


def test_a_group_reads_what_it_should_and_a_resume_changes_who(tmp_path: Path) -> None:
    def group_may(name: str, mode: int) -> bool:
        is_folder = (tmp_path / "run" / name).is_dir()
        return mode & 0o077 == (0o050 if is_folder else 0o040)

    private = ("secret", "id", "lock")
    train(tmp_path / "run", *JOB, "--run", str(tmp_path / "run"), "--run.mode", "0750", umask=0o077)
    found = modes(tmp_path / "run")
    assert {name for name, mode in found.items() if not group_may(name, mode)} == {*private}
    assert all(found[name] == 0o600 for name in private)
    run = Run(tmp_path / "run")
    with run.lock():
        run.create_or_resume(load_job(str(run.job_path), ["run.mode=0700"]))
    assert {name for name, mode in modes(tmp_path / "run").items() if mode & 0o077} == set()
    train(
        tmp_path / "run", str(tmp_path / "run"), "--train.steps", "9", "--run.mode", "750", "--oversubscribe"
    )
    found = modes(tmp_path / "run")
    assert {name for name, mode in found.items() if not group_may(name, mode)} == {*private}


def test_the_group_of_the_folder_above_stays(tmp_path: Path) -> None:
    tmp_path.chmod(0o2770)
    run = Run(tmp_path / "run")
    before = os.umask(0o022)
    try:
        with run.lock():
            run.create_or_resume(load_job("tiny", ["run.mode=0750"]))
            assert os.umask(0o777 & ~0o750) == 0o027, "files of this run follow its folder"
        assert os.umask(0o022) == 0o022, "and no others"
    finally:
        os.umask(before)
    for path in (run.path, run.logs_path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o2750
