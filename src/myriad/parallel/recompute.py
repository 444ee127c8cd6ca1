"""What a rank keeps of a stage's forward pass, and the backward pass from that.

A forward pass is a list of segments. Without recomputation the stage is one segment, with its graph. With
``layout.recompute = "full"`` each layer is one, of which only the input is kept (Chen et al., arXiv
1604.06174; Korthikanti et al., arXiv 2205.05198, section 5); its graph is made again when it is needed:

    forward     x0 -> layer 0 -> x1 -> layer 1 -> x2         x0 and x1 kept, no graph
    backward    layer 1 again on x1, its gradients; then layer 0 again on x0, its gradients

The last layer of a stage whose backward is what the rank computes next keeps its graph: nothing else is held
at that moment, and the loss is not computed twice.

A layer run again gives the same bits: Myriad's own dropout depends on sample and place alone, and torch's
generators, of which a user's layers may draw, are set back meanwhile.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from myriad.model.definition import Context
from myriad.model.interleave import run_layers
from myriad.program.actions import Action, Kind
from myriad.program.partition import num_recomputed

__all__ = ["Segment", "differentiate", "next_is_backward", "run_in_segments"]

_BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


@dataclass(frozen=True)
class Segment:
    """Consecutive layers, as far as their forward pass is kept."""

    layers: Sequence[nn.Module]
    entered: torch.Tensor
    left: torch.Tensor | None = None
    """The output with its graph; ``None``: to be made again."""
    random_state: "_RandomState | None" = None
    """Of torch's generators before the layers; ``None``: they draw nothing from them."""

    def output(self, context: Context) -> torch.Tensor:
        """The output with its graph."""
        if self.left is not None:
            return self.left
        with torch.enable_grad(), _random_numbers_of(self.random_state, self.entered.device):
            return run_layers(self.layers, self.entered, context)


def next_is_backward(actions: Iterable[Action]) -> frozenset[tuple[int, int]]:
    """(stage, micro-batch) of the forwards after which the rank does the same one's backward, weight parts of
    others aside."""
    computes = [action for action in actions if action.kind in (Kind.FORWARD, *_BACKWARDS)]
    return frozenset(
        (first.stage, first.micro_batch)
        for first, then in pairwise(computes)
        if first.kind is Kind.FORWARD
        and then.kind in _BACKWARDS
        and (first.stage, first.micro_batch) == (then.stage, then.micro_batch)
    )


def run_in_segments(
    layers: Sequence[nn.Module], x: torch.Tensor, context: Context, *, keep_last: bool, ratio: float = 1.0
) -> tuple[list[Segment], torch.Tensor]:
    """One segment for each of the first layers, a share ``ratio`` of all, one with its graph for the others,
    and the output; ``keep_last``: the last layer's graph is kept in any case."""
    num_again = min(num_recomputed(len(layers), ratio), len(layers) - (1 if keep_last else 0))
    segments: list[Segment] = []
    after = _RandomState.of(x.device) if num_again else None
    for index, layer in enumerate(layers[:num_again]):
        entered, before = _entering(x, index), after
        with torch.no_grad():
            x = run_layers([layer], entered, context)
        after = _RandomState.of(x.device)
        segments.append(Segment([layer], entered, None, None if after.equals(before) else before))
    if kept := layers[num_again:]:
        entered = _entering(x, num_again)
        x = run_layers(kept, entered, context)
        segments.append(Segment(kept, entered, x))
    return segments, x


def _entering(x: torch.Tensor, index: int) -> torch.Tensor:
    """What layer ``index`` is given: the start of a graph of its own."""
    return x.detach().requires_grad_(x.is_floating_point()) if index > 0 else x


def differentiate(segments: list[Segment], gradient: torch.Tensor, context: Context) -> torch.Tensor | None:
    """The backward pass, last segment first, each given up when it is done: ``gradient`` of the output to
    that of the input; ``None`` where a layer asks for none (the first ones, without parameters)."""
    entering: torch.Tensor | None = gradient
    while segments and entering is not None:
        entering = _differentiate_one(segments.pop(), entering, context)
    return entering


def _differentiate_one(segment: Segment, gradient: torch.Tensor, context: Context) -> torch.Tensor | None:
    output = segment.output(context)
    if output.requires_grad or output.ndim == 0:  # of a loss without a gradient autograd says so
        torch.autograd.backward(output, gradient)
    return segment.entered.grad


@dataclass(frozen=True)
class _RandomState:
    """torch's generators at one moment."""

    host: torch.Tensor
    device: tuple[int, int] | None
    """Seed and offset of the GPU's generator, which are all of its state: two numbers, no tensor."""

    @classmethod
    def of(cls, device: torch.device) -> "_RandomState":
        """Return the state in which the generators are now."""
        own = _generator_of(device)
        on_device = None if own is None else (own.initial_seed(), own.get_offset())
        return cls(torch.random.get_rng_state(), on_device)

    def equals(self, other: "_RandomState | None") -> bool:
        """Nothing was drawn between them."""
        return other is not None and self.device == other.device and torch.equal(self.host, other.host)

    def set(self, device: torch.device) -> None:
        """The generators are as they were."""
        torch.random.set_rng_state(self.host)
        own = _generator_of(device)
        if own is not None and self.device is not None:
            seed, offset = self.device
            own.manual_seed(seed)
            own.set_offset(offset)


def _generator_of(device: torch.device) -> torch.Generator | None:
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else None


@contextmanager
def _random_numbers_of(state: _RandomState | None, device: torch.device) -> Iterator[None]:
    """torch's generators as they were, and afterwards as they are now."""
    if state is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        state.set(device)
        yield
