"""Fits of an accelerator's and a link's constants to timings. This module uses no devices: callers measure
the timings.

The fits minimize relative errors, so that a small operator weighs as much as a large one:

    products     rate, saturation               2 m n k / rate, slower for short k, and a call
    attention    rate, half length, backward    by attended pairs, slower for short sequences
    layers       launch, stream and weights     seconds of whole layers above their products and attention
    heads        loss rate                      seconds of the head above its product and norm

Layers are fitted last and through `layer_costs` itself. Its seconds are linear in the launch and in the
inverses of the rates of streams and of weights, so these values reproduce the seconds of real layers.

The constants of a link come from timings of transfers:

transfers            seconds of an empty one, and a rate: a line through sizes
tensor parallelism   the same for its collectives, from the seconds that they add to real blocks

All coefficients are constrained to be non-negative, because seconds are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

import numpy as np
import numpy.typing as npt

from myriad.model.config import ModelConfig
from myriad.planner.cluster_config import Accelerator, Cluster, Float32, Link, Links
from myriad.planner.cost.head_costs import head_times
from myriad.planner.cost.layer_costs import LayerTimes, block_times
from myriad.planner.cost.product_costs import LayerContext
from myriad.planner.cost.stage_layers import computed_pairs
from myriad.planner.workload import FrameworkProfile
from myriad.program.config import OverlapConfig

__all__ = [
    "AttentionTiming",
    "LayerTiming",
    "MatmulTiming",
    "PrecisionFit",
    "PrecisionTimings",
    "TensorParallelTiming",
    "block_seconds",
    "doubling_ratio",
    "fit_accelerator",
    "fit_line",
    "fit_precision",
    "fit_tensor_parallel",
    "head_seconds",
]

_SATURATIONS = np.concatenate([[0.0], np.geomspace(0.5, 2048, 97)])


@dataclass(frozen=True)
class MatmulTiming:
    """Measured seconds of ``[m, k] x [k, n]``."""

    m: int
    n: int
    k: int
    seconds: float


@dataclass(frozen=True)
class AttentionTiming:
    """Measured seconds of attention over causal sequences."""

    sequence: int
    head_width: int
    flops: float
    """FLOPs of the attended pairs, forward."""
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True)
class LayerTiming:
    """Measured seconds of one block, or of a head with its loss, for one micro-batch."""

    model: ModelConfig
    micro_batch: int
    seconds: float
    """Seconds of forward and backward."""


@dataclass(frozen=True)
class PrecisionTimings:
    """The timings in one type."""

    value_bytes: int
    products: Sequence[MatmulTiming]
    attentions: Sequence[AttentionTiming]
    layers: Sequence[LayerTiming]
    heads: Sequence[LayerTiming]


@dataclass(frozen=True)
class PrecisionFit:
    """The constants of an accelerator that depend on the type."""

    flops_per_second: float
    saturation: float
    launch_seconds: float
    stream_bytes_per_second: float
    weights_bytes_per_second: float
    loss_bytes_per_second: float
    flash_ratio: float
    flash_half_length: float
    flash_backward: float


def fit_precision(times: PrecisionTimings, sweep_bytes_per_second: float) -> PrecisionFit:
    """Fit all constants that depend on the type."""
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
        stream_bytes_per_second=UNLIMITED_RATE,
        weights_bytes_per_second=UNLIMITED_RATE,
    )
    layers = _fit_layers(times.layers, times.value_bytes, known)
    known = known.model_copy(update=layers)
    loss = _fit_loss(times.heads, times.value_bytes, known)
    return PrecisionFit(
        flops_per_second=rate,
        saturation=saturation,
        **layers,
        loss_bytes_per_second=loss,
        flash_ratio=known.flash_ratio,
        flash_half_length=half,
        flash_backward=backward,
    )


def fit_accelerator(
    name: str, memory_bytes: int, sweep_bytes_per_second: float, float32: PrecisionFit, bfloat16: PrecisionFit
) -> Accelerator:
    """Return one core as an accelerator, with the fits of both types."""
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


def _fit_products(products: Sequence[MatmulTiming]) -> tuple[float, float]:
    """Return the rate for infinite inner lengths, and the length at which half of it is reached. The seconds
    of a library call, which belong to a layer's operators, are fitted in addition."""
    m, n, k, seconds = (
        np.array([getattr(p, name) for p in products], float) for name in ["m", "n", "k", "seconds"]
    )
    ones = np.ones(len(products))
    errors, rates = [], []
    for saturation in _SATURATIONS:
        unit = 2 * m * n * (k + saturation)
        found = relative_fit(np.stack([unit, ones], 1), seconds)
        errors.append(float(((np.stack([unit, ones], 1) @ found / seconds - 1) ** 2).sum()))
        rates.append(1 / max(found[0], 1 / UNLIMITED_RATE))
    best = int(np.argmin(errors))
    # `matmul_seconds` reaches the achievable rate at an inner length of 8,192.
    saturation = float(_SATURATIONS[best])
    return float(rates[best]) * 8192 / (8192 + saturation), saturation


