"""Text generation: one token at a time, with a cache of earlier keys and values.

Each step computes one position. The model sees the last ``config.sequence`` tokens, or each layer's window of
them. Rotary positions may grow without limit. Learned positions are limited to the trained number: when they
run out, the second half of the text becomes the beginning and is recomputed. With longrope, all rotary
frequencies change once the text is longer than the original sequence: the text is then recomputed, because
cached keys are rotated by the former frequencies.
"""

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import nn

from myriad.errors import BadInputError
from myriad.model.head import Head
from myriad.model.layers import Block, Embedding

__all__ = ["Session", "generate", "longrope_length", "sample"]


class Session:
    """A sequence that the full list of layers on one device reads and continues."""

    def __init__(self, layers: nn.ModuleList, sequence: int) -> None:
        self.embedding = cast(Embedding, layers[0])
        self.blocks = [cast(Block, block) for block in list(layers)[1:-1]]
        self.head = cast(Head, layers[-1])
        self.sequence = sequence
        self.device = self.head.output.weight.device
        self.tokens: list[int] = []
        length = longrope_length(self.blocks)
        self.last_position = length if length is not None and length >= sequence else None
        """Number of positions after which the text begins again; ``None``: they may grow without limit."""
        if self.embedding.positions is not None:
            self.last_position = sequence
        self.longrope_length = length if self.last_position is None else None
        """Length of the text beyond which the rotary frequencies change; ``None``: they do not."""
        self._start()

    def _start(self) -> None:
        limits = [min(block.attention.window or self.sequence, self.sequence) for block in self.blocks]
        pairs = zip(self.blocks, limits, strict=True)
        self.caches = [block.attention.new_cache(limit) for block, limit in pairs]
        self.next_position = 0

    @torch.no_grad()
    def read(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the scores ``[V]`` of the token after these tokens, which follow all tokens read before.
        Read at most ``sequence`` tokens at a time."""
        end = self.next_position + len(tokens)
        if self.last_position is not None and end > self.last_position:
            kept = max(self.sequence // 2 - len(tokens), 0)
            tokens = [*self.tokens[len(self.tokens) - kept :], *tokens][-self.sequence :]
            self._start()
        elif self.longrope_length is not None and 0 < self.next_position <= self.longrope_length < end:
            tokens = [*self.tokens, *tokens][-self.sequence :]
            self.tokens = []
            self._start()
        self.tokens = [*self.tokens, *tokens][-self.sequence :]
        ids = torch.tensor([tokens], device=self.device)
        x = self.embedding.embed(ids, self.next_position)
        for block, cache in zip(self.blocks, self.caches, strict=True):
            x = block.step(x, cache)
        self.next_position += len(tokens)
        return self.head.logits(x[0, -1])


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
    session, unread = Session(layers, sequence), list(prompt)[-sequence:]
    for _ in range(max_new_tokens):
        token = sample(session.read(unread), temperature, top_p, generator)
        if token == stop_token:
            return
        yield token
        unread = [token]
