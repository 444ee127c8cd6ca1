"""What routers keep of the loads of the global batch from one step to the next: biases that balance experts
without a loss, and the loads that weight the balance loss of the next step.

    biases   chosen   the k largest of score + bias        gates are scores, without biases
             bias     after each step + rate x sign(mean load - own load)
    loads    loss     weight x sum over tokens and experts of share of the score x load of the step before
             load     after each step tokens of the expert over those of the mean one of its block; at first 1

Biases: DeepSeek-V3, arXiv 2412.19437, section 2.1.2; Wang et al., arXiv 2408.15664. Loads of a global batch
instead of sequences in the loss: Qiu et al., arXiv 2501.11873, who sum those of the micro-batches of the
current step so far, over all ranks in each block. Here they are of the step before, so that nothing is sent
and neither micro-batches nor the layout matter.

Both are vectors of their router, so that checkpoints and resharding need nothing new. Their gradient is 0,
which moves them in no optimizer, and vectors have no weight decay.

Every rank also holds the vectors of the whole model in a float32 table: what it computes with does not depend
on the precision of the computation. All ranks read the same loads, in whole numbers, in the message of CLIP,
so all tables stay equal bit by bit, and each rank writes its part of them to its parameters.
"""

from collections.abc import Sequence

import torch

from myriad.comm.collectives import all_reduce
from myriad.comm.groups import Groups
from myriad.model.definition import Definition, HasExperts
from myriad.model.experts import Router
from myriad.parallel.chunk import Chunk
from myriad.parallel.model_state import ModelState
from myriad.parallel.rank_model import RankModel

__all__ = ["RouterTable", "make_router_tables"]


class RouterTable:
    """One vector of every router of a model, ``[routers, experts]``, as this rank's routers use it."""

    parameter: str
    """Name of the vector in its router."""

    def __init__(self, definition: HasExperts, model: RankModel, state: ModelState, groups: Groups) -> None:
        names = definition.mixtures
        self._groups = groups
        self.table = torch.zeros(len(names), definition.num_experts, device=state.counts.device)
        self._stale = True
        numbers = {f"{name}.router.{self.parameter}": number for number, name in enumerate(names)}
        self._places: list[tuple[Chunk, int, int, bool]] = []
        """Where this rank holds vectors: chunk, parameter of the chunk and row of the table; and whether it
        counts them, as in `ModelState.counts`."""
        counted = {id(row.entry): bool(one) for (_, row), one in zip(state.rows, state.counts, strict=True)}
        for chunk in model.chunks:
            for position, entry in enumerate(chunk.entries):
                if entry.name not in numbers:
                    continue
                number = numbers[entry.name]
                self._places.append((chunk, position, number, counted[id(entry)]))
                for module, _ in entry.homes:
                    assert isinstance(module, Router)
                    self._use(module, self.table[number])

    def _use(self, router: Router, values: torch.Tensor) -> None:
        """Let a router of this rank compute with a row of the table."""
        raise NotImplementedError

    def move(self, loads: Sequence[Sequence[float]]) -> None:
        """Set the values for the next step. ``loads``: tokens of each expert in the global batch, by
        router."""
        raise NotImplementedError

    def mark_stale(self) -> None:
        """Mark the table as stale: the parameters were set."""
        self._stale = True

    def refresh(self) -> None:
        """Read the table from the parameters if they were set. A collective call of all ranks."""
        if not self._stale:
            return
        self._stale = False
        own = torch.zeros_like(self.table, dtype=torch.float64)
        for chunk, position, number, counts in self._places:
            begin, end = chunk.spans[position]
            start, stop = max(begin, chunk.start), min(end, chunk.stop)
            if counts and start < stop:
                held = chunk.stored[start - chunk.start : stop - chunk.start]
                own[number, start - begin : stop - begin] = held
        self.table.copy_(all_reduce(own, self._groups.world))

    def write(self, chunk: Chunk) -> None:
        """Write the values to this rank's slice of a chunk."""
        for held, position, number, _ in self._places:
            if held is chunk:
                chunk.load(position, self.table[number])


class _Biases(RouterTable):
    parameter = "bias"

    def __init__(
        self, rate: float, definition: HasExperts, model: RankModel, state: ModelState, groups: Groups
    ) -> None:
        super().__init__(definition, model, state, groups)
        self._rate = rate

    def _use(self, router: Router, values: torch.Tensor) -> None:
        router.exact_bias = values

    def move(self, loads: Sequence[Sequence[float]]) -> None:
        tokens = torch.tensor(loads, dtype=torch.float64)
        missing = tokens.mean(1, keepdim=True) - tokens
        self.table += (self._rate * missing.sign()).to(self.table)


class _Loads(RouterTable):
    parameter = "batch_loads"

    def _use(self, router: Router, values: torch.Tensor) -> None:
        router.exact_loads = values

    def move(self, loads: Sequence[Sequence[float]]) -> None:
        tokens = torch.tensor(loads, dtype=torch.float64)
        self.table.copy_(tokens / tokens.mean(1, keepdim=True))


def make_router_tables(
    definition: Definition, model: RankModel, state: ModelState, groups: Groups
) -> tuple[RouterTable, ...]:
    """Return the tables of what a model's routers keep from one step to the next."""
    if not isinstance(definition, HasExperts):
        return ()
    found: list[RouterTable] = []
    if definition.balance_bias_rate is not None:
        found.append(_Biases(definition.balance_bias_rate, definition, model, state, groups))
    if definition.keeps_loads:
        found.append(_Loads(definition, model, state, groups))
    return tuple(found)
