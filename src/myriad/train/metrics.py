"""The metrics of one step: a line of metrics.jsonl."""

import math
import resource
import time
from dataclasses import dataclass

import torch

from myriad.parallel.optimizer_step import StepResult
from myriad.telemetry.spans import Recorder

__all__ = ["StepMeter"]


@dataclass(frozen=True)
class StepMeter:
    """Compute a step's metrics from its result and spans."""

    tokens_per_step: int
    flops_per_step: float
    peak_flops: float
    """FLOP/s of all ranks together."""
    device: torch.device

    def line(
        self,
        step: int,
        tokens: int,
        result: StepResult,
        learning_rate: float,
        seconds: float,
        data_wait: float,
        checkpoint_wait: float,
        recorder: Recorder,
    ) -> dict[str, float | None]:
        """Return the metrics of a step.

        ``step`` and ``tokens`` count those done; ``time`` is the end of the step. A skipped batch has
        ``skipped``, and ``overflow`` if gradients overflowed at the ``loss_scale`` of float16. A non-finite
        value is null.
        """
        return {
            "time": time.time(),
            "step": step,
            "loss": _finite(result.loss),
            "grad_norm": _finite(result.grad_norm),
            "learning_rate": learning_rate,
            "tokens": tokens,
            "tokens_per_second": self.tokens_per_step / seconds,
            "step_seconds": seconds,
            "mfu": self.flops_per_step / seconds / self.peak_flops,
            "memory_bytes": self._memory_bytes(),
            "data_wait_seconds": data_wait,
            "checkpoint_wait_seconds": checkpoint_wait,
            "exposed_comm_seconds": recorder.take_exposed(),
            **({"loss_scale": result.loss_scale} if result.loss_scale is not None else {}),
            **({"skipped": 1} if result.skipped else {}),
            **({"overflow": 1} if result.overflow else {}),
        }

    def _memory_bytes(self) -> int:
        """Return the peak memory of this rank so far."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _finite(value: float) -> float | None:
    """Return a finite value, else ``None``, because JSON has no other numbers."""
    return value if math.isfinite(value) else None
