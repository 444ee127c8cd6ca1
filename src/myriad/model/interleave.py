"""Alternation of the parts of one micro-batch on a device: one part computes while the others communicate.

A layer that communicates is written as steps: a generator that yields wherever it has a collective in flight.
Two parts of the batch alternate, one turn apart (Domino, arXiv 2409.15241). S is the short step between two
collectives, 1 and 2 are the halves of attention or MLP, ``g`` is a gather, ``r`` a reduce-scatter:

    part A     S   1       2   S   1       2   S
    part B   2   S   1       2   S   1       2
    device   2 S S 1 1 ... one after the other, never idle while
    network    gA..gB..rA..rB..gA.. each has the length of a half to arrive

Autograd runs nodes in the reverse order of their creation, so the backward alternates in reverse order: it
issues what the forward waited for, and waits for what the forward issued.

Sequences are independent, so a micro-batch of several is cut into sequences. A single sequence is cut into
ranges of positions, of which every rank has a share. The ranges meet in attention: there a layer requests the
`Whole`. The ranks gather a part as one range of the sequence, so adjacent parts form the sequence, and
splitting it again copies nothing. Two parts of 8 positions on two ranks:

    position   0 1 2 3 | 4 5 6 7
    part       0 0 0 0 | 1 1 1 1
    rank       0 0 1 1 | 0 0 1 1

Legend: B batch, S sequence, H hidden, P positions of one part on each rank.
"""

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, groupby
from typing import Protocol

import torch
from torch import nn

from myriad.kernels.memory_order import lay_gradient_first, lay_sequence_first
from myriad.kernels.side_by_side import PartSlots, places_of
from myriad.model.boundary import Boundary
from myriad.model.definition import Context
from myriad.model.overlap_parts import num_parts, part_sizes
from myriad.model.residual import Residual

__all__ = ["LayerSteps", "SteppedLayer", "Steps", "Whole", "layers_in_steps", "run_layers"]


class Whole:
    """A layer's request for ``function`` of every position's ``x`` ``[B, S, ...]``, of which the layer has
    its part. When the layer resumes, ``result`` is its part of the result."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
        self.function, self.x = function, x
        self.result = x

    def fulfil(self) -> None:
        """Compute the result for a part that has every position."""
        self.result = self.function(self.x)


Steps = Generator[Whole | None, None, torch.Tensor]
"""Steps of a layer. The generator yields where another part may run."""
LayerSteps = Generator[Whole | None, None, torch.Tensor | Residual]
"""Steps that return the layer's output. Its last addition may be left to the next layer."""


class SteppedLayer(nn.Module):
    """A layer whose steps show where it waits."""

    boundary: Boundary
    takes_tokens = False
    """Whether the input is whole on every rank (token ids) instead of this rank's share."""

    def steps(self, x: torch.Tensor, context: Context) -> LayerSteps:
        """Run the forward pass as steps."""
        raise NotImplementedError

    def steps_after(self, x: Residual, context: Context) -> LayerSteps:
        """Run the forward pass after a layer that left its last addition to this one."""
        return self.steps(x.total(), context)

    def position_bytes(self, x: torch.Tensor) -> int:
        """Return the bytes of one position of the residual stream, given the layer's input."""
        return x.shape[-1] * x.element_size()

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        return finish(self.steps(x, context))


def finish(steps: LayerSteps) -> torch.Tensor:
    """Run steps alone on the device and return their output."""
    while not isinstance(step := _next(steps), torch.Tensor):
        if step is not None:
            step.fulfil()
    return step


def run_layers(layers: Iterable[nn.Module], x: torch.Tensor, context: Context) -> torch.Tensor:
    """Run each layer on the output of the layer before. Layers that communicate run in alternating parts."""
    for stepped, run in groupby(layers, lambda layer: isinstance(layer, SteppedLayer)):
        if stepped:
            x = _run_stepped([layer for layer in run if isinstance(layer, SteppedLayer)], x, context)
        else:
            for layer in run:
                x = layer(x, context)
    return x


def layers_in_steps(layers: Iterable[nn.Module], x: torch.Tensor, context: Context) -> Steps:
    """Run each layer on the output of the layer before, without parts. Yields where tokens have left for
    experts, or results for their tokens."""
    for stepped, run in groupby(layers, lambda layer: isinstance(layer, SteppedLayer)):
        if not stepped:
            for layer in run:
                x = layer(x, context)
            continue
        own = [layer for layer in run if isinstance(layer, SteppedLayer)]
        boundary, lies_first = own[0].boundary, own[0].boundary.sequence_first and not x.is_meta
        steps = _where_posted(_through(own, _input(x, lies_first), context), boundary)
        x = _output((yield from _by_itself(steps)), lies_first)
    return x


