"""Batches of token windows for this rank.

Training batches come from the node's loader, one process per node that local rank 0 starts; validation
batches are read directly.
"""

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from myriad.comm.grid import RankGrid
from myriad.comm.rendezvous.store_secret import STORE_SECRET
from myriad.data.bad_blocks import BlockGuard
from myriad.data.config import ValidationSet
from myriad.data.corpus import BatchReader
from myriad.data.corpus_opening import open_corpora, open_validation_set
from myriad.data.loader import LoaderClient, LoaderSpec, StartLoader
from myriad.data.streaming.streamed_corpus import StreamPlace
from myriad.data.windows import BatchWords, PackedRows, digest_rows
from myriad.errors import BadInputError
from myriad.job import Job
from myriad.job.job_steps import JobSteps
from myriad.kernels.documents import Documents
from myriad.parallel.batch import Batch
from myriad.parallel.engine import Engine
from myriad.run import Run
from myriad.train.device_setup import RankEnvironment
from myriad.train.inputs import BadBlocks

__all__ = ["Validation", "open_feed", "rank_rows", "to_batch", "to_device", "validation_guard"]


def rank_rows(job: Job, dp_index: int) -> range:
    """Return the rows of the global batch that one data-parallel rank computes."""
    first = sum(job.shares[:dp_index])
    size = job.layout.micro_batch
    return range(first * size, (first + job.shares[dp_index]) * size)


def to_batch(
    job: Job, rows: NDArray[np.int32], step_sample: int, first_row: int, device: torch.device
) -> Batch:
    """Turn rows of a global batch, as the loader gives them, into inputs and targets; they are copied, so
    that the source may be reused.

    ``step_sample`` is the number of the step's first sample, ``first_row`` that of the first of these rows
    in the batch. Raises `BadInputError` for a token that the model does not have: a vocabulary that is
    sharded over ranks would take it for another rank's token.
    """
    if job.data.documents == "packed":
        return _packed_batch(job, rows, step_sample, device)
    _check_tokens(job, rows)
    windows = to_device(torch.from_numpy(rows.astype(np.int64)), device)
    numbers = range(step_sample + first_row, step_sample + first_row + len(rows))
    samples = torch.arange(numbers.start, numbers.stop, device=device)
    digest = digest_rows(rows, numbers, "joined")
    return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), samples, digest=digest)


def _packed_batch(job: Job, rows: NDArray[np.int32], step_sample: int, device: torch.device) -> Batch:
    packed = PackedRows.of(rows)
    _check_tokens(job, packed.inputs)
    _check_tokens(job, np.where(packed.targets < 0, ~packed.targets, packed.targets))
    offsets = np.array([BatchWords.read(row).offset for row in rows])
    copy = partial(to_device, device=device)
    inputs, targets = (copy(torch.from_numpy(one.astype(np.int64))) for one in packed[:2])
    numbers = step_sample + offsets
    digest = digest_rows(rows, numbers.tolist(), "packed")
    samples = copy(torch.from_numpy(numbers))
    documents = Documents.of(packed.positions, copy, job.document_sharing)
    return Batch(inputs, targets, samples, documents, digest)


def _check_tokens(job: Job, tokens: NDArray[np.int32]) -> None:
    if not 0 <= tokens.min() <= (largest := int(tokens.max())) < job.model.vocabulary:
        allowed = f"the corpus holds token {largest}; more than that, or a corpus of another tokenizer"
        raise BadInputError("model.vocabulary", job.model.vocabulary, allowed)


