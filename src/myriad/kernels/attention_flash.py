"""Attention by Triton's kernels, `triton.attention_forward` and `triton.attention_backward`: of whole
sequences or packed documents, as one differentiable operator, and of pieces of sequences that ranks share
(`myriad.kernels.attention_pieces`), a list of them at a time.

The kernels support heads of 16, 32, 64, 80, 96 and 128 values, in bfloat16, float16 or float32, on a CUDA
device. They also run in Triton's interpreter, if ``TRITON_INTERPRET=1`` was set before Triton was imported.
Scores, softmax and sums are float32 for inputs of any type.

Legend: B batch, S sequence, N query heads, K key/value heads, D head size, P keys of pieces.
"""

import math
from typing import Any, NamedTuple

import torch

from myriad.kernels.attention_choice import Scores
from myriad.kernels.choice import in_interpreter
from myriad.kernels.documents import Documents
from myriad.kernels.memory_order import empty_in_order
from myriad.kernels.ring_plan import Pieces, ring_plan
from myriad.kernels.tile_tables import are_short, tile_table

__all__ = [
    "FlashCall",
    "Launch",
    "flash_attention",
    "flash_backward",
    "flash_forward",
    "launch_of",
    "row_products",
]


class Launch(NamedTuple):
    """Launch parameters of one kernel: tile of queries, tile of keys, warps, pipeline stages."""

    query_size: int
    key_size: int
    num_warps: int
    num_stages: int


_LAUNCHES = {
    ("forward", 64): Launch(128, 64, 8, 3),
    ("forward", 128): Launch(128, 64, 8, 3),
    ("backward_keys", 64): Launch(64, 128, 8, 2),
    ("backward_keys", 128): Launch(64, 64, 8, 2),
    ("backward_queries", 64): Launch(128, 64, 8, 2),
    ("backward_queries", 128): Launch(128, 64, 8, 2),
}
"""The largest tiles whose sm_90 code keeps all but a few bytes in registers, according to
`cuobjdump --dump-resource-usage`. They have not been timed on a GPU."""
_SHORT = Launch(64, 64, 4, 2)
"""Tiles for lists of short pieces, which would leave much of a tile of 128 positions unused. They spill at
most 8 bytes of a thread."""
_WIDE = Launch(32, 32, 8, 1)
"""Tiles in float32: each value takes twice the memory, and no tensor core multiplies it directly. With four
warps their code keeps kilobytes of a thread outside its registers."""


def padded_width(width: int) -> int:
    """Return the columns of a tile: Triton's blocks have powers of two."""
    return 1 << (width - 1).bit_length()


def launch_of(kernel: str, width: int, dtype: torch.dtype, *, short: bool = False) -> Launch:
    """Return the tile sizes of a kernel for a head size and a type, for lists of short pieces if
    ``short``."""
    if dtype == torch.float32:
        return _WIDE
    usual = _LAUNCHES[kernel, max(64, padded_width(width))]
    return _SHORT if short and max(usual.query_size, usual.key_size) > 64 else usual


