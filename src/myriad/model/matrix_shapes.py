"""The shapes of a model's matrices between hidden values, each counted as one, where weights are fused too.

No torch here: `myriad.model.gpt` builds the same matrices, and Muon orthogonalizes them.
"""

from collections.abc import Iterator
from typing import NamedTuple

from myriad.model.config import ModelConfig

__all__ = ["HiddenMatrix", "hidden_matrices"]


class HiddenMatrix(NamedTuple):
    """A matrix of a block, or of a prediction layer."""

    rows: int
    columns: int
    local: float
    """Elements that each tensor-parallel rank holds."""


def hidden_matrices(model: ModelConfig, layer: int, tp: int = 1) -> list[HiddenMatrix]:
    """Return the matrices of a layer of the pipeline: 0 is the embedding, and the head comes last."""
    if 0 < layer <= model.layers:
        return list(_of_block(model.of_block(layer - 1), tp))
    if layer == 0:
        return []
    projection = HiddenMatrix(model.hidden, 2 * model.hidden, 2.0 * model.hidden**2)
    further = range(model.layers, model.layers + model.prediction_layers)
    blocks = ([projection, *_of_block(model.of_block(number), tp)] for number in further)
    return [matrix for block in blocks for matrix in block]


def _of_block(model: ModelConfig, tp: int) -> Iterator[HiddenMatrix]:
    hidden = model.hidden
    yield from _of_latent_attention(model, tp) if model.latent else _of_attention(model, tp)
    for width, number in _mlps(model):
        yield from [_matrix(width, hidden, tp)] * (model.up_matrices * number)
        yield from [_matrix(hidden, width, tp)] * number


def _mlps(model: ModelConfig) -> list[tuple[int, int]]:
    """Return the inner width and the number of a block's MLPs of each kind."""
    if model.experts is None:
        return [(model.ffn_width, 1)]
    shared = model.shared_experts * model.expert_width
    return [(model.expert_width, model.experts), *([(shared, 1)] if shared else [])]


def _of_attention(model: ModelConfig, tp: int) -> Iterator[HiddenMatrix]:
    hidden, queries = model.hidden, model.heads * model.head_width
    yield _matrix(queries, hidden, tp)
    yield from [_matrix(model.num_kv_heads * model.head_width, hidden, tp / model.kv_copies(tp))] * 2
    yield _matrix(hidden, queries, tp)


def _of_latent_attention(model: ModelConfig, tp: int) -> Iterator[HiddenMatrix]:
    latent, heads = model.latent, model.heads
    assert latent is not None
    yield _matrix(heads * latent.head, latent.query_rank or model.hidden, tp)
    yield _matrix(heads * (latent.plain + latent.value), latent.key_value_rank, tp)
    yield _matrix(model.hidden, heads * latent.value, tp)
    yield _matrix(latent.down_rows, model.hidden, 1)


def _matrix(rows: int, columns: int, ranks: float) -> HiddenMatrix:
    return HiddenMatrix(rows, columns, rows * columns / ranks)