def to_device(values: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return ``values`` on the device, as ``dtype`` if given.

    A GPU copies from pinned memory asynchronously, so that the host keeps issuing operators. A copy from
    other memory would block the host.
    """
    if device.type == "cuda" and values.device.type == "cpu":
        return values.to(dtype or values.dtype).pin_memory().to(device, non_blocking=True)
    return values.to(device, dtype)


class Validation:
    """The held-out batches of a job: always the same ones, in the same order."""

    def __init__(
        self,
        job: Job,
        grid: RankGrid,
        device: torch.device,
        guard: BlockGuard | None = None,
        validation_set: ValidationSet | None = None,
        streams: Path | None = None,
    ) -> None:
        """``validation_set``: the text; ``None``: what is held out of the training text. ``streams``: the
        folder of the run's streams."""
        self._job, self._rows, self._device = job, rank_rows(job, grid.index("dp")), device
        sequence, place = job.model.sequence, StreamPlace(streams, job.train.seed)
        if validation_set is None:
            self._corpora = open_corpora(job.data, sequence, "validation", guard=guard, streams=place)
        else:
            self._corpora = open_validation_set(job.data, validation_set, sequence, guard, place)
        whole = self._corpora.num_samples // job.train.global_batch
        self.num_batches = min(job.data.validation_batches, whole)
        if self.num_batches:
            train, shares = job.train, job.shares
            shape = (train.global_batch, shares, job.layout.micro_batch, job.model.window)
            self._reader = BatchReader(self._corpora, train.seed, *shape)

    @cached_property
    def num_targets(self) -> int:
        """Predicted tokens in all batches."""
        if self._job.data.documents == "joined":
            return self.num_batches * self._job.train.global_batch * self._job.model.sequence
        rows = (self._read(index, range(1))[0] for index in range(self.num_batches))
        return max(1, sum(BatchWords.read(row).num_targets for row in rows))

    def batch(self, index: int) -> Batch:
        """Return this rank's rows of one batch."""
        return to_batch(self._job, self._read(index, self._rows), 0, self._rows.start, self._device)

    def loss(self, engine: Engine, stops: Callable[[], bool]) -> float | None:
        """Return the mean loss in nats per token over all batches, NaN if there is none; ``None`` as soon as
        a rank is asked to stop."""
        total = 0.0
        for index in range(self.num_batches):
            loss, stopped = engine.evaluate(partial(self.batch, index), stops=stops())
            total += loss
            if stopped:
                return None
        return total / self.num_targets if self.num_batches else math.nan

    def _read(self, index: int, rows: range) -> NDArray[np.int32]:
        found = np.empty((len(rows), self._corpora.width), np.int32)
        self._reader.read(index * self._job.train.global_batch, rows, found)
        return found

    def bits_per_byte(self, loss: float) -> float | None:
        """Convert a mean loss in nats per token to bits per byte of text; ``None`` if the tokenizer is
        unknown, or no token with a loss is text."""
        tokenizer = self._corpora.tokenizer
        if tokenizer is None:
            return None
        everything = range(self._job.train.global_batch)
        sizes = np.zeros(max(tokenizer.vocabulary, self._job.model.vocabulary), np.int64)
        sizes[: tokenizer.vocabulary] = tokenizer.token_bytes
        num_bytes = 0
        for index in range(self.num_batches):
            rows = self._read(index, everything)
            targets = rows[:, 1:] if self._job.data.documents == "joined" else PackedRows.of(rows).targets
            num_bytes += int(sizes[targets[targets >= 0]].sum())
        return loss * self.num_targets / math.log(2) / num_bytes if num_bytes else None


def open_feed(
    run: Run,
    steps: JobSteps[Job],
    place: RankEnvironment,
    contents: Sequence[str],
    bad_blocks: BadBlocks,
    start: StartLoader | None = None,
) -> LoaderClient:
    """Connect to this node's loader, which holds the rows that any rank of the node needs.

    The loader waits for `LoaderClient.begin`. ``contents`` identifies the corpora that this rank has opened,
    for each phase.
    ``bad_blocks`` are the blocks that the run skips, the same on every rank. ``start`` starts the loader, by
    default as a process.
    """
    job, first = steps.job, place.rank - place.local_rank
    ranks_per_replica = job.layout.world // job.layout.dp
    replicas = range(first // ranks_per_replica, (first + place.local_world - 1) // ranks_per_replica + 1)
    specs = []
    for segment in steps.segments:
        now = steps.at(segment.first_step)
        spec = LoaderSpec(
            name=_meeting_name(run, first),
            data=now.data,
            sequence=segment.sequence,
            global_batch=segment.global_batch,
            shares=now.shares,
            micro_batch=now.layout.micro_batch,
            window=now.model.window,
            seed=job.train.seed,
            rows=((rank_rows(now, replicas[0]).start, rank_rows(now, replicas[-1]).stop),),
            first_step=segment.first_step,
            first_sample=segment.first_sample,
            start=steps.mixtures[segment.phase],
            content=contents[segment.phase],
            bad_blocks=bad_blocks,
            decides=is_one_node(place),
            streams=str(run.streams_path.absolute()),
            writer=str(first),
            events=str(run.events_path.absolute()),
        )
        specs.append(spec)
    return LoaderClient(
        specs[0].model_copy(update={"later": tuple(specs[1:])}),
        place.local_rank,
        place.local_world,
        first_step=None,
        on_restart=lambda problem: run.append_event("fault", rank=place.rank, problem=problem),
        patience=job.resilience.timeout_scale,
        start=start,
    )


def is_one_node(place: RankEnvironment) -> bool:
    """Return whether all ranks are on one node, so that they read the same files and find the same bad
    blocks."""
    return place.local_world == place.world


def validation_guard(run: Run, job: Job, place: RankEnvironment, bad_blocks: BadBlocks) -> BlockGuard:
    """Return this rank's policy for bad blocks of the held-out text, which it reads itself."""
    policy, most = job.data.on_bad_block, job.data.max_bad_blocks

    def report(event: str, fields: Mapping[str, Any]) -> None:
        run.append_event(event, rank=place.rank, **fields)

    return BlockGuard(policy, most, bad_blocks, decides=is_one_node(place), report=report)


def _meeting_name(run: Run, first_rank: int) -> str:
    """Return a name that is the same on every rank of the node and differs between runs and attempts.

    With the attempt's secret, another user cannot take it first: ports are listed for all users."""
    where = f"{run.path.resolve()}:{os.environ.get('MASTER_PORT', os.getpid())}:{first_rank}"
    secret = os.environ.get(STORE_SECRET, "").encode()
    return hashlib.blake2s(where.encode(), digest_size=8, key=secret[:32]).hexdigest()
