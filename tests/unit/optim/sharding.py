"""Parameters laid end to end, cut into the slices of simulated ranks, as data parallelism does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Barrier, Thread

import torch

from myriad.optim.config import OptimizerConfig
from myriad.optim.optimizer import build_optimizer
from myriad.optim.region import ParameterSlice, Region


@dataclass(frozen=True)
class Parameter:
    """A parameter of a made-up model."""

    values: torch.Tensor
    decays: bool


def regions_of(flat: torch.Tensor, parameters: Sequence[Parameter], start: int, stop: int) -> list[Region]:
    """What the rank with slice ``start:stop`` of the flat memory holds: a region for each kind of decay it
    meets."""
    regions, offset = [], 0
    ends = torch.tensor([p.values.numel() for p in parameters]).cumsum(0).tolist()
    for decays in (True, False):
        held = []
        for row, (parameter, end) in enumerate(zip(parameters, ends, strict=True)):
            low, high = max(start, end - parameter.values.numel()), min(stop, end)
            if parameter.decays == decays and low < high:
                held.append((row, low, high))
        if held:
            offset = held[0][1]
            values = flat[offset : held[-1][2]].clone()
            pieces = tuple(ParameterSlice(row, low - offset, high - offset) for row, low, high in held)
            regions.append(Region(values, torch.zeros_like(values), decays, pieces))
    return regions or [Region(flat[:0].clone(), flat[:0].clone(), True, ())]


class Ranks:
    """Threads that each own a slice of the parameters and sum tables with each other."""

    def __init__(self, config: OptimizerConfig, parameters: Sequence[Parameter], cuts: Sequence[int]) -> None:
        self.flat = torch.cat([p.values.flatten() for p in parameters])
        self.bounds = list(zip([0, *cuts], [*cuts, self.flat.numel()], strict=True))
        self.regions = [regions_of(self.flat, parameters, *bound) for bound in self.bounds]
        self._barrier, self._tables = Barrier(len(self.bounds)), [torch.empty(0)] * len(self.bounds)
        self.optimizers = [
            build_optimizer(config, regions, len(parameters), self._reducer(rank))
            for rank, regions in enumerate(self.regions)
        ]

    def _reducer(self, rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def reduce_table(table: torch.Tensor) -> torch.Tensor:
            self._tables[rank] = table
            self._barrier.wait(10)
            total = torch.stack(self._tables).sum(0)
            self._barrier.wait(10)
            return total

        return reduce_table

    def step(self, gradient: torch.Tensor, learning_rate: float, gradient_scale: float = 1.0) -> None:
        """All ranks take one step; ``gradient`` is flat and whole."""

        def work(rank: int) -> None:
            start = self.bounds[rank][0]
            for region in self.regions[rank]:
                region.gradients.copy_(gradient[start : start + region.gradients.numel()])
                start += region.gradients.numel()
            optimizer = self.optimizers[rank]
            optimizer.begin(learning_rate, gradient_scale)
            for index in reversed(range(len(optimizer.regions))):
                optimizer.update([index])
            optimizer.end()

        threads = [Thread(target=work, args=(rank,)) for rank in range(len(self.bounds))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def values(self) -> torch.Tensor:
        """The whole parameters, flat."""
        return torch.cat([region.values for regions in self.regions for region in regions])
