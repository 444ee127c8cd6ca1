"""PyTorch's own operators in the place of Myriad's, for `benchmarks/ablation.py`: no job has such a switch.

Attention by the library's operator, all logits at once for the loss, `F.linear`, `F.rms_norm`, `F.embedding`.
Only for models that no tensor-parallel ranks share.
"""

from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

from myriad.kernels.attention import split_heads
from myriad.kernels.attention_blocks import Heads
from myriad.kernels.cross_entropy import VocabularyPeers, linear_cross_entropy_reference

__all__ = ["plain_operators"]


def _attention(
    fused: torch.Tensor, heads: Heads, window: int | None = None, turns: torch.Tensor | None = None
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


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, epsilon)


def _embedding(tokens: torch.Tensor, weight: torch.Tensor, first_row: int, size: int) -> torch.Tensor:
    assert first_row == 0 and len(weight) == size
    return F.embedding(tokens, weight)


def _cross_entropy_steps(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, peers: VocabularyPeers, vocabulary: int
) -> Generator[None, None, torch.Tensor]:
    """In one step: nobody is waited for."""
    assert peers.rank == 0
    return linear_cross_entropy_reference(x, weight, targets, vocabulary)
    yield


@contextmanager
def plain_operators() -> Iterator[None]:
    """While inside, models are made of them."""
    replaced = {
        "myriad.model.layers.attention": _attention,
        "myriad.model.layers.linear": _linear,
        "myriad.model.layers.embedding": _embedding,
        "myriad.model.layers.linear_cross_entropy_steps": _cross_entropy_steps,
        "myriad.kernels.linear.linear": _linear,
        "myriad.kernels.norm.rms_norm": _rms_norm,
    }
    with ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(mock.patch(name, function))
        yield
