"""PyTorch's own operators in the place of Myriad's, for `ablation.py` and `single_process.py`: no job has
such a switch.

Attention by the library's operator, all logits at once for the loss, `F.linear`, `F.rms_norm`, `F.embedding`.
Only for models that no tensor-parallel ranks share. `OPTIMIZER` on request: AdamW one parameter at a time.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F
from torch.optim.adamw import adamw

from myriad.kernels.attention import split_heads
from myriad.kernels.attention_blocks import Heads
from myriad.kernels.cross_entropy import TensorPeers, linear_cross_entropy_reference
from myriad.optim.moments import Moments

__all__ = ["OPERATORS", "OPTIMIZER", "plain_operators"]


def _attention(
    fused: torch.Tensor,
    heads: Heads,
    window: int | None = None,
    turns: torch.Tensor | None = None,
    *_: Any,
) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in split_heads(fused, heads, turns))
    grouped = heads.num_kv_heads != heads.num_heads
    if window is None or window >= fused.shape[1]:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    else:
        ones = torch.ones(fused.shape[1], fused.shape[1], dtype=torch.bool)
        band = ones.tril().triu(1 - window)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=band, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(2)


def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    later: Any = None,
    remade: Any = None,
) -> Any:
    assert not later, "products are left for later between tensor-parallel ranks only"
    assert remade is None, "F.linear keeps what it takes"
    return F.linear(x, weight, bias)


def _linear_pair(
    x: torch.Tensor, weights: Any, biases: Any, later: Any = None, remade: Any = None, **_: Any
) -> Any:
    pairs = zip(weights, biases, strict=True)
    return tuple(_linear(x, weight, bias, later, remade) for weight, bias in pairs)


def _linear_sum(
    mixed: torch.Tensor, inner: torch.Tensor, weights: Any, later: Any = None, remade: Any = None
) -> Any:
    return _linear(mixed, weights[0], None, later) + _linear(inner, weights[1], None, later, remade)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, epsilon)


def _embedding(tokens: torch.Tensor, weight: torch.Tensor, first_row: int, size: int) -> torch.Tensor:
    assert first_row == 0 and len(weight) == size
    return F.embedding(tokens, weight)


def _cross_entropy_steps(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    peers: TensorPeers,
    vocabulary: int,
    **_: Any,
) -> Generator[None, None, torch.Tensor]:
    """In one step, without waiting for another rank."""
    assert peers.rank == 0
    return linear_cross_entropy_reference(x, weight, targets, vocabulary)
    yield


def _move_by_parameter(self: Moments, indices: Sequence[int], *, decays: bool) -> None:
    """A call for each parameter, none of them fused, gradients scaled in a pass of their own."""
    for region, m, v in (
        (self.regions[index], self.exp_avg[index], self.exp_avg_sq[index]) for index in indices
    ):
        if region.decays != decays:
            continue
        for piece in region.pieces:
            part = slice(piece.start, piece.stop)
            if self.divisor is not None:
                region.gradients[part].div_(self.divisor)
            adamw(
                [region.values[part]],
                [region.gradients[part]],
                [m[part]],
                [v[part]],
                [],
                [torch.full((), float(self.steps_done))],
                foreach=False,
                fused=False,
                amsgrad=False,
                maximize=False,
                beta1=self.config.beta1,
                beta2=self.config.beta2,
                eps=self.config.epsilon,
                lr=self.learning_rate,
                weight_decay=self.config.weight_decay if decays else 0.0,
            )


OPERATORS: dict[str, dict[str, Any]] = {
    "attention in blocks": {"myriad.model.self_attention.attention": _attention},
    "gradients added in place": {
        "myriad.model.mlp.linear": _linear,
        "myriad.model.self_attention.linear": _linear,
        "myriad.kernels.linear.linear": _linear,
        "myriad.model.layers.linear_pair": _linear_pair,
        "myriad.model.layers.linear_sum": _linear_sum,
        "myriad.model.layers.embedding": _embedding,
        "myriad.model.head.linear": _linear,
        "myriad.model.head.embedding": _embedding,
    },
    "cross-entropy in chunks": {"myriad.model.head.linear_cross_entropy_steps": _cross_entropy_steps},
    "RMSNorm by LayerNorm": {"myriad.kernels.norm.rms_norm": _rms_norm},
}
"""What Myriad does, and what PyTorch does instead, by where it is called."""
OPTIMIZER = {"optimizer over flat memory": {"myriad.optim.moments.Moments.move_in_place": _move_by_parameter}}


@contextmanager
def plain_operators(*names: str) -> Iterator[None]:
    """While inside, models are made of PyTorch's; of some, by name, or of all `OPERATORS`."""
    known = OPERATORS | OPTIMIZER
    with ExitStack() as stack:
        for name in names or OPERATORS:
            for place, function in known[name].items():
                stack.enter_context(mock.patch(place, function))
        yield
