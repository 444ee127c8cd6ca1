"""What checking blocks of tokens costs: the hash, and batches read with and without it.

    python benchmarks/data/block_hashes.py

One thread. The corpus is random tokens of two bytes. "warm": all of it is in the page cache; "cold": none of
it, at the start of each measurement. CPU time is that of the process, user and system; the share of a step is
that CPU time against ``--step-seconds`` of one core.
"""

import argparse
import hashlib
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import xxhash

from myriad.data.block_hashes import BLOCK_BYTES, hash_prefix
from myriad.data.config import DataConfig
from myriad.data.corpus import Corpora, read_batch
from myriad.data.corpus_opening import open_corpora
from myriad.data.indexed import IndexedWriter, token_type

HASHES: dict[str, Callable[[memoryview], object]] = {
    "XXH3-64 (xxhash)": xxhash.xxh3_64_intdigest,
    "XXH3-128 (xxhash)": xxhash.xxh3_128_intdigest,
    "CRC-32 (zlib)": zlib.crc32,
    "SHA-256 (hashlib)": lambda block: hashlib.sha256(block).digest(),
    "BLAKE2b (hashlib)": lambda block: hashlib.blake2b(block, digest_size=16).digest(),
}


def print_hashes() -> None:
    """Speed of each candidate on blocks that are not in the processor's cache."""
    content = memoryview(np.random.default_rng(1).bytes(1 << 27))
    print("| hash | GB/s | a block of 64 KiB, us |\n|---|---|---|")
    for name, function in HASHES.items():
        began = time.process_time()
        for start in range(0, len(content), BLOCK_BYTES):
            function(content[start : start + BLOCK_BYTES])
        seconds = time.process_time() - began
        rate = len(content) / seconds
        print(f"| {name} | {rate / 1e9:.2f} | {BLOCK_BYTES / rate * 1e6:.1f} |")


def make(folder: Path, megabytes: int) -> tuple[Path, Path]:
    """The same tokens with and without block hashes."""
    with IndexedWriter(folder / "checked", token_type(50_000)) as writer:
        for _ in range(megabytes):
            writer.add(np.random.default_rng(2).integers(0, 50_000, 1 << 19))
    for suffix in (".bin", ".idx"):
        shutil.copyfile(folder / f"checked{suffix}", folder / f"plain{suffix}")
    hash_prefix(folder / "checked")
    os.sync()
    return folder / "checked", folder / "plain"


def drop_cache(prefix: Path) -> None:
    """Its pages are read from the disk again."""
    with prefix.with_suffix(".bin").open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(corpora: Corpora, steps: range, rows: int) -> tuple[float, float]:
    """CPU and wall milliseconds of a step."""
    sampler, out = corpora.sampler(1), np.empty((rows, corpora.sequence + 1), np.int32)
    cpu, wall = time.process_time(), time.perf_counter()
    for step in steps:
        read_batch(corpora, sampler, range(step * rows, (step + 1) * rows), out)
    return 1e3 * (time.process_time() - cpu) / len(steps), 1e3 * (time.perf_counter() - wall) / len(steps)


def print_batches(prefixes: tuple[Path, Path], settings: argparse.Namespace) -> None:
    """A row for each way of reading; medians of the rounds, in turn."""
    ways = [(cold, prefix) for cold in (False, True) for prefix in prefixes]
    found: dict[tuple[bool, Path], list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(settings.rounds):
        for cold, prefix in ways:
            corpora = open_corpora(DataConfig(corpus=str(prefix)), settings.sequence)
            if cold:
                drop_cache(prefix)
            steps = range(number * settings.steps, (number + 1) * settings.steps)
            if not cold:
                measure(corpora, steps, settings.rows)
            found[cold, prefix].append(measure(corpora, steps, settings.rows))
    print(f"\n{settings.rows} x {settings.sequence} tokens a step, {settings.megabytes} MB of tokens")
    print("| page cache | tokens | CPU, ms/step | wall, ms/step | share of a step |\n|---|---|---|---|---|")
    for (cold, prefix), rounds in found.items():
        cpu, wall = (median(values) for values in zip(*rounds, strict=True))
        share = cpu / 1e3 / settings.step_seconds
        print(f"| {'cold' if cold else 'warm'} | {prefix.name} | {cpu:.2f} | {wall:.2f} | {share:.2%} |")


def main() -> None:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512, help="of tokens (default 512)")
    parser.add_argument("--rows", type=int, default=32, help="sequences in a step of the node (default 32)")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens in a sequence (default 2048)")
    parser.add_argument("--steps", type=int, default=50, help="measured steps of a round (default 50)")
    parser.add_argument("--rounds", type=int, default=5, help="of which the median counts (default 5)")
    parser.add_argument("--step-seconds", type=float, default=1.0, help="a step of training (default 1)")
    settings = parser.parse_args()
    print_hashes()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        print_batches(make(Path(folder), settings.megabytes), settings)


if __name__ == "__main__":
    main()
