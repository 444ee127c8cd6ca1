"""From timings of compute to the constants of an accelerator. No devices here: others take the timings.

Relative errors count, so that a small operator weighs as much as a large one:

    products     rate, saturation               2 m n k / rate, slower for short k, and a call
    attention    rate, half length, backward    by attended pairs, slower for short sequences
    layers       launch, stream and weights     what whole layers take above their products and attention
    heads        loss rate                      what the head takes above its product and norm

Layers are fitted last and through `layers` itself: seconds there are linear in the launch and in the inverses
of the rates of streams and of weights, so these come out as whatever makes real layers take what they take.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from myriad.model.config import ModelConfig
from myriad.planner.cluster import Accelerator, Cluster, Float32, Link, Links
from myriad.planner.costs import computed_pairs
from myriad.planner.layers import LayerTimes, Slice, block_times, head_times
from myriad.planner.least_squares import ENDLESS, least_squares, relative_fit
from myriad.planner.work import Practice
from myriad.program.config import OverlapConfig

__all__ = [
    "AttentionTime",
    "LayerTime",
    "ProductTime",
    "TypeFit",
    "TypeTimes",
    "block_seconds",
    "doubling_ratio",
    "fit_accelerator",
    "fit_type",
    "head_seconds",
]

_SATURATIONS = np.concatenate([[0.0], np.geomspace(0.5, 2048, 97)])


@dataclass(frozen=True)
class ProductTime:
    """``[m, k] x [k, n]``."""

    m: int
    n: int
    k: int
    seconds: float


@dataclass(frozen=True)
class AttentionTime:
    """Over causal sequences."""

    sequence: int
    head_width: int
    flops: float
    """Of the attended pairs, forward."""
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True)
class LayerTime:
    """Of one block, or of a head with its loss, and one micro-batch."""

    model: ModelConfig
    micro_batch: int
    seconds: float
    """Forward and backward."""


@dataclass(frozen=True)
class TypeTimes:
    """What was timed in one type."""

    value_bytes: int
    products: Sequence[ProductTime]
    attentions: Sequence[AttentionTime]
    layers: Sequence[LayerTime]
    heads: Sequence[LayerTime]


@dataclass(frozen=True)
class TypeFit:
    """What of an accelerator depends on the type."""

    flops_per_second: float
    saturation: float
    launch_seconds: float
    stream_bytes_per_second: float
    weights_bytes_per_second: float
    loss_bytes_per_second: float
    flash_ratio: float
    flash_half_length: float
    flash_backward: float


def fit_type(times: TypeTimes, sweep_bytes_per_second: float) -> TypeFit:
    """All that depends on the type."""
    rate, saturation = _fit_products(times.products)
    flash, half, backward = _fit_attention(times.attentions)
    known = Accelerator(
        name="fit",
        peak_flops_per_second=rate,
        float32_flops_per_second=rate,
        achievable_ratio=1.0,
        sustained_ratio=1.0,
        memory_bytes=1,
        memory_bytes_per_second=sweep_bytes_per_second,
        memory_ratio=1.0,
        num_units=1,
        tile=1,
        saturation=saturation,
        flash_ratio=min(1.0, flash / rate),
        flash_half_length=half,
        flash_backward=backward,
        launch_seconds=0.0,
        stream_bytes_per_second=ENDLESS,
        weights_bytes_per_second=ENDLESS,
    )
    layers = _fit_layers(times.layers, times.value_bytes, known)
    known = known.model_copy(update=layers)
    loss = _fit_loss(times.heads, times.value_bytes, known)
    return TypeFit(
        flops_per_second=rate,
        saturation=saturation,
        **layers,
        loss_bytes_per_second=loss,
        flash_ratio=known.flash_ratio,
        flash_half_length=half,
        flash_backward=backward,
    )


def fit_accelerator(
    name: str, memory_bytes: int, sweep_bytes_per_second: float, float32: TypeFit, bfloat16: TypeFit
) -> Accelerator:
    """One core, in both types."""
    other = Float32(
        saturation=float32.saturation,
        launch_seconds=float32.launch_seconds,
        stream_bytes_per_second=float32.stream_bytes_per_second,
        weights_bytes_per_second=float32.weights_bytes_per_second,
        loss_bytes_per_second=float32.loss_bytes_per_second,
        flash_ratio=float32.flash_ratio,
        flash_half_length=float32.flash_half_length,
        flash_backward=float32.flash_backward,
    )
    return Accelerator(
        name=name,
        peak_flops_per_second=bfloat16.flops_per_second,
        float32_flops_per_second=float32.flops_per_second,
        achievable_ratio=1.0,
        sustained_ratio=1.0,
        memory_bytes=memory_bytes,
        memory_bytes_per_second=sweep_bytes_per_second,
        memory_ratio=1.0,
        num_units=1,
        tile=1,
        saturation=bfloat16.saturation,
        launch_seconds=bfloat16.launch_seconds,
        stream_bytes_per_second=bfloat16.stream_bytes_per_second,
        weights_bytes_per_second=bfloat16.weights_bytes_per_second,
        loss_bytes_per_second=bfloat16.loss_bytes_per_second,
        flash_ratio=bfloat16.flash_ratio,
        flash_half_length=bfloat16.flash_half_length,
        flash_backward=bfloat16.flash_backward,
        float32=other,
    )


def _fit_products(products: Sequence[ProductTime]) -> tuple[float, float]:
    """Rate of endless inner lengths, and the length of half that rate. A call of the library, which is part
    of what a layer's operators take, is fitted beside them."""
    m, n, k, seconds = (
        np.array([getattr(p, name) for p in products], float) for name in ["m", "n", "k", "seconds"]
    )
    ones = np.ones(len(products))
    errors, rates = [], []
    for saturation in _SATURATIONS:
        unit = 2 * m * n * (k + saturation)
        found = relative_fit(np.stack([unit, ones], 1), seconds)
        errors.append(float(((np.stack([unit, ones], 1) @ found / seconds - 1) ** 2).sum()))
        rates.append(1 / max(found[0], 1 / ENDLESS))
    best = int(np.argmin(errors))
    # `matmul_seconds` reaches the achievable rate at an inner length of 8,192
    saturation = float(_SATURATIONS[best])
    return float(rates[best]) * 8192 / (8192 + saturation), saturation


