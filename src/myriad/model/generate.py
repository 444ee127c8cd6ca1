"""Text generation: one token at a time, with a cache of earlier keys and values, for several texts together.

Each step computes one position of each text. The model sees the last ``config.sequence`` tokens, or each
layer's window of them. Rotary positions may grow without limit. Learned positions are limited to the trained
number: when they run out, the second half of the text becomes the beginning and is recomputed. With longrope,
all rotary frequencies change once the text is longer than the original sequence: the text is then recomputed,
because cached keys are rotated by the former frequencies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import nn

from myriad.errors import BadInputError
from myriad.kernels.rotary_scaling import RotaryScaling
from myriad.model.generation_limits import SCORES_OF_HEAD
from myriad.model.head import Head
from myriad.model.key_value_cache import KeyValueCache, NewPositions
from myriad.model.layers import Block, Embedding

__all__ = ["Session", "TextReader", "WholeReader", "generate", "longrope_length", "sample"]


class TextReader(Protocol):
    """The layers that compute new positions of texts."""

    device: torch.device
    blocks: Sequence[Block]
    """The blocks of this process; each has a cache."""
    has_learned_positions: bool
    scaling: RotaryScaling | None
    """The scaling of rotary frequencies; ``None``: there are no rotary positions."""

    def read(self, tokens: torch.Tensor, at: NewPositions, caches: Sequence[KeyValueCache]) -> torch.Tensor:
        """Compute new tokens ``[B, S]``, and extend the caches. Return the scores of the token after them,
        ``[B, V]`` or what `likeliest` takes."""
        ...

    def likeliest(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token with the largest score of each row ``[B]``, of equal ones the smallest, and the
        two largest scores ``[B, 2]``."""
        ...


class WholeReader:
    """The full list of layers, on one device."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self._embedding, self._head = cast(Embedding, layers[0]), cast(Head, layers[-1])
        self.blocks: Sequence[Block] = [cast(Block, block) for block in list(layers)[1:-1]]
        self.device = self._head.output.weight.device
        self.has_learned_positions = self._embedding.positions is not None
        self.scaling = _scaling(self.blocks)

    def read(self, tokens: torch.Tensor, at: NewPositions, caches: Sequence[KeyValueCache]) -> torch.Tensor:
        """Return the scores ``[B, V]``."""
        x = self._embedding.embed(tokens, at.positions)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block.step(x, cache, at)
        return self._head.logits(x[:, -1])

    def likeliest(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the likeliest tokens, and the two largest scores."""
        return scores.argmax(1), scores.topk(min(2, scores.shape[1]), 1).values


@dataclass
class _Row:
    """A text that the model reads."""

    tokens: list[int]
    """Its last ``sequence`` tokens."""
    next_position: int


class Session:
    """Texts, the rows of a batch, that the layers of a model read and continue."""

    def __init__(self, reader: TextReader, sequence: int) -> None:
        """``sequence``: number of tokens that the model was trained to see."""
        self.reader, self.sequence = reader, sequence
        self.rows: list[_Row] = []
        self.caches: list[KeyValueCache] = []
        length = _longrope_length(reader.scaling)
        self.last_position = length if length is not None and length >= sequence else None
        """Number of positions after which a text begins again; ``None``: they may grow without limit."""
        if reader.has_learned_positions:
            self.last_position = sequence
        self.longrope_length = length if self.last_position is None else None
        """Length of a text beyond which its rotary frequencies change; ``None``: they do not."""

    @torch.no_grad()
    def add(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Read new rows, each of at most ``sequence`` tokens. Return the scores ``[B, V]`` of the token after
        each."""
        blocks = self.reader.blocks
        limits = [min(block.attention.window or self.sequence, self.sequence) for block in blocks]
        pairs = zip(blocks, limits, strict=True)
        caches = [block.attention.new_cache(limit) for block, limit in pairs]
        scores = self._read_whole(texts, caches)
        if self.rows:
            for cache in self.caches:
                cache.join(caches.pop(0))  # taken out, so that it is freed before the next block's is copied
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

    def _read_whole(self, texts: Sequence[Sequence[int]], caches: Sequence[KeyValueCache]) -> torch.Tensor:
        """Read texts from their first token on. A long text is read in pieces, unless its length decides its
        rotary frequencies."""
        lengths, scaling = [len(text) for text in texts], self.reader.scaling
        longest = max(lengths)
        piece = max(SCORES_OF_HEAD // longest, 1)
        is_decisive = scaling is not None and scaling.decisive_length(longest) > 0
        if len(texts) > 1 or piece >= longest or is_decisive:
            return self._run(texts, NewPositions(lengths, lengths, self.reader.device), caches)
        for start in range(0, longest, piece):
            new = texts[0][start : start + piece]
            at = NewPositions([start + len(new)], [len(new)], self.reader.device)
            scores = self._run([new], at, caches)
        return scores

    def _read_on(self, new: Sequence[Sequence[int]]) -> torch.Tensor:
        for row, tokens in zip(self.rows, new, strict=True):
            row.tokens = [*row.tokens, *tokens][-self.sequence :]
            row.next_position += len(tokens)
        ends = [row.next_position for row in self.rows]
        at = NewPositions(ends, [len(one) for one in new], self.reader.device)
        return self._run(new, at, self.caches)

    def _run(
        self, tokens: Sequence[Sequence[int]], at: NewPositions, caches: Sequence[KeyValueCache]
    ) -> torch.Tensor:
        width = max(at.counts)
        padded = [[*[0] * (width - len(row)), *row] for row in tokens]
        return self.reader.read(torch.tensor(padded, device=self.reader.device), at, caches)


def longrope_length(blocks: Sequence[Block]) -> int | None:
    """Return the length of a text beyond which the blocks use other rotary frequencies."""
    return _longrope_length(_scaling(blocks))


def _longrope_length(scaling: RotaryScaling | None) -> int | None:
    return scaling.original_sequence if scaling is not None and scaling.kind == "longrope" else None


def _scaling(blocks: Sequence[Block]) -> RotaryScaling | None:
    """Return the scaling of the blocks' rotary frequencies, which is one for all."""
    scalings = [block.attention.rotary.scaling for block in blocks if block.attention.rotary is not None]
    return next((one for one in scalings if one.kind != "none"), scalings[0] if scalings else None)


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
    session = Session(WholeReader(layers), sequence)
    scores = session.add([list(prompt)[-sequence:]])
    for left in reversed(range(max_new_tokens)):
        token = sample(scores[0], temperature, top_p, generator)
        if token == stop_token:
            return
        yield token
        if left:
            scores = session.read([[token]])
