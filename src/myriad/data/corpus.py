"""Corpora as a training run reads them: tokens addressed by sample, independent of their files.

Sample ``k`` of a corpus is window ``k`` of its tokens (`myriad.data.windows`), which lie in shards end to
end. Tokens are read only when a sample is requested. If the corpus has block hashes, they are compared with
them (`myriad.data.verified_shard`).

A sample in a bad block that may be skipped is replaced by another of the same corpus. The replacement depends
on the sample's position alone, so every rank, layout and resumed run draws the same one.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from numpy.typing import NDArray

from myriad.data.bad_blocks import BadBlockError, BlockGuard
from myriad.data.block_hashes import BLOCKS_SUFFIX, BlockHashes
from myriad.data.config import CorpusShare, DataConfig, Documents, ValidationSet
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
from myriad.data.sampler import MixtureStart, Sample, Sampler, permute
from myriad.data.streaming.streamed_corpus import StreamedCorpus, StreamPlace, StreamWindows
from myriad.data.text_names import is_streamed
from myriad.data.verified_shard import HashedShard, LocalTokens, OpenFiles, TokenShard
from myriad.data.windows import (
    BatchWords,
    JoinedWindows,
    PackedWindows,
    Windows,
    balanced_order,
    pack_documents,
    row_width,
)
from myriad.errors import BadInputError, RunFailedError
from myriad.system.remote_urls import is_url

if TYPE_CHECKING:
    from myriad.data.tokenizer import Tokenizer

__all__ = [
    "EMBEDDED",
    "BatchReader",
    "Corpora",
    "Corpus",
    "open_corpora",
    "open_corpus",
    "open_validation_set",
    "read_batch",
]

EMBEDDED = "embedded"
_TOKENIZER_FILE = "tokenizer.json"
_MOST_REPLACEMENTS = 100
"""Replacement draws for one sample before the whole corpus counts as bad."""


class Corpus:
    """One split of one corpus: its shards, end to end."""

    def __init__(
        self,
        path: Path,
        shards: Sequence[TokenShard],
        manifest: Manifest | None,
        name: str | None = None,
        masks: Sequence[LossMask] = (),
    ) -> None:
        """``path`` is where the tokenizer lies. ``manifest`` is None for Megatron's own files. ``name`` is
        the URL that the user gave for a remote corpus. ``masks`` are those of all shards; empty: every token
        has a loss."""
        self.path, self.manifest, self.shards, self.masks = path, manifest, tuple(shards), tuple(masks)
        self.name, self.is_far = name or str(path), name is not None
        self._ends = list(accumulate(shard.num_tokens for shard in shards))

    @property
    def is_checked(self) -> bool:
        """Whether tokens are compared with hashes as they are read."""
        return all(isinstance(shard, HashedShard) for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        """Tokens in all shards."""
        return self._ends[-1] if self._ends else 0

    def windows(self, sequence: int, documents: Documents) -> Windows:
        """Return the windows of ``sequence`` positions that the tokens are cut into. Raises
        `BadInputError`."""
        if documents == "joined":
            if self.masks:
                allowed = f"packed: some tokens of {self.name} have no loss"
                raise BadInputError("data.documents", documents, allowed)
            return JoinedWindows(self.num_tokens, sequence)
        lengths = [shard.document_lengths() for shard in self.shards]
        every = np.concatenate(lengths) if lengths else np.empty(0, np.int64)
        read_losses = self._read_losses if self.masks else None
        return PackedWindows(pack_documents(every, sequence), sequence, read_losses)

    def _read_losses(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return whether the tokens [start, stop) have a loss."""
        parts = (self.masks[number].read(first, last) for number, first, last in self._parts(start, stop))
        return np.concatenate([np.empty(0, np.bool_), *parts])

    @cached_property
    def tokenizer(self) -> "Tokenizer | None":
        """The corpus's own tokenizer; None for Megatron's files with no ``tokenizer.json`` beside them."""
        from myriad.data.tokenizer import Tokenizer

        folder = self.path if self.path.is_dir() else self.path.parent
        return Tokenizer.load(folder) if (folder / _TOKENIZER_FILE).is_file() else None

    @cached_property
    def fingerprint(self) -> str | None:
        """Fingerprint of the tokenizer, or None if it is unknown."""
        if self.manifest is not None:
            return self.manifest.fingerprint
        return self.tokenizer.fingerprint if self.tokenizer else None

    @cached_property
    def vocabulary(self) -> int | None:
        """Vocabulary size of the tokenizer, or None if it is unknown."""
        if self.manifest is not None:
            return self.manifest.vocabulary
        return self.tokenizer.vocabulary if self.tokenizer else None

    @property
    def hashes(self) -> dict[str, str]:
        """Hashes of the split's files by name; empty for Megatron's own format."""
        if self.manifest is None:
            return {}
        stems = [shard.name.rpartition("/")[2] for shard in self.shards]
        suffixes = (".bin", ".idx", LOSS_SUFFIX) if self.masks else (".bin", ".idx")
        names = [f"{stem}{suffix}" for stem in stems for suffix in suffixes]
        return {name: self.manifest.files[name].xxh3_128 for name in names}

    def read(self, start: int, out: NDArray[np.int32]) -> None:
        """Fill ``out`` with the tokens from number ``start`` on. Raises `BadInputError`, which names the
        bad shard."""
        filled = 0
        for number, first, stop in self._parts(start, start + len(out)):
            shard = self.shards[number]
            piece = out[filled : filled + stop - first]
            shard.read(first, piece)
            self._check_range(shard, piece)
            filled += len(piece)

    def fetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Cache the tokens [start, stop) of each range, for shards whose single reads are slow."""
        wanted: dict[int, list[tuple[int, int]]] = {}
        for start, stop in ranges:
            for number, first, last in self._parts(start, stop):
                wanted.setdefault(number, []).append((first, last))
        for number, found in wanted.items():
            self.shards[number].fetch(found)

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the shards that hold the tokens [start, stop), each with its own first and last token."""
        number = bisect_right(self._ends, start)
        while start < stop:
            begins = self._ends[number - 1] if number else 0
            last = min(stop, self._ends[number])
            if last > start:
                yield number, start - begins, last - begins
            start, number = last, number + 1

    def _check_range(self, shard: TokenShard, tokens: NDArray[np.int32]) -> None:
        if (
            self.vocabulary is not None
            and len(tokens)
            and not 0 <= tokens.min() <= tokens.max() < self.vocabulary
        ):
            allowed = (
                f"holds a token outside the vocabulary of {self.vocabulary}: corrupt, or of another tokenizer"
            )
            raise BadInputError("shard", shard.name, allowed)


