"""Seconds by what they go to: the pieces of a waterfall."""

from dataclasses import dataclass, fields

from myriad.planner.operators import Number

__all__ = ["Parts"]


@dataclass(frozen=True)
class Parts:
    """Of one stretch of compute, with the tensor-parallel communication inside it."""

    matmul: Number = 0.0
    attention: Number = 0.0
    memory: Number = 0.0
    """Operators that only read and write: norms, activations, residuals."""
    tensor: Number = 0.0
    """Tensor-parallel communication that nothing hides, and what the hidden part slows."""

    def __add__(self, other: "Parts") -> "Parts":
        return Parts(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def times(self, factor: Number) -> "Parts":
        """Each part so many times."""
        return Parts(*(getattr(self, one.name) * factor for one in fields(self)))

    @property
    def total(self) -> Number:
        """All of it."""
        return self.matmul + self.attention + self.memory + self.tensor
