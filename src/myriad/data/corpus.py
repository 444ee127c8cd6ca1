"""Corpora as a training run reads them: tokens addressed by sample, whatever files they lie in.

Sample ``k`` of a corpus is tokens ``[k * sequence, k * sequence + sequence + 1)`` of its shards laid end to
end: neighbours share one token, so every token but the first is predicted once in an epoch. Nothing is read
until a sample is asked for.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from myriad.data.cache import prepare_embedded
from myriad.data.config import CorpusShare, DataConfig
from myriad.data.indexed import IndexedShard
from myriad.data.manifest import Manifest, Split, read_manifest
from myriad.data.sampler import Sample, Sampler
from myriad.errors import BadInputError

if TYPE_CHECKING:
    from myriad.data.tokenizer import Tokenizer

__all__ = ["EMBEDDED", "Corpora", "Corpus", "open_corpora", "open_corpus", "read_batch"]

EMBEDDED = "embedded"
_TOKENIZER_FILE = "tokenizer.json"


class Corpus:
    """One split of one corpus: its shards, end to end."""

    def __init__(self, path: Path, shards: Sequence[IndexedShard], manifest: Manifest | None) -> None:
        """``path`` is what the user gave; ``manifest`` is None for Megatron's own files."""
        self.path, self.manifest, self.shards = path, manifest, tuple(shards)
        self._ends = list(accumulate(len(shard.tokens) for shard in shards))

    @property
    def num_tokens(self) -> int:
        """Tokens in all shards."""
        return self._ends[-1] if self._ends else 0

    def num_samples(self, sequence: int) -> int:
        """Whole samples of ``sequence`` tokens and the one to predict."""
        return max(0, self.num_tokens - 1) // sequence

    @cached_property
    def tokenizer(self) -> "Tokenizer | None":
        """The corpus's own tokenizer; None for Megatron's files with no ``tokenizer.json`` beside them."""
        from myriad.data.tokenizer import Tokenizer

        folder = self.path if self.path.is_dir() else self.path.parent
        return Tokenizer.load(folder) if (folder / _TOKENIZER_FILE).is_file() else None

    @cached_property
    def fingerprint(self) -> str | None:
        """Of the tokenizer, where it is known."""
        if self.manifest is not None:
            return self.manifest.fingerprint
        return self.tokenizer.fingerprint if self.tokenizer else None

    @cached_property
    def vocabulary(self) -> int | None:
        """Of the tokenizer, where it is known."""
        if self.manifest is not None:
            return self.manifest.vocabulary
        return self.tokenizer.vocabulary if self.tokenizer else None

    @property
    def hashes(self) -> dict[str, str]:
        """Hashes of the split's files by name; empty for Megatron's own format."""
        if self.manifest is None:
            return {}
        names = [f"{shard.prefix.name}{suffix}" for shard in self.shards for suffix in (".bin", ".idx")]
        return {name: self.manifest.files[name].xxh3_128 for name in names}

    def read(self, start: int, out: NDArray[np.int32]) -> None:
        """Fills ``out`` with tokens from number ``start`` on. Raises `BadInputError` naming a bad shard."""
        number, filled = bisect_right(self._ends, start), 0
        while filled < len(out):
            shard = self.shards[number]
            offset = start + filled - (self._ends[number] - len(shard.tokens))
            piece = shard.tokens[offset : offset + len(out) - filled]
            out[filled : filled + len(piece)] = piece
            self._check_range(shard, out[filled : filled + len(piece)])
            filled, number = filled + len(piece), number + 1

    def _check_range(self, shard: IndexedShard, tokens: NDArray[np.int32]) -> None:
        if (
            self.vocabulary is not None
            and len(tokens)
            and not 0 <= tokens.min() <= tokens.max() < self.vocabulary
        ):
            allowed = (
                f"holds a token outside the vocabulary of {self.vocabulary}: corrupt, or of another tokenizer"
            )
            raise BadInputError("shard", str(shard.prefix), allowed)


