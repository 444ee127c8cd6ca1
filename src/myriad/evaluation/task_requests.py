"""The requests of tasks as pieces of text, and the way back from their scores to each document."""

from collections.abc import Callable, Sequence
from itertools import islice

from myriad.evaluation.packed_pieces import PieceScore
from myriad.evaluation.task_files import Document, Task
from myriad.evaluation.task_scores import TaskScores, score_task
from myriad.evaluation.token_requests import Piece, RequestEncoder, encode_task

__all__ = ["TaskRequests"]

Generate = Callable[[Document], str]
"""Return the text that a model generates for a document."""


class TaskRequests:
    """The requests of several tasks."""

    def __init__(self, tasks: Sequence[Task], encoder: RequestEncoder) -> None:
        """Raises `BadInputError` for a request that the model cannot read."""
        self._tasks = tasks
        self._requests = [encode_task(task, encoder) for task in tasks]
        """Pieces of each request, of each document, of each task."""
        every = (request for documents in self._requests for document in documents for request in document)
        self.pieces: list[Piece] = [piece for request in every for piece in request]

    @property
    def num_generations(self) -> int:
        """Number of texts to generate."""
        return sum(len(task.documents) for task in self._tasks if task.request_type == "generate_until")

    def scores(self, found: Sequence[PieceScore], generate: Generate | None = None) -> list[TaskScores]:
        """Return the scores of each task. ``found``: of each of `pieces`. ``generate``: needed by tasks that
        generate text."""
        scores = iter(found)
        results = []
        for task, documents in zip(self._tasks, self._requests, strict=True):
            if task.request_type == "generate_until":
                assert generate is not None, "a task that generates text"
                results.append(score_task(task, [generate(document) for document in task.documents]))
                continue
            totals = [
                [PieceScore.total(list(islice(scores, len(request)))) for request in document]
                for document in documents
            ]
            results.append(score_task(task, totals))
        return results