class FlashCall(NamedTuple):
    """What one call of the kernels depends on, apart from the tensors."""

    width: int
    repeats: int
    """Query heads that share a key/value head."""
    dtype: torch.dtype
    how: Scores
    adds: bool
    """Whether results are added, or joined, to those of earlier calls."""
    short: bool = False
    """Whether the pieces are short."""

    @classmethod
    def of(cls, pieces: Pieces, q: torch.Tensor, k: torch.Tensor, how: Scores, *, adds: bool) -> "FlashCall":
        """Return the call for queries ``[B, S, N, D]`` and keys ``[B, P, K, D]``."""
        return cls(q.shape[3], q.shape[2] // k.shape[2], q.dtype, how, adds, are_short(pieces))

    def constants(self, kernel: str) -> dict[str, Any]:
        """Return the compile-time arguments and the launch parameters of a kernel."""
        launch = launch_of(kernel, self.width, self.dtype, short=self.short)
        return {
            "repeats": self.repeats,
            "width": self.width,
            "padded": padded_width(self.width),
            "query_size": launch.query_size,
            "key_size": launch.key_size,
            "capped": self.how.softcap is not None,
            "adds": self.adds,
            "upcast": in_interpreter(),  # the interpreter multiplies bfloat16 wrongly
            "precision": "ieee" if self.dtype == torch.float32 else "tf32",
            "num_warps": launch.num_warps,
            "num_stages": launch.num_stages,
        }

    @property
    def scales(self) -> tuple[float, float]:
        """The kernels' ``scale`` and ``gain``, which turn a product into a score to base 2."""
        factor, softcap = self.how.factor(self.width), self.how.softcap
        if softcap is None:
            return 1.0, factor / math.log(2)
        return 2 * factor / softcap / math.log(2), softcap / math.log(2)


def _strides(*tensors: torch.Tensor) -> list[int]:
    """Return the strides of batch, position and head of each; a head's values must be contiguous."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def _rows_together(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def flash_forward(
    pieces: Pieces,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    how: Scores,
    sinks: torch.Tensor | None = None,
    *,
    joins: bool = False,
) -> None:
    """Attend from queries ``[B, S, N, D]`` to keys and values ``[B, P, K, D]`` in all pieces. Writes the
    output ``[B, S, N, D]`` and log-sum-exp of the scores, contiguous float32 ``[B, N, S]``, of the queries in
    the pieces. Results begin with those of the ``sinks`` ``[N]``, or, if ``joins``, with those of earlier
    calls that are there, in float32."""
    from myriad.kernels.triton import attention_forward
    from myriad.kernels.triton.launch import launch

    if not pieces or not out.numel():
        return
    q, k, v = (_rows_together(x) for x in (q, k, v))
    call = FlashCall.of(pieces, q, k, how, adds=joins)
    constants = call.constants("forward")
    table = tile_table(pieces, len(q), constants["query_size"], q.device, of_keys=False)
    launch(
        attention_forward.forward, (len(table.tiles), q.shape[2]),
        q, k, v, lse if sinks is None else sinks, out, lse, *table, *_strides(q, k, v), *out.stride()[:2],
        q.shape[1], q.shape[2], pieces[0].window, *call.scales, has_sinks=sinks is not None, **constants,
    )  # fmt: skip


def row_products(out: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``out * grad`` ``[B, S, N, D]`` of each row, float32 ``[B, N, S]``."""
    from myriad.kernels.triton import attention_backward
    from myriad.kernels.triton.launch import launch

    batch, rows, heads, width = out.shape
    products, size = torch.empty(batch, heads, rows, dtype=torch.float32, device=out.device), 64
    launch(
        attention_backward.row_products, (-(-rows // size), batch * heads),
        out, grad, products, *out.stride()[:2], *_strides(grad), rows, heads,
        width=width, padded=padded_width(width), size=size,
    )  # fmt: skip
    return products


def flash_backward(
    pieces: Pieces,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    lse: torch.Tensor,
    products: torch.Tensor,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    how: Scores,
    *,
    adds: bool = False,
) -> None:
    """Write the gradients of queries, keys and values in all pieces to ``grads``, or add them. ``inputs``:
    queries, keys, values, and the gradient of the output. ``lse`` and ``products`` ``[B, N, S]``: log-sum-exp
    of all scores, and `row_products` of the whole output."""
    from myriad.kernels.triton import attention_backward
    from myriad.kernels.triton.launch import launch

    q, k, v, grad = (_rows_together(x) for x in inputs)
    if not pieces or not q.numel():
        return
    call = FlashCall.of(pieces, q, k, how, adds=adds)
    sizes = q.shape[1], q.shape[2], pieces[0].window, *call.scales, how.factor(call.width)
    tensors, strides = (q, k, v, grad, lse, products), _strides(q, k, v, grad)
    of_queries, of_keys, of_values = grads
    constants = call.constants("backward_keys")
    table = tile_table(pieces, len(q), constants["key_size"], q.device, of_keys=True)
    launch(
        attention_backward.backward_keys, (len(table.tiles), k.shape[2]),
        *tensors, of_keys, of_values, *table, *strides, *of_keys.stride()[:2], *sizes, **constants,
    )  # fmt: skip
    constants = call.constants("backward_queries")
    table = tile_table(pieces, len(q), constants["query_size"], q.device, of_keys=False)
    launch(
        attention_backward.backward_queries, (len(table.tiles), q.shape[2]),
        *tensors, of_queries, *table, *strides, *of_queries.stride()[:2], *sizes, **constants,
    )  # fmt: skip


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        pieces: Pieces,
        how: Scores,
    ) -> torch.Tensor:
        q, k, v = (_rows_together(x) for x in (q, k, v))
        out = empty_in_order(q, *q.shape)
        lse = torch.empty(len(q), q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
        flash_forward(pieces, q, k, v, out, lse, how, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.pieces, ctx.how = pieces, how
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        grad = _rows_together(grads[0])
        grad_q, grad_k, grad_v = (empty_in_order(order, *x.shape) for order, x in ((q, q), (k, k), (k, v)))
        products = row_products(out, grad)
        inputs, found = (q, k, v, grad), (grad_q, grad_k, grad_v)
        flash_backward(ctx.pieces, inputs, lse, products, found, ctx.how)
        of_sinks = None
        if sinks is not None:
            of_sinks = -((sinks.float()[:, None] - lse).exp_() * products).sum((0, 2)).to(sinks.dtype)
        return grad_q, grad_k, grad_v, of_sinks, None, None


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int | None = None,
    how: Scores = Scores(),
    sinks: torch.Tensor | None = None,
    documents: Documents | None = None,
) -> torch.Tensor:
    """Attend causally to at most the last ``window`` positions: ``[B, S, N, D]`` and twice ``[B, S, K, D]``
    to ``[B, S, N, D]``; with ``documents``, inside each document. Any strides are allowed. ``sinks``: score
    of each head's sink, ``[N]``."""
    sequence = q.shape[1]
    pieces = ring_plan(sequence, min(window or sequence, sequence), 0, 1, documents).steps[0]
    out: torch.Tensor = _FlashAttention.apply(q, k, v, sinks, pieces, how)
    return out
