"""The interface between the runtime and the optimizers, and LAMB, the optimizer that needs norms of
parameters.

LAMB (You et al. 2019, arXiv 1904.00962, algorithm 2), correct when parameters are sharded:

    r = m^ / (sqrt(v^) + epsilon)        Adam's direction, both moments with bias correction
    u = r + weight_decay x w
    w = w - learning_rate x |w| / |u| x u      norms over the whole parameter; 1 where either is zero

Norms and biases (regions without weight decay) use plain Adam, as in the reference implementations. The
norms need every rank that holds a part: one call of ``reduce_table`` for all parameters, between two
passes over the memory. ``u`` is stored in the gradients' memory, so nothing of the parameters' size is
allocated. On a GPU the first pass is one kernel that also computes the norms, and the second takes its
rates from the device: the host waits for neither.
"""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from myriad.kernels.config import Kernels
from myriad.optim.config import OptimizerConfig
from myriad.optim.host_state import HostState
from myriad.optim.moments import AdamW, Moments, cache_blocks
from myriad.optim.muon import MatrixPart, Muon
from myriad.optim.parameter_norms import Runs, add_runs, sums_of_squares
from myriad.optim.region import Region

if TYPE_CHECKING:
    from myriad.kernels.triton.optimizer_kernels import Blocks

__all__ = ["Optimizer", "build_optimizer"]


class Optimizer(Protocol):
    """Update the values of regions by their gradients."""

    steps_done: int
    """Number of completed steps; a checkpoint sets it."""
    config: OptimizerConfig
    """Coefficients of the next step; only those that are numbers may change."""

    @property
    def host(self) -> HostState | None:
        """The state in host memory; ``None``: it stays on the device."""
        ...

    @property
    def regions(self) -> Sequence[Region]:
        """The regions that the optimizer updates."""
        ...

    def begin(self, learning_rate: float, gradient_scale: float) -> None:
        """Begin a step with gradients times ``gradient_scale``, and compute what depends on all regions.

        From here on the gradients' memory is scratch.
        """
        ...

    def update(self, indices: Sequence[int], stays: torch.Tensor | None = None) -> None:
        """Update these regions, each once between `begin` and `end`, in any order.

        With AdamW, ``stays`` may be a float32 number on their device. If it is 1 and not 0, no value changes;
        the host does not wait for it."""
        ...

    def end(self) -> None:
        """End the step after every region was updated."""
        ...

    def state(self) -> dict[str, list[torch.Tensor]]:
        """Return the state to store: a name to one float32 tensor per region, of its length, or empty where
        the region has no such state.

        A checkpoint loads into the tensors in place.
        """
        ...


def build_optimizer(
    config: OptimizerConfig,
    regions: Sequence[Region],
    num_parameters: int,
    reduce_table: Callable[[torch.Tensor], torch.Tensor] | None,
    kernels: Kernels = "auto",
    matrix_parts: Sequence[Sequence[MatrixPart]] = (),
    *,
    on_host: Collection[int] = (),
) -> Optimizer:
    """Build the configured optimizer over this rank's regions (at least one, which may be empty: it defines
    the device).

    ``reduce_table`` gets ``[num_parameters, 2]`` float64 sums of squares of what this rank holds and returns
    those of whole parameters. LAMB needs it, and calls it once a step on every rank. ``matrix_parts``: for
    Muon, the parts of matrices in each region. ``on_host``: regions whose state is in host memory
    between updates. LAMB cannot: it begins the updates of all regions at once.
    """
    assert regions, "a rank that holds nothing passes one empty region, which says on which device"
    if config.name == "muon":
        return Muon(config, regions, matrix_parts, kernels, on_host=on_host)
    if config.name == "lamb":
        assert not on_host, "a job's rule"
        assert reduce_table is not None, "LAMB needs the norms of whole parameters"
        return _Lamb(config, regions, num_parameters, reduce_table, kernels)
    return AdamW(config, regions, kernels, on_host=on_host)


