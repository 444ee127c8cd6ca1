"""Hashes of a token file by block: ``NAME.blocks`` beside ``NAME.bin``, so that a read of a few kilobytes can
be checked without a pass over the file.

    NAME.blocks   "MYRBLK1\\0"  u32 bytes of a block  u32 token type (as in NAME.idx)  u64 bytes of NAME.bin
                  u64[ceil(bytes / block)]  XXH3-64 of each block
                  16 bytes  XXH3-128 of all of the above

Little endian. The manifest of a prepared corpus holds the hash of this file too, so manifest, block hashes
and tokens form a tree; a Megatron corpus has no manifest, and the file is checked by its own last 16 bytes. A
block is 64 KiB: what a random read of a mapped file brings in anyway (128 KiB of read-ahead in Linux), at one
byte of hash for 8 KiB of tokens.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from myriad.whole_file import write_whole

__all__ = ["BLOCKS_SUFFIX", "BLOCK_BYTES", "BlockHashes", "hash_blocks"]

BLOCK_BYTES = 1 << 16
BLOCKS_SUFFIX = ".blocks"
_MAGIC = b"MYRBLK1\x00"
_HEADER = struct.Struct("<8sIIQ")
_OWN_BYTES = 16
_READ_BYTES = 1 << 22
_SMALLEST_BLOCK, _LARGEST_BLOCK = 1 << 12, 1 << 26


@dataclass(frozen=True)
class BlockHashes:
    """Hashes of the blocks of one token file."""

    size_bytes: int
    """Bytes of the token file."""
    token_type: int
    """Code of the token type in Megatron's index."""
    hashes: NDArray[np.uint64]
    """XXH3-64 of each block, the last of which may be shorter."""
    block_bytes: int = BLOCK_BYTES

    def encode(self) -> bytes:
        """Return the content of ``NAME.blocks``."""
        head = _HEADER.pack(_MAGIC, self.block_bytes, self.token_type, self.size_bytes)
        body = head + self.hashes.astype("<u8").tobytes()
        return body + xxhash.xxh3_128_digest(body)

    def write(self, path: Path) -> None:
        """Write the hashes to ``NAME.blocks`` atomically."""
        write_whole(path, self.encode())

    @classmethod
    def parse(cls, raw: bytes) -> "BlockHashes":
        """Read the content of ``NAME.blocks``. Raises ``ValueError`` with what is wrong with it."""
        if len(raw) < _HEADER.size + _OWN_BYTES or not raw.startswith(_MAGIC):
            raise ValueError("is not a file of block hashes")
        if xxhash.xxh3_128_digest(raw[:-_OWN_BYTES]) != raw[-_OWN_BYTES:]:
            raise ValueError("has other bytes than were written")
        _, block_bytes, token_type, size = _HEADER.unpack_from(raw)
        hashes = np.frombuffer(raw[_HEADER.size : -_OWN_BYTES], "<u8")
        is_known = _SMALLEST_BLOCK <= block_bytes <= _LARGEST_BLOCK and block_bytes % 8 == 0
        if not is_known or len(hashes) != -(-size // block_bytes):
            raise ValueError(f"has {len(hashes)} hashes of blocks of {block_bytes} bytes for {size} bytes")
        return cls(size, token_type, hashes, block_bytes)

    def span(self, number: int) -> tuple[int, int]:
        """First byte and size of a block."""
        start = number * self.block_bytes
        return start, min(self.block_bytes, self.size_bytes - start)

    def is_right(self, number: int, content: bytes | memoryview) -> bool:
        """Whether these are the bytes that were written as a block."""
        return bool(xxhash.xxh3_64_intdigest(content) == int(self.hashes[number]))


def hash_blocks(path: Path, token_type: int) -> tuple[BlockHashes, str]:
    """Read a token file once; return the hashes of its blocks and the XXH3-128 of the whole."""
    whole, size = xxhash.xxh3_128(), 0
    hashes: list[int] = []
    for part in _parts(path):
        whole.update(part)
        size += len(part)
        view = memoryview(part)
        hashes += [
            xxhash.xxh3_64_intdigest(view[start : start + BLOCK_BYTES])
            for start in range(0, len(view), BLOCK_BYTES)
        ]
    return BlockHashes(size, token_type, np.array(hashes, np.uint64)), whole.hexdigest()


def _parts(path: Path) -> Iterator[bytes]:
    """Parts of the same size but for the last, which is what hashing by block needs."""
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            yield part
