"""Cost of each action of a layout's program on a cluster.

forward, backward        seconds of a stage's layers for one micro-batch (`layer_costs`)
gather, reduce           of a stage's parameters and gradients among data-parallel ranks (`collective_costs`)
reduce_across            of its shards of gradients among the groups of ``layout.shard_group``
message                  one activation or gradient to the next stage, each tensor-parallel rank its share
stall                    seconds that snapshots add, on average over steps (`snapshot_costs`)
clip, update             passes over gradients, master values and moments of this rank's part
copy                     of a stage's activations or optimizer state to host memory, or back
orthogonalize            Newton-Schulz on the rank with the most work, and messages before and after it
                         (`matrix_costs`)
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from operator import add

from myriad.model.matrix_shapes import HiddenMatrix, hidden_matrices, matrices_of_rank
from myriad.planner.cluster_config import Cluster
from myriad.planner.cost.collective_costs import (
    AT_PORTS,
    CommGroup,
    DpCollectives,
    ExchangeSlowdown,
    all_reduce_seconds,
    copied_sum_seconds,
    group_along,
    message_seconds,
    shard_group_comm,
)
from myriad.planner.cost.context_costs import ContextGrid
from myriad.planner.cost.expert_ranks import ExpertGrid, RankGroup, holders
from myriad.planner.cost.head_costs import embedding_times, head_times
from myriad.planner.cost.layer_costs import LayerTimes, block_times
from myriad.planner.cost.matrix_costs import matrix_costs
from myriad.planner.cost.module_gathers import Module, ModuleGathers, module_order, step_seconds
from myriad.planner.cost.operator_costs import TimeBreakdown, sweep_seconds
from myriad.planner.cost.product_costs import OVERLAP_MODES, LayerContext, block_shares
from myriad.planner.cost.replica_messages import bucket_seconds, gather_and_reduce
from myriad.planner.cost.snapshot_costs import SnapshotCosts, SnapshotSchedule, host_copy_rate
from myriad.planner.cost.stage_costs import StageCosts
from myriad.planner.cost.stage_layers import (
    block_of,
    computed_pairs,
    first_alike,
    layer_kinds,
    layer_parameters,
    routed_parameters,
    stage_layers,
)
from myriad.planner.memory.stage_memory import StageMemory
from myriad.planner.workload import Workload
from myriad.program.actions import Kind
from myriad.program.build import count_chunks
from myriad.program.partition import cut_ranges, num_recomputed
from myriad.program.schedules import stage_owners

__all__ = ["Costs"]


def _sum_of_layers(times: Mapping[str, LayerTimes], counts: Mapping[str, int]) -> LayerTimes:
    """Return the seconds of so many layers of each kind."""
    return reduce(add, (times[kind].times(float(number)) for kind, number in counts.items()))


class Costs:
    """The costs of every action of one layout on one cluster."""

    def __init__(
        self, workload: Workload, cluster: Cluster, exchange_slowdown: ExchangeSlowdown = AT_PORTS
    ) -> None:
        self.workload, self.cluster, self.exchange_slowdown = workload, cluster, exchange_slowdown
        layout, overlap, profile = workload.layout, workload.overlap, workload.layer_profile
        sharers = layout.tp * layout.cp
        replica_stride, stage_stride = sharers * layout.pp, sharers
        if profile.pp_outermost:
            replica_stride, stage_stride = sharers, sharers * layout.dp
        self.slice = LayerContext(
            cluster,
            profile,
            float(layout.tp),
            float(layout.micro_batch),
            workload.value_bytes,
            overlap,
            OVERLAP_MODES[None if overlap.pairs else overlap.tensor],
            workload.quantized_kept_over,
            workload.qk_clip,
            ExpertGrid.of(layout, replica_stride, exchange_slowdown.tokens),
            ContextGrid.of(layout, exchange_slowdown.context),
            attended=workload.attended,
            repeats_norms=profile.repeats_norms and layout.recompute == "none",
            blocks_per_chunk=workload.blocks_per_chunk,
        )
        self.pipeline = group_along(cluster, float(layout.pp), float(stage_stride))
        comm = shard_group_comm(workload.comm, layout)
        size = layout.num_shards if layout.zero else layout.num_holders
        self.dp_collectives = DpCollectives(cluster, comm, *holders(layout, replica_stride, size))
        """Collectives of the ranks that share the state; with ZeRO 0, of all that hold the same."""
        self.across_groups: DpCollectives | None = None
        """Collectives of the ranks of different groups that hold the same shard, if there are such."""
        if layout.reduces_across:
            groups = holders(layout, replica_stride, layout.num_shard_groups, every=size)
            self.across_groups = DpCollectives(cluster, comm, *groups)
        self.data = self.dp_collectives.ring
        every = holders(layout, replica_stride, layout.num_holders)
        self.replicas = self._ring(every) if layout.reduces_across else self.data
        """All ranks that hold the same parameters as one flat ring."""
        self.expert_collectives: DpCollectives | None = None
        """Collectives of ranks that share the state of the same experts, if not all replicas hold them."""
        if layout.folds_experts:
            alike = self.slice.experts.alike(layout.num_shard_groups if layout.reduces_across else 1)
            self.expert_collectives = DpCollectives(cluster, comm, *alike)
        self.layers_of_stage = stage_layers(workload)
        self.num_chunks = count_chunks(layout, overlap, self.layers_of_stage)

    def _ring(self, ranks: RankGroup) -> CommGroup:
        return group_along(self.cluster, float(ranks.size), float(ranks.stride), ranks.run)

    def with_slower_exchanges(self, factor: float) -> "Costs":
        """Return the costs of the same layout whose tokens travel more slowly between nodes."""
        slower = self.exchange_slowdown._replace(tokens=self.exchange_slowdown.tokens * factor)
        return Costs(self.workload, self.cluster, slower)

    def busy_ratio_of(self, stage: int, kind: Kind) -> float:
        """Return the share of gather and reduction time by which a compute action beside them slows down."""
        return float(self.data.busy_ratio)

    @cached_property
    def stages(self) -> list[StageCosts]:
        """Costs of every stage of the program."""
        found: dict[tuple[str, ...], StageCosts] = {}
        kinds = layer_kinds(self.workload.model)
        stages = []
        for own in cut_ranges(self.layers_of_stage, self.num_chunks):
            key = kinds[own.start : own.stop]
            if key not in found:
                found[key] = self._stage(own)
            stages.append(found[key])
        return stages

    @cached_property
    def _times(self) -> dict[str, LayerTimes]:
        return self._times_in(self.slice)

    def layer_times(self, layer: int) -> LayerTimes:
        """Return the seconds of a layer of the pipeline: the embedding, a block or the head."""
        return self._times[layer_kinds(self.workload.model)[layer]]

    @cached_property
    def _paired_times(self) -> dict[str, LayerTimes] | None:
        """Seconds of each kind of layer in a pair; ``None``: there are no pairs."""
        return self._times_in(replace(self.slice, in_pairs=True)) if self.workload.overlap.pairs else None

    def _times_in(self, context: LayerContext) -> dict[str, LayerTimes]:
        model, num_ranks = self.workload.rank_model, self.workload.layout.cp
        times = {"embedding": embedding_times(model, context), "head": head_times(model, context)}
        for layer in dict.fromkeys(first_alike(model)):
            pairs, window = computed_pairs(model, layer, num_ranks), model.layer_window(layer)
            times[f"block {layer}"] = block_times(model.of_block(layer), context, pairs, window)
        return times

    def _stage(self, own: Sequence[int]) -> StageCosts:
        """Return the costs of a stage with these layers."""
        workload, every = self.workload, layer_kinds(self.workload.model)
        kinds = [every[layer] for layer in own]
        counts = Counter(sorted(kinds))
        times = _sum_of_layers(self._times, counts)
        paired = None if self._paired_times is None else _sum_of_layers(self._paired_times, counts)
        others, experts = self.held_parameters(own)
        parameters = others + experts
        recompute = self._recompute(kinds)
        gather, reduced, update = self._data_parallel(others, experts, kinds)
        updated = self._own_parameters(others, experts)
        shapes = [matrix for kind in kinds for matrix in self._matrices_of(kind)]
        groups = self.replicas, self._ring(self.slice.experts.alike())
        matrices = matrix_costs(shapes, workload, self.cluster, *groups, num_chunks=self.num_chunks)
        copies = self._copies(own, others, experts, shapes)
        if self._by_module:
            passes = *self._module_seconds(kinds), 0.0
            found = StageCosts(times, recompute, parameters, updated, *passes, 0.0, 0.0, update, matrices)
            return replace(found, copy_activations=copies[0], copy_state=copies[1])
        return StageCosts(
            times=times,
            recompute=recompute,
            parameters=parameters,
            own_parameters=updated,
            forward=float(times.forward.total),
            backward_input=float(times.backward_input.total + recompute.total),
            backward_weight=float(times.backward_weight.total),
            gather=gather,
            reduce=reduced,
            update=update,
            matrices=matrices,
            reduce_across=self._across_seconds(updated),
            copy_activations=copies[0],
            copy_state=copies[1],
            copied_parameters=others / workload.layout.num_holders
            + experts / workload.layout.num_expert_replicas,
            paired=paired,
        )

    def held_parameters(self, own: Sequence[int]) -> tuple[float, float]:
        """Return the numbers of parameters of some layers on one rank, and of experts that not all replicas
        hold."""
        model, layout = self.workload.model, self.workload.layout
        every, routed = layer_parameters(model, layout.tp), routed_parameters(model)
        whole, experts = (float(sum(found[layer] for layer in own)) for found in (every, routed))
        if not layout.folds_experts:
            return whole / layout.tp, 0.0
        return (whole - experts) / layout.tp, experts / (layout.ep * layout.expert_tp)

    def _own_parameters(self, others: float, experts: float) -> float:
        """Return the number of parameters that a rank updates, of so many that it holds."""
        layout = self.workload.layout
        return others / layout.num_shards + experts / layout.num_expert_shards

    def _copies(
        self, own: Sequence[int], others: float, experts: float, matrices: Sequence[HiddenMatrix]
    ) -> tuple[float, float]:
        """Return the seconds to copy a stage's activations of one micro-batch, and its optimizer state."""
        workload, layout = self.workload, self.workload.layout
        if not layout.offloads:
            return 0.0, 0.0
        layers = range(own[0], own[-1] + 1)
        kept = StageMemory(workload, [layers], self.cluster.on_cpu).held(0, turns=False)
        held = [matrices_of_rank(matrices, layout.ep, of_experts=which) for which in (False, True)]
        one_moment, routed = (sum(one.local for one in found) for found in held)
        if not layout.folds_experts:
            one_moment, routed = one_moment + routed, 0.0
        state_bytes = 12.0 if workload.offloads_master else 8.0
        state = state_bytes * self._own_parameters(others, experts)
        state -= 4.0 * self._own_parameters(one_moment, routed)
        rate = host_copy_rate(self.cluster)
        return (kept.kept + kept.head_bytes) / rate, state / rate

    @property
    def copies_block(self) -> bool:
        """Whether a rank waits for each copy to host memory where it starts: there is no copy engine."""
        return self.cluster.on_cpu

    def _matrices_of(self, kind: str) -> list[HiddenMatrix]:
        """Return the matrices of a layer that the optimizer orthogonalizes."""
        model, layout = self.workload.model, self.workload.layout
        if not self.workload.orthogonalizes:
            return []
        ends = {"embedding": 0, "head": model.layers + 1}
        layer = ends[kind] if kind in ends else 1 + block_of(kind)
        return hidden_matrices(model, layer, layout.tp, etp=layout.etp)

    @property
    def _by_module(self) -> bool:
        """Whether parameters are gathered by module during compute instead of by the program's actions."""
        layout = self.workload.layout
        return (
            self.workload.profile.module_gathers is not None and layout.zero == 3 and layout.num_holders > 1
        )

    def _module_seconds(self, kinds: Sequence[str]) -> tuple[float, float]:
        """Return the seconds of forward and backward of a micro-batch, including gathers and reductions.
        ``kinds``: the kinds of its layers."""
        keys = self.workload.profile.module_gathers
        assert keys is not None
        modules: list[Module] = []
        layers: list[range] = []
        for kind in kinds:
            found = self._modules(kind, keys)
            layers.append(range(len(modules), len(modules) + len(found)))
            modules += found
        order = module_order(layers, self.workload.recompute == "full")
        return step_seconds(modules, order, keys, float(self.data.busy_ratio))

    def _modules(self, kind: str, keys: ModuleGathers) -> list[Module]:
        """Return the modules of a layer. Each module's seconds are in proportion to its matrix products."""
        model, times = self.workload.model, self._times[kind]
        if kind in ("embedding", "head"):
            parameters = layer_parameters(model)[0 if kind == "embedding" else -1]
            shares = {kind: (float(parameters), 1.0)}
        else:
            shares = block_shares(model.of_block(block_of(kind)))
        selective = self.workload.recompute == "selective"
        backward = times.backward_input + times.backward_weight
        backward = backward + (times.selective_recompute if selective else TimeBreakdown())

        def seconds(block: TimeBreakdown, name: str, share: float) -> float:
            scores = block.attention if name == "output" else 0.0
            return float(share * (block.matmul + block.memory + block.tensor) + scores)

        found = []
        for name, (elements, share) in shares.items():
            held = elements / self.workload.layout.tp
            passes = seconds(times.forward, name, share), seconds(backward, name, share)
            found.append(Module(name, held, *passes, *self._module_communication(held, keys)))
        return found

    def _module_communication(self, elements: float, keys: ModuleGathers) -> tuple[float, float]:
        """Return the seconds to gather a module of so many elements, and to reduce its gradients."""
        workload, accelerator = self.workload, self.cluster.accelerator
        gathered, reduced = elements * workload.value_bytes, elements * workload.profile.gradient_bytes
        copied = sweep_seconds(accelerator, keys.gather_passes * gathered, 2.0)
        divided = sweep_seconds(accelerator, keys.reduce_passes * reduced, 2.0)
        gather = self.dp_collectives.all_gather_seconds(gathered) + copied
        return float(gather), float(self.dp_collectives.all_gather_seconds(reduced) + divided)

    def _recompute(self, kinds: Sequence[str]) -> TimeBreakdown:
        """Return the recomputation in the backward of a stage. Whole layers do not include the head, whose
        backward follows its forward at once."""
        if self.workload.recompute == "none":
            return TimeBreakdown()
        selective = self.workload.recompute == "selective"
        count = len(kinds) if selective else num_recomputed(len(kinds), self.workload.layout.recompute_ratio)
        total = TimeBreakdown()
        for kind, number in sorted(Counter(kinds[:count]).items()):
            times = self._times[kind]
            ratio = self.workload.profile.recomputed_ratio
            one = times.selective_recompute if selective else times.forward.times(ratio)
            is_kept = kind == "head" and not selective
            total = total + (TimeBreakdown() if is_kept else one).times(float(number))
        return total

    @property
    def optimizer_bytes(self) -> float:
        """Bytes that the optimizer moves for each parameter."""
        one = self.workload
        return one.profile.update_bytes(one.optimizer, one.value_bytes, one.ema_every)

    def _data_parallel(self, others: float, experts: float, kinds: list[str]) -> tuple[float, float, float]:
        """Return the seconds of gather, reduction and update of a stage. Where its experts have a chunk of
        their own, it is communicated behind the rest."""
        gather, reduced = self.gather_and_reduce(self.dp_collectives, others)
        reduced += bucket_seconds(self.workload, self.slice, self.dp_collectives, kinds)
        if experts and self.expert_collectives is not None:
            further = self.gather_and_reduce(self.expert_collectives, experts)
            gather, reduced = gather + further[0], reduced + further[1]
        if self.workload.layout.zero == 3 and self.slice.experts.leaves_node(self.cluster):
            gather += float(sum(self._times[kind].forward.experts for kind in kinds))  # The ports carry both.
        own = self._own_parameters(others, experts)
        update = sweep_seconds(self.cluster.accelerator, own * self.optimizer_bytes, 2.0)
        return gather, reduced, float(update)

    def gather_and_reduce(self, collectives: DpCollectives, parameters: float) -> tuple[float, float]:
        """Return the seconds to gather parameters of a stage, and to reduce their gradients."""
        return gather_and_reduce(self.workload, collectives, parameters, self.num_chunks)

    def _across_seconds(self, own: float) -> float:
        """Return the seconds of the sum across groups of so many parameters of this rank's shards."""
        if self.across_groups is None:
            return 0.0
        return float(self.across_groups.all_reduce_seconds(own * self.workload.profile.gradient_bytes))

    @cached_property
    def busiest_rank(self) -> tuple[TimeBreakdown, TimeBreakdown]:
        """Compute of one iteration, without waiting, on the pipeline rank with the most compute; and the
        recomputation there."""
        layout = self.workload.layout
        owners = stage_owners(layout.schedule_name, layout.pp, layout.virtual_stages)
        ranks = [(TimeBreakdown(), TimeBreakdown()) for _ in range(layout.pp)]
        count = float(self.workload.num_micro_batches)
        for index, stage in enumerate(self.stages):
            rank = owners[index // self.num_chunks]
            parts, recompute = ranks[rank]
            ranks[rank] = parts + self._compute_of(stage), recompute + stage.recompute.times(count)
        return max(ranks, key=lambda rank: float(rank[0].total + rank[1].total))

    def _compute_of(self, stage: StageCosts) -> TimeBreakdown:
        """Return the compute of a stage in one iteration, in which all but one micro-batch are in pairs."""
        count = float(self.workload.num_micro_batches)
        if stage.paired is None:
            return stage.parts.times(count)
        pair = stage.parts_of(Kind.PAIRED_FORWARD) + stage.parts_of(Kind.PAIRED_BACKWARD)
        return stage.parts + pair.times(count - 1)

    @cached_property
    def snapshot_costs(self) -> SnapshotCosts:
        """Costs of the job's snapshots."""
        workload = self.workload
        return SnapshotCosts(
            self.cluster,
            workload.snapshots,
            float(sum(layer_parameters(workload.model))),
            not workload.overlap.checkpoint,
            averages=workload.ema_every > 0,
        )

    @cached_property
    def most_parameters(self) -> tuple[float, float]:
        """Largest numbers of parameters that a rank updates, and that it adds to snapshots."""
        layout = self.workload.layout
        owners = stage_owners(layout.schedule_name, layout.pp, layout.virtual_stages)
        held = [[0.0, 0.0] for _ in range(layout.pp)]
        for index, stage in enumerate(self.stages):
            held[owners[index // self.num_chunks]][0] += stage.own_parameters
            held[owners[index // self.num_chunks]][1] += stage.copied_parameters
        updated, copied = map(max, zip(*held, strict=True))
        return updated, copied

    def stall(self, seconds: float) -> float:
        """Return the seconds that snapshots add to an iteration of ``seconds``."""
        workload = self.workload
        if workload.snapshots == SnapshotSchedule():
            return 0.0
        updated, copied = self.most_parameters
        copied *= workload.snapshots.num_holders(workload.layout, self.cluster.nodes)
        update = sweep_seconds(self.cluster.accelerator, updated * self.optimizer_bytes, 2.0)
        return float(self.snapshot_costs.stall_seconds(seconds, float(update), copied))

    @cached_property
    def message(self) -> float:
        """Seconds of one activation or gradient to the next stage."""
        workload = self.workload
        tokens = workload.layout.micro_batch * workload.rank_model.sequence
        return float(
            message_seconds(
                self.pipeline, tokens * workload.model.hidden * workload.value_bytes / workload.layout.tp
            )
        )

    def message_between(self, source: int, target: int) -> float:
        """Return the seconds of a message between two pipeline ranks. Here all pairs of ranks cost the
        same."""
        return self.message

    @cached_property
    def load(self) -> float:
        """Seconds until the batch is there."""
        return self.workload.profile.host_seconds

    def clip(self, own: float) -> float:
        """Return the seconds of the gradient norm: the pass over a rank's ``own`` gradients, the all-reduce,
        and before it the sums of copied key/value heads."""
        workload, layout = self.workload, self.workload.layout
        groups = [group_along(self.cluster, float(layout.world), 1.0)]
        if workload.profile.norm_in_replica:
            groups = [group_along(self.cluster, float(layout.tp * layout.pp), 1.0), self.replicas]
        copied = copied_sum_seconds(workload.model, self.cluster, layout.tp, layout.pp, layout.num_shards)
        return float(
            sweep_seconds(self.cluster.accelerator, 4 * own, 2.0)
            + sum(all_reduce_seconds(group, 8.0) for group in groups)
            + copied
        )

    @cached_property
    def tied(self) -> float:
        """Seconds to sum the gradients of the parameters that the first and the last stage share."""
        model, layout = self.workload.model, self.workload.layout
        checked = 2 / layout.pp * self.pipeline.check_seconds
        group = replace(self.pipeline, size=2.0, check_seconds=checked)
        rows = model.vocabulary_rows(layout.tp) * model.hidden
        return float(all_reduce_seconds(group, rows * self.workload.profile.gradient_bytes))
