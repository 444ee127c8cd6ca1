"""Batches of token windows for this rank: from the node's loader for training, read directly for
validation."""

import math

import numpy as np
import torch
from numpy.typing import NDArray

from myriad.comm.grid import RankGrid
from myriad.data.corpus import open_corpora, read_batch
from myriad.data.guard import BlockGuard
from myriad.errors import BadInputError
from myriad.job import Job
from myriad.parallel.runtime import Batch

__all__ = ["Validation", "rank_rows", "to_batch", "to_device"]


def rank_rows(job: Job, dp_index: int) -> range:
    """Rows of the global batch that one data-parallel rank works on."""
    first = sum(job.shares[:dp_index])
    size = job.layout.micro_batch
    return range(first * size, (first + job.shares[dp_index]) * size)


def to_batch(job: Job, tokens: NDArray[np.int32], first_sample: int, device: torch.device) -> Batch:
    """``[rows, sequence + 1]`` token windows as inputs and targets; copied, so that the source may be
    reused.

    Raises `BadInputError` for a token that the model does not have: a vocabulary cut over ranks would take it
    for another rank's.
    """
    if not 0 <= tokens.min() <= (largest := int(tokens.max())) < job.model.vocabulary:
        allowed = f"the corpus holds token {largest}; more than that, or a corpus of another tokenizer"
        raise BadInputError("model.vocabulary", job.model.vocabulary, allowed)
    windows = to_device(torch.from_numpy(tokens.astype(np.int64)), device)
    samples = torch.arange(first_sample, first_sample + len(windows), device=device)
    return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), samples)


def to_device(values: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return ``values`` on the device, as ``dtype`` if given. A GPU reads them from pinned memory when it is
    there in its work: the host goes on starting operators, where a copy from other memory would stop it."""
    if device.type == "cuda" and values.device.type == "cpu":
        return values.to(dtype or values.dtype).pin_memory().to(device, non_blocking=True)
    return values.to(device, dtype)


class Validation:
    """The held-out batches of a job: always the same ones, in the same order."""

    def __init__(
        self, job: Job, grid: RankGrid, device: torch.device, guard: BlockGuard | None = None
    ) -> None:
        self._job, self._rows, self._device = job, rank_rows(job, grid.index("dp")), device
        self._corpora = open_corpora(job.data, job.model.sequence, "validation", guard=guard)
        whole = self._corpora.num_samples // job.train.global_batch
        self.num_batches = min(job.data.validation_batches, whole)
        self._sampler = self._corpora.sampler(job.train.seed) if self.num_batches else None

    @property
    def num_targets(self) -> int:
        """Predicted tokens in all batches."""
        return self.num_batches * self._job.train.global_batch * self._job.model.sequence

    def batch(self, index: int) -> Batch:
        """This rank's rows of one batch."""
        return to_batch(self._job, self._read(index, self._rows), 0, self._device)

    def _read(self, index: int, rows: range) -> NDArray[np.int32]:
        assert self._sampler is not None
        first = index * self._job.train.global_batch
        return read_batch(self._corpora, self._sampler, range(first + rows.start, first + rows.stop))

    def bits_per_byte(self, loss: float) -> float | None:
        """A mean loss in nats per token as bits per byte of text; ``None`` where the tokenizer is not
        known."""
        tokenizer = self._corpora.tokenizer
        if tokenizer is None:
            return None
        everything = range(self._job.train.global_batch)
        sizes = np.zeros(max(tokenizer.vocabulary, self._job.model.vocabulary), np.int64)
        sizes[: tokenizer.vocabulary] = tokenizer.token_bytes
        num_bytes = sum(int(sizes[self._read(i, everything)[:, 1:]].sum()) for i in range(self.num_batches))
        return loss * self.num_targets / math.log(2) / num_bytes
