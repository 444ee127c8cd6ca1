"""Token shards in Megatron-LM's indexed format: ``NAME.bin`` holds tokens, ``NAME.idx`` the position of
each sequence.

    NAME.idx   "MMIDIDX\\0\\0"  u64 version = 1  u8 token type  u64 S  u64 D
               i32[S]  tokens of each sequence
               i64[S]  its first byte in NAME.bin
               i64[D]  first sequence of each document, and S at the end

Little endian. Corpora written by Megatron's ``preprocess_data.py`` open unconverted, and Megatron opens the
files that this module writes (megatron/core/datasets/indexed_dataset.py). Opening maps both files and reads
only the header, independent of their size.
"""

import os
import struct
from array import array
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from myriad.errors import BadInputError

__all__ = ["INDEX_HEADER", "IndexedShard", "IndexedWriter", "ShardIndex", "parse_header", "token_type"]

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CODES = {np.dtype(name): code for code, name in _TYPES.items()}


INDEX_HEADER = _HEADER.size
"""Size of an index's header, before its first array."""


class IndexHeader(NamedTuple):
    """The fields of an index's header."""

    token_type: int
    dtype: np.dtype[np.generic]
    sequences: int
    documents: int


def parse_header(head: bytes) -> IndexHeader:
    """Parse the first `INDEX_HEADER` bytes of an index. Raises ``ValueError`` with the reason."""
    if len(head) < _HEADER.size or not head.startswith(_MAGIC):
        raise ValueError("is not a Megatron index")
    _, version, code, sequences, documents = _HEADER.unpack_from(head)
    if version != 1 or code not in _TYPES:
        raise ValueError(f"has version {version} and token type {code}, which are not known")
    return IndexHeader(code, np.dtype(_TYPES[code]), sequences, documents)


