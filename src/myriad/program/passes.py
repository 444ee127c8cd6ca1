"""Passes: each turns a program into a faster one with the same mathematics. The checker proves every result.

    coupled     F s1 m2 B s1 m0 ............ EXCHANGE(send a1.2, send g1.0, receive a0.3) F s1 m3
    decoupled   F s1 m2 SEND(a1.2) RECEIVE(a0.3) B s1 m0 SEND(g1.0) ... WAIT(a0.3) F s1 m3

    plain       LOAD GATHER s0 F s0 GATHER s1 F s1 ... B s1 REDUCE s1       B s0 REDUCE s0      STEP
    overlapped  START s0 START s1 LOAD AWAIT s0 F s0 AWAIT s1 F s1 ...
                                    B s1 START_REDUCE s1 B s0 START_REDUCE s0 AWAIT_REDUCE s1 s0 STEP
    optimizer                                           ... CLIP UPDATE s0 START s0 UPDATE s1 START s1

    groups      B s1 START_REDUCE s1 START_ACROSS s1 B s0 START_REDUCE s0 START_ACROSS s0 AWAIT ... STEP

    matrices    CLIP  gather s0 s1   ORTHOGONALIZE s0   scatter s0   gather s2   ORTHOGONALIZE s1   scatter s1
                UPDATE s0            gather s3   ...    (each START_..., with its AWAIT_... before the use)

    one stage   GATHER s0       F s0 m0                  B s0 m0                          REDUCE s0
    two chunks  GATHER s0 s1    F s0 m0   F s1 m0        B s1 m0   REDUCE s1   B s0 m0    REDUCE s0

- `decouple` is MegaScale's pipeline overlap (arXiv 2402.15627, section 3.2): a rank sends an output without
  waiting. A receive is posted some compute actions before its use, so that the transfer overlaps with them.
- `overlap_data` is its data overlap: gathers start at the beginning of the iteration, while the batch is
  loaded, in the order in which compute needs them; reductions overlap with the backwards that follow.
- `overlap_optimizer`: a stage's new parameters are gathered while the next stage is updated. The next
  iteration's first forward waits for its own parameters only (BytePS removes the same barrier).
- `orthogonalize`: while a rank orthogonalizes its matrices of one stage, those of the next stages come to
  their owners, and the updates of the stages before return. Where many ranks share the matrices, most of them
  have none of a stage, and go on to the next ones (`stages_ahead`).
- `reduce_across`: with ``layout.shard_group``, each stage's shard of the gradients is summed across groups as
  soon as its last reduction inside the group has ended, while later backwards run.
- `cut_stages` cuts each stage into chunks, so that data-parallel communication can overlap with compute. Each
  chunk is a stage of the new program. The chunks of a stage are consecutive on the same rank, and nothing is
  sent between them. (MegaScale has one chunk per virtual stage; here the number is free.)
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from myriad.program.actions import (
    ADDS_TO_GRADIENTS,
    COMPUTE,
    MAKES_WEIGHT_GRADIENT,
    SEMANTICS,
    Action,
    Kind,
    Payload,
    PipelineTransfer,
    Program,
)
from myriad.program.config import OverlapConfig
from myriad.program.timeline import needed_transfer

__all__ = [
    "GATHER_AHEAD",
    "PlacedGathers",
    "apply_passes",
    "cut_stages",
    "decouple",
    "orthogonalize",
    "overlap_chunks",
    "overlap_data",
    "overlap_optimizer",
    "overlap_pipeline",
    "reduce_across",
    "split_at_computes",
    "stages_ahead",
]

_FEW_SHARERS, _MOST_STAGES_AHEAD = 8, 3
"""A chunk of a few layers has a matrix for each of so many ranks. With more ranks, three stages ahead let
four times as many work at once; messages of seven stages are then in flight, after activations are freed."""

GATHER_AHEAD = 2
"""Compute actions between issuing a gather and using it, with ZeRO 3. At most two chunks are whole at a
time."""
_GAP_ENDS = COMPUTE | {Kind.STEP}
_REPLACED = frozenset({Kind.GATHER, Kind.RELEASE})
"""Actions that `overlap_data` removes and inserts elsewhere."""
_MAKES = {kind: does.makes for kind, does in SEMANTICS.items() if does.makes is not None}
"""Payload that each kind of action computes."""
_REDUCE_BEHIND = 1
"""Number of compute actions for which a reduction is in flight, if gradients are reduced after each backward
to save memory."""


def apply_passes(program: Program, overlap: OverlapConfig, num_chunks: int = 1) -> Program:
    """Apply every enabled overlap to a lowered program, with each stage cut into ``num_chunks`` chunks for
    data parallelism."""
    program = overlap_chunks(overlap_pipeline(program, overlap), overlap, num_chunks)
    return overlap_optimizer(program) if overlap.optimizer else program


def overlap_pipeline(program: Program, overlap: OverlapConfig) -> Program:
    """Return a lowered program with the messages between stages decoupled, if they are to overlap."""
    return decouple(program, overlap.receive_ahead) if overlap.pipeline else program


def overlap_chunks(program: Program, overlap: OverlapConfig, num_chunks: int) -> Program:
    """Return a program with each stage cut into chunks, and their gathers and reductions overlapped if these
    are to overlap."""
    program = cut_stages(program, num_chunks)
    return overlap_data(program) if overlap.data else program


def decouple(program: Program, ahead: int = 1) -> Program:
    """Replace EXCHANGE by SEND as soon as the payload is computed, RECEIVE ``ahead`` compute actions before
    the use, and WAIT just before the use."""
    ranks = (_decoupled(program, rank, ahead) for rank in range(program.num_ranks))
    return replace(program, ranks=tuple(ranks))


def overlap_data(program: Program) -> Program:
    """Split GATHER and REDUCE into issuing and waiting, as far apart as possible. RELEASE follows the last
    use."""
    return replace(program, ranks=tuple(_overlapped(program, actions) for actions in program.ranks))


def overlap_optimizer(program: Program) -> Program:
    """Split STEP into CLIP and one UPDATE per stage, in order of first use, each followed by the stage's next
    gather."""
    return replace(program, ranks=tuple(_stepped(actions) for actions in program.ranks))


def _stepped(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    """Split STEP in one list. A gather that starts later than the beginning of the iteration (ZeRO 3) keeps
    its place."""
    step = next((at for at in reversed(range(len(actions))) if actions[at].kind is Kind.STEP), None)
    if step is None:
        return actions
    stages = dict.fromkeys([action.stage for action in actions if action.kind in COMPUTE])
    load = next((i for i, action in enumerate(actions) if action.kind is Kind.LOAD), 0)
    first = {action.stage for action in actions[:load] if action.kind is Kind.START_GATHER}
    split = [Action(Kind.CLIP)]
    for stage in stages:
        split.append(Action(Kind.UPDATE, stage))
        if stage in first:
            split.append(Action(Kind.START_GATHER, stage))
    return (*actions[:step], *split, *actions[step + 1 :])


def stages_ahead(num_sharers: int, *, offloads_state: bool) -> int:
    """Return for how many stages a rank's matrices come ahead of those that it orthogonalizes, and their
    updates return behind them. ``num_sharers``: ranks that share the matrices. ``offloads_state``: optimizer
    state is in host memory, so that each stage ahead has its state on the device."""
    return 1 if num_sharers <= _FEW_SHARERS or offloads_state else _MOST_STAGES_AHEAD


def orthogonalize(program: Program, ahead: int = 1) -> Program:
    """Insert the orthogonalization of each stage before its UPDATE. A STEP includes it. ``ahead``: from
    `stages_ahead`."""
    assert program.lowering is not None and program.lowering.training
    ranks = (tuple(_orthogonalized(actions, ahead)) for actions in program.ranks)
    lowering = replace(program.lowering, orthogonalizes=True)
    return replace(program, ranks=tuple(ranks), lowering=lowering)


def _orthogonalized(actions: Sequence[Action], ahead: int) -> Iterator[Action]:
    """Yield one list in which each stage's momentum is gathered so many stages ahead, and its update is
    awaited as many behind."""
    clip = next((at for at, action in enumerate(actions) if action.kind is Kind.CLIP), len(actions))
    yield from actions[: clip + 1]
    updates: dict[int, list[Action]] = {}
    for action in actions[clip + 1 :]:
        updates.setdefault(action.stage, []).append(action)
    stages = list(updates)
    for index in range(len(stages) + ahead):
        first = index + ahead if index else 0
        yield from (Action(Kind.START_GATHER_MOMENTUM, one) for one in stages[first : index + ahead + 1])
        for stage in stages[index : index + 1]:
            yield Action(Kind.AWAIT_GATHER_MOMENTUM, stage)
            yield Action(Kind.ORTHOGONALIZE, stage)
            yield Action(Kind.START_SCATTER_UPDATE, stage)
        for behind in stages[index - ahead : index - ahead + 1] if index >= ahead else ():
            yield Action(Kind.AWAIT_SCATTER_UPDATE, behind)
            yield from updates[behind]


_ACROSS = {
    Kind.REDUCE: Kind.REDUCE_ACROSS,
    Kind.START_REDUCE: Kind.START_REDUCE_ACROSS,
    Kind.AWAIT_REDUCE: Kind.AWAIT_REDUCE_ACROSS,
}
"""The action that follows each part of a stage's last reduction inside a group."""


