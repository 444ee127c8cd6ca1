"""Bytes and parameters of the layers of one rank, for any number of layouts at once.

They depend on little of a layout, and that takes few values: each combination is worked out once.
"""

from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from myriad.model.activations import LayerKind
from myriad.model.config import ModelConfig
from myriad.planner.activations import RECOMPUTE, Part, layer_held, message_bytes, product_inputs
from myriad.planner.operators import Number
from myriad.planner.work import Practice, Recompute

__all__ = ["LayerMemory", "layer_elements", "layer_memory"]


@dataclass(frozen=True)
class LayerMemory:
    """What a rank's layers hold, and how large they are; numbers or arrays."""

    block_elements: Number
    embedding_elements: Number
    head_elements: Number
    block_kept: Number
    block_passing: Number
    """On the way through one of them, forward or backward."""
    block_products: Number
    """Inputs and gradients that the products for the weights still need."""
    embedding_kept: Number
    head: Number
    """With logits."""
    message: Number

    def take(self, index: npt.NDArray[np.intp]) -> "LayerMemory":
        """From arrays of few to as many as there are layouts."""
        return LayerMemory(*(np.asarray(getattr(self, one.name))[index] for one in fields(self)))


def layer_elements(model: ModelConfig, kind: LayerKind, tp: Number) -> Number:
    """Parameters of one layer on one rank; a tied table counts in the embedding and in the head."""
    one = model.model_copy(update={"layers": 1}).num_parameters(embeddings=False)
    block = model.model_copy(update={"layers": 2}).num_parameters(embeddings=False) - one
    norm = model.hidden * (2 if model.norm == "layer" and model.bias else 1)
    table = model.padded_vocabulary() * model.hidden / tp
    if kind == "embedding":
        return table + (model.sequence * model.hidden if model.position == "learned" else 0)
    if kind == "head":
        return table + norm
    whole = norm * (1 if model.block == "parallel" else 2) + (2 * model.hidden if model.bias else 0)
    return (block - whole) / tp + whole


def layer_memory(
    model: ModelConfig,
    practice: Practice,
    tp: npt.NDArray[np.float64],
    micro_batch: npt.NDArray[np.float64],
    recompute: npt.NDArray[np.float64],
    where: tuple[int, bool],
) -> LayerMemory:
    """Once for each combination: they are few, whatever the number of layouts. ``where``: bytes of a value,
    whether on a CPU."""
    keys, index = np.unique((tp * _MORE + micro_batch) * 4 + recompute, return_inverse=True)
    found = [
        _memory_of(model, practice, Part(tp_, micro_batch_, *where), RECOMPUTE[int(key % 4)])
        for key in keys
        for tp_, micro_batch_ in [divmod(key // 4, _MORE)]
    ]
    columns = (np.array([getattr(one, field.name) for one in found]) for field in fields(LayerMemory))
    return LayerMemory(*columns).take(index.reshape(np.shape(tp)))


_MORE = 2.0**25
"""Than any micro-batch has sequences: tp and micro-batch are packed into one number."""


@lru_cache(maxsize=2**14)
def _memory_of(model: ModelConfig, practice: Practice, part: Part, recompute: Recompute) -> LayerMemory:
    """Blocks as an average over windows."""
    windows = range(min(model.layers, len(model.window_pattern)))
    blocks = [layer_held(model, practice, "block", layer, part, recompute) for layer in windows]
    embedding = layer_held(model, practice, "embedding", 0, part, recompute)
    head = layer_held(model, practice, "head", 0, part, recompute)
    return LayerMemory(
        layer_elements(model, "block", part.tp),
        layer_elements(model, "embedding", part.tp),
        layer_elements(model, "head", part.tp),
        sum(one.kept for one in blocks) / len(blocks),
        max(max(one.forward, one.backward) for one in blocks),
        product_inputs(model, part),
        embedding.kept,
        head.kept + head.forward,
        message_bytes(model, practice, part),
    )
