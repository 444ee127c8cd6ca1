"""Helpers for faults of storage and memory: a small disk, a control group, flipped bits. Most need root."""

import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from myriad.data.block_hashes import BLOCK_BYTES
from myriad.data.config import DataConfig
from myriad.data.corpus_cache import prepare_embedded
from myriad.data.corpus_opening import EMBEDDED
from myriad.errors import BadInputError

__all__ = [
    "CORPUS_COPY",
    "committed_steps",
    "corpus_folder",
    "fill",
    "flip_a_bit",
    "flip_tokens",
    "free",
    "memory_group",
    "small_disk",
]

_DISK_BYTES = 64 * 2**20
_FILLER = "filler"
CORPUS_COPY = "corpus"
"""Folder inside a run's folder with the copy of the corpus, which may be damaged."""


@contextmanager
def small_disk(where: Path) -> Iterator[None]:
    """Mount a tmpfs over a folder during the block. Raises `BadInputError`."""
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(where)]
    try:
        subprocess.run(mounting, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        raise BadInputError("faults", "disk-full", "needs root, and a mount of a tmpfs") from None
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True, capture_output=True)


def fill(folder: Path) -> None:
    """Fill the folder's disk to the last byte."""
    with (folder / _FILLER).open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(2**16))


def free(folder: Path) -> None:
    """Free what `fill` took."""
    (folder / _FILLER).unlink(missing_ok=True)


def committed_steps(checkpoints: Path) -> list[int]:
    """Return the steps of committed checkpoints, oldest first."""
    found = [path.parent.name.removeprefix("step-") for path in checkpoints.glob("step-*/manifest.json")]
    return sorted(int(step) for step in found if step.isdigit())


def flip_a_bit(checkpoint: Path) -> None:
    """Flip a bit in the middle of a tensor file; length, time and name stay the same."""
    path = max(checkpoint.glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1 << random.randrange(8)
    with path.open("r+b") as file:
        file.write(content)
        os.fsync(file.fileno())


def corpus_folder(data: DataConfig) -> Path:
    """Return the folder of a corpus, to be copied before it is damaged. Raises `BadInputError` for other
    corpora."""
    source = prepare_embedded(None, data.vocabulary) if data.corpus == EMBEDDED else Path(data.corpus)
    if data.mixture or not source.is_dir():
        raise BadInputError("data.corpus", data.corpus, "embedded or a folder, for a fault of the corpus")
    return source


def flip_tokens(corpus: Path) -> None:
    """Flip a bit in each block of the training text."""
    for path in corpus.glob("train-*.bin"):
        with path.open("r+b") as file:
            for start in range(0, path.stat().st_size, BLOCK_BYTES):
                file.seek(start)
                byte = file.read(1)[0]
                file.seek(start)
                file.write(bytes([byte ^ 1]))
            os.fsync(file.fileno())


@contextmanager
def memory_group() -> Iterator[Path]:
    """Create a memory control group without a limit for this process and its children. Raises
    `BadInputError`."""
    group = None
    try:
        home = _own_group()
        group = home / f"myriad-faults-{os.getpid()}"
        group.mkdir()
        _enter(group)
    except OSError:
        if group is not None:
            with suppress(OSError):
                group.rmdir()
        raise BadInputError("faults", "host-memory", "needs root, and control groups of memory") from None
    try:
        yield group
    finally:
        _leave(group, home)


def _own_group() -> Path:
    """Return this process's group, by the version that manages memory here. Raises ``OSError``."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for root in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
            group = root / path.lstrip("/")
            if "memory" in controllers.split(",") and (group / "memory.limit_in_bytes").exists():
                return group
            if not controllers and (group / "memory.max").exists():
                return group
    raise FileNotFoundError("no memory cgroup")


def _enter(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _leave(group: Path, home: Path) -> None:
    """Move all processes out of the group and remove it: a snapshot server may outlive the run briefly."""
    for pid in (group / "cgroup.procs").read_text().split():
        with suppress(OSError):
            (home / "cgroup.procs").write_text(pid)
    with suppress(OSError):
        group.rmdir()
