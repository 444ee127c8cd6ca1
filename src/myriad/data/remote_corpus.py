"""Corpora at a URL, read by block through a local cache, whose content is always verified.

    s3://BUCKET/corpus, https://HOST/corpus, hdfs://NAMENODE/corpus     a folder made by `myriad data prepare`
    s3://BUCKET/text_document                                           Megatron's .bin and .idx

    a block is wanted ──► its slot of the cache ── hash is right ──► used
                              │ empty, of another block, or damaged
                              └──► fetched by its range of bytes ── hash is right ──► kept there, and used

A slot holds a block exactly if the hash matches. The cache therefore has no index, survives a kill at any
instant, and is shared by processes that write it at the same time. It has as many slots as the corpus has
blocks, or as fit into data.cache_bytes. The blocks of a batch are fetched several at once. A corpus without
block hashes is not cached: each sample is a request.
"""

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from myriad.data.bad_blocks import BlockGuard
from myriad.data.block_hashes import BLOCK_BYTES, BLOCKS_SUFFIX, BlockHashes
from myriad.data.config import DataConfig
from myriad.data.corpus_manifest import MANIFEST_FILE, Manifest, ShardRecord, Split, parse_manifest
from myriad.data.http_input import http_file_system, http_info, http_range, is_http, tried_http
from myriad.data.indexed import INDEX_HEADER, ShardIndex, parse_header
from myriad.data.range_input import retried
from myriad.data.verified_shard import HashedShard, TokenShard
from myriad.errors import BadInputError, RunFailedError
from myriad.system.remote_urls import open_url
from myriad.system.state_folder import cache_folder
from myriad.system.whole_file import write_whole

__all__ = ["RemoteFolder", "open_prefix", "open_shards"]

_TOKENIZER_FILE = "tokenizer.json"
_MOST_SMALL_BYTES = 1 << 30
"""Largest manifest, tokenizer or file of hashes; a larger one is refused."""
_AT_ONCE = 16
"""Largest number of concurrent requests of one process."""


