"""Where each tensor of ours is in Hugging Face's files: which rows of which tensor, turned how.

    ours (fused)                 theirs
    qkv [q | k | v]              q_proj, k_proj, v_proj        c_attn (GPT-2's Conv1D is [in, out])
    up [gate | up] (SwiGLU)      gate_proj, up_proj
    embedding, padded rows       the first rows, as many as the vocabulary has; padding is zero
    bias of qkv [q | v]          c_attn's, without the keys': softmax does not see it

A rotary pair is two neighbours here (2 i, 2 i + 1) and half a head apart there (i, i + D/2), so the rows of a
head's queries and keys change places. Values never change: a tensor that goes out and comes back has its
bits.

Legend: H hidden, D head size, F width of the MLP, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from myriad.checkpoint.hugging_face_config import Kind, kind_of
from myriad.model.config import ModelConfig

__all__ = ["Link", "Piece", "links_of", "missing_or_other"]


@dataclass(frozen=True)
class Piece:
    """Rows of one of their tensors."""

    name: str
    num_rows: int
    first_row: int = 0
    head_width: int = 0
    """Of rows that are rotary pairs, head by head; 0: rows stay where they are."""


@dataclass(frozen=True)
class Link:
    """One tensor of ours: their rows, one piece after the other."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    transposed: bool = False
    """Theirs is ``[in, out]``."""

    def their_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor of theirs that this is made of."""
        ends: dict[str, int] = {}
        for piece in self.pieces:
            ends[piece.name] = max(ends.get(piece.name, 0), piece.first_row + piece.num_rows)
        shapes = {name: (rows, *self.shape[1:]) for name, rows in ends.items()}
        return {name: shape[::-1] if self.transposed else shape for name, shape in shapes.items()}

    def read(self, theirs: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Ours of theirs, in their precision; rows beyond theirs are zero."""
        tensors = {name: self._rows_first(theirs(name)) for name in self.their_shapes()}
        first = next(iter(tensors.values()))
        ours, row = first.new_zeros(self.shape), 0
        for piece in self.pieces:
            rows = tensors[piece.name][piece.first_row : piece.first_row + piece.num_rows]
            ours[row : row + piece.num_rows] = _neighbours(rows, piece.head_width)
            row += piece.num_rows
        return ours

    def write(self, ours: torch.Tensor) -> dict[str, torch.Tensor]:
        """Theirs of ours; rows that ours lacks are zero."""
        theirs = {name: ours.new_zeros(shape) for name, shape in self.their_shapes().items()}
        row = 0
        for piece in self.pieces:
            target = self._rows_first(theirs[piece.name])
            rows = ours[row : row + piece.num_rows]
            target[piece.first_row : piece.first_row + piece.num_rows] = _halves(rows, piece.head_width)
            row += piece.num_rows
        return theirs

    def _rows_first(self, theirs: torch.Tensor) -> torch.Tensor:
        return theirs.T if self.transposed else theirs


