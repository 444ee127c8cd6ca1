"""Traces that people ask for: who is to make them, and who has.

A trace changes nothing of the run, so no decision is made and none is journalled; an event tells of it. A
node that says nothing within its time is a line of what is missing, and what it still writes stays there.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from myriad.resilience.decide.state import State
from myriad.resilience.drive.scribe import Scribe
from myriad.resilience.traces import Trace, TraceAnswer, TraceAsked, Traced, told_limit
from myriad.resilience.wire import Link
from myriad.run import Run
from myriad.units import format_ranks

__all__ = ["GRACE_SECONDS", "Traces"]

GRACE_SECONDS = 30.0
"""Of an executor, which waits for steps to end, beyond what it itself allows."""
_MOST_STEPS, _MOST_WAITED = 3.0, 900.0
_MOST_TOLD = 16
"""Files in an event."""


@dataclass
class _Asked:
    """One that is at work."""

    waiting: set[int]
    """Nodes."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    heard: list[Traced] = field(default_factory=list)


class Traces:
    """Of one driver."""

    def __init__(
        self, run: Run, scribe: Scribe, links: Mapping[int, Link], step_seconds: Callable[[], float]
    ) -> None:
        """``links``: of the nodes that are there; ``step_seconds``: what a step takes, as far as is known."""
        self._run, self._scribe, self._links, self._step_seconds = run, scribe, links, step_seconds
        self._numbers = count(1)
        self._asked: dict[int, _Asked] = {}

    async def ask(self, asked: TraceAsked, state: State) -> TraceAnswer:
        """Until all nodes have told, or their time is over."""
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
        return self._told(asked, ranks, one.heard, lost)

    def heard(self, traced: Traced) -> None:
        """An executor has."""
        one = self._asked.get(traced.number)
        if one is not None and traced.node in one.waiting:
            one.waiting.discard(traced.node)
            one.heard.append(traced)
            one.done.set()

    def left(self, node: int) -> None:
        """It is not waited for any more, but told of."""
        for one in self._asked.values():
            if node in one.waiting:
                one.waiting.discard(node)
                one.heard.append(Traced(node, 0, (), (), (f"node {node} was lost meanwhile",)))
                one.done.set()

    def _told(
        self, asked: TraceAsked, ranks: Sequence[int], heard: Sequence[Traced], lost: Sequence[int]
    ) -> TraceAnswer:
        told = sorted(heard, key=lambda one: one.node)
        files = tuple(name for one in told for name in one.files)
        found = tuple(line for one in told for line in one.found)
        silent = [f"node {node} has not answered" for node in sorted(lost)]
        problems = (*(line for one in told for line in one.problems), *silent)
        fields = {"what": asked.what, "ranks": format_ranks(ranks), "seconds": asked.seconds}
        fields["who"] = asked.who
        fields |= {"files": list(files[:_MOST_TOLD]), "num_files": len(files)}
        if problems:
            fields["problem"] = "; ".join(problems[:_MOST_TOLD])
        self._scribe.enter_event(self._run, "trace", **fields)
        return TraceAnswer("", files, found, problems)


def why_not(asked: TraceAsked, ranks: Sequence[int], state: State) -> str:
    """What keeps it from being done, as the end of "allowed: ..."; empty: nothing."""
    key, value, allowed = told_limit(asked.what, len(ranks), asked.seconds)
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
