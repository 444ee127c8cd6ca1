"""The shapes of a model's matrices between hidden values, each counted as one, where weights are fused too.

No torch here: `myriad.model.gpt` builds the same matrices, and Muon orthogonalizes them.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from myriad.model.config import ModelConfig

__all__ = ["HiddenMatrix", "hidden_matrices", "matrices_of_rank"]


class HiddenMatrix(NamedTuple):
    """A matrix of a block, or of a prediction layer."""

    rows: int
    columns: int
    local: float
    """Elements that each tensor-parallel rank holds."""
    of_expert: bool = False
    """Whether it is of a routed expert."""


def hidden_matrices(
    model: ModelConfig, layer: int, tp: int = 1, *, etp: int | None = None
) -> list[HiddenMatrix]:
    """Return the matrices of a layer of the pipeline: 0 is the embedding, and the head comes last.
    ``etp``: ranks that share those of routed experts; ``None``: ``tp``."""
    expert_tp = etp or tp
    if 0 < layer <= model.layers:
        return list(_of_block(model.of_block(layer - 1), tp, expert_tp))
    if layer == 0:
        return []
    projection = HiddenMatrix(model.hidden, 2 * model.hidden, 2.0 * model.hidden**2)
    further = range(model.layers, model.layers + model.prediction_layers)
    blocks = ([projection, *_of_block(model.of_block(number), tp, expert_tp)] for number in further)
    return [matrix for block in blocks for matrix in block]


def matrices_of_rank(matrices: Sequence[HiddenMatrix], ep: int, *, of_experts: bool) -> list[HiddenMatrix]:
    """Return the matrices of a stage that a rank holds: those of routed experts, or all others. ``ep``: ranks
    that share experts."""
    found = [one for one in matrices if one.of_expert == of_experts]
    return found[: len(found) // ep] if of_experts else found


def _of_block(model: ModelConfig, tp: int, expert_tp: int) -> Iterator[HiddenMatrix]:
    yield from _of_latent_attention(model, tp) if model.latent else _of_attention(model, tp)
    if model.experts is None:
        yield from _of_mlp(model, model.ffn_width, tp)
        return
    experts = (_of_mlp(model, model.expert_width, expert_tp) for _ in range(model.experts))
    yield from (matrix._replace(of_expert=True) for expert in experts for matrix in expert)
    if model.shared_experts:
        yield from _of_mlp(model, model.shared_experts * model.expert_width, tp)


def _of_mlp(model: ModelConfig, width: int, tp: int) -> Iterator[HiddenMatrix]:
    yield from [_matrix(width, model.hidden, tp)] * model.up_matrices
    yield _matrix(model.hidden, width, tp)


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
