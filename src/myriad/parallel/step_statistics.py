"""Optional statistics of a step: the gradient noise scale, norms of each layer, the loads of experts, and the
entropy of routers.

    noise scale    before a chunk is reduced, add up the squared norm of this replica's own gradients; with
                   one replica, that of what each backward of a micro-batch adds. The sum and its counterpart
                   after the reduction are two more numbers in the message of CLIP
    layer norms    every n steps: squared norms of gradients (before clipping), of the new parameters and of
                   their changes, each element counted once, in one message of 3 numbers a layer after UPDATE
    expert loads   tokens of each expert in all micro-batches: a number for each block and expert in the
                   message of CLIP
    entropy        of the scores of each token, summed over the same tokens: a number for each block there
    dropped pairs  of tokens and experts, with ``model.expert_capacity``: a number for all blocks there

The noise scale counts the matrices that tensor parallelism cuts, without tied ones: only their gradients are
whole on a rank before the reduction, in every layout, so that the estimate is the same in each layout with
the same replicas, or with one replica the same micro-batches. Experts are left out for the same reason: where
ranks share them (``layout.ep``), their gradients are of tokens of several replicas from the start. Each of
the counted matrices gets a micro-batch's gradient in one action, also where a backward is split in two, so
norms of actions are those of micro-batches. The change of a chunk is computed from a copy of its values, one
chunk at a time.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from myriad.comm.groups import Groups
from myriad.model.definition import Definition, drops_tokens, is_expert, mixtures_of, num_experts_of
from myriad.model.experts import Experts
from myriad.optim.gradient_noise import GradientNoise, NoiseEstimate
from myriad.optim.parameter_norms import sums_of_squares
from myriad.optim.region import ParameterSlice
from myriad.parallel.chunk import Chunk
from myriad.parallel.model_state import ModelState
from myriad.parallel.parameter_table import Row
from myriad.parallel.rank_model import RankModel
from myriad.telemetry.config import TelemetryConfig

__all__ = ["ExpertLoad", "LayerNorms", "StepStatistics"]


class LayerNorms(NamedTuple):
    """L2 norms of each layer, by the layer's name."""

    gradient: Mapping[str, float]
    """Norms of the gradient before clipping."""
    parameter: Mapping[str, float]
    """Norms of the parameters after the update."""
    update: Mapping[str, float]
    """Norms of the change of the parameters."""


class ExpertLoad(NamedTuple):
    """The expert that computed most tokens of a step."""

    layer: str
    expert: int
    ratio: float
    """Its tokens over those of the mean expert of its block: 1 if all have equally many."""


