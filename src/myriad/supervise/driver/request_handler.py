"""Answers requests to a driver: from machines that want to join, from people, and from evicted nodes.

Nothing is decided here: `Decider` has the rules, `admission` the offences of earlier runs and node numbers. A
new driver assigns numbers and answers people once it has heard from its nodes. Trace requests are passed on
to the agents of the ranks' nodes; the answer follows when all have reported or a time limit has passed.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from myriad.run import Run
from myriad.supervise.authenticated_link import AuthenticatedLink
from myriad.supervise.background import AsyncWriter
from myriad.supervise.driver.admission import HEAR_SECONDS, AdmissionCheck, NodeNumbers
from myriad.supervise.messages import (
    EvictionAnswer,
    EvictionAsked,
    NodeJoined,
    NodeNumber,
    NodeRefused,
    NodeTaken,
    NodeWanted,
    Trace,
    TraceAnswer,
    TraceAsked,
    Traced,
    exceeded_limit,
)
from myriad.supervise.observations import How
from myriad.supervise.policy.decisions import Decider
from myriad.supervise.policy.drain import what_follows
from myriad.supervise.policy.run_state import RunPlan, RunState
from myriad.units import format_ranks

__all__ = ["RequestHandler", "TraceRequests"]

GRACE_SECONDS = 30.0
"""Seconds beyond its own time limit that an agent waits for the ends of steps."""
_MOST_STEPS, _MOST_WAITED = 3.0, 900.0
_MOST_LISTED = 16
"""Most file names that an event lists."""


@dataclass
class _Asked:
    """A trace request that is in progress."""

    waiting: set[int]
    """Nodes that have not answered."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    heard: list[Traced] = field(default_factory=list)


class TraceRequests:
    """Passes trace requests on to the agents and collects their answers."""

    def __init__(
        self,
        run: Run,
        disk_writer: AsyncWriter,
        links: Mapping[int, AuthenticatedLink],
        step_seconds: Callable[[], float],
    ) -> None:
        """``links``: connections to the nodes. ``step_seconds``: returns the seconds of a step, or 0."""
        self._run, self._disk_writer, self._links, self._step_seconds = run, disk_writer, links, step_seconds
        self._numbers = count(1)
        self._asked: dict[int, _Asked] = {}

    async def ask(self, asked: TraceAsked, state: RunState) -> TraceAnswer:
        """Request traces; return the answer when all nodes have reported or a time limit has passed."""
        ranks = asked.ranks or tuple(sorted(rank for own in state.placement.values() for rank in own))
        if refused := why_not(asked, ranks, state):
            return TraceAnswer(refused, (), (), ())
        meant, number = set(ranks), next(self._numbers)
        places = {node: [one for one in own if one in meant] for node, own in state.placement.items()}
        there = {node: own for node, own in places.items() if own and node in self._links}
        one = self._asked[number] = _Asked(set(there))
        for node, own in there.items():
            order = Trace(state.epoch, number, asked.what, tuple(own), asked.seconds)
            self._links[node].send(order)
        try:
            seconds = asked.seconds + _MOST_STEPS * self._step_seconds() + 2 * GRACE_SECONDS
            async with asyncio.timeout(min(seconds, _MOST_WAITED)):
                while one.waiting:
                    await one.done.wait()
                    one.done.clear()
        except TimeoutError:
            pass
        del self._asked[number]
        lost = [node for node, own in places.items() if own and (node not in there or node in one.waiting)]
        return self._answer_of(asked, ranks, one.heard, lost)

    def receive(self, traced: Traced) -> None:
        """Record the answer of an agent."""
        one = self._asked.get(traced.number)
        if one is not None and traced.node in one.waiting:
            one.waiting.discard(traced.node)
            one.heard.append(traced)
            one.done.set()

    def left(self, node: int) -> None:
        """Stop waiting for a node, and report it as missing."""
        for one in self._asked.values():
            if node in one.waiting:
                one.waiting.discard(node)
                one.heard.append(Traced(node, 0, (), (), (f"node {node} was lost meanwhile",)))
                one.done.set()

    def _answer_of(
        self, asked: TraceAsked, ranks: Sequence[int], heard: Sequence[Traced], lost: Sequence[int]
    ) -> TraceAnswer:
        answers = sorted(heard, key=lambda one: one.node)
        files = tuple(name for one in answers for name in one.files)
        found = tuple(line for one in answers for line in one.found)
        silent = [f"node {node} has not answered" for node in sorted(lost)]
        problems = (*(line for one in answers for line in one.problems), *silent)
        fields = {"what": asked.what, "ranks": format_ranks(ranks), "seconds": asked.seconds}
        fields["who"] = asked.who
        fields |= {"files": list(files[:_MOST_LISTED]), "num_files": len(files)}
        if problems:
            fields["problem"] = "; ".join(problems[:_MOST_LISTED])
        self._disk_writer.enter_event(self._run, "trace", **fields)
        return TraceAnswer("", files, found, problems)


