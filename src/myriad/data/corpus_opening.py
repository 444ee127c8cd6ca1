"""Open and check the corpora that a job names.

embedded              prepared on first use, in the user's cache
folder                shards of `myriad data prepare`, with a manifest
PREFIX                Megatron's PREFIX.bin and PREFIX.idx
URL of a folder or a prefix
text, JSONL, Parquet  streamed (`myriad.data.streaming`)
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from myriad.data.bad_blocks import BlockGuard
from myriad.data.block_hashes import BLOCKS_SUFFIX, BlockHashes
from myriad.data.config import CorpusShare, DataConfig, ValidationSet
from myriad.data.corpus import Corpora, Corpus
from myriad.data.corpus_cache import prepare_embedded
from myriad.data.corpus_manifest import (
    MANIFEST_FILE,
    FileRecord,
    Manifest,
    ShardRecord,
    Split,
    read_manifest,
)
from myriad.data.indexed import IndexedShard
from myriad.data.loss_mask import LOSS_SUFFIX, LossMask
from myriad.data.remote_corpus import RemoteFolder, open_prefix, open_shards
from myriad.data.streaming.streamed_corpus import StreamedCorpus, StreamPlace
from myriad.data.text_names import is_streamed
from myriad.data.verified_shard import HashedShard, LocalTokens, OpenFiles, TokenShard
from myriad.errors import BadInputError, RunFailedError
from myriad.system.remote_urls import is_url

__all__ = ["EMBEDDED", "open_corpora", "open_corpus", "open_validation_set"]

EMBEDDED = "embedded"


def open_corpora(
    config: DataConfig,
    sequence: int,
    split: Split = "train",
    cache: Path | None = None,
    guard: BlockGuard | None = None,
    streams: StreamPlace = StreamPlace(),
) -> Corpora:
    """Open and check the corpora of a job. Raises `BadInputError`.

    A validation split without a whole sample is left out (so `Corpora.num_samples` may be 0); a train split
    without one is refused. ``guard`` is the policy for bad blocks; by default reading stops at the first.
    ``streams`` is the place and the order of streamed corpora.
    """
    shares = config.mixture or (CorpusShare(path=config.corpus, weight=1.0),)
    opener = _Opener(config, split, cache, guard or BlockGuard(), streams)
    opened = [(opener.open(share.path), share.weight) for share in shares]
    _check_one_tokenizer([corpus for corpus, _ in opened])
    kept = [(corpus, weight) for corpus, weight in opened if _has_sample(corpus, sequence, split, config)]
    corpora, weights = zip(*kept, strict=True) if kept else ((), ())
    return Corpora(corpora, weights, sequence, config.documents)


def open_validation_set(
    config: DataConfig,
    one: ValidationSet,
    sequence: int,
    guard: BlockGuard | None = None,
    streams: StreamPlace = StreamPlace(),
) -> Corpora:
    """Open a validation set of a job: its held-out text, or all of it. Raises `BadInputError`."""
    alone = config.model_copy(update={"corpus": one.path, "mixture": ()})
    found = open_corpora(alone, sequence, "validation", guard=guard, streams=streams)
    return found if found.num_samples else open_corpora(alone, sequence, guard=guard, streams=streams)


def open_corpus(name: str, split: Split, vocabulary: int = 4096, cache: Path | None = None) -> Corpus:
    """Open ``embedded``, a folder made by ``myriad data prepare``, the prefix of Megatron's files, or a
    URL of either."""
    return _Opener(
        DataConfig(vocabulary=vocabulary), split, cache, BlockGuard(), StreamPlace()
    ).open_prepared(name)


class _Opener:
    """Open the corpora of one job, for one split."""

    def __init__(
        self,
        config: DataConfig,
        split: Split,
        cache: Path | None,
        guard: BlockGuard,
        streams: StreamPlace,
    ) -> None:
        self._config, self._split, self._cache, self._guard = config, split, cache, guard
        self._streams = streams
        self._files = OpenFiles()

    def open(self, name: str) -> Corpus | StreamedCorpus:
        """Open one corpus, by its name in the job."""
        if is_streamed(name):
            return StreamedCorpus(name, self._config, self._split, self._streams)
        return self.open_prepared(name)

    def open_prepared(self, name: str) -> Corpus:
        """Open one corpus of tokens."""
        if name == EMBEDDED:
            return self._folder(prepare_embedded(self._cache, self._config.vocabulary))
        if is_url(name):
            return self._remote(name)
        path = Path(name).expanduser()
        if path.is_dir():
            return self._folder(path)
        prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
        if not prefix.with_name(prefix.name + ".idx").is_file():
            raise _no_corpus(name, path)
        return self._prefix(prefix)

    def _remote(self, url: str) -> Corpus:
        folder = RemoteFolder(url, self._config)
        if (found := open_shards(folder, self._split, self._config, self._guard)) is not None:
            masks = self._remote_masks(folder, found[1])
            return Corpus(folder.near, *found, url, masks)
        parent, _, name = url.rstrip("/").removesuffix(".bin").removesuffix(".idx").rpartition("/")
        above = RemoteFolder(parent, self._config)
        shards = open_prefix(above, name, self._split, self._config, self._guard)
        if shards is None:
            allowed = (
                f"no {MANIFEST_FILE} in it, and no {name}.idx beside it: a corpus of `myriad data prepare`"
            )
            raise BadInputError("data.corpus", url, f"{allowed}, or a prefix of Megatron's files")
        return Corpus(above.near, shards, None, url)

    def _remote_masks(self, folder: RemoteFolder, manifest: Manifest) -> list[LossMask]:
        found = []
        for record in manifest.of(self._split):
            if (mask := f"{record.name}{LOSS_SUFFIX}") in manifest.files:
                read = partial(folder.keep, mask, manifest.files[mask].xxh3_128)
                found.append(_read_mask(record, read))
        return found

    def _prefix(self, prefix: Path) -> Corpus:
        """Open Megatron's own files, with the block hashes that `myriad data hash` has written beside
        them, if any."""
        shards = [IndexedShard(prefix)] if self._split == "train" else []
        blocks = prefix.with_name(prefix.name + BLOCKS_SUFFIX)
        if not blocks.is_file():
            return Corpus(prefix, shards, None)
        for shard in shards:
            _check_blocks(blocks, shard)
        return Corpus(prefix, [self._checked(shard) for shard in shards], None)

    def _folder(self, folder: Path) -> Corpus:
        manifest = read_manifest(folder)
        shards: list[TokenShard] = []
        masks: list[LossMask] = []
        for record in manifest.of(self._split):
            if (mask := f"{record.name}{LOSS_SUFFIX}") in manifest.files:
                masks.append(_read_mask(record, partial(_read_checked, folder / mask, manifest.files[mask])))
            blocks = manifest.files.get(f"{record.name}{BLOCKS_SUFFIX}")
            for suffix in (".bin", ".idx"):
                _check_size(
                    folder / f"{record.name}{suffix}", manifest.files[f"{record.name}{suffix}"].size_bytes
                )
            shard = IndexedShard(folder / record.name)
            if shard.num_tokens != record.tokens:
                allowed = f"{record.name}.idx counts {shard.num_tokens} tokens instead of {record.tokens}"
                raise BadInputError("shard", shard.name, allowed)
            shards.append(shard if blocks is None else self._checked(shard, blocks))
        return Corpus(folder, shards, manifest, masks=masks)

    def _checked(self, shard: IndexedShard, record: FileRecord | None = None) -> HashedShard:
        tokens, blocks = (
            shard.prefix.with_name(shard.prefix.name + suffix) for suffix in (".bin", BLOCKS_SUFFIX)
        )
        load = partial(_read_blocks, blocks, record)
        return HashedShard(shard, shard.dtype, LocalTokens(tokens, self._files), load, self._guard)


def _read_mask(record: ShardRecord, read: Callable[[], bytes]) -> LossMask:
    """Read and check the mask of a shard. Raises `BadInputError`."""
    try:
        return LossMask(np.frombuffer(read(), np.uint8), record.tokens)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        allowed = f"{record.name}{LOSS_SUFFIX} {reason}; restore it or prepare again"
        raise BadInputError("shard", record.name, allowed) from None


def _read_checked(path: Path, record: FileRecord | None) -> bytes:
    """Read a file, and check it against the manifest's ``record``. Raises ``OSError`` and ``ValueError``."""
    raw = path.read_bytes()
    if record is not None and xxhash.xxh3_128_hexdigest(raw) != record.xxh3_128:
        raise ValueError("is corrupt: its bytes differ from those written")
    return raw