class StepStatistics:
    """Collects the statistics of one rank."""

    def __init__(
        self,
        config: TelemetryConfig,
        model: RankModel,
        state: ModelState,
        groups: Groups,
        definition: Definition,
        shares: Sequence[int],
    ) -> None:
        """``shares``: micro-batches of each replica."""
        self._state, self._groups, self._layers = state, groups, tuple(definition.names)
        device = state.counts.device
        self.change_shares(shares)
        self.noise = GradientNoise(config.noise_scale_decay) if config.noise_scale else None
        """The averages of the noise scale, if the job asks for it."""
        self._small = torch.zeros((), dtype=torch.float64, device=device)
        if self.noise is not None:
            counts = partial(_is_counted, definition)
            counted = [counts(row) and chunk is not model.tied for chunk, row in state.rows]
            self._counted = state.counts * torch.tensor(counted, dtype=torch.float64).to(device)
            self._pieces = {
                chunk: tuple(ParameterSlice(0, row.start, row.stop) for row in chunk.rows if counts(row))
                for chunk in model.chunks
                if chunk is not model.tied
            }
            for chunk, pieces in self._pieces.items():
                chunk.before_reduce = self._add_own if pieces and not self.counts_micro_batches else None
        self._every = config.layer_norms_every
        if self._every:
            numbers = [_layer_of(row.entry.name, self._layers) for _, row in state.rows]
            one_hot = torch.zeros(len(self._layers), len(state.rows), dtype=torch.float64)
            one_hot[numbers, range(len(numbers))] = 1.0
            self._of_layers = one_hot.to(device) * state.counts
            self._squares = torch.zeros(2, len(state.rows), dtype=torch.float64, device=device)
        self._is_due = False
        self._loads_every, self._loads_due = config.expert_loads_every, False
        self._mixtures = mixtures = tuple(mixtures_of(definition))
        self._loads = torch.zeros(len(mixtures), num_experts_of(definition), dtype=torch.int64, device=device)
        """Tokens of each expert in this rank's part of the step."""
        self._entropies = torch.zeros(len(mixtures), dtype=torch.float64, device=device)
        """Sums of the entropies of the routers' scores in this rank's part of the step, once for each pair of
        a token and an expert."""
        self._dropped = torch.zeros((), dtype=torch.int64, device=device)
        """Pairs of a token and an expert that were dropped in this rank's part of the step."""
        self._drops = drops_tokens(definition)
        self._counts_loads = groups.grid.index("etp") == 0  # ranks that share experts route the same tokens
        for stage in model.stages.values() if mixtures else ():
            for number, layer in stage.layers.items():
                for path, module in layer.named_modules(prefix=self._layers[number]):
                    if isinstance(module, Experts):
                        own = self._mixtures.index(path)
                        module.loads, module.entropy = self._loads[own], self._entropies[own]
                        module.dropped = self._dropped if self._drops else None

    def change_shares(self, shares: Sequence[int]) -> None:
        """Use other numbers of micro-batches of the replicas from the next iteration on."""
        small = shares if len(shares) > 1 else (1,) * shares[0]
        self._shares = sum((share / sum(small)) ** 2 for share in small)

    @property
    def counts_micro_batches(self) -> bool:
        """Whether the small batches of the noise scale are micro-batches: there is one replica."""
        return self.noise is not None and self._groups.grid.layout.dp == 1

    @contextmanager
    def count_micro_batch(self, chunks: Sequence[Chunk]) -> Iterator[None]:
        """Add the squared norm of the gradients that a backward adds to the chunks of its stage meanwhile."""
        copies = [(chunk, chunk.copy_gradients()) for chunk in chunks if self._pieces.get(chunk)]
        yield
        while copies:
            chunk, copy = copies.pop()
            self._small += sums_of_squares([chunk.added_since(copy)], [self._pieces[chunk]], 1)[0]

    def begin(self, step: int) -> None:
        """Begin an iteration; ``step`` 0 is none of training."""
        self._is_due = self._every > 0 and step > 0 and step % self._every == 0
        every = self._loads_every
        self._loads_due = every > 0 and (step == 1 or (step > 0 and step % every == 0))
        self._loads.zero_()
        self._entropies.zero_()
        self._dropped.zero_()
        if self.noise is not None:
            self._small.zero_()
        if self._is_due:
            self._squares.zero_()

    @property
    def num_sums(self) -> int:
        """Numbers that `write_sums` adds to the message of CLIP."""
        return self._entropies_to + self._drops

    @property
    def _entropies_to(self) -> int:
        return self._entropies_from + self._entropies.numel()

    @property
    def _entropies_from(self) -> int:
        return self._num_noise + self._loads.numel()

    @property
    def _num_noise(self) -> int:
        return 0 if self.noise is None else 2

    def _add_own(self, chunk: Chunk) -> None:
        """Add the squared norm of the gradients that this rank has added up since the last reduction."""
        self._small += sums_of_squares([chunk.grad_buffer], [self._pieces[chunk]], 1)[0]

    def write_sums(self, into: torch.Tensor, squares: torch.Tensor) -> None:
        """Write this rank's part of the sums. ``squares``: squared norms of the reduced gradients, by row."""
        if self.noise is not None:
            into[0] = self._small
            into[1] = (squares * self._counted).sum()
        if self._counts_loads:
            into[self._num_noise : self._entropies_from] = self._loads.flatten()
            into[self._entropies_from : self._entropies_to] = self._entropies
            into[self._entropies_to :] = self._dropped

    def noise_of(self, sums: Sequence[float], scale: float, num_targets: int) -> NoiseEstimate | None:
        """Add a step's sums over all ranks. ``scale``: loss scale. ``None``: there is one small batch."""
        sums = sums[: self._num_noise]
        if self.noise is None or self._shares >= 1 or not all(map(math.isfinite, sums)):
            return None
        small, big = (one / scale**2 for one in sums)
        return self.noise.add(small, big, self._shares, num_targets)

    def loads_in(self, sums: Sequence[float]) -> list[Sequence[float]]:
        """Return the tokens of each expert, from a step's sums over all ranks, by mixture."""
        number = self._loads.shape[1]
        starts = range(self._num_noise, self._entropies_from, number) if number else ()
        return [sums[start : start + number] for start in starts]

    def router_entropy(self, sums: Sequence[float]) -> float | None:
        """Return the mean entropy of the scores of a token, over tokens and routers, from a step's sums over
        all ranks: 1 if all experts have equal scores, 0 if one has all. ``None`` without experts, and if no
        token was counted."""
        num_scores, pairs = self._loads.shape[1], sum(sums[self._num_noise : self._entropies_from])
        if not pairs:
            return None
        return sum(sums[self._entropies_from : self._entropies_to]) / (pairs * math.log(num_scores))

    def dropped_share(self, sums: Sequence[float]) -> float | None:
        """Return the share of the pairs of a token and an expert that were dropped, from a step's sums over
        all ranks. ``None`` without a capacity of experts, and if no token was counted."""
        pairs = sum(sums[self._num_noise : self._entropies_from])
        return sums[self._entropies_to] / pairs if self._drops and pairs else None

    def largest_load(self, loads: Sequence[Sequence[float]]) -> ExpertLoad | None:
        """Return the expert with the largest of these loads; ``None`` without experts."""
        found = []
        for name, own in zip(self._mixtures, loads, strict=True):
            if any(own):
                layer, most = name.rpartition(".")[0], max(own)
                found.append(ExpertLoad(layer, own.index(most), most * len(own) / sum(own)))
        return max(found, key=lambda one: one.ratio, default=None)

    def all_loads(self, loads: Sequence[Sequence[float]]) -> dict[str, tuple[float, ...]] | None:
        """Return the load of each expert, 1 for the mean of its block, by block; ``None`` if they are not due
        or there are no experts."""
        if not (self._loads_due and self._mixtures):
            return None
        return {
            name.rpartition(".")[0]: tuple(len(own) * one / max(1.0, sum(own)) for one in own)
            for name, own in zip(self._mixtures, loads, strict=True)
        }

    def before_update(self, chunk: Chunk) -> list[torch.Tensor]:
        """Return copies of a chunk's values, if the step's norms are due."""
        return [region.values.clone() for region in chunk.regions] if self._is_due else []

    def after_update(self, chunk: Chunk, before: Sequence[torch.Tensor]) -> None:
        """Add the squared norms of a chunk's new values and of their changes. ``before`` is scratch."""
        if not before:
            return
        pieces, num_rows = [region.pieces for region in chunk.regions], len(self._state.rows)
        values = [region.values for region in chunk.regions]
        for old, new in zip(before, values, strict=True):
            old.sub_(new)
        self._squares[0] += sums_of_squares(values, pieces, num_rows)
        self._squares[1] += sums_of_squares(before, pieces, num_rows)

    @property
    def is_due(self) -> bool:
        """Whether the norms of this step's layers are due."""
        return self._is_due

    def layer_sums(self, squares: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the squared norms, ``[3 x layers]``. ``squares``: squared norms of the
        gradients, by row."""
        return (torch.cat((squares[None], self._squares)) @ self._of_layers.T).flatten()

    def layer_norms(self, sums: Sequence[float], scale: float) -> LayerNorms:
        """Return the norms from the sums over all ranks. ``scale``: loss scale."""
        number = len(self._layers)
        norms = [math.sqrt(one) for one in sums]
        gradient = [norm / scale for norm in norms[:number]]
        parts = (gradient, norms[number : 2 * number], norms[2 * number :])
        return LayerNorms(*(dict(zip(self._layers, part, strict=True)) for part in parts))


def _is_counted(definition: Definition, row: Row) -> bool:
    """Return whether the noise scale counts a row of the table: this rank's gradient of it needs no sum over
    tensor-parallel ranks, in any layout in which each rank has key and value heads of its own, and is of its
    replica's tokens alone."""
    whole = row.entry.cut is not None and row.entry.decays and row.copies == 1
    return whole and not is_expert(definition, row.entry.name)


def _layer_of(name: str, layers: Sequence[str]) -> int:
    return next(index for index, layer in enumerate(layers) if name.startswith(f"{layer}."))
