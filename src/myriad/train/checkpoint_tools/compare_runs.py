"""Compare two runs of one job step by step and tensor by tensor, and locate the first difference.

Rounding makes layouts differ by little. A mistake makes them differ by more, first in one step and there in
one tensor. Look at the first step in which a loss or a parameter exceeds the tolerance, and in that step at
the first tensor of the model that does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from myriad.checkpoint.checkpoint_files import load_model
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.errors import RunFailedError
from myriad.job import Job
from myriad.model.boundary import Boundary
from myriad.model.gpt import GPT
from myriad.parallel.routing_tape import read_routing
from myriad.run import Run

__all__ = ["RunComparison", "Tolerance", "compare_runs"]


class Tolerance(NamedTuple):
    """Largest relative differences at which two runs agree."""

    losses: float
    parameters: float

    def __str__(self) -> str:
        """Return the tolerance as a phrase for messages."""
        if self.losses == self.parameters:
            return f"tolerance {self.losses:g}"
        return f"tolerance {self.losses:g} of losses, {self.parameters:g} of parameters"


@dataclass(frozen=True)
class RunComparison:
    """The differences between two runs. Differences are relative; tensors are compared in the L2 norm."""

    num_steps: int
    num_kept: int
    """Number of steps whose parameters were compared, because both runs stored them."""
    missing: tuple[int, ...]
    """Steps whose loss or parameters one of the runs lacks, although the job asks for them."""
    loss_difference: float
    """Largest loss difference of all steps."""
    tensor_difference: float
    """Largest parameter difference in the last step that both runs stored."""
    worst_tensor: str
    equal_bits: bool
    """Whether every loss and every stored parameter has the same bits."""
    parted_step: int | None
    """First step with a loss or a parameter beyond the tolerance; ``None`` if the runs agree."""
    parted_tensor: str | None
    """First parameter of the model beyond the tolerance in that step; ``None`` if only the loss is."""
    losses: tuple[tuple[float, float], ...]
    """Losses (reference, other) of each step."""
    num_choices: int = 0
    """Experts that were chosen for tokens, if both runs recorded them (``telemetry.routing``)."""
    other_choices: int = 0
    """Choices of them that the other run did not make for the same token."""

    @property
    def agrees(self) -> bool:
        """Whether every step that the job asks for was compared and is within the tolerance."""
        return self.parted_step is None and not self.missing


def compare_runs(reference: Run, other: Run, tolerance: Tolerance) -> RunComparison:
    """Compare the losses of all steps and the parameters of all checkpoints that both runs have. Raises
    `RunFailedError` when there is none."""
    job = reference.job()
    first_losses, other_losses = _losses(reference), _losses(other)
    measured = sorted(first_losses.keys() & other_losses.keys())
    losses = [(first_losses[step], other_losses[step]) for step in measured]
    parted = next(
        (
            step
            for step, pair in zip(measured, losses, strict=True)
            if not _relative(*pair) <= tolerance.losses
        ),
        None,
    )
    order = _parameter_order(reference)
    folders = [CheckpointFolder(run.checkpoints()) for run in (reference, other)]
    parted_tensor, equal_bits = None, all(a == b for a, b in losses)
    last: dict[str, float] = {}
    kept = sorted(set(folders[0].steps()) & set(folders[1].steps()))
    missing = set(range(1, job.train.steps + 1)) - set(measured) | _to_keep(job) - set(kept)
    if not kept or not measured:
        raise RunFailedError(f"{reference.path} and {other.path}: no checkpoint of the same step was stored")
    for step in kept:
        first, second = (load_model(folder.at_step(step).where) for folder in folders)
        equal_bits = equal_bits and all(torch.equal(first[name], second[name]) for name in order)
        last = {name: _tensor_difference(first[name], second[name]) for name in order}
        beyond = [name for name in order if not last[name] <= tolerance.parameters]
        if beyond and (parted is None or step <= parted):
            parted, parted_tensor = step, beyond[0]
            break
    worst = max(last, key=lambda name: _nan_last(last[name]))
    num_choices, other_choices = _count_choices(reference, other, measured)
    return RunComparison(
        num_steps=len(losses),
        num_kept=len(kept),
        missing=tuple(sorted(missing)),
        loss_difference=max((_relative(a, b) for a, b in losses), key=_nan_last),
        tensor_difference=last[worst],
        worst_tensor=worst,
        equal_bits=equal_bits,
        parted_step=parted,
        parted_tensor=parted_tensor,
        losses=tuple(losses),
        num_choices=num_choices,
        other_choices=other_choices,
    )


def _count_choices(reference: Run, other: Run, steps: Sequence[int]) -> tuple[int, int]:
    """Return how many experts both runs chose in these steps, and how many of them not for the same token.
    Both are 0 if a run has not recorded them."""
    folders = [run.path / "routing" for run in (reference, other)]
    if not all(folder.is_dir() for folder in folders):
        return 0, 0
    number = differ = 0
    for step in steps:
        own, others = (read_routing(folder, step) for folder in folders)
        for name in (name for name in own if name.endswith(".gates")):
            chosen = own[name].chosen
            places = torch.from_numpy(own[name].samples), torch.arange(chosen.shape[1])
            again = others[name].of(*places).numpy()
            number += chosen.size
            differ += int((chosen[..., None] != again[..., None, :]).all(-1).sum())
    return number, differ


def _losses(run: Run) -> dict[int, float]:
    """Return the loss of each step; a non-finite loss is null in the file."""
    return {
        line["step"]: float("nan") if line["loss"] is None else line["loss"] for line in run.read_metrics()
    }


def _to_keep(job: Job) -> set[int]:
    """Return the steps that the job stores: every ``checkpoint.every`` steps, and the last."""
    every = job.checkpoint.every or job.train.steps
    return {*range(every, job.train.steps + 1, every), job.train.steps}


def _nan_last(difference: float) -> tuple[bool, float]:
    """Return a sort key in which a NaN difference is the largest."""
    return difference != difference, difference


def _parameter_order(run: Run) -> Sequence[str]:
    """Return the parameter names in the order of the forward pass."""
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
