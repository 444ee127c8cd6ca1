"""A folder of checkpoints: ``step-N`` exists only when complete and hashed. No torch here.

    step-20.partial/   every rank writes its pieces            (`myriad.checkpoint.store`)
                       rank 0 reads all back, hashes them, writes manifest.json, fsyncs
    step-20/           one rename
    step-20.damaged/   a resume found other bytes than the manifest says: never tried again

A kill at any instant leaves the older checkpoints and at most a ``.partial`` folder, which the next save
replaces.
"""

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from myriad.errors import RunFailedError

__all__ = ["CheckpointFolder", "Manifest", "commit", "read_manifest", "verify"]

_MANIFEST, _VERSION = "manifest.json", 1

Show = Callable[[int, int], None]
"""Told the bytes read and the bytes to read."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint should hold."""

    progress: dict[str, Any]
    """Where the run was."""
    time: float
    """Of the commit, seconds since the epoch."""
    files: dict[str, dict[str, Any]]
    """``bytes`` and ``xxh3_128`` by name."""

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(int(file["bytes"]) for file in self.files.values())


@dataclass(frozen=True)
class CheckpointFolder:
    """Where a run keeps its checkpoints."""

    path: Path

    def of_step(self, step: int) -> Path:
        """The folder of the checkpoint after ``step`` steps."""
        return self.path / f"step-{step}"

    def steps(self) -> list[int]:
        """Steps with a committed checkpoint, ascending."""
        found = (entry.name.removeprefix("step-") for entry in self.path.glob("step-*") if entry.is_dir())
        return sorted(int(name) for name in found if name.isdigit())

    def newest(self) -> tuple[int, list[str]] | None:
        """Step of the newest checkpoint that verifies, and what is wrong with newer ones; ``None`` when there
        is none at all. Changes nothing. Raises `RunFailedError` when there are some and none verifies."""
        problems: list[str] = []
        for step in reversed(self.steps()):
            if not (found := verify(self.of_step(step))):
                return step, problems
            problems += found
        if problems:
            raise RunFailedError(f"no checkpoint verifies: {'; '.join(problems)}")
        return None

    def set_aside_after(self, step: int) -> list[Path]:
        """Renames every checkpoint of a later step, which did not verify, so that nothing tries it again.
        Gives the new names."""
        aside = []
        for later in (found for found in self.steps() if found > step):
            damaged = self.of_step(later).with_name(f"step-{later}.damaged")
            shutil.rmtree(damaged, ignore_errors=True)
            self.of_step(later).rename(damaged)
            aside.append(damaged)
        if aside:
            _sync_folder(self.path)
        return aside

    def prune(self, keep: int, newest: int) -> list[int]:
        """Removes all but ``keep`` checkpoints up to step ``newest``, which is known to be good; gives their
        steps. Later ones count for nothing: they did not verify."""
        removed = [step for step in self.steps() if step <= newest][:-keep]
        for step in removed:
            shutil.rmtree(self.of_step(step), ignore_errors=True)
        return removed


def commit(partial: Path, final: Path, progress: dict[str, Any]) -> None:
    """Makes a checkpoint of a folder whose files are complete and on disk."""
    files = {
        entry.name: {"bytes": entry.stat().st_size, "xxh3_128": _hash(entry)}
        for entry in sorted(partial.iterdir())
    }
    manifest = {"version": _VERSION, "time": time.time(), "progress": progress, "files": files}
    with open(partial / _MANIFEST, "w") as stream:
        json.dump(manifest | {"xxh3_128": _manifest_hash(manifest)}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    _sync_folder(partial)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    _sync_folder(final.parent)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash(path: Path, told: Callable[[int], None] = lambda count: None) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as stream:
        while block := stream.read(2**22):
            digest.update(block)
            told(len(block))
    return digest.hexdigest()


def _manifest_hash(manifest: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode())


def read_manifest(checkpoint: Path) -> Manifest:
    """Raises ``ValueError`` or ``OSError`` for one that is not as it was written."""
    path = checkpoint / _MANIFEST
    written = json.loads(path.read_text())
    if not isinstance(written, dict) or written.pop("xxh3_128", None) != _manifest_hash(written):
        raise ValueError("its bytes changed after it was written")
    if written["version"] > _VERSION:
        raise ValueError(f"of version {written['version']}; this program reads up to {_VERSION}")
    return Manifest(written["progress"], written.get("time", path.stat().st_mtime), written["files"])


def verify(checkpoint: Path, *, sizes_only: bool = False, show: Show | None = None) -> list[str]:
    """What is wrong with a checkpoint, a line for each file; empty when every byte is as it was written.

    ``sizes_only``: a quick look that finds what is missing or cut short."""
    try:
        manifest = read_manifest(checkpoint)
    except (OSError, ValueError) as error:
        return [f"{checkpoint.name}/{_MANIFEST}: not readable ({error})"]
    read, problems = 0, []

    def told(count: int) -> None:
        nonlocal read
        read += count
        if show is not None:
            show(read, manifest.num_bytes)

    for name, expected in manifest.files.items():
        path = checkpoint / name
        if not path.is_file():
            problems.append(f"{checkpoint.name}/{name}: missing")
        elif (size := path.stat().st_size) != expected["bytes"]:
            problems.append(f"{checkpoint.name}/{name}: {size} bytes instead of {expected['bytes']}")
        elif not sizes_only and _hash(path, told) != expected["xxh3_128"]:
            problems.append(f"{checkpoint.name}/{name}: its bytes changed after it was written")
    return problems
