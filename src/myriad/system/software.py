"""Versions of the software that this process runs, and the commits of its code.

A commit is read from the files of the repository, so no program is started. It does not say whether files
were changed since.
"""

import importlib.metadata
import platform
import re
from contextlib import suppress
from pathlib import Path

from myriad import __version__

__all__ = ["commit_of", "software_versions"]

_PACKAGES = {
    "torch": ("torch",),
    "NCCL": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "triton": ("triton",),
}
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


def software_versions() -> dict[str, str]:
    """Return versions by name. ``commit`` is that of the current folder, and ``myriad commit`` that of
    Myriad's source; each is left out if the folder is not in a git repository."""
    found = {"myriad": __version__, "Python": platform.python_version(), "system": platform.platform()}
    for name, packages in _PACKAGES.items():
        for package in packages:
            with suppress(importlib.metadata.PackageNotFoundError):
                found.setdefault(name, importlib.metadata.version(package))
    with suppress(OSError):  # the current folder may have been removed
        found["commit"] = commit_of(Path.cwd())
    found["myriad commit"] = commit_of(Path(__file__).resolve().parent)
    return {name: text for name, text in found.items() if text}


def commit_of(folder: Path) -> str:
    """Return the commit that is checked out in the git repository around a folder; "": there is none."""
    for place in (folder, *folder.parents):
        if (place / ".git").exists():
            with suppress(OSError, ValueError):
                return _head(place / ".git")
            return ""
    return ""


def _head(git: Path) -> str:
    """Return the commit of HEAD. ``git`` is a repository's folder, or the file of a work tree that names
    one."""
    if git.is_file():
        git = git.parent / git.read_text().removeprefix("gitdir:").strip()
    common = git
    if (git / "commondir").is_file():
        common = git / (git / "commondir").read_text().strip()
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return head if _COMMIT.fullmatch(head) else ""
    name = head.removeprefix("ref:").strip()
    for place in (git, common):
        if (place / name).is_file():
            text = (place / name).read_text().strip()
            return text if _COMMIT.fullmatch(text) else ""
    packed = (common / "packed-refs").read_text().splitlines() if (common / "packed-refs").is_file() else []
    lines = (line.split() for line in packed)
    return next((line[0] for line in lines if len(line) == 2 and line[1] == name), "")
