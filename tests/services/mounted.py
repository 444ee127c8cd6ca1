"""File systems of a test's own that can go wrong: one that hangs (ext4, frozen), one that is full or
read-only (tmpfs). Whatever a test does, they are thawed and gone after it."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["FrozenDisk", "SmallDisk", "disk_that_hangs", "small_disk"]


def _call(*command: object) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(list(map(str, command)), capture_output=True, timeout=60)


def _need(*programs: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount")
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"needs {program} (util-linux, e2fsprogs)")


def _mount(path: Path, *arguments: object) -> None:
    path.mkdir()
    done = _call("mount", *arguments, path)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.decode().strip()}")


class FrozenDisk:
    """Whoever writes while it is frozen waits in the kernel and cannot even be killed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def freeze(self) -> None:
        done = _call("fsfreeze", "-f", self.path)
        assert done.returncode == 0, done.stderr

    def thaw(self) -> None:
        """Nothing happens when it is not frozen."""
        _call("fsfreeze", "-u", self.path)


@contextmanager
def disk_that_hangs(folder: Path) -> Iterator[FrozenDisk]:
    _need("fsfreeze", "mkfs.ext4", "mount")
    image, path = folder / "disk.img", folder / "disk"
    with image.open("wb") as file:
        file.truncate(2**26)
    assert _call("mkfs.ext4", "-q", "-F", image).returncode == 0
    _mount(path, "-o", "loop", image)
    disk = FrozenDisk(path)
    try:
        yield disk
    finally:
        disk.thaw()
        _call("umount", "-l", path)


class SmallDisk:
    """Of a size that a test chooses."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        """To the last byte."""
        with (self.path / "other people's files").open("wb", buffering=0) as file:
            try:
                while file.write(b"\1" * 4096):
                    pass
            except OSError:
                pass

    def make_room(self) -> None:
        (self.path / "other people's files").unlink(missing_ok=True)

    def allow(self, how: str) -> None:
        """``ro`` or ``rw``."""
        done = _call("mount", "-o", f"remount,{how}", self.path)
        assert done.returncode == 0, done.stderr


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[SmallDisk]:
    _need("mount")
    path = folder / "disk"
    _mount(path, "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs")
    try:
        yield SmallDisk(path)
    finally:
        _call("umount", "-l", path)
