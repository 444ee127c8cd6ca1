"""A GPT in plain PyTorch as a list of layers, so that DDP, FSDP2, DTensor and pipelines can all cut it:
Myriad's dimensions and matrix products (serial block, LayerNorm, GELU, learned positions, no biases, untied
output).

Rows of the projection to queries, keys and values stand head by head, so that tensor parallelism can cut
them.

Legend: B batch, S sequence, H hidden, N heads (of this rank), D head size, V vocabulary.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional as F

from peers.work import Work

__all__ = ["MLP", "Attention", "Block", "Embedding", "Head", "PlainGPT", "mean_loss"]


class Attention(nn.Module):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self.width = work.hidden // work.heads
        self.qkv = nn.Linear(work.hidden, 3 * work.hidden, bias=False)
        self.output = nn.Linear(work.hidden, work.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 3, self.width)).transpose(1, 2)  # [B, N, S, 3, D]
        q, k, v = heads.unbind(3)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self.up = nn.Linear(work.hidden, 4 * work.hidden, bias=False)
        self.down = nn.Linear(4 * work.hidden, work.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Embedding(nn.Module):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self.tokens = nn.Embedding(work.vocabulary, work.hidden)
        self.positions = nn.Embedding(work.sequence, work.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))


class Block(nn.Module):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(work.hidden, bias=False)
        self.attention = Attention(work)
        self.norm_2 = nn.LayerNorm(work.hidden, bias=False)
        self.mlp = MLP(work)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Head(nn.Module):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(work.hidden, bias=False)
        self.output = nn.Linear(work.hidden, work.vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.norm(x))


class PlainGPT(nn.Module):
    """Some of the layers (0 the embedding, then blocks, then the head); off: all. Initial values depend on
    the layer alone."""

    def __init__(self, work: Work, layers: Iterable[int] | None = None) -> None:
        super().__init__()
        last = work.layers + 1
        self.layers = nn.ModuleDict()
        for index in range(last + 1) if layers is None else layers:
            torch.manual_seed(index)
            kind = Embedding if index == 0 else Head if index == last else Block
            layer = self.layers[str(index)] = kind(work)
            for parameter in layer.parameters():
                if parameter.dim() >= 2:
                    nn.init.normal_(parameter, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
