"""The NCCL transport: transfers of a chunk as whole collectives.

They run level by level (`myriad.comm.hierarchy`), on a separate stream, in the order of the calls; there is
no other priority. Between two levels the slices lie innermost digit first, so that each level works on rows:

    sums [outer, inner, P] ──► [inner, outer, P] ─reduce-scatter inside─► [outer, P] ─between─► [P]

This code has not run on NCCL yet; the tests run it on gloo.
"""

from collections.abc import Iterator, Sequence
from itertools import product

import torch

from myriad.comm.bucket_collective import BucketCollective, PendingCollective, copy_unless_same
from myriad.comm.collectives import start_all_gather, start_all_to_all, start_reduce_scatter
from myriad.comm.groups import Group
from myriad.comm.payload_codec import Codec

__all__ = ["NcclCollective"]


class NcclCollective(BucketCollective):
    """The collectives of one chunk on NCCL."""

    def __init__(
        self,
        groups: Sequence[Group],
        stream: "torch.cuda.Stream | None",
        sums: Codec | None = None,
        changes: Codec | None = None,
    ) -> None:
        """Create the collectives of a chunk.

        ``groups`` are the groups of each level, innermost first. ``stream`` is where they run, ``None`` on
        the CPU. ``sums`` and ``changes`` encode gradients and parameter changes.
        """
        self._groups, self._stream, self._gradient_codec, self._update_codec = groups, stream, sums, changes
        self._errors: dict[int, torch.Tensor] = {}
        """Encoding errors by depth of the level; those of the gather have the depth after the last level."""
        self._has_values = False

    @property
    def keeps_other_slices(self) -> bool:
        """True: each level's sums have separate memory."""
        return True

    def gather(self, values: torch.Tensor, master: torch.Tensor, priority: int) -> PendingCollective:
        """Gather, outermost level first."""
        with _OnStream(self._stream) as work:
            if self._update_codec is not None and self._has_values:
                self._gather_changes(values, master)
            else:
                self._has_values = True
                self._gather(values, master.to(values.dtype))
        return work

    def reduce_scatter(
        self, sums: torch.Tensor, into: torch.Tensor, priority: int, *, add: bool
    ) -> PendingCollective:
        """Reduce, innermost level first."""
        with _OnStream(self._stream) as work:
            total = self._reduce(sums)
            into.add_(total) if add else copy_unless_same(into, total)
        return work

    def all_reduce(
        self, sums: torch.Tensor, priority: int, *, after: PendingCollective | None = None
    ) -> PendingCollective:
        """Sum over ranks by a reduction and a gather."""
        with _OnStream(self._stream) as work:
            if after is not None:
                after.wait()  # the stream waits, not the host
            total = self._reduce(sums)
            if self._gradient_codec is None:
                self._gather(sums, total)
            else:
                data = self._encode(self._gradient_codec, len(self._groups), total.view(1, -1))
                for part, row in zip(self._parts(sums), self._spread(data).view(-1, len(data)), strict=True):
                    part.copy_(self._gradient_codec.decode(row, len(total)).view(part.shape))
        return work

    def restart(self) -> None:
        """Discard the encoding errors, and make the next gather exact."""
        self._errors.clear()
        self._has_values = False

    def rescale_kept(self, ratio: float) -> None:
        """Scale the encoding errors; this is exact for powers of two."""
        for errors in self._errors.values():
            errors.mul_(ratio)

    @property
    def _digits(self) -> list[int]:
        """Sizes of the levels, outermost first."""
        return [group.size() for group in reversed(self._groups)]

    def _transposed(self, whole: torch.Tensor) -> torch.Tensor:
        """Return ``[outer, ..., inner, P]`` as ``[inner, ..., outer, P]``, a view."""
        num_levels = len(self._groups)
        return whole.view(*self._digits, -1).permute(*reversed(range(num_levels)), num_levels)

    def _parts(self, whole: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the slices in the order that `_spread` returns, as views."""
        transposed = self._transposed(whole)
        return (transposed[where] for where in product(*map(range, transposed.shape[:-1])))

    def _spread(self, own: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """Gather every rank's ``own``, innermost digit first."""
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
            transposed = self._transposed(values)
            transposed.copy_(self._spread(own).view(transposed.shape))

    def _gather_changes(self, values: torch.Tensor, master: torch.Tensor) -> None:
        assert self._update_codec is not None
        own = values.view(-1, len(master))[self._rank]
        data = self._update_codec.encode(master - own)
        for part, row in zip(self._parts(values), self._spread(data).view(-1, len(data)), strict=True):
            part.add_(self._update_codec.decode(row, len(master)))

    @property
    def _rank(self) -> int:
        """This rank's number in the whole group."""
        rank = 0
        for group in reversed(self._groups):
            rank = rank * group.size() + group.rank()
        return rank

    def _reduce(self, sums: torch.Tensor) -> torch.Tensor:
        rows = self._transposed(sums).reshape(-1)
        for depth, group in enumerate(self._groups):
            if self._gradient_codec is None:
                total = rows.new_empty(rows.numel() // group.size())
                start_reduce_scatter(total, rows, group).wait()
            else:
                total = self._reduce_encoded(self._gradient_codec, depth, rows.view(group.size(), -1))
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
        """Encode all rows plus their last errors, and concatenate the messages."""
        if depth not in self._errors:
            self._errors[depth] = torch.zeros_like(rows)
        errors = self._errors[depth]
        data = []
        for exact, row in zip(errors, rows, strict=True):
            exact.add_(row)
            data.append(codec.encode(exact))
            exact.sub_(codec.decode(data[-1], len(row)))
        return torch.cat(data)


class _OnStream:
    """Run a block on another stream, after the current stream's work so far; `wait` makes the current
    stream wait for it."""

    def __init__(self, stream: "torch.cuda.Stream | None") -> None:
        self._stream = stream
        self._context = torch.cuda.stream(stream)
        self._event: torch.cuda.Event | None = None

    def __enter__(self) -> "_OnStream":
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
