"""Expert parallelism in plain PyTorch, as torchtitan composes it, for `benchmarks/links/expert_exchange.py`.

    attention, router, norms, table    replicated, `DistributedDataParallel`: summed in the last backward
    experts                            stacked weights of this rank's experts, `grouped_mm` with autograd
    rows                               counts first, then `all_to_all_single` with these sizes, and back

It is the model that `ModelConfig` describes with rotary positions, RMSNorm, GELU, a tied table and no biases,
with the initial values of Myriad's, and the same balance loss.

Legend: B batch, S sequence, T = B S tokens, H hidden, N heads, D head size, E experts, k experts of a token.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from myriad.model.config import ModelConfig
from myriad.model.gpt import build_full
from peers.work import CLIP_NORM, new_adamw

__all__ = ["ExpertParallel"]


class _Rows(torch.autograd.Function):
    """Rows to other ranks; gradients travel back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, leaving: list[int], arriving: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.back = arriving, leaving, group
        found = rows.new_empty(sum(arriving), rows.shape[1])
        dist.all_to_all_single(found, rows.contiguous(), arriving, leaving, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        leaving, arriving, group = ctx.back
        found = grads[0].new_empty(sum(arriving), grads[0].shape[1])
        dist.all_to_all_single(found, grads[0].contiguous(), arriving, leaving, group=group)
        return found, None, None, None


class _Attention(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.width = model.head_width
        self.qkv = nn.Linear(model.hidden, 3 * model.hidden, bias=False)
        self.output = nn.Linear(model.hidden, model.hidden, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.width)).unbind(2)  # [B, S, N, D]
        q, k = (_turned(one, turns) for one in (q, k))
        y = F.scaled_dot_product_attention(*(one.transpose(1, 2) for one in (q, k, v)), is_causal=True)
        return self.output(y.transpose(1, 2).flatten(2))


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2)


