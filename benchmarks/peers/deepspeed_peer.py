"""DeepSpeed on gloo, where it is installed: ZeRO 1, 2 and 3, and its pipeline (1F1B).

It is no dependency of Myriad and needs nothing compiled for this:

    DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install --no-build-isolation deepspeed

The update is the same fused AdamW of torch as the other peers', with DeepSpeed's own sharding and clipping.
"""

import io
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from peers.plain_gpt import PlainGPT, mean_loss
from peers.work import CLIP_NORM, EndsWithProcess, Work, new_adamw

__all__ = ["DeepSpeed", "missing"]


def _import() -> Any:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.disable(logging.WARNING)
    try:
        import deepspeed
    finally:
        logging.disable(logging.NOTSET)
    # shared memory would go around the links, and building it takes a minute
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def missing() -> str | None:
    """Why DeepSpeed cannot take part; ``None`` where it can."""
    try:
        _import()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


class _WithLoss(nn.Module):
    """ZeRO gathers what a module's forward uses, so the loss belongs inside."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.model = PlainGPT(work)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return mean_loss(self.model(tokens), targets)


class DeepSpeed(EndsWithProcess):
    """``zero`` 1 to 3 is data parallelism; ``micro_batch`` instead makes a pipeline of all ranks."""

    def __init__(
        self,
        work: Work,
        *,
        zero: int = 0,
        micro_batch: int | None = None,
        keys: Mapping[str, int | bool] | None = None,
    ) -> None:
        """``keys``: more of ``zero_optimization``, on top of DeepSpeed's defaults."""
        deepspeed = _import()
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.is_pipeline, self.work = micro_batch is not None, work
        share = work.global_batch // self.world
        self.model = self._staged(deepspeed) if self.is_pipeline else _WithLoss(work)
        config = {
            "train_micro_batch_size_per_gpu": micro_batch or share,
            "gradient_accumulation_steps": work.global_batch // micro_batch if micro_batch else 1,
            "gradient_clipping": CLIP_NORM,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
            "zero_optimization": {
                "stage": zero,
                "overlap_comm": True,
                "contiguous_gradients": True,
                **(keys or {}),
            },
        }
        parameters = list(self.model.parameters())
        made = deepspeed.initialize(model=self.model, optimizer=new_adamw(parameters), config=config)
        self.engine = made[0]
        self.kept: dict[str, torch.Tensor] = {}

    def _staged(self, deepspeed: Any) -> nn.Module:
        """Cut as the others' pipelines: the head weighs about as much as a block."""
        layers = list(PlainGPT(self.work).layers.values())
        with redirect_stdout(io.StringIO()):
            return deepspeed.pipe.PipelineModule(
                layers, num_stages=self.world, loss_fn=mean_loss, partition_method="type:block|head"
            )

    def forward_backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        if self.is_pipeline:
            loss = self.engine.train_batch(self._micro_batches(tokens, targets))
            return loss.item() / self.world
        tokens, targets = (x.chunk(self.world)[self.rank] for x in (tokens, targets))
        loss = self.engine(tokens, targets)
        self.engine.backward(loss)
        return loss.item() / self.world

    def _micro_batches(self, tokens: torch.Tensor, targets: torch.Tensor) -> Iterator[Any]:
        size = self.engine.train_micro_batch_size_per_gpu()
        return iter(list(zip(tokens.split(size), targets.split(size), strict=True)))

    def update(self) -> None:
        """A pipeline has done it in `forward_backward`."""
        if not self.is_pipeline:
            self.engine.step()

    def gradients(self) -> dict[str, torch.Tensor]:
        if self.is_pipeline:
            return self.kept
        from deepspeed.utils import safe_get_full_grad

        named = {name.removeprefix("model."): p for name, p in self.engine.module.named_parameters()}
        return {name: safe_get_full_grad(parameter) for name, parameter in named.items()}

    def keep_gradients(self) -> None:
        """A pipeline clips, updates and forgets them within `forward_backward`: notes them before that."""
        for name, parameter in self.model.named_parameters() if self.is_pipeline else ():
            parameter.register_post_accumulate_grad_hook(partial(self._keep, f"layers.{name}"))

    def _keep(self, name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.kept[name] = parameter.grad.clone()
