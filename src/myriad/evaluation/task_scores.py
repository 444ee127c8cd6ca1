"""Scores of a task, as lm-evaluation-harness defines them, with their standard errors.

    multiple_choice        acc            share of documents whose right choice has the highest log-likelihood
                           acc_norm       the same, per character of the choice
    loglikelihood          acc            share of continuations that greedy decoding gives
                           perplexity     exp of the mean negative log-likelihood of a continuation
    loglikelihood_rolling  bits_per_byte, byte_perplexity, word_perplexity     over all texts together
    generate_until         exact_match    share of texts that are an answer, without surrounding white space

The standard error is the deviation of the score over `_RESAMPLES` bootstrap samples of the documents. Their
draw is fixed, so the same results give the same numbers.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from myriad.evaluation.packed_pieces import PieceScore
from myriad.evaluation.task_files import RequestType, Task, TaskDocument

__all__ = ["Score", "TaskScores", "is_exact", "score_task"]

_RESAMPLES = 1000
_SEED = 1234
_Values = NDArray[np.float64]
_Aggregate = Callable[[_Values], _Values]
"""Map values ``[..., documents, columns]`` to one number for each sample of documents."""


class Score(NamedTuple):
    """A score and its standard error; ``None`` with fewer than two documents."""

    value: float
    standard_error: float | None


class TaskScores(NamedTuple):
    """The scores of one task."""

    task: str
    request_type: RequestType
    num_documents: int
    scores: dict[str, Score]


def score_task(task: Task, results: Sequence[Sequence[PieceScore] | str]) -> TaskScores:
    """Summarize the results of a task's documents: of each request, or the generated text."""
    columns = np.array(
        [_columns(task.request_type, *one) for one in zip(task.documents, results, strict=True)]
    )
    scores = {}
    for index, (name, aggregate) in enumerate(_SCORES[task.request_type].items()):
        values = columns[:, index]
        scores[name] = Score(float(aggregate(values)), _standard_error(values, aggregate))
    return TaskScores(task.name, task.request_type, len(task.documents), scores)


def is_exact(text: str, answers: Sequence[str]) -> bool:
    """Return whether a generated text is one of the answers, without surrounding white space."""
    return text.strip() in {answer.strip() for answer in answers}


def _columns(
    kind: RequestType, document: TaskDocument, result: Sequence[PieceScore] | str
) -> list[tuple[float, float]]:
    """Return a numerator and a denominator of the document for each score."""
    if isinstance(result, str):
        return [(float(is_exact(result, document.answers)), 1.0)]
    if kind == "multiple_choice":
        found = np.array([one.log_likelihood for one in result])
        lengths = np.array([max(len(text.lstrip()), 1) for _, text in document.pairs])
        right = [int(one.argmax()) == document.gold for one in (found, found / lengths)]
        return [(float(one), 1.0) for one in right]
    log_likelihood, is_greedy = PieceScore.total(result)
    if kind == "loglikelihood":
        return [(float(is_greedy), 1.0), (-log_likelihood, 1.0)]
    num_bytes, num_words = len(document.context.encode()), len(re.split(r"\s+", document.context))
    return [(-log_likelihood, num_bytes), (-log_likelihood, num_bytes), (-log_likelihood, num_words)]


def _ratio(values: _Values) -> _Values:
    """Return the sum of the numerators over that of the denominators."""
    totals = values.sum(-2)
    ratio: _Values = totals[..., 0] / totals[..., 1]
    return ratio


def _exponential(values: _Values) -> _Values:
    with np.errstate(over="ignore"):
        found: _Values = np.exp(_ratio(values))
    return found


def _bits(values: _Values) -> _Values:
    return _ratio(values) / np.log(2)


_SCORES: dict[RequestType, dict[str, _Aggregate]] = {
    "multiple_choice": {"acc": _ratio, "acc_norm": _ratio},
    "loglikelihood": {"acc": _ratio, "perplexity": _exponential},
    "loglikelihood_rolling": {
        "bits_per_byte": _bits,
        "byte_perplexity": _exponential,
        "word_perplexity": _exponential,
    },
    "generate_until": {"exact_match": _ratio},
}


def _standard_error(values: _Values, aggregate: _Aggregate) -> float | None:
    count = len(values)
    if count < 2:
        return None
    draw = np.random.default_rng(_SEED)
    samples = [aggregate(values[draw.integers(count, size=count)]) for _ in range(_RESAMPLES)]
    return float(np.std(samples, ddof=1))
