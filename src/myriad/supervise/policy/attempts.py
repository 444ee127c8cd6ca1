"""The life of an attempt: how it starts, what an exit of a rank means, and what follows when all ranks
ended. Pure.

    all ranks ended without a fault    the run is finished, or was restarted or stopped as requested
    a fault that no restart fixes      the run has failed (`why_hopeless`)
    non-finite loss or gradient        replay the step, move the rank, or skip the batch (`numeric_faults`)
    any other fault                    replace the suspect node with a spare, and restore the last layout that
                                       fitted in memory

Escalation, cheapest first: restart all ranks in place; put a spare in the place of the suspect node; continue
with fewer replicas (`elastic`); end the run with the reason, when the same fault repeats without progress or
is the program's own.

The nodes of the last attempt keep their ranks if they are connected: their snapshots are in memory. The
journal may lack the start of an attempt, because its disk was full or hung. If the driver is then lost, the
next driver learns of the attempt from the agents:

    journal     attempt 5 on nodes 0, 1              a new driver starts from this
    node 0      attempt 6, ranks 0 to 7 run     ──► attempt 6: ranks 0 to 7 on node 0, others unknown
    node 2      attempt 6, ranks 8 to 15 run    ──► all are known: the attempt continues, and no rank notices

Ranks that no node reports in time count as lost, on node `NOWHERE`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from myriad.comm.attempt_layout import AttemptLayout
from myriad.errors import NEXT_ATTEMPT_SKIPS
from myriad.supervise.exit_causes import first_not_finite, spike_text
from myriad.supervise.messages import NodeJoined
from myriad.supervise.observations import RankExited
from myriad.supervise.policy.incidents import (
    CORRUPTION,
    MEMORY_FULL,
    NOT_FINITE,
    OF_THE_NODE,
    OF_THE_USER,
    SPIKE,
    Incident,
)
from myriad.supervise.policy.membership import Membership
from myriad.supervise.policy.node_selection import NodeSelection
from myriad.supervise.policy.numeric_faults import NumericFaults
from myriad.supervise.policy.policy_actions import (
    BY_A_PERSON,
    RULES_OF_LEAVING,
    EndRun,
    Evict,
    EvictionCause,
    Outcome,
    PolicyAction,
    StartAttempt,
    evidence_of,
)
from myriad.supervise.policy.run_state import RunPlan, RunState

__all__ = [
    "NOWHERE",
    "AttemptOutcome",
    "adopt",
    "incident_of",
    "is_as_asked",
    "is_news",
    "is_partial",
    "next_attempt",
    "place_missing",
    "take_over",
]


def next_attempt(
    plan: RunPlan, state: RunState, numbers: NumericFaults, selection: NodeSelection, layout: AttemptLayout
) -> StartAttempt:
    """Build the next attempt in a layout that fits the connected nodes, and update the state to it."""
    chosen, each = numbers.order(*selection.places(selection.preferred, layout)), plan.world // plan.nodes
    placement = {
        number: tuple(range(place * each, (place + 1) * each))
        for place, number in enumerate(chosen[: plan.nodes_of(layout)])
    }
    rule = "ranks ended as they were asked to" if state.turning else "all nodes are there"
    evidence: dict[str, object] = {}
    if plan.fewer is not None and layout.dp != state.layout.dp:
        rule, evidence = plan.fewer.why(state.layout, layout, list(placement))
    elif list(placement) == list(state.placement):  # elsewhere, other ranks may be slow, or no rank
        turned = state.next_layout
        layout = state.layout if turned is None or turned.dp != layout.dp else turned
    _begin(state, layout, placement)
    return StartAttempt(
        rule=rule,
        evidence=evidence,
        epoch=state.epoch,
        placement=dict(placement),
        again=state.epoch > plan.first_epoch,
        newest_step=state.newest_step,
        skipped_steps=state.skipped_steps,
        layout=state.layout,
    )


def _begin(state: RunState, layout: AttemptLayout, placement: dict[int, tuple[int, ...]]) -> None:
    state.layout, state.next_layout = layout, None
    state.moved = state.moved if layout.partition is not None else None
    if layout.dp is None:
        state.full_places = tuple(placement)
    state.placement, state.turning = placement, False
    state.leaving, state.leaving_as, state.asked = -1, "", None
    state.epoch, state.phase, state.exits, state.incident = state.epoch + 1, "running", {}, None


def is_news(ended: RankExited, state: RunState) -> bool:
    """Return whether a rank of this attempt, on its assigned node, has ended and was not yet reported."""
    return (
        ended.epoch == state.epoch
        and ended.rank not in state.exits
        and ended.rank in state.placement.get(ended.node, ())
        and state.phase in ("running", "ending")
    )


def is_as_asked(ended: RankExited, state: RunState) -> bool:
    """Whether the rank finished, stopped or restarted as requested, or ended because another one did."""
    asked_and_obeyed = state.stop_asked and ended.cause == "interrupted"
    turned = state.turning and ended.cause == "turned"
    return state.phase == "ending" or ended.code == 0 or asked_and_obeyed or turned


def incident_of(ended: RankExited, state: RunState, world: int) -> Incident:
    """Build the incident of an exit. For a non-finite number each rank reports which rank computed it, so the
    incident names that rank, whichever report arrives first. If all ranks computed it, the incident names no
    rank."""
    incident = Incident.of_exit(ended, "a rank ended", after_stop=state.stop_asked)
    if ended.cause == NOT_FINITE:
        rank, text = first_not_finite(ended.error)
        if rank < world:
            text += f" (log: {ended.log})"
            incident = replace(incident, rank=rank, node=state.node_of(rank), text=text)
    elif ended.cause == SPIKE:
        text = f"step {ended.step}: {spike_text(ended.error)}"
        incident = replace(incident, rank=-1, node=-1, text=text)
    return incident


NOWHERE = -1


def take_over(state: RunState, epoch: int, layout: AttemptLayout) -> None:
    """Take over an attempt of which only the number and the layout are known."""
    state.phase, state.epoch = "running", epoch
    state.placement, state.exits, state.incident = {}, {}, None
    state.layout, state.next_layout, state.turning = layout, None, False
    state.leaving, state.leaving_as, state.asked = -1, "", None


def is_partial(state: RunState, world: int) -> bool:
    """Return whether the nodes of some ranks are not known yet."""
    return state.phase in ("running", "ending") and sum(map(len, state.placement.values())) < world


def adopt(state: RunState, joined: NodeJoined, world: int) -> None:
    """Take over the ranks that a node reports of the attempt, unless another node reported the same ones."""
    reported = {*joined.running, *(ended.rank for ended in joined.exits)}
    taken = {rank for ranks in state.placement.values() for rank in ranks}
    if joined.node not in state.placement and reported and reported <= set(range(world)) - taken:
        state.placement[joined.node] = tuple(sorted(reported))
        _sort(state)


def place_missing(state: RunState, world: int) -> None:
    """Place the ranks that no node has reported on `NOWHERE`."""
    taken = {rank for ranks in state.placement.values() for rank in ranks}
    state.placement[NOWHERE] = tuple(sorted(set(range(world)) - taken))
    _sort(state)


def _sort(state: RunState) -> None:
    """Sort by rank: the next attempt keeps this order, and each node has the snapshots of its own ranks."""
    state.placement = dict(sorted(state.placement.items(), key=lambda item: item[1][0]))


class AttemptOutcome:
    """Decides what follows when all ranks of an attempt have ended."""

    def __init__(
        self,
        plan: RunPlan,
        state: RunState,
        numbers: NumericFaults,
        selection: NodeSelection,
        membership: Membership,
    ) -> None:
        self._plan, self._state, self._numbers = plan, state, numbers
        self._selection, self._membership = selection, membership

    def evaluate(self) -> Iterator[PolicyAction]:
        """Decide what follows. Call it when all ranks have ended."""
        yield from self._compare_last()
        state = self._state
        if state.incident is None and not state.stop_asked and not self._turned:
            yield from self.carry_out(self._numbers.passed())
        incident = state.incident
        if incident is None and self._turned:
            state.phase = "gathering"
        elif incident is None or (state.stop_asked and not incident.after_stop):
            outcome: Outcome = "interrupted" if state.stop_asked else "finished"
            yield self.end_run("all ranks are gone", outcome, "")
        elif incident.after_stop:
            yield self.end_run("a fault after a stop was asked for", "failed", incident.text)
        elif (rule := self._why_hopeless(incident)) is not None:
            yield self.end_run(rule, "failed", incident.text)
        elif incident.cause == NOT_FINITE:
            state.phase = "gathering"
            yield from self.carry_out(self._numbers.evaluate(incident, len(self._membership.there)))
        else:
            state.phase = "gathering"
            if incident.cause == SPIKE:
                self._numbers.roll_back_before(incident.step)
            if incident.cause in MEMORY_FULL and state.layout.partition is not None:
                state.layout, state.next_layout = replace(state.layout, partition=None), None
                state.layers_stay = True
            yield from self._swap(incident)
        if state.phase == "gathering" and (incident is None or state.asked is not None):
            yield from self._give_way()

    def carry_out(self, actions: Iterable[PolicyAction]) -> Iterator[PolicyAction]:
        """Carry out what `NumericFaults` decided."""
        for action in actions:
            if isinstance(action, Evict):
                yield self._selection.evict(action.node, action.rule, action.accused)
            elif isinstance(action, EndRun):
                yield self.end_run(action.rule, action.outcome, action.reason)
            else:
                yield action

    def end_run(self, rule: str, outcome: Outcome, reason: str) -> EndRun:
        """Record the end of the run in the state; return the action."""
        self._state.phase, self._state.outcome, self._state.reason = "over", outcome, reason
        return EndRun(rule=rule, outcome=outcome, reason=reason)

    def _compare_last(self) -> Iterator[PolicyAction]:
        """Compare the last digests, which the ranks reported when they ended."""
        known = self._state.incident
        if (known is None or known.cause != CORRUPTION) and (found := self._numbers.compare()) is not None:
            incident, evidence = found
            yield incident.blame(**evidence)
            self._state.incident = known or incident

    @property
    def _turned(self) -> bool:
        """Whether the ranks ended because of a requested restart, not because the run finished."""
        state = self._state
        return state.turning and not state.stop_asked and any(state.exits.values())

    def _give_way(self) -> Iterator[PolicyAction]:
        node, asked = self._state.leaving, self._state.asked
        if asked is not None:
            if node in self._membership and (self._selection.has_spare or asked.anyway):
                yield self._selection.evict(node, BY_A_PERSON, "person", **evidence_of(asked))
        elif self._selection.has_spare and node in self._membership.there:
            yield self._selection.evict(
                node, RULES_OF_LEAVING[self._state.leaving_as], self._state.leaving_as
            )

    def _swap(self, incident: Incident) -> Iterator[PolicyAction]:
        """Replace the node with a spare if it is likely to be the cause: another try on it could only cost
        more."""
        likely, again = is_of_the_node(self._state, incident)
        if likely and self._selection.has_spare and incident.node in self._membership.there:
            rule = "the node may be the cause, and a spare is there"
            accused = eviction_cause(incident.cause)
            yield self._selection.evict(incident.node, rule, accused, cause=incident.cause, again=again)

    def _why_hopeless(self, incident: Incident) -> str | None:
        state = self._state
        wrong = incident.cause == CORRUPTION
        if state.layout.dp is not None and incident.cause in MEMORY_FULL:
            state.too_few = max(state.too_few, state.layout.dp)
        progressed = self._numbers.count(incident) if wrong else state.best_step > state.fault_step
        count(state, incident, progressed=progressed)
        return why_hopeless(state, incident, self._plan.restarts)


def count(state: RunState, incident: Incident, *, progressed: bool) -> None:
    """Count a fault. ``progressed``: the run has progressed since the last fault, so earlier faults no longer
    count."""
    if progressed:
        state.repeats = {}
    state.fault_step = state.best_step
    state.repeats[incident.signature] = state.repeats.get(incident.signature, 0) + 1


def why_hopeless(state: RunState, incident: Incident, restarts: int) -> str | None:
    """Return the rule by which a restart cannot help; ``None``: a restart may help."""
    repeats = state.repeats[incident.signature]
    if incident.cause == "input":
        return "bad input"
    if incident.cause == "unsaved":
        return "the last checkpoint was not stored in checkpoint.timeout_seconds"
    if incident.cause == "state":
        return "no state can be loaded: a person has to decide"
    if incident.cause == "data" and not incident.last_line.endswith(NEXT_ATTEMPT_SKIPS):
        return "the corpus is damaged"
    if repeats > restarts:
        return "the same fault came too often without progress"
    if incident.cause in OF_THE_USER and repeats > 1:
        return "the same error of the program came twice at the same step"
    return None


def is_of_the_node(state: RunState, incident: Incident) -> tuple[bool, bool]:
    """Return whether another node may fix the fault, and whether it may because the fault recurred."""
    again = state.repeats[incident.signature] > 1 and incident.cause not in OF_THE_USER
    again |= incident.cause == CORRUPTION and state.wrong_on.get(incident.node, 0) > 1
    return again or incident.cause in OF_THE_NODE, again


def eviction_cause(cause: str) -> EvictionCause:
    """Return why a node is evicted for an incident with this cause."""
    known: dict[str, EvictionCause] = {
        "hang": "hang",
        "device": "device",
        "link": "link",
        CORRUPTION: "corruption",
    }
    return known.get(cause, "again")
