"""Time operators and layers on one core while other ranks do the same on theirs.

The measure is the processor time of this thread. On a dedicated core it equals the clock's, and other work on
the machine changes it little. The mean of several calls is used, because a training meets the slow calls as
well. Cores drift by a third within a minute (clock, neighbours of a virtual machine). Each timing is
therefore relative to some blocks of a model, timed just before and after it. No cache of a core holds these
blocks. They are blocks, not one product, because neighbours take caches and memory bandwidth too, and blocks
use the same resources.

Legend: m, n, k of a product ``[m, k] x [k, n]``.
"""

import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from myriad.comm.groups import Group
from myriad.kernels.attention import attention
from myriad.kernels.attention_blocks import Heads
from myriad.kernels.gradient import GradientSink, accumulate_product, set_sink
from myriad.model.boundary import Boundary
from myriad.model.config import ModelConfig
from myriad.model.definition import Context, values_of_rank
from myriad.model.gpt import GPT
from myriad.planner.rehearsal.machine_fit import AttentionTiming, LayerTiming, MatmulTiming, PrecisionTimings

__all__ = ["PacedTimer", "stack_of_blocks", "sweep_bytes_per_second", "time_type"]

_ROWS = (64, 256, 1024)
_MATRICES = ((64, 64), (128, 256), (256, 256), (768, 256), (256, 1024), (1024, 1024))
"""Weight shapes ``[out, in]`` of small models, and of larger ones under tensor parallelism."""
_LAYERS = (
    (64, 64, 1),
    (64, 64, 8),
    (128, 128, 1),
    (256, 128, 1),
    (256, 256, 1),
    (256, 256, 4),
    (512, 256, 1),
    (512, 512, 1),
)
"""Hidden size, sequence length and micro-batch of each timed layer."""
_HEADS = ((64, 64, 8, 512), (256, 256, 1, 1024), (256, 256, 4, 1024), (256, 256, 1, 8192))
"""Hidden size, sequence length, micro-batch and vocabulary of each timed head."""
_STACK = 6
"""Blocks, or heads, that are timed together. Like a training, they use more memory than one block, so that
none of it is in a core's caches."""
_HEAD_WIDTH = 64
_LEAST_ROUNDS, _ROUNDS, _ENOUGH_SECONDS = 3, 9, 0.15
_SLOW_FLOPS = 2e10
"""FLOP/s below which a core has no instructions for a type; it is timed at the smallest sizes only."""
_SWEEP_ELEMENTS = 2**23
_PACE_BLOCK = (256, 128, 1)
"""Hidden size, sequence length and micro-batch of the reference block."""
_PACE_SECONDS, _PACE_SHORT_SECONDS = 1.0, 0.04
_STRIDES, _STRIDE_SECONDS = 2, 0.2
"""Rounds and seconds for layers and heads, to which the model of the other timings is fitted."""


