"""Generate the likeliest continuation of many prompts, in batches of rows of different lengths.

    longest prompts first ──► rows of a batch ──► one token of each row a step ──► rows that end leave, and
                                                                                    waiting prompts join

A text does not depend on the batch that it is generated in. Rounding does: products of several rows add up in
another order. Where the two largest scores are so close that rounding may decide (`_CLOSE`), the row's scores
are therefore computed once more, from its tokens alone. Of equal scores the smallest token is taken.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from myriad.data.tokenizer import Tokenizer
from myriad.evaluation.task_files import Generation
from myriad.model.generate import Session, TextReader
from myriad.model.generation_limits import MOST_NEXT_SCORES, SCORES_OF_HEAD

__all__ = ["GeneratedText", "GreedyTexts", "Prompt", "open_texts"]

_CLOSE = 5e-5
"""Difference of scores, relative to the largest one (at least 1), below which rounding may decide."""

Prompt = tuple[str, Generation]
"""A text to continue, and when its continuation ends."""


@dataclass
class GeneratedText:
    """A text that is generated."""

    index: int
    """Place of its prompt among all prompts."""
    prompt: list[int]
    settings: Generation
    made: list[int] = field(default_factory=list)
    """Tokens that were generated so far."""
    text: str = ""

    def width(self, sequence: int) -> int:
        """Return the largest number of positions that its keys and values need."""
        return min(len(self.prompt) + self.settings.max_new_tokens, sequence)

    def take(self, token: int, tokenizer: Tokenizer) -> bool:
        """Add a token, and return whether the text ends."""
        if token == tokenizer.end_of_document:
            return True
        self.made.append(token)
        self.text = tokenizer.decode(self.made)
        found = [place for stop in self.settings.until if (place := self.text.find(stop)) >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found) or len(self.made) == self.settings.max_new_tokens


class GreedyTexts:
    """Generates the texts of one model."""

    def __init__(self, reader: TextReader, tokenizer: Tokenizer, sequence: int, batch_tokens: int) -> None:
        """``batch_tokens``: number of positions whose keys and values are held; at least those of one
        text."""
        self._reader, self._tokenizer, self._sequence = reader, tokenizer, sequence
        self._batch_tokens = batch_tokens
        self._most_rows = MOST_NEXT_SCORES // tokenizer.vocabulary

    def generate(
        self, prompts: Sequence[Prompt], show: Callable[[int, int], None] = lambda done, total: None
    ) -> list[str]:
        """Return the continuation of each prompt. ``show(texts_done, texts)`` reports progress."""
        waiting = open_texts(prompts, self._tokenizer, self._sequence)
        waiting.sort(key=lambda row: (len(row.prompt), row.width(self._sequence)))  # the last is taken first
        session, rows, texts = (
            Session(self._reader, self._sequence),
            list[GeneratedText](),
            [""] * len(prompts),
        )
        scores: list[torch.Tensor] = []
        while waiting or rows:
            while new := self._joining(rows, waiting):
                scores.append(session.add([row.prompt for row in new]))
                rows += new
            tokens = self._likeliest(session, torch.cat(scores))
            ends = [row.take(token, self._tokenizer) for row, token in zip(rows, tokens, strict=True)]
            for row in (row for row, end in zip(rows, ends, strict=True) if end):
                texts[row.index] = row.text
            kept = [place for place, end in enumerate(ends) if not end]
            session.select(kept)
            rows = [rows[place] for place in kept]
            scores = [session.read([[tokens[place]] for place in kept])] if kept else []
            show(len(prompts) - len(waiting) - len(rows), len(prompts))
        return texts

    def _joining(self, rows: Sequence[GeneratedText], waiting: list[GeneratedText]) -> list[GeneratedText]:
        """Take the prompts that are read next, in one forward pass; none while too few rows are free."""
        width = max((row.width(self._sequence) for row in rows), default=0)
        new: list[GeneratedText] = []
        while waiting:
            width = max(width, waiting[-1].width(self._sequence))
            count = len(rows) + len(new) + 1
            if count > 1 and (count * width > self._batch_tokens or count > self._most_rows):
                break
            # The first of the new prompts is the longest.
            if new and (len(new) + 1) * len(new[0].prompt) ** 2 > SCORES_OF_HEAD:
                break
            new.append(waiting.pop())
        return new

    def _likeliest(self, session: Session, scores: torch.Tensor) -> list[int]:
        """Return the likeliest token of each row."""
        found, best = self._reader.likeliest(scores)
        tokens: list[int] = found.tolist()
        close = best[:, 0] - best[:, -1] < _CLOSE * best[:, 0].abs().clamp(min=1)
        for row in close.nonzero().flatten().tolist():
            alone = Session(self._reader, self._sequence).add([session.rows[row].tokens])
            tokens[row] = int(self._reader.likeliest(alone)[0])
        return tokens


def open_texts(prompts: Sequence[Prompt], tokenizer: Tokenizer, sequence: int) -> list[GeneratedText]:
    """Return the texts to generate. Of a long prompt the end counts, so that the new tokens fit in one window
    of ``sequence`` tokens, if they fit in any."""
    texts = []
    for index, (prompt, settings) in enumerate(prompts):
        tokens = tokenizer.encode(prompt) or [tokenizer.end_of_document]
        room = sequence - settings.max_new_tokens
        texts.append(GeneratedText(index, tokens[-(room if room > 0 else sequence) :], settings))
    return texts