class Corpora:
    """The mixture that a run reads: one split, one sequence length."""

    def __init__(
        self,
        corpora: "Sequence[Corpus | StreamedCorpus]",
        weights: Sequence[float],
        sequence: int,
        documents: Documents = "joined",
    ) -> None:
        """``weights`` are shares of samples, in any unit."""
        self.corpora, self.weights, self.sequence = tuple(corpora), tuple(weights), sequence
        self.documents = documents

    @cached_property
    def windows(self) -> tuple[Windows, ...]:
        """The windows of each corpus. Packed ones are computed at the first use."""
        return tuple(corpus.windows(self.sequence, self.documents) for corpus in self.corpora)

    @property
    def sizes(self) -> list[int]:
        """Number of samples of each corpus."""
        return [windows.count for windows in self.windows]

    @property
    def width(self) -> int:
        """Words of the row of one sample."""
        return row_width(self.sequence, self.documents)

    @property
    def packed(self) -> "list[PackedWindows | StreamWindows]":
        """The windows of each corpus, if they are packed; else an empty list."""
        if self.documents == "joined":
            return []
        return [windows for windows in self.windows if isinstance(windows, PackedWindows | StreamWindows)]

    @property
    def num_tokens(self) -> int | None:
        """Number of tokens of all corpora; ``None`` if one is streamed."""
        counts = [corpus.num_tokens for corpus in self.corpora]
        return None if None in counts else sum(count or 0 for count in counts)

    @property
    def num_samples(self) -> int:
        """Number of samples of all corpora; 0 when there is no held-out text. `UNBOUNDED` or more if one is
        streamed."""
        return sum(self.sizes)

    @property
    def streamed(self) -> list[StreamedCorpus]:
        """The corpora of text."""
        return [corpus for corpus in self.corpora if isinstance(corpus, StreamedCorpus)]

    def close(self) -> None:
        """End the threads of streamed corpora."""
        for corpus in self.streamed:
            corpus.close()

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint of the tokenizer that all corpora share, or None if it is unknown."""
        return self.corpora[0].fingerprint if self.corpora else None

    @property
    def vocabulary(self) -> int | None:
        """Vocabulary size of the tokenizer that all corpora share, or None if it is unknown."""
        return self.corpora[0].vocabulary if self.corpora else None

    @property
    def content(self) -> str:
        """Identifier that changes with the tokens: of the manifests' hashes, or for Megatron's files of
        their sizes."""
        parts = [(corpus.num_tokens, sorted(corpus.hashes.items())) for corpus in self.corpora]
        return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()

    @property
    def tokenizer(self) -> "Tokenizer | None":
        """The tokenizer that all corpora share, or None if it is unknown."""
        return self.corpora[0].tokenizer if self.corpora else None

    def sampler(self, seed: int, start: MixtureStart | None = None) -> Sampler:
        """Return the order of this mixture's samples. ``start``: where the mixture begins in the run."""
        return Sampler(self.sizes, self.weights, seed, start or MixtureStart())

    @property
    def unchecked(self) -> list[str]:
        """Corpora without block hashes, whose tokens are read as they are."""
        return [corpus.name for corpus in self.corpora if not corpus.is_checked]

    def read(self, sample: Sample, out: NDArray[np.int32]) -> None:
        """Fill ``out`` ``[width]`` with one sample, or with its replacement."""
        corpus, windows, position = self.corpora[sample.corpus], self.windows[sample.corpus], sample.position
        for number in range(_MOST_REPLACEMENTS):
            try:
                return windows.read(corpus.read, position, out)
            except BadBlockError as error:
                if not error.is_replaced:
                    raise
            position = int(permute(np.array([sample.position], np.uint64), windows.count, number)[0])
        raise RunFailedError(f"{corpus.name}: {_MOST_REPLACEMENTS} samples drawn in a row have bad blocks")

    def expect(self, samples: Iterable[Sample]) -> None:
        """Tokenize samples of streamed corpora."""
        self.fetch(one for one in samples if isinstance(self.corpora[one.corpus], StreamedCorpus))

    def fetch(self, samples: Iterable[Sample]) -> None:
        """Cache the tokens of samples from remote and streamed corpora, several at once."""
        wanted: dict[int, list[tuple[int, int]]] = {}
        for corpus, position in samples:
            if self.corpora[corpus].is_far:
                wanted.setdefault(corpus, []).extend(self.windows[corpus].ranges(position))
        for corpus, ranges in wanted.items():
            self.corpora[corpus].fetch(ranges)


