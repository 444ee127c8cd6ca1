"""Corpora as a training run reads them: tokens addressed by sample, independent of their files.

Sample ``k`` of a corpus is window ``k`` of its tokens (`myriad.data.windows`), which lie in shards end to
end. Tokens are read only when a sample is requested. If the corpus has block hashes, they are compared with
them (`myriad.data.verified_shard`).

A sample in a bad block that may be skipped is replaced by another of the same corpus. The replacement depends
on the sample's position alone, so every rank, layout and resumed run draws the same one.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from myriad.data.bad_blocks import BadBlockError
from myriad.data.config import Documents
from myriad.data.corpus_manifest import (
    Manifest,
)
from myriad.data.loss_mask import LOSS_SUFFIX, LossMask
from myriad.data.sampler import MixtureStart, Sample, Sampler, permute
from myriad.data.streaming.streamed_corpus import StreamedCorpus, StreamWindows
from myriad.data.verified_shard import HashedShard, TokenShard
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

if TYPE_CHECKING:
    from myriad.data.tokenizer import Tokenizer

__all__ = [
    "BatchReader",
    "Corpora",
    "Corpus",
    "read_batch",
]

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
            turn = first // self._global_batch
            order = balanced_order(pairs, self._shares, self._micro_batch, turn)
            words = BatchWords(*map(sum, zip(*counted, strict=True)))
            self._orders = {first: (samples, order, words)}
        return self._orders[first]
