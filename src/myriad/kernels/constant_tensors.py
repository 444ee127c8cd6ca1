"""Cached tensors that depend on sizes and the device only: masks, rotations, boundaries of sequences.

Few are needed in training, but sampling asks for one after the other, so each cache is bounded. A CUDA graph
reads those of its capture from their addresses at every replay. Its owner therefore holds references to them
for as long as it may replay:

    with constants_kept_in(references):    # a list that lives as long as the graph
        graph.capture(...)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

__all__ = ["constant_tensor", "constants_kept_in", "note_constant"]

_Sizes = ParamSpec("_Sizes")
_Made = TypeVar("_Made")
_keeping: list[list[Any]] = []
"""The lists that get a reference now. Not local to a thread: autograd runs backwards in its own threads."""


def constant_tensor(make: Callable[_Sizes, _Made]) -> Callable[_Sizes, _Made]:
    """Cache the 16 most recent results of a function of hashable arguments."""
    cached: Callable[..., _Made] = lru_cache(maxsize=16)(make)

    @wraps(make)
    def get(*sizes: _Sizes.args, **more: _Sizes.kwargs) -> _Made:
        found = cached(*sizes, **more)
        note_constant(found)
        return found

    return get


def note_constant(found: object) -> None:
    """Note the use of a tensor, or of several, that something else caches and that never change."""
    for references in _keeping:
        if not any(found is one for one in references):
            references.append(found)


@contextmanager
def constants_kept_in(references: list[Any]) -> Iterator[None]:
    """Append every constant tensor that is used inside the context, once each."""
    _keeping.append(references)
    try:
        yield
    finally:
        _keeping.pop()