def _run_stepped(layers: Sequence[SteppedLayer], x: torch.Tensor, context: Context) -> torch.Tensor:
    cut, lies_first = _choose_cut(layers[0], x), layers[0].boundary.sequence_first and not x.is_meta
    if cut is None:
        return _output(finish(_through(layers, _input(x, lies_first), context)), lies_first)
    inputs = [_input(part, lies_first) for part in cut.inputs(x, takes_tokens=layers[0].takes_tokens)]
    pairs = zip(inputs, cut.contexts(context, x), strict=True)
    parts = [_through(layers, *pair) for pair in pairs]
    if layers[0].boundary.size == 1:
        parts = [_where_posted(part, layers[0].boundary) for part in parts]
    if layers[0].boundary.joins_parts:
        places = places_of([part.shape[0] * part.shape[1] for part in inputs])
        parts = [_at(*pair, layers[0].boundary) for pair in zip(places, parts, strict=True)]
    outputs = take_turns(parts, cut)
    if outputs[0].ndim < 2:
        return torch.stack(outputs).sum(0)
    return torch.cat([_output(part, lies_first) for part in outputs], cut.dim)


def _where_posted(steps: LayerSteps, boundary: Boundary) -> LayerSteps:
    """Yield only where tokens have left for experts: without tensor parallelism nothing else travels, and a
    turn then takes from one exchange to the next, while that of the other part arrives."""
    boundary.has_posted = False  # steps that ran alone have left it set
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            output: torch.Tensor | Residual = end.value
            return output
        if step is not None or boundary.has_posted:
            boundary.has_posted = False
            yield step


def _at(place: PartSlots, steps: LayerSteps, boundary: Boundary) -> LayerSteps:
    """Run the steps with ``place`` as the part's place among the parts."""
    assert boundary.later is not None, "nothing is cut in parts where nothing is left for later"
    while True:
        boundary.place, boundary.later.num_parts = place, place.num_parts
        try:
            step = next(steps)
        except StopIteration as end:
            output: torch.Tensor | Residual = end.value
            return output
        finally:
            boundary.place, boundary.later.num_parts = None, 1
        yield step


def _input(part: torch.Tensor, lies_first: bool) -> torch.Tensor:
    """Return the part in the memory order that the layers and their results use."""
    return lay_sequence_first(part) if lies_first and len(part) > 1 else part


def _output(part: torch.Tensor, lies_first: bool) -> torch.Tensor:
    """Return the part unchanged; its gradient gets the memory order that the layers use."""
    return lay_gradient_first(part) if lies_first and part.ndim == 3 and len(part) > 1 else part


def _through(layers: Sequence[SteppedLayer], x: torch.Tensor, context: Context) -> LayerSteps:
    output: torch.Tensor | Residual = x
    del x
    for layer in layers:
        if isinstance(output, Residual):
            steps = layer.steps_after(output, context)
        else:
            steps = layer.steps(output, context)
        del output  # the branch is not needed once it is added
        output = yield from steps
    return output


def _by_itself(steps: LayerSteps) -> Steps:
    """Run the steps of a part that has every position, and fulfil its requests directly."""
    while not isinstance(step := _next(steps), torch.Tensor):
        if step is None:
            yield None
        else:
            step.fulfil()
    return step


class Cut(Protocol):
    """A way to cut a micro-batch into parts."""

    @property
    def dim(self) -> int:
        """The dimension along which the parts of the residual stream are concatenated."""
        ...

    def inputs(self, x: torch.Tensor, *, takes_tokens: bool) -> Sequence[torch.Tensor]: ...

    def contexts(self, context: Context, x: torch.Tensor) -> Sequence[Context]: ...

    def steps(self, steps: LayerSteps) -> LayerSteps:
        """Return the steps of one part as `take_turns` runs them."""
        ...

    def fulfil(self, wishes: Sequence[Whole]) -> None:
        """Fulfil the same request of every part."""
        ...


@dataclass(frozen=True)
class _Sequences:
    """Cut by sequences: each part has some of them."""

    sizes: list[int]
    dim = 0

    def inputs(self, x: torch.Tensor, *, takes_tokens: bool) -> Sequence[torch.Tensor]:
        return x.split(self.sizes)

    def contexts(self, context: Context, x: torch.Tensor) -> Sequence[Context]:
        keys = ("targets", "samples", "documents", "share", "sequence_targets")
        of_sequences = (getattr(context, key) for key in keys)
        parts = zip(
            *(
                [None] * len(self.sizes) if values is None else values.split(self.sizes)
                for values in of_sequences
            ),
            strict=True,
        )
        return [replace(context, **dict(zip(keys, values, strict=True))) for values in parts]

    def steps(self, steps: LayerSteps) -> LayerSteps:
        return _by_itself(steps)

    def fulfil(self, wishes: Sequence[Whole]) -> None:
        raise AssertionError("a part of whole sequences has every position")


