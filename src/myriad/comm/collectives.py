"""Collectives on one dimension of a tensor; with ``group = None`` (one rank) each is the identity.

Sums of half-precision tensors are taken in float32. gloo's own reduce-scatter moves as many bytes as an
all-reduce, twice what is needed; here it is an all-to-all and a local sum in rank order, which is also the
same bits every time.

The ``start_`` forms work on flat tensors and give a handle at once: `Pending.wait` blocks until the result is
there (on CUDA: makes the stream wait).

Legend: D size of the chosen dimension, n ranks.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from myriad.comm.groups import Group

__all__ = [
    "Pending",
    "all_gather",
    "all_gather_flat",
    "all_reduce",
    "all_reduce_max",
    "reduce_scatter",
    "reduce_scatter_flat",
    "start_all_gather",
    "start_all_reduce",
    "start_reduce_scatter",
]


# torch 2.13 renamed these two; 2.11 has the old names only
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _is_gloo(group: Group) -> bool:
    return dist.get_backend(group) == "gloo"


class Pending:
    """A collective under way."""

    def __init__(self, work: dist.Work | None = None, then: Callable[[], object] | None = None) -> None:
        """``then`` is done by the first `wait`, after the transfer."""
        self._work, self._then = work, then

    def wait(self) -> None:
        """Blocks until the result is there; raises what went wrong."""
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
    """``part [D/n]`` of every rank into ``out [D]``; ``part`` may be this rank's slice of ``out``."""
    if group is not None:
        return Pending(_all_gather(out, part, group=group, async_op=True))
    if out.data_ptr() != part.data_ptr():
        out.copy_(part)
    return Pending()


def start_reduce_scatter(out: torch.Tensor, x: torch.Tensor, group: Group | None) -> Pending:
    """This rank's slice of the sum over ranks of ``x [D]`` into ``out [D/n]``, which may be that slice."""
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


def all_gather_flat(out: torch.Tensor, part: torch.Tensor, group: Group | None) -> None:
    """``part [D/n]`` of every rank into ``out [D]``; ``part`` may be this rank's slice of ``out``."""
    if group is not None:
        _all_gather(out, part, group=group)
    elif out.data_ptr() != part.data_ptr():
        out.copy_(part)


def reduce_scatter_flat(x: torch.Tensor, group: Group | None) -> torch.Tensor:
    """This rank's slice ``[D/n]`` of the sum over ranks of ``x [D]``; the slice may be memory of ``x``."""
    if group is None:
        return x
    size = dist.get_world_size(group)
    if not _is_gloo(group):
        out = x.new_empty(x.numel() // size)
        _reduce_scatter(out, x, group=group)
        return out
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return _sum_rows(received.view(size, -1))


def _sum_rows(rows: torch.Tensor) -> torch.Tensor:
    total = rows[0].to(torch.float32, copy=True)
    for row in rows[1:]:
        total += row
    return total.to(rows.dtype)


def all_gather(x: torch.Tensor, group: Group | None, dim: int) -> torch.Tensor:
    """``[..., D/n, ...]`` of every rank to ``[..., D, ...]``, in rank order."""
    if group is None:
        return x
    size = dist.get_world_size(group)
    moved = x.movedim(dim, 0).contiguous()
    out = moved.new_empty((size * moved.shape[0], *moved.shape[1:]))
    _all_gather(out, moved, group=group)
    return out.movedim(0, dim)


def reduce_scatter(x: torch.Tensor, group: Group | None, dim: int) -> torch.Tensor:
    """This rank's part ``[..., D/n, ...]`` of the sum over ranks of ``x [..., D, ...]``."""
    if group is None:
        return x
    size = dist.get_world_size(group)
    moved = x.movedim(dim, 0).contiguous()
    part = reduce_scatter_flat(moved.view(-1), group)
    return part.view(moved.shape[0] // size, *moved.shape[1:]).movedim(0, dim)