def _read_blocks(path: Path, record: FileRecord | None) -> BlockHashes:
    """Read the hashes of a shard, and check them against the manifest's ``record``. Raises
    `RunFailedError`."""
    try:
        return BlockHashes.parse(_read_checked(path, record))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RunFailedError(f"{path}: {reason}; restore it (myriad data verify)") from None


def _check_blocks(path: Path, shard: IndexedShard) -> None:
    """Refuse block hashes that belong to another Megatron file. Raises `BadInputError`."""
    try:
        found = BlockHashes.parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadInputError(
            "shard", str(path), f"{error}; remove it, or myriad data hash {shard.name}"
        ) from None
    if found.size_bytes != shard.num_tokens * shard.dtype.itemsize:
        allowed = f"is of another .bin, of {found.size_bytes} bytes; myriad data hash {shard.name}"
        raise BadInputError("shard", str(path), allowed)


def _no_corpus(name: str, path: Path) -> BadInputError:
    allowed = "embedded, a folder made by `myriad data prepare`, or the prefix of Megatron's .bin and .idx"
    if path.is_file():
        allowed = f"is a file, not a corpus: myriad data prepare {name} --output FOLDER makes one of text"
        return BadInputError("data.corpus", name, allowed)
    where = "" if path.is_absolute() else f" from {Path.cwd()}"
    return BadInputError("data.corpus", name, f"no such corpus{where}; {allowed}")


def _check_size(path: Path, expected: int) -> None:
    size = path.stat().st_size if path.is_file() else None
    if size != expected:
        found = "is missing" if size is None else f"has {size} bytes instead of {expected}"
        raise BadInputError(
            "shard", str(path.with_suffix("")), f"{path.name} {found}; restore it or prepare again"
        )


def _check_one_tokenizer(corpora: Sequence[Corpus | StreamedCorpus]) -> None:
    first = corpora[0]
    for corpus in corpora[1:]:
        if corpus.fingerprint != first.fingerprint:
            allowed = (
                f"made with another tokenizer than {first.name}; corpora of one mixture share their tokenizer"
            )
            raise BadInputError("data.mixture", corpus.name, allowed)


def _has_sample(corpus: Corpus | StreamedCorpus, sequence: int, split: Split, config: DataConfig) -> bool:
    """Return whether the corpus fills a window. Any document of two tokens fills a packed one."""
    if isinstance(corpus, StreamedCorpus):
        return corpus.has_text
    if config.documents == "joined":
        _ = corpus.windows(sequence, "joined")
    needed = sequence if config.documents == "joined" else 1
    if corpus.num_tokens > needed:
        return True
    if split == "validation":
        return False
    needs = f"model.sequence + 1 = {sequence + 1}" if config.documents == "joined" else "2 of one document"
    allowed = f"holds {corpus.num_tokens} tokens; one sample needs {needs}"
    raise BadInputError("data.corpus", corpus.name, allowed)
