"""The ``[eval]`` section of a job. This module does not import torch."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from myriad.config import Config

__all__ = ["EvalConfig"]


def _one_path(value: object) -> object:
    """Accept one path instead of a list."""
    return (value,) if isinstance(value, str) else value


class EvalConfig(Config):
    """Scores of the model on tasks, during training."""

    tasks: Annotated[tuple[str, ...], BeforeValidator(_one_path)] = ()
    """JSONL files of requests, or folders of such files (docs/guide/evaluation.md), that are scored during
    training: multiple choice, log-likelihoods, perplexity of texts, generation. Each node reads them from the
    same path."""
    every: int = Field(0, ge=0)
    """Steps between evaluations on eval.tasks. The last step is always evaluated; 0: only the last."""
    limit: int | None = Field(None, ge=1)
    """Largest number of documents of each task; off: all."""
