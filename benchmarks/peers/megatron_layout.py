"""Tensor parallelism inside hosts and a pipeline between them, as Megatron-LM v2.4 runs them, in plain
PyTorch.

Ranks lie as in Megatron-LM: tensor-parallel neighbours next to each other, stages outermost. Columns, then
rows of the matrices are cut; the residual stream is whole on every rank and summed by an all-reduce that is
waited for. The schedule is 1F1B, and each send is coupled with the receive of the same step and waited for
(`p2p_communication.py`).

    warm-up   forward of the first micro-batches: receive, compute, send
    steady    forward | send activation + receive gradient | backward | send gradient + receive activation
    drain     backward of the rest: receive, compute, send
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from peers.plain_gpt import MLP, Attention, Head, PlainGPT, mean_loss
from peers.work import CLIP_NORM, EndsWithProcess, Work, new_adamw

__all__ = ["MegatronLayout"]


class _SumBackward(torch.autograd.Function):
    """Into the part that is cut: the gradient of the input is summed over its ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradients[0].contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _SumForward(torch.autograd.Function):
    """Out of the part that is cut: partial sums are added."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _Join(torch.autograd.Function):
    """Logits of a part of the vocabulary on each rank become all of them: ``[..., V / tp]`` to ``[...,
    V]``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.size, ctx.place = dist.get_world_size(group), dist.get_rank(group)
        parts = [torch.empty_like(x) for _ in range(ctx.size)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0].chunk(ctx.size, -1)[ctx.place].contiguous(), None


class MegatronLayout(EndsWithProcess):
    """Stages of ``tp`` ranks each; the batch in micro-batches."""

    def __init__(self, work: Work, *, tp: int, micro_batch: int) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        self.work, self.tp, self.micro_batch = work, tp, micro_batch
        self.num_stages, (self.stage, self.place) = world // tp, divmod(rank, tp)
        self.before, self.after = rank - tp, rank + tp
        groups = [dist.new_group(range(stage * tp, (stage + 1) * tp)) for stage in range(self.num_stages)]
        self.group = groups[self.stage]
        self.model = PlainGPT(work, work.cut(self.num_stages)[self.stage])
        self.cut: dict[nn.Parameter, int] = {}
        for layer in self.model.layers.values():
            self._cut(layer)
        self.parameters = list(self.model.parameters())
        self.optimizer = new_adamw(self.parameters)
        self.shape = (micro_batch, work.sequence, work.hidden)

    # cutting

    def _cut(self, layer: nn.Module) -> None:
        for module in layer.modules():
            if isinstance(module, Attention):
                self._enter_and_leave(module, module.qkv, module.output)
            elif isinstance(module, MLP):
                self._enter_and_leave(module, module.up, module.down)
            elif isinstance(module, Head):
                self._keep_part(module.output, 0)
                module.output.register_forward_pre_hook(self._entering)
                module.output.register_forward_hook(lambda _, __, x: _Join.apply(x, self.group))

    def _enter_and_leave(self, module: nn.Module, columns: nn.Linear, rows: nn.Linear) -> None:
        self._keep_part(columns, 0)
        self._keep_part(rows, 1)
        module.register_forward_pre_hook(self._entering)
        module.register_forward_hook(lambda _, __, x: _SumForward.apply(x, self.group))

    def _entering(self, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (_SumBackward.apply(inputs[0], self.group),)

    def _keep_part(self, linear: nn.Linear, dim: int) -> None:
        part = linear.weight.detach().chunk(self.tp, dim)[self.place].contiguous()
        linear.weight = nn.Parameter(part)
        self.cut[linear.weight] = dim

    # the schedule

    def forward_backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        count = self.work.global_batch // self.micro_batch
        micro_batches = list(
            zip(tokens.split(self.micro_batch), targets.split(self.micro_batch), strict=True)
        )
        warm_up = min(count, self.num_stages - 1 - self.stage)
        pending: list[tuple[torch.Tensor | None, torch.Tensor]] = []
        self.loss = 0.0
        received = self._move(None, None, from_before=True)[0]
        for index in range(warm_up):
            pending.append(self._forward(received, *micro_batches[index], count))
            self._move(pending[-1][1], None)
            received = self._move(None, None, from_before=True)[0]
        for index in range(warm_up, count):
            pending.append(self._forward(received, *micro_batches[index], count))
            gradient = self._move(pending[-1][1], None, from_after=True)[1]
            upward = self._backward(*pending.pop(0), gradient)
            received = self._move(None, upward, from_before=index + 1 < count)[0]
        for entry in pending:
            gradient = self._move(None, None, from_after=True)[1]
            self._move(None, self._backward(*entry, gradient))
        return self.loss / self.tp

    def _forward(
        self, received: torch.Tensor | None, tokens: torch.Tensor, targets: torch.Tensor, count: int
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        result = self.model(tokens if received is None else received)
        if self.stage == self.num_stages - 1:
            result = mean_loss(result, targets) / count
            self.loss += result.item()
        return received, result

    def _backward(
        self, received: torch.Tensor | None, result: torch.Tensor, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        result.backward(gradient)
        return None if received is None else received.grad

    def _move(
        self,
        activation: torch.Tensor | None,
        gradient: torch.Tensor | None,
        *,
        from_before: bool = False,
        from_after: bool = False,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Send and receive at once, and wait for all of it; the ends of the pipeline have one neighbour."""
        first, last = self.stage == 0, self.stage == self.num_stages - 1
        below = torch.empty(self.shape) if from_before and not first else None
        above = torch.empty(self.shape) if from_after and not last else None
        pending: list[dist.Work | None] = []
        start: list[tuple[Callable[..., dist.Work | None], torch.Tensor | None, int, bool]] = [
            (dist.irecv, below, self.before, False),
            (dist.irecv, above, self.after, False),
            (dist.isend, activation, self.after, last),
            (dist.isend, gradient, self.before, first),
        ]
        for operation, tensor, peer, at_end in start:
            if tensor is not None and not at_end:
                pending.append(operation(tensor.detach().contiguous(), peer))
        for one in pending:
            assert one is not None
            one.wait()
        return None if below is None else below.requires_grad_(), above

    # the update

    def update(self) -> None:
        squares = torch.zeros(())
        for parameter in self.parameters:
            assert parameter.grad is not None
            share = 1.0 if parameter in self.cut else 1.0 / self.tp
            squares += share * parameter.grad.square().sum()
        dist.all_reduce(squares)
        scale = torch.clamp(CLIP_NORM / (squares.sqrt() + 1e-6), max=1.0)
        torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], scale)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: self._whole(parameter) for name, parameter in self.model.named_parameters()}

    def _whole(self, parameter: nn.Parameter) -> torch.Tensor:
        gradient = parameter.grad
        assert gradient is not None
        if parameter not in self.cut:
            return gradient
        parts = [torch.empty_like(gradient) for _ in range(self.tp)]
        dist.all_gather(parts, gradient.contiguous(), group=self.group)
        return torch.cat(parts, self.cut[parameter])
