"""A chunk: parameters as data parallelism sees them, one flat buffer cut into equal slices.

    parameters     w1 | w2 | w3 | norm | bias | pad        decayed ones first, padded to a multiple of dp
    rank 0 of 2    [--- slice ---)                          master values, optimizer state: float32
    rank 1 of 2                  [--- slice ---)

| ZeRO | values (compute dtype) | gradient sums (float32)        | master, optimizer |
|------|------------------------|--------------------------------|-------------------|
| 0    | whole                  | whole                          | whole             |
| 1    | whole                  | whole                          | slice             |
| 2    | whole                  | whole until reduced, then slice| slice             |
| 3    | whole while in use     | whole until reduced, then slice| slice             |

(Rajbhandari et al., arXiv 1910.02054.) Memory that comes and goes does so by resizing a storage: the
parameters stay views of it, and autograd's saved tensors with them. In float32 the master values *are* the
values (or their slice), except where parameters travel compressed: then what everybody has is not exact.

Gathering and reducing are posted (`start_...`) and waited for (`await_...`); the courier carries them
meanwhile.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import nn

from myriad.comm.collectives import all_reduce
from myriad.comm.courier import Courier, Delivery
from myriad.comm.groups import Group
from myriad.kernels.gradient import GradientSink, set_sink
from myriad.model.definition import Shard
from myriad.optim.region import Piece, Region

__all__ = ["Chunk", "Entry", "Sharing"]

_AFTER_GATHERS = 2**20
"""Priority of reductions: nobody waits for them before the step."""
_AFTER_REDUCTIONS = 2**21
"""Of gathers for a whole iteration, which where they meet a reduction are for the next one."""


@dataclass(frozen=True)
class Entry:
    """One parameter of a chunk: where its values are used, and how it is shared."""

    name: str
    homes: tuple[tuple[nn.Module, str], ...]
    """(module, attribute) of every use; more than one when it is tied on this rank."""
    shape: torch.Size
    cut: Shard | None
    """How tensor-parallel ranks share it; ``None``: whole on each."""
    sums_over_tp: bool
    """Whole on every tensor-parallel rank, with gradients that are partial sums."""

    @property
    def decays(self) -> bool:
        """Matrices decay; norms and biases do not."""
        return len(self.shape) >= 2


@dataclass(frozen=True)
class Sharing:
    """The ranks that hold the same chunk, and what they share of it."""

    courier: Courier
    """Goes between them."""
    dp_rank: int
    dp_size: int
    zero: int
    exact: bool
    """Parameters travel as they are, not compressed."""
    frees_sums: bool = False
    """Gradient sums are given back when the chunk is updated; needs ZeRO 0 or 1, where they would stay."""


class Chunk:
    """Parameters in one flat buffer, sharded over data-parallel ranks."""

    def __init__(
        self,
        entries: Iterable[Entry],
        sharing: Sharing,
        dtype: torch.dtype,
        device: torch.device,
        first_row: int,
    ) -> None:
        self.entries = sorted(entries, key=lambda entry: not entry.decays)
        self.sharing, self.first_row = sharing, first_row
        ends = list(accumulate((entry.shape.numel() for entry in self.entries), initial=0))
        self.spans = list(pairwise(ends))
        self._num_decayed = sum(entry.shape.numel() for entry in self.entries if entry.decays)
        self.size = -(-ends[-1] // sharing.dp_size) * sharing.dp_size
        part = self.size // sharing.dp_size if sharing.zero else self.size
        self.start = sharing.dp_rank * part if sharing.zero else 0
        self.stop = self.start + part
        self._allocate(dtype, device)
        self._attach()
        self.regions = self._regions()
        """This rank's slice as the optimizer sees it: what decays, then what does not."""
        self._exchange = sharing.courier.exchange(self.size, dtype)
        self._gathering: Delivery | None = None
        self._reducing: Delivery | None = None
        self._own_sum: torch.Tensor | None = None
        self._is_mixed = False
        self._users: set[int] = set()
        self._stale = self._fresh = True
        self._drop_values()
        self._drop_sums(when=sharing.zero >= 2 or sharing.frees_sums)

    def _allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        sharing = self.sharing
        make = torch.empty if sharing.zero == 3 else torch.zeros
        self.values = make(self.size, dtype=dtype, device=device)
        shares_memory = dtype == torch.float32 and sharing.zero < 3 and sharing.exact
        self.master = self._slice(self.values) if shares_memory else self._new_slice(device)
        self.sums = torch.empty(self.size, device=device)
        self.gradients = self._slice(self.sums) if sharing.zero < 2 else self._new_slice(device)

    @property
    def master_is_values(self) -> bool:
        """The master values are the values that are used, or their slice: one memory."""
        return self.master.untyped_storage().data_ptr() == self.values.untyped_storage().data_ptr()

    def _drop_values(self) -> None:
        if self.sharing.zero == 3:
            self.values.untyped_storage().resize_(0)

    def _drop_sums(self, *, when: bool) -> None:
        if when:
            self.sums.untyped_storage().resize_(0)

    def _slice(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[self.start : self.stop]

    def _new_slice(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(self.stop - self.start, device=device)

    def _attach(self) -> None:
        """Makes every parameter a view of the values, with a sink that is a view of the gradient sums.

        ``.data`` gives each view a version counter of its own: gathering again must not look like a write to
        what autograd saved.
        """
        self.sinks: list[GradientSink] = []
        """Where each parameter's gradients go."""
        for entry, (start, stop) in zip(self.entries, self.spans, strict=True):
            parameter = nn.Parameter(self.values.data[start:stop].view(entry.shape))
            sink = GradientSink(self.sums.data[start:stop].view(entry.shape))
            set_sink(parameter, sink)
            parameter.register_post_accumulate_grad_hook(_to_sink)
            for module, attribute in entry.homes:
                setattr(module, attribute, parameter)
            self.sinks.append(sink)

    def _regions(self) -> list[Region]:
        middle = min(max(self._num_decayed, self.start), self.stop)
        bounds = ((self.start, middle, True), (middle, self.stop, False))
        return [self._region(a, b, decays) for a, b, decays in bounds if b > a]

    def _region(self, start: int, stop: int, decays: bool) -> Region:
        inside = slice(start - self.start, stop - self.start)
        pieces = tuple(
            Piece(self.first_row + row, max(a, start) - start, min(b, stop) - start)
            for row, (a, b) in enumerate(self.spans)
            if max(a, start) < min(b, stop)
        )
        return Region(self.master[inside], self.gradients[inside], decays, pieces)

    def holds(self, row: int) -> bool:
        """Whether a part of this parameter lies in this rank's slice."""
        start, stop = self.spans[row]
        return max(start, self.start) < min(stop, self.stop)

    def load(self, row: int, values: torch.Tensor) -> None:
        """Sets one parameter of this rank's slice from its (tensor-parallel) whole; other ranks' slices by
        `gather`."""
        start, stop = self.spans[row]
        a, b = max(start, self.start), min(stop, self.stop)
        if a < b:
            self.master[a - self.start : b - self.start].copy_(values.reshape(-1)[a - start : b - start])

    def mark_stale(self) -> None:
        """The master values changed: the next gather must fetch."""
        self._stale = True
        if self.sharing.zero == 0:
            self._fetch(0)

    def start_gather(self, stage: int) -> None:
        """Posts the gather for a stage of the program, which holds the parameters from now on; lower stages
        are more urgent. Nothing travels where they are whole or on their way already."""
        self._users.add(stage)
        if self.values.untyped_storage().size() == 0:
            self.values.untyped_storage().resize_(self.size * self.values.element_size())
            self._stale = True
        if self._stale:
            self._fetch(stage if self.sharing.zero == 3 else _AFTER_REDUCTIONS + stage)

    def _fetch(self, priority: int) -> None:
        self._stale = False
        if self.sharing.zero:
            self._gathering = self._exchange.gather(self.values, self.master, priority)
        elif self.values.data_ptr() != self.master.data_ptr():
            self.values.copy_(self.master)

    def await_gather(self) -> None:
        """Every parameter is whole on this rank."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def release(self, stage: int) -> None:
        """A stage needs the parameters no more; without users they are dropped (ZeRO 3)."""
        self._users.discard(stage)
        if not self._users:
            self._drop_values()

    def start_gradients(self) -> None:
        """Gradients are about to be summed into `sums`: at the first call of an iteration from zero."""
        if self._fresh:
            self._fresh, self._own_sum = False, None
            if self.sharing.zero >= 2:
                self.gradients.zero_()
            if self.sums.untyped_storage().size() == 0:
                self._allocate_sums()
            else:
                self.sums.zero_()
        elif self.sums.untyped_storage().size() == 0:
            self._allocate_sums()

    def _allocate_sums(self) -> None:
        self.sums.untyped_storage().resize_(self.size * 4)
        self.sums.zero_()

    def add_over(self, group: Group | None) -> None:
        """Sums the gradients with the other stage that holds the same (tied) parameters."""
        self.start_gradients()
        self._add_up()
        self._is_mixed = True
        all_reduce(self.sums, group)

    def _add_up(self) -> None:
        """What this rank made by itself, before it travels: to know afterwards who made a NaN."""
        total = self.sums.sum()
        self._own_sum = total if self._own_sum is None else self._own_sum + total

    @property
    def was_non_finite(self) -> bool:
        """This rank's own gradients of this iteration were not all finite, before they were reduced."""
        return self._own_sum is not None and not bool(torch.isfinite(self._own_sum))

    def start_reduce(self) -> None:
        """Posts the sum over data-parallel ranks of what was added since the last reduction."""
        self.start_gradients()
        if not self._is_mixed:
            self._add_up()
        self._is_mixed = False
        if self.sharing.zero == 0:
            self._reducing = self._exchange.all_reduce(self.sums, _AFTER_GATHERS)
        else:
            add = self.sharing.zero >= 2
            self._reducing = self._exchange.reduce_scatter(self.sums, self.gradients, _AFTER_GATHERS, add=add)

    def await_reduce(self) -> None:
        """This rank's slice of the gradients is summed over data-parallel ranks."""
        assert self._reducing is not None, "the checker proved that it was posted"
        self._reducing.wait()
        self._reducing = None
        self._drop_sums(when=self.sharing.zero >= 2)

    def partial_gradients(self) -> list[torch.Tensor]:
        """Views of this rank's reduced gradients that tensor-parallel ranks have still to add up."""
        spans = zip(self.entries, self.spans, strict=True)
        partial = ((max(a, self.start), min(b, self.stop)) for entry, (a, b) in spans if entry.sums_over_tp)
        return [self.gradients[a - self.start : b - self.start] for a, b in partial if a < b]

    def restart(self) -> None:
        """The master values were loaded: whatever transfers kept for later counts no more."""
        self._exchange.restart()
        self.end_iteration()

    def rescale_kept(self, ratio: float) -> None:
        """The loss scale was multiplied by ``ratio``: so is what transfers keep of earlier gradients."""
        self._exchange.rescale_kept(ratio)

    def end_iteration(self) -> None:
        """After the optimizer step: gradients start from zero again, values are stale."""
        self._drop_sums(when=self.sharing.frees_sums)
        self._fresh = True
        self.mark_stale()


def _to_sink(parameter: torch.Tensor) -> None:
    """Moves a gradient that autograd made to the sink; where an operator fed the sink itself there is
    none."""
    if parameter.grad is not None:
        parameter.sink.add(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None
