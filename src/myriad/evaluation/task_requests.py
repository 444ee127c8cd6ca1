"""The requests of tasks as pieces of text, and the way back from their scores to each document."""

from collections.abc import Sequence
from itertools import islice

from myriad.evaluation.packed_pieces import PieceScore
from myriad.evaluation.task_files import Generation, Task
from myriad.evaluation.task_scores import TaskScores, score_task
from myriad.evaluation.token_requests import RequestEncoder, RequestPiece, encode_task

__all__ = ["TaskRequests"]


class TaskRequests:
    """The requests of several tasks."""

    def __init__(self, tasks: Sequence[Task], encoder: RequestEncoder) -> None:
        """Raises `BadInputError` for a request that the model cannot read."""
        self._tasks = tasks
        self._requests = [encode_task(task, encoder) for task in tasks]
        """Pieces of each request, of each document, of each task."""
        every = (request for documents in self._requests for document in documents for request in document)
        self.pieces: list[RequestPiece] = [piece for request in every for piece in request]

    @property
    def prompts(self) -> list[tuple[str, Generation]]:
        """The prompts of the texts to generate."""
        tasks = [task for task in self._tasks if task.request_type == "generate_until"]
        return [(one.context, one.generation) for task in tasks for one in task.documents]

    def scores(self, found: Sequence[PieceScore], made: Sequence[str]) -> list[TaskScores]:
        """Return the scores of each task. ``found``: the score of each of `pieces`; ``made``: the text of
        each of `prompts`."""
        scores, texts = iter(found), iter(made)
        results = []
        for task, documents in zip(self._tasks, self._requests, strict=True):
            if task.request_type == "generate_until":
                results.append(score_task(task, list(islice(texts, len(task.documents)))))
                continue
            totals = [
                [PieceScore.total(list(islice(scores, len(request)))) for request in document]
                for document in documents
            ]
            results.append(score_task(task, totals))
        return results
