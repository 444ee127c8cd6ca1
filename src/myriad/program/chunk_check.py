"""Parameters and gradients of one rank's stages: the part of the static check that knows chunks.

Where they are sharded, parameters are gathered before they are used and released after; gradients are reduced
when their sums are complete, their norm is known before they move anything, and each stage is updated once.
`myriad.program.rank_check` walks the rank's list and asks.
"""

from collections.abc import Callable, Sequence

from myriad.program.actions import MAKES_WEIGHT_GRADIENT, Action, Kind, Program

__all__ = ["Chunks"]


class Chunks:
    """Of one rank, between two actions. A ``..._fault`` method says what is wrong, or nothing."""

    def __init__(self, program: Program, stages: Sequence[int]) -> None:
        self.program, self.lowering, self.stages = program, program.lowering, stages
        self.whole: set[int] = set()
        self.gathering: set[int] = set()
        self.reducing: set[int] = set()
        self.updated: set[int] = set()
        self.early: set[int] = set()
        """Stages whose gather is posted before the batch is loaded."""
        self.loaded = self.clipped = self.stepped = False
        self.unreduced: dict[int, int] = dict.fromkeys(stages, 0)
        self.num_weight_gradients: dict[int, int] = dict.fromkeys(stages, 0)
        self.num_reduces: dict[int, int] = dict.fromkeys(stages, 0)
        self.synced = False
        self.handlers: dict[Kind, Callable[[Action], str | None]] = {
            Kind.LOAD: self._load_fault,
            Kind.GATHER: self._gather_fault,
            Kind.START_GATHER: self._start_gather_fault,
            Kind.AWAIT_GATHER: self._await_gather_fault,
            Kind.RELEASE: self._release_fault,
            Kind.SYNC_TIED: self._sync_fault,
            Kind.REDUCE: self._reduce_fault,
            Kind.START_REDUCE: self._start_reduce_fault,
            Kind.AWAIT_REDUCE: self._await_reduce_fault,
            Kind.CLIP: self._clip_fault,
            Kind.UPDATE: self._update_fault,
            Kind.STEP: self._step_fault,
        }

    def compute_fault(self, action: Action) -> str | None:
        """A compute finds its batch and its parameters, and adds to gradients that nobody reduces."""
        if self.lowering is not None and self.lowering.zero >= 1 and action.stage not in self.whole:
            return "its parameters are not gathered"
        if self.lowering is not None and not self.loaded:
            return "computes before the batch is loaded"
        if action.stage in self.updated:
            return "computes with parameters that are those of the next iteration"
        if action.kind in MAKES_WEIGHT_GRADIENT and action.stage in self.reducing:
            return "adds to gradients that are being reduced"
        return None

    def computed(self, action: Action) -> None:
        """Its gradients have been added."""
        if action.kind in MAKES_WEIGHT_GRADIENT:
            self.unreduced[action.stage] += 1
            self.num_weight_gradients[action.stage] += 1

    def late_fault(self, action: Action) -> str | None:
        """Once the gradients are clipped, little may come."""
        if self.stepped or (self.clipped and action.kind not in (Kind.UPDATE, Kind.START_GATHER)):
            return "comes after the step, or after the gradients were clipped"
        return None

    def missing_step(self) -> str | None:
        """Every iteration loads a batch; a training one updates all stages, with the norm known."""
        assert self.lowering is not None
        if not self.loaded:
            return "never loads a batch"
        if self.lowering.training and self.updated != set(self.stages):
            missing = sorted(set(self.stages) - self.updated)
            return f"does not end with step: stages {missing} are never updated"
        if self.lowering.training and not self.clipped:
            return "never finds the gradients' norm: neither clips nor steps"
        return None

    def fault_at_end(self) -> str | None:
        """Nothing is held, under way or left out."""
        assert self.lowering is not None
        if self.lowering.zero == 3 and self.whole:
            return f"parameters of stages {sorted(self.whole)} are never released"
        if self.gathering != (self.early if self.clipped and not self.stepped else set()):
            return f"gathers under way at the end: {sorted(self.gathering)}"
        if any(self._must_sync(stage) for stage in self.stages) and not self.synced:
            return "tied gradients are never summed"
        return self._missing_reduces() if self.lowering.training else None

    # Parameters

    def _own_stage_fault(self, action: Action) -> str | None:
        return None if action.stage in self.unreduced else f"not a stage of this rank ({self.stages})"

    def _load_fault(self, action: Action) -> str | None:
        if self.loaded:
            return "loads twice"
        self.loaded = True
        return None

    def _gather_fault(self, action: Action) -> str | None:
        return self._start_gather_fault(action) or self._await_gather_fault(action)

    def _start_gather_fault(self, action: Action) -> str | None:
        assert self.lowering is not None
        if self.lowering.zero == 0:
            return "parameters are never sharded with ZeRO 0"
        if action.stage in self.whole | self.gathering:
            return "its parameters are whole already, or on their way"
        moved = self.clipped or action.stage in self.updated
        if moved and not {action.stage} <= self.early & self.updated:
            return "only what is updated, and gathered before a batch is loaded, is gathered for the next one"
        if moved and self._shares(action.stage) and 0 not in self.updated:
            return "what it shares with the first stage moves with that one"
        if not self.loaded:
            self.early.add(action.stage)
        self.gathering.add(action.stage)
        return self._own_stage_fault(action)

    def _await_gather_fault(self, action: Action) -> str | None:
        if action.stage not in self.gathering:
            return "waits for a gather that is not posted"
        self.gathering.remove(action.stage)
        self.whole.add(action.stage)
        return None

    def _release_fault(self, action: Action) -> str | None:
        assert self.lowering is not None
        if self.lowering.zero < 3 or action.stage not in self.whole:
            return "releases parameters that are not gathered, or without ZeRO 3"
        self.whole.remove(action.stage)
        return None

    # Gradients

    def _sync_fault(self, action: Action) -> str | None:
        mine = {0, self.program.num_stages - 1} & set(self.stages)
        if not self.program.syncs_tied or action.stage not in mine or self.synced:
            return "no tied parameters to sum here, or summed twice"
        if self.num_weight_gradients[action.stage] < self.program.num_micro_batches:
            return "sums tied gradients before the stage's last backward"
        self.synced = True
        return None

    def _must_sync(self, stage: int) -> bool:
        return self.program.syncs_tied and stage in (0, self.program.num_stages - 1)

    def _reduce_fault(self, action: Action) -> str | None:
        return self._start_reduce_fault(action) or self._await_reduce_fault(action)

    def _start_reduce_fault(self, action: Action) -> str | None:
        assert self.lowering is not None
        if wrong := self._own_stage_fault(action):
            return wrong
        stage = action.stage
        is_last = self.num_weight_gradients[stage] == self.program.num_micro_batches
        if self.lowering.reduce == "last" and not is_last:
            return "reduces before the stage's last backward"
        if self.unreduced[stage] == 0 and not self._reduces_for_others:
            return "nothing new to reduce"
        is_final = self.num_reduces[stage] + 1 == self._num_wanted_reduces
        if is_final and self._must_sync(stage) and not self.synced:
            return "reduces before the tied gradients are summed"
        if stage in self.reducing:
            return "its gradients are being reduced already"
        self.reducing.add(stage)
        self.unreduced[stage] = 0
        self.num_reduces[stage] += 1
        return None

    def _await_reduce_fault(self, action: Action) -> str | None:
        if action.stage not in self.reducing:
            return "waits for a reduction that is not posted"
        self.reducing.remove(action.stage)
        return None

    @property
    def _reduces_for_others(self) -> bool:
        """A replica with more micro-batches reduces more often, and this one with it."""
        assert self.lowering is not None
        return self.lowering.reduce == "each" and bool(self.lowering.most_micro_batches)

    @property
    def _num_wanted_reduces(self) -> int:
        assert self.lowering is not None
        if self.lowering.reduce == "last":
            return 1
        return self.lowering.most_micro_batches or self.program.num_micro_batches

    def _missing_reduces(self) -> str | None:
        wanted = self._num_wanted_reduces
        for stage in self.stages:
            if self.unreduced[stage]:
                return f"gradients of stage {stage} are never reduced"
            if self.num_reduces[stage] != wanted:
                return f"stage {stage} is reduced {self.num_reduces[stage]} times, not {wanted}"
        return None

    # The optimizer's step

    def _clip_fault(self, action: Action) -> str | None:
        assert self.lowering is not None
        if not self.lowering.training:
            return "only a training program steps"
        self.clipped = True
        if self.reducing:
            return f"the gradients of stages {sorted(self.reducing)} are still being reduced"
        return self._missing_reduces()

    def _update_fault(self, action: Action) -> str | None:
        if wrong := self._own_stage_fault(action):
            return wrong
        if action.stage in self.updated or not (self.clipped or self._is_complete(action.stage)):
            return "updates before the norm is known, or its gradients are complete, or twice"
        if self.lowering is not None and self.lowering.zero == 3 and action.stage in self.whole:
            return "its parameters are never released"
        self.updated.add(action.stage)
        self.whole.discard(action.stage)
        return None

    def _step_fault(self, action: Action) -> str | None:
        self.updated.update(self.stages)
        self.stepped = True
        return self._clip_fault(action)

    def _is_complete(self, stage: int) -> bool:
        """A stage that may be updated early has all its gradients, and those that it shares."""
        assert self.lowering is not None
        stages = [0, self.program.num_stages - 1] if stage == 0 and self._shares(stage) else [stage]
        return self.lowering.updates_early and all(
            self.num_weight_gradients[one] == self.program.num_micro_batches
            and self.num_reduces[one] == self._num_wanted_reduces
            and one not in self.reducing
            for one in stages
        )

    def _shares(self, stage: int) -> bool:
        """It is the first or the last one, and both are here and share parameters."""
        ends = {0, self.program.num_stages - 1}
        return self.lowering is not None and self.lowering.tied and stage in ends <= self.unreduced.keys()
