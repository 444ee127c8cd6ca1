"""If these fail, a run records the wrong versions of its code, or none."""

import subprocess
from pathlib import Path

import pytest
import torch

from myriad.system.software import commit_of, software_versions


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    (folder / "inner").mkdir(parents=True)
    git(folder, "init")
    for text in ("first", "second"):
        git(folder, "commit", "--allow-empty", "-m", text)
    return folder


def test_the_commit_is_that_of_git_in_each_kind_of_checkout(repository: Path, tmp_path: Path) -> None:
    def agrees(folder: Path) -> bool:
        return commit_of(folder) == git(folder, "rev-parse", "HEAD") != ""

    assert agrees(repository / "inner"), "a branch"
    git(repository, "worktree", "add", str(tmp_path / "tree"), "-b", "other", "HEAD~1")
    assert agrees(tmp_path / "tree") and commit_of(tmp_path / "tree") != commit_of(repository)
    git(repository, "pack-refs", "--all")
    assert agrees(repository) and agrees(tmp_path / "tree"), "packed"
    git(repository, "checkout", "--detach", "HEAD~1")
    assert agrees(repository), "no branch"


def test_without_a_readable_repository_there_is_no_commit(repository: Path, tmp_path: Path) -> None:
    assert commit_of(tmp_path) == ""
    (repository / ".git" / "HEAD").write_text("ref: refs/heads/missing")
    assert commit_of(repository) == ""
    (repository / ".git" / "HEAD").write_bytes(b"\xff\xfe")
    assert commit_of(repository) == ""


def test_versions_are_those_that_run(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository)
    found = software_versions()
    assert found["torch"] == torch.__version__ and found["commit"] == git(repository, "rev-parse", "HEAD")
