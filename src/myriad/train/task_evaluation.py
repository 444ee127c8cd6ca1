"""Score the model on tasks during training, in the layout that trains (``eval.tasks``).

    windows of requests ──► batches of train.global_batch windows, each replica its rows ──► forward passes
    losses of single tokens, on the last stage ──► sums over each request, added over all ranks ──► scores

All ranks have the same scores, equal in every layout up to the rounding of the forward pass.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from myriad.comm.grid import RankGrid
from myriad.data.corpus import open_corpora
from myriad.evaluation.packed_pieces import PackedPieces
from myriad.evaluation.task_requests import TaskRequests
from myriad.evaluation.task_scores import TaskScores
from myriad.evaluation.token_requests import RequestEncoder
from myriad.job import Job
from myriad.parallel.engine import Engine
from myriad.parallel.runtime import Batch
from myriad.train.data_loader import rank_rows
from myriad.train.inputs import read_job_tasks

__all__ = ["TaskEvaluation", "event_fields"]


class TaskEvaluation:
    """The tasks of a job, as this rank computes them."""

    def __init__(self, job: Job, grid: RankGrid, device: torch.device) -> None:
        """Read and encode the tasks. Raises `BadInputError`."""
        self._rows, self._device = rank_rows(job, grid.index("dp")), device
        self._batch_rows = job.train.global_batch
        self._requests: TaskRequests | None = None
        if job.eval.tasks:
            tokenizer = open_corpora(job.data, job.model.sequence).tokenizer
            tasks = read_job_tasks(job, tokenizer)
            assert tokenizer is not None, "refused otherwise"
            self._requests = TaskRequests(tasks, RequestEncoder(tokenizer, job.model.sequence))
            self._packed = PackedPieces(self._requests.pieces, job.model.sequence)

    @property
    def is_empty(self) -> bool:
        """Whether the job has no tasks."""
        return self._requests is None

    def scores(self, engine: Engine, stops: Callable[[], bool]) -> list[TaskScores] | None:
        """Return the scores of each task; ``None`` as soon as a rank is asked to stop. All ranks call it
        together."""
        assert self._requests is not None, "there are tasks"
        self._packed.begin()
        for start in range(0, self._packed.num_windows, self._batch_rows):
            rows = range(start + self._rows.start, start + self._rows.stop)
            batch = self._packed.batch(rows, self._device)
            _, stopped = engine.evaluate(partial(_same, batch), stops=stops())
            if stopped:
                return None
            assert batch.record is not None, "each batch has a record"
            self._packed.collect(rows, batch.record)
        own = torch.from_numpy(self._packed.found).to(self._device)
        self._packed.found[:] = engine.sum_of_losses(own).cpu().numpy()
        return self._requests.scores(self._packed.scores(), ())


def _same(batch: Batch) -> Batch:
    return batch


def event_fields(found: list[TaskScores]) -> Mapping[str, Any]:
    """Return the fields of an ``evaluation`` event."""
    pairs = [(one.task, name, score) for one in found for name, score in one.scores.items()]
    return {
        "scores": {f"{task}/{name}": score.value for task, name, score in pairs},
        "standard_errors": {f"{task}/{name}": score.standard_error for task, name, score in pairs},
        "documents": {one.task: one.num_documents for one in found},
    }
