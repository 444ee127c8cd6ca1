"""What changes between two steps of a rank when a segment of the job begins: in place, without a restart.

    batch size       other programs, checked anew; validation keeps the batch of its phase
    sequence         other shapes between stages, and of batches
    mixture          the loader switches by itself; held-out text is that of the new corpora
    optimizer keys   weight decay and clipping; the learning rate is a function of the step

The values are those of `myriad.job.job_steps`: nothing here is part of a checkpoint.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from myriad.data.bad_blocks import BlockGuard
from myriad.job import Job
from myriad.job.job_steps import JobSteps
from myriad.parallel.engine import Engine
from myriad.train.data_loader import Validation
from myriad.train.engine_setup import sample_batch
from myriad.train.rank_context import RankContext
from myriad.train.task_evaluation import TaskEvaluation, event_fields

__all__ = ["PhaseChanges", "PhaseEvaluation"]


@dataclass(frozen=True)
class PhaseEvaluation:
    """The validations and tasks of a phase, as this rank computes them."""

    validations: dict[str, Validation]
    """Held-out text by name; that of the job's own corpora has no name."""
    tasks: TaskEvaluation
    averages: bool
    """Whether the moving average of the parameters is validated as well."""

    @classmethod
    def of(cls, rank: RankContext, job: Job, guard: BlockGuard) -> "PhaseEvaluation":
        """Open the held-out text of a phase's job. Raises `BadInputError`."""
        grid, device = rank.groups.grid, rank.device
        sets = {"": None} | {one.name: one for one in job.data.validation_sets}
        streams = rank.run.streams_path
        validations = {name: Validation(job, grid, device, guard, one, streams) for name, one in sets.items()}
        return cls(validations, TaskEvaluation(job, grid, device, rank.tokenizer), job.train.validate_ema)

    def validate(
        self, engine: Engine, stops: Callable[[], bool], settle: Callable[[], object]
    ) -> list[dict[str, Any]] | None:
        """Return the fields of an event for each validation; ``None`` if a rank was asked to stop before the
        last batch. ``settle`` waits for a snapshot that is still copied from the parameters."""
        found: list[dict[str, Any]] = []
        for name, validation in self.validations.items():
            began = time.perf_counter()
            result = self._losses(engine, validation, stops, settle)
            if result is None:
                return None
            if validation.num_batches:
                named = {"event": "validation_set", "name": name} if name else {"event": "validation"}
                found.append({**named, **result, "seconds": time.perf_counter() - began})
        return found

    def _losses(
        self, engine: Engine, validation: Validation, stops: Callable[[], bool], settle: Callable[[], object]
    ) -> dict[str, float | None] | None:
        """Return the losses on one set: of the parameters, and of their moving average if the job asks for
        it. ``None`` if a rank was asked to stop."""
        loss = validation.loss(engine, stops)
        if loss is None:
            return None
        found = {"loss": loss, "bits_per_byte": validation.bits_per_byte(loss)}
        if not self.averages:
            return found
        settle()
        with engine.averaged():
            loss = validation.loss(engine, stops)
        if loss is None:
            return None
        return found | {"ema_loss": loss, "ema_bits_per_byte": validation.bits_per_byte(loss)}

    def score(self, engine: Engine, stops: Callable[[], bool]) -> dict[str, Any] | None:
        """Return the fields of an event with the scores on the job's tasks; ``None`` if a rank was asked to
        stop before the last batch."""
        began = time.perf_counter()
        found = self.tasks.scores(engine, stops)
        if found is None:
            return None
        return {**event_fields(found), "seconds": time.perf_counter() - began}


class PhaseChanges:
    """The values of the step in progress, and the changes between steps."""

    def __init__(
        self, rank: RankContext, engine: Engine, guard: BlockGuard, append_event: Callable[..., None]
    ) -> None:
        """``append_event(event, **fields)`` writes an event."""
        self._rank, self._engine, self._guard, self._event = rank, engine, guard, append_event
        self.steps = JobSteps(rank.job)
        self.now = rank.job
        """The job with the values of the step in progress."""
        self.evaluation = PhaseEvaluation.of(rank, self.steps.phase_at(0), guard)
        if not self.evaluation.tasks.is_empty:
            engine.open_reader()
        self._segment, self._phase = -1, 0

    def enter(self, step: int) -> bool:
        """Change to the values of ``step``, counted from 0, and return whether another phase begins or
        goes on. All ranks call it together, before the step."""
        index = self.steps.index(step)
        if index == self._segment:
            return False
        segment = self.steps.segments[index]
        changes = segment.phase != self._phase
        self._segment, self._phase, self.now = index, segment.phase, self.steps.at(step)
        if self.steps.is_constant:
            return False
        of_phase = self.steps.phase_at(step)
        shares = {True: self.now.shares} | ({False: of_phase.shares} if changes else {})
        self._engine.change_batches(shares, sample_batch(self.now, self._rank.device))
        if changes:
            optimizer = self.now.optimizer
            self._engine.change_optimizer(optimizer.weight_decay, optimizer.clip_norm)
            self.evaluation = PhaseEvaluation.of(self._rank, of_phase, self._guard)
            if step == self.steps.first_step(segment.phase):
                self._report(segment.phase, step)
        return changes

    def _report(self, phase: int, step: int) -> None:
        sections = self._rank.job.phases[phase - 1].model_dump(mode="json")
        changed = {
            f"{section}.{key}": value
            for section, keys in sections.items()
            if isinstance(keys, dict)
            for key, value in keys.items()
        }
        self._event("phase", step=step + 1, name=self.steps.phase_name(phase), changes=changed)
