"""What a pipeline rank holds during a whole iteration: its part of the optimizer, host buffers and the batch;
and the margin for the driver, communicators and the allocator.
"""

from collections.abc import Collection, Mapping
from functools import cached_property

from myriad.comm.config import CommConfig
from myriad.comm.hierarchy import count_shard_levels
from myriad.comm.layout import Layout
from myriad.optim.config import OptimizerName
from myriad.planner.memory.closed_form_memory import count_context_groups, count_groups, expected_outside
from myriad.planner.memory.stage_memory import StageMemory
from myriad.program.actions import Program
from myriad.program.in_flight import most_offloaded

__all__ = ["ConstantMemory", "count_communicators"]


def count_communicators(
    layout: Layout,
    program: Program,
    rank: int,
    comm: CommConfig,
    *,
    optimizer: OptimizerName,
    kv_heads: int,
    node_size: int | None = None,
) -> tuple[int, int]:
    """Return the numbers of NCCL communicators of a pipeline rank: for groups, and for pairs, which have one
    for each neighbour, payload and direction (`myriad.comm.connection_setup`)."""
    transfers = [transfer for action in program.ranks[rank] for transfer in action.transfers]
    pairs = {(one.payload, one.peer, (one.peer > rank) == one.sends) for one in transfers}
    holds_tied = rank in (program.stage_rank[0], program.stage_rank[-1])
    syncs_tied = float(program.syncs_tied and holds_tied)
    groups = count_groups(
        layout.num_holders,
        layout.tp,
        layout.pp,
        kv_heads=kv_heads,
        syncs_tied=syncs_tied,
        levels=count_shard_levels(comm, layout, node_size),
        across=float(layout.reduces_across),
        lamb_over_zero=float(optimizer == "lamb" and layout.zero > 0),
        matrices=float(optimizer == "muon" and (comm.sync_every == 1 or layout.tp > 1)),
        ep=layout.ep,
        etp=layout.etp,
    )
    groups += count_context_groups(layout.ring, layout.ulysses)
    return int(groups), len(pairs)


