"""Passes that keep activations or optimizer state in host memory while no action needs them.

Without the copies (F, B: forward and backward of a micro-batch in chunks 0 to 3 of a stage):

    F s0   F s1   F s2   F s3   B s3   B s2   B s1   B s0

`offload_activations` inserts two copies of what a chunk keeps: to host memory after its forward, and back
before its backward. Each has ``ahead`` compute actions to complete, here one:

    F s0   START_OFFLOAD s0   F s1   AWAIT_OFFLOAD s0   ...   START_FETCH s0   B s1   AWAIT_FETCH s0   B s0

A backward that follows its forward too soon for both copies (s2 and s3 above) keeps its activations on the
device: the copies would free nothing.

`offload_state` does the same around the optimizer's updates. A rank has the state of few stages on the device
at once: one that is updated, the next one on its way in, the previous one on its way out.

    START_FETCH_STATE s0  B s0  CLIP  START_FETCH_STATE s1  AWAIT_FETCH_STATE s0  UPDATE s0
    START_OFFLOAD_STATE s0  START_FETCH_STATE s2  AWAIT_FETCH_STATE s1  UPDATE s1  START_OFFLOAD_STATE s1 ...

(Ren et al., ZeRO-Offload, arXiv 2101.06840, keeps the state on the host and updates it there; here the device
updates it, so that results are the same bits.)
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from myriad.program.actions import COMPUTE, SEMANTICS, Action, Kind, Program, Resource, kinds_where
from myriad.program.partition import num_recomputed
from myriad.program.passes import split_at_computes

__all__ = ["offload_activations", "offload_state"]

_BACKWARDS = kinds_where(lambda does: does.computes and Resource.ACTIVATIONS in does.frees)
_ON_DEVICE = 3
"""Stages whose state is on the device at once with AdamW: coming, in use, leaving."""
_ORTHOGONALIZED = 2
"""Further stages with Muon, whose state is in use from the gather of its momentum to the update."""


def offload_activations(program: Program, ratio: float, num_chunks: int, ahead: int) -> Program:
    """Insert the copies of activations into a lowered training program. ``ratio``: share of the
    ``num_chunks`` chunks of each stage, from the first. ``ahead``: compute actions that overlap with each
    copy."""
    stages = _first_chunks(program, ratio, num_chunks)
    ranks = (tuple(_with_copies(actions, stages, ahead)) for actions in program.ranks)
    return replace(program, ranks=tuple(ranks))


def _first_chunks(program: Program, ratio: float, num_chunks: int) -> frozenset[int]:
    """Return the stages of a program that are the first chunks of a stage of the layout, a share of them."""
    count = num_recomputed(num_chunks, ratio)
    return frozenset(stage for stage in range(program.num_stages) if stage % num_chunks < count)


def _with_copies(actions: Sequence[Action], stages: Collection[int], ahead: int) -> Iterator[Action]:
    gaps = split_at_computes(actions)
    freed, leaving, coming, there = ([list[Action]() for _ in gaps] for _ in range(4))
    forwards: dict[tuple[int, int], int] = {}
    for index, gap in enumerate(gaps[:-1]):
        where = gap[-1].stage, gap[-1].micro_batch
        if gap[-1].kind is Kind.FORWARD:
            forwards[where] = index
        elif gap[-1].kind in _BACKWARDS and gap[-1].stage in stages:
            begin, end = forwards[where] + 1, index - ahead
            if end > begin + ahead:
                leaving[begin].append(Action(Kind.START_OFFLOAD, *where))
                freed[begin + ahead].append(Action(Kind.AWAIT_OFFLOAD, *where))
                coming[end].append(Action(Kind.START_FETCH, *where))
                there[index].append(Action(Kind.AWAIT_FETCH, *where))
    for index, gap in enumerate(gaps):
        last = len(gap) - 1 if gap and gap[-1].kind in COMPUTE else len(gap)
        yield from leaving[index] + freed[index] if ahead == 0 else freed[index] + leaving[index]
        yield from (*gap[:last], *coming[index], *there[index], *gap[last:])


def offload_state(program: Program, ratio: float, num_chunks: int, *, overlaps: bool) -> Program:
    """Insert the copies of optimizer state into a training program that updates stage by stage. ``ratio``:
    share of the ``num_chunks`` chunks of each stage, from the first. ``overlaps``: copy while other stages
    are updated."""
    lowering = program.lowering
    assert lowering is not None and lowering.training
    most = (_ON_DEVICE if overlaps else 1) + (_ORTHOGONALIZED if lowering.orthogonalizes else 0)
    stages = _first_chunks(program, ratio, num_chunks)
    ranks = (tuple(_with_state(actions, stages, overlaps, most)) for actions in program.ranks)
    lowering = replace(lowering, states_on_device=most, states_on_host=stages)
    return replace(program, ranks=tuple(ranks), lowering=lowering)


def _with_state(
    actions: Sequence[Action], stages: Collection[int], overlaps: bool, most: int
) -> Iterator[Action]:
    """Yield one list with the copies. The state of one of the ``stages`` is on the device from its first use
    on, a gather of momentum or the update."""
    uses = {stage: index for stage, index in _first_uses(actions).items() if stage in stages}
    starts: dict[int, int] = {}
    """Stage whose copy to the device starts before each index."""
    for number, (stage, index) in enumerate(uses.items()):
        before = list(uses.values())[number - 1] if number else _last_compute(actions, index)
        starts[before if overlaps else index] = stage
    first = {index: stage for stage, index in uses.items()}
    here: list[int] = []
    leaving: list[int] = []
    for index, action in enumerate(actions):
        if index in starts:
            while len(here) + len(leaving) >= most:
                yield Action(Kind.AWAIT_OFFLOAD_STATE, leaving.pop(0))
            here.append(starts[index])
            yield Action(Kind.START_FETCH_STATE, starts[index])
        if index in first:
            yield Action(Kind.AWAIT_FETCH_STATE, first[index])
        yield action
        if SEMANTICS[action.kind].updates and action.stage in uses:
            here.remove(action.stage)
            leaving.append(action.stage)
            yield Action(Kind.START_OFFLOAD_STATE, action.stage)
    yield from (Action(Kind.AWAIT_OFFLOAD_STATE, stage) for stage in leaving)


def _first_uses(actions: Sequence[Action]) -> dict[int, int]:
    """Return the index of the first action that uses each stage's state, in the order of these indices."""
    found: dict[int, int] = {}
    for index, action in enumerate(actions):
        assert action.kind is not Kind.STEP, "a job's rule"
        if action.kind in (Kind.START_GATHER_MOMENTUM, Kind.UPDATE):
            found.setdefault(action.stage, index)
    return found


def _last_compute(actions: Sequence[Action], before: int) -> int:
    """Return the index of the last compute action before an index, or the index itself."""
    return next((at for at in range(before - 1, -1, -1) if actions[at].kind in COMPUTE), before)
