"""Pipelines of torch.distributed.pipelining: 1F1B, interleaved 1F1B, and its zero-bubble schedules.

Layers are cut where Myriad's are. Stages lie round the ranks in turn, or (zbv) down the ranks and up again.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules

from peers.plain_gpt import PlainGPT, mean_loss
from peers.work import EndsWithProcess, Work, clip_gradients, new_adamw

__all__ = ["SCHEDULES", "Pipeline"]

SCHEDULES: dict[str, Callable[..., schedules._PipelineSchedule]] = {
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
}


class Pipeline(EndsWithProcess):
    """Each rank its stages; the batch in micro-batches."""

    def __init__(self, work: Work, *, schedule: str, virtual_stages: int, micro_batch: int) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        num_stages = self.world * virtual_stages
        own = [stage for stage in range(num_stages) if self._rank_of(stage, schedule) == self.rank]
        cut = work.cut(num_stages)
        self.models = {stage: PlainGPT(work, cut[stage]) for stage in own}
        on = torch.device("cpu")
        stages = [PipelineStage(model, stage, num_stages, on) for stage, model in self.models.items()]
        self.is_first, self.is_last = 0 in own, num_stages - 1 in own
        make, num_micro_batches = SCHEDULES[schedule], work.global_batch // micro_batch
        what = stages[0] if schedule == "1f1b" else stages
        self.schedule = make(what, num_micro_batches, loss_fn=mean_loss)
        self.parameters = [p for model in self.models.values() for p in model.parameters()]
        self.optimizer = new_adamw(self.parameters)

    def _rank_of(self, stage: int, schedule: str) -> int:
        if schedule == "zbv":
            return min(stage, 2 * self.world - 1 - stage)
        return stage % self.world

    def forward_backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        losses: list[torch.Tensor] = []
        inputs = (tokens,) if self.is_first else ()
        if self.is_last:
            self.schedule.step(*inputs, target=targets, losses=losses)
        else:
            self.schedule.step(*inputs)
        return torch.stack(losses).mean().item() if self.is_last else 0.0

    def update(self) -> None:
        clip_gradients(self.parameters, dist.group.WORLD)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def gradients(self) -> dict[str, torch.Tensor]:
        models = self.models.values()
        return {
            name: p.grad for model in models for name, p in model.named_parameters() if p.grad is not None
        }
