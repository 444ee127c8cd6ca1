"""Scores on tasks over the steps of a run, from its ``evaluation`` events."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from myriad.system.jsonl import Record

__all__ = ["ScoreHistory", "score_histories"]


@dataclass
class ScoreHistory:
    """One score of one task. Values are null where a score is not finite, and standard errors where one
    document has none."""

    name: str
    """Names of the task and of the score, as ``TASK/SCORE``."""
    num_documents: int | None = None
    """Number of documents of the newest evaluation."""
    steps: list[int] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)
    standard_errors: list[float | None] = field(default_factory=list)

    def add(self, step: int, value: float | None, standard_error: float | None) -> None:
        """Add an evaluation. It replaces those of the same and of later steps: a resumed run goes back."""
        kept = bisect_left(self.steps, step)
        self.steps[kept:] = [step]
        self.values[kept:] = [value]
        self.standard_errors[kept:] = [standard_error]


def score_histories(events: Sequence[Record]) -> list[ScoreHistory]:
    """Return each score of the newest evaluation, over all evaluations, in the order of that event."""
    found: dict[str, ScoreHistory] = {}
    newest: Mapping[str, object] = {}
    for event in events:
        step, scores = event.get("step"), event.get("scores")
        if event.get("event") != "evaluation" or not isinstance(step, int) or not isinstance(scores, Mapping):
            continue
        newest = scores
        errors, documents = event.get("standard_errors") or {}, event.get("documents")
        for name, value in scores.items():
            one = found.setdefault(name, ScoreHistory(name))
            one.add(step, value, errors.get(name))
            count = documents.get(name.rpartition("/")[0]) if isinstance(documents, Mapping) else None
            one.num_documents = count if isinstance(count, int) else None
    return [found[name] for name in newest]