class ConstantMemory:
    """What one rank holds at every moment, or a share of whatever it holds."""

    def __init__(
        self,
        model: StageMemory,
        program: Program,
        rank: int,
        node_size: int | None,
        chunks: Mapping[int, float],
        matrices: Mapping[int, float],
        expert_chunks: Collection[int],
        on_host: Collection[int],
    ) -> None:
        """``chunks``: elements of each chunk. ``matrices``: those that Muon orthogonalizes.
        ``expert_chunks``: the chunks of experts that not all replicas hold. ``on_host``: the chunks whose
        optimizer state is in host memory between updates."""
        self._model, self._workload, self._node_size = model, model.workload, node_size
        self._program, self._rank, self._actions = program, rank, program.ranks[rank]
        self._chunks, self._matrices, self._expert_chunks = chunks, matrices, expert_chunks
        self._on_host = on_host

    @cached_property
    def elements(self) -> float:
        """Number of elements of this rank's part of parameters and optimizer."""
        return sum(map(self._part, self._chunks))

    def _part(self, key: int) -> float:
        """Return the number of elements of this rank's part of a chunk."""
        layout = self._workload.layout
        of_experts = key in self._expert_chunks
        return self._chunks[key] / (layout.num_expert_shards if of_experts else layout.num_shards)

    @cached_property
    def moments(self) -> float:
        """Bytes of moments that stay on the device, on the data-parallel rank with the fewest elements of
        matrices that are orthogonalized, which have one moment instead of two: that with the last slice of
        each chunk."""
        return sum(self.moments_of(key) for key in self._chunks if key not in self._on_host)

    def moments_of(self, key: int) -> float:
        """Return the bytes of moments of a chunk."""
        held, others = self._part(key), self._chunks[key] - self._matrices.get(key, 0.0)
        return 4 * held + 4 * min(held, others)

    def state_of(self, key: int) -> float:
        """Return the bytes of a chunk that rest in host memory, if its optimizer state does."""
        return self.moments_of(key) + (4 * self._part(key) if self._workload.offloads_master else 0.0)

    @cached_property
    def masters(self) -> float:
        """Bytes of master values that stay on the device, and with ZeRO 3 of the slices that gathers read
        instead of those in host memory."""
        workload, is_sharded = self._workload, self._workload.layout.zero == 3
        if workload.value_bytes == 4 and not is_sharded and workload.comm.compress_parameters is None:
            return 0.0  # the master values are the values
        away = {*self._on_host} if workload.offloads_master else set()
        slices = sum(map(self._part, away)) * workload.value_bytes if is_sharded else 0.0
        return slices + 4 * sum(self._part(key) for key in self._chunks if key not in away)

    @cached_property
    def host_bytes(self) -> float:
        """Bytes of host memory: a buffer for each micro-batch of a stage that is offloaded at once, and the
        optimizer state."""
        buffers = most_offloaded(self._actions)
        found = sum(map(self.state_of, self._on_host))
        for stage, count in buffers.items():
            held = self._model.held(stage, turns=False)
            found += count * (held.kept + held.head_bytes)
        return found

    @cached_property
    def state(self) -> float:
        """Bytes of optimizer state that stays on the device: moments, the moving average, and with replicas
        that train alone their anchor and momentum (`myriad.parallel.diloco`)."""
        average = 4 if self._workload.ema_every else 0
        outer = 8 if self._workload.trains_alone else 0
        return self.moments + (average + outer) * self.elements

    @cached_property
    def buffers(self) -> float:
        """Bytes of the buffers that a rank keeps."""
        return self._batch + self._library_buffers + self._encoding_errors

    @cached_property
    def _encoding_errors(self) -> float:
        """Bytes of the errors of compressed gradients, which the next message carries."""
        workload, layout = self._workload, self._workload.layout
        if workload.comm.compress_gradients is None or workload.trains_alone or layout.num_holders == 1:
            return 0.0
        return 4.0 * sum(self._chunks.values()) + (4.0 * self.elements if layout.reduces_across else 0.0)

    @cached_property
    def _batch(self) -> float:
        """Bytes of tokens and targets."""
        workload = self._workload
        return 2.0 * 8 * workload.num_micro_batches * workload.layout.micro_batch * workload.model.sequence

    @cached_property
    def _communicators(self) -> tuple[int, int]:
        workload = self._workload
        return count_communicators(
            workload.layout,
            self._program,
            self._rank,
            workload.comm,
            optimizer=workload.optimizer,
            kv_heads=workload.model.num_kv_heads,
            node_size=self._node_size,
        )

    @cached_property
    def outside(self) -> float:
        """Bytes outside of the allocator."""
        memory = self._workload.profile.memory
        return float(expected_outside(memory, *self._communicators, on_cpu=self._model.on_cpu))

    def margin(self, coming: float) -> float:
        """Return the bytes beyond what is counted, when ``coming`` bytes come and go."""
        return self._slack * coming + self.outside

    @cached_property
    def _slack(self) -> float:
        memory = self._workload.profile.memory
        return memory.tensor_slack if self._workload.layout.tp > 1 else memory.allocator_slack

    @cached_property
    def gradients(self) -> float:
        """Bytes of gradients beside the buffers that the program allocates: with ZeRO 2 and 3 this rank's
        part, and buckets that stay."""
        layout, memory = self._workload.layout, self._workload.profile.memory
        part = memory.gradient_buffer_bytes * self.elements if layout.zero >= 2 else 0.0
        copies = memory.gradient_copy_bytes if layout.num_holders > 1 else 0
        return part + copies * sum(self._chunks.values())

    @cached_property
    def _library_buffers(self) -> float:
        """Bytes of workspace, and of gathered inputs, that stay."""
        memory, message = self._workload.profile.memory, self._model.message
        gathers = memory.gather_buffers if self._workload.layout.tp > 1 else 0
        return memory.workspace_bytes + gathers * message * self._workload.layout.tp

    @cached_property
    def gathered_copies(self) -> float:
        """Bytes of the copies from which and to which updated parameters are gathered with ZeRO 1."""
        layout = self._workload.layout
        if not self._workload.profile.memory.copies_gathered or layout.zero != 1 or layout.num_holders == 1:
            return 0.0
        return self._workload.value_bytes * (sum(self._chunks.values()) + self.elements)
