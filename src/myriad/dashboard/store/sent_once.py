"""Each batch once, though its sender may send it again: because the answer to the first was lost on its way.

A sender numbers its batches, and begins no later one before an earlier one was answered: so of each sender
the newest that was taken is enough to know all of them. Of very many senders those last heard of are known.
"""

from collections import OrderedDict
from dataclasses import dataclass

from myriad.telemetry.batch import Origin, SpanBatch

__all__ = ["SentOnce"]

_MOST_SENDERS = 2**15


@dataclass(frozen=True)
class _Newest:
    origin: Origin
    num_dropped: int


class SentOnce:
    """Of all who send to one server."""

    def __init__(self) -> None:
        self._newest: OrderedDict[str, _Newest] = OrderedDict()

    def is_new(self, batch: SpanBatch) -> bool:
        """It was not taken before; from now on it is. One that does not say whose it is always is new."""
        origin = batch.origin
        if origin is None:
            return True
        known = self._newest.get(origin.sender)
        if known is not None and origin.place <= known.origin.place:
            return False
        self._newest[origin.sender] = _Newest(origin, batch.num_dropped)
        self._newest.move_to_end(origin.sender)
        while len(self._newest) > _MOST_SENDERS:
            self._newest.popitem(last=False)
        return True

    def more_dropped(self, batch: SpanBatch) -> int:
        """What its sender has lost since it sent this for the first time, which only the second tells."""
        known = self._newest.get(batch.origin.sender) if batch.origin is not None else None
        if known is None or known.origin != batch.origin:
            return 0
        self._newest[known.origin.sender] = _Newest(known.origin, max(known.num_dropped, batch.num_dropped))
        return max(0, batch.num_dropped - known.num_dropped)