def read_batch(
    corpora: Corpora,
    sampler: Sampler,
    samples: range,
    out: NDArray[np.int32] | None = None,
) -> NDArray[np.int32]:
    """Return the ``[len(samples), width]`` rows of the samples with these global numbers."""
    batch = np.empty((len(samples), corpora.width), np.int32) if out is None else out
    _read_rows(corpora, sampler.samples(samples.start, samples.stop), batch)
    return batch


def _read_rows(corpora: Corpora, chosen: Sequence[Sample], rows: NDArray[np.int32]) -> None:
    corpora.fetch(chosen)
    for row, sample in zip(rows, chosen, strict=True):
        corpora.read(sample, row)


class BatchReader:
    """Read rows of global batches. Packed rows are ordered so that replicas take about equally long."""

    def __init__(
        self,
        corpora: Corpora,
        seed: int,
        global_batch: int,
        shares: Sequence[int],
        micro_batch: int,
        window: int | None,
        start: MixtureStart | None = None,
    ) -> None:
        """``shares`` are the micro-batches of each replica, ``window`` the model's window of attention, and
        ``start`` where the mixture begins in the run. Every reader of a step has the same arguments."""
        self._corpora, self._sampler = corpora, corpora.sampler(seed, start)
        self._global_batch, self._shares, self._micro_batch = global_batch, tuple(shares), micro_batch
        self._window = window
        self._orders: dict[int, tuple[list[Sample], list[int], BatchWords]] = {}

    def read(self, first: int, rows: range, out: NDArray[np.int32]) -> None:
        """Fill ``out`` ``[len(rows), width]`` with rows of the batch that begins with sample ``first``."""
        if not self._corpora.packed:
            read_batch(self._corpora, self._sampler, range(first + rows.start, first + rows.stop), out)
            return
        samples, order, words = self._order(first)
        chosen = order[rows.start : rows.stop]
        _read_rows(self._corpora, [samples[offset] for offset in chosen], out)
        for row, offset in zip(out, chosen, strict=True):
            words._replace(offset=offset).write(row)

    def _order(self, first: int) -> tuple[list[Sample], list[int], BatchWords]:
        """Return the samples of a batch, their order, and the batch's sums."""
        if first not in self._orders:
            samples = self._sampler.samples(first, first + self._global_batch)
            self._corpora.expect(samples)
            packed = self._corpora.packed
            counted = [packed[corpus].counted(number, self._window) for corpus, number in samples]
            pairs = [one.num_pairs for one in counted]
            order = balanced_order(pairs, self._shares, self._micro_batch)
            words = BatchWords(*map(sum, zip(*counted, strict=True)))
            self._orders = {first: (samples, order, words)}
        return self._orders[first]


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
