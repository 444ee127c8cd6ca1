"""The layouts next to one: a step in one dimension, everything else as it is, or as near as is legal."""

from collections.abc import Iterator
from dataclasses import replace

from myriad.planner.costs import cut_layers
from myriad.planner.space import Candidate, Plot, Problem, is_redundant, plots
from myriad.planner.steady import num_computes
from myriad.program.build import count_chunks

__all__ = ["neighbours"]

_MOST_COMPUTES = 600_000
"""Forwards in the programs of all of them: more take tens of seconds."""
_SWITCHES = ("pipeline", "data", "optimizer")


def neighbours(problem: Problem, candidate: Candidate) -> Iterator[tuple[str, Candidate]]:
    """Each with what differs, as many as are predicted in a short time."""
    in_all = 0
    for what, other in _steps(problem, candidate):
        layout = other.layout
        if is_redundant(layout.pp, layout.virtual_stages, layout.zero):
            continue
        layers = cut_layers(problem.model, layout.partition, layout.num_stages)
        num_chunks = count_chunks(layout, other.overlap, layers)
        whole = problem.global_batch // (layout.dp * layout.micro_batch)
        in_all += num_computes(layout, num_chunks, whole)
        if in_all <= _MOST_COMPUTES:
            yield what, other


def _steps(problem: Problem, candidate: Candidate) -> Iterator[tuple[str, Candidate]]:
    every = {(plot.tp, plot.pp): plot for plot in plots(problem)}
    home = every.get((candidate.layout.tp, candidate.layout.pp))
    if home is None:
        return
    yield from _other_grids(every, home, candidate)
    yield from _other_schedules(home, candidate)
    yield from _other_sizes(home, candidate)
    yield from _other_shards(home, candidate)
    for again in problem.recomputes:
        if again != candidate.layout.recompute:
            yield f"recompute {again}", _changed(candidate, recompute=again)
    yield from _other_overlaps(home, candidate)


def _changed(candidate: Candidate, **values: object) -> Candidate:
    return replace(candidate, layout=candidate.layout.model_copy(update=values))


def _other_grids(
    every: dict[tuple[int, int], Plot], home: Plot, candidate: Candidate
) -> Iterator[tuple[str, Candidate]]:
    tps = sorted({tp for tp, pp in every if pp == home.pp})
    pps = sorted({pp for tp, pp in every if tp == home.tp})
    for tp in _beside(tps, home.tp):
        yield from _moved(every[tp, home.pp], candidate, f"tp {tp}")
    for pp in _beside(pps, home.pp):
        yield from _moved(every[home.tp, pp], candidate, f"pp {pp}")


def _moved(plot: Plot, candidate: Candidate, what: str) -> Iterator[tuple[str, Candidate]]:
    """The same schedule with as many stages in all, where there is one."""
    layout = candidate.layout
    stages = [v for name, v in plot.schedules if name == layout.schedule_name]
    if plot.pp == 1 or layout.pp == 1:
        stages = [1]
    if not stages:
        return
    v = min(stages, key=lambda v: abs(v * plot.pp - layout.num_stages))
    size = min(plot.micro_batches, key=lambda size: abs(size - layout.micro_batch))
    name = layout.schedule_name if (layout.schedule_name, v) in plot.schedules else "1f1b"
    zero, reduce = (layout.zero, layout.reduce) if plot.dp > 1 else (0, "last")
    found = _changed(
        candidate,
        dp=plot.dp,
        tp=plot.tp,
        pp=plot.pp,
        virtual_stages=v,
        schedule=name,
        micro_batch=size,
        zero=zero,
        reduce=reduce,
    )
    extra = f" x {v}" if v not in (1, layout.virtual_stages) else ""
    other_size = f", micro-batch {size}" if size != layout.micro_batch else ""
    yield f"{what}{extra}, dp {plot.dp}{other_size}", found


def _beside(values: list[int], value: int) -> list[int]:
    place = values.index(value)
    return values[max(0, place - 1) : place] + values[place + 1 : place + 2]


def _other_schedules(home: Plot, candidate: Candidate) -> Iterator[tuple[str, Candidate]]:
    layout = candidate.layout
    same = sorted(v for name, v in home.schedules if name == layout.schedule_name)
    for v in _beside(same, layout.virtual_stages) if layout.virtual_stages in same else ():
        yield f"virtual_stages {v}", _changed(candidate, virtual_stages=v)
    for name in dict.fromkeys(name for name, _ in home.schedules):
        if name == layout.schedule_name:
            continue
        stages = [v for other, v in home.schedules if other == name]
        v = min(stages, key=lambda v: abs(v - layout.virtual_stages))
        extra = f" x {v}" if v not in (1, layout.virtual_stages) else ""
        yield f"schedule {name}{extra}", _changed(candidate, schedule=name, virtual_stages=v)


def _other_sizes(home: Plot, candidate: Candidate) -> Iterator[tuple[str, Candidate]]:
    sizes = sorted(home.micro_batches)
    for size in _beside(sizes, candidate.layout.micro_batch):
        yield f"micro_batch {size}", _changed(candidate, micro_batch=size)


def _other_shards(home: Plot, candidate: Candidate) -> Iterator[tuple[str, Candidate]]:
    layout, shards = candidate.layout, list(home.shards)
    own = (layout.zero, layout.reduce)
    for zero, reduce in shards:
        near = abs(zero - layout.zero) <= 1
        if (zero, reduce) != own and near and (reduce == layout.reduce or zero == layout.zero):
            yield f"zero {zero}, reduce {reduce}", _changed(candidate, zero=zero, reduce=reduce)


def _other_overlaps(home: Plot, candidate: Candidate) -> Iterator[tuple[str, Candidate]]:
    layout, overlap = candidate.layout, candidate.overlap
    matters = {
        "tensor": layout.tp > 1,
        "pipeline": layout.pp > 1,
        "data": layout.dp > 1,
        "optimizer": layout.dp > 1 and overlap.data and layout.zero > 0,
    }
    for kind in home.tensors:
        if matters["tensor"] and kind != overlap.tensor:
            yield f"overlap.tensor {kind or 'off'}", _with_overlap(candidate, tensor=kind)
    for name in _SWITCHES:
        if matters[name]:
            value = not getattr(overlap, name)
            what = f"overlap.{name} {'on' if value else 'off'}"
            yield what, _with_overlap(candidate, **{name: value})


def _with_overlap(candidate: Candidate, **changes: object) -> Candidate:
    return replace(candidate, overlap=candidate.overlap.model_copy(update=changes))
