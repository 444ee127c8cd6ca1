"""Parts of one micro-batch take turns on a device: one computes while the tensors of the others travel.

A layer that communicates is written as steps: a generator that yields wherever something of its own is under
way. Two parts of the batch, one turn apart (Domino, arXiv 2409.15241), S for the short step between two
communications, 1 and 2 for the halves of attention or MLP, ``g`` a gather, ``r`` a reduce-scatter:

    part A     S   1       2   S   1       2   S
    part B   2   S   1       2   S   1       2
    device   2 S S 1 1 ... one after the other, never idle while
    network    gA..gB..rA..rB..gA.. each has the length of a half to arrive

Autograd runs nodes in the reverse order of their creation, so the backward takes the same turns backwards:
what was waited for is posted, what was posted is waited for.

Sequences do not meet each other, so a micro-batch of several is cut in sequences. A single one is cut in
positions, each rank's share in equal parts, which meet in attention: there a layer asks for the `Whole`.

Legend: B batch, S sequence, H hidden, P positions of one part in each rank's share.
"""

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby
from typing import Protocol

import torch
from torch import nn

from myriad.model.boundary import Boundary
from myriad.model.definition import Context
from myriad.model.parts import num_parts, part_sizes
from myriad.model.residual import Residual

__all__ = ["LayerSteps", "SteppedLayer", "Steps", "Whole", "run_layers"]


class Whole:
    """A layer's wish for ``function`` of every position's ``x`` ``[B, S, ...]``, of which it has its part;
    ``result`` is its part of that, when the layer is called again."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
        self.function, self.x = function, x
        self.result = x

    def fulfil(self) -> None:
        """For a part that has every position."""
        self.result = self.function(self.x)


Steps = Generator[Whole | None, None, torch.Tensor]
"""Yields where another part may run."""
LayerSteps = Generator[Whole | None, None, torch.Tensor | Residual]
"""Gives the layer's output, of which the last sum may be left to the next layer."""


class SteppedLayer(nn.Module):
    """A layer that says where it waits."""

    boundary: Boundary
    takes_tokens = False
    """Its input is whole on every rank (token ids), not this rank's share."""

    def steps(self, x: torch.Tensor, context: Context) -> LayerSteps:
        """The forward pass."""
        raise NotImplementedError

    def steps_after(self, x: Residual, context: Context) -> LayerSteps:
        """The forward pass after a layer that left its last sum to this one."""
        return self.steps(x.total(), context)

    def position_bytes(self, x: torch.Tensor) -> int:
        """Of one position of the residual stream, given the layer's input."""
        return x.shape[-1] * x.element_size()

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        return finish(self.steps(x, context))


def finish(steps: LayerSteps) -> torch.Tensor:
    """The output of steps that nobody shares the device with."""
    while not isinstance(step := _next(steps), torch.Tensor):
        if step is not None:
            step.fulfil()
    return step


def run_layers(layers: Iterable[nn.Module], x: torch.Tensor, context: Context) -> torch.Tensor:
    """Each layer on the output of the one before; where they communicate, in parts that take turns."""
    for stepped, run in groupby(layers, lambda layer: isinstance(layer, SteppedLayer)):
        if stepped:
            x = _run_stepped([layer for layer in run if isinstance(layer, SteppedLayer)], x, context)
        else:
            for layer in run:
                x = layer(x, context)
    return x


def _run_stepped(layers: Sequence[SteppedLayer], x: torch.Tensor, context: Context) -> torch.Tensor:
    cut = _choose_cut(layers[0], x)
    if cut is None:
        return finish(_through(layers, x, context))
    inputs = cut.inputs(x, takes_tokens=layers[0].takes_tokens)
    pairs = zip(inputs, cut.contexts(context, x), strict=True)
    outputs = take_turns([_through(layers, *pair) for pair in pairs], cut)
    return torch.stack(outputs).sum() if outputs[0].ndim == 0 else torch.cat(outputs, cut.dim)


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
    """The same steps without wishes: this part has every position."""
    while not isinstance(step := _next(steps), torch.Tensor):
        if step is None:
            yield None
        else:
            step.fulfil()
    return step


