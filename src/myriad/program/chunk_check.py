"""Static check of one rank's chunks: gathers and releases of parameters, reductions and updates.

Sharded parameters are gathered before their use and released after it. Gradients are reduced when they are
complete, and then summed across groups of replicas where the layout has several. The norm is known before a
gradient updates anything, and each stage is updated once, with orthogonalized matrices where the optimizer
has such.
`myriad.program.checker` walks the rank's list and calls this module.
"""

from collections.abc import Callable, Sequence

from myriad.program.actions import (
    ADDS_TO_GRADIENTS,
    COPIES_STATE,
    MAKES_WEIGHT_GRADIENT,
    ORTHOGONALIZATION,
    SEMANTICS,
    Action,
    Collective,
    Kind,
    Program,
    Resource,
)

__all__ = ["Chunks"]

_AFTER_CLIP = frozenset({Kind.UPDATE, Kind.START_GATHER, *ORTHOGONALIZATION}) | COPIES_STATE


class Chunks:
    """The chunks of one rank between two actions. A ``..._fault`` method returns what is wrong, or None."""

    def __init__(self, program: Program, stages: Sequence[int]) -> None:
        self.program, self.lowering, self.stages = program, program.lowering, stages
        self.whole: set[int] = set()
        self.gathering: set[int] = set()
        self.reducing: set[int] = set()
        self.across: dict[int, bool] = {}
        """Stages whose gradients are summed across groups; True: the sum has ended."""
        self.updated: set[int] = set()
        self.orthogonalizing: dict[int, int] = dict.fromkeys(stages, 0)
        """Number of actions of each stage's orthogonalization so far."""
        self.early: set[int] = set()
        """Stages whose gather is issued before the batch is loaded."""
        self.loaded = self.clipped = self.stepped = False
        self.unreduced: dict[int, int] = dict.fromkeys(stages, 0)
        self.num_weight_gradients: dict[int, int] = dict.fromkeys(stages, 0)
        self.num_reduces: dict[int, int] = dict.fromkeys(stages, 0)
        self.synced = False
        self.starts: dict[Collective, Callable[[Action], str | None]] = {
            Collective.GATHER: self._start_gather_fault,
            Collective.REDUCE: self._start_reduce_fault,
            Collective.REDUCE_ACROSS: self._start_across_fault,
            Collective.GATHER_MOMENTUM: self._orthogonalization_fault,
            Collective.SCATTER_UPDATE: self._orthogonalization_fault,
        }
        self.ends: dict[Collective, Callable[[Action], str | None]] = {
            Collective.GATHER: self._await_gather_fault,
            Collective.REDUCE: self._await_reduce_fault,
            Collective.REDUCE_ACROSS: self._await_across_fault,
            Collective.GATHER_MOMENTUM: self._orthogonalization_fault,
            Collective.SCATTER_UPDATE: self._orthogonalization_fault,
        }

    def fault(self, action: Action) -> str | None:
        """Check an action that neither computes nor transfers, and record what it does."""
        if action.kind is Kind.LOAD:
            return self._load_fault()
        does = SEMANTICS[action.kind]
        if does.joins == "ends":
            return self._sync_fault(action)
        if does.joins == "world" and (wrong := self._clip_fault(then_updates=does.updates)):
            return wrong
        if does.starts and (wrong := self.starts[does.starts](action)):
            return wrong
        if does.ends and (wrong := self.ends[does.ends](action)):
            return wrong
        if does.orthogonalizes and (wrong := self._orthogonalization_fault(action)):
            return wrong
        if does.updates and (wrong := self._update_fault(action)):
            return wrong
        return self._release_fault(action) if Resource.PARAMETERS in does.frees else None

    def compute_fault(self, action: Action) -> str | None:
        """Check that a compute action has its batch and its parameters, and that its gradients are not being
        reduced."""
        if self.lowering is not None and self.lowering.zero >= 1 and action.stage not in self.whole:
            return "its parameters are not gathered"
        if self.lowering is not None and not self.loaded:
            return "computes before the batch is loaded"
        if action.stage in self.updated:
            return "computes with parameters that are those of the next iteration"
        if action.kind in ADDS_TO_GRADIENTS and action.stage in self.reducing:
            return "adds to gradients that are being reduced"
        return None

    def computed(self, action: Action) -> None:
        """Record the gradients that a compute action added."""
        if action.kind in MAKES_WEIGHT_GRADIENT:
            self.unreduced[action.stage] += 1
            self.num_weight_gradients[action.stage] += 1

    def late_fault(self, action: Action) -> str | None:
        """Check that after the clipping only updates, what they need and gathers follow, and nothing after
        the step."""
        if self.stepped or (self.clipped and action.kind not in _AFTER_CLIP):
            return "comes after the step, or after the gradients were clipped"
        return None

    def missing_step(self) -> str | None:
        """Check that the iteration loads a batch and, in training, updates all stages with the norm known."""
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
        """Check that nothing is held, in flight or left out at the end."""
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

    def _load_fault(self) -> str | None:
        if self.loaded:
            return "loads twice"
        self.loaded = True
        return None

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

    def _start_across_fault(self, action: Action) -> str | None:
        assert self.lowering is not None
        if wrong := self._own_stage_fault(action):
            return wrong
        if not self.lowering.across:
            return "sums across groups, of which there is one"
        if self.num_reduces[action.stage] < self._num_wanted_reduces:
            return "sums across groups before the stage's last reduction inside them"
        if action.stage in self.across:
            return "sums across groups twice"
        self.across[action.stage] = False
        return None

    def _await_across_fault(self, action: Action) -> str | None:
        if self.across.get(action.stage, True):
            return "waits for a sum across groups that is not posted"
        if action.stage in self.reducing:
            return "waits for a sum across groups before the reduction that it follows"
        self.across[action.stage] = True
        return None

    @property
    def _reduces_for_others(self) -> bool:
        """Whether this replica takes part in reductions of replicas with more micro-batches, which reduce
        more often."""
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
            if self._lacks_groups(stage):
                return f"gradients of stage {stage} are not summed across groups"
        return None

    def _lacks_groups(self, stage: int) -> bool:
        """Return whether the gradients of other groups are missing."""
        assert self.lowering is not None
        return self.lowering.across and not self.across.get(stage, False)

    # The optimizer's step

    def _clip_fault(self, *, then_updates: bool) -> str | None:
        assert self.lowering is not None
        if not self.lowering.training:
            return "only a training program steps"
        self.clipped, self.stepped = True, then_updates
        if self.reducing:
            return f"the gradients of stages {sorted(self.reducing)} are still being reduced"
        return self._missing_reduces()

    def _update_fault(self, action: Action) -> str | None:
        if self.stepped:
            self.updated.update(self.stages)
            return None
        if wrong := self._own_stage_fault(action):
            return wrong
        if action.stage in self.updated or not (self.clipped or self._is_complete(action.stage)):
            return "updates before the norm is known, or its gradients are complete, or twice"
        if self.lowering is not None and self.lowering.zero == 3 and action.stage in self.whole:
            return "its parameters are never released"
        if self._orthogonalizes and self.orthogonalizing[action.stage] < len(ORTHOGONALIZATION):
            return "updates before its matrices are orthogonalized"
        self.updated.add(action.stage)
        self.whole.discard(action.stage)
        return None

    @property
    def _orthogonalizes(self) -> bool:
        return self.lowering is not None and self.lowering.orthogonalizes

    def _orthogonalization_fault(self, action: Action) -> str | None:
        """Check that the matrices of a stage take each step once, in order, when the norm is known."""
        if wrong := self._own_stage_fault(action):
            return wrong
        if not self._orthogonalizes or not self.clipped:
            return "orthogonalizes before the norm is known, or with an optimizer that does not"
        done = self.orthogonalizing[action.stage]
        if done == len(ORTHOGONALIZATION) or action.kind is not ORTHOGONALIZATION[done]:
            return (
                f"comes after {done} of the {len(ORTHOGONALIZATION)} steps of its stage's orthogonalization"
            )
        self.orthogonalizing[action.stage] += 1
        return None

    def _is_complete(self, stage: int) -> bool:
        """Return whether a stage that may be updated early has all its gradients, those of shared parameters
        included."""
        assert self.lowering is not None
        stages = [0, self.program.num_stages - 1] if stage == 0 and self._shares(stage) else [stage]
        return self.lowering.updates_early and all(
            self.num_weight_gradients[one] == self.program.num_micro_batches
            and self.num_reduces[one] == self._num_wanted_reduces
            and one not in self.reducing
            and not self._lacks_groups(one)
            for one in stages
        )

    def _shares(self, stage: int) -> bool:
        """Return whether this stage is the first or the last one and shares parameters with the other, which
        is on the same rank."""
        ends = {0, self.program.num_stages - 1}
        return self.lowering is not None and self.lowering.tied and stage in ends <= self.unreduced.keys()
