"""Tensor-parallel products whose gather or scatter is communicated in slices (``overlap.tensor = "slices"``).

A column-parallel product needs every rank's positions and starts with the local ones. A row-parallel product
computes other ranks' positions first, and sends each slice while it computes the next (MegaScale, arXiv
2402.15627, section 3.2). Rank 0 of 2, with two slices of each rank's share, forward:

    gather    device   own A^T      | slice 1 A^T | slice 2 A^T
              network  slice 1  slice 2

    scatter   device   slice 1 C^T | slice 2 C^T | own C^T     | sum
              network                slice 1       slice 2

The backward of each is the other operation: the gradient of the outputs times ``A`` is scattered slice by
slice, and a gathered gradient is multiplied with ``C`` as its slices arrive. The weights' gradients,
``g^T x``, use the whole gathered tensor. Each is deferred to the next of these nodes, which computes it while
its own slices are in flight.

Between the two, the rows of a tensor are ordered by rank, so that every slice is contiguous and its product
is one call: ``[B, S, W]`` is ``[tp, B, S/tp, W]`` here, flat ``[T, W]``. With one sequence, or with memory in
sequence-first order (`myriad.kernels.memory_order`), the two orders are the same.

A `SliceTransport` communicates the slices: messages on gloo (`GlooSliceTransport`), PyTorch's fused operators
on GPUs (`myriad.parallel.symmetric_memory`).

Legend: B batch, S sequence, W width, H hidden, T tokens (B S), R tokens of one rank (T / tp), O outputs of a
column-parallel product, I inputs of a row-parallel one.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from myriad.kernels.gradient import LaterProducts, apply_deferred
from myriad.kernels.linear import weight_gradient
from myriad.kernels.memory_order import is_sequence_first
from myriad.kernels.remade import Remade
from myriad.model.boundary import Factors
from myriad.model.overlap_parts import num_slices, part_sizes
from myriad.parallel.tp_async import AsyncStack, Peers, sum_in_rank_order

__all__ = [
    "GlooSliceTransport",
    "SliceTransport",
    "SlicedPeers",
    "gather_products",
    "rows_of_slices",
    "scatter_products",
]

Product = tuple[torch.Tensor, torch.Tensor]
"""Rows and the matrix to multiply them with: ``[T, K]`` and ``[K, N]``."""


class SliceTransport(Protocol):
    """Multiplies the tensors that it gathers or scatters. ``meanwhile`` is called once, where the device
    would wait."""

    def gather_products(
        self,
        rows: torch.Tensor,
        matrices: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        meanwhile: Callable[[], None],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Gather every rank's ``rows`` ``[R, K]``. Return them as one ``[T, K]``, with their products with
        ``matrices`` ``[K, N]``, ``[T, N]`` each."""
        ...

    def scatter_products(self, products: Sequence[Product], meanwhile: Callable[[], None]) -> torch.Tensor:
        """Return this rank's ``[R, N]`` of the sum of ``products``, ``[T, N]`` each, over all ranks."""
        ...


class SlicedPeers(Peers, Protocol):
    """The peer ranks, and the carrier that communicates slices with them."""

    @property
    def slice_transport(self) -> SliceTransport: ...

    later: LaterProducts | None


def rows_of_slices(rows: int, row_bytes: int, *, chunks: int, message_bytes: int) -> list[slice]:
    """Return the slices in which a rank's ``rows`` rows are sent: every row is in one of them, in order."""
    count = int(num_slices(rows, row_bytes, chunks=chunks, message_bytes=message_bytes))
    ends = list(accumulate(part_sizes(rows, count)))
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


