"""Pipeline schedules: the order of each rank's compute actions. `lower.py` adds the communication.

    gpipe        all forwards, then all backwards
    1f1b         after a warm-up each forward is paired with a backward: rank r has at most p - r in flight
    eager-1f1b   as 1f1b with almost twice the micro-batches in flight: a transfer that takes as long as a
                 compute still arrives in time
    interleaved  as 1f1b with v stages per rank, in rounds of at least p micro-batches: 1/v of the bubble
    zero-bubble  as 1f1b with the backward in two halves; delayed weight halves fill the bubble
    eager-zero-bubble    as eager-1f1b and zero-bubble: gradients are sent a compute action before their use
    zero-bubble-v        two stages per rank, down and up a V: half the bubble of zero-bubble
    dualpipe-v           the same V; forwards alternate with whole backwards of the rank's other stage

    1f1b, 3 ranks, 4 micro-batches (`myriad simulate --program` draws any other)

    rank 0   F0 F1 F2             B0    F3 B1       B2       B3
    rank 1      F0 F1       B0    F2 B1    F3 B2       B3
    rank 2         F0 B0    F1 B1    F2 B2    F3 B3

Sources: GPipe (arXiv 1811.06965); 1F1B and interleaving: Megatron-LM (arXiv 2104.04473, section 2.2);
eager 1F1B: arXiv 2211.05322, section 4 (its memory: 2 (p - r) - 1 micro-batches on rank r);
zero-bubble is ZB-H1 of arXiv 2401.10241, section 2.2 (its memory: at most p micro-batches on every rank).
zero-bubble-v: `myriad.program.vee`; dualpipe-v: `myriad.program.dual_pipe`. In all others rank s mod p owns
stage s.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from myriad.errors import BadInputError
from myriad.program.actions import Action, Kind, Program
from myriad.program.dual_pipe import dual_pipe, num_forwards_alone
from myriad.program.vee import vee, vee_stage_rank

__all__ = ["IN_A_V", "SCHEDULES", "check_virtual_stages", "num_alone", "schedule", "stage_owners"]

_MOST_MICRO_BATCHES = 100_000
"""Largest number of micro-batches. Longer programs are mistakes, and would run out of memory without a clear
error."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """The size of a pipeline: ranks, stages per rank, micro-batches."""

    num_ranks: int
    virtual_stages: int
    num_micro_batches: int
    more_ahead: int = 0
    """Forwards at the start of 1f1b, eager-1f1b and interleaved, more than these have without pairs."""


def schedule(
    name: str, num_ranks: int, virtual_stages: int, num_micro_batches: int, *, pairs: bool = False
) -> Program:
    """Return the compute actions of one iteration under schedule ``name``. ``pairs``: each forward that
    alternates with backwards is to be paired with one (`myriad.program.pairs`). Raises `BadInputError` for
    parameters that the schedule does not support."""
    if name not in SCHEDULES:
        raise BadInputError("layout.schedule", name, f"one of {', '.join(sorted(SCHEDULES))}")
    if num_ranks < 1:
        raise BadInputError("layout.pp", num_ranks, "at least 1")
    check_virtual_stages(name, virtual_stages)
    if num_micro_batches < 1:
        raise BadInputError("num_micro_batches", num_micro_batches, "at least 1")
    if num_micro_batches > _MOST_MICRO_BATCHES:
        allowed = (
            f"at most {_MOST_MICRO_BATCHES:,} micro-batches in an iteration: a smaller train.global_batch"
        )
        raise BadInputError("num_micro_batches", num_micro_batches, allowed)
    shape = _Shape(num_ranks, virtual_stages, num_micro_batches, int(pairs))
    return Program(
        schedule=name,
        num_micro_batches=num_micro_batches,
        stage_rank=stage_owners(name, num_ranks, virtual_stages),
        ranks=tuple(tuple(SCHEDULES[name](shape, rank)) for rank in range(num_ranks)),
    )


def stage_owners(name: str, num_ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """Return the rank that owns each stage."""
    if name in IN_A_V:
        return vee_stage_rank(num_ranks)
    return tuple(stage % num_ranks for stage in range(num_ranks * virtual_stages))


def check_virtual_stages(name: str, virtual_stages: int) -> None:
    """Raise `BadInputError` if schedule ``name`` does not support this number of stages per rank."""
    only = 2 if name in IN_A_V else 1 if name in _ONE_STAGE_ONLY else None
    if virtual_stages < 1 or (only is not None and virtual_stages != only):
        more = "interleaved and gpipe take more" if only == 1 else "one down and one up"
        allowed = f"only {only} with schedule {name}; {more}" if only else "at least 1"
        raise BadInputError("layout.virtual_stages", virtual_stages, allowed)


def _rounds(shape: _Shape) -> list[range]:
    """Split the micro-batches into rounds of nearly equal size, each with at least ``num_ranks`` if there are
    that many.

    In a round shorter than the pipeline, a rank would wait at each change of stage for the round's first
    micro-batch.
    """
    num_rounds = max(1, shape.num_micro_batches // shape.num_ranks)
    size, longer = divmod(shape.num_micro_batches, num_rounds)
    ends = accumulate((size + (index < longer) for index in range(num_rounds)), initial=0)
    return [range(start, stop) for start, stop in pairwise(ends)]


def _in_order(shape: _Shape, rank: int, kind: Kind, rounds: list[range]) -> list[Action]:
    """Return every (stage, micro-batch) of a rank, round by round; within a round stage by stage."""
    stages = [virtual * shape.num_ranks + rank for virtual in range(shape.virtual_stages)]
    if kind is not Kind.FORWARD:
        stages.reverse()
    return [Action(kind, stage, batch) for batches in rounds for stage in stages for batch in batches]


def _gpipe(shape: _Shape, rank: int) -> Iterator[Action]:
    everything = [range(shape.num_micro_batches)]
    yield from _in_order(shape, rank, Kind.FORWARD, everything)
    yield from _in_order(shape, rank, Kind.BACKWARD, everything)


def _pair_up(forwards: list[Action], backwards: list[Action], num_warm_up: int) -> Iterator[Action]:
    """Yield the warm-up forwards, then alternating forwards and backwards, then the remaining backwards."""
    yield from forwards[:num_warm_up]
    for forward, backward in zip(forwards[num_warm_up:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[max(0, len(forwards) - num_warm_up) :]


def _one_forward_one_backward(shape: _Shape, rank: int, eagerness: int = 1) -> Iterator[Action]:
    everything = [range(shape.num_micro_batches)]
    forwards = _in_order(shape, rank, Kind.FORWARD, everything)
    backwards = _in_order(shape, rank, Kind.BACKWARD, everything)
    yield from _pair_up(forwards, backwards, _num_ahead(shape, rank, eagerness))


def _num_ahead(shape: _Shape, rank: int, eagerness: int) -> int:
    return eagerness * (shape.num_ranks - rank - 1) + shape.more_ahead


def num_alone(program: Program, virtual_stages: int, rank: int) -> int:
    """Return the number of forwards with which a rank begins, where `schedule` writes for pairs: those behind
    them alternate with backwards. ``virtual_stages``: stages of the layout on each rank."""
    if program.schedule == _DUAL_PIPE:
        return num_forwards_alone(program.num_ranks, rank)
    shape = _Shape(program.num_ranks, virtual_stages, program.num_micro_batches, more_ahead=1)
    if virtual_stages > 1:
        return _num_ahead(shape, rank, 2) + (virtual_stages - 1) * len(_rounds(shape)[0])
    return _num_ahead(shape, rank, 2 if program.schedule == "eager-1f1b" else 1)


def _eager_one_forward_one_backward(shape: _Shape, rank: int) -> Iterator[Action]:
    """Yield 1F1B with twice the warm-up forwards, which cover the transfers in both directions."""
    yield from _one_forward_one_backward(shape, rank, eagerness=2)


def _interleaved(shape: _Shape, rank: int) -> Iterator[Action]:
    """Yield interleaved 1F1B; with one stage per rank it equals 1F1B.

    With more stages, the warm-up is the longest round through all stages but one, and two more forwards for
    each later rank: the activation has to reach the last rank, and the gradient has to return.
    """
    if shape.virtual_stages == 1:
        yield from _one_forward_one_backward(shape, rank)
        return
    rounds = _rounds(shape)
    num_warm_up = _num_ahead(shape, rank, 2) + (shape.virtual_stages - 1) * len(rounds[0])
    forwards = _in_order(shape, rank, Kind.FORWARD, rounds)
    backwards = _in_order(shape, rank, Kind.BACKWARD, rounds)
    yield from _pair_up(forwards, backwards, num_warm_up)


def _zero_bubble(shape: _Shape, rank: int, eagerness: int = 1) -> Iterator[Action]:
    """Yield ZB-H1. Rank r delays r weight halves; with its p - r forwards in flight, every rank holds p
    micro-batches."""
    num_inputs = num_weights = 0
    for action in _one_forward_one_backward(shape, rank, eagerness):
        if action.kind is Kind.FORWARD:
            yield action
            continue
        yield Action(Kind.BACKWARD_INPUT, rank, action.micro_batch)
        num_inputs += 1
        if num_inputs - num_weights > eagerness * rank:
            yield Action(Kind.BACKWARD_WEIGHT, rank, num_weights)
            num_weights += 1
    for batch in range(num_weights, shape.num_micro_batches):
        yield Action(Kind.BACKWARD_WEIGHT, rank, batch)


def _eager_zero_bubble(shape: _Shape, rank: int) -> Iterator[Action]:
    """Yield zero-bubble with twice the forwards in flight and twice the delayed weight halves."""
    yield from _zero_bubble(shape, rank, eagerness=2)


def _zero_bubble_v(shape: _Shape, rank: int) -> Iterator[Action]:
    yield from vee(shape.num_ranks, shape.num_micro_batches)[rank]


def _dual_pipe_v(shape: _Shape, rank: int) -> Iterator[Action]:
    yield from dual_pipe(shape.num_ranks, shape.num_micro_batches, rank)


_VEE, _DUAL_PIPE = "zero-bubble-v", "dualpipe-v"
SCHEDULES: dict[str, Callable[[_Shape, int], Iterator[Action]]] = {
    "1f1b": _one_forward_one_backward,
    "eager-1f1b": _eager_one_forward_one_backward,
    "eager-zero-bubble": _eager_zero_bubble,
    "gpipe": _gpipe,
    "interleaved": _interleaved,
    "zero-bubble": _zero_bubble,
    _VEE: _zero_bubble_v,
    _DUAL_PIPE: _dual_pipe_v,
}
"""Schedules by their name in ``layout.schedule``."""

IN_A_V = frozenset({_VEE, _DUAL_PIPE})
"""Schedules in which each rank has one stage on the way down a V and one on the way up."""
_ONE_STAGE_ONLY = frozenset({"1f1b", "eager-1f1b", "zero-bubble", "eager-zero-bubble"})
