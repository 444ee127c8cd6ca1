"""What each action of a layout's program costs on a cluster.

forward, backward        seconds of a stage's layers for one micro-batch (`layers`)
gather, reduce           of a stage's parameters and gradients among data-parallel ranks (`data_sums`)
message                  of one activation or gradient to the next stage, each tensor-parallel rank its share
stall                    by snapshots, on average over steps (`saving`)
clip, update             reading and writing gradients, master values and moments of this rank's part
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce
from itertools import groupby
from operator import add

from myriad.model.config import ModelConfig
from myriad.planner.cluster import Cluster
from myriad.planner.collectives import group_along, message_seconds, sum_seconds
from myriad.planner.data_sums import DataSums
from myriad.planner.layers import (
    HIDES,
    LayerTimes,
    Slice,
    block_shares,
    block_times,
    embedding_times,
    head_times,
)
from myriad.planner.module_gathers import Module, ModuleGathers, module_order, step_seconds
from myriad.planner.operators import sweep_seconds
from myriad.planner.parts import Parts
from myriad.planner.saving import Saves, Saving
from myriad.planner.work import Work
from myriad.program.build import count_chunks
from myriad.program.partition import cut_ranges, num_recomputed, partition_layers
from myriad.program.schedules import stage_owners

__all__ = [
    "Costs",
    "StageCosts",
    "computed_pairs",
    "cut_layers",
    "layer_parameters",
    "optimizer_bytes",
    "stage_layers",
]


def layer_parameters(model: ModelConfig) -> list[int]:
    """Of embedding, blocks and head; what the two share counts for both."""
    one = model.model_copy(update={"layers": 1}).num_parameters(embeddings=False)
    block = model.model_copy(update={"layers": 2}).num_parameters(embeddings=False) - one
    rows = model.padded_vocabulary() * model.hidden
    positions = model.sequence * model.hidden if model.position == "learned" else 0
    return [rows + positions, *([block] * model.layers), rows + one - block]


def cut_layers(model: ModelConfig, partition: str, num_stages: int) -> list[range]:
    """Layers of each of so many stages, as the runtime cuts them. Raises `BadInputError`."""
    return list(_cut_layers(model, partition, num_stages))


@lru_cache(maxsize=256)
def _cut_layers(model: ModelConfig, partition: str, num_stages: int) -> tuple[range, ...]:
    kinds = ("Embedding", *(("Block",) * model.layers), "Head")
    costs = None if partition == "uniform" else [float(count) for count in layer_parameters(model)]
    return tuple(partition_layers(partition, num_stages, kinds, costs))


def stage_layers(work: Work) -> list[range]:
    """Layers of each stage of the layout."""
    return cut_layers(work.model, work.layout.partition, work.layout.num_stages)


@lru_cache(maxsize=16)
def _layer_kinds(model: ModelConfig) -> tuple[str, ...]:
    """Return the kind of each layer (embedding, blocks, head); layers of one kind cost the same."""
    return ("embedding", *(f"block {model.layer_window(i)}" for i in range(model.layers)), "head")


def optimizer_bytes(optimizer: str, value_bytes: int) -> float:
    """Read and written for each parameter: float32 master value and two moments both ways, the gradient, the
    value that is computed with; LAMB goes over values and updates once more for their norms."""
    return 24.0 + 4.0 + value_bytes + (16.0 if optimizer == "lamb" else 0.0)


@dataclass(frozen=True)
class StageCosts:
    """Of one stage of the program (a chunk of a stage of the layout)."""

    times: LayerTimes
    """Of one micro-batch."""
    again: Parts
    """What its backward computes once more."""
    parameters: float
    """Of one tensor-parallel rank."""
    forward: float
    backward_input: float
    """With what is computed again."""
    backward_weight: float
    gather: float
    reduce: float
    update: float

    @property
    def parts(self) -> Parts:
        """Of one micro-batch, forward and backward."""
        return self.times.forward + self.times.backward_input + self.times.backward_weight

    @property
    def backward(self) -> float:
        """Both halves."""
        return self.backward_input + self.backward_weight


class Costs:
    """Of one layout on one cluster."""

    def __init__(self, work: Work, cluster: Cluster) -> None:
        self.work, self.cluster = work, cluster
        layout, overlap, practice = work.layout, work.overlap, work.practice
        self.slice = Slice(
            cluster,
            practice,
            float(layout.tp),
            float(layout.micro_batch),
            work.value_bytes,
            overlap,
            HIDES[overlap.tensor],
        )
        replica_stride, stage_stride = layout.tp * layout.pp, layout.tp
        if practice.stages_apart:
            replica_stride, stage_stride = layout.tp, layout.tp * layout.dp
        self.pipeline = group_along(cluster, float(layout.pp), float(stage_stride))
        self.data_sums = DataSums(cluster, work.comm, layout.dp, replica_stride)
        self.data = self.data_sums.ring
        self.layers_of_stage = stage_layers(work)
        self.num_chunks = count_chunks(layout, overlap, self.layers_of_stage)

    @cached_property
    def stages(self) -> list[StageCosts]:
        """Of every stage of the program."""
        found: dict[tuple[str, ...], StageCosts] = {}
        kinds = _layer_kinds(self.work.model)
        stages = []
        for own in cut_ranges(self.layers_of_stage, self.num_chunks):
            key = kinds[own.start : own.stop]
            if key not in found:
                found[key] = self._stage(own)
            stages.append(found[key])
        return stages

    @cached_property
    def _times(self) -> dict[str, LayerTimes]:
        model = self.work.model
        times = {"embedding": embedding_times(model, self.slice), "head": head_times(model, self.slice)}
        for layer in range(min(model.layers, len(model.window_pattern))):
            kind = f"block {model.layer_window(layer)}"
            if kind not in times:
                times[kind] = block_times(model, self.slice, computed_pairs(model, layer))
        return times

    def _stage(self, own: Sequence[int]) -> StageCosts:
        kinds, work = _layer_kinds(self.work.model), self.work
        counts = {kind: len(list(group)) for kind, group in groupby(sorted(kinds[i] for i in own))}
        times = reduce(add, (self._times[kind].times(float(n)) for kind, n in counts.items()))
        every = layer_parameters(work.model)
        parameters = sum(every[layer] for layer in own) / work.layout.tp
        again = self._again([kinds[layer] for layer in own])
        inputs = float(times.backward_input.total + again.total)
        gather, reduced, update = self._data_parallel(parameters)
        if self._by_module:
            forward, backward = self._module_seconds([kinds[layer] for layer in own])
            return StageCosts(times, again, parameters, forward, backward, 0.0, 0.0, 0.0, update)
        return StageCosts(
            times=times,
            again=again,
            parameters=parameters,
            forward=float(times.forward.total),
            backward_input=inputs,
            backward_weight=float(times.backward_weight.total),
            gather=gather,
            reduce=reduced,
            update=update,
        )

    @property
    def _by_module(self) -> bool:
        """Whether parameters are gathered by modules while they compute, not by the program's actions."""
        layout = self.work.layout
        return self.work.practice.module_gathers is not None and layout.zero == 3 and layout.dp > 1

    def _module_seconds(self, kinds: Sequence[str]) -> tuple[float, float]:
        """Return forward and backward of a micro-batch with its gathers and reductions. ``kinds`` of the
        layers."""
        keys = self.work.practice.module_gathers
        assert keys is not None
        modules: list[Module] = []
        layers: list[range] = []
        for kind in kinds:
            found = self._modules(kind, keys)
            layers.append(range(len(modules), len(modules) + len(found)))
            modules += found
        order = module_order(layers, self.work.recompute == "full")
        return step_seconds(modules, order, keys, float(self.data.busy_ratio))

    def _modules(self, kind: str, keys: ModuleGathers) -> list[Module]:
        """Return the modules of a layer: its seconds are shared out by what each multiplies."""
        model, times = self.work.model, self._times[kind]
        if kind in ("embedding", "head"):
            parameters = layer_parameters(model)[0 if kind == "embedding" else -1]
            shares = {kind: (float(parameters), 1.0)}
        else:
            shares = block_shares(model)
        selective = self.work.recompute == "selective" and kind != "head"
        backward = times.backward_input + times.backward_weight
        backward = backward + (times.again_selective if selective else Parts())

        def seconds(turn: Parts, name: str, share: float) -> float:
            scores = turn.attention if name == "output" else 0.0
            return float(share * (turn.matmul + turn.memory + turn.tensor) + scores)

        found = []
        for name, (elements, share) in shares.items():
            held = elements / self.work.layout.tp
            turns = seconds(times.forward, name, share), seconds(backward, name, share)
            found.append(Module(name, held, *turns, *self._module_communication(held, keys)))
        return found

    def _module_communication(self, elements: float, keys: ModuleGathers) -> tuple[float, float]:
        work, accelerator = self.work, self.cluster.accelerator
        gathered, reduced = elements * work.value_bytes, elements * work.practice.gradient_bytes
        copied = sweep_seconds(accelerator, keys.gather_passes * gathered, 2.0)
        divided = sweep_seconds(accelerator, keys.reduce_passes * reduced, 2.0)
        gather = self.data_sums.half_seconds(gathered) + copied
        return float(gather), float(self.data_sums.half_seconds(reduced) + divided)

    def _again(self, kinds: Sequence[str]) -> Parts:
        """What the backward of a stage computes once more: not the head, whose backward comes at once."""
        if self.work.recompute == "none":
            return Parts()
        selective = self.work.recompute == "selective"
        count = len(kinds) if selective else num_recomputed(len(kinds), self.work.layout.recompute_ratio)
        again = Parts()
        for kind, number in sorted(Counter(kinds[:count]).items()):
            times = self._times[kind]
            one = times.again_selective if selective else times.forward
            again = again + (Parts() if kind == "head" else one).times(float(number))
        return again

    def _data_parallel(self, parameters: float) -> tuple[float, float, float]:
        work, sums = self.work, self.data_sums
        gradients = parameters * work.practice.gradient_bytes
        zero, dp = work.layout.zero, work.layout.dp
        gather = sums.half_seconds(parameters * work.value_bytes) if zero else 0.0
        reduced = sums.half_seconds(gradients) if zero else sums.whole_seconds(gradients)
        own = parameters / (dp if zero else 1)
        update = sweep_seconds(
            self.cluster.accelerator, own * optimizer_bytes(work.optimizer, work.value_bytes), 2.0
        )
        return float(gather), float(reduced), float(update)

    @cached_property
    def busiest_rank(self) -> tuple[Parts, Parts]:
        """What the pipeline rank with most to compute does in one iteration, without waiting, and what it
        computes once more."""
        layout = self.work.layout
        owners = stage_owners(layout.schedule_name, layout.pp, layout.virtual_stages)
        ranks = [(Parts(), Parts()) for _ in range(layout.pp)]
        for index, stage in enumerate(self.stages):
            rank = owners[index // self.num_chunks]
            parts, again = ranks[rank]
            ranks[rank] = parts + stage.parts, again + stage.again
        parts, again = max(ranks, key=lambda rank: float(rank[0].total + rank[1].total))
        count = float(self.work.num_micro_batches)
        return parts.times(count), again.times(count)

    @cached_property
    def saving(self) -> Saving:
        """What snapshots cost."""
        work = self.work
        return Saving(
            self.cluster, work.saves, float(sum(layer_parameters(work.model))), not work.overlap.checkpoint
        )

    @cached_property
    def most_parameters(self) -> float:
        """Of a rank."""
        layout = self.work.layout
        owners = stage_owners(layout.schedule_name, layout.pp, layout.virtual_stages)
        held = [0.0] * layout.pp
        for index, stage in enumerate(self.stages):
            held[owners[index // self.num_chunks]] += stage.parameters
        return max(held)

    def stall(self, seconds: float) -> float:
        """Of an iteration that takes ``seconds`` without snapshots, what they add."""
        work = self.work
        if work.saves == Saves():
            return 0.0
        held = self.most_parameters
        updated = held / (work.layout.dp if work.layout.zero else 1)
        update = sweep_seconds(
            self.cluster.accelerator, updated * optimizer_bytes(work.optimizer, work.value_bytes), 2.0
        )
        return float(self.saving.stall_seconds(seconds, float(update), held / work.layout.dp))

    @cached_property
    def message(self) -> float:
        """One activation or gradient to the next stage."""
        work = self.work
        tokens = work.layout.micro_batch * work.model.sequence
        return float(
            message_seconds(self.pipeline, tokens * work.model.hidden * work.value_bytes / work.layout.tp)
        )

    def message_between(self, source: int, target: int) -> float:
        """The same from one pipeline rank to another: as between all, where nothing is known of the way."""
        return self.message

    @cached_property
    def load(self) -> float:
        """Until the batch is there."""
        return self.work.practice.host_seconds

    def clip(self, parameters: float) -> float:
        """The norm of a rank's gradients, and of all ranks'."""
        work = self.work
        own = parameters / (work.layout.dp if work.layout.zero else 1)
        everybody = group_along(self.cluster, float(work.layout.world), 1.0)
        return float(sweep_seconds(self.cluster.accelerator, 4 * own, 2.0) + sum_seconds(everybody, 8.0))

    @cached_property
    def tied(self) -> float:
        """Gradients of what the first and the last stage share, summed between the two."""
        model, layout = self.work.model, self.work.layout
        group = replace(self.pipeline, size=2.0)
        rows = model.padded_vocabulary() * model.hidden / layout.tp
        return float(sum_seconds(group, rows * self.work.practice.gradient_bytes))


def computed_pairs(model: ModelConfig, layer: int) -> float:
    """Query-key pairs of a sequence that a causal kernel computes: half of them, and of windows the band."""
    sequence, window = model.sequence, model.layer_window(layer)
    if window is None or window >= sequence:
        return sequence * (sequence + 1) / 2
    return window * sequence - window * (window - 1) / 2