class _Experts(nn.Module):
    """The router, and this rank's experts."""

    def __init__(self, model: ModelConfig, group: dist.ProcessGroup) -> None:
        super().__init__()
        assert model.experts is not None
        self.model, self.group, self.ranks = model, group, group.size()
        held, width = model.experts // self.ranks, model.expert_width
        self.gate = nn.Linear(model.hidden, model.experts, bias=False)
        self.up = nn.Parameter(torch.empty(held, width, model.hidden))
        self.down = nn.Parameter(torch.empty(held, model.hidden, width))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the experts compute ``[B, S, H]``, and the balance loss, summed over tokens."""
        tokens, chosen_of_token = x.flatten(0, 1), self.model.experts_per_token
        scores = self.gate(x).softmax(-1)  # [B, S, E]
        gates, chosen = scores.flatten(0, 1).topk(chosen_of_token, -1)
        gates = gates / gates.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=scores.shape[-1])
        results = self._computed(tokens[order // chosen_of_token], counts)
        of_pairs = torch.zeros_like(results).index_copy(0, order, results).view(*chosen.shape, -1)
        y = torch.bmm(gates[:, None], of_pairs).squeeze(1)
        return y.view_as(x), self._balance_loss(scores, chosen)

    def _computed(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return what experts compute of rows, ordered by expert, of which each has ``counts``."""
        found = torch.empty_like(counts)
        dist.all_to_all_single(found, counts, group=self.group)
        leaving, arriving = (one.view(self.ranks, -1).sum(1).tolist() for one in (counts, found))
        arrived = _Rows.apply(rows, leaving, arriving, self.group)
        held = len(counts) // self.ranks
        order = torch.arange(held).repeat(self.ranks).repeat_interleave(found).argsort(stable=True)
        ends = found.view(self.ranks, -1).sum(0).cumsum(0).to(torch.int32)
        inner = F.gelu(F.grouped_mm(arrived[order], self.up.transpose(1, 2), offs=ends))
        results = F.grouped_mm(inner, self.down.transpose(1, 2), offs=ends)
        back = torch.zeros_like(results).index_copy(0, order, results)
        returned: torch.Tensor = _Rows.apply(back, arriving, leaving, self.group)
        return returned

    def _balance_loss(self, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        sequences, length, experts = scores.shape
        of_sequence = chosen.view(sequences, -1)
        counts = scores.new_zeros(sequences, experts)
        counts.scatter_add_(1, of_sequence, scores.new_ones(()).expand_as(of_sequence))
        loads = counts * (experts / of_sequence.shape[1])
        return self.model.balance_loss * length * (loads * scores.mean(1)).sum()


class _Block(nn.Module):
    def __init__(self, model: ModelConfig, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(model.hidden, model.norm_epsilon)
        self.attention = _Attention(model)
        self.norm2 = nn.RMSNorm(model.hidden, model.norm_epsilon)
        self.mlp = _Experts(model, group)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.attention(self.norm1(x), turns)
        y, added = self.mlp(self.norm2(x))
        return x + y, added


class _Model(nn.Module):
    """Map tokens and targets ``[B, S]`` to the sums of the losses and of the balance losses."""

    def __init__(self, model: ModelConfig, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.table = nn.Embedding(model.vocabulary, model.hidden)
        self.blocks = nn.ModuleList([_Block(model, group) for _ in range(model.layers)])
        self.norm = nn.RMSNorm(model.hidden, model.norm_epsilon)
        exponents = torch.arange(0, model.head_width, 2, dtype=torch.float64) / model.head_width
        angles = torch.arange(model.sequence)[:, None] * model.rotary_base**-exponents
        self.turns = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, balance = self.table(tokens), torch.zeros(())
        for block in self.blocks:
            x, added = block(x, self.turns)
            balance = balance + added
        logits = F.linear(self.norm(x), self.table.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), balance

    @torch.no_grad()
    def copy_initial(self, model: ModelConfig, seed: int, rank: int) -> None:
        """Copy the values that Myriad draws from this seed."""
        first, *blocks, last = build_full(model, seed)
        self.table.weight.copy_(first.get_parameter("tokens.weight"))
        self.norm.weight.copy_(last.get_parameter("norm.weight"))
        for own, block in zip(self.blocks, blocks, strict=True):
            for name, parameter in own.named_parameters():
                other = name.replace("gate", "router")
                if name in ("mlp.up", "mlp.down"):
                    numbers = range(rank * len(parameter), (rank + 1) * len(parameter))
                    matrix = name.removeprefix("mlp.")
                    stacked = [block.get_parameter(f"mlp.experts.{n}.{matrix}.weight") for n in numbers]
                    parameter.copy_(torch.stack(stacked))
                else:
                    parameter.copy_(block.get_parameter(other))


class ExpertParallel:
    """One rank: as many replicas as ranks, and each with a part of the experts."""

    def __init__(self, model: ModelConfig, seed: int, micro_batch: int) -> None:
        self.group, self.micro_batch = dist.new_group(), micro_batch
        module = _Model(model, self.group)
        module.copy_initial(model, seed, dist.get_rank())
        experts = [name for name, _ in module.named_parameters() if name.endswith(("mlp.up", "mlp.down"))]
        self.experts = [module.get_parameter(name) for name in experts]
        self.others = [one for name, one in module.named_parameters() if name not in experts]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, experts)
        self.module = DistributedDataParallel(
            module, process_group=dist.new_group(), gradient_as_bucket_view=True
        )
        self.optimizer = new_adamw([*self.experts, *self.others])

    def train_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
        """Run forwards and backwards of the micro-batches, clip and update. Return the mean loss over all
        ranks, and the norm of the gradients before clipping."""
        ranks, total = self.group.size(), torch.zeros(())
        parts = list(zip(*(one.split(self.micro_batch) for one in (inputs, targets)), strict=True))
        for number, part in enumerate(parts, 1):
            with nullcontext() if number == len(parts) else self.module.no_sync():
                loss, balance = self.module(*part)
                # the mean over ranks, which DistributedDataParallel forms, is of the sum over ranks
                ((loss + balance) / targets.numel()).backward()
            total += loss.detach()
        torch._foreach_mul_(_gradients(self.experts), 1 / ranks)
        own = torch.stack([total / (targets.numel() * ranks), _square(self.experts)])
        dist.all_reduce(own, group=self.group)
        norm = (own[1] + _square(self.others)).sqrt()
        factor = torch.clamp(CLIP_NORM / (norm + 1e-6), max=1.0)
        torch._foreach_mul_(_gradients([*self.experts, *self.others]), factor)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(own[0]), float(norm)


def _gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    return [one.grad for one in parameters if one.grad is not None]


def _square(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Return the sum of the squares of the gradients."""
    return torch.stack(torch._foreach_norm(_gradients(parameters))).square().sum()