@dataclass(frozen=True)
class _Positions:
    """Cut by positions: each part is a range of the sequence, and every rank has an equal share of it."""

    sizes: list[int]
    rank: int
    num_ranks: int
    dim = 1

    def inputs(self, x: torch.Tensor, *, takes_tokens: bool) -> Sequence[torch.Tensor]:
        return self._of_whole(x) if takes_tokens else x.split(self.sizes, 1)

    def contexts(self, context: Context, x: torch.Tensor) -> Sequence[Context]:
        targets = [None] * len(self.sizes) if context.targets is None else self._of_whole(context.targets)
        ends = list(accumulate(size * self.num_ranks for size in self.sizes))
        following = [None if context.targets is None else context.targets[:, end:] for end in ends]
        begins = (0, *ends[:-1])
        starts = [begin + self.rank * size for begin, size in zip(begins, self.sizes, strict=True)]
        parts = zip(targets, begins, following, starts, strict=True)
        return [
            replace(context, targets=target, first_target=begin, following=after, first_position=start)
            for target, begin, after, start in parts
        ]

    def steps(self, steps: LayerSteps) -> LayerSteps:
        return steps

    def fulfil(self, wishes: Sequence[Whole]) -> None:
        results = self._of_whole(wishes[0].function(torch.cat([wish.x for wish in wishes], 1)))
        for wish, result in zip(wishes, results, strict=True):
            wish.result = result

    def _of_whole(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Split ``[B, S, ...]`` into the parts' ranges, ``[B, tp P, ...]`` each."""
        return x.split([size * self.num_ranks for size in self.sizes], 1)


def _choose_cut(layer: SteppedLayer, x: torch.Tensor) -> Cut | None:
    """Choose the cut: by sequences if there are several; ``None`` if there is nothing to overlap or to
    cut."""
    boundary = layer.boundary
    if boundary.chunks == 1 or not boundary.communicates or x.is_meta:
        return None
    share = x.shape[1] // boundary.size if layer.takes_tokens else x.shape[1]
    chunks, least = boundary.chunks, boundary.message_bytes
    cut = {"chunks": chunks, "message_bytes": least}
    parts = int(num_parts(len(x), share, layer.position_bytes(x), **cut, on_cpu=not x.is_cuda))
    length, tokens = (len(x), share * boundary.size) if len(x) > 1 else (share, boundary.size)
    multiple = boundary.token_multiple // math.gcd(boundary.token_multiple, tokens)
    sizes = part_sizes(length, parts, multiple if length % multiple == 0 else 1)
    if len(sizes) == 1:
        return None
    return _Sequences(sizes) if len(x) > 1 else _Positions(sizes, boundary.rank, boundary.size)


def take_turns(parts: Sequence[LayerSteps], cut: Cut) -> list[torch.Tensor]:
    """Run every part to its end, each one turn after the part before."""
    parts = [cut.steps(part) for part in parts]
    reached = _run_round(parts, together=False)
    while True:
        wishes = [wish for wish in reached if isinstance(wish, Whole)]
        if not wishes:
            return [output for output in reached if isinstance(output, torch.Tensor)]
        cut.fulfil(wishes)
        reached = _run_round(parts, together=True)


def _run_round(parts: Sequence[LayerSteps], *, together: bool) -> list[Whole | torch.Tensor]:
    """Run every part up to its next request or its end. Part p skips p turns: at the start or, if the parts
    resume ``together`` from a request, after one step."""
    reached: dict[int, Whole | torch.Tensor] = {}
    first = int(together)
    for turn in count():
        for index, part in enumerate(parts):
            if index not in reached and not first <= turn < first + index:
                step = _next(part)
                if step is not None:
                    reached[index] = step
        if len(reached) == len(parts):
            break
    return [reached[index] for index in range(len(parts))]


def _next(steps: LayerSteps) -> Whole | torch.Tensor | None:
    """Run the next step. Return its request, the output, or None if other parts may run."""
    try:
        return next(steps)
    except StopIteration as end:
        output: torch.Tensor | Residual = end.value
        return output.total() if isinstance(output, Residual) else output
