"""A chunk: parameters in one flat buffer that data parallelism cuts into equal slices.

With ``layout.shard_group``, several groups of ranks hold every slice; the reduced slices are then summed
across the groups (`Chunk.start_across`), and nothing else crosses.

    parameters     w1 | w2 | w3 | norm | bias | pad        decayed first, by kind and rate; padded for dp
    rank 0 of 2    [--- slice ---)                          master values, optimizer state: float32
    rank 1 of 2                  [--- slice ---)

| ZeRO | values (compute dtype) | gradient buffer (float32)      | master, optimizer |
|------|------------------------|--------------------------------|-------------------|
| 0    | whole                  | whole                          | whole             |
| 1    | whole                  | whole                          | slice             |
| 2    | whole                  | whole until reduced, then slice| slice             |
| 3    | whole while in use     | whole until reduced, then slice| slice             |

(Rajbhandari et al., arXiv 1910.02054.) Memory that is needed only for a part of the iteration
(`myriad.parallel.transient_buffer`) is freed and allocated by resizing a storage; captured stages use a fixed
place that chunks share. In both cases the parameters stay views of the memory, and so do the tensors that
autograd saved. In float32 the master values *are* the values (or their slice), unless parameters are
compressed for communication: then the gathered values are not exact. In a shorter type the master values may
be in host memory between updates (`Chunk.rest_in`); with ZeRO 3 a slice of that type then stays here.

Gathers and reductions are issued (`start_...`) and waited for (`await_...`); the communication scheduler
(`CommScheduler`) runs them in between.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise

import torch
from torch import nn

from myriad.comm.collectives import all_reduce
from myriad.comm.comm_scheduler import BucketCollective, CommScheduler, PendingCollective
from myriad.comm.groups import Group
from myriad.kernels.gradient import GradientSink, PendingRows, feed_sink, set_sink
from myriad.optim.region import ParameterSlice, Region
from myriad.parallel.own_gradients import OwnGradients
from myriad.parallel.parameter_table import Entry, Row
from myriad.parallel.transient_buffer import FixedMemory, TransientBuffer, make_buffer

__all__ = ["Chunk", "ChunkMemory", "Sharing"]

_AFTER_GATHERS = 2**20
"""Priority of reductions: no rank waits for them before the step."""
_AFTER_REDUCTIONS = 2**21
"""Priority of gathers that hold for a whole iteration. Where such a gather meets a reduction, it belongs to
the next iteration."""


@dataclass(frozen=True)
class Sharing:
    """The group of ranks that share a chunk, and how they shard it."""

    scheduler: CommScheduler
    """The communication scheduler between these ranks."""
    group_rank: int
    group_size: int
    zero: int
    exact: bool
    """Parameters are communicated uncompressed."""
    has_gradients: bool = True
    """Gradients are computed. Without them, no memory of theirs is allocated."""
    frees_grad_buffer: bool = False
    """The gradient buffer is freed when the chunk is updated. This needs ZeRO 0 or 1, where the buffer would
    otherwise persist."""
    across: CommScheduler | None = None
    """The communication scheduler between the ranks of all groups that hold the same slice; ``None``: there
    is one group."""
    num_groups: int = 1
    copy: int = 0
    """Index of this rank among those that hold the same slice."""
    num_copies: int = 1
    """Number of ranks that hold the same slice."""
    of_experts: bool = False
    """The chunk holds experts, of which other ranks have different ones."""


@dataclass(frozen=True)
class ChunkMemory:
    """Fixed places for the memory of a chunk that is allocated and freed; ``None``: the allocator chooses the
    address."""

    values: FixedMemory | None = None
    grad_buffer: FixedMemory | None = None


class Chunk:
    """Parameters in one flat buffer, sharded over data-parallel ranks."""

    def __init__(
        self,
        entries: Iterable[Entry],
        sharing: Sharing,
        dtype: torch.dtype,
        device: torch.device,
        first_row: int,
        place: "ChunkMemory | None" = None,
    ) -> None:
        """``place``: the fixed memory of the whole chunk; ``None``: the allocator chooses the address."""
        self.entries = sorted(entries, key=lambda entry: entry.kind)
        self.sharing, self.first_row = sharing, first_row
        ends = list(accumulate((entry.shape.numel() for entry in self.entries), initial=0))
        self.spans = list(pairwise(ends))
        self.rows = [
            replace(row, start=base + row.start, stop=base + row.stop)
            for entry, (base, _) in zip(self.entries, self.spans, strict=True)
            for row in entry.rows()
        ]
        """The chunk's part of the table of parameters, at elements of the chunk."""
        self._index_of = {entry.name: index for index, entry in enumerate(self.entries)}
        self._num_decayed = sum(entry.shape.numel() for entry in self.entries if entry.decays)
        multiple = sharing.group_size * sharing.num_groups
        self.size = -(-ends[-1] // multiple) * multiple
        part = self.size // sharing.group_size if sharing.zero else self.size
        self.start = sharing.group_rank * part if sharing.zero else 0
        self.stop = self.start + part
        self._values_memory: TransientBuffer | None = None
        """The memory of the values, if it is allocated and freed in each iteration."""
        self._grad_buffer_memory: TransientBuffer | None = None
        """The memory of the gradient buffer, if it is allocated and freed in each iteration."""
        self._allocate(dtype, device, place or ChunkMemory())
        self._attach()
        self.regions = self._regions()
        """This rank's slice as the optimizer sees it: the parts with weight decay, one for each kind of
        update and factor of the learning rate, then the part without."""
        self.stored = self.master
        """The master values where they rest between updates."""
        self._gathered = self.master
        """This rank's slice as gathers read it."""
        self._collective = sharing.scheduler.bucket_collective(self.size, dtype)
        self._gathering: PendingCollective | None = None
        self._reducing: PendingCollective | None = None
        across = sharing.across
        self._across = None if across is None else across.bucket_collective(part, dtype)
        self._summing: PendingCollective | None = None
        self.overwrites = True
        """Whether the first gradient of a matrix in an iteration overwrites its memory, instead of being
        added to zeros."""
        self.before_reduce: Callable[[Chunk], None] | None = None
        """Called before this rank's own gradients are reduced."""
        self.own_gradients = OwnGradients(self.grad_buffer, self.rows, self._kept_gradients())
        self._has_reduced = False
        self._users: set[int] = set()
        self._stale = self._fresh = True
        self._free_values()
        self._free_grad_buffer(when=sharing.zero >= 2 or sharing.frees_grad_buffer)

    def _allocate(self, dtype: torch.dtype, device: torch.device, place: "ChunkMemory") -> None:
        sharing = self.sharing
        if sharing.zero == 3:
            self._values_memory = make_buffer(self.size, dtype, device, place.values)
            self.values = self._values_memory.tensor
        else:
            self.values = torch.zeros(self.size, dtype=dtype, device=device)
        shares_memory = dtype == torch.float32 and sharing.zero < 3 and sharing.exact
        self.master = self._slice(self.values) if shares_memory else self._new_slice(device)
        if not sharing.has_gradients:
            self.grad_buffer = self.gradients = torch.empty(0, device=device)
            return
        if sharing.zero >= 2 or sharing.frees_grad_buffer:
            self._grad_buffer_memory = make_buffer(self.size, torch.float32, device, place.grad_buffer)
            self.grad_buffer = self._grad_buffer_memory.tensor
        else:
            self.grad_buffer = torch.empty(self.size, device=device)
        self.gradients = self._slice(self.grad_buffer) if sharing.zero < 2 else self._new_slice(device)

    @property
    def master_is_values(self) -> bool:
        """Whether the master values share memory with the values (or are a slice of them)."""
        return self.master.untyped_storage().data_ptr() == self.values.untyped_storage().data_ptr()

    def rest_in(self, stored: torch.Tensor) -> None:
        """Let the master values rest in ``stored``, in host memory: `master` is on the device only around the
        update (`HostState`). Gathers then read a slice of the compute type."""
        self.stored = stored
        if self.sharing.zero == 3:
            self._gathered = torch.zeros_like(self.master, dtype=self.values.dtype)
        elif self.sharing.zero:
            self._gathered = self._slice(self.values)

    @property
    def _newest(self) -> torch.Tensor:
        """The master values on the device if they are there, else where they rest."""
        return self.master if self.master.untyped_storage().nbytes() else self.stored

    def _free_values(self) -> None:
        if self._values_memory is not None:
            self._values_memory.free()

    def _free_grad_buffer(self, *, when: bool) -> None:
        if when and self._grad_buffer_memory is not None:
            self._grad_buffer_memory.free()

    def _slice(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[self.start : self.stop]

    def _new_slice(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(self.stop - self.start, device=device)

    def _attach(self) -> None:
        """Make every parameter a view of the values, with a sink that is a view of the gradient buffer (none
        if no gradients are computed).

        ``.data`` gives each view its own version counter: a second gather must not look to autograd like a
        write to a saved tensor.
        """
        self.sinks: list[GradientSink] = []
        """Where each parameter's gradients are accumulated; the sinks of matrices (with weight decay) come
        first."""
        self.pending = PendingRows()
        """Partial sums of the gradients, while a backward runs."""
        for entry, (start, stop) in zip(self.entries, self.spans, strict=True):
            values, has_gradients = self.values.data[start:stop].view(entry.shape), self.sharing.has_gradients
            parameter = nn.Parameter(values, requires_grad=has_gradients)
            for module, attribute in entry.homes:
                setattr(module, attribute, parameter)
            if has_gradients:
                sink = GradientSink(self.grad_buffer.data[start:stop].view(entry.shape), pending=self.pending)
                set_sink(parameter, sink)
                parameter.register_post_accumulate_grad_hook(feed_sink)
                self.sinks.append(sink)

    def _regions(self) -> list[Region]:
        kinds = groupby(zip(self.entries, self.spans, strict=True), key=lambda pair: pair[0].kind)
        lasts = [list(pairs)[-1] for _, pairs in kinds]
        ends = [(entry, end) for entry, (_, end) in lasts]
        ends[-1:] = [(entry, self.size) for entry, _ in ends[-1:]]  # the padding belongs to the last one
        found, start = [], self.start
        for entry, end in ends:
            stop = min(max(end, start), self.stop)
            if stop > start:
                found.append(self._region(start, stop, entry))
            start = stop
        return found

    def _region(self, start: int, stop: int, like: Entry) -> Region:
        inside = slice(start - self.start, stop - self.start)
        pieces = tuple(
            ParameterSlice(
                self.first_row + number, max(row.start, start) - start, min(row.stop, stop) - start
            )
            for number, row in enumerate(self.rows)
            if max(row.start, start) < min(row.stop, stop)
        )
        values, gradients = self.master[inside], self.gradients[inside]
        return Region(values, gradients, like.decays, pieces, like.rate, like.orthogonalized)

    def start_of(self, entry: Entry) -> int:
        """Return the first element of a parameter in the chunk."""
        return self.spans[self._index_of[entry.name]][0]

    def holds(self, index: int) -> bool:
        """Return whether this rank's slice contains a part of this parameter."""
        start, stop = self.spans[index]
        return max(start, self.start) < min(stop, self.stop)

    def load(self, index: int, values: torch.Tensor) -> None:
        """Set this rank's slice of one parameter from the parameter's (tensor-parallel) whole value. A gather
        sets the other ranks' slices."""
        start, stop = self.spans[index]
        a, b = max(start, self.start), min(stop, self.stop)
        if a < b:
            self._newest[a - self.start : b - self.start].copy_(values.reshape(-1)[a - start : b - start])

    def mark_stale(self) -> None:
        """Mark the values as stale: the master values changed, so the next gather must fetch them."""
        self._stale = True
        if self._gathered is not self.master:
            self._gathered.copy_(self._newest)
        if self.sharing.zero == 0:
            self._fetch(0)

    def start_gather(self, stage: int) -> None:
        """Issue the gather for a stage of the program, which uses the parameters from now on. Lower stages
        have a higher priority. No gather is issued if the values are whole or a gather is in flight."""
        self._users.add(stage)
        if self._values_memory is not None and self._values_memory.allocate():
            self._stale = True
        if self._stale:
            self._fetch(stage if self.sharing.zero == 3 else _AFTER_REDUCTIONS + stage)

    def forget_forms(self) -> None:
        """Drop the float8 forms of the weights: the values change, or a program begins or ends."""
        for sink in self._matrix_sinks:
            if sink.forms is not None:
                sink.forms.forget()

    def prepare_replays(self) -> None:
        """Prepare the chunk for captured backwards, which are replayed for every micro-batch without
        Python. A captured backward therefore adds to a zeroed gradient buffer, and makes the float8 forms
        each time."""
        self.overwrites = False
        for sink in self.sinks:
            sink.forms = None

    def _fetch(self, priority: int) -> None:
        """Write `values`. No other method writes them."""
        self._stale = False
        self.forget_forms()
        if self.sharing.zero:
            self._gathering = self._collective.gather(self.values, self._gathered, priority)
        elif not self.master_is_values:
            self.values.copy_(self._newest)

    def await_gather(self) -> None:
        """Wait until every parameter is whole on this rank."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def release(self, stage: int) -> None:
        """Record that a stage no longer uses the parameters. With ZeRO 3, the values are freed when no stage
        uses them."""
        self._users.discard(stage)
        if not self._users:
            self._free_values()

    def start_gradients(self) -> None:
        """Prepare `grad_buffer` for accumulation. The first call of an iteration starts from zero."""
        is_new = self._grad_buffer_memory is not None and self._grad_buffer_memory.allocate()
        if self._fresh:
            self.own_gradients.begin()
            self._has_reduced = False
        if self._fresh or is_new:
            self._begin_accumulation()
        self._fresh = False

    def _begin_accumulation(self) -> None:
        """Start the gradient buffer from zero. The first gradient of a matrix overwrites its memory; only
        vectors, a thousandth of the memory, are zeroed."""
        if not self.overwrites:
            self.grad_buffer.zero_()
            return
        self.grad_buffer[self._num_decayed :].zero_()
        for sink in self._matrix_sinks:
            sink.begin()

    @cached_property
    def _matrix_sinks(self) -> list[GradientSink]:
        pairs = zip(self.sinks, self.entries, strict=self.sharing.has_gradients)
        return [sink for sink, entry in pairs if entry.decays]

    def copy_gradients(self) -> torch.Tensor:
        """Return a copy of the gradients of matrices as they are added up so far."""
        return self._zero_blank(self.grad_buffer[: self._num_decayed].clone())

    def added_since(self, copy: torch.Tensor) -> torch.Tensor:
        """Return what was added to the gradients of matrices since a `copy_gradients`, in its memory."""
        return self._zero_blank(torch.sub(self.grad_buffer[: self._num_decayed], copy, out=copy))

    def _zero_blank(self, gradients: torch.Tensor) -> torch.Tensor:
        """Set the matrices to zero that no gradient has reached: their memory is not written yet."""
        for sink, (start, stop) in zip(self.sinks, self.spans, strict=True):
            if sink.is_blank:
                gradients[start:stop].zero_()
        return gradients

    def settle_gradients(self) -> None:
        """Complete `grad_buffer`: set the gradients of matrices to zero that received none."""
        for sink in self._matrix_sinks:
            sink.settle()

    def add_over(self, group: Group | None) -> None:
        """Sum the gradients with the other stage that holds the same (tied) parameters."""
        self.start_gradients()
        self.settle_gradients()
        self.own_gradients.count_before_mixing()
        all_reduce(self.grad_buffer, group)

    def _kept_gradients(self) -> list[torch.Tensor] | None:
        """Return views of the memory that holds this rank's own gradients after the reduction too, apart from
        partial ones; ``None``: they are lost. ZeRO 1 keeps them in the slices of other ranks; with one
        data-parallel rank all of them stay."""
        sharing = self.sharing
        if sharing.zero >= 2 or sharing.frees_grad_buffer:
            return None
        if sharing.group_size == 1:
            return [self.grad_buffer[row.start : row.stop] for row in self.rows if not row.is_partial]
        if sharing.zero == 1 and self._collective.keeps_other_slices:
            return [self.grad_buffer[: self.start], self.grad_buffer[self.stop :]]
        return None

    def start_reduce(self) -> None:
        """Issue the sum over data-parallel ranks of the gradients added since the last reduction."""
        self.start_gradients()
        self.settle_gradients()
        self.own_gradients.count()
        if self.before_reduce is not None:
            self.before_reduce(self)
        if self.sharing.zero == 0:
            self._reducing = self._collective.all_reduce(self.grad_buffer, _AFTER_GATHERS)
        else:
            add, self._has_reduced = self.sharing.zero >= 2 and self._has_reduced, True
            self._reducing = self._collective.reduce_scatter(
                self.grad_buffer, self.gradients, _AFTER_GATHERS, add=add
            )

    def await_reduce(self) -> None:
        """Wait until this rank's slice of the gradients is summed over data-parallel ranks."""
        assert self._reducing is not None, "the checker proved that it was posted"
        self._reducing.wait()
        self._reducing = None
        self._free_grad_buffer(when=self.sharing.zero >= 2)

    def start_across(self) -> None:
        """Issue the sum across groups of this rank's slice of the gradients. It starts when the reduction in
        flight has ended. Does nothing if one group holds all ranks."""
        if self._across is not None:
            self._summing = self._across.all_reduce(self.gradients, _AFTER_GATHERS, after=self._reducing)

    def await_across(self) -> None:
        """Wait until this rank's slice of the gradients is summed over the ranks of all groups."""
        if self._summing is not None:
            self._summing.wait()
            self._summing = None

    def partial_gradients(self) -> list[tuple[Row, torch.Tensor]]:
        """Return views of this rank's reduced gradients that tensor-parallel ranks still have to sum, each
        with its row."""
        spans = (
            (row, max(row.start, self.start), min(row.stop, self.stop)) for row in self.rows if row.is_partial
        )
        return [(row, self.gradients[a - self.start : b - self.start]) for row, a, b in spans if a < b]

    def restart(self) -> None:
        """Discard the state that transfers keep between steps: the master values were loaded."""
        for collective in self._collectives:
            collective.restart()
        self.end_iteration()

    def rescale_kept(self, ratio: float) -> None:
        """Multiply the gradient residuals that transfers keep by ``ratio``, as the loss scale was."""
        for collective in self._collectives:
            collective.rescale_kept(ratio)

    @property
    def _collectives(self) -> list[BucketCollective]:
        return [self._collective, *([self._across] if self._across is not None else [])]

    def end_iteration(self) -> None:
        """End the iteration after the optimizer step: mark the values stale, and let gradients start from
        zero."""
        self._free_grad_buffer(when=self.sharing.frees_grad_buffer)
        self._fresh = True
        self.mark_stale()