class _Lamb(Moments):
    """Update regions with LAMB, which scales Adam's step by each parameter's trust ratio."""

    def __init__(
        self,
        config: OptimizerConfig,
        regions: Sequence[Region],
        num_parameters: int,
        reduce_table: Callable[[torch.Tensor], torch.Tensor],
        kernels: Kernels = "auto",
    ) -> None:
        super().__init__(config, regions, kernels)
        self._num_parameters, self._reduce_table = num_parameters, reduce_table
        self._ratios: torch.Tensor | list[float] = []
        """Trust ratio of each parameter, in the current step."""
        self._blocks: dict[int, tuple[Blocks, Runs]] = {}
        """Blocks of each region with weight decay, for Triton's kernels."""

    def begin(self, learning_rate: float, gradient_scale: float) -> None:
        """Write ``u`` of every region with weight decay over its gradients, and reduce the norms."""
        super().begin(learning_rate, gradient_scale)
        decayed = [i for i, region in enumerate(self.regions) if region.decays and region.values.numel()]
        if self.in_triton:
            self._ratios = self._ratios_of(self._update_in_triton(decayed))
            return
        for index in decayed:
            self._write_update(index)
        self._ratios = self._ratios_of(self._squares(decayed)).tolist()

    def update(self, indices: Sequence[int], stays: torch.Tensor | None = None) -> None:
        """Update the values of these regions."""
        assert stays is None, "`begin` has read all gradients: whoever calls knows that they are finite"
        self.move_in_place(indices, decays=False)
        if isinstance(self._ratios, torch.Tensor):
            self._apply_in_triton(indices, self._ratios)
            return
        for region in (self.regions[index] for index in indices if self.regions[index].decays):
            for piece in region.pieces:
                part = slice(piece.start, piece.stop)
                rate = -self.learning_rate * self._ratios[piece.parameter]
                region.values[part].add_(region.gradients[part], alpha=rate)

    def _write_update(self, index: int) -> None:
        """Write ``u`` of one region over its gradients."""
        region = self.regions[index]
        for part in cache_blocks(region.values):
            # from zero, with a rate of -1 and no decay, the kernel returns Adam's direction itself
            direction = torch.zeros_like(region.values[part])
            self.move([direction], [(index, part)], learning_rate=-1.0, weight_decay=0.0)
            decay = self.config.weight_decay
            torch.add(direction, region.values[part], alpha=decay, out=region.gradients[part])

    def _squares(self, indices: Sequence[int]) -> torch.Tensor:
        """Return ``[num_parameters, 2]`` float64: sums of squares of the values and of ``u`` that this
        rank holds."""
        regions = [self.regions[index] for index in indices] or [_empty_like(self.regions[0])]
        pieces = [region.pieces for region in regions]
        values = sums_of_squares([region.values for region in regions], pieces, self._num_parameters)
        updates = sums_of_squares([region.gradients for region in regions], pieces, self._num_parameters)
        return torch.stack((values, updates), 1)

    def _ratios_of(self, squares: torch.Tensor) -> torch.Tensor:
        """Return ``|w| / |u|`` of every parameter; 1 where either is zero."""
        table = self._reduce_table(squares).sqrt()
        return torch.where((table > 0).all(1), table[:, 0] / table[:, 1], 1.0)

    def _update_in_triton(self, indices: Sequence[int]) -> torch.Tensor:
        """Write ``u`` over the gradients of these regions, and return the squares."""
        from myriad.kernels.triton.optimizer_kernels import cut_blocks, lamb_update

        device = self.regions[0].values.device
        table = torch.zeros(self._num_parameters, 2, dtype=torch.float64, device=device)
        for index in indices:
            region = self.regions[index]
            if index not in self._blocks:
                pieces = [(piece.parameter, piece.start, piece.stop) for piece in region.pieces]
                cut = cut_blocks(pieces, device)
                self._blocks[index] = cut, Runs.on(device, cut.runs)
            (blocks, runs), moments = self._blocks[index], (self.exp_avg[index], self.exp_avg_sq[index])
            coefficients = self.coefficients(decays=True)
            squares = lamb_update(region.values, region.gradients, *moments, blocks, coefficients)
            add_runs(table, runs, squares.double())
        return table

    def _apply_in_triton(self, indices: Sequence[int], ratios: torch.Tensor) -> None:
        from myriad.kernels.triton.optimizer_kernels import lamb_move

        rates = (ratios * self.learning_rate).float()
        for index in indices:
            if cut := self._blocks.get(index):
                lamb_move(self.regions[index].values, self.regions[index].gradients, cut[0], rates)


def _empty_like(region: Region) -> Region:
    return Region(region.values[:0], region.gradients[:0], True, ())
