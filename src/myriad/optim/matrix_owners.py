"""The rank that orthogonalizes each matrix: an equal share of the work for every rank. No torch here.

Matrices are given away by falling cost, each to the rank with the least work so far (longest processing time
first, Graham 1969). Ranks wait for each other at every chunk, so work is balanced in each chunk first, and
then over all chunks. Every rank computes the same owners from the same shapes.
"""

from collections.abc import Sequence

__all__ = ["assign_owners", "newton_schulz_flops"]


def newton_schulz_flops(rows: int, columns: int, iterations: int) -> float:
    """Return the FLOPs of orthogonalizing a matrix: each iteration multiplies the matrix by its transpose,
    the result by itself, and that by the matrix."""
    short, long = sorted((rows, columns))
    return iterations * (4.0 * short**2 * long + 2.0 * short**3)


def assign_owners(costs: Sequence[float], loads: list[float]) -> list[int]:
    """Return the owner of each matrix of a chunk, a number of one of ``len(loads)`` ranks. ``loads``: work of
    the earlier chunks, to which this one's is added."""
    owners, here = [0] * len(costs), [0.0] * len(loads)
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        owner = min(range(len(loads)), key=lambda rank: (here[rank], loads[rank], rank))
        owners[index] = owner
        here[owner] += costs[index]
        loads[owner] += costs[index]
    return owners
