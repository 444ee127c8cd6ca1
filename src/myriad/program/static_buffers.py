"""Fixed memory places for chunks that are whole only for a part of an iteration.

With ZeRO 3, parameters are whole from their gather to their release. With ZeRO 2 and 3, a gradient buffer is
whole from a stage's first backward to the end of its reduction. Stages that are captured as CUDA graphs need
fixed addresses. Two chunks share a place if no program needs both at the same time:

    chunk 0   [-----)              [------)          place 0
    chunk 1      [------)      [------)              place 1
    chunk 2          [-------------)                 place 0

Programs follow each other in any order: a gather that one issues at its end for the next iteration is in
flight when the next one begins. This module does not import torch: the runtime uses the places
(`myriad.parallel.transient_buffer`), and the planner counts them.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product

from myriad.program.actions import (
    ADDS_TO_GRADIENTS,
    SEMANTICS,
    Action,
    Collective,
    Kind,
    Resource,
    kinds_where,
)

__all__ = ["TIED", "BufferAssignment", "assign_buffers", "tied_reduction"]

TIED = -1
"""Key of the chunk that the first and the last stage share. The key of every other chunk is its stage's
number."""
_STARTS_REDUCE = kinds_where(lambda does: does.starts is Collective.REDUCE)
_ENDS_REDUCE = kinds_where(lambda does: does.ends is Collective.REDUCE)


@dataclass(frozen=True)
class BufferAssignment:
    """The place number of each chunk whose memory is allocated and freed."""

    values: Mapping[int, int]
    """BufferAssignment of the parameters; empty: they stay whole (ZeRO 0 to 2)."""
    grad_buffers: Mapping[int, int]
    """BufferAssignment of the gradient buffers; empty: they stay whole (ZeRO 0 and 1)."""

    @staticmethod
    def largest(places: Mapping[int, int], sizes: Mapping[int, float]) -> dict[int, float]:
        """Return the size of each place: the size of the largest chunk that uses it."""
        found: dict[int, float] = {}
        for key, place in places.items():
            found[place] = max(found.get(place, 0.0), sizes.get(key, 0.0))
        return found


def tied_reduction(actions: Sequence[Action], tied_stages: Collection[int]) -> tuple[int, int]:
    """Return the indices of the actions at which the reduction of the tied chunk starts and ends. It is
    reduced with the last reduction of the stages that hold it; -1 if there is none."""

    def last(kinds: Collection[Kind]) -> int:
        found = (i for i, a in enumerate(actions) if a.kind in kinds and a.stage in tied_stages)
        return max(found, default=-1)

    return last(_STARTS_REDUCE), last(_ENDS_REDUCE)


def assign_buffers(
    runs: Sequence[Sequence[Action]], chunks_of: Mapping[int, Sequence[int]], zero: int
) -> BufferAssignment:
    """Assign places for one rank. ``runs``: its action lists in training, in validation and in any other run.
    ``chunks_of``: the chunk keys of each of its stages."""
    values, grad_buffers = _Held(), _Held()
    tied_stages = [stage for stage, keys in chunks_of.items() if TIED in keys]
    for actions in chain.from_iterable(product(runs, runs)):
        _walk(actions, chunks_of, tied_reduction(actions, tied_stages), values, grad_buffers)
    return BufferAssignment(
        values.colours() if zero == 3 else {}, grad_buffers.colours() if zero >= 2 else {}
    )


@dataclass
class _Held:
    """The chunks that are whole now, and for each chunk those that were whole at the same time."""

    users: dict[int, set[int]] = field(default_factory=dict)
    beside: dict[int, set[int]] = field(default_factory=dict)

    def take(self, key: int, user: int) -> None:
        self.users.setdefault(key, set()).add(user)
        own = self.beside.setdefault(key, set())
        for other, users in self.users.items():
            if users and other != key:
                own.add(other)
                self.beside[other].add(key)

    def leave(self, key: int, user: int) -> None:
        self.users.get(key, set()).discard(user)

    def colours(self) -> dict[int, int]:
        """Return for each chunk, in order of first use, the smallest number that no chunk needed at the same
        time has."""
        found: dict[int, int] = {}
        for key, beside in self.beside.items():
            taken = {found[other] for other in beside if other in found}
            found[key] = next(number for number in range(len(found) + 1) if number not in taken)
        return found


def _walk(
    actions: Sequence[Action],
    chunks_of: Mapping[int, Sequence[int]],
    tied: tuple[int, int],
    values: _Held,
    grad_buffers: _Held,
) -> None:
    for index, action in enumerate(actions):
        keys = chunks_of.get(action.stage, ())
        does = SEMANTICS[action.kind]
        for key in keys if Resource.PARAMETERS in does.allocates else ():
            values.take(key, action.stage)
        for key in keys if Resource.PARAMETERS in does.frees else ():
            values.leave(key, action.stage)
        for key in _grad_buffers_taken(action, keys, index == tied[0]):
            grad_buffers.take(key, 0)
        for key in _grad_buffers_freed(action, keys, index == tied[1]):
            grad_buffers.leave(key, 0)


def _grad_buffers_taken(action: Action, keys: Sequence[int], tied_starts: bool) -> Iterator[int]:
    if action.kind in ADDS_TO_GRADIENTS:
        yield from keys
    elif action.kind in _STARTS_REDUCE:
        yield from (key for key in keys if key != TIED)
    if SEMANTICS[action.kind].joins == "ends" or tied_starts:
        yield TIED


def _grad_buffers_freed(action: Action, keys: Sequence[int], tied_ends: bool) -> Iterator[int]:
    if Resource.GRADIENTS in SEMANTICS[action.kind].frees:
        yield from (key for key in keys if key != TIED)
    if tied_ends:
        yield TIED