def _fit_attention(attentions: Sequence[AttentionTiming]) -> tuple[float, float, float]:
    """Return the rate for infinite sequences, the length at which half of it is reached, and the seconds of
    the backward relative to the forward. The seconds of a call are fitted in addition, as with products."""
    slower = np.array([min(1.0, one.head_width / 128) ** 0.35 for one in attentions])
    flops = np.array([one.flops for one in attentions]) / slower
    lengths = np.array([float(one.sequence) for one in attentions])
    forward, backward = (
        np.array([getattr(one, name) for one in attentions])
        for name in ["forward_seconds", "backward_seconds"]
    )
    each, short, call = relative_fit(np.stack([flops, flops / lengths, np.ones(len(flops))], 1), forward)
    each = max(each, short / 4096, 1 / UNLIMITED_RATE)
    ratios = (backward - call) / np.maximum(forward - call, 0.1 * forward)
    return float(1 / each), float(short / each), float(max(1.0, np.median(ratios)))


def _fit_layers(layers: Sequence[LayerTiming], value_bytes: int, known: Accelerator) -> dict[str, float]:
    """Return the launch seconds and the rates of streams and of weights. They are fitted to the seconds that
    remain above those of ``known``, in which all three cost nothing. Errors are relative to the whole layer:
    a small part of it matters little."""
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
        "stream_bytes_per_second": float(1 / max(stream, 1 / UNLIMITED_RATE)),
        "weights_bytes_per_second": float(1 / max(weights, 1 / UNLIMITED_RATE)),
    }


def _fit_loss(heads: Sequence[LayerTiming], value_bytes: int, known: Accelerator) -> float:
    """Return the rate of the loss over logits, from the seconds of a head that remain."""
    each = []
    for one in heads:
        free = head_seconds(
            one, value_bytes, known.model_copy(update={"loss_bytes_per_second": UNLIMITED_RATE})
        )
        slow = head_seconds(one, value_bytes, known.model_copy(update={"loss_bytes_per_second": 1.0}))
        each.append(max(one.seconds - free, 0.01 * one.seconds) / (slow - free))
    return float(1 / np.median(each))


def doubling_ratio(seconds: Mapping[int, float]) -> float:
    """Return the relative slowdown of each doubling of the ranks on a core. ``seconds``: seconds of compute
    by the number of ranks on a core, including 1."""
    doublings = np.log2(np.array([number for number in seconds if number > 1], float))
    added = np.array([seconds[number] / seconds[1] - 1 for number in seconds if number > 1])
    return max(0.0, float(doublings @ added / (doublings @ doublings)))


def block_seconds(one: LayerTiming, value_bytes: int, accelerator: Accelerator) -> float:
    """Return the modelled seconds of a block, forward and backward."""
    return _total(block_times(one.model, _alone(one, value_bytes, accelerator), computed_pairs(one.model, 0)))


def head_seconds(one: LayerTiming, value_bytes: int, accelerator: Accelerator) -> float:
    """Return the modelled seconds of a head, forward with the loss, and backward."""
    return _total(head_times(one.model, _alone(one, value_bytes, accelerator)))


def _alone(one: LayerTiming, value_bytes: int, accelerator: Accelerator) -> LayerContext:
    nowhere = Link(bytes_per_second=1.0, latency_seconds=1.0)
    cluster = Cluster(
        name="fit", nodes=1, accelerators_per_node=1, accelerator=accelerator, links=Links(node=nowhere)
    )
    profile = FrameworkProfile(fused_add_norm=False)  # A CPU core never fuses the residual add with the norm.
    return LayerContext(cluster, profile, 1.0, float(one.micro_batch), value_bytes, OverlapConfig(), 0.0)


