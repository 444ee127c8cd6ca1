"""Two runs of one job, step by step and tensor by tensor: do they agree, and if not, where do they part?

Rounding makes layouts differ by little; a mistake makes them differ by more, first in one step and there in
one tensor. The first step at which a loss or a parameter differs by more than the tolerance, and the first
tensor of the model in that step, are where to look.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from myriad.checkpoint.folder import CheckpointFolder
from myriad.checkpoint.store import load_model
from myriad.errors import RunFailedError
from myriad.model.boundary import Boundary
from myriad.model.gpt import GPT
from myriad.run import Run

__all__ = ["Comparison", "compare_runs"]


@dataclass(frozen=True)
class Comparison:
    """How one run differs from another; differences are relative, of tensors in the L2 norm."""

    num_steps: int
    num_kept: int
    """Of them, whose parameters both kept and were compared: a checkpoint that was not stored is none."""
    loss_difference: float
    """Largest of all steps."""
    tensor_difference: float
    """Largest of all parameters in the last step that both kept."""
    worst_tensor: str
    equal_bits: bool
    """Every loss and every parameter that was kept has the same bits."""
    parted_step: int | None
    """First step with a loss or a parameter beyond the tolerance; ``None``: they agree."""
    parted_tensor: str | None
    """First parameter of the model that is beyond it in that step; ``None``: only the loss is."""
    losses: tuple[tuple[float, float], ...]
    """(reference, other) of each step."""

    @property
    def agrees(self) -> bool:
        """Within the tolerance everywhere."""
        return self.parted_step is None


def compare_runs(reference: Run, other: Run, tolerance: float) -> Comparison:
    """Compares losses of all steps and parameters of all checkpoints that both runs have. Raises
    `RunFailedError` when there is none."""
    losses = [
        (a["loss"], b["loss"]) for a, b in zip(reference.read_metrics(), other.read_metrics(), strict=True)
    ]
    parted = next((step for step, pair in enumerate(losses, 1) if _relative(*pair) > tolerance), None)
    order = _parameter_order(reference)
    folders = [CheckpointFolder(run.checkpoints()) for run in (reference, other)]
    parted_tensor, equal_bits = None, all(a == b for a, b in losses)
    last: dict[str, float] = {}
    kept = sorted(set(folders[0].steps()) & set(folders[1].steps()))
    if not kept:
        raise RunFailedError(f"{reference.path} and {other.path}: no checkpoint of the same step was stored")
    for step in kept:
        first, second = (load_model(folder.at_step(step).where) for folder in folders)
        equal_bits = equal_bits and all(torch.equal(first[name], second[name]) for name in order)
        last = {name: _tensor_difference(first[name], second[name]) for name in order}
        beyond = [name for name in order if not last[name] <= tolerance]
        if beyond and (parted is None or step <= parted):
            parted, parted_tensor = step, beyond[0]
            break
    worst = max(last, key=lambda name: last[name])
    return Comparison(
        num_steps=len(losses),
        num_kept=len(kept),
        loss_difference=max(_relative(a, b) for a, b in losses),
        tensor_difference=last[worst],
        worst_tensor=worst,
        equal_bits=equal_bits,
        parted_step=parted,
        parted_tensor=parted_tensor,
        losses=tuple(losses),
    )


def _parameter_order(run: Run) -> Sequence[str]:
    """Names of parameters as the data meets them."""
    job = run.job()
    definition = GPT(job.model, job.train.seed)
    names: list[str] = []
    with torch.device("meta"):
        for index, prefix in enumerate(definition.names):
            layer = definition.build(index, Boundary())
            names += [f"{prefix}.{name}" for name, _ in layer.named_parameters()]
    return [name for name in names if name not in definition.tied]


def _relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), 1e-30)


def _tensor_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    if torch.equal(a, b):
        return 0.0
    return float((a.double() - b.double()).norm() / a.double().norm().clamp_min(1e-30))