def _model(hidden: int, sequence: int) -> ModelConfig:
    return ModelConfig(layers=1, hidden=hidden, heads=max(1, hidden // _HEAD_WIDTH), sequence=sequence)


class PacedTimer:
    """The speed of this core: seconds of one reference block, forward and backward, measured repeatedly."""

    def __init__(self) -> None:
        hidden, sequence, micro_batch = _PACE_BLOCK
        x, model = torch.randn(micro_batch, sequence, hidden), _model(hidden, sequence)
        stack = model.model_copy(update={"layers": _STACK})
        self._compute = stack_of_blocks(stack, torch.float32, Boundary(), x)
        self.nominal_seconds = self.seconds(_PACE_SECONDS)
        """Seconds of one block at the pace that all other times refer to."""
        self._latest = self.nominal_seconds

    def seconds(self, least_seconds: float) -> float:
        """Return the seconds of one block, measured for at least ``least_seconds``."""
        return _mean(self._compute, least_seconds) / _STACK

    def usual(self, function: Callable[[], object], least_seconds: float = 1.5e-3) -> float:
        """Return the seconds of one call at the core's nominal pace.

        The core's actual pace is the mean of its last measurement and one just after the calls.
        """
        function()
        calls = max(1, int(least_seconds / max(_thread_seconds(function), 1e-7)))
        taken, rounds = 0.0, 0
        while rounds < _LEAST_ROUNDS or (rounds < _ROUNDS and taken < _ENOUGH_SECONDS):
            taken += _thread_seconds(function, calls)
            rounds += 1
        before, self._latest = self._latest, self.seconds(_PACE_SHORT_SECONDS)
        return taken / rounds / calls * self.nominal_seconds / ((before + self._latest) / 2)

    def in_stride(self, function: Callable[[], object]) -> float:
        """Return the seconds of one call at the nominal pace, for work that a training repeats.

        The call and the reference block alternate. Each runs long enough to find in the caches what it left
        there, as in a training.
        """
        taken = paces = 0.0
        for _ in range(_STRIDES):
            self._latest = self.seconds(_STRIDE_SECONDS)
            paces += self._latest
            taken += _mean(function, _STRIDE_SECONDS)
        return taken / paces * self.nominal_seconds


def _thread_seconds(function: Callable[[], object], calls: int = 1) -> float:
    """Return the seconds of ``calls`` calls, by the processor time of this thread."""
    start = time.thread_time()
    for _ in range(calls):
        function()
    return time.thread_time() - start


def _mean(function: Callable[[], object], least_seconds: float = 0.5) -> float:
    """Return the seconds of one call, including everything between calls."""
    function()
    calls, start = 0, time.thread_time()
    while calls == 0 or time.thread_time() - start < least_seconds:
        function()
        calls += 1
    return (time.thread_time() - start) / calls


def sweep_bytes_per_second(together: Group | None, pace: PacedTimer) -> float:
    """Return the bytes per second of reading and writing memory that no cache holds."""
    a, b = torch.ones(_SWEEP_ELEMENTS), torch.ones(_SWEEP_ELEMENTS)
    dist.barrier(together)
    return 3 * 4 * _SWEEP_ELEMENTS / pace.usual(lambda: torch.add(a, b, out=a), 2e-2)


def time_type(dtype: torch.dtype, together: Group | None, pace: PacedTimer) -> PrecisionTimings:
    """Time products, attention, layers and heads in one number type."""
    value_bytes = torch.empty(0, dtype=dtype).element_size()
    products = list(_products(dtype, together, pace))
    fastest = max(2 * p.m * p.n * p.k / p.seconds for p in products)
    quick = fastest > _SLOW_FLOPS
    layers, heads = (_LAYERS, _HEADS) if quick else (_LAYERS[:3], _HEADS[:1])
    attentions = [
        _attention(dtype, *shape, together, pace) for shape in sorted({(h, s, b) for h, s, b in layers})
    ]
    return PrecisionTimings(
        value_bytes,
        products,
        attentions,
        [_layer(dtype, *shape, together, pace) for shape in layers],
        [_head(dtype, *shape, together, pace) for shape in heads],
    )


def _products(dtype: torch.dtype, together: Group | None, pace: PacedTimer) -> Iterator[MatmulTiming]:
    """Time the forward and both backward products, as `myriad.kernels.linear` computes them."""
    for n, k in _MATRICES:
        for m in _ROWS:
            x, weight, gradient = (torch.randn(shape).to(dtype) for shape in ((m, k), (n, k), (m, n)))
            total = torch.zeros(n, k)
            dist.barrier(together)
            forward = pace.usual(lambda x=x, weight=weight: F.linear(x, weight))  # type: ignore[misc]
            yield MatmulTiming(m, n, k, forward)
            if 2 * m * n * k / forward < _SLOW_FLOPS and m > _ROWS[0]:
                return
            yield MatmulTiming(m, k, n, pace.usual(lambda g=gradient, w=weight: g @ w))  # type: ignore[misc]
            into = pace.usual(lambda t=total, g=gradient, x=x: accumulate_product(t, g, x))  # type: ignore[misc]
            yield MatmulTiming(n, k, m, into)


def _attention(
    dtype: torch.dtype, hidden: int, sequence: int, micro_batch: int, together: Group | None, pace: PacedTimer
) -> AttentionTiming:
    heads = Heads(hidden // _HEAD_WIDTH, hidden // _HEAD_WIDTH, _HEAD_WIDTH)
    fused = torch.randn(micro_batch, sequence, 3 * hidden).to(dtype).requires_grad_()
    out = attention(fused, heads)
    gradient = torch.randn(out.shape).to(dtype)
    dist.barrier(together)
    forward = pace.usual(lambda: attention(fused.detach(), heads))
    backward = pace.usual(lambda: out.backward(gradient, retain_graph=True))
    flops = 4.0 * micro_batch * hidden * sequence * (sequence + 1) / 2
    return AttentionTiming(sequence, _HEAD_WIDTH, flops, forward, backward)


def _layer(
    dtype: torch.dtype,
    hidden: int,
    sequence: int,
    micro_batch: int,
    together: Group | None,
    pace: PacedTimer,
) -> LayerTiming:
    """Time one block among others, so that its weights are in no cache when it begins. Its gradients go to
    sinks, as in the runtime."""
    model = _model(hidden, sequence)
    x = torch.randn(micro_batch, sequence, hidden)
    iterate = stack_of_blocks(model.model_copy(update={"layers": _STACK}), dtype, Boundary(), x)
    dist.barrier(together)
    return LayerTiming(model, micro_batch, pace.in_stride(iterate) / _STACK)


def stack_of_blocks(
    model: ModelConfig, dtype: torch.dtype, boundary: Boundary, x: torch.Tensor
) -> Callable[[], None]:
    """Return a function that computes all blocks of a model, forward and backward. ``x``: ``[B, S /
    boundary.size, H]``."""
    definition = GPT(model, seed=1)
    blocks = [_build(definition, number, dtype, boundary) for number in range(1, model.layers + 1)]
    x = x.to(dtype).requires_grad_()
    tokens = torch.zeros(x.shape[0], model.sequence, dtype=torch.int64)
    context, gradient = Context(targets=tokens, samples=tokens[:, 0]), torch.randn(x.shape).to(dtype)

    def iterate() -> None:
        out = x
        for block in blocks:
            out = block(out, context)
        out.backward(gradient)

    return iterate


def _head(
    dtype: torch.dtype,
    hidden: int,
    sequence: int,
    micro_batch: int,
    vocabulary: int,
    together: Group | None,
    pace: PacedTimer,
) -> LayerTiming:
    model = _model(hidden, sequence).model_copy(update={"vocabulary": vocabulary})
    definition = GPT(model, seed=1)
    heads = [_build(definition, model.layers + 1, dtype, Boundary()) for _ in range(_STACK)]
    x = torch.randn(micro_batch, sequence, hidden).to(dtype).requires_grad_()
    tokens = torch.randint(vocabulary, (micro_batch, sequence))
    context = Context(targets=tokens, samples=tokens[:, 0])

    def iterate() -> None:
        for head in heads:
            head(x, context).backward()

    dist.barrier(together)
    return LayerTiming(model, micro_batch, pace.in_stride(iterate) / _STACK)


def _build(definition: GPT, number: int, dtype: torch.dtype, boundary: Boundary) -> nn.Module:
    layer = definition.build(number, boundary)
    for name, values in definition.initial(number).items():
        parameter = layer.get_parameter(name)
        own = values_of_rank(definition, f"{definition.names[number]}.{name}", values, size=boundary.size)
        parameter.data = own.to(dtype, copy=True)
        set_sink(parameter, GradientSink(torch.zeros(parameter.shape)))
    return layer
