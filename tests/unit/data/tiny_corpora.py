"""Corpora of a few kilobytes, made in milliseconds."""

import random
from pathlib import Path

from myriad.data.corpus_manifest import Manifest, read_manifest
from myriad.data.prepare import PrepareOptions, prepare

__all__ = ["drop_blocks", "flip", "lines", "make_corpus", "options"]


def lines(count: int, seed: int = 1) -> list[str]:
    words = ["alpha", "beta", "gamma", "delta", "épsilon", "漢字", "zeta()", "=", "eta[3];", "theta"]
    chosen = random.Random(seed)
    return [" ".join(chosen.choices(words, k=chosen.randint(3, 40))) for _ in range(count)]


def options(**changes: object) -> PrepareOptions:
    return PrepareOptions(vocabulary=300, validation=0.2, shard_bytes=1 << 16)._replace(**changes)


def make_corpus(
    folder: Path, name: str = "corpus", count: int = 60, seed: int = 1, **changes: object
) -> Path:
    """A prepared corpus of ``count`` documents."""
    source = folder / f"{name}-text"
    source.mkdir(exist_ok=True)
    for number, line in enumerate(lines(count, seed)):
        (source / f"{number:04}.txt").write_text(line)
    manifest = prepare([str(source)], folder / name, options(**changes))
    assert isinstance(manifest, Manifest)
    return folder / name


def drop_blocks(corpus: Path) -> Path:
    """Remove block hashes: older versions wrote corpora without them."""
    for path in corpus.glob("*.blocks"):
        path.unlink()
    manifest = read_manifest(corpus)
    files = {name: one for name, one in manifest.files.items() if not name.endswith(".blocks")}
    manifest.model_copy(update={"files": files}).write(corpus)
    return corpus


def flip(path: Path, at: int, bit: int = 2) -> None:
    """One bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
