"""What a job reads. No torch here."""

from pydantic import Field

from myriad.config import Config, Size
from myriad.data.guard import OnBadBlock

__all__ = ["CorpusShare", "DataConfig"]


class CorpusShare(Config):
    """One corpus of a mixture."""

    path: str
    """Folder made by ``myriad data prepare``, a Megatron .bin/.idx prefix, or a URL of either."""
    weight: float = Field(1.0, gt=0)
    """Share of samples, relative to the other corpora's."""


class DataConfig(Config):
    """What a job reads, and how it is held ready."""

    corpus: str = "embedded"
    """``embedded`` (the installed Python standard library, tokenized on first use), a folder made by ``myriad
    data prepare``, the prefix of Megatron's .bin and .idx, or a URL of either (s3://, https://, hdfs://)."""
    mixture: tuple[CorpusShare, ...] = ()
    """Several corpora by weight, instead of one."""
    vocabulary: int = Field(4096, ge=260, le=1 << 24)
    """Tokens of the tokenizer trained for the embedded corpus; other corpora bring their own."""
    validation_batches: int = Field(8, ge=0)
    """Batches of held-out text in one validation."""
    prefetch: int = Field(2, ge=1)
    """Steps the node's loader holds ready."""
    cache: str | None = None
    """Folder in which each machine keeps blocks of corpora at URLs; off: in the user's cache."""
    cache_bytes: Size = 2**34
    """Largest size of that cache for one corpus; a block that it lacks is fetched again."""
    on_bad_block: OnBadBlock = "stop"
    """What a block of tokens whose hash is wrong, twice, does: ``stop`` ends the run with its file and byte;
    ``skip`` replaces the samples that lie in it by others of the same corpus."""
    max_bad_blocks: int = Field(16, ge=1)
    """Bad blocks (of 64 KiB) that data.on_bad_block = skip skips in one run before it stops."""