class GlooSliceTransport:
    """Messages between pairs of ranks, on gloo.

    Deadlock-free: every rank calls the same methods in the same order. A call posts all its receives first,
    and posts its sends without waiting for one. Messages of two ranks match in the order of posting, as
    collectives of the whole group do. A call has completed all its messages before it returns, so none is in
    flight when the group is used next.
    """

    def __init__(self, peers: Peers, chunks: int, message_bytes: int) -> None:
        """``chunks``: largest number of slices of each rank's share; each slice has at least
        ``message_bytes``."""
        self._peers, self._chunks, self._message_bytes = peers, chunks, message_bytes

    def gather_products(
        self,
        rows: torch.Tensor,
        matrices: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        meanwhile: Callable[[], None],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        rank, size = self._peers.rank, self._peers.size
        gathered = rows.new_empty(size, *rows.shape)
        outputs = [rows.new_empty(size, len(rows), matrix.shape[1]) for matrix in matrices]
        places = self._places(rows)
        arriving = [self._receive(gathered[peer, where], peer) for where, peer in places]
        leaving = [self._send(rows[where], self._opposite(peer)) for where, peer in places]

        def multiply(peer: int, where: slice) -> None:
            for matrix, bias, output in zip(matrices, biases, outputs, strict=True):
                _multiply(((gathered[peer, where], matrix),), output[peer, where], bias)

        gathered[rank].copy_(rows)
        multiply(rank, slice(None))
        meanwhile()
        for (where, peer), work in zip(places, arriving, strict=True):
            self._wait([work])
            multiply(peer, where)
        self._wait(leaving)
        return gathered.flatten(0, 1), [output.flatten(0, 1) for output in outputs]

    def scatter_products(self, products: Sequence[Product], meanwhile: Callable[[], None]) -> torch.Tensor:
        rank, size = self._peers.rank, self._peers.size
        (first, matrix), *_ = products
        made = first.new_empty(size, len(first) // size, matrix.shape[1])
        came = torch.empty_like(made)
        shares = [(rows.unflatten(0, (size, -1)), matrix) for rows, matrix in products]
        places = self._places(made[rank])
        sources = [self._opposite(peer) for _, peer in places]
        pairs = zip(places, sources, strict=True)
        arriving = [self._receive(came[source, where], source) for (where, _), source in pairs]
        leaving = []
        for where, peer in places:
            _multiply([(rows[peer, where], matrix) for rows, matrix in shares], made[peer, where])
            leaving.append(self._send(made[peer, where], peer))
        _multiply([(rows[rank], matrix) for rows, matrix in shares], made[rank])
        meanwhile()
        total = torch.empty_like(made[rank])
        parts = [made[rank] if peer == rank else came[peer] for peer in range(size)]
        for number in range(0, len(places), size - 1):
            where = places[number][0]
            self._wait(arriving[number : number + size - 1])
            sum_in_rank_order([part[where] for part in parts], total[where])
        self._wait(leaving)
        return total

    def _places(self, share: torch.Tensor) -> list[tuple[slice, int]]:
        """Return the rows and the peer of each exchange, slice by slice; within a slice the next rank comes
        first."""
        rank, size = self._peers.rank, self._peers.size
        row_bytes = share.shape[1] * share.element_size()
        slices = rows_of_slices(len(share), row_bytes, chunks=self._chunks, message_bytes=self._message_bytes)
        return [(where, (rank + step) % size) for where in slices for step in range(1, size)]

    def _opposite(self, peer: int) -> int:
        """Return the rank at the same distance before this one as ``peer`` is after it."""
        return (2 * self._peers.rank - peer) % self._peers.size

    def _receive(self, into: torch.Tensor, peer: int) -> dist.Work:
        work = dist.irecv(into, group=self._peers.group, group_src=peer)
        assert work is not None, "this rank is one of the group"
        return work

    def _send(self, rows: torch.Tensor, peer: int) -> dist.Work:
        work = dist.isend(rows, group=self._peers.group, group_dst=peer)
        assert work is not None, "this rank is one of the group"
        return work

    def _wait(self, works: Sequence[dist.Work]) -> None:
        with self._peers.recorder.span("tensor_comm"):
            for work in works:
                work.wait()


def _multiply(products: Sequence[Product], out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Write the sum of ``products``, and of ``bias``, to ``out``."""
    (rows, matrix), *others = products
    if bias is None:
        torch.mm(rows, matrix, out=out)
    else:
        torch.addmm(bias, rows, matrix, out=out)
    for rows, matrix in others:
        out.addmm_(rows, matrix)


class _Order(NamedTuple):
    """The order in which the rows of ``[B, S, W]`` and ``[B, S/tp, W]`` are exchanged with the peers."""

    size: int
    """Number of peers, this rank included."""
    sequences: int
    is_first: bool
    """Whether memory is in sequence-first order: position by position."""

    def by_rank(self, x: torch.Tensor) -> torch.Tensor:
        """Reorder ``[B, S, W]`` to ``[T, W]``, rank by rank."""
        if self.is_first:
            return x.transpose(0, 1).reshape(-1, x.shape[-1])
        return x.unflatten(1, (self.size, -1)).transpose(0, 1).reshape(-1, x.shape[-1])

    def by_sequence(self, rows: torch.Tensor) -> torch.Tensor:
        """Reorder ``[T, W]``, rank by rank, to ``[B, S, W]``: the inverse of `by_rank`."""
        if self.is_first:
            return self.share(rows)
        return rows.view(self.size, self.sequences, -1, rows.shape[-1]).transpose(0, 1).flatten(1, 2)

    def rows(self, share: torch.Tensor) -> torch.Tensor:
        """Reorder ``[B, S/tp, W]`` to ``[R, W]``, made contiguous: a gradient may be one expanded value."""
        return (share.transpose(0, 1) if self.is_first else share).flatten(0, 1).contiguous()

    def share(self, rows: torch.Tensor) -> torch.Tensor:
        """Reorder ``[R, W]`` to ``[B, S/tp, W]``: the inverse of `rows`."""
        if self.is_first:
            return rows.view(-1, self.sequences, rows.shape[-1]).transpose(0, 1)
        return rows.view(self.sequences, -1, rows.shape[-1])


def gather_products(
    x: torch.Tensor,
    peers: SlicedPeers,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    remade: Remade | None,
) -> tuple[torch.Tensor, ...]:
    """Compute the products of `myriad.model.boundary.Boundary.gather_products` in slices."""
    outputs: tuple[torch.Tensor, ...] = _Gather.apply(x, peers, tuple(weights), remade, *weights, *biases)
    return outputs


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        peers: SlicedPeers,
        weights: tuple[torch.Tensor, ...],
        remade: Remade | None,
        *parameters: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        biases = parameters[len(weights) :]
        matrices = [weight.detach().t() for weight in weights]
        order = _Order(peers.size, len(x), is_sequence_first(x))
        gathered, outputs = peers.slice_transport.gather_products(order.rows(x), matrices, biases, _nothing)
        if remade is None:
            ctx.save_for_backward(gathered)
        ctx.peers, ctx.weights, ctx.remade, ctx.order = peers, weights, remade, order
        ctx.has_bias = [bias is not None for bias in biases]
        return tuple(order.by_sequence(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        peers: SlicedPeers = ctx.peers
        order: _Order = ctx.order
        rows = [order.by_rank(grad) for grad in grads]
        again = None
        if ctx.remade is not None:  # issued before the slices of the gradient
            *_, x = [ctx.remade.take() for _ in ctx.weights]
            again = AsyncStack(order.rows(x), peers)
        products = [(own, weight.detach()) for own, weight in zip(rows, ctx.weights, strict=True)]
        grad_x = peers.slice_transport.scatter_products(products, partial(apply_deferred, peers.later or []))
        gathered = ctx.saved_tensors[0] if again is None else again.wait().flatten(0, 1)
        pairs = zip(ctx.weights, rows, strict=True)
        grad_weights = [weight_gradient(weight, own, gathered, peers.later) for weight, own in pairs]
        grad_biases = [own.sum(0) if has else None for own, has in zip(rows, ctx.has_bias, strict=True)]
        return order.share(grad_x), None, None, None, *grad_weights, *grad_biases


def scatter_products(factors: Sequence[Factors], peers: SlicedPeers) -> torch.Tensor:
    """Compute the products of `myriad.model.boundary.Boundary.scatter_products` in slices."""
    xs, weights = [one.x for one in factors], [one.weight for one in factors]
    output: torch.Tensor = _Scatter.apply(peers, tuple(factors), *xs, *weights)
    return output


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, peers: SlicedPeers, factors: tuple[Factors, ...], *tensors: torch.Tensor
    ) -> torch.Tensor:
        xs = tensors[: len(factors)]
        order = _Order(peers.size, len(xs[0]), is_sequence_first(xs[0]))
        products = [(order.by_rank(x), one.weight.detach().t()) for x, one in zip(xs, factors, strict=True)]
        rows = peers.slice_transport.scatter_products(products, _nothing)
        ctx.save_for_backward(*(x for x, one in zip(xs, factors, strict=True) if one.remade is None))
        ctx.peers, ctx.order = peers, order
        ctx.weights, ctx.remades = [one.weight for one in factors], [one.remade for one in factors]
        return order.share(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        peers: SlicedPeers = ctx.peers
        order: _Order = ctx.order
        gathered, products = peers.slice_transport.gather_products(
            order.rows(grads[0]),
            [weight.detach() for weight in ctx.weights],
            [None] * len(ctx.weights),
            partial(apply_deferred, peers.later or []),
        )
        kept = iter(ctx.saved_tensors)
        xs = [next(kept) if remade is None else remade.take() for remade in ctx.remades]
        grad_weights = [
            weight_gradient(weight, gathered, order.by_rank(x), peers.later)
            for weight, x in zip(ctx.weights, xs, strict=True)
        ]
        return None, None, *(order.by_sequence(one) for one in products), *grad_weights


def _nothing() -> None:
    """Placeholder for ``meanwhile`` in the forward, which has no deferred products."""