class RemoteFolder:
    """A folder at a URL, and the local folder that caches its files."""

    def __init__(self, url: str, config: DataConfig) -> None:
        """Open the URL, and make the local folder. Raises `BadInputError` for a URL that cannot be opened."""
        self.url = url.rstrip("/")
        try:
            self._fs, self._root = open_url(self.url)
            if is_http(self.url):
                self._fs = http_file_system()
        except (ImportError, ValueError, OSError) as error:
            raise BadInputError("data.corpus", url, f"cannot be opened: {_one_line(error)}") from None
        root = Path(config.cache).expanduser() if config.cache else cache_folder() / "remote"
        self.near = root / hashlib.blake2b(self.url.encode(), digest_size=12).hexdigest()
        """Local folder that caches this corpus."""
        try:
            self.near.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            allowed = f"must be a folder that can be written ({error.strerror})"
            raise BadInputError("data.cache", str(root), allowed) from None

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Return a file, or a range of it; transient errors are retried. Raises ``OSError``."""
        path = f"{self._root}/{name}"
        if is_http(self.url):
            try:
                if stop is not None:
                    return http_range(path, start or 0, stop)
                return bytes(tried_http(path, lambda: self._fs.cat_file(path, start=start)))
            except OSError as error:
                raise _http_error(error, path) from None
        return retried(lambda: bytes(self._fs.cat_file(path, start=start, end=stop)))

    def size(self, name: str) -> int:
        """Return the bytes of a file. Raises ``OSError``."""
        path = f"{self._root}/{name}"
        if is_http(self.url):
            try:
                return int(http_info(path)["size"] or 0)
            except OSError as error:
                raise _http_error(error, path) from None
        try:
            self._fs.invalidate_cache()
            return int(self._fs.info(path)["size"] or 0)
        except OSError:
            raise
        except Exception as error:
            raise OSError(_one_line(error)) from error

    def read_small(self, name: str) -> bytes | None:
        """Return a whole file of bounded size, or ``None`` if it does not exist. Raises `BadInputError`."""
        try:
            size = self.size(name)
            if size > _MOST_SMALL_BYTES:
                raise OSError(f"{name} has {size} bytes, more than {_MOST_SMALL_BYTES}")
            return self.read(name)
        except FileNotFoundError:
            return None
        except OSError as error:
            allowed = f"{name} cannot be read: {_one_line(error)}"
            raise BadInputError("data.corpus", self.url, allowed) from None

    def keep(self, name: str, xxh3_128: str) -> bytes:
        """Return a small file: the local copy if it has this hash, else the remote one.

        Raises ``OSError``, and ``ValueError`` for a file that has other bytes twice.
        """
        path = self.near / name
        with suppress(OSError):
            if xxhash.xxh3_128_hexdigest(copy := path.read_bytes()) == xxh3_128:
                return copy
        for _ in range(2):
            if xxhash.xxh3_128_hexdigest(content := self.read(name)) == xxh3_128:
                with suppress(OSError):  # a full disk: the file is fetched again next time
                    write_whole(path, content)
                return content
        raise ValueError("is corrupt: its bytes differ from those written")


def open_shards(
    folder: RemoteFolder, split: Split, config: DataConfig, guard: BlockGuard
) -> tuple[list[TokenShard], Manifest] | None:
    """Open the shards of a prepared corpus; ``None`` if there is no manifest. Raises `BadInputError`."""
    manifest = _read_manifest(folder)
    if manifest is None:
        return None
    if _TOKENIZER_FILE in manifest.files:
        try:
            folder.keep(_TOKENIZER_FILE, manifest.files[_TOKENIZER_FILE].xxh3_128)
        except (OSError, ValueError) as error:
            raise BadInputError("data.corpus", folder.url, f"{_TOKENIZER_FILE}: {_one_line(error)}") from None
    counts = [-(-manifest.files[f"{one.name}.bin"].size_bytes // BLOCK_BYTES) for one in manifest.shards]
    cache = _BlockCache(folder.near, sum(counts), config.cache_bytes)
    firsts = {one.name: sum(counts[:number]) for number, one in enumerate(manifest.shards)}
    shards = [
        _open_shard(folder, manifest, record, guard, cache.of(firsts[record.name]))
        for record in manifest.of(split)
    ]
    return shards, manifest


def _read_manifest(folder: RemoteFolder) -> Manifest | None:
    """Read the manifest, if there is one; a damaged one is fetched again."""
    raw = folder.read_small(MANIFEST_FILE)
    if raw is None:
        return None
    try:
        return parse_manifest(raw, folder.url)
    except BadInputError:
        again = folder.read_small(MANIFEST_FILE)
        return parse_manifest(raw if again is None else again, folder.url)


def _open_shard(
    folder: RemoteFolder, manifest: Manifest, record: ShardRecord, guard: BlockGuard, store: "_ShardCache"
) -> TokenShard:
    name, size = record.name, manifest.files[f"{record.name}.bin"].size_bytes
    item = size // record.tokens if record.tokens else 2
    if item * record.tokens != size or item not in (1, 2, 4, 8):
        allowed = f"{name}: {size} bytes for {record.tokens} tokens; prepare it again"
        raise BadInputError("data.corpus", folder.url, allowed)
    dtype = np.dtype({1: "<u1", 2: "<u2", 4: "<i4", 8: "<i8"}[item])
    file = _RemoteTokens(folder, f"{name}.bin")
    read_index = partial(folder.keep, f"{name}.idx", manifest.files[f"{name}.idx"].xxh3_128)
    plain = _PlainShard(f"{folder.url}/{name}", file, dtype, record.tokens, read_index)
    blocks = manifest.files.get(f"{name}{BLOCKS_SUFFIX}")
    if blocks is None:
        return plain
    load = partial(_load_blocks, folder, f"{name}{BLOCKS_SUFFIX}", blocks.xxh3_128)
    return HashedShard(plain, dtype, file, load, guard, store)


def _load_blocks(folder: RemoteFolder, name: str, xxh3_128: str) -> BlockHashes:
    try:
        return BlockHashes.parse(folder.keep(name, xxh3_128))
    except (OSError, ValueError) as error:
        raise RunFailedError(f"{folder.url}/{name}: {_one_line(error)}; restore it") from None


def open_prefix(
    folder: RemoteFolder, name: str, split: Split, config: DataConfig, guard: BlockGuard
) -> list[TokenShard] | None:
    """Open Megatron's NAME.bin and NAME.idx; ``None`` if they do not exist. Raises `BadInputError`."""
    try:
        header = parse_header(folder.read(f"{name}.idx", 0, INDEX_HEADER))
        num_bytes = _indexed_bytes(folder, f"{name}.idx", header.sequences, header.dtype.itemsize)
        size = folder.size(f"{name}.bin")
        if size != num_bytes:
            raise ValueError(f"{name}.bin has {size} bytes, and its index requires {num_bytes}")
    except FileNotFoundError:
        return None
    except OSError as error:
        allowed = f"cannot be read: {_one_line(error)}"
        raise BadInputError("data.corpus", f"{folder.url}/{name}", allowed) from None
    except ValueError as error:
        raise BadInputError("data.corpus", f"{folder.url}/{name}", _one_line(error)) from None
    if (tokenizer := folder.read_small(_TOKENIZER_FILE)) is not None:
        write_whole(folder.near / _TOKENIZER_FILE, tokenizer)
    if split != "train":
        return []
    file = _RemoteTokens(folder, f"{name}.bin")
    read_index = partial(folder.read, f"{name}.idx")
    num_tokens = size // header.dtype.itemsize
    plain = _PlainShard(f"{folder.url}/{name}", file, header.dtype, num_tokens, read_index)
    raw = folder.read_small(f"{name}{BLOCKS_SUFFIX}")
    if raw is None:
        return [plain]
    try:
        hashes = BlockHashes.parse(raw)
    except ValueError as error:
        raise BadInputError("data.corpus", f"{folder.url}/{name}{BLOCKS_SUFFIX}", str(error)) from None
    cache = _BlockCache(folder.near, len(hashes.hashes), config.cache_bytes).of(0)
    return [HashedShard(plain, header.dtype, file, lambda: hashes, guard, cache)]