def reduce_across(program: Program) -> Program:
    """Insert the sum across groups after each stage's last reduction, where that starts and where it is
    awaited."""
    assert program.lowering is not None and program.lowering.training
    ranks = (tuple(_across(actions)) for actions in program.ranks)
    lowering = replace(program.lowering, across=True)
    return replace(program, ranks=tuple(ranks), lowering=lowering)


def _across(actions: Sequence[Action]) -> Iterator[Action]:
    last = {(action.kind, action.stage): index for index, action in enumerate(actions)}
    for index, action in enumerate(actions):
        yield action
        if action.kind in _ACROSS and last[action.kind, action.stage] == index:
            yield Action(_ACROSS[action.kind], action.stage)


def _overlapped(program: Program, actions: Sequence[Action]) -> tuple[Action, ...]:
    assert program.lowering is not None
    zero = program.lowering.zero
    gaps = split_at_computes(actions)
    spans, releases = _whole_spans(gaps) if zero >= 1 else {}, zero == 3
    placed = PlacedGathers(
        len(gaps),
        spans,
        releases=releases,
        earliest=lambda gap: max(0, gap - GATHER_AHEAD) if releases else 0,
    )
    for index, stage, next_sum in _reduces(gaps):
        latest = index + _REDUCE_BEHIND if program.lowering.reduce == "each" else len(gaps)
        placed.waits[min(next_sum, latest)].append(Action(Kind.AWAIT_REDUCE, stage))
    found: list[Action] = []
    for gap, released, starts, waits in zip(gaps, placed.released, placed.starts, placed.waits, strict=True):
        found += released
        found += starts
        _add_overlapped(found, gap, waits)
    return tuple(found)