def _fit_attention(attentions: Sequence[AttentionTime]) -> tuple[float, float, float]:
    """Rate of endless sequences, length of half that rate, seconds of the backward for one of the forward. A
    call is fitted beside them, as with products."""
    slower = np.array([min(1.0, one.head_width / 128) ** 0.35 for one in attentions])
    flops = np.array([one.flops for one in attentions]) / slower
    lengths = np.array([float(one.sequence) for one in attentions])
    forward, backward = (
        np.array([getattr(one, name) for one in attentions])
        for name in ["forward_seconds", "backward_seconds"]
    )
    each, short, call = relative_fit(np.stack([flops, flops / lengths, np.ones(len(flops))], 1), forward)
    each = max(each, short / 4096, 1 / ENDLESS)
    ratios = (backward - call) / np.maximum(forward - call, 0.1 * forward)
    return float(1 / each), float(short / each), float(max(1.0, np.median(ratios)))


def _fit_layers(layers: Sequence[LayerTime], value_bytes: int, known: Accelerator) -> dict[str, float]:
    """Launch and rates of streams and of weights, from what is left when the rest is ``known`` and all three
    are nothing. Errors count against the whole layer: a part that is small in it matters little."""
    names = "launch_seconds", "stream_bytes_per_second", "weights_bytes_per_second"
    seconds = np.array([one.seconds for one in layers])
    base = np.array([block_seconds(one, value_bytes, known) for one in layers])
    columns = [
        np.array([block_seconds(one, value_bytes, known.model_copy(update={name: 1.0})) for one in layers])
        for name in names
    ]
    left = np.maximum(seconds - base, 0.01 * seconds)
    rows = np.stack([column - base for column in columns], 1)
    launch, stream, weights = least_squares(rows / seconds[:, None], left / seconds)
    return {
        "launch_seconds": float(launch),
        "stream_bytes_per_second": float(1 / max(stream, 1 / ENDLESS)),
        "weights_bytes_per_second": float(1 / max(weights, 1 / ENDLESS)),
    }


def _fit_loss(heads: Sequence[LayerTime], value_bytes: int, known: Accelerator) -> float:
    """The rate at which the loss goes over logits: what is left of a head."""
    each = []
    for one in heads:
        free = head_seconds(one, value_bytes, known.model_copy(update={"loss_bytes_per_second": ENDLESS}))
        slow = head_seconds(one, value_bytes, known.model_copy(update={"loss_bytes_per_second": 1.0}))
        each.append(max(one.seconds - free, 0.01 * one.seconds) / (slow - free))
    return float(1 / np.median(each))


def doubling_ratio(seconds: Mapping[int, float]) -> float:
    """From seconds of compute by the number of ranks on a core, 1 and more, to what each doubling adds."""
    doublings = np.log2(np.array([number for number in seconds if number > 1], float))
    added = np.array([seconds[number] / seconds[1] - 1 for number in seconds if number > 1])
    return max(0.0, float(doublings @ added / (doublings @ doublings)))


def block_seconds(one: LayerTime, value_bytes: int, accelerator: Accelerator) -> float:
    """Forward and backward, as the model has it."""
    return _total(block_times(one.model, _alone(one, value_bytes, accelerator), computed_pairs(one.model, 0)))


def head_seconds(one: LayerTime, value_bytes: int, accelerator: Accelerator) -> float:
    """Forward with the loss, and backward."""
    return _total(head_times(one.model, _alone(one, value_bytes, accelerator)))


def _alone(one: LayerTime, value_bytes: int, accelerator: Accelerator) -> Slice:
    nowhere = Link(bytes_per_second=1.0, latency_seconds=1.0)
    cluster = Cluster(
        name="fit", nodes=1, accelerators_per_node=1, accelerator=accelerator, links=Links(node=nowhere)
    )
    practice = Practice(sums_in_norms=False)  # as on every core
    return Slice(cluster, practice, 1.0, float(one.micro_batch), value_bytes, OverlapConfig(), 0.0)


def _total(times: LayerTimes) -> float:
    parts = times.forward, times.backward_input, times.backward_weight
    return float(sum(part.total for part in parts))
