"""Tensor parallelism by DTensor: attention heads, MLP and vocabulary cut over the ranks, loss in parallel.

With sequence parallelism the residual stream is cut too: gathered before each branch, reduce-scattered after
it, which on gloo costs as much as an all-reduce. The best of both counts.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from peers.plain_gpt import PlainGPT, mean_loss
from peers.work import EndsWithProcess, Work, clip_gradients, new_adamw

__all__ = ["TensorParallel"]


def _embedding_plan(sequence: bool) -> dict[str, ParallelStyle]:
    tokens = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1) if sequence else Replicate())
    if not sequence:
        return {"tokens": tokens}
    positions = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
    return {"tokens": tokens, "positions": positions}


def _block_plan(sequence: bool) -> dict[str, ParallelStyle]:
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    out = RowwiseParallel(output_layouts=Shard(1)) if sequence else RowwiseParallel()
    plan: dict[str, ParallelStyle] = {
        "attention.qkv": ColwiseParallel(),
        "attention.output": out,
        "mlp.up": ColwiseParallel(),
        "mlp.down": out,
    }
    if sequence:
        plan |= {"norm_1": SequenceParallel(), "norm_2": SequenceParallel()}
        plan |= {"attention": gathered, "mlp": gathered}
    return plan


def _head_plan(sequence: bool) -> dict[str, ParallelStyle]:
    layouts = Shard(1) if sequence else Replicate()
    output = ColwiseParallel(input_layouts=layouts, output_layouts=Shard(-1), use_local_output=False)
    return {"output": output} | ({"norm": SequenceParallel()} if sequence else {})


class TensorParallel(EndsWithProcess):
    """Every rank the whole batch, and its part of each matrix."""

    def __init__(self, work: Work, *, sequence: bool) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.world, self.work = dist.get_world_size(), work
        self.model = PlainGPT(work)
        mesh = init_device_mesh("cpu", (self.world,))
        layers = list(self.model.layers.values())
        parallelize_module(layers[0], mesh, _embedding_plan(sequence))
        for block in layers[1:-1]:
            parallelize_module(block, mesh, _block_plan(sequence))
        parallelize_module(layers[-1], mesh, _head_plan(sequence))
        self.parameters = list(self.model.parameters())
        self.optimizer = new_adamw(self.parameters)

    def forward_backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        with loss_parallel():
            loss = mean_loss(self.model(tokens), targets)
            loss.backward()
        value = loss.full_tensor() if isinstance(loss, DTensor) else loss
        return value.item() / self.world

    def _sum_partial(self) -> None:
        """Norms see a part of the sequence only; one all-reduce for all of them."""
        sharded = [(p, p.grad) for p in self.parameters if isinstance(p.grad, DTensor)]
        partial = [(p, gradient) for p, gradient in sharded if gradient.placements[0].is_partial()]
        if not partial:
            return
        flat = torch.cat([gradient.to_local() for _, gradient in partial])
        dist.all_reduce(flat)
        totals = flat.split([parameter.numel() for parameter, _ in partial])
        for (parameter, gradient), total in zip(partial, totals, strict=True):
            parameter.grad = DTensor.from_local(total, gradient.device_mesh, [Replicate()], run_check=False)

    def update(self) -> None:
        self._sum_partial()
        clip_gradients(self.parameters, dist.group.WORLD, plain_copies=self.world)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def gradients(self) -> dict[str, torch.Tensor]:
        named = ((name, p.grad) for name, p in self.model.named_parameters())
        return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in named if g is not None}