class Corpora:
    """The mixture that a run reads: one split, one sequence length."""

    def __init__(self, corpora: Sequence[Corpus], weights: Sequence[float], sequence: int) -> None:
        """``weights`` are shares of samples, in any unit."""
        self.corpora, self.weights, self.sequence = tuple(corpora), tuple(weights), sequence

    @property
    def sizes(self) -> list[int]:
        """Samples of each corpus."""
        return [corpus.num_samples(self.sequence) for corpus in self.corpora]

    @property
    def num_tokens(self) -> int:
        """Tokens of all corpora."""
        return sum(corpus.num_tokens for corpus in self.corpora)

    @property
    def num_samples(self) -> int:
        """Samples of all corpora; 0 when there is no held-out text."""
        return sum(self.sizes)

    @property
    def fingerprint(self) -> str | None:
        """Of the tokenizer that all share, where it is known."""
        return self.corpora[0].fingerprint if self.corpora else None

    @property
    def vocabulary(self) -> int | None:
        """Of the tokenizer that all share, where it is known."""
        return self.corpora[0].vocabulary if self.corpora else None

    @property
    def content(self) -> str:
        """Changes when the tokens do, by the hashes in the manifests; of Megatron's files by their sizes."""
        parts = [(corpus.num_tokens, sorted(corpus.hashes.items())) for corpus in self.corpora]
        return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()

    @property
    def tokenizer(self) -> "Tokenizer | None":
        """The tokenizer that all share; None where it is not known."""
        return self.corpora[0].tokenizer if self.corpora else None

    def sampler(self, seed: int) -> Sampler:
        """The order of this mixture's samples."""
        return Sampler(self.sizes, self.weights, seed)

    def read(self, sample: Sample, out: NDArray[np.int32]) -> None:
        """Fills ``out`` [sequence + 1] with one sample."""
        self.corpora[sample.corpus].read(sample.position * self.sequence, out)


def read_batch(
    corpora: Corpora,
    sampler: Sampler,
    samples: range,
    out: NDArray[np.int32] | None = None,
) -> NDArray[np.int32]:
    """[len(samples), sequence + 1] tokens of the samples with these global numbers."""
    batch = np.empty((len(samples), corpora.sequence + 1), np.int32) if out is None else out
    for row, sample in enumerate(sampler.samples(samples.start, samples.stop)):
        corpora.read(sample, batch[row])
    return batch


def open_corpora(
    config: DataConfig, sequence: int, split: Split = "train", cache: Path | None = None
) -> Corpora:
    """What a job reads, checked. Raises `BadInputError`.

    A validation split without a whole sample is left out (so `Corpora.num_samples` may be 0); a train split
    without one is refused.
    """
    shares = config.mixture or (CorpusShare(path=config.corpus, weight=1.0),)
    opened = [(open_corpus(share.path, split, config.vocabulary, cache), share.weight) for share in shares]
    _check_one_tokenizer([corpus for corpus, _ in opened])
    kept = [(corpus, weight) for corpus, weight in opened if _has_sample(corpus, sequence, split)]
    return Corpora([corpus for corpus, _ in kept], [weight for _, weight in kept], sequence)


def open_corpus(name: str, split: Split, vocabulary: int = 4096, cache: Path | None = None) -> Corpus:
    """``embedded``, a folder made by ``myriad data prepare``, or the prefix of Megatron's files."""
    if name == EMBEDDED:
        return _open_folder(prepare_embedded(cache, vocabulary), split)
    path = Path(name).expanduser()
    if path.is_dir():
        return _open_folder(path, split)
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if not prefix.with_name(prefix.name + ".idx").is_file():
        allowed = (
            "embedded, a folder made by `myriad data prepare`, or the prefix of Megatron's .bin and .idx"
        )
        if path.is_file():
            allowed = f"is a file, not a corpus: myriad data prepare {name} --output FOLDER makes one of text"
            raise BadInputError("data.corpus", name, allowed)
        where = "" if path.is_absolute() else f" from {Path.cwd()}"
        raise BadInputError("data.corpus", name, f"no such corpus{where}; {allowed}")
    shards = [IndexedShard(prefix)] if split == "train" else []
    return Corpus(prefix, shards, None)


def _open_folder(folder: Path, split: Split) -> Corpus:
    manifest = read_manifest(folder)
    for shard in manifest.of(split):
        for name in (f"{shard.name}.bin", f"{shard.name}.idx"):
            _check_size(folder / name, manifest.files[name].size_bytes)
    return Corpus(folder, [IndexedShard(folder / shard.name) for shard in manifest.of(split)], manifest)


def _check_size(path: Path, expected: int) -> None:
    size = path.stat().st_size if path.is_file() else None
    if size != expected:
        found = "is missing" if size is None else f"has {size} bytes instead of {expected}"
        raise BadInputError(
            "shard", str(path.with_suffix("")), f"{path.name} {found}; restore it or prepare again"
        )


def _check_one_tokenizer(corpora: Sequence[Corpus]) -> None:
    first = corpora[0]
    for corpus in corpora[1:]:
        if corpus.fingerprint != first.fingerprint:
            allowed = (
                f"made with another tokenizer than {first.path}; corpora of one mixture share their tokenizer"
            )
            raise BadInputError("data.mixture", str(corpus.path), allowed)


def _has_sample(corpus: Corpus, sequence: int, split: Split) -> bool:
    if corpus.num_samples(sequence) > 0:
        return True
    if split == "validation":
        return False
    allowed = f"holds {corpus.num_tokens} tokens; one sample needs model.sequence + 1 = {sequence + 1}"
    raise BadInputError("data.corpus", str(corpus.path), allowed)
