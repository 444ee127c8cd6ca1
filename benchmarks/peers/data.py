"""Data parallelism in plain PyTorch: DistributedDataParallel and FSDP2.

On gloo, FSDP2's reduce-scatter moves as many bytes as an all-reduce, twice what is needed (torch 2.13), and
its collectives are waited for where they are issued: nothing hides behind the compute.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from peers.plain_gpt import PlainGPT, mean_loss
from peers.work import EndsWithProcess, Work, clip_gradients, new_adamw

__all__ = ["DataParallel"]


class DataParallel(EndsWithProcess):
    """Each rank its rows of the batch; gradients are means over ranks."""

    def __init__(
        self,
        work: Work,
        *,
        bucket_mib: float | None = None,
        reshard: bool | None = None,
        shard_group: int | None = None,
    ) -> None:
        """``bucket_mib``: DDP with buckets of this size. ``reshard``: FSDP2, dropping the parameters after
        the forward or keeping them for the backward. ``shard_group``: its hybrid form, which shards over so
        many neighbours and all-reduces between such groups."""
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model = PlainGPT(work)
        self.group = None if reshard is None else dist.group.WORLD
        self.run: nn.Module = self.model
        if reshard is None:
            self.run = DistributedDataParallel(
                self.model, bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True
            )
        else:
            mesh = init_device_mesh("cpu", (self.world,))
            if shard_group is not None:
                sizes = (self.world // shard_group, shard_group)
                mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
            for layer in self.model.layers.values():
                fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
            fully_shard(self.model, mesh=mesh, reshard_after_forward=reshard)
        self.parameters = list(self.model.parameters())
        self.optimizer = new_adamw(self.parameters)

    def forward_backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        tokens, targets = (x.chunk(self.world)[self.rank] for x in (tokens, targets))
        loss = mean_loss(self.run(tokens), targets)
        loss.backward()
        return loss.item() / self.world

    def update(self) -> None:
        clip_gradients(self.parameters, self.group)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def gradients(self) -> dict[str, torch.Tensor]:
        named = ((name, p.grad) for name, p in self.model.named_parameters())
        return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in named if g is not None}
