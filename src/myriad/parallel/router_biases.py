"""Balance of experts without a loss: a bias of each expert, which only the choice of experts sees.

    chosen   the k largest of score + bias        gates are scores, without biases
    bias     after each step + rate x sign(mean load - own load), loads of the whole global batch

(DeepSeek-V3, arXiv 2412.19437, section 2.1.2; Wang et al., arXiv 2408.15664.) A bias is stored as a vector of
its router, so that checkpoints, resharding and exports need nothing new. Its gradient is 0, which moves it in
no optimizer, and vectors have no weight decay.

Here every rank also holds all biases of the model in one float32 table: what it computes with does not depend
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

__all__ = ["RouterBiases", "make_biases"]


class RouterBiases:
    """The biases of all routers of a model, ``[routers, experts]``, as this rank's routers use them."""

    def __init__(
        self,
        rate: float,
        names: Sequence[str],
        num_experts: int,
        model: RankModel,
        state: ModelState,
        groups: Groups,
    ) -> None:
        """``names``: full names of the modules of the model that hold a router and its experts."""
        self._rate, self._groups = rate, groups
        self.table = torch.zeros(len(names), num_experts, device=state.counts.device)
        self._stale = True
        numbers = {f"{name}.router.bias": number for number, name in enumerate(names)}
        self._places: list[tuple[Chunk, int, int, bool]] = []
        """Where this rank holds biases: chunk, parameter of the chunk and row of the table; and whether it
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
                    module.exact_bias = self.table[number]

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

    def move(self, loads: Sequence[Sequence[float]]) -> None:
        """Move every bias by the rate. ``loads``: tokens of each expert in the global batch, by router."""
        tokens = torch.tensor(loads, dtype=torch.float64)
        missing = tokens.mean(1, keepdim=True) - tokens
        self.table += (self._rate * missing.sign()).to(self.table)

    def write(self, chunk: Chunk) -> None:
        """Write the biases to this rank's slice of a chunk."""
        for held, position, number, _ in self._places:
            if held is chunk:
                chunk.load(position, self.table[number])


def make_biases(
    definition: Definition, model: RankModel, state: ModelState, groups: Groups
) -> RouterBiases | None:
    """Return the biases of a model's routers; ``None``: it has none."""
    if not isinstance(definition, HasExperts) or definition.balance_bias_rate is None:
        return None
    rate, number = definition.balance_bias_rate, definition.num_experts
    return RouterBiases(rate, definition.mixtures, number, model, state, groups)
