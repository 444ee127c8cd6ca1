"""Seconds of the actions of one stage of a program, as the simulators read them."""

from dataclasses import dataclass

from myriad.planner.cost.layer_costs import LayerTimes
from myriad.planner.cost.matrix_costs import MatrixCosts
from myriad.planner.cost.operator_costs import TimeBreakdown
from myriad.program.actions import Copy, Kind, kinds_where
from myriad.program.in_flight import FORWARDS

__all__ = ["StageCosts"]

_NO_MATRICES = MatrixCosts()
_PAIRED = kinds_where(lambda does: does.pairs is not None)


@dataclass(frozen=True)
class StageCosts:
    """Costs of one stage of the program (a chunk of a stage of the layout)."""

    times: LayerTimes
    """Seconds of one micro-batch."""
    recompute: TimeBreakdown
    """Seconds of the recomputation in the backward of one micro-batch."""
    parameters: float
    """Number of parameters on one rank."""
    own_parameters: float
    """Number of those whose gradients it reduces and that it updates."""
    forward: float
    """Seconds of the forward of one micro-batch."""
    backward_input: float
    """Seconds of the input gradients of one micro-batch, including recomputation."""
    backward_weight: float
    """Seconds of the weight gradients of one micro-batch."""
    gather: float
    """Seconds to gather its parameters among the ranks that share them."""
    reduce: float
    """Seconds to reduce its gradients among data-parallel ranks."""
    update: float
    """Seconds of the optimizer's pass over this rank's parameters."""
    matrices: MatrixCosts = _NO_MATRICES
    reduce_across: float = 0.0
    """Seconds of the sum across groups of ranks."""
    copy_activations: float = 0.0
    """Seconds to copy what the stage keeps of one micro-batch to host memory, or back."""
    copy_state: float = 0.0
    """Seconds to copy its optimizer state to host memory, or back."""
    copied_parameters: float = 0.0
    """Number of parameters that this rank adds to snapshots."""
    paired: LayerTimes | None = None
    """Seconds of one micro-batch whose forward and backward are each in a pair; ``None``: there are none."""

    def copy_seconds(self, copy: Copy) -> float:
        """Return the seconds of a copy between device and host."""
        return self.copy_activations if copy in (Copy.OFFLOAD, Copy.FETCH) else self.copy_state

    @property
    def parts(self) -> TimeBreakdown:
        """Seconds of one micro-batch, forward and backward."""
        return self.times.forward + self.times.backward_input + self.times.backward_weight

    @property
    def backward(self) -> float:
        """Seconds of both halves of the backward."""
        return self.backward_input + self.backward_weight

    @property
    def paired_forward(self) -> float:
        """Seconds that a forward adds to the backward that it is paired with."""
        return float(self.parts_of(Kind.PAIRED_FORWARD).total)

    @property
    def paired_backward(self) -> float:
        """Seconds of a backward in a pair, including recomputation."""
        return float(self.parts_of(Kind.PAIRED_BACKWARD).total + self.recompute.total)

    def seconds_of(self, kind: Kind) -> float:
        """Return the seconds of a compute action."""
        return float(getattr(self, kind))

    def parts_of(self, kind: Kind) -> TimeBreakdown:
        """Return the seconds of a compute action by cause, without recomputation."""
        times = self.paired if kind in _PAIRED and self.paired is not None else self.times
        if kind in FORWARDS:
            return times.forward
        inputs, weights = times.backward_input, times.backward_weight
        return {Kind.BACKWARD_INPUT: inputs, Kind.BACKWARD_WEIGHT: weights}.get(kind, inputs + weights)

    @property
    def gather_momentum(self) -> float:
        """Seconds in which matrices' momentum comes to the ranks that orthogonalize it."""
        return self.matrices.gather

    @property
    def orthogonalize(self) -> float:
        """Seconds of the orthogonalization."""
        return self.matrices.orthogonalize

    @property
    def scatter_update(self) -> float:
        """Seconds in which orthogonalized updates return."""
        return self.matrices.scatter

    @property
    def whole_update(self) -> float:
        """Seconds of the update with all that precedes it, one after the other."""
        return self.matrices.gather + self.matrices.orthogonalize + self.matrices.scatter + self.update
