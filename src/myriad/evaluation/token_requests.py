"""Turn requests into tokens, as lm-evaluation-harness does.

A context and its continuation are tokenized together, and cut where the context's own tokens end; spaces at
the end of the context belong to the continuation. An empty context is the end of a document, with which the
model's training texts begin. A request that is longer than a window keeps its end.

A text of any length is scored in windows: each token once, with as much text before it as a window holds.

    tokens  0 1 2 3 4 5 6 7 8 9, windows of 4       <end> 0 1 2 -> 0 1 2 3
                                                    3 4 5 6     -> 4 5 6 7
                                                    5 6 7 8     ->     8 9
"""

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from myriad.errors import BadInputError
from myriad.evaluation.task_files import Task

if TYPE_CHECKING:
    from myriad.data.tokenizer import Tokenizer

__all__ = ["RequestEncoder", "RequestPiece", "encode_task"]


class RequestPiece(NamedTuple):
    """Tokens that one forward pass reads. At least one is context, and at least one is scored."""

    tokens: Sequence[int]
    num_scored: int
    """Number of tokens at the end whose losses count."""


class RequestEncoder:
    """Encodes requests for a model with windows of ``sequence`` tokens."""

    def __init__(self, tokenizer: "Tokenizer", sequence: int) -> None:
        self._tokenizer, self._sequence, self._end = tokenizer, sequence, tokenizer.end_of_document

    def pairs(self, pairs: Sequence[tuple[str, str]], where: Sequence[str]) -> list[RequestPiece]:
        """Encode contexts with continuations. ``where`` names each request, for messages. Raises
        `BadInputError` for a continuation that is longer than a window."""
        split = [_without_end_spaces(*pair) for pair in pairs]
        contexts = self._tokenizer.encode_batch([context for context, _ in split])
        wholes = self._tokenizer.encode_batch(["".join(both) for both in split])
        return [self._piece(*one) for one in zip(contexts, wholes, where, strict=True)]

    def _piece(self, context: list[int], whole: list[int], where: str) -> RequestPiece:
        starts_with_end = not context and whole[:1] == [self._end]
        cut = 1 if starts_with_end else min(len(context), max(len(whole) - 1, 0))
        continuation = whole[cut:]
        num_scored = len(continuation)
        if num_scored > self._sequence:
            allowed = f"at most model.sequence = {self._sequence} tokens, and it has {num_scored}"
            raise BadInputError("tasks", f"{where}: continuation", allowed)
        tokens = [*(whole[:1] if starts_with_end else context or [self._end]), *continuation]
        return RequestPiece(tokens[-(self._sequence + 1) :], num_scored)

    def texts(self, texts: Sequence[str]) -> list[list[RequestPiece]]:
        """Encode whole texts; each becomes one piece or several."""
        return [self._windows(tokens) for tokens in self._tokenizer.encode_batch(texts)]

    def _windows(self, tokens: list[int]) -> list[RequestPiece]:
        size = self._sequence
        pieces = [RequestPiece([self._end, *tokens[:size]], min(size, len(tokens)))] if tokens else []
        for done in range(size, len(tokens), size):
            end = min(done + size, len(tokens))
            pieces.append(RequestPiece(tokens[end - size - 1 : end], end - done))
        return pieces


def _without_end_spaces(context: str, continuation: str) -> tuple[str, str]:
    """Move spaces at the end of the context to the continuation, so that they are part of its first word."""
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation


def encode_task(task: Task, encoder: RequestEncoder) -> list[list[list[RequestPiece]]]:
    """Return the pieces of each request of each document; none for text to generate. Raises
    `BadInputError`."""
    if task.request_type == "generate_until":
        return []
    if task.request_type == "loglikelihood_rolling":
        return [[pieces] for pieces in encoder.texts([one.context for one in task.documents])]
    pairs = [(pair, one.where) for one in task.documents for pair in one.pairs]
    found = iter(encoder.pairs([pair for pair, _ in pairs], [where for _, where in pairs]))
    return [[[piece] for piece in islice(found, len(one.pairs))] for one in task.documents]