def _indexed_bytes(folder: RemoteFolder, index: str, sequences: int, item: int) -> int:
    """Return the bytes of the tokens that an index describes: the end of its last sequence."""
    if sequences == 0:
        return 0
    lengths = INDEX_HEADER + 4 * sequences
    pointers = lengths + 8 * sequences
    last = int(np.frombuffer(folder.read(index, lengths - 4, lengths), "<i4")[0])
    start = int(np.frombuffer(folder.read(index, pointers - 8, pointers), "<i8")[0])
    return start + last * item


class _RemoteTokens:
    """A ``.bin`` file on the server."""

    def __init__(self, folder: RemoteFolder, file: str) -> None:
        self._folder, self._file, self.name = folder, file, f"{folder.url}/{file}"

    def read(self, start: int, size: int, *, again: bool) -> bytes:
        content = self._folder.read(self._file, start, start + size)
        if len(content) > size:
            raise OSError("its server does not support range requests")
        return content

    def size(self) -> int:
        return self._folder.size(self._file)


class _PlainShard:
    """A remote shard without checks: each read is a request."""

    def __init__(
        self,
        name: str,
        file: _RemoteTokens,
        dtype: np.dtype[np.generic],
        num_tokens: int,
        read_index: Callable[[], bytes],
    ) -> None:
        """``read_index`` fetches the whole index, which only lengths of documents need."""
        self.name, self.num_tokens, self._file, self._dtype = name, num_tokens, file, dtype
        self._read_index = read_index
        self.num_documents = 0
        """Always 0, because the index is not fetched for single documents."""

    def document_lengths(self) -> NDArray[np.int64]:
        try:
            found = ShardIndex.parse(np.frombuffer(self._read_index(), np.uint8)).document_lengths()
            if found.sum() != self.num_tokens:
                raise ValueError(f"counts {found.sum()} tokens instead of {self.num_tokens}")
        except (OSError, ValueError) as error:
            raise BadInputError("shard", self.name, f"its index {_one_line(error)}; restore it") from None
        return found

    def read(self, first: int, out: NDArray[np.int32]) -> None:
        item = self._dtype.itemsize
        try:
            content = self._file.read(first * item, len(out) * item, again=False)
        except OSError as error:
            text = f"{self._file.name}, byte {first * item}: cannot be read: {_one_line(error)}"
            raise RunFailedError(text) from None
        if len(content) != len(out) * item:
            raise RunFailedError(f"{self._file.name} ends after byte {first * item + len(content)}")
        out[:] = np.frombuffer(content, self._dtype)

    def document(self, index: int) -> NDArray[np.generic]:
        raise IndexError(f"{self.name} has no document boundaries")

    def fetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Do nothing: without hashes no copy is kept."""


class _BlockCache:
    """The cache slots of one corpus."""

    def __init__(self, folder: Path, num_blocks: int, most_bytes: int) -> None:
        self._num_slots = max(1, min(num_blocks, most_bytes // BLOCK_BYTES))
        self._path = folder / f"blocks-{self._num_slots}"
        self._descriptor: int | None = None
        self._pool: ThreadPoolExecutor | None = None

    def of(self, first_block: int) -> "_ShardCache":
        """Return the slots of a shard whose first block has this number in the corpus."""
        return _ShardCache(self, first_block)

    def get(self, block: int, size: int) -> bytes:
        """Return the bytes in the slot of a block."""
        try:
            return os.pread(self._open(), size, self._place(block))
        except OSError:
            return b""

    def put(self, block: int, content: bytes) -> None:
        """Store a block; a full disk stores none."""
        with suppress(OSError):
            os.pwrite(self._open(), content, self._place(block))

    def each(self, numbers: list[int], bring: Callable[[int], object]) -> None:
        """Call ``bring`` for each number, several at once; the reader of a failed block handles the error."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_AT_ONCE)
        for future in [self._pool.submit(bring, number) for number in numbers]:
            with suppress(OSError):
                future.result()

    def _place(self, block: int) -> int:
        return block % self._num_slots * BLOCK_BYTES

    def _open(self) -> int:
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        return self._descriptor

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


class _ShardCache:
    """The cache slots of one shard; blocks larger than a slot are not kept."""

    def __init__(self, cache: _BlockCache, first_block: int) -> None:
        self._cache, self._first = cache, first_block

    def get(self, number: int, size: int) -> bytes:
        return self._cache.get(self._first + number, size) if size <= BLOCK_BYTES else b""

    def put(self, number: int, content: bytes) -> None:
        if len(content) <= BLOCK_BYTES:
            self._cache.put(self._first + number, content)

    def fetch(self, numbers: list[int], bring: Callable[[int], object]) -> None:
        self._cache.each(numbers, bring)


def _http_error(error: OSError, path: str) -> OSError:
    """Translate the error of a file over HTTP: only 404 means a missing file, but fsspec reports 403 as
    missing too."""
    cause: BaseException | None = error
    while cause is not None:
        is_missing = isinstance(cause, FileNotFoundError) and cause.__cause__ is None
        if is_missing or getattr(cause, "status", None) == HTTPStatus.NOT_FOUND:
            return FileNotFoundError(path)
        cause = cause.__cause__
    return error


def _one_line(error: Any) -> str:
    return " ".join(str(error).split()) or type(error).__name__