class ShardIndex(NamedTuple):
    """The content of a ``.idx`` file."""

    header: IndexHeader
    lengths: NDArray[np.int32]
    pointers: NDArray[np.int64]
    document_starts: NDArray[np.int64]

    @classmethod
    def parse(cls, raw: NDArray[np.uint8]) -> "ShardIndex":
        """Return views of the file's bytes. Raises ``ValueError`` with the reason."""
        header = parse_header(raw[: _HEADER.size].tobytes())
        sizes = (4 * header.sequences, 8 * header.sequences, 8 * header.documents)
        expected = _HEADER.size + sum(sizes)
        if len(raw) < expected:
            raise ValueError(f"has {len(raw)} bytes where its header asks for {expected}")
        ends = np.cumsum([_HEADER.size, *sizes])
        return cls(
            header,
            raw[ends[0] : ends[1]].view("<i4"),
            raw[ends[1] : ends[2]].view("<i8"),
            raw[ends[2] : ends[3]].view("<i8"),
        )

    def problem(self) -> str | None:
        """Return what is wrong with the arrays, after reading all of them; None if they are right."""
        item, documents = self.header.dtype.itemsize, self.document_starts
        starts = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)]) * item
        if (self.lengths < 0).any() or not np.array_equal(starts[:-1], self.pointers):
            return "sequences do not follow one another"
        if len(documents) and (
            documents[0] != 0 or documents[-1] != len(self.lengths) or (np.diff(documents) < 0).any()
        ):
            return "documents do not cover the sequences"
        return None

    def document_lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of each document. Raises ``ValueError`` with the reason."""
        if (problem := self.problem()) is not None:
            raise ValueError(f"is corrupt: {problem}")
        ends = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        lengths: NDArray[np.int64] = np.diff(ends[self.document_starts])
        return lengths


def token_type(vocabulary: int) -> np.dtype[np.generic]:
    """Return the smallest type that Megatron uses for a vocabulary of this size."""
    return np.dtype("<u2" if vocabulary <= 65536 else "<i4")


class IndexedShard:
    """One ``.bin``/``.idx`` pair, memory-mapped."""

    def __init__(self, prefix: Path) -> None:
        """``prefix`` is the path without ``.bin``. Raises `BadInputError` that names the shard."""
        self.prefix, self.name = prefix, str(prefix)
        self._index_path, self._tokens_path = _with(prefix, ".idx"), _with(prefix, ".bin")
        for path in (self._index_path, self._tokens_path):
            if not path.is_file():
                raise BadInputError("shard", str(prefix), f"{path.name} is missing")
        self._open_index()
        self.tokens: NDArray[np.generic] = self._map_tokens()
        """All tokens of the shard, one after the other."""

    def _open_index(self) -> None:
        size = self._index_path.stat().st_size
        raw = np.memmap(self._index_path, np.uint8, "r") if size else np.empty(0, np.uint8)
        try:
            index = ShardIndex.parse(raw)
        except ValueError as error:
            raise self._corrupt(self._index_path, str(error)) from None
        self.index, self.token_type, self.dtype = index, index.header.token_type, index.header.dtype
        self.lengths, self.pointers = index.lengths, index.pointers
        self.document_starts = index.document_starts

    def _map_tokens(self) -> NDArray[np.generic]:
        size = self._tokens_path.stat().st_size
        expected = (
            int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if len(self.lengths) else 0
        )
        if size != expected:
            raise self._corrupt(self._tokens_path, f"has {size} bytes where its index asks for {expected}")
        return np.memmap(self._tokens_path, self.dtype, "r") if size else np.empty(0, self.dtype)

    def _corrupt(self, path: Path, what: str) -> BadInputError:
        return BadInputError(
            "shard", str(self.prefix), f"{path.name} {what}; restore the file or prepare again"
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the shard."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """Number of documents in the shard."""
        return max(0, len(self.document_starts) - 1)

    def read(self, first: int, out: NDArray[np.int32]) -> None:
        """Fill ``out`` with the tokens from number ``first`` on, unchecked."""
        out[:] = self.tokens[first : first + len(out)]

    def fetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Do nothing, because the file is mapped."""

    def document(self, index: int) -> NDArray[np.generic]:
        """Return the tokens of one document."""
        first, last = int(self.document_starts[index]), int(self.document_starts[index + 1])
        if first == last:  # the last document may be empty, and has no pointer then
            return self.tokens[:0]
        start = int(self.pointers[first]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[first:last].sum())]

    def document_lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of each document. Raises `BadInputError`."""
        try:
            return self.index.document_lengths()
        except ValueError as error:
            raise self._corrupt(self._index_path, str(error)) from None

    def check_index(self) -> str | None:
        """Return what is wrong with the index, after reading all of it; None if it is right."""
        return self.index.problem()


class IndexedWriter:
    """Stream documents into a shard; the pair exists under its name only after `close`."""

    def __init__(self, prefix: Path, dtype: np.dtype[np.generic]) -> None:
        """``dtype`` is the result of `token_type`."""
        self._prefix, self._dtype = prefix, dtype
        self._lengths, self._documents = array("i"), array("q", [0])
        self._file = _with(prefix, ".bin.partial").open("wb")
        self.num_tokens = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of ``.bin`` so far."""
        return self.num_tokens * self._dtype.itemsize

    @property
    def num_documents(self) -> int:
        """Number of documents so far."""
        return len(self._documents) - 1

    def add(self, tokens: Iterable[int] | NDArray[np.generic]) -> None:
        """Append one document of one sequence."""
        values = np.asarray(tokens).astype(self._dtype, copy=False)
        self._file.write(values.tobytes())
        self._lengths.append(len(values))
        self._documents.append(len(self._lengths))
        self.num_tokens += len(values)

    def add_shard(self, shard: IndexedShard, block_tokens: int = 1 << 22) -> None:
        """Append all documents of another shard of the same type, as bytes."""
        assert shard.dtype == self._dtype, "shards of one corpus have one token type"
        for start in range(0, len(shard.tokens), block_tokens):
            self._file.write(shard.tokens[start : start + block_tokens].tobytes())
        base = len(self._lengths)
        self._lengths.frombytes(shard.lengths.astype("i").tobytes())
        self._documents.frombytes((shard.document_starts[1:] + base).astype("q").tobytes())
        self.num_tokens += len(shard.tokens)

    def close(self) -> None:
        """Write the index and give both files their names, ``.idx`` last."""
        self._sync_and_close()
        lengths = np.frombuffer(self._lengths, np.intc).astype("<i4")
        ends = np.cumsum(lengths, dtype=np.int64)
        index = _with(self._prefix, ".idx.partial")
        with index.open("wb") as file:
            file.write(_HEADER.pack(_MAGIC, 1, _CODES[self._dtype], len(lengths), len(self._documents)))
            file.write(lengths.tobytes())
            file.write(((ends - lengths) * self._dtype.itemsize).astype("<i8").tobytes())
            file.write(np.frombuffer(self._documents, np.int64).astype("<i8").tobytes())
            file.flush()
            os.fsync(file.fileno())
        _with(self._prefix, ".bin.partial").replace(_with(self._prefix, ".bin"))
        index.replace(_with(self._prefix, ".idx"))

    def _sync_and_close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def discard(self) -> None:
        """Remove the written files."""
        self._file.close()
        _with(self._prefix, ".bin.partial").unlink(missing_ok=True)

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close() if kind is None else self.discard()


def _with(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)
