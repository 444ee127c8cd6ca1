"""State of one iteration on one rank, as the runtime executes its program, and what the end of it calls.

The tensors that an action needs are in one of these tables, each keyed as the program names things:

    tensors    those of other stages: arrived, in flight or sent (`myriad.parallel.pipeline_transfers`)
    saved      the backward of each forward that has not run yet (`myriad.parallel.compute`)
    deferred   weight parts of backwards whose input part has run (zero-bubble)
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from myriad.parallel.batch import Batch
from myriad.parallel.compute import Backward, WeightPart
from myriad.parallel.paired_forward import PairedForward
from myriad.parallel.pipeline_transfers import TransferTables
from myriad.program.actions import Action, Kind
from myriad.program.in_flight import RankProgram

__all__ = ["Finisher", "Iteration"]


class Finisher(Protocol):
    """The end of an iteration: what the runtime calls when the gradients are complete."""

    def clip(self, loss_sum: torch.Tensor, digest: int) -> None:
        """Compute the global gradient norm and begin the optimizer step. ``digest``: hash of this rank's
        batch."""
        ...

    @property
    def orthogonalizes(self) -> bool:
        """Whether the optimizer orthogonalizes matrices before it updates a stage."""
        ...

    def orthogonalize(self, kind: Kind, stage: int) -> None:
        """Run one action of `ORTHOGONALIZATION` on a stage of the program."""
        ...

    def copy_state(self, kind: Kind, stage: int) -> None:
        """Run one action of `COPIES_STATE` on a stage of the program."""
        ...

    def update(self, stage: int) -> None:
        """Update the parameters of a stage of the program."""
        ...


@dataclass
class Iteration:
    """The state of one run of a program."""

    plan: RankProgram
    load: Callable[[], Batch]
    finisher: Finisher | None
    loss_scale: float
    loss_sum: torch.Tensor
    batch: Batch | None = None
    tensors: TransferTables = field(default_factory=TransferTables)
    saved: dict[tuple[int, int], Backward] = field(default_factory=dict)
    deferred: dict[tuple[int, int], WeightPart] = field(default_factory=dict)
    opened: Action | None = None
    """The forward of a pair whose backward comes next."""
    paired: PairedForward | None = None
    """The forwards of the pairs since the last other action."""

    @property
    def training(self) -> bool:
        """Whether this run computes gradients."""
        return self.finisher is not None
