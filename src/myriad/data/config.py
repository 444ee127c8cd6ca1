"""The ``[data]`` section of a job. This module does not import torch."""

from typing import Literal

from pydantic import Field

from myriad.config import Config, Size
from myriad.data.bad_blocks import OnBadBlock

__all__ = ["CorpusShare", "DataConfig", "Documents", "OnBadRecord", "ValidationSet"]

Documents = Literal["joined", "packed"]
OnBadRecord = Literal["stop", "skip"]


class CorpusShare(Config):
    """One corpus of a mixture, with its weight."""

    path: str
    """A folder made by ``myriad data prepare``, the prefix of a Megatron .bin/.idx pair, or a URL of
    either; or text that is streamed, as in data.corpus."""
    weight: float = Field(1.0, gt=0)
    """Weight of the corpus in the mixture, relative to the other weights."""


class ValidationSet(Config):
    """A corpus on which a run is validated, beside the held-out text of its own."""

    name: str
    """Name in events and metrics: up to 64 letters, digits, ``_``, ``.`` and ``-``."""
    path: str
    """A folder made by ``myriad data prepare``, the prefix of a Megatron .bin/.idx pair, or a URL of
    either, with the tokenizer of the run. Its held-out text is used; all of it if none is held out."""


class DataConfig(Config):
    """The training data: corpora, their mixture, caching and prefetching."""

    corpus: str = "embedded"
    """embedded (the Python standard library of this installation, tokenized on first use), a folder made by
    ``myriad data prepare``, the prefix of a Megatron .bin/.idx pair, or a URL of either (s3://, https://,
    hdfs://). Text is streamed, tokenized during training: a file or a glob of .txt, .jsonl or .parquet files,
    or raw: before a folder, a file or a URL of any other name."""
    mixture: tuple[CorpusShare, ...] = ()
    """Several corpora with weights; replaces data.corpus."""
    vocabulary: int = Field(4096, ge=260, le=1 << 24)
    """Vocabulary size of the tokenizer that is trained for the embedded corpus. Other corpora bring their
    own tokenizer."""
    documents: Documents = "joined"
    """How documents share the windows of model.sequence tokens. joined: end to end, cut anywhere; tokens
    attend across documents. packed: whole documents, chosen to fill each window; tokens attend inside their
    document only, positions restart, and no loss crosses a border. Documents longer than a window are
    split."""
    validation_batches: int = Field(8, ge=0)
    """Batches of held-out text in one validation."""
    validation_sets: tuple[ValidationSet, ...] = ()
    """Further corpora that each validation reads, each with a name and with data.validation_batches."""
    prefetch: int = Field(2, ge=1)
    """Steps of batches that the loader of a node prepares ahead."""
    cache: str | None = None
    """Folder for cached blocks of corpora at URLs; off: the user's cache folder."""
    cache_bytes: Size = 2**34
    """Maximum size of that cache per corpus, e.g. "16 GiB". Evicted blocks are downloaded again."""
    on_bad_block: OnBadBlock = "stop"
    """Response to a block of tokens whose checksum is wrong twice. stop: end the run and report the file
    and the byte. skip: replace the samples in the block by others of the same corpus."""
    tokenizer: str | None = None
    """For streamed text: a tokenizer.json, or a folder with one. Off: no text is streamed."""
    text_key: str = Field("text", min_length=1)
    """For streamed text: the field of JSONL, or the column of Parquet, that holds the text."""
    held_out: float = Field(0.0, ge=0, lt=1)
    """For streamed text: the share of documents, chosen by their hashes, that is held out for validation."""
    shuffle_bytes: Size = Field(2**24, ge=2**16, le=2**32)
    """For streamed text: the amount of text that is shuffled together, taken from up to 16 files at once.
    The loader holds the tokens of a few times as much in memory."""
    tokenizer_threads: int | None = Field(None, ge=1, le=256)
    """For streamed text: threads in which a node's loader tokenizes ahead; off: a quarter of the cores."""
    on_bad_record: OnBadRecord = "stop"
    """For streamed text: response to a record that cannot be read, or to a damaged file. stop: end the run
    and report the place. skip: leave out the record, or the rest of the file, and report how many."""
    max_bad_blocks: int = Field(16, ge=1)
    """Bad blocks (64 KiB each) that one run may skip with data.on_bad_block = skip before it stops."""
