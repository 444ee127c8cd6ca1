"""Stored shard: one shard of a tensor, as it is in a snapshot and in a file. Without torch.

    files of one rank   head data tail | head data tail | ...      data: the bytes of one shard, in C order
    snapshot in memory       data      |      data      | ...

Head and tail complete the data to an archive as ``torch.save`` writes it (`dcp_archive`). They depend only on
shape and dtype, so they are made once, and a process needs no torch to write a file.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

__all__ = [
    "PROGRESS",
    "StoredShard",
    "decode_shards",
    "encode_shards",
    "files_of_rank",
    "offsets_in_file",
    "snapshot_bytes",
    "without_mirrors",
]

Shape = tuple[int, ...]

PROGRESS = "progress"
"""Name of the byte tensor with the training progress: JSON, padded with spaces."""

FILE_BYTES = 2**26
"""Largest size of a file with more than one shard."""


@dataclass(frozen=True)
class StoredShard:
    """Part of a tensor that one rank stores."""

    tensor: str
    full_shape: Shape
    """Shape of the full tensor."""
    dtype: str
    """Name in torch, such as ``float32``."""
    offsets: Shape
    """Position of the part in the full tensor."""
    shape: Shape
    num_bytes: int
    memory_start: int
    """Offset of its first byte in the rank's snapshot."""
    head: bytes
    tail: bytes
    is_mirror: bool = False
    """Whether another rank stores it, and this one only holds it in memory. Mirrors are the last shards of a
    rank."""

    @property
    def file_bytes(self) -> int:
        """Size in a file, with head and tail."""
        return len(self.head) + self.num_bytes + len(self.tail)


def files_of_rank(rank: int, stored_shards: Sequence[StoredShard]) -> list[tuple[str, list[StoredShard]]]:
    """Return the name and the shards of each file of a rank, in order.

    A rank has several files, so that one is read back while the next is written."""
    files: list[list[StoredShard]] = [[]]
    size = 0
    for shard in stored_shards:
        if files[-1] and size + shard.file_bytes > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(shard)
        size += shard.file_bytes
    return [(f"__{rank}_{number}.distcp", own) for number, own in enumerate(files)]


def offsets_in_file(stored_shards: Sequence[StoredShard]) -> Iterator[tuple[StoredShard, int]]:
    """Yield each shard of one file with the offset of its first byte."""
    return zip(
        stored_shards, accumulate((shard.file_bytes for shard in stored_shards), initial=0), strict=False
    )


def snapshot_bytes(stored_shards: Sequence[StoredShard]) -> int:
    """Return the memory that a snapshot of one rank needs, in bytes."""
    return max((shard.memory_start + shard.num_bytes for shard in stored_shards), default=0)


def without_mirrors(stored_shards: Sequence[StoredShard]) -> list[StoredShard]:
    """Return the shards that the rank stores."""
    return [shard for shard in stored_shards if not shard.is_mirror]


def encode_shards(stored_shards: Sequence[StoredShard]) -> tuple[list[dict[str, Any]], bytes]:
    """Return stored shards as JSON values and one byte string, to send them to another process."""
    values = [asdict(shard) | {"head": len(shard.head), "tail": len(shard.tail)} for shard in stored_shards]
    return values, b"".join(shard.head + shard.tail for shard in stored_shards)


def decode_shards(values: Sequence[dict[str, Any]], envelopes: bytes) -> list[StoredShard]:
    """Return the stored shards from the output of `encode_shards`."""
    found, at = [], 0
    for value in values:
        middle, end = at + value["head"], at + value["head"] + value["tail"]
        shapes = {key: tuple(value[key]) for key in ("full_shape", "offsets", "shape")}
        found.append(
            StoredShard(**value | shapes | {"head": envelopes[at:middle], "tail": envelopes[middle:end]})
        )
        at = end
    return found
