"""Who exchanges what with whom, level by level: inside a node, between nodes, between switches.

Slice ``i`` of a buffer belongs to group rank ``i``. A rank's number is written in mixed radix, outermost
digit first; at each level the ranks that differ in one digit meet. Two nodes of two ranks, radices (2, 2):

    reduce   level inside:  0 sends 1 its slices 1 and 3, gets 1's slices 0 and 2, adds
             level between: 0 sends 2 its sum of slice 2, gets 2's sum of slice 0, adds: slice 0 is done
    gather   the same backwards: slice 2 from 2, then 0 sends 1 slices 0 and 2, gets 1 and 3

So what leaves a node shrinks by the number of ranks in it. One radix is the flat exchange among all.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Level", "make_levels"]


@dataclass(frozen=True)
class Level:
    """The ranks that meet at one level, this one among them, in order."""

    members: tuple[int, ...]
    """Group ranks."""
    slices: tuple[tuple[int, ...], ...]
    """By member: the slices whose sums it has after a reduction at this level, and which it has before a
    gather."""
    own: int
    """This rank's place among the members."""

    @property
    def others(self) -> tuple[int, ...]:
        """Places of the other members, the next one first: so that not all send to the same one."""
        count = len(self.members)
        return tuple((self.own + step) % count for step in range(1, count))


def make_levels(rank: int, radices: Sequence[int]) -> tuple[Level, ...]:
    """A rank's levels, innermost first. ``radices``: outermost first; their product is the group's size."""
    levels, size, stride = [], math.prod(radices), 1
    for radix in reversed(radices):
        own = rank // stride % radix
        members = tuple(rank + (place - own) * stride for place in range(radix))
        slices = tuple(_alike(member, stride * radix, size) for member in members)
        if radix > 1:
            levels.append(Level(members, slices, own))
        stride *= radix
    return tuple(levels)


def _alike(rank: int, modulus: int, size: int) -> tuple[int, ...]:
    """Slices that agree with a rank in every digit up to this level."""
    return tuple(range(rank % modulus, size, modulus))
