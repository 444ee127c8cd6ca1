"""Text generation: one token at a time, with a cache of earlier keys and values, for several texts together.

Each step computes one position of each text. The model sees the last ``config.sequence`` tokens, or each
layer's window of them. Rotary positions may grow without limit. Learned positions are limited to the trained
number: when they run out, the second half of the text becomes the beginning and is recomputed. With longrope,
all rotary frequencies change once the text is longer than the original sequence: the text is then recomputed,
because cached keys are rotated by the former frequencies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from myriad.errors import BadInputError
from myriad.model.head import Head
from myriad.model.key_value_cache import KeyValueCache, NewPositions
from myriad.model.layers import Block, Embedding

__all__ = ["Session", "generate", "longrope_length", "sample"]


@dataclass
class _Row:
    """A text that the model reads."""

    tokens: list[int]
    """Its last ``sequence`` tokens."""
    next_position: int


class Session:
    """Texts, the rows of a batch, that the full list of layers on one device reads and continues."""

    def __init__(self, layers: nn.ModuleList, sequence: int) -> None:
        self.embedding = cast(Embedding, layers[0])
        self.blocks = [cast(Block, block) for block in list(layers)[1:-1]]
        self.head = cast(Head, layers[-1])
        self.sequence = sequence
        self.device = self.head.output.weight.device
        self.rows: list[_Row] = []
        self.caches: list[KeyValueCache] = []
        length = longrope_length(self.blocks)
        self.last_position = length if length is not None and length >= sequence else None
        """Number of positions after which a text begins again; ``None``: they may grow without limit."""
        if self.embedding.positions is not None:
            self.last_position = sequence
        self.longrope_length = length if self.last_position is None else None
        """Length of a text beyond which its rotary frequencies change; ``None``: they do not."""

    @torch.no_grad()
    def add(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Read new rows, each of at most ``sequence`` tokens. Return the scores ``[B, V]`` of the token after
        each."""
        limits = [min(block.attention.window or self.sequence, self.sequence) for block in self.blocks]
        pairs = zip(self.blocks, limits, strict=True)
        caches = [block.attention.new_cache(limit) for block, limit in pairs]
        lengths = [len(text) for text in texts]
        scores = self._run(texts, NewPositions(lengths, lengths, self.device), caches)
        if self.rows:
            for cache, new in zip(self.caches, caches, strict=True):
                cache.join(new)
        else:
            self.caches = caches
        self.rows += [_Row(list(text), len(text)) for text in texts]
        return scores

    @torch.no_grad()
    def read(self, new: Sequence[Sequence[int]]) -> torch.Tensor:
        """Read the next tokens of each row, as many of each. Return the scores ``[B, V]`` of the token after
        them."""
        texts = [self._text_anew(*pair) for pair in zip(self.rows, new, strict=True)]
        if all(text is None for text in texts):
            return self._read_on(new)
        begun = [(row, text) for row, text in enumerate(texts) if text is not None]
        others = [row for row, text in enumerate(texts) if text is None]
        self.select(others)
        found = [self._read_on([new[row] for row in others])] if others else []
        found.append(self.add([text for _, text in begun]))
        places = [*others, *(row for row, _ in begun)]
        order = sorted(range(len(places)), key=places.__getitem__)
        self.select(order)
        return torch.cat(found)[order]

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        if list(rows) == list(range(len(self.rows))):
            return
        self.rows = [self.rows[row] for row in rows]
        for cache in self.caches if rows else ():
            cache.select(rows)

    def _text_anew(self, row: _Row, new: Sequence[int]) -> list[int] | None:
        """Return the text with which the row begins again; ``None`` if it does not have to."""
        end = row.next_position + len(new)
        if self.last_position is not None and end > self.last_position:
            kept = max(self.sequence // 2 - len(new), 0)
            return [*row.tokens[len(row.tokens) - kept :], *new][-self.sequence :]
        if self.longrope_length is not None and row.next_position <= self.longrope_length < end:
            return [*row.tokens, *new][-self.sequence :]
        return None

    def _read_on(self, new: Sequence[Sequence[int]]) -> torch.Tensor:
        for row, tokens in zip(self.rows, new, strict=True):
            row.tokens = [*row.tokens, *tokens][-self.sequence :]
            row.next_position += len(tokens)
        ends = [row.next_position for row in self.rows]
        return self._run(new, NewPositions(ends, [len(one) for one in new], self.device), self.caches)

    def _run(
        self, tokens: Sequence[Sequence[int]], at: NewPositions, caches: Sequence[KeyValueCache]
    ) -> torch.Tensor:
        width = max(at.counts)
        padded = [[*[0] * (width - len(row)), *row] for row in tokens]
        x = self.embedding.embed(torch.tensor(padded, device=self.device), at.positions)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block.step(x, cache, at)
        return self.head.logits(x[:, -1])


def longrope_length(blocks: Sequence[Block]) -> int | None:
    """Return the length of a text beyond which the blocks use other rotary frequencies."""
    scalings = [block.attention.rotary.scaling for block in blocks if block.attention.rotary is not None]
    return next((one.original_sequence for one in scalings if one.kind == "longrope"), None)


def sample(logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Draw a token from scores ``[V]``, among the likeliest tokens that together have probability ``top_p``.
    Temperature 0 returns the likeliest token."""
    if temperature == 0:
        return int(logits.argmax())
    shares, tokens = (logits.float().cpu() / temperature).softmax(-1).sort(descending=True)
    shares[shares.cumsum(0) - shares > top_p] = 0.0
    return int(tokens[torch.multinomial(shares, 1, generator=generator)])


def _check(key: str, value: float, *, ok: bool, allowed: str) -> None:
    if not ok:
        raise BadInputError(key, value, allowed)


def generate(
    layers: nn.ModuleList,
    prompt: Sequence[int],
    *,
    sequence: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_token: int | None = None,
) -> Iterator[int]:
    """Yield tokens that continue ``prompt``, as they are drawn. The stop token ends the sequence and is not
    yielded.

    ``layers``: all layers on one device (`myriad.model.gpt.build_full`). ``sequence``: number of tokens that
    the model was trained to see; only the end of a longer prompt counts.
    """
    _check("temperature", temperature, ok=temperature >= 0, allowed="0 (the likeliest token) or more")
    _check("top_p", top_p, ok=0 < top_p <= 1, allowed="above 0, up to 1 (every token)")
    _check("prompt", len(prompt), ok=len(prompt) > 0, allowed="at least one token")
    generator = torch.Generator(device="cpu").manual_seed(seed)
    session = Session(layers, sequence)
    scores = session.add([list(prompt)[-sequence:]])
    for left in reversed(range(max_new_tokens)):
        token = sample(scores[0], temperature, top_p, generator)
        if token == stop_token:
            return
        yield token
        if left:
            scores = session.read([[token]])