class PlacedGathers:
    """Gathers of parameters, and what frees them, for each gap of a list."""

    def __init__(
        self,
        num_gaps: int,
        spans: Mapping[int, Sequence[tuple[int, int]]],
        *,
        releases: bool,
        earliest: Callable[[int], int] | None,
    ) -> None:
        """``spans``: the intervals in which a stage's parameters must be whole, as the first and the last
        gap; in order of first use. ``releases``: free them after each interval (ZeRO 3). ``earliest``: the
        gap, at least 0, from which a gather may be issued that is needed in another one; ``None``: it is
        issued where it is needed."""
        self.released: list[list[Action]] = [[] for _ in range(num_gaps)]
        self.starts: list[list[Action]] = [[] for _ in range(num_gaps)]
        self.waits: list[list[Action]] = [[] for _ in range(num_gaps)]
        needed = Kind.GATHER if earliest is None else Kind.AWAIT_GATHER
        for stage, own in spans.items():
            end = 0
            for first, last in own:
                if earliest is not None:
                    self.starts[max(end, earliest(first))].append(Action(Kind.START_GATHER, stage))
                self.waits[first].append(Action(needed, stage))
                if releases:
                    end = last + 1
                    self.released[end].append(Action(Kind.RELEASE, stage))


def _whole_spans(gaps: list[list[Action]]) -> dict[int, list[tuple[int, int]]]:
    """Return for each stage, in order of first use, the intervals in which its parameters must be whole, as
    first and last compute action."""
    spans: dict[int, list[tuple[int, int]]] = {}
    gathered: set[int] = set()
    for index, gap in enumerate(gaps):
        gathered.update(action.stage for action in gap if action.kind is Kind.GATHER)
        if not gap or gap[-1].kind not in COMPUTE:
            continue
        stage = gap[-1].stage
        own = spans.setdefault(stage, [])
        if own and stage not in gathered:
            own[-1] = (own[-1][0], index)
        else:
            own.append((index, index))
        gathered.discard(stage)
    return spans


