"""What a stage computes, as the runtime asks for it:

    output, backward = computes.forward(stage, entering, context, ...)
    gradient = backward(gradient of the output)

`Eager` starts the operators one by one, in Python; `myriad.parallel.captured` starts all of them at once.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import nn

from myriad.comm.layout import Layout
from myriad.kernels.gradient import DeferredProduct, apply_deferred
from myriad.model.definition import Context
from myriad.model.interleave import run_layers
from myriad.parallel.recompute import Segment, differentiate, run_in_segments

__all__ = ["Backward", "Computes", "Eager"]

Backward = Callable[[torch.Tensor], torch.Tensor | None]
"""The gradient of a stage's output to that of what entered it (``None`` where nobody asks for it); those of
parameters go to their sinks. Once."""


class Computes(Protocol):
    """Of the stages of one rank."""

    def forward(
        self, stage: int, entering: torch.Tensor, context: Context, *, backward_is_next: bool
    ) -> tuple[torch.Tensor, Backward]:
        """In training. ``backward_is_next``: the rank computes the same micro-batch's backward after it."""
        ...


class Eager:
    """Operator by operator."""

    def __init__(
        self,
        layers: Mapping[int, Sequence[nn.Module]],
        layout: Layout,
        later: list[DeferredProduct] | None = None,
    ) -> None:
        """``layers``: of each stage of this rank; ``later``: where backwards leave products for their end
        (`myriad.model.boundary.Boundary.later`)."""
        self._layers, self._layout, self._later = layers, layout, later

    def evaluate(self, stage: int, entering: torch.Tensor, context: Context) -> torch.Tensor:
        """The stage's output alone."""
        with torch.no_grad():
            return run_layers(self._layers[stage], entering, context)

    def forward(
        self, stage: int, entering: torch.Tensor, context: Context, *, backward_is_next: bool
    ) -> tuple[torch.Tensor, Backward]:
        """The stage's output, and what is kept for its backward."""
        layers, layout = self._layers[stage], self._layout
        if layout.recompute == "full":
            ratio = layout.recompute_ratio
            segments, x = run_in_segments(layers, entering, context, keep_last=backward_is_next, ratio=ratio)
        else:
            x = run_layers(layers, entering, context)
            segments = [Segment(layers, entering, x)]
        return x, partial(self.backward, segments, context)

    def backward(
        self, segments: list[Segment], context: Context, gradient: torch.Tensor
    ) -> torch.Tensor | None:
        """Leaves ``segments`` empty."""
        entering = differentiate(segments, gradient, context)
        if self._later is not None:
            apply_deferred(self._later)
        return entering
