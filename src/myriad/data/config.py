"""What a job reads. No torch here."""

from pydantic import Field

from myriad.config import Config

__all__ = ["CorpusShare", "DataConfig"]


class CorpusShare(Config):
    """One corpus of a mixture."""

    path: str
    """Folder made by ``myriad data prepare``, or a Megatron .bin/.idx prefix."""
    weight: float = Field(1.0, gt=0)
    """Share of samples, relative to the other corpora's."""


class DataConfig(Config):
    """What a job reads, and how it is held ready."""

    corpus: str = "embedded"
    """``embedded`` (the installed Python standard library, tokenized on first use), a folder made by ``myriad
    data prepare``, or the prefix of Megatron's .bin and .idx."""
    mixture: tuple[CorpusShare, ...] = ()
    """Several corpora by weight, instead of one."""
    vocabulary: int = Field(4096, ge=260, le=1 << 24)
    """Tokens of the tokenizer trained for the embedded corpus; other corpora bring their own."""
    validation_batches: int = Field(8, ge=0)
    """Batches of held-out text in one validation."""
    prefetch: int = Field(2, ge=1)
    """Steps the node's loader holds ready."""
