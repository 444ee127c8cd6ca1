"""Bytes and elements of the layers of a rank, for any number of layouts at once.

They depend on few values of a layout, so each distinct combination is computed once (`layer_memory`).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from myriad.model.activation_memory import LayerKind
from myriad.model.config import ModelConfig
from myriad.model.matrix_shapes import hidden_matrices
from myriad.planner.cost.operator_costs import Number
from myriad.planner.cost.stage_layers import first_alike, routed_elements
from myriad.planner.memory.layer_memory import (
    RECOMPUTE,
    layer_bytes,
    layer_elements,
    message_bytes,
    product_inputs,
)
from myriad.planner.memory.micro_batch_shard import MicroBatchShard, of_each_degree
from myriad.planner.workload import FrameworkProfile, Recompute

__all__ = ["LayerMemory", "layer_memory"]


@dataclass(frozen=True)
class LayerMemory:
    """Bytes and elements of a rank's layers; numbers or arrays."""

    block_elements: Number
    embedding_elements: Number
    head_elements: Number
    block_matrices: Number
    """Elements of the matrices that Muon orthogonalizes, like the next one."""
    head_matrices: Number
    block_kept: Number
    block_passing: Number
    """Peak temporary bytes of one block, forward or backward."""
    block_products: Number
    """Inputs and gradients that the weight products still need."""
    embedding_kept: Number
    head: Number
    """Bytes of the head, logits included."""
    message: Number
    block_experts: Number
    """Elements of routed experts, which the other numbers of elements do not include; 0: they include them,
    since every replica has all. So does the next one."""
    head_experts: Number

    def take(self, index: npt.NDArray[np.intp]) -> "LayerMemory":
        """Expand arrays of distinct combinations to one entry for each layout."""
        return LayerMemory(*(np.asarray(getattr(self, one.name))[index] for one in fields(self)))


def _expert_elements(model: ModelConfig, layer: int, part: MicroBatchShard) -> Number:
    """Return the number of elements of the routed experts of a layer of the pipeline on one rank, if experts
    lie on other ranks than the rest of the layer; 0 if they do not: `layer_elements` counts them with it."""
    if not part.folds_experts:
        return 0.0 * part.tp
    return of_each_degree(part.expert_tp, lambda tp: routed_elements(model, layer, tp)) / part.ep


def _other_elements(model: ModelConfig, layer: int, part: MicroBatchShard) -> Number:
    """Return the number of elements of a layer of the pipeline on one rank, without `_expert_elements`."""
    kind: LayerKind = "head" if layer > model.layers else "block"
    every = layer_elements(model, kind, part.tp, layer - 1)
    if not part.folds_experts:
        return every
    return every - of_each_degree(part.tp, lambda tp: routed_elements(model, layer, tp))


def _matrix_elements(model: ModelConfig, layer: int, part: MicroBatchShard) -> Number:
    """Return the elements of the matrices between hidden values in a layer of the pipeline, on one rank,
    without those of `_expert_elements`."""
    folds = bool(part.folds_experts)
    return of_each_degree(part.tp, lambda tp: _hidden_elements(model, layer, tp, folds))


@lru_cache(maxsize=2**12)
def _hidden_elements(model: ModelConfig, layer: int, tp: int, folds: bool) -> float:
    """Return `_matrix_elements` for one degree. ``folds``: without routed experts."""
    matrices = hidden_matrices(model, layer, tp)
    return sum(one.local for one in matrices if not (one.of_expert and folds))


def layer_memory(
    model: ModelConfig,
    profile: FrameworkProfile,
    tp: npt.NDArray[np.float64],
    micro_batch: npt.NDArray[np.float64],
    recompute: npt.NDArray[np.float64],
    where: tuple[int, bool, int, int | None, float, tuple[int, int]],
) -> LayerMemory:
    """Return the layer memory of every layout, computed once for each distinct combination. ``where``: bytes
    of a value, whether the device is a CPU, the ranks that share experts, those that share the width of each,
    the load of the busiest rank, and the ranks that share sequences."""
    sizes, size = np.unique(micro_batch, return_inverse=True)
    packed = tp * 4 + recompute
    keys, kind = np.unique(packed, return_inverse=True)
    found = [
        _memory_of(model, profile, (float(key // 4), tuple(sizes), *where), RECOMPUTE[int(key % 4)])
        for key in keys
    ]
    columns = (np.concatenate([getattr(one, field.name) for one in found]) for field in fields(LayerMemory))
    index = kind.reshape(packed.shape) * len(sizes) + size.reshape(micro_batch.shape)
    return LayerMemory(*columns).take(index)


@lru_cache(maxsize=2**12)
def _memory_of(
    model: ModelConfig, profile: FrameworkProfile, part: tuple[Any, ...], recompute: Recompute
) -> LayerMemory:
    """Return the layer memory of micro-batches of several sizes, as one-dimensional arrays; bytes of blocks
    are averages. ``part``: fields of `MicroBatchShard`, with a tuple of sizes."""
    tp, sizes, *where = part
    shard = MicroBatchShard(tp, np.array(sizes), *where)
    counts = _different_blocks(model)
    blocks = [layer_bytes(model, profile, "block", layer, shard, recompute) for layer in counts]
    passing = [np.maximum(one.forward, one.backward) for one in blocks]
    embedding = layer_bytes(model, profile, "embedding", 0, shard, recompute)
    head = layer_bytes(model, profile, "head", 0, shard, recompute)
    found = LayerMemory(
        **_elements_of(model, MicroBatchShard(tp, 1.0, *where[:4])),
        block_kept=_mean(counts, (one.kept for one in blocks)),
        block_passing=np.max(np.stack(np.broadcast_arrays(*passing)), axis=0),
        block_products=_mean(counts, (product_inputs(model, layer, shard) for layer in counts)),
        embedding_kept=embedding.kept,
        head=head.kept + head.forward,
        message=message_bytes(model, profile, shard),
    )
    values = (np.broadcast_to(getattr(found, field.name), len(sizes)) for field in fields(LayerMemory))
    return LayerMemory(*values)


@lru_cache(maxsize=2**12)
def _elements_of(model: ModelConfig, part: MicroBatchShard) -> dict[str, Number]:
    """Return the numbers of elements in `LayerMemory`, which depend on the degrees only; those of blocks are
    averages."""
    counts, last = _different_blocks(model), model.layers + 1
    return {
        "block_elements": _mean(counts, (_other_elements(model, 1 + layer, part) for layer in counts)),
        "embedding_elements": layer_elements(model, "embedding", part.tp),
        "head_elements": _other_elements(model, last, part),
        "block_matrices": _mean(counts, (_matrix_elements(model, 1 + layer, part) for layer in counts)),
        "head_matrices": _matrix_elements(model, last, part),
        "block_experts": _mean(counts, (_expert_elements(model, 1 + layer, part) for layer in counts)),
        "head_experts": _expert_elements(model, last, part),
    }


def _different_blocks(model: ModelConfig) -> Counter[int]:
    """Return the first of each kind of block, with the number of blocks like it."""
    windows = range(min(model.layers, len(model.window_pattern)))
    return Counter(first_alike(model) if model.has_dense_blocks else windows)


def _mean(counts: Counter[int], each: Iterable[Number]) -> Number:
    weighted = [count * one for count, one in zip(counts.values(), each, strict=True)]
    return sum(weighted) / counts.total()