def why_not(asked: TraceAsked, ranks: Sequence[int], state: RunState) -> str:
    """Return why the request cannot be fulfilled, in the words that follow "allowed: "; empty if it can."""
    key, value, allowed = exceeded_limit(asked.what, len(ranks), asked.seconds)
    if key:
        return f"{value}: {allowed}"
    if state.phase != "running":
        return f"no rank is at work now: the run is {state.phase}"
    there = {rank for own in state.placement.values() for rank in own}
    if unknown := sorted(set(ranks) - there):
        return f"no {format_ranks(unknown)} in this run, which has 0 to {max(there)}"
    if ended := sorted(set(ranks) & state.exits.keys()):
        return f"{format_ranks(ended)} has ended"
    return ""


_Request = NodeWanted | EvictionAsked | TraceAsked


class RequestHandler:
    """Answers requests to one driver."""

    def __init__(
        self,
        plan: RunPlan,
        decider: Decider,
        admission: AdmissionCheck,
        members: NodeNumbers,
        traces: TraceRequests,
        there: Collection[int],
    ) -> None:
        """``there``: live view of the nodes with a connection."""
        self._plan, self._decider, self._admission = plan, decider, admission
        self._members, self._traces, self._there = members, traces, there
        self._began = time.monotonic()

    async def why_not(self, joined: NodeJoined) -> NodeRefused | NodeTaken | None:
        """Return why a node may not join; ``None`` if it may. Earlier runs do not matter for a node with
        ranks. A node that was evicted from this run is examined first, unless the doctor is off."""
        if why := self._decider.why_left_out(joined):
            others = [one.machine for one in self._decider.nodes.values()]
            how: How = "short" if joined.machine in others else "full"
            return NodeRefused(why, None if self._plan.doctor == "off" else how)
        if why := "" if joined.epoch else await self._admission.why_not(joined.machine, joined.node):
            return NodeRefused(why)
        other = self._members.other_than(joined, time.monotonic())
        return None if other is None else NodeTaken(other)

    async def answer(self, asked: _Request) -> NodeNumber | NodeRefused | EvictionAnswer | TraceAnswer:
        """Answer a machine that wants to join, or a person."""
        if not isinstance(asked, NodeWanted) or asked.node < 0:
            await asyncio.sleep(max(0.0, self._began + HEAR_SECONDS - time.monotonic()))
        if isinstance(asked, TraceAsked):
            return await self._traces.ask(asked, self._decider.state)
        if isinstance(asked, EvictionAsked):
            return self._answer_person(asked)
        left_out = self._decider.state.left_out.get(asked.machine, "") if asked.machine else ""
        if why := left_out or await self._admission.why_not(asked.machine, asked.node):
            return NodeRefused(why)
        taken, now = {*self._there, *self._decider.state.placement}, time.monotonic()
        return NodeNumber(asked.node if asked.node >= 0 else self._members.number_for(asked.host, taken, now))

    def _answer_person(self, asked: EvictionAsked) -> EvictionAnswer:
        decider = self._decider
        if refused := decider.why_not_evict(asked):
            return EvictionAnswer(refused, "")
        return EvictionAnswer(
            "", what_follows(asked, decider.state, decider.nodes, decider.usable, decider.needed)
        )
