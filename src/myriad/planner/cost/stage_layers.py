"""The layers of each stage of a layout; the parameters of a layer, and its query-key pairs."""

from functools import lru_cache

from myriad.model.config import ModelConfig
from myriad.planner.workload import Workload
from myriad.program.partition import partition_layers

__all__ = [
    "block_of",
    "blocks_of_layer",
    "computed_pairs",
    "cut_layers",
    "expert_blocks",
    "first_alike",
    "layer_kinds",
    "layer_parameters",
    "routed_elements",
    "routed_parameters",
    "stage_layers",
]


def layer_parameters(model: ModelConfig, tp: int = 1) -> list[int]:
    """Return the number of parameters of the embedding, each block and the head, on all of ``tp`` ranks:
    copies of key/value heads and padding count. Tied parameters count in both layers."""
    rows = model.vocabulary_rows(tp) * tp * model.hidden
    positions = model.sequence * model.hidden if model.position == "learned" else 0
    copied = model.copied_parameters(tp)
    further = range(model.layers, model.layers + model.prediction_layers)
    head = rows + model.norm_size
    head += sum(number * (one.prediction_parameters + copied) for one, number in model.block_counts(further))
    head += rows if further and not model.tied else 0
    firsts = first_alike(model)
    each = {first: model.of_block(first).block_parameters + copied for first in set(firsts)}
    return [rows + positions, *(each[first] for first in firsts), head]


@lru_cache(maxsize=16)
def routed_parameters(model: ModelConfig) -> tuple[int, ...]:
    """Return the number of parameters of the routed experts of the embedding, each block and the head: those
    of `layer_parameters` that the ranks of ``layout.ep`` divide among them."""
    further = range(model.layers, model.layers + model.prediction_layers)
    blocks = (_routed(model, layer) for layer in range(model.layers))
    return (0, *blocks, sum(_routed(model, layer) for layer in further))


def _routed(model: ModelConfig, layer: int) -> int:
    experts = model.experts if model.has_experts(layer) else None
    width = model.expert_width
    found = (experts or 0) * (model.up_matrices + 1) * model.hidden * width
    return found + (experts or 0) * (model.up_matrices * width + model.hidden) * model.bias


def expert_blocks(model: ModelConfig, layer: int) -> int:
    """Return the number of blocks with experts in a layer of the pipeline: the head has those of its
    prediction layers."""
    return sum(map(model.has_experts, blocks_of_layer(model, layer)))


def blocks_of_layer(model: ModelConfig, layer: int) -> range:
    """Return the blocks of a layer of the pipeline: the embedding has none, the head prediction layers."""
    if layer > model.layers:
        return range(model.layers, model.layers + model.prediction_layers)
    return range(layer - 1, layer) if layer else range(0)


def routed_elements(model: ModelConfig, layer: int, tp: float) -> float:
    """Return those of `routed_parameters` of a layer of the pipeline that each of ``tp`` ranks holds, if
    they share each expert: its last bias is whole on all of them."""
    biased = (model.experts or 0) * model.bias * expert_blocks(model, layer)
    whole = biased * model.hidden
    cut = routed_parameters(model)[layer] - whole
    return cut / tp + whole


@lru_cache(maxsize=16)
def first_alike(model: ModelConfig) -> tuple[int, ...]:
    """Return for each block the first block that costs the same: with the same window, and experts or
    none."""
    firsts: dict[tuple[int | None, bool], int] = {}
    kinds = ((model.layer_window(layer), model.has_experts(layer)) for layer in range(model.layers))
    return tuple(firsts.setdefault(kind, layer) for layer, kind in enumerate(kinds))


def cut_layers(model: ModelConfig, partition: str, num_stages: int) -> list[range]:
    """Return the layers of each of so many stages, as the runtime partitions them. Raises `BadInputError`."""
    return list(_cut_layers(model, partition, num_stages))


@lru_cache(maxsize=256)
def _cut_layers(model: ModelConfig, partition: str, num_stages: int) -> tuple[range, ...]:
    kinds = model.layer_kinds
    costs = None if partition == "uniform" else [float(count) for count in layer_parameters(model)]
    return tuple(partition_layers(partition, num_stages, kinds, costs))


def stage_layers(workload: Workload) -> list[range]:
    """Return the layers of each stage of the layout."""
    return cut_layers(workload.model, workload.layout.partition, workload.layout.num_stages)


def computed_pairs(model: ModelConfig, layer: int, num_ranks: int = 1) -> float:
    """Return the query-key pairs of a sequence that a causal kernel computes on each of ``num_ranks`` ranks
    that have ``model.sequence`` positions each: half of all, and with a window only the band."""
    sequence, window = model.sequence * num_ranks, model.layer_window(layer)
    if window is None or window >= sequence:
        return sequence * (sequence + 1) / 2 / num_ranks
    return (window * sequence - window * (window - 1) / 2) / num_ranks


@lru_cache(maxsize=16)
def layer_kinds(model: ModelConfig) -> tuple[str, ...]:
    """Return the kind of each layer (embedding, blocks, head); layers of one kind cost the same."""
    return ("embedding", *(f"block {first}" for first in first_alike(model)), "head")


def block_of(kind: str) -> int:
    """Return the first block of a kind of `layer_kinds`."""
    return int(kind.removeprefix("block "))
