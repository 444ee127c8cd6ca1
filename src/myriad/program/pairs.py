"""The pass that pairs the forward of one micro-batch with the backward of another (``overlap.pairs``).

Where ranks share experts, tokens travel in each forward and gradients in each backward. Two compute actions
in a pair run at the same time (`myriad.parallel.paired_forward`): what one sends travels while the other
computes. That is the overlap of DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2.1) and of Megatron-Core
(``--overlap-moe-expert-parallel-comm``, also called combined 1F1B):

    1f1b        F0  F1  B0  F2  B1  F3  B2  B3         one more forward in flight than without pairs
    in pairs    F0  F1+B0   F2+B1   F3+B2   B3

Schedules write one more forward at the start (`myriad.program.schedules.schedule`), so that a forward comes
directly before the backward of an older micro-batch. This pass is the last one. It finds such neighbours and
makes a pair of each two chunks, the first of the forward with the last of the backward:

    F s0 m1   F s1 m1   B s1 m0   B s0 m0    ->    F s0 m1 + B s1 m0   F s1 m1 + B s0 m0

What came between two compute actions comes before the pair, and the send of the forward's output after it.
A pair is atomic: other ranks wait for both outputs until its end. In a pipeline, forwards must therefore run
further ahead than in 1F1B, where each rank would wait for every other pair (`myriad.comm.layout`).

With ZeRO 3 the parameters of both chunks are gathered before a pair, and released when the rank goes on to
other stages.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice

from myriad.program.actions import (
    COMPUTE,
    SEMANTICS,
    Action,
    Collective,
    Kind,
    Payload,
    Program,
    Resource,
    kinds_where,
)
from myriad.program.passes import GATHER_AHEAD, PlacedGathers, split_at_computes
from myriad.program.schedules import num_alone

__all__ = ["pair_computes"]

_MOVES_PARAMETERS = kinds_where(
    lambda does: Collective.GATHER in (does.starts, does.ends) or Resource.PARAMETERS in does.frees
)
"""Actions that make a stage's parameters whole, or free them."""


