"""The optimizer as the runtime sees it."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from myriad.kernels.config import Kernels
from myriad.optim.adamw import AdamW
from myriad.optim.config import OptimizerConfig
from myriad.optim.lamb import Lamb
from myriad.optim.region import Region

__all__ = ["Optimizer", "build_optimizer"]


class Optimizer(Protocol):
    """Moves the values of regions by their gradients."""

    steps_done: int
    """Steps taken; a checkpoint sets it."""

    @property
    def regions(self) -> Sequence[Region]:
        """What it moves."""
        ...

    def begin(self, learning_rate: float, gradient_scale: float) -> None:
        """Begins a step with gradients times ``gradient_scale``: what all regions need of each other. From
        here on the gradients' memory is scratch."""
        ...

    def update(self, indices: Sequence[int], stays: torch.Tensor | None = None) -> None:
        """Moves these regions; each once between `begin` and `end`, in any order. AdamW: where ``stays``, a
        float32 number on their device, is 1 and not 0, nothing moves, and nobody waits to know it."""
        ...

    def end(self) -> None:
        """Every region has moved: one more step is done."""
        ...

    def state(self) -> dict[str, list[torch.Tensor]]:
        """Name to one float32 tensor per region, of its length; a checkpoint loads into them in place."""
        ...


def build_optimizer(
    config: OptimizerConfig,
    regions: Sequence[Region],
    num_parameters: int,
    reduce_table: Callable[[torch.Tensor], torch.Tensor],
    kernels: Kernels = "auto",
) -> Optimizer:
    """The configured optimizer over this rank's regions (at least one, which may be empty: it names the
    device).

    ``reduce_table`` gets ``[num_parameters, 2]`` float64 sums of squares of what this rank holds and returns
    those of whole parameters. LAMB calls it once a step on every rank, AdamW never.
    """
    assert regions, "a rank that holds nothing passes one empty region, which says on which device"
    if config.name == "lamb":
        return Lamb(config, regions, num_parameters, reduce_table, kernels)
    return AdamW(config, regions, kernels)
