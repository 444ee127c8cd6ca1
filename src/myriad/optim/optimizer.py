"""The interface between the runtime and the optimizers."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from myriad.kernels.config import Kernels
from myriad.optim.config import OptimizerConfig
from myriad.optim.lamb import Lamb
from myriad.optim.moments import AdamW
from myriad.optim.region import Region

__all__ = ["Optimizer", "build_optimizer"]


class Optimizer(Protocol):
    """Update the values of regions by their gradients."""

    steps_done: int
    """Number of completed steps; a checkpoint sets it."""

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
        """Return the state to store: a name to one float32 tensor per region, of its length.

        A checkpoint loads into the tensors in place.
        """
        ...


def build_optimizer(
    config: OptimizerConfig,
    regions: Sequence[Region],
    num_parameters: int,
    reduce_table: Callable[[torch.Tensor], torch.Tensor],
    kernels: Kernels = "auto",
) -> Optimizer:
    """Build the configured optimizer over this rank's regions (at least one, which may be empty: it defines
    the device).

    ``reduce_table`` gets ``[num_parameters, 2]`` float64 sums of squares of what this rank holds and returns
    those of whole parameters. LAMB calls it once a step on every rank, AdamW never.
    """
    assert regions, "a rank that holds nothing passes one empty region, which says on which device"
    if config.name == "lamb":
        return Lamb(config, regions, num_parameters, reduce_table, kernels)
    return AdamW(config, regions, kernels)