def pair_computes(program: Program, num_chunks: int = 1) -> Program:
    """Pair each stage's forward with the backward of another micro-batch that follows it. ``num_chunks``:
    chunks of each stage."""
    alone = (
        num_alone(program, program.virtual_stages // num_chunks, rank) for rank in range(program.num_ranks)
    )
    lowering = program.lowering
    gathers = lowering is not None and lowering.zero == 3
    ranks = (
        _gathered(actions, num_chunks, first) if gathers else tuple(_paired(actions, num_chunks, first))
        for actions, first in zip(program.ranks, alone, strict=True)
    )
    return replace(program, ranks=tuple(ranks))


def _gathered(actions: Sequence[Action], num_chunks: int, num_first: int) -> tuple[Action, ...]:
    """Return one rank's list in pairs, in which parameters are gathered and released as pairs use them."""
    end = next(at for at, action in enumerate(actions) if action.kind in (Kind.CLIP, Kind.STEP))
    plain, updated = list[Action](), set[int]()
    for action in actions[:end]:
        if action.kind is Kind.UPDATE:
            updated.add(action.stage)
        # what is gathered after an update is for the next iteration
        if action.kind not in _MOVES_PARAMETERS or action.stage in updated:
            plain.append(action)
    overlaps = any(action.kind is Kind.AWAIT_GATHER for action in actions)
    units = _units(_paired(plain, num_chunks, num_first))
    ends = list(accumulate((_num_computes(unit) for unit in units), initial=0))

    def earliest(unit: int) -> int:
        return bisect_right(ends, max(0, ends[unit] - GATHER_AHEAD)) - 1

    placed = PlacedGathers(
        len(units), _whole_spans(units, num_chunks), releases=True, earliest=earliest if overlaps else None
    )
    found: list[Action] = []
    for unit, released, starts, waits in zip(
        units, placed.released, placed.starts, placed.waits, strict=True
    ):
        middle = len(unit) - _num_computes(unit)
        found += [*released, *starts, *unit[:middle], *waits, *unit[middle:]]
    return (*found, *actions[end:])


def _units(actions: Iterable[Action]) -> list[list[Action]]:
    """Split a list into what comes up to each compute action or pair, and the rest."""
    units: list[list[Action]] = [[]]
    for action in actions:
        units[-1].append(action)
        if action.kind in COMPUTE and SEMANTICS[action.kind].pairs != "opens":
            units.append([])
    return units


def _num_computes(unit: Iterable[Action]) -> int:
    return sum(action.kind in COMPUTE for action in unit)


def _whole_spans(units: Sequence[Sequence[Action]], num_chunks: int) -> dict[int, list[tuple[int, int]]]:
    """Return for each chunk, in order of first use, the intervals in which its parameters must be whole, as
    the first and the last unit. As without pairs they stay whole between two uses where the rank computes
    with each unit's chunks of the same stage of the layout."""
    spans: dict[int, list[tuple[int, int]]] = {}
    since: dict[int, int] = {}
    before: set[int] = set()
    for index, unit in enumerate(units):
        chunks = [action.stage for action in unit if action.kind in COMPUTE]
        now = {chunk // num_chunks for chunk in chunks}
        since |= dict.fromkeys(now - before, index)
        for chunk in dict.fromkeys(chunks):
            own = spans.setdefault(chunk, [])
            if own and own[-1][1] >= since[chunk // num_chunks]:
                own[-1] = own[-1][0], index
            else:
                own.append((index, index))
        before = now
    return spans


_Gaps = Sequence[Sequence[Action]]
"""Actions up to a compute action, which is the last of each."""


def _paired(actions: Sequence[Action], num_chunks: int, num_first: int) -> Iterator[Action]:
    """Yield one rank's list, in which the first ``num_first`` forwards of stages are in no pair: the next
    rank needs them for its first gradient."""
    gaps, index = split_at_computes(actions), _index_after(actions, num_first * num_chunks)
    yield from (action for gap in gaps[:index] for action in gap)
    while index < len(gaps):
        middle, end = index + num_chunks, index + 2 * num_chunks
        forwards, backwards = gaps[index:middle], gaps[middle:end]
        runs = _is_run(forwards, Kind.FORWARD, num_chunks) and _is_run(backwards, Kind.BACKWARD, num_chunks)
        if runs and _is_pair(forwards[-1][-1], backwards[0]):
            yield from _pairs(forwards, backwards)
            index = end
        else:
            yield from gaps[index]
            index += 1


def _index_after(actions: Sequence[Action], num_forwards: int) -> int:
    """Return the index of the compute action after so many forwards, or the number of compute actions."""
    computes = [action for action in actions if action.kind in COMPUTE]
    places = (index for index, action in enumerate(computes) if action.kind is Kind.FORWARD)
    return next(islice(places, num_forwards, None), len(computes))


def _is_run(gaps: _Gaps, kind: Kind, num_chunks: int) -> bool:
    """Return whether the gaps end with the chunks of one stage of the layout, for one micro-batch."""
    computes = [gap[-1] for gap in gaps if gap and gap[-1].kind is kind]
    where = {(action.stage // num_chunks, action.micro_batch) for action in computes}
    return len(computes) == num_chunks and len(where) == 1


def _is_pair(forward: Action, gap: Sequence[Action]) -> bool:
    """Return whether a forward may run inside the backward at the end of the next gap: not inside its own,
    and not if the ranks wait for its output in between."""
    backward = gap[-1]
    is_own = (forward.stage, forward.micro_batch) == (backward.stage, backward.micro_batch)
    return not is_own and not any(action.kind is Kind.EXCHANGE for action in gap)


def _pairs(forwards: _Gaps, backwards: _Gaps) -> Iterator[Action]:
    output = forwards[-1][-1]
    sends = [action for action in backwards[0] if _sends_output(action, output)]
    # the gradients that a backward adds to must be reduced, and the backward is now before other forwards
    reduced = [action for gap in forwards[1:] for action in gap if action.kind is Kind.AWAIT_REDUCE]
    moved = {*sends, *reduced}
    for index, (before, then) in enumerate(zip(forwards, backwards, strict=True)):
        first, second = (before, then) if index == 0 else (then, before)
        for gap in (first, second):
            yield from (action for action in gap[:-1] if action not in moved)
        if index == 0:
            yield from reduced
        forward, backward = before[-1], then[-1]
        yield Action(Kind.PAIRED_FORWARD, forward.stage, forward.micro_batch)
        yield Action(Kind.PAIRED_BACKWARD, backward.stage, backward.micro_batch)
    yield from sends


def _sends_output(action: Action, forward: Action) -> bool:
    name = (Payload.ACTIVATION, forward.stage, forward.micro_batch)
    return action.kind is Kind.SEND and any(
        (one.payload, one.stage, one.micro_batch) == name for one in action.transfers
    )
