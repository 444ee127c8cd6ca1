"""What is known of wrong numbers in a run, and what follows: replicas that differ, and numbers that are none.

The `Decider` tells it what was seen, and ends and starts attempts; what outlives a driver is in the run's
`State`. Pure, as that is.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from myriad.resilience.decide.actions import Action, Diagnose, EndRun, Evict
from myriad.resilience.decide.incidents import CORRUPTION, NOT_FINITE, Incident
from myriad.resilience.decide.numbers import Trial, Verdict, moved, next_trial
from myriad.resilience.decide.replicas import Replicas
from myriad.resilience.decide.state import Plan, State
from myriad.resilience.facts import Digest

__all__ = ["WrongNumbers"]


class WrongNumbers:
    """Of one run."""

    def __init__(self, plan: Plan, state: State) -> None:
        self._plan, self._state = plan, state
        self.begin()

    def begin(self) -> None:
        """An attempt: digests of earlier ones count no more."""
        self._replicas = Replicas(self._plan.replicas_of(self._state.layout))

    # Replicas that differ

    def saw(self, rank: int, digests: Iterable[Digest]) -> None:
        """What a rank of this attempt has told."""
        self._replicas.saw(rank, digests)

    def compare(self) -> tuple[Incident, dict[str, object]] | None:
        """With the evidence, if replicas differ. Then nothing newer than what they agreed on is to be
        trusted; without any such step all is as good."""
        state, found = self._state, self._replicas.look()
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
        """Of replicas that differed; whether all agreed on a later step since the last time: steps after they
        began to differ are no progress."""
        state = self._state
        before, state.wrong_step = state.wrong_step, state.agreed_step
        if incident.node >= 0:
            state.wrong_on[incident.node] = state.wrong_on.get(incident.node, 0) + 1
        return state.agreed_step > before

    # Numbers that are none

    def passed(self, step: int | None = None) -> Iterator[Action]:
        """All steps before this one (``None``: all of the run) are done, with finite numbers."""
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
        """Nodes for the ranks of the next attempt, then spares."""
        trial = self._state.trial
        if trial is None or trial.how != "move":
            return [*kept, *others]
        self._state.trial = replace(trial, how="moved")
        return moved(trial, kept, others)

    def judge(self, incident: Incident, num_nodes: int) -> Iterator[Action]:
        """All ranks are gone, as a number was none: `EndRun` is among the actions, or all begin again.
        ``num_nodes``: those that are there, spares too."""
        state = self._state
        if self._plan.on_nan == "stop":
            yield EndRun(rule="a number is not finite", outcome="failed", reason=incident.text)
            return
        found = next_trial(state.trial, incident.step, incident.rank, incident.node, num_nodes)
        if isinstance(found, Trial):
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

    # Spikes

    def go_back_before(self, step: int) -> None:
        """A loss or a gradient norm rose far above the others, twice: from some steps before it the run goes
        on without the batches that led to it. Without any state so old it begins anew."""
        before, after = self._plan.spike_steps
        state, newest = self._state, max(0, step - 1 - before)
        state.newest_step = newest if state.newest_step is None else min(newest, state.newest_step)
        skipped = range(newest + 1, step + after + 1)
        state.skipped_steps = tuple(sorted({*state.skipped_steps, *skipped}))


def _diagnosis(trial: Trial, verdict: Verdict, rule: str) -> Diagnose:
    step, rank, node = trial.step, trial.rank, trial.node
    return Diagnose(rule=rule, verdict=verdict, cause=NOT_FINITE, step=step, rank=rank, node=node)
