"""A chunk's transfers as whole collectives: what NCCL is good at.

Level by level (`myriad.comm.hierarchy`), on a stream of its own, in the order of the calls; there is no other
priority. Between two levels the slices lie innermost digit first, so that each level works on rows:

    sums [outer, inner, P] ──► [inner, outer, P] ─reduce-scatter inside─► [outer, P] ─between─► [P]

Not run on NCCL yet; the same code runs on gloo in the tests.
"""

from collections.abc import Sequence

import torch

from myriad.comm.collectives import start_all_gather, start_reduce_scatter
from myriad.comm.exchange import Delivery, Exchange, copy_unless_same
from myriad.comm.groups import Group

__all__ = ["ByCollectives"]


class ByCollectives(Exchange):
    """The transfers of one chunk."""

    def __init__(self, groups: Sequence[Group], stream: "torch.cuda.Stream | None") -> None:
        """``groups``: those that meet at each level, innermost first; ``stream``: where they run, ``None`` on
        the CPU."""
        self._groups, self._stream = groups, stream

    def gather(self, values: torch.Tensor, master: torch.Tensor, priority: int) -> Delivery:
        """Outermost first."""
        with _Beside(self._stream) as beside:
            self._gather(values, master.to(values.dtype))
        return beside

    def reduce_scatter(self, sums: torch.Tensor, into: torch.Tensor, priority: int, *, add: bool) -> Delivery:
        """Innermost first."""
        with _Beside(self._stream) as beside:
            total = self._reduce(sums)
            into.add_(total) if add else copy_unless_same(into, total)
        return beside

    def all_reduce(self, sums: torch.Tensor, priority: int) -> Delivery:
        """One after the other."""
        with _Beside(self._stream) as beside:
            self._gather(sums, self._reduce(sums))
        return beside

    @property
    def _digits(self) -> list[int]:
        """Sizes of the levels, outermost first."""
        return [group.size() for group in reversed(self._groups)]

    def _turned(self, whole: torch.Tensor) -> torch.Tensor:
        """``[outer, ..., inner, P]`` as ``[inner, ..., outer, P]``, a view."""
        num_levels = len(self._groups)
        return whole.view(*self._digits, -1).permute(*reversed(range(num_levels)), num_levels)

    def _gather(self, values: torch.Tensor, own: torch.Tensor) -> None:
        rows = own
        for group in reversed(self._groups):
            is_whole = len(self._groups) == 1
            wider = values if is_whole else rows.new_empty(group.size() * rows.numel())
            start_all_gather(wider, rows, group).wait()
            rows = wider
        if len(self._groups) > 1:
            turned = self._turned(values)
            turned.copy_(rows.view(turned.shape))

    def _reduce(self, sums: torch.Tensor) -> torch.Tensor:
        rows = self._turned(sums).reshape(-1)
        for group in self._groups:
            total = rows.new_empty(rows.numel() // group.size())
            start_reduce_scatter(total, rows, group).wait()
            rows = total
        return rows


class _Beside:
    """Runs a block on another stream, after what this one was given so far; `wait` makes this one wait."""

    def __init__(self, stream: "torch.cuda.Stream | None") -> None:
        self._stream = stream
        self._context = torch.cuda.stream(stream)
        self._event: torch.cuda.Event | None = None

    def __enter__(self) -> "_Beside":
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        self._context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._stream is not None:
            self._event = self._stream.record_event()
        self._context.__exit__(*error)

    def wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