def _reduces(gaps: list[list[Action]]) -> list[tuple[int, int, int]]:
    """Return for each reduction its gap, its stage, and the gap of the next compute action that adds to that
    stage's gradients. That gap is the last one if no such action follows."""
    next_sum: dict[int, int] = {}
    found = []
    for index in reversed(range(len(gaps))):
        gap = gaps[index]
        if gap and gap[-1].kind in ADDS_TO_GRADIENTS:
            next_sum[gap[-1].stage] = index
        for action in reversed(gap):
            if action.kind is Kind.REDUCE:
                found.append((index, action.stage, next_sum.get(action.stage, len(gaps) - 1)))
    return found[::-1]


def _add_overlapped(found: list[Action], gap: list[Action], waits: list[Action]) -> None:
    """Add one gap: gathers start before the batch is loaded, and waits come just before the compute action or
    the step."""
    ends = []
    for action in gap:
        if action.kind in _GAP_ENDS:
            ends.append(action)
        elif action.kind is Kind.REDUCE:
            found.append(Action(Kind.START_REDUCE, action.stage))
        elif action.kind not in _REPLACED:
            found.append(action)
    found += waits
    found += ends


def _decoupled(program: Program, rank: int, ahead: int) -> tuple[Action, ...]:
    """Decouple one rank's list, gap by gap. A gap is the actions before a compute action, with that compute
    action at its end."""
    gaps = split_at_computes(program.ranks[rank])
    uses = _uses(program, gaps)
    received = [t for gap in gaps for a in gap if a.kind is Kind.EXCHANGE for t in a.transfers if not t.sends]
    posts: list[list[PipelineTransfer]] = [[] for _ in gaps]
    waits: list[list[PipelineTransfer]] = [[] for _ in gaps]
    earliest = dict.fromkeys((t.peer for t in received), len(gaps))
    for transfer in reversed(received):
        use = uses[transfer.payload, transfer.stage, transfer.micro_batch]
        earliest[transfer.peer] = min(earliest[transfer.peer], max(0, use - ahead))
        posts[earliest[transfer.peer]].insert(0, transfer)
        waits[use].append(transfer)
    found: list[Action] = []
    for part in zip(gaps, _sends(gaps), posts, waits, strict=True):
        _add_rewritten(found, *part)
    return tuple(found)


def _sends(gaps: list[list[Action]]) -> list[list[PipelineTransfer]]:
    """Return the sends of each gap: each payload is sent as soon as it is computed.

    If that would change the order of sends to a peer, the sends to that peer keep their places, because the
    peer receives in that order. This happens between two ranks that send each other both payloads.
    """
    made: dict[tuple[Payload, int, int], int] = {}
    was: defaultdict[int, list[tuple[int, PipelineTransfer]]] = defaultdict(list)
    for index, gap in enumerate(gaps):
        for action in gap:
            if payload := _MAKES.get(action.kind):
                made[payload, action.stage, action.micro_batch] = index + 1
            for transfer in action.transfers if action.kind is Kind.EXCHANGE else ():
                if transfer.sends:
                    was[transfer.peer].append((index, transfer))
    sends: list[list[PipelineTransfer]] = [[] for _ in gaps]
    for placed in was.values():
        soonest = [made[t.payload, t.stage, t.micro_batch] for _, t in placed]
        moves = soonest == sorted(soonest)
        for (index, transfer), soon in zip(placed, soonest, strict=True):
            sends[soon if moves else index].append(transfer)
    return sends


