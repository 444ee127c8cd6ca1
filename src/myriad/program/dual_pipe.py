"""The DualPipeV schedule: forwards of one half of a V alternate with whole backwards of the other half.

Each rank has two stages, one on the way down and one on the way up, as in `myriad.program.vee`. Rank 1 of 2,
6 micro-batches; D and U are the two stages, F a forward, B a whole backward, I its input half, W its weight
half:

    DF0 UF0  DF1 UF1   DF2 UB0 UF2 DB0   DF3 UB1 UF3 DB1   DF4 UB2 UF4 DB2   DF5 UB3 UF5 DB3
    UB4 DB4  UI5 DI5  W W

In the steady part each forward is followed by a backward of the rank's other stage: with ``overlap.pairs``
the two are a pair, and tokens of both travel behind the compute of the other (`myriad.program.pairs`). At
both ends, where a rank waits for its neighbours, backwards are split, and weight halves fill the gaps; these
are in no pair. p ranks with m >= 2 p micro-batches idle (p - 1) / 2 forwards and hold p + 1/2
micro-batches.

Rank r with q = p - r - 1 ranks behind it:

    2 q     DF               fill the pipeline
    r + 1   DF UF
    q       UI W UF          the first gradients go on early
    m - 2 p + r + 1          DF+UB UF+DB      the steady part
    q       UB UF+DB
    r + 1   UB DB            the second half of these backwards is split
    q       W DI
    r + 1   W

With fewer than 2 p micro-batches a rank runs the program of 2 p without the actions of those that are absent,
as replicas with fewer micro-batches do (`myriad.program.build.shorten`).

Source: DualPipeV, a fold of DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2.1) with one copy of the
parameters: github.com/deepseek-ai/DualPipe.
"""

from collections import Counter, deque
from collections.abc import Iterator

from myriad.program.actions import Action, Kind

__all__ = ["dual_pipe", "num_forwards_alone"]

_DOWN, _UP = 0, 1
_FORWARD, _WHOLE, _INPUT, _WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def dual_pipe(num_ranks: int, num_micro_batches: int, rank: int) -> Iterator[Action]:
    """Yield the compute actions of one rank in one iteration."""
    stages = rank, 2 * num_ranks - 1 - rank
    done, waiting = Counter[tuple[bool, int]](), deque[Action]()
    for kind, half in _order(num_ranks, max(num_micro_batches, 2 * num_ranks), rank):
        if kind is _WEIGHT:
            action = waiting.popleft()
        else:
            key = kind is _FORWARD, half
            action = Action(kind, stages[half], done[key])
            done[key] += 1
        if kind is _INPUT:
            waiting.append(Action(_WEIGHT, action.stage, action.micro_batch))
        if action.micro_batch < num_micro_batches:
            yield action


def num_forwards_alone(num_ranks: int, rank: int) -> int:
    """Return the number of forwards before the steady part of a rank. The last rank's next one is not paired
    either: the gradient after it is the first that other ranks wait for."""
    return 3 * num_ranks - rank - 1 + (rank == num_ranks - 1 > 0)


def _order(num_ranks: int, num_micro_batches: int, rank: int) -> Iterator[tuple[Kind, int]]:
    behind = num_ranks - rank - 1
    for _ in range(2 * behind):
        yield _FORWARD, _DOWN
    for _ in range(rank + 1):
        yield from ((_FORWARD, _DOWN), (_FORWARD, _UP))
    for _ in range(behind):
        yield from ((_INPUT, _UP), (_WEIGHT, _UP), (_FORWARD, _UP))
    for _ in range(num_micro_batches - 2 * num_ranks + rank + 1):
        yield from ((_FORWARD, _DOWN), (_WHOLE, _UP), (_FORWARD, _UP), (_WHOLE, _DOWN))
    for _ in range(behind):
        yield from ((_WHOLE, _UP), (_FORWARD, _UP), (_WHOLE, _DOWN))
    for number in range(2 * (rank + 1)):
        yield (_WHOLE if number <= rank else _INPUT), number % 2 == 0
    for _ in range(behind):
        yield from ((_WEIGHT, _DOWN), (_INPUT, _DOWN))
    for _ in range(rank + 1):
        yield _WEIGHT, _DOWN
