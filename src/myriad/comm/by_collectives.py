"""A chunk's transfers as whole collectives: what NCCL is good at.

Level by level (`myriad.comm.hierarchy`), on a stream of its own, in the order of the calls; there is no other
priority. Between two levels the slices lie innermost digit first, so that each level works on rows:

    sums [outer, inner, P] ──► [inner, outer, P] ─reduce-scatter inside─► [outer, P] ─between─► [P]

Not run on NCCL yet; the same code runs on gloo in the tests.
"""

from collections.abc import Iterator, Sequence
from itertools import product

import torch

from myriad.comm.codec import Codec
from myriad.comm.collectives import start_all_gather, start_all_to_all, start_reduce_scatter
from myriad.comm.exchange import Delivery, Exchange, copy_unless_same
from myriad.comm.groups import Group

__all__ = ["ByCollectives"]


class ByCollectives(Exchange):
    """The transfers of one chunk."""

    def __init__(
        self,
        groups: Sequence[Group],
        stream: "torch.cuda.Stream | None",
        sums: Codec | None = None,
        changes: Codec | None = None,
    ) -> None:
        """``groups``: those that meet at each level, innermost first; ``stream``: where they run, ``None`` on
        the CPU; ``sums``, ``changes``: what encodes gradients and changes of parameters."""
        self._groups, self._stream, self._sums, self._changes = groups, stream, sums, changes
        self._lost: dict[int, torch.Tensor] = {}
        """By depth of the level; of the way back behind the last one."""
        self._has_values = False

    def gather(self, values: torch.Tensor, master: torch.Tensor, priority: int) -> Delivery:
        """Outermost first."""
        with _Beside(self._stream) as beside:
            if self._changes is not None and self._has_values:
                self._gather_changes(values, master)
            else:
                self._has_values = True
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
            total = self._reduce(sums)
            if self._sums is None:
                self._gather(sums, total)
            else:
                data = self._encode(self._sums, len(self._groups), total.view(1, -1))
                for part, row in zip(self._parts(sums), self._spread(data).view(-1, len(data)), strict=True):
                    part.copy_(self._sums.decode(row, len(total)).view(part.shape))
        return beside

    def restart(self) -> None:
        """Forgets."""
        self._lost.clear()
        self._has_values = False

    def rescale_kept(self, ratio: float) -> None:
        """Exact for powers of two."""
        for lost in self._lost.values():
            lost.mul_(ratio)

    @property
    def _digits(self) -> list[int]:
        """Sizes of the levels, outermost first."""
        return [group.size() for group in reversed(self._groups)]

    def _turned(self, whole: torch.Tensor) -> torch.Tensor:
        """``[outer, ..., inner, P]`` as ``[inner, ..., outer, P]``, a view."""
        num_levels = len(self._groups)
        return whole.view(*self._digits, -1).permute(*reversed(range(num_levels)), num_levels)

    def _parts(self, whole: torch.Tensor) -> Iterator[torch.Tensor]:
        """The slices as they lie after `_spread`, as views."""
        turned = self._turned(whole)
        return (turned[where] for where in product(*map(range, turned.shape[:-1])))

    def _spread(self, own: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """Everybody's ``own``, innermost digit first."""
        rows = own
        for group in reversed(self._groups):
            wider = into if into is not None else rows.new_empty(group.size() * rows.numel())
            start_all_gather(wider, rows, group).wait()
            rows = wider
        return rows

    def _gather(self, values: torch.Tensor, own: torch.Tensor) -> None:
        if len(self._groups) == 1:
            self._spread(own, into=values)
        else:
            turned = self._turned(values)
            turned.copy_(self._spread(own).view(turned.shape))

    def _gather_changes(self, values: torch.Tensor, master: torch.Tensor) -> None:
        assert self._changes is not None
        own = values.view(-1, len(master))[self._rank]
        data = self._changes.encode(master - own)
        for part, row in zip(self._parts(values), self._spread(data).view(-1, len(data)), strict=True):
            part.add_(self._changes.decode(row, len(master)))

    @property
    def _rank(self) -> int:
        """In the whole group."""
        rank = 0
        for group in reversed(self._groups):
            rank = rank * group.size() + group.rank()
        return rank

    def _reduce(self, sums: torch.Tensor) -> torch.Tensor:
        rows = self._turned(sums).reshape(-1)
        for depth, group in enumerate(self._groups):
            if self._sums is None:
                total = rows.new_empty(rows.numel() // group.size())
                start_reduce_scatter(total, rows, group).wait()
            else:
                total = self._reduce_encoded(self._sums, depth, rows.view(group.size(), -1))
            rows = total
        return rows

    def _reduce_encoded(self, codec: Codec, depth: int, rows: torch.Tensor) -> torch.Tensor:
        group = self._groups[depth]
        sent = self._encode(codec, depth, rows)
        arrived = torch.empty_like(sent)
        start_all_to_all(arrived, sent, group).wait()
        total = torch.zeros_like(rows[0])
        for place, data in enumerate(arrived.view(len(rows), -1)):
            total += rows[place] if place == group.rank() else codec.decode(data, len(total))
        return total

    def _encode(self, codec: Codec, depth: int, rows: torch.Tensor) -> torch.Tensor:
        """All rows encoded, one behind the other, with what the last ones lost."""
        if depth not in self._lost:
            self._lost[depth] = torch.zeros_like(rows)
        lost = self._lost[depth]
        data = []
        for exact, row in zip(lost, rows, strict=True):
            exact.add_(row)
            data.append(codec.encode(exact))
            exact.sub_(codec.decode(data[-1], len(row)))
        return torch.cat(data)


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