def _halves(rows: torch.Tensor, head_width: int) -> torch.Tensor:
    """Rows ``[heads D, ...]`` with each head's pairs from neighbours to half a head apart."""
    return rows.unflatten(0, (-1, head_width // 2, 2)).transpose(1, 2).flatten(0, 2) if head_width else rows


def _neighbours(rows: torch.Tensor, head_width: int) -> torch.Tensor:
    """And back."""
    return rows.unflatten(0, (-1, 2, head_width // 2)).transpose(1, 2).flatten(0, 2) if head_width else rows


def links_of(model: ModelConfig) -> Sequence[Link]:
    """Every tensor of the model. Raises `BadInputError` for one that has no counterpart."""
    kind = kind_of(model)
    return tuple(_gpt2(model) if kind == "gpt2" else _rotary(model, kind))


def _rotary(model: ModelConfig, kind: Kind) -> Iterator[Link]:
    hidden = model.hidden
    yield _table(model, "embedding.tokens.weight", "model.embed_tokens.weight")
    for layer in range(model.layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        yield _vector(f"{ours}.norm1.weight", f"{theirs}.input_layernorm.weight", hidden)
        yield from _rotary_attention(model, f"{ours}.attention", f"{theirs}.self_attn")
        yield _vector(f"{ours}.norm2.weight", f"{theirs}.post_attention_layernorm.weight", hidden)
        names = ["up_proj"] if kind == "arcee" else ["gate_proj", "up_proj"]
        parts = [(f"{theirs}.mlp.{name}.weight", model.ffn_width, 0) for name in names]
        yield _rows(f"{ours}.mlp.up.weight", hidden, *parts)
        yield _rows(f"{ours}.mlp.down.weight", model.ffn_width, (f"{theirs}.mlp.down_proj.weight", hidden, 0))
    yield _vector("head.norm.weight", "model.norm.weight", hidden)
    if not model.tied:
        yield _table(model, "head.output.weight", "lm_head.weight")


def _rotary_attention(model: ModelConfig, ours: str, theirs: str) -> Iterator[Link]:
    width = model.head_width
    q, kv = model.heads * width, model.num_kv_heads * width
    yield _rows(
        f"{ours}.qkv.weight",
        model.hidden,
        (f"{theirs}.q_proj.weight", q, width),
        (f"{theirs}.k_proj.weight", kv, width),
        (f"{theirs}.v_proj.weight", kv, 0),
    )
    yield _rows(f"{ours}.output.weight", q, (f"{theirs}.o_proj.weight", model.hidden, 0))


def _gpt2(model: ModelConfig) -> Iterator[Link]:
    hidden, inner = model.hidden, model.ffn_width
    yield _table(model, "embedding.tokens.weight", "transformer.wte.weight")
    yield _rows("embedding.positions.weight", hidden, ("transformer.wpe.weight", model.sequence, 0))
    for layer in range(model.layers):
        ours, theirs = f"blocks.{layer}", f"transformer.h.{layer}"
        yield from _layer_norm(f"{ours}.norm1", f"{theirs}.ln_1", hidden)
        attention = f"{theirs}.attn.c_attn"
        yield _transposed(f"{ours}.attention.qkv.weight", f"{attention}.weight", 3 * hidden, hidden)
        queries, values = Piece(f"{attention}.bias", hidden), Piece(f"{attention}.bias", hidden, 2 * hidden)
        yield Link(f"{ours}.attention.qkv.bias", (2 * hidden,), (queries, values))
        yield from _conv(f"{ours}.attention.output", f"{theirs}.attn.c_proj", hidden, hidden)
        yield from _layer_norm(f"{ours}.norm2", f"{theirs}.ln_2", hidden)
        yield from _conv(f"{ours}.mlp.up", f"{theirs}.mlp.c_fc", inner, hidden)
        yield from _conv(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj", hidden, inner)
    yield from _layer_norm("head.norm", "transformer.ln_f", hidden)
    if not model.tied:
        yield _table(model, "head.output.weight", "lm_head.weight")


def _table(model: ModelConfig, ours: str, theirs: str) -> Link:
    return Link(ours, (model.padded_vocabulary(), model.hidden), (Piece(theirs, model.vocabulary),))


def _vector(ours: str, theirs: str, size: int) -> Link:
    return Link(ours, (size,), (Piece(theirs, size),))


def _rows(ours: str, columns: int, *parts: tuple[str, int, int]) -> Link:
    """``parts``: name, rows, head size of rotary rows."""
    pieces = tuple(Piece(name, rows, 0, width) for name, rows, width in parts)
    return Link(ours, (sum(piece.num_rows for piece in pieces), columns), pieces)


def _transposed(ours: str, theirs: str, rows: int, columns: int) -> Link:
    return Link(ours, (rows, columns), (Piece(theirs, rows),), transposed=True)


def _layer_norm(ours: str, theirs: str, size: int) -> Iterator[Link]:
    for name in ("weight", "bias"):
        yield _vector(f"{ours}.{name}", f"{theirs}.{name}", size)


def _conv(ours: str, theirs: str, rows: int, columns: int) -> Iterator[Link]:
    yield _transposed(f"{ours}.weight", f"{theirs}.weight", rows, columns)
    yield _vector(f"{ours}.bias", f"{theirs}.bias", rows)


def missing_or_other(links: Sequence[Link], found: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """A line for each tensor of theirs that is not there, or of another shape."""
    for name, shape in ((name, shape) for link in links for name, shape in link.their_shapes().items()):
        there = found.get(name)
        if there != shape:
            yield f"{name} should be {shape}, is {'not there' if there is None else there}"
