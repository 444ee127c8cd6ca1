"""Bytes of everything that a pipeline rank of one layout may hold, by stage of its program.

What the layers of a stage keep of a micro-batch, and hold on the way, is the same for every micro-batch but
one kind: where a rank does a forward's own backward next, the last layer keeps its graph instead of computing
it again. So there are two answers for each stage, and each is made once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from myriad.model.activations import LayerKind
from myriad.planner.activations import Part, layer_held, message_bytes, product_inputs
from myriad.planner.layer_memory import layer_elements
from myriad.planner.work import Recompute, Work
from myriad.program.partition import num_recomputed

__all__ = ["StageBytes", "StageHeld"]


@dataclass(frozen=True)
class _LayerHeld:
    """`myriad.planner.activations.Held`, as numbers."""

    kept: float
    forward: float
    backward: float


@dataclass(frozen=True)
class StageHeld:
    """Of one micro-batch in the layers of a stage."""

    kept: float
    """From its forward to its backward, without the head's."""
    of_head: float
    """The head's of that time."""
    in_forward: tuple[float, float]
    """Most bytes beyond what was held before it, and how much of them is the head's."""
    in_backward: tuple[float, float]


class StageBytes:
    """Of one layout, with the layers of each stage of its program."""

    def __init__(self, work: Work, layers: Sequence[range], on_cpu: bool) -> None:
        self.work, self.layers, self.on_cpu = work, layers, on_cpu
        layout = work.layout
        turns = work.overlap.tensor_kind == "turns"
        self.part = Part(float(layout.tp), float(layout.micro_batch), work.value_bytes, on_cpu, turns)
        self.full = work.recompute == "full"
        self.message = float(message_bytes(work.model, work.practice, self.part))
        self._layers_held: dict[tuple[LayerKind, int, Recompute], _LayerHeld] = {}
        self._stages_held: dict[tuple[int, bool], StageHeld] = {}

    def kind(self, layer: int) -> LayerKind:
        """Of the pipeline's layers, the blocks between embedding and head."""
        if layer == 0:
            return "embedding"
        return "head" if layer == self.work.model.layers + 1 else "block"

    def held(self, stage: int, *, turns: bool) -> StageHeld:
        """``turns``: the rank does the backward of this micro-batch next."""
        key = stage, turns
        if key not in self._stages_held:
            self._stages_held[key] = self._stage_held(stage, turns)
        return self._stages_held[key]

    def _stage_held(self, stage: int, turns: bool) -> StageHeld:
        layers, recompute = self.layers[stage], self.work.recompute
        modes: list[Recompute] = [recompute] * len(layers)
        if self.full:
            again = num_recomputed(len(layers), self.work.layout.recompute_ratio)
            modes[again:] = ["none"] * (len(layers) - again)
        if turns and self.full:
            modes[-1] = "none"
        held = [self._layer_held(layer, mode) for layer, mode in zip(layers, modes, strict=True)]
        heads = [self.kind(layer) == "head" for layer in layers]
        on_the_way, so_far = [], 0.0
        for one, is_head in zip(held, heads, strict=True):
            own = one.kept + one.forward
            on_the_way.append((so_far + own, own if is_head else 0.0))
            so_far += one.kept
        on_the_way_back, gone = [], 0.0
        for one, is_head in zip(reversed(held), reversed(heads), strict=True):
            on_the_way_back.append((one.backward - gone, one.backward if is_head else 0.0))
            gone += one.kept
        return StageHeld(
            kept=sum(one.kept for one, is_head in zip(held, heads, strict=True) if not is_head),
            of_head=sum(one.kept for one, is_head in zip(held, heads, strict=True) if is_head),
            in_forward=max(on_the_way, key=lambda moment: moment[0]),
            in_backward=max(on_the_way_back, key=lambda moment: moment[0]),
        )

    def _layer_held(self, layer: int, recompute: Recompute) -> _LayerHeld:
        model, practice, kind = self.work.model, self.work.practice, self.kind(layer)
        block = (layer - 1) % len(model.window_pattern) if kind == "block" else 0
        key = kind, block, recompute
        if key not in self._layers_held:
            found = layer_held(model, practice, kind, block, self.part, recompute)
            self._layers_held[key] = _LayerHeld(
                float(found.kept), float(found.forward), float(found.backward)
            )
        return self._layers_held[key]

    def padded(self, elements: float) -> float:
        """To a multiple of the replicas."""
        ranks = self.work.layout.dp
        return -(-int(elements) // ranks) * ranks

    @cached_property
    def table(self) -> float:
        """Elements of what the first and the last stage share."""
        model = self.work.model
        return model.padded_vocabulary() * model.hidden / self.work.layout.tp if model.tied else 0.0

    @cached_property
    def _elements_of(self) -> dict[LayerKind, float]:
        kinds: tuple[LayerKind, ...] = ("embedding", "block", "head")
        tp = self.work.layout.tp
        return {kind: float(layer_elements(self.work.model, kind, tp)) for kind in kinds}

    def chunk(self, stage: int) -> float:
        """Elements of a stage of the program, without shared ones."""
        every = 0.0
        for kind in map(self.kind, self.layers[stage]):
            every += self._elements_of[kind]
            every -= self.table if kind != "block" else 0.0
        return self.padded(every)

    def products(self, stage: int) -> float:
        """Of one micro-batch, what is kept from the first half of a backward to the second."""
        blocks = sum(self.kind(layer) == "block" for layer in self.layers[stage])
        return blocks * float(product_inputs(self.work.model, self.part))

    def room(self, elements: float) -> float:
        """For what arrives of other ranks' gradients while a chunk is reduced."""
        ranks = self.work.layout.dp
        return 4 * elements * (ranks - 1 if self.on_cpu else min(ranks - 1, 1)) / ranks
