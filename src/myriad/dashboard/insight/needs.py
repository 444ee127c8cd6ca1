"""What each action of a program waits for, by name: the message of another rank, or all ranks of a group.

    WAIT, EXCHANGE            the send of a message, and the receive that was posted for it     (axis pp)
    GATHER, REDUCE, AWAIT_*   the same post by every data-parallel replica                      (axis dp)
    SYNC_TIED                 both ends of the pipeline                                         (axis ends)
    CLIP, STEP                everybody                                                         (axis world)

A `Post` names what a rank does when it comes there; the n-th post of a name on one rank meets the n-th of
the others. A gather that is posted behind the optimizer is the next step's first one, whose own post does
nothing.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from myriad.comm.layout import Layout
from myriad.program.actions import Action, Kind, Program
from myriad.program.build import build_program
from myriad.program.config import OverlapConfig

__all__ = ["Axis", "Need", "Post", "ProgramNeeds", "step_programs"]

Axis = Literal["pp", "dp", "ends", "world"]
Post = tuple[str, int, int]
"""Name, stage (of messages with the payload's), n-th or micro-batch."""
_STARTS = {
    Kind.GATHER: "gather",
    Kind.START_GATHER: "gather",
    Kind.REDUCE: "reduce",
    Kind.START_REDUCE: "reduce",
}
_ENDS = {
    Kind.GATHER: "gather",
    Kind.AWAIT_GATHER: "gather",
    Kind.REDUCE: "reduce",
    Kind.AWAIT_REDUCE: "reduce",
}


@dataclass(frozen=True)
class Need:
    """One thing that an action waits for."""

    axis: Axis
    post: Post
    peers: tuple[int, ...]
    """Places in the pipeline of those who post it."""
    before: bool = False
    """They posted it in the step before."""


@dataclass(frozen=True, eq=False)
class ProgramNeeds:
    """A program with its posts and needs, by place in the pipeline. Compared by identity: they are long."""

    program: Program

    @cached_property
    def posted_at(self) -> tuple[dict[Post, int], ...]:
        """Of each place: index of the action that posts."""
        return tuple({post: at for at, post in _posts(actions)} for actions in self.program.ranks)

    @cached_property
    def needs(self) -> tuple[tuple[tuple[Need, ...], ...], ...]:
        """``[place][action]``."""
        return tuple(tuple(self._of_rank(place, actions)) for place, actions in enumerate(self.program.ranks))

    def _of_rank(self, place: int, actions: Sequence[Action]) -> Iterator[tuple[Need, ...]]:
        newest: dict[tuple[str, int], Post] = {}
        ahead = _gathers_ahead(actions)
        posts = defaultdict(list)
        for at, post in _posts(actions):
            posts[at].append(post)
        for at, action in enumerate(actions):
            for post in posts[at]:
                newest[post[0], post[1]] = post
            yield tuple(_in_time(need, ahead) for need in self._of_action(place, action, newest))

    def _of_action(self, place: int, action: Action, newest: dict[tuple[str, int], Post]) -> Iterator[Need]:
        kind, program = action.kind, self.program
        if kind in (Kind.EXCHANGE, Kind.WAIT):
            for transfer in action.transfers:
                other = "receive" if transfer.sends else "send"
                code = 2 * transfer.stage + (transfer.payload == "gradient")
                yield Need("pp", (other, code, transfer.micro_batch), (transfer.peer,))
        elif kind in _ENDS and (name := (_ENDS[kind], action.stage)) in newest:
            yield Need("dp", newest[name], (place,))
        elif kind is Kind.SYNC_TIED:
            yield Need("ends", ("tied", -1, 0), (program.stage_rank[0], program.stage_rank[-1]))
        elif kind in (Kind.CLIP, Kind.STEP):
            yield Need("world", ("clip", -1, 0), tuple(range(program.num_ranks)))


def _in_time(need: Need, ahead: Mapping[int, Post]) -> Need:
    """A step's first gather of a stage, which the step before may have posted."""
    name, stage, turn = need.post
    if name == "gather" and turn == 0 and stage in ahead:
        return replace(need, post=ahead[stage], before=True)
    return need


def _gathers_ahead(actions: Sequence[Action]) -> dict[int, Post]:
    """By stage, the gather that follows the optimizer's update of it."""
    updated, found = set(), {}
    posts = {at: post for at, post in _posts(actions) if post[0] == "gather"}
    for at, action in enumerate(actions):
        if action.kind is Kind.UPDATE:
            updated.add(action.stage)
        elif at in posts and action.stage in updated:
            found[action.stage] = posts[at]
    return found


def _posts(actions: Sequence[Action]) -> Iterator[tuple[int, Post]]:
    counts: defaultdict[tuple[str, int], int] = defaultdict(int)
    for at, action in enumerate(actions):
        kind = action.kind
        if kind in _STARTS:
            key = _STARTS[kind], action.stage
            yield at, (*key, counts[key])
            counts[key] += 1
        elif kind is Kind.SYNC_TIED:
            yield at, ("tied", -1, 0)
        elif kind in (Kind.CLIP, Kind.STEP):
            yield at, ("clip", -1, 0)
        elif kind is not Kind.WAIT:
            for transfer in action.transfers:
                code = 2 * transfer.stage + (transfer.payload == "gradient")
                yield at, ("send" if transfer.sends else "receive", code, transfer.micro_batch)


def step_programs(
    layout: Layout, overlap: OverlapConfig, shares: Sequence[int], *, tied: bool, num_chunks: int
) -> tuple[ProgramNeeds, ...]:
    """What the ranks of each replica run in one iteration; those with as many micro-batches share one."""
    most = max(shares)
    made = {
        count: ProgramNeeds(
            build_program(
                layout,
                overlap,
                count,
                tied=tied,
                training=True,
                num_chunks=num_chunks,
                most_micro_batches=most,
            )
        )
        for count in sorted(set(shares))
    }
    return tuple(made[count] for count in shares)