class Cut(Protocol):
    """How a micro-batch is cut in parts."""

    @property
    def dim(self) -> int:
        """Along which the parts of the residual stream are put together again."""
        ...

    def inputs(self, x: torch.Tensor, *, takes_tokens: bool) -> Sequence[torch.Tensor]: ...

    def contexts(self, context: Context, x: torch.Tensor) -> Sequence[Context]: ...

    def steps(self, steps: LayerSteps) -> LayerSteps:
        """What the turns see of one part's steps."""
        ...

    def fulfil(self, wishes: Sequence[Whole]) -> None:
        """The same wish of every part."""
        ...


@dataclass(frozen=True)
class _Sequences:
    """Each part some of the sequences."""

    sizes: list[int]
    dim = 0

    def inputs(self, x: torch.Tensor, *, takes_tokens: bool) -> Sequence[torch.Tensor]:
        return x.split(self.sizes)

    def contexts(self, context: Context, x: torch.Tensor) -> Sequence[Context]:
        targets, samples = (
            [None] * len(self.sizes) if values is None else values.split(self.sizes)
            for values in (context.targets, context.samples)
        )
        pairs = zip(targets, samples, strict=True)
        return [replace(context, targets=target, samples=sample) for target, sample in pairs]

    def steps(self, steps: LayerSteps) -> LayerSteps:
        return _by_itself(steps)

    def fulfil(self, wishes: Sequence[Whole]) -> None:
        raise AssertionError("a part of whole sequences has every position")


@dataclass(frozen=True)
class _Positions:
    """Each part some of the positions in each rank's share of the sequence."""

    sizes: list[int]
    rank: int
    num_ranks: int
    dim = 1

    def inputs(self, x: torch.Tensor, *, takes_tokens: bool) -> Sequence[torch.Tensor]:
        return self._of_whole(x) if takes_tokens else x.split(self.sizes, 1)

    def contexts(self, context: Context, x: torch.Tensor) -> Sequence[Context]:
        targets = [None] * len(self.sizes) if context.targets is None else self._of_whole(context.targets)
        starts = [self.rank * sum(self.sizes) + sum(self.sizes[:part]) for part in range(len(self.sizes))]
        pairs = zip(targets, starts, strict=True)
        return [replace(context, targets=target, first_position=start) for target, start in pairs]

    def steps(self, steps: LayerSteps) -> LayerSteps:
        return steps

    def fulfil(self, wishes: Sequence[Whole]) -> None:
        shares = [wish.x.unflatten(1, (self.num_ranks, -1)) for wish in wishes]  # [B, tp, P, ...]
        results = self._of_whole(wishes[0].function(torch.cat(shares, 2).flatten(1, 2)))
        for wish, result in zip(wishes, results, strict=True):
            wish.result = result

    def _of_whole(self, x: torch.Tensor) -> list[torch.Tensor]:
        """``[B, S, ...]`` to what each part has of it, ``[B, tp P, ...]``."""
        shares = x.unflatten(1, (self.num_ranks, -1)).split(self.sizes, 2)
        return [share.flatten(1, 2) for share in shares]


def _choose_cut(layer: SteppedLayer, x: torch.Tensor) -> Cut | None:
    """Whole sequences where there are two; ``None`` where there is nothing to hide or nothing to cut."""
    boundary = layer.boundary
    if boundary.chunks == 1 or boundary.size == 1 or x.is_meta:
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
    """Runs every part to its end, a turn behind the one before it."""
    parts = [cut.steps(part) for part in parts]
    reached = _run_round(parts, together=False)
    while True:
        wishes = [wish for wish in reached if isinstance(wish, Whole)]
        if not wishes:
            return [output for output in reached if isinstance(output, torch.Tensor)]
        cut.fulfil(wishes)
        reached = _run_round(parts, together=True)


def _run_round(parts: Sequence[LayerSteps], *, together: bool) -> list[Whole | torch.Tensor]:
    """Runs every part up to its next wish or its end. Part p lets p turns go by, first of all or, when they
    come ``together`` from a wish, after a step."""
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
    """What the next step ends in: a wish, the output, or just a moment for others."""
    try:
        return next(steps)
    except StopIteration as end:
        output: torch.Tensor | Residual = end.value
        return output.total() if isinstance(output, Residual) else output
