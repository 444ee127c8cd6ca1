"""The compute interface of a stage, as the runtime uses it:

    output, backward = computes.forward(stage, entering, context, ...)
    gradient = backward.whole(gradient of the output)

or, where a schedule splits the backward, in two parts:

    gradient, weight_part = backward.in_parts(gradient of the output)
    weight_part()

`EagerCompute` starts the operators one by one, in Python. `myriad.parallel.cuda_graphs` replays all of them
at once."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import nn

from myriad.comm.layout import Layout
from myriad.kernels.gradient import DeferredProduct, GradientSink, PendingRows, apply_deferred
from myriad.kernels.host_copies import keeps_storage
from myriad.model.definition import Context
from myriad.model.interleave import layers_in_steps, run_layers
from myriad.parallel.recompute import Segment, differentiate, run_in_segments

__all__ = ["Backward", "EagerCompute", "StageCompute", "WeightPart"]

WeightPart = Callable[[], None]
"""Compute the weight gradients that the first part of a backward deferred. Call it once."""


class Backward(Protocol):
    """The backward of one forward: from the gradient of a stage's output to that of its input (``None`` if no
    layer needs one). Gradients of parameters go to their sinks. Call one of the two methods, once."""

    @property
    def keeps_output(self) -> bool:
        """Whether it refers to the forward's output."""
        ...

    def whole(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Compute both parts of the backward at once."""
        ...

    def in_parts(self, gradient: torch.Tensor) -> tuple[torch.Tensor | None, WeightPart]:
        """Compute the input's part, and return a function that computes the weights' part."""
        ...


class StageCompute(Protocol):
    """Compute actions of one rank's stages."""

    def forward(
        self, stage: int, entering: torch.Tensor, context: Context, *, backward_is_next: bool
    ) -> tuple[torch.Tensor, Backward]:
        """Run a forward in training. ``backward_is_next``: the rank computes the same micro-batch's backward
        directly after it."""
        ...


class EagerCompute:
    """Compute actions that run operator by operator."""

    def __init__(
        self,
        layers: Mapping[int, Sequence[nn.Module]],
        layout: Layout,
        sinks: Mapping[int, Sequence[GradientSink]],
        pending: Mapping[int, Sequence[PendingRows]],
        later: list[DeferredProduct] | None = None,
    ) -> None:
        """``layers`` and ``sinks``: those of each stage of this rank. ``pending``: partial sums that each
        stage's backward adds up at its end. ``later``: weight products that are computed at its end
        (`myriad.model.boundary.Boundary.later`)."""
        self._layers, self._layout, self._sinks = layers, layout, sinks
        self._pending, self._later = pending, later
        self.leaves_products = False
        """Whether backwards leave the last of `later` to the next backward, or to `compute_products`."""

    def evaluate(self, stage: int, entering: torch.Tensor, context: Context) -> torch.Tensor:
        """Return the stage's output, without a graph."""
        with torch.no_grad():
            return run_layers(self._layers[stage], entering, context)

    def forward(
        self,
        stage: int,
        entering: torch.Tensor,
        context: Context,
        *,
        backward_is_next: bool,
        keeps_generators: bool = True,
    ) -> tuple[torch.Tensor, Backward]:
        """Return the stage's output, and what its backward needs. ``keeps_generators``: recomputed layers
        draw the same numbers from torch's generators."""
        layers, layout = self._layers[stage], self._layout
        if layout.recompute == "full":
            segments, x = run_in_segments(
                layers,
                entering,
                context,
                keep_last=backward_is_next,
                ratio=layout.recompute_ratio,
                keeps_generators=keeps_generators,
            )
        else:
            x = run_layers(layers, entering, context)
            segments = [Segment(layers, entering, x)]
        return self._kept(stage, x, segments, context)

    def forward_in_steps(
        self, stage: int, entering: torch.Tensor, context: Context
    ) -> Generator[object, None, tuple[torch.Tensor, Backward]]:
        """Do what `forward` does, and yield where tokens have left for experts, or results for tokens.
        Nothing is recomputed."""
        layers = self._layers[stage]
        x = yield from layers_in_steps(layers, entering, context)
        return self._kept(stage, x, [Segment(layers, entering, x)], context)

    def _kept(
        self, stage: int, x: torch.Tensor, segments: list[Segment], context: Context
    ) -> tuple[torch.Tensor, Backward]:
        for segment in segments:
            keeps_storage(segment.entered)
        return x, _EagerBackward(self, stage, segments, context)

    def differentiate(
        self, stage: int, segments: list[Segment], context: Context, gradient: torch.Tensor
    ) -> torch.Tensor | None:
        """Compute the backward pass of the segments and return the gradient of the stage's input. The list
        ``segments`` is empty afterwards."""
        entering = differentiate(segments, gradient, context)
        for pending in self._pending[stage]:
            pending.add_up()
        if not self.leaves_products:
            self.compute_products()
        return entering

    def compute_products(self) -> None:
        """Compute the weight products that backwards have left for later."""
        if self._later is not None:
            apply_deferred(self._later)

    def defer(self, stage: int, products: list[DeferredProduct] | None) -> None:
        """Set where the stage's sinks append their weight products; ``None``: the sinks compute them
        directly."""
        for sink in self._sinks[stage]:
            sink.deferred = products


@dataclass(frozen=True, slots=True)
class _EagerBackward:
    """The backward of one forward, with the segments that it kept."""

    eager: EagerCompute
    stage: int
    segments: list[Segment]
    context: Context

    @property
    def keeps_output(self) -> bool:
        return self.segments[-1].left is not None

    def whole(self, gradient: torch.Tensor) -> torch.Tensor | None:
        return self.eager.differentiate(self.stage, self.segments, self.context, gradient)

    def in_parts(self, gradient: torch.Tensor) -> tuple[torch.Tensor | None, WeightPart]:
        products: list[DeferredProduct] = []
        self.eager.defer(self.stage, products)
        entering = self.whole(gradient)
        self.eager.defer(self.stage, None)
        return entering, partial(apply_deferred, products)
