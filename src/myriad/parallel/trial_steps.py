"""Iterations before the first step: they load and capture a rank's kernels, and change no state.

A trial computes what a step computes, on zeros or on the first batch, without an update. Torch's generators,
the optimizer and the results of later steps stay as they were. All ranks run the same trials together.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from myriad.comm.collectives import all_reduce_max
from myriad.comm.groups import Groups
from myriad.errors import BadInputError
from myriad.parallel.batch import Batch
from myriad.parallel.cuda_graphs import Capturer
from myriad.parallel.optimizer_step import OptimizerStep
from myriad.parallel.recompute import RandomState
from myriad.parallel.runtime import Runtime
from myriad.program.actions import Program
from myriad.program.in_flight import RankProgram
from myriad.telemetry.spans import Recorder

__all__ = ["TrialSteps"]


class TrialSteps:
    """Runs iterations of one rank without an update."""

    def __init__(
        self,
        runtime: Runtime,
        optimizer_step: OptimizerStep,
        groups: Groups,
        device: torch.device,
        recorder: Recorder,
    ) -> None:
        self._runtime, self._optimizer_step, self._groups = runtime, optimizer_step, groups
        self._device, self._recorder = device, recorder
        self._cuda_devices = [device] if device.type == "cuda" else []

    def compute_alone(
        self, programs: Mapping[bool, Program], trainings: Sequence[bool], sample: Batch
    ) -> None:
        """Compute ``sample``, one micro-batch, for each flag (training or validation), without a message to
        another stage. Where gradients are reduced, all ranks reduce them."""
        with torch.random.fork_rng(self._cuda_devices), self._recorder.evaluating():
            for training in trainings:
                plan = self._runtime.warm_up_plan_of(programs[training])
                self._optimizer_step.begin(sample.targets.numel(), skip=True)
                finisher = self._optimizer_step if training else None
                self._runtime.run(plan, lambda: sample, finisher, alone=True)
        self._recorder.take_totals()  # the time of this run belongs to no step

    def capture(
        self,
        capturer: Capturer,
        programs: Mapping[bool, Program],
        load: Callable[[], Batch],
        num_targets: int,
        sample: Batch,
    ) -> None:
        """Capture the compute actions of training, and check that they give the results of eager execution.

        ``load`` returns a batch of ``num_targets`` targets; ``sample`` is one micro-batch. Raises
        `BadInputError` on every rank if the results differ, or a capture fails, on any of them.
        """
        with torch.random.fork_rng(self._cuda_devices):
            problem = self._capture_and_compare(capturer, programs, load, num_targets, sample)
        if self._fails_anywhere(problem):
            where = f"here: {problem}" if problem else "on another rank"
            raise BadInputError("train.cuda_graphs", True, f"false, as a capture fails {where}")

    def _fails_anywhere(self, problem: str) -> bool:
        """Return whether any rank has a problem. A collective call of all ranks."""
        fails = torch.full((1,), int(bool(problem)), dtype=torch.int32, device=self._device)
        return bool(int(all_reduce_max(fails, self._groups.world)))

    def _capture_and_compare(
        self,
        capturer: Capturer,
        programs: Mapping[bool, Program],
        load: Callable[[], Batch],
        num_targets: int,
        sample: Batch,
    ) -> str:
        """Capture, and return how the results differ from eager execution; empty if they are equal."""
        # a plan of its own, so that its spans are not those of a step
        plan = self._runtime.plan_of(programs[True])
        before = RandomState.of(self._device)
        with capturer.warming():
            expected = self._try(plan, load, num_targets)
        # recomputed, such a layer would draw other numbers: captures keep no state for it
        draws = not RandomState.of(self._device).equals(before)
        try:
            self._make_captures(capturer, plan, programs, sample)
            problem = _difference(expected, self._try(plan, load, num_targets))
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}".partition("\n")[0]
        return problem or ("a layer draws from torch's generators" if draws else "")

    def _make_captures(
        self, capturer: Capturer, plan: RankProgram, programs: Mapping[bool, Program], sample: Batch
    ) -> None:
        """Capture each slot of each stage, with the action list that computes one micro-batch without
        messages: no message may be in flight. Ranks with fewer slots run the list equally often, because it
        reduces among all ranks."""
        captured = self._runtime.capture(capturer, plan)
        own = torch.full((1,), captured.num_slots, dtype=torch.int32, device=self._device)
        for index in range(int(all_reduce_max(own, self._groups.world))):
            captured.only(index)
            self.compute_alone(programs, (True,), sample)
        captured.all_slots()

    def _try(
        self, plan: RankProgram, load: Callable[[], Batch], num_targets: int
    ) -> tuple[float, torch.Tensor]:
        """Run an iteration without an update. Return the loss and the squared norm of each parameter's
        gradient."""
        with self._recorder.evaluating():
            loss_factor = self._optimizer_step.begin(num_targets, skip=True)
            self._runtime.run(plan, load, self._optimizer_step, loss_factor)
        return self._optimizer_step.result.loss, self._optimizer_step.squares.clone()


def _difference(expected: tuple[float, torch.Tensor], found: tuple[float, torch.Tensor]) -> str:
    """Describe how losses, or the squared gradient norms of parameters, differ by more than another order of
    summation explains; empty if they do not."""
    (loss, squares), (own_loss, own_squares) = expected, found
    if not math.isclose(loss, own_loss, rel_tol=1e-3) and not math.isnan(loss):
        return f"it gives a loss of {own_loss:.6g} instead of {loss:.6g}"
    least = 1e-6 * float(squares[squares.isfinite()].sum())
    same = torch.isclose(own_squares, squares, rtol=1e-2, atol=least, equal_nan=True)
    wrong = int((~same).sum())
    return f"it gives other gradients of {wrong} of {len(same)} parameters" if wrong else ""
