"""Collectives on flat tensors; with ``group = None`` (one rank) each is the identity.

The ``start_`` forms return a handle at once: `Pending.wait` blocks until the result is there (on CUDA: makes
the stream wait). The tensors must not change until then.

gloo's own reduce-scatter moves as many bytes as an all-reduce, twice what is needed. Here it is an all-to-all
and a local sum in rank order, in float32, which also gives the same bits every time.

Legend: D size, n ranks.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

__all__ = [
    "Pending",
    "all_reduce",
    "all_reduce_max",
    "broadcast",
    "start_all_gather",
    "start_all_reduce",
    "start_all_to_all",
    "start_reduce_scatter",
    "sum_in_order",
]


Group = dist.ProcessGroup

# torch 2.13 renamed these two; 2.11 has the old names only
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _is_gloo(group: Group) -> bool:
    return dist.get_backend(group) == "gloo"


class Pending:
    """A collective in flight."""

    def __init__(self, work: dist.Work | None = None, then: Callable[[], object] | None = None) -> None:
        """``then`` runs in the first `wait`, after the transfer."""
        self._work, self._then = work, then

    def wait(self) -> None:
        """Block until the result is there; raise the error of a failed transfer."""
        work, then = self._work, self._then
        self._work = self._then = None
        if work is not None:
            work.wait()
        if then is not None:
            then()


def start_all_reduce(x: torch.Tensor, group: Group | None) -> Pending:
    """Sum over ranks, in place."""
    return Pending(dist.all_reduce(x, group=group, async_op=True)) if group is not None else Pending()


def start_all_gather(out: torch.Tensor, part: torch.Tensor, group: Group | None) -> Pending:
    """Gather ``part [D/n]`` of every rank into ``out [D]``; ``part`` may be this rank's slice of ``out``."""
    if group is not None:
        return Pending(_all_gather(out, part, group=group, async_op=True))
    if out.data_ptr() != part.data_ptr():
        out.copy_(part)
    return Pending()


def start_reduce_scatter(out: torch.Tensor, x: torch.Tensor, group: Group | None) -> Pending:
    """Sum ``x [D]`` over ranks, and store this rank's slice in ``out [D/n]``, which may be that slice of
    ``x``."""
    if group is None:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return Pending()
    if not _is_gloo(group):
        return Pending(_reduce_scatter(out, x, group=group, async_op=True))
    received = torch.empty_like(x)
    work = dist.all_to_all_single(received, x, group=group, async_op=True)
    rows = received.view(dist.get_world_size(group), -1)
    return Pending(work, lambda: out.copy_(_sum_rows(rows)))


def start_all_to_all(
    out: torch.Tensor,
    x: torch.Tensor,
    group: Group | None,
    out_splits: Sequence[int] | None = None,
    splits: Sequence[int] | None = None,
) -> Pending:
    """Send piece ``i`` of ``x`` to rank ``i``, and store rank ``i``'s piece for this rank in piece ``i`` of
    ``out``.

    Pieces are equal, or ``splits`` and ``out_splits`` elements long: rank ``i`` sends its ``splits[this
    rank]`` elements here, which are ``out_splits[i]``. An ``x`` without pieces of equal length needs both.
    """
    if group is None:
        out.copy_(x)
        return Pending()
    lengths = (list(out_splits) if out_splits else None, list(splits) if splits else None)
    return Pending(dist.all_to_all_single(out, x, *lengths, group=group, async_op=True))


def all_reduce(x: torch.Tensor, group: Group | None) -> torch.Tensor:
    """Sum over ranks, in place."""
    if group is not None:
        dist.all_reduce(x, group=group)
    return x


def all_reduce_max(x: torch.Tensor, group: Group | None) -> torch.Tensor:
    """Maximum over ranks, in place."""
    if group is not None:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    return x


def broadcast(x: torch.Tensor, group: Group | None, source: int) -> torch.Tensor:
    """Write the value of the rank with index ``source`` in the group to ``x`` on all its ranks."""
    if group is not None:
        dist.broadcast(x, group=group, group_src=source)
    return x


def sum_in_order(x: torch.Tensor, group: Group | None) -> torch.Tensor:
    """Sum a small flat ``x [D]`` over ranks, in rank order.

    A number has the same bits, whatever else the message holds. Moves n times as much as an all-reduce.
    """
    if group is None:
        return x
    rows = x.new_empty(dist.get_world_size(group) * len(x))
    start_all_gather(rows, x, group).wait()
    return _sum_rows(rows.view(-1, len(x)))


def _sum_rows(rows: torch.Tensor) -> torch.Tensor:
    total = rows[0].to(torch.float32, copy=True)
    for row in rows[1:]:
        total += row
    return total.to(rows.dtype)
