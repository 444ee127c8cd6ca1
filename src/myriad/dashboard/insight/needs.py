"""What each action of a program waits for, by name: the message of another rank, or all ranks of a group.

    WAIT, EXCHANGE            the send of a message, and the receive that was posted for it     (axis pp)
    GATHER, REDUCE, AWAIT_*   the same post by every data-parallel replica                      (axis dp)
                              with ``layout.shard_group`` by those of its group            (axis dp_shard)
    *_ACROSS                  the same post by the replicas with the same shard        (axis dp_replicate)
    AWAIT_GATHER_MOMENTUM,
    AWAIT_SCATTER_UPDATE      the same post by every data- and tensor-parallel peer             (axis dp tp)
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
from myriad.program.actions import SEMANTICS, Action, Collective, Program
from myriad.program.build import build_program
from myriad.program.config import OverlapConfig

__all__ = ["DATA_AXES", "Axis", "Need", "Post", "ProgramNeeds", "step_programs"]

Axis = Literal["pp", "dp", "dp_shard", "dp_replicate", "dp tp", "ends", "world"]
DATA_AXES: tuple[Axis, ...] = ("dp", "dp_shard", "dp_replicate")
"""Axes of ranks that differ only in the replica."""
_OF_MATRICES = (Collective.GATHER_MOMENTUM, Collective.SCATTER_UPDATE)
Post = tuple[str, int, int]
"""Name, stage (of messages with the payload's), n-th or micro-batch."""


@dataclass(frozen=True)
class Need:
    """A post that an action waits for."""

    axis: Axis
    post: Post
    peers: tuple[int, ...]
    """Pipeline places of the ranks that post it."""
    before: bool = False
    """Whether it was posted in the previous step."""


@dataclass(frozen=True, eq=False)
class ProgramNeeds:
    """A program with its posts and needs, by place in the pipeline. Instances compare by identity, as they
    are large."""

    program: Program

    @cached_property
    def posted_at(self) -> tuple[dict[Post, int], ...]:
        """Index of the action that posts, by place and post."""
        return tuple({post: at for at, post in _posts(actions)} for actions in self.program.ranks)

    @cached_property
    def needs(self) -> tuple[tuple[tuple[Need, ...], ...], ...]:
        """What each action needs, as ``[place][action]``."""
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
        does, program = SEMANTICS[action.kind], self.program
        if does.waits:
            for transfer in action.transfers:
                other = "receive" if transfer.sends else "send"
                code = 2 * transfer.stage + (transfer.payload == "gradient")
                yield Need("pp", (other, code, transfer.micro_batch), (transfer.peer,))
        elif does.ends and (name := (str(does.ends), action.stage)) in newest:
            yield Need(self._axis(does.ends), newest[name], (place,))
        elif does.joins == "ends":
            yield Need("ends", ("tied", -1, 0), (program.stage_rank[0], program.stage_rank[-1]))
        elif does.joins == "world":
            yield Need("world", ("clip", -1, 0), tuple(range(program.num_ranks)))

    def _axis(self, collective: Collective) -> Axis:
        lowering = self.program.lowering
        if collective in _OF_MATRICES:
            return "dp tp"
        if lowering is None or not lowering.across:
            return "dp"
        return "dp_replicate" if collective is Collective.REDUCE_ACROSS else "dp_shard"


def _in_time(need: Need, ahead: Mapping[int, Post]) -> Need:
    """Return the need of a step's first gather of a stage as posted by the previous step, if it was."""
    name, stage, turn = need.post
    if name == "gather" and turn == 0 and stage in ahead:
        return replace(need, post=ahead[stage], before=True)
    return need


def _gathers_ahead(actions: Sequence[Action]) -> dict[int, Post]:
    """Return, by stage, the gather that follows the optimizer's update."""
    updated, found = set(), {}
    posts = {at: post for at, post in _posts(actions) if post[0] == "gather"}
    for at, action in enumerate(actions):
        if SEMANTICS[action.kind].updates:
            updated.add(action.stage)
        elif at in posts and action.stage in updated:
            found[action.stage] = posts[at]
    return found


def _posts(actions: Sequence[Action]) -> Iterator[tuple[int, Post]]:
    counts: defaultdict[tuple[str, int], int] = defaultdict(int)
    for at, action in enumerate(actions):
        does = SEMANTICS[action.kind]
        if does.starts:
            key = str(does.starts), action.stage
            yield at, (*key, counts[key])
            counts[key] += 1
        elif does.joins == "ends":
            yield at, ("tied", -1, 0)
        elif does.joins == "world":
            yield at, ("clip", -1, 0)
        elif does.posts:
            for transfer in action.transfers:
                code = 2 * transfer.stage + (transfer.payload == "gradient")
                yield at, ("send" if transfer.sends else "receive", code, transfer.micro_batch)


def step_programs(
    layout: Layout,
    overlap: OverlapConfig,
    shares: Sequence[int],
    *,
    tied: bool,
    num_chunks: int,
    orthogonalizes: bool = False,
) -> tuple[ProgramNeeds, ...]:
    """Return the program of each replica for one iteration. Replicas with equal micro-batches share one."""
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
                orthogonalizes=orthogonalizes,
            )
        )
        for count in sorted(set(shares))
    }
    return tuple(made[count] for count in shares)
