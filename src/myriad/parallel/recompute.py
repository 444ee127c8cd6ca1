"""Recomputation: the parts of a stage's forward pass that a rank keeps, and the backward pass from them.

A forward pass is a list of segments. Without recomputation the stage is one segment, with its graph. With
``layout.recompute = "full"`` each layer is a segment that keeps only its input (Chen et al., arXiv
1604.06174; Korthikanti et al., arXiv 2205.05198, section 5); its graph is recomputed when the backward needs
it:

    forward     x0 -> layer 0 -> x1 -> layer 1 -> x2         x0 and x1 kept, no graph
    backward    layer 1 again on x1, its gradients; then layer 0 again on x0, its gradients

If a stage's backward is the rank's next compute action, the last layer keeps its graph: it is the only graph
held at that moment, and the loss is not computed twice.

A recomputed layer gives the same bits: Myriad's own dropout depends only on sample and position. The state of
torch's generators, which a user's layers may draw from, is restored for the recomputation.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from myriad.model.definition import Context
from myriad.model.interleave import run_layers
from myriad.program.partition import num_recomputed

__all__ = ["RandomState", "Segment", "differentiate", "run_in_segments"]


@dataclass(frozen=True)
class Segment:
    """Consecutive layers, and the tensors kept of their forward pass."""

    layers: Sequence[nn.Module]
    entered: torch.Tensor
    left: torch.Tensor | None = None
    """The output with its graph; ``None``: the backward recomputes it."""
    random_state: "RandomState | None" = None
    """State of torch's generators before the layers ran; ``None``: the layers draw no random numbers from
    them."""

    def output(self, context: Context) -> torch.Tensor:
        """Return the output with its graph; recompute it if it was not kept."""
        if self.left is not None:
            return self.left
        with torch.enable_grad(), _random_numbers_of(self.random_state, self.entered.device):
            return run_layers(self.layers, self.entered, context)


def run_in_segments(
    layers: Sequence[nn.Module],
    x: torch.Tensor,
    context: Context,
    *,
    keep_last: bool,
    ratio: float = 1.0,
    keeps_generators: bool = True,
) -> tuple[list[Segment], torch.Tensor]:
    """Run the layers; return their segments and the output.

    The first layers, a share ``ratio`` of all, are one segment each and keep only their inputs. The others
    are one segment with its graph. ``keep_last``: keep the last layer's graph in any case.
    ``keeps_generators``: keep the state of torch's generators where a layer draws from them.
    """
    num_again = min(num_recomputed(len(layers), ratio), len(layers) - (1 if keep_last else 0))
    segments: list[Segment] = []
    after = RandomState.of(x.device) if num_again and keeps_generators else None
    for index, layer in enumerate(layers[:num_again]):
        entered, before = _entering(x, index), after
        with torch.no_grad():
            x = run_layers([layer], entered, context)
        after = RandomState.of(x.device) if keeps_generators else None
        drawn = None if after is None or after.equals(before) else before
        segments.append(Segment([layer], entered, None, drawn))
    if kept := layers[num_again:]:
        entered = _entering(x, num_again)
        x = run_layers(kept, entered, context)
        segments.append(Segment(kept, entered, x))
    return segments, x


def _entering(x: torch.Tensor, index: int) -> torch.Tensor:
    """Return the input of layer ``index``, detached: it starts the graph of its segment."""
    return x.detach().requires_grad_(x.is_floating_point()) if index > 0 else x


def differentiate(segments: list[Segment], gradient: torch.Tensor, context: Context) -> torch.Tensor | None:
    """Compute the backward pass, last segment first; each segment is dropped when it is done.

    Return the gradient of the input, given the ``gradient`` of the output. The result is ``None`` if a layer
    needs none (the first layers, without parameters).
    """
    entering: torch.Tensor | None = gradient
    while segments and entering is not None:
        entering = _differentiate_one(segments.pop(), entering, context)
    return entering


def _differentiate_one(segment: Segment, gradient: torch.Tensor, context: Context) -> torch.Tensor | None:
    output = segment.output(context)
    if output.requires_grad or output.ndim == 0:  # for a loss without a graph, autograd raises the error
        _start_backward(output, gradient)
    return segment.entered.grad


def _start_backward(output: torch.Tensor, gradient: torch.Tensor) -> None:
    """Differentiate ``output``, given its ``gradient``.

    On the host it starts from a scalar: given a gradient, `torch.autograd.backward` imports sympy for its
    comparison of two shapes, half a second in each rank. A GPU would launch a kernel for each scalar.
    """
    if not gradient.is_cpu:
        torch.autograd.backward(output, gradient)
        return
    with torch.enable_grad():
        source = _GradientSource.apply(output, gradient)
    torch.autograd.backward(source)


class _GradientSource(torch.autograd.Function):
    """A scalar whose backward hands a given gradient to a tensor."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return gradient.new_empty(())

    @staticmethod
    def backward(ctx: Any, *scalars: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.gradient, None


@dataclass(frozen=True)
class RandomState:
    """The state of torch's generators at one moment."""

    host: torch.Tensor
    device: tuple[int, int] | None
    """Seed and offset of the GPU's generator. They are its whole state: two numbers, no tensor."""

    @classmethod
    def of(cls, device: torch.device) -> "RandomState":
        """Return the current state of the generators."""
        own = _generator_of(device)
        on_device = None if own is None else (own.initial_seed(), own.get_offset())
        return cls(torch.random.get_rng_state(), on_device)

    def equals(self, other: "RandomState | None") -> bool:
        """Return whether no number was drawn between the two states."""
        return other is not None and self.device == other.device and torch.equal(self.host, other.host)

    def set(self, device: torch.device) -> None:
        """Restore the generators to this state."""
        torch.random.set_rng_state(self.host)
        own = _generator_of(device)
        if own is not None and self.device is not None:
            seed, offset = self.device
            own.manual_seed(seed)
            own.set_offset(offset)


def _generator_of(device: torch.device) -> torch.Generator | None:
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else None


@contextmanager
def _random_numbers_of(state: RandomState | None, device: torch.device) -> Iterator[None]:
    """Return a context in which torch's generators have the given state. It restores their present state at
    its end."""
    if state is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        state.set(device)
        yield
