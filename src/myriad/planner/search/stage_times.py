"""Seconds of layers and ranks for all layouts of a grid at once: `layer_costs` is called once for all, then
indexed.

Legend: K kinds of layers, M micro-batch sizes, V ways to cut into stages, R recomputations, T values of
overlap.tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from myriad.planner.cost.context_costs import ONE_RANK_OF_CONTEXT, ContextGrid
from myriad.planner.cost.expert_ranks import ONE_RANK, ExpertGrid
from myriad.planner.cost.head_costs import embedding_times, head_times
from myriad.planner.cost.layer_costs import LayerTimes, block_times
from myriad.planner.cost.product_costs import OVERLAP_MODES, LayerContext
from myriad.planner.cost.stage_layers import (
    computed_pairs,
    cut_layers,
    first_alike,
    layer_parameters,
    routed_parameters,
)
from myriad.planner.search.layout_problem import LayoutProblem
from myriad.planner.search.layout_space import LayoutGrid, divisors, tensor_degrees
from myriad.planner.workload import rank_model
from myriad.program.schedules import IN_A_V
from myriad.program.vee import vee_stage_rank

__all__ = ["Array", "GridTimes", "LayerAssignment", "LayerTable"]

Array = npt.NDArray[np.float64]


class LayerTable:
    """Seconds of every kind of layer, tensor-parallel degree, micro-batch and tensor overlap."""

    def __init__(self, problem: LayoutProblem) -> None:
        self.problem, model = problem, problem.model
        self.degrees = tensor_degrees(model)
        batch = problem.global_batch
        self.sizes = divisors(batch)
        self.layer_kinds = np.array(self._layer_kinds())
        """Kind of each layer, embedding and head included."""
        self.overlap_mode = [OVERLAP_MODES[kind] for kind in problem.tensors]
        self.num_kinds = int(self.layer_kinds.max()) + 1
        self._tp = {degree: index for index, degree in enumerate(self.degrees)}
        self._size = {size: index for index, size in enumerate(self.sizes)}
        self._lengths: dict[int, npt.NDArray[np.int64]] = {}
        self._counts: dict[tuple[int, int, bool], tuple[npt.NDArray[np.int64], Array]] = {}
        self._held: dict[tuple[int, int], tuple[Array, Array]] = {}
        self._cuts: dict[tuple[int, int, bool, int, int], LayerAssignment] = {}

    def _layer_kinds(self) -> list[int]:
        """Return the kind of each layer: 0 embedding, 1 head, then one for each kind of block."""
        firsts = first_alike(self.problem.model)
        numbers = {first: 2 + number for number, first in enumerate(dict.fromkeys(firsts))}
        return [0, *(numbers[first] for first in firsts), 1]

    @cached_property
    def seconds(self) -> Array:
        """Seconds of each pass where no ranks share experts, ``[pass, kind, tp, micro-batch, tensor]``."""
        return self._seconds(self.degrees, self.sizes)

    def _seconds(
        self,
        degrees: Sequence[int],
        sizes: Sequence[int],
        experts: ExpertGrid = ONE_RANK,
        context: ContextGrid = ONE_RANK_OF_CONTEXT,
    ) -> Array:
        """Return the seconds ``[pass, kind, tp, micro-batch, tensor]``."""
        problem, num_ranks = self.problem, context.num_ranks
        model = rank_model(problem.model, num_ranks)
        grid = np.meshgrid(degrees, sizes, self.overlap_mode, indexing="ij")
        tp, size, overlap_mode = (axis.astype(float) for axis in grid)
        value = problem.value_bytes
        where = LayerContext(
            problem.cluster,
            problem.profile,
            tp,
            size,
            value,
            problem.overlap,
            overlap_mode,
            qk_clip=problem.qk_clip,
            experts=experts,
            context=context,
            attended=problem.attended,
        )
        kinds = [embedding_times(model, where), head_times(model, where)]
        for layer in dict.fromkeys(first_alike(model)):
            pairs, window = computed_pairs(model, layer, num_ranks), model.layer_window(layer)
            kinds.append(block_times(model.of_block(layer), where, pairs, window))
        shape = grid[0].shape
        turns = [[np.broadcast_to(turn, shape) for turn in _turns(times)] for times in kinds]
        cluster = problem.cluster
        ranks_per_core = max(1.0, cluster.world / (cluster.shared_cores or cluster.world))
        sharing = ranks_per_core * cluster.turns_slowdown(ranks_per_core) / cluster.slowest_core
        found: Array = np.array(turns).swapaxes(0, 1) * cluster.expected_slowdown * sharing
        found[4, 1] = 0.0  # The head is not recomputed.
        return found

    def at(self, experts: ExpertGrid, sizes: Sequence[int], context: ContextGrid) -> Array:
        """Return the seconds ``[pass, kind, micro-batch, tensor]`` on ranks with these experts and parts of
        sequences."""
        if experts.folds or context.num_ranks > 1:
            return self._seconds([experts.tp], sizes, experts, context)[:, :, 0]
        found: Array = self.seconds[:, :, self._tp[experts.tp], [self._size[size] for size in sizes]]
        return found

    def lengths_of_stages(self, num_stages: int) -> npt.NDArray[np.int64]:
        """Return the number of layers in each stage, as the runtime partitions them."""
        if num_stages not in self._lengths:
            stages = cut_layers(self.problem.model, self.problem.partition, num_stages)
            self._lengths[num_stages] = np.array([len(own) for own in stages])
        return self._lengths[num_stages]

    def cut(self, pp: int, virtual_stages: int, vee: bool, experts: ExpertGrid) -> "LayerAssignment":
        """Return the assignment of layers to so many pipeline ranks."""
        key = pp, virtual_stages, vee, experts.tp, experts.ep * experts.expert_tp if experts.folds else 0
        if key not in self._cuts:
            self._cuts[key] = self._cut(*key)
        return self._cuts[key]

    def _cut(self, pp: int, virtual_stages: int, vee: bool, tp: int, expert_shards: int) -> "LayerAssignment":
        """Return an assignment. ``expert_shards``: ranks that share a block's experts, where these lie on
        other ranks than the rest of it; 0: they do not."""
        owner, rows = self._owner_and_counts(pp, virtual_stages, vee)
        others, own = self._held_of_layers(tp, expert_shards)
        held, in_experts = (np.bincount(owner, weights=each, minlength=pp) for each in (others, own))
        fullest, lengths = int(np.argmax(held + in_experts)), self.lengths_of_stages(pp * virtual_stages)
        return LayerAssignment(rows, float(held[fullest]), float(in_experts[fullest]), int(lengths.min()))

    def _owner_and_counts(
        self, pp: int, virtual_stages: int, vee: bool
    ) -> tuple[npt.NDArray[np.int64], Array]:
        """Return the pipeline rank of each layer, and the distinct numbers of layers by rank and kind."""
        key = pp, virtual_stages, vee
        if key not in self._counts:
            owner = np.repeat(_owners(pp, virtual_stages, vee), self.lengths_of_stages(pp * virtual_stages))
            places = owner * self.num_kinds + self.layer_kinds
            counts = np.bincount(places, minlength=pp * self.num_kinds).reshape(pp, self.num_kinds)
            self._counts[key] = owner, np.unique(counts.astype(float), axis=0)
        return self._counts[key]

    def _held_of_layers(self, tp: int, expert_shards: int) -> tuple[Array, Array]:
        """Return the parameters of each layer on a rank, without and of its experts."""
        key = tp, expert_shards
        if key not in self._held:
            parameters = np.array(layer_parameters(self.problem.model, tp), dtype=float)
            routed = np.array(routed_parameters(self.problem.model), dtype=float) * (expert_shards > 0)
            self._held[key] = (parameters - routed) / tp, routed / max(expert_shards, 1)
        return self._held[key]


def _turns(times: LayerTimes) -> list[Array]:
    turns = (
        times.forward,
        times.backward_input,
        times.backward_weight,
        times.selective_recompute,
        times.forward,
    )
    return [np.asarray(turn.total, dtype=float) for turn in turns]


def _owners(pp: int, virtual_stages: int, vee: bool) -> npt.NDArray[np.int64]:
    """Return the pipeline rank of each stage."""
    return np.array(vee_stage_rank(pp)) if vee else np.arange(pp * virtual_stages) % pp


@dataclass(frozen=True)
class LayerAssignment:
    """One assignment of layers to pipeline ranks."""

    layers: Array
    """Number of layers, ``[distinct rank, kind]``."""
    parameters: float
    """Parameters of a rank of the stage with most of them, without the next ones."""
    expert_parameters: float
    """Those of its experts, where these lie on other ranks than the rest of their block."""
    fewest_layers: int
    """Fewest layers in a stage."""


class GridTimes:
    """Seconds of the slowest ranks of a grid of layouts."""

    def __init__(self, grid: LayoutGrid, table: LayerTable) -> None:
        self.grid, self.table = grid, table
        keys = [(stages, name in IN_A_V) for name, stages in grid.schedules]
        distinct = list(dict.fromkeys(keys))
        self.cut_of = np.array([distinct.index(key) for key in keys])
        """Index of each schedule's layer assignment."""
        self.cuts = [table.cut(grid.pp, *key, grid.experts) for key in distinct]
        turns = table.at(grid.experts, grid.micro_batches, grid.context)
        self.turns = turns[..., : len(grid.tensors)]

    @cached_property
    def held(self) -> tuple[Array, Array]:
        """Parameters of the fullest rank by schedule: those that all replicas hold, and of experts that not
        all replicas do."""
        numbers = np.array([(cut.parameters, cut.expert_parameters) for cut in self.cuts])
        others, experts = numbers[self.cut_of].T
        return others, experts

    @cached_property
    def again(self) -> Array:
        """Seconds of recomputation, ``[recompute, kind, micro-batch, tensor]``."""
        every = {"none": np.zeros_like(self.turns[3]), "selective": self.turns[3], "full": self.turns[4]}
        return np.stack([every[name] for name in self.grid.problem.recomputes])

    @cached_property
    def slowest(self) -> Array:
        """Seconds of a micro-batch on the slowest rank: ``[micro-batch, schedule, recompute, tensor]``."""
        whole = self.turns[:3].sum(axis=0) + self.again
        per_cut = [np.einsum("uk,rkmt->urmt", cut.layers, whole).max(axis=0) for cut in self.cuts]
        found: Array = np.stack(per_cut)[self.cut_of].transpose(2, 0, 1, 3)
        return found

    @cached_property
    def mean(self) -> tuple[Array, Array, Array, Array]:
        """Mean seconds of a micro-batch over all ranks: forward and both halves of the backward,
        ``[micro-batch, tensor]``; recomputation, ``[micro-batch, recompute, tensor]``."""
        kinds = np.bincount(self.table.layer_kinds).astype(float)
        forward, inputs, weights = (
            np.einsum("k,kmt->mt", kinds, turn) / self.grid.pp for turn in self.turns[:3]
        )
        again = np.einsum("k,rkmt->mrt", kinds, self.again) / self.grid.pp
        return forward, inputs, weights, again
