"""Faults in the numbers: replicas that differ, losses and gradients that are not finite, and loss spikes.
Pure.

    step      10      20      30
    rank 0    a       b       c
    rank 1    a       b       c'     differs from the majority: it is the suspect
    rank 2    a       b       c      agreed: 20

Ranks report digests of the state that their replicas share. The digests of a step are compared once all ranks
of a group have reported theirs, however late; digests of different steps are never compared. If only two
replicas exist and differ, both are suspects. Where replicas hold different experts, some bits of a digest are
those of the experts, and are compared among the ranks that hold the same. `Decider` passes on observations,
and starts and ends attempts; the state that must outlive a driver is in `RunState`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from myriad.supervise.observations import Digest
from myriad.supervise.policy.incidents import CORRUPTION, NOT_FINITE, Incident
from myriad.supervise.policy.nan_trial import NanTrial, Verdict, moved, next_trial
from myriad.supervise.policy.policy_actions import Diagnose, EndRun, Evict, PolicyAction
from myriad.supervise.policy.run_state import RunPlan, RunState
from myriad.telemetry.progress.progress_page import EXPERT_DIGEST
from myriad.units import format_ranks

__all__ = ["NumericFaults"]


class NumericFaults:
    """Finds numeric faults of a run, and decides what follows."""

    def __init__(self, plan: RunPlan, state: RunState) -> None:
        self._plan, self._state = plan, state
        self.begin()

    def begin(self) -> None:
        """Begin an attempt: digests of earlier attempts no longer count."""
        layout, plan = self._state.layout, self._plan
        splits = bool(plan.expert_replicas)
        experts = plan.expert_replicas_of(layout)
        self._replicas = ReplicaDigests(plan.replicas_of(layout), experts, splits=splits)

    # Replicas that differ

    def observe(self, rank: int, digests: Iterable[Digest]) -> None:
        """Take the digests that a rank of this attempt reported."""
        self._replicas.observe(rank, digests)

    def compare(self) -> tuple[Incident, dict[str, object]] | None:
        """Return an incident and its evidence if replicas differ. Then no state newer than the last step on
        which all agreed is trusted. Without such a step there is no limit, because any state may be wrong."""
        state, found = self._state, self._replicas.find_difference()
        state.agreed_step = max(state.agreed_step, self._replicas.agreed)
        if found is None:
            return None
        state.newest_step = state.agreed_step if state.agreed_step >= 0 else None
        nodes = {state.node_of(rank) for rank in found.suspects}
        rank = found.suspects[0] if len(found.suspects) == 1 else -1
        node = nodes.pop() if len(nodes) == 1 else -1
        text = found.text + (f" (agreed: {state.agreed_step})" if state.agreed_step >= 0 else "")
        where = (rank, node, found.step)
        incident = Incident("replicas differ", CORRUPTION, *where, text, text, state.stop_asked)
        evidence = {"suspects": found.suspects, "others": found.others, "agreed_step": state.agreed_step}
        return incident, evidence

    def count(self, incident: Incident) -> bool:
        """Count a difference of replicas. Return whether all agreed on a later step since the last
        difference: steps after replicas began to differ are no progress."""
        state = self._state
        before, state.wrong_step = state.wrong_step, state.agreed_step
        if incident.node >= 0:
            state.wrong_on[incident.node] = state.wrong_on.get(incident.node, 0) + 1
        return state.agreed_step > before

    # Non-finite values

    def passed(self, step: int | None = None) -> Iterator[PolicyAction]:
        """Record that all steps before this one (``None``: all steps of the run) are done with finite
        numbers."""
        trial = self._state.trial
        if trial is None or (step is not None and step <= trial.step):
            return
        self._state.trial = None
        verdict = trial.if_gone
        yield _diagnosis(
            trial, verdict, f"gone {'on another node' if verdict == 'hardware' else 'on replay'}"
        )
        if verdict == "hardware" and trial.node not in self._state.placement:
            yield Evict(rule="numbers were finite on another node", node=trial.node, accused="hardware")

    def order(self, kept: Sequence[int], others: Sequence[int]) -> list[int]:
        """Return the nodes for the ranks of the next attempt, then the spares."""
        trial = self._state.trial
        if trial is None or trial.how != "move":
            return [*kept, *others]
        self._state.trial = replace(trial, how="moved")
        return moved(trial, kept, others)

    def evaluate(self, incident: Incident, num_nodes: int) -> Iterator[PolicyAction]:
        """Decide what follows a non-finite number after all ranks ended: `EndRun` is among the actions, or
        all ranks restart. ``num_nodes``: number of connected nodes, including spares."""
        state = self._state
        if self._plan.on_nan == "stop":
            yield EndRun(rule="a number is not finite", outcome="failed", reason=incident.text)
            return
        found = next_trial(state.trial, incident.step, incident.rank, incident.node, num_nodes)
        if isinstance(found, NanTrial):
            state.trial = found
            return
        tried, state.trial = state.trial, None
        assert tried is not None, "a verdict is of something that was tried"
        stays = found == "hardware"
        yield _diagnosis(tried, found, "it stays with the node" if stays else "it comes again")
        if stays and num_nodes > len(state.placement):
            rule = "numbers are not finite on this node, whatever its ranks"
            yield Evict(rule=rule, node=tried.node, accused="hardware")
        elif not stays and self._plan.on_nan == "skip":
            state.skipped_steps = tuple(sorted({*state.skipped_steps, incident.step}))
            state.repeats.pop(incident.signature, None)
        else:
            whose = f"node {tried.node}" if stays else "the data or the model"
            reason = f"{incident.text}; {tried.tried}: it is {whose}"
            yield EndRun(rule="it comes again", outcome="failed", reason=reason)

    # SpikeDetector

    def roll_back_before(self, step: int) -> None:
        """Restart some steps before a spike of the loss or the gradient norm that came twice, and skip the
        batches that led to it. If there is no state that old, training restarts from the beginning."""
        before, after = self._plan.spike_steps
        state, newest = self._state, max(0, step - 1 - before)
        state.newest_step = newest if state.newest_step is None else min(newest, state.newest_step)
        skipped = range(newest + 1, step + after + 1)
        state.skipped_steps = tuple(sorted({*state.skipped_steps, *skipped}))


def _diagnosis(trial: NanTrial, verdict: Verdict, rule: str) -> Diagnose:
    step, rank, node = trial.step, trial.rank, trial.node
    return Diagnose(rule=rule, verdict=verdict, cause=NOT_FINITE, step=step, rank=rank, node=node)


_KEPT_STEPS = 64
"""Most steps with incomplete digests. A rank further behind cannot be compared, because the digests of the
others are dropped."""


@dataclass(frozen=True)
class ReplicaDifference:
    """A step after which replicas differ."""

    step: int
    suspects: tuple[int, ...]
    others: tuple[int, ...]
    """Ranks that agree with each other; empty if there is no majority."""

    @property
    def text(self) -> str:
        """Describe the difference for the user."""
        who, where = format_ranks(self.suspects), f"after step {self.step}"
        if self.others:
            holds = "holds" if len(self.suspects) == 1 else "hold"
            return f"{who} {holds} other parameters than {format_ranks(self.others)} {where}"
        return f"{who} hold different parameters {where}, and nothing says whose are wrong"


class ReplicaDigests:
    """The digests of an attempt's ranks, compared per replica group."""

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        expert_groups: Sequence[Sequence[int]] = (),
        *,
        splits: bool = False,
    ) -> None:
        """``splits``: digests have a part of experts (`EXPERT_DIGEST`), which ``expert_groups`` compare."""
        self._groups = [tuple(group) for group in (*groups, *expert_groups)]
        rest = ~EXPERT_DIGEST if splits else -1
        self._bits = [rest] * len(groups) + [EXPERT_DIGEST] * len(expert_groups)
        """The bits of a digest that each group compares."""
        self._groups_of: dict[int, list[int]] = defaultdict(list)
        for index, group in enumerate(self._groups):
            for rank in group:
                self._groups_of[rank].append(index)
        self._values: dict[int, dict[int, int]] = defaultdict(dict)
        self._has_news = False
        """Whether a group became complete since the last poll. With 12,288 ranks, comparing at every
        heartbeat would be too slow."""
        self._missing: dict[tuple[int, int], int] = {}
        """Number of ranks, by step and group, that have not reported a digest yet."""
        self.agreed = -1
        """Newest step after which all ranks reported equal digests."""

    def observe(self, rank: int, digests: Iterable[Digest]) -> None:
        """Take the digests that a rank reported."""
        if rank in self._groups_of:
            for one in digests:
                if one.step > self.agreed and rank not in self._values[one.step]:
                    self._values[one.step][rank] = one.value
                    self._count(one.step, self._groups_of[rank])

    def _count(self, step: int, groups: Sequence[int]) -> None:
        if len(self._values) > _KEPT_STEPS:
            self._forget(oldest := min(self._values))
            if oldest == step:
                return
        for group in groups:
            left = self._missing.get((step, group), len(self._groups[group])) - 1
            self._missing[step, group] = left
            self._has_news |= left == 0

    def find_difference(self) -> ReplicaDifference | None:
        """Compare the complete groups, the earliest step first."""
        if not self._has_news:
            return None
        self._has_news = False
        for step in sorted(self._values):
            values = self._values[step]
            complete = [
                {rank: values[rank] & bits for rank in group}
                for group, bits in zip(self._groups, self._bits, strict=True)
                if all(rank in values for rank in group)
            ]
            if differing := [held for held in complete if len({*held.values()}) > 1]:
                return _difference(step, differing)
            if len(complete) == len(self._groups):
                self.agreed = step
        for step in [step for step in self._values if step <= self.agreed]:
            self._forget(step)
        return None

    def _forget(self, step: int) -> None:
        del self._values[step]
        for group in range(len(self._groups)):
            self._missing.pop((step, group), None)


def _difference(step: int, groups: Sequence[Mapping[int, int]]) -> ReplicaDifference:
    """Return the members outside the majority of each differing group; all members if there is no majority.
    ``groups``: what each member holds."""
    suspects, others = set[int](), set[int]()
    for held in groups:
        value, count = Counter(held.values()).most_common(1)[0]
        is_majority = 2 * count > len(held)
        suspects |= {rank for rank, own in held.items() if own != value or not is_majority}
        others |= {rank for rank, own in held.items() if own == value and is_majority}
    return ReplicaDifference(step, tuple(sorted(suspects)), tuple(sorted(others - suspects)))