def split_at_computes(actions: Sequence[Action]) -> list[list[Action]]:
    """Split a list into gaps. Each gap but the last ends with a compute action, which follows the gap's other
    actions."""
    gaps: list[list[Action]] = [[]]
    for action in actions:
        gaps[-1].append(action)
        if action.kind in COMPUTE:
            gaps.append([])
    return gaps


def _uses(program: Program, gaps: list[list[Action]]) -> dict[tuple[Payload, int, int], int]:
    """Return the gap of the compute action that uses each payload."""
    uses = {}
    for index, gap in enumerate(gaps[:-1]):
        if needed := needed_transfer(program, gap[-1]):
            uses[needed[0], needed[1], gap[-1].micro_batch] = index
    return uses


def _add_rewritten(
    found: list[Action],
    gap: list[Action],
    sends: list[PipelineTransfer],
    posts: list[PipelineTransfer],
    waits: list[PipelineTransfer],
) -> None:
    """Add a gap with receives before sends: some transports lose half their bandwidth otherwise."""
    found.extend([Action(Kind.RECEIVE, transfers=(t,)) for t in posts])
    others, computes = [], []
    for action in gap:
        if action.kind in COMPUTE:
            computes.append(action)
        elif action.kind is Kind.LOAD:
            found.append(action)
        elif action.kind is not Kind.EXCHANGE:
            others.append(action)
    found.extend([Action(Kind.SEND, transfers=(t,)) for t in sends])
    found += others
    found.extend([Action(Kind.WAIT, transfers=(t,)) for t in waits])
    found += computes


def cut_stages(program: Program, num_chunks: int) -> Program:
    """Replace stage s by stages ``s x num_chunks`` to ``(s + 1) x num_chunks - 1`` of the same rank."""
    if num_chunks == 1:
        return program
    ranks = (tuple(_cut_rank(program, actions, num_chunks)) for actions in program.ranks)
    owners = (rank for rank in program.stage_rank for _ in range(num_chunks))
    return replace(program, stage_rank=tuple(owners), ranks=tuple(ranks))


def _cut_rank(program: Program, actions: Sequence[Action], num_chunks: int) -> Iterator[Action]:
    reduced = _reduced(actions)
    ends = {0: 0, program.num_stages - 1: num_chunks - 1} if program.syncs_tied else {}
    for index, action in enumerate(actions):
        chunks = range(action.stage * num_chunks, (action.stage + 1) * num_chunks)
        tied = chunks[ends[action.stage]] if action.stage in ends else None
        if action.kind in COMPUTE:
            for chunk in chunks if action.kind is Kind.FORWARD else reversed(chunks):
                yield Action(action.kind, chunk, action.micro_batch)
                if index in reduced and chunk != tied:
                    yield Action(Kind.REDUCE, chunk)
        elif action.kind is Kind.REDUCE:
            if tied is not None and index in reduced.values():
                yield Action(Kind.REDUCE, tied)
        elif action.kind is Kind.SYNC_TIED:
            assert tied is not None
            yield Action(Kind.SYNC_TIED, tied)
        elif action.stage >= 0:
            yield from (Action(action.kind, chunk, action.micro_batch) for chunk in chunks)
        else:
            yield Action(action.kind, transfers=tuple(_cut_transfer(t, num_chunks) for t in action.transfers))


def _reduced(actions: Sequence[Action]) -> dict[int, int]:
    """Map each compute action whose gradients are reduced before its stage's next backward to the index of
    that REDUCE."""
    latest: dict[int, int] = {}
    found = {}
    for index, action in enumerate(actions):
        if action.kind in MAKES_WEIGHT_GRADIENT:
            latest[action.stage] = index
        elif action.kind is Kind.REDUCE:
            found[latest[action.stage]] = index
    return found


def _cut_transfer(transfer: PipelineTransfer, num_chunks: int) -> PipelineTransfer:
    """Renumber a transfer: an activation is sent by a stage's last chunk, a gradient by its first."""
    offset = num_chunks - 1 if transfer.payload is Payload.ACTIVATION else 0
    stage = transfer.stage * num_chunks + offset
    return PipelineTransfer(transfer.payload, stage, transfer.micro_batch, transfer.peer, transfer.sends)