def _total(times: LayerTimes) -> float:
    parts = times.forward, times.backward_input, times.backward_weight
    return float(sum(part.total for part in parts))


_EXPOSED_CROSSINGS, _HIDDEN_CROSSINGS = 8.0, 2.0
"""Collectives of a block that are exposed and hidden: an all-gather and a reduce-scatter each for attention
and MLP, in both directions, and in the backward the repeated all-gathers."""
_TENSOR_TURNS, _MOST_BUSY = 5, 2.0


@dataclass(frozen=True)
class TensorParallelTiming:
    """The seconds that tensor parallelism between two ranks adds to the forward and backward of one block and
    micro-batch."""

    num_bytes: float
    """Bytes of the whole tensor of each collective."""
    compute_seconds: float
    """Seconds of the block without collectives."""
    added_seconds: float
    """Added seconds when each collective is waited for where it is issued."""
    num_parts: float
    added_overlapped_seconds: float
    """Added seconds with ``num_parts`` parts, where the collective of one part overlaps with the compute of
    another."""
    added_processor_seconds: float
    """Processor seconds of a core within ``added_seconds``."""


@dataclass(frozen=True)
class LinkFit:
    """Seconds of a transfer: those of an empty one, and the rate of the bytes."""

    empty_seconds: float
    bytes_per_second: float


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> LinkFit:
    """Fit ``empty + bytes / rate`` to timings."""
    empty, each = relative_fit(np.stack([np.ones(len(sizes)), np.asarray(sizes)], 1), np.asarray(seconds))
    return LinkFit(float(empty), float(1 / max(each, 1 / UNLIMITED_RATE)))


def fit_tensor_parallel(times: Sequence[TensorParallelTiming], node: Link) -> Link:
    """Fit tensor-parallel collectives in blocks, as `myriad.planner.cost.layer_costs` counts them. Cut in
    parts, each part pays the startup again, and all but the first overlap with compute. The fitted busy ratio
    is the slowdown of that compute, and at least the processor time of the collectives."""
    halves = np.array([one.num_bytes / 2 for one in times])
    parts = np.array([one.num_parts for one in times])
    least = 1e-3 * np.array([one.added_seconds for one in times]).max()
    added, overlapped = (
        np.maximum([getattr(one, name) for one in times], least)
        for name in ("added_seconds", "added_overlapped_seconds")
    )
    compute, busy = np.array([one.compute_seconds for one in times]), node.busy_ratio
    workload = float(np.median([one.added_processor_seconds for one in times] / added))
    for _ in range(_TENSOR_TURNS):
        count = _EXPOSED_CROSSINGS + _HIDDEN_CROSSINGS * busy
        empty, each = relative_fit(count * np.stack([np.ones(len(times)), halves], 1), added)
        whole = _EXPOSED_CROSSINGS * (empty * parts + each * halves)
        behind = np.minimum(whole * (1 - 1 / parts), 2 / 3 * compute)  # Forward and input gradients.
        ratios = (overlapped - whole + behind) / (behind + _HIDDEN_CROSSINGS * (empty + each * halves))
        if (parts > 1).any():
            busy = float(np.clip(np.median(ratios[parts > 1]), min(1.0, workload), _MOST_BUSY))
    return node.model_copy(
        update={
            "bytes_per_second": 1 / max(each, 1 / UNLIMITED_RATE),
            "launch_seconds": max(0.0, empty - node.latency_seconds),
            "busy_ratio": busy,
        }
    )


Floats = npt.NDArray[np.float64]
UNLIMITED_RATE = 1e18
"""Rate of an operation that takes no time: the highest that a cluster file may have."""


def relative_fit(columns: Floats, seconds: Floats) -> Floats:
    """Return the non-negative coefficients with the least squares of relative errors."""
    return least_squares(columns / seconds[:, None], np.ones(len(seconds)))


def least_squares(columns: Floats, values: Floats) -> Floats:
    """Return the non-negative coefficients with the least squares. Every subset of columns is tried, with 0
    for the others; there are few columns."""
    count = columns.shape[1]
    best, least = np.zeros(count), float((values**2).sum())
    for kept in chain.from_iterable(combinations(range(count), size) for size in range(1, count + 1)):
        found = np.zeros(count)
        found[list(kept)] = np.linalg.lstsq(columns[:, kept], values, rcond=None)[0]
        error = float(((columns @ found - values) ** 2).sum())
        if (found >= 0).all() and error < least:
            best, least = found, error
    return best
