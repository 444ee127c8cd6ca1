"""Optimizer state that rests in host memory: the moments of regions, and the master values of chunks.

    START_FETCH_STATE    copy both to the device            -> the update changes them there
    START_OFFLOAD_STATE  copy both back

The update writes the values in the compute type, too, which is all that the rest of an iteration reads
(`Chunk.rest_in`).
"""

from collections.abc import Collection, Sequence

from myriad.optim.host_state import HostState
from myriad.parallel.chunk import Chunk
from myriad.program.actions import Kind

__all__ = ["StateOffload"]


class StateOffload:
    """The state of one rank in host memory, and its copies."""

    def __init__(
        self, moments: HostState | None, chunks: Sequence[Chunk], masters_on_host: Collection[Chunk]
    ) -> None:
        """Move master values to the host. ``chunks``: all of the rank. ``masters_on_host``: the chunks whose
        master values move."""
        self._moments, self._masters = moments, None
        self._index_of = {chunk: index for index, chunk in enumerate(chunks)}
        if not masters_on_host:
            return
        masters = {"model": [chunk.master for chunk in chunks]}
        moved = [self._index_of[chunk] for chunk in masters_on_host]
        self._masters = HostState(masters, moved, chunks[0].master.device)
        for chunk in masters_on_host:
            chunk.rest_in(self._masters.tensors["model"][self._index_of[chunk]])

    @property
    def host_bytes(self) -> int:
        """Bytes of state in host memory."""
        return sum(place.host_bytes for place in (self._moments, self._masters) if place is not None)

    def run(self, kind: Kind, regions: Sequence[int], chunks: Sequence[Chunk]) -> None:
        """Run an action of `COPIES_STATE` on the moments of these regions and the master values of these
        chunks."""
        if not regions:
            return  # this rank has no part of the stage's parameters
        assert self._moments is not None, "the engine was built for this program"
        _run(self._moments, kind, regions)
        if self._masters is not None:
            _run(self._masters, kind, [self._index_of[chunk] for chunk in chunks])


def _run(state: HostState, kind: Kind, indices: Sequence[int]) -> None:
    copies = {
        Kind.START_FETCH_STATE: state.start_fetch,
        Kind.AWAIT_FETCH_STATE: state.await_fetch,
        Kind.START_OFFLOAD_STATE: state.start_offload,
        Kind.AWAIT_OFFLOAD_STATE: state.await_offload,
    }
    copies[kind](indices)
