"""What reduces hash conflicts: the given case beside variants that each change one thing.

split        uplinks of twice the rate; and half as many of those, with the same total capacity
queue pairs  4 and 16 times as many queue pairs for each flow
adaptive     each flow takes the least loaded link that its switch sees
spray        packet by packet over all links
placement    the other placements of rings; at one switch: a quarter of the flows go up
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from myriad.errors import BadInputError
from myriad.network.config import FabricShape
from myriad.network.fabric import Fabric, Flows
from myriad.network.hash_conflicts import (
    MOST_BALLS,
    Conflicts,
    SampledConflicts,
    conflicts,
    node_order,
    ring_flows,
    sample_conflicts,
)
from myriad.network.routing import Routes

__all__ = ["EcmpRow", "FabricStudy", "SwitchStudy", "advice", "curves", "fabric_rows", "switch_rows"]

_MORE = (4, 16)
_FEW_DRAWS = 3
"""Draws of variants that hardly differ between draws and take long."""
_GAIN = 0.02
"""Smallest gain in the rate of a flow that is reported."""


@dataclass(frozen=True)
class EcmpRow:
    """Hash conflicts of one variant; ratios of the rate that a flow has alone."""

    name: str
    slowest_ratio: float
    """One switch: the expected value. A fabric: the median of the draws."""
    low_ratio: float
    """5th percentile of the draws; for one switch the same as slowest_ratio."""
    high_ratio: float
    """95th percentile of the draws."""
    mean_ratio: float
    held_up_ratio: float
    """Share of the flows below their full rate."""
    conflict_probability: float
    """Probability of at least one conflict."""
    is_asked: bool = False


@dataclass(frozen=True)
class SwitchStudy:
    """Flows that leave one switch by its uplinks."""

    num_flows: int
    num_uplinks: int
    split: int = 1
    queue_pairs: int = 1


def switch_rows(question: SwitchStudy) -> list[EcmpRow]:
    """Return the exact rows of the given case and its variants. Raises `BadInputError`."""
    n, m = question.num_flows, question.num_uplinks
    split, pairs = question.split, question.queue_pairs
    rows = [_switch_row("baseline", conflicts(n, m, split=split, queue_pairs=pairs), is_asked=True)]
    wide = conflicts(n, m, split=2 * split, queue_pairs=pairs)
    rows.append(_switch_row(f"split {2 * split}, as many uplinks", wide))
    if m >= 2:
        half = conflicts(n, m // 2, split=2 * split, queue_pairs=pairs)
        rows.append(_switch_row(f"split {2 * split}, {m // 2} uplinks", half))
    for more in _MORE:
        if n * pairs * more > MOST_BALLS:
            break
        found = conflicts(n, m, split=split, queue_pairs=pairs * more)
        rows.append(_switch_row(f"{pairs * more} queue pairs a flow", found))
    rows.append(_switch_row("adaptive routing", conflicts(n, m, split=split, rule="adaptive")))
    rows.append(_switch_row("packet spraying", conflicts(n, m, split=split, rule="spray")))
    if n >= 4:
        few = conflicts(n // 4, m, split=split, queue_pairs=pairs)
        rows.append(_switch_row(f"placement: {n // 4} flows go up", few))
    return rows


def _switch_row(name: str, found: Conflicts, *, is_asked: bool = False) -> EcmpRow:
    slowest = found.slowest_ratio
    rest = (found.mean_ratio, found.flow_probability, found.conflict_probability)
    return EcmpRow(name, slowest, slowest, slowest, *rest, is_asked)


def curves(question: SwitchStudy, points: int = 24) -> dict[str, list[tuple[float, float]]]:
    """Return the slowest flow's share by the number of flows, up to twice the given number or as many as the
    uplinks carry."""
    most = max(2 * question.num_flows, question.num_uplinks * question.split)
    counts = sorted({max(1, round(x)) for x in np.linspace(1, most, points)})
    variants = {
        "baseline": question,
        f"split {2 * question.split}": replace(question, split=2 * question.split),
    }
    for more in _MORE:
        pairs = more * question.queue_pairs
        if most * pairs <= MOST_BALLS:
            variants[f"{pairs} queue pairs"] = replace(question, queue_pairs=pairs)
    return {name: [(count, _slowest(each, count)) for count in counts] for name, each in variants.items()}


def _slowest(question: SwitchStudy, num_flows: int) -> float:
    split, pairs = question.split, question.queue_pairs
    return conflicts(num_flows, question.num_uplinks, split=split, queue_pairs=pairs).slowest_ratio


@dataclass(frozen=True)
class FabricStudy:
    """Rings over all nodes of a fabric, or the flows of a job on it."""

    build: Callable[[FabricShape], Fabric]
    shape: FabricShape
    placement: str = "packed"
    ring_nodes: int | None = None
    """Nodes of a ring. Default: all nodes."""
    queue_pairs: int = 1
    draws: int = 20
    seed: int = 0
    place_flows: Callable[[Routes, str, int], Flows] | None = None
    """Returns the flows under a placement, which may be drawn from a seed. Default: the rings."""

    def flows(self, routes: Routes) -> Flows:
        """Return the flows on a fabric. Raises `BadInputError` for an unknown placement."""
        if self.place_flows is not None:
            return self.place_flows(routes, self.placement, self.seed)
        order = node_order(routes, self.placement, self.seed)
        return ring_flows(routes.fabric, order, self.ring_nodes or len(order))


def fabric_rows(
    question: FabricStudy, report_progress: Callable[[str, float], None] = lambda what, done: None
) -> list[EcmpRow]:
    """Return rows of the given case and its variants, each sampled over seeds. ``report_progress`` receives
    the name of the next variant and the share that is done. Raises `BadInputError`."""
    routes, variants, rows = Routes(question.build(question.shape)), list(_variants(question)), []
    for number, (name, changed, rule) in enumerate(variants):
        report_progress(name, number / len(variants))
        own = routes if changed.shape is question.shape else _other_routes(changed)
        if own is None:
            continue
        given = {"queue_pairs": changed.queue_pairs, "draws": changed.draws, "seed": changed.seed}
        found = sample_conflicts(own, changed.flows(own), rule=rule, **given)  # type: ignore[arg-type]
        rows.append(_fabric_row(name, found, changed is question and rule == "hash"))
    return rows


def _other_routes(question: FabricStudy) -> Routes | None:
    """Return the routes of another fabric, or ``None`` if switches with its ports cannot connect the
    nodes."""
    try:
        return Routes(question.build(question.shape))
    except BadInputError:
        return None


def _variants(question: FabricStudy) -> Iterator[tuple[str, FabricStudy, str]]:
    """Yield the given case and variants that each change one thing: name, question and routing rule."""
    yield "baseline", question, "hash"
    if (name_and_shape := _other_split(question.shape)) is not None:
        name, shape = name_and_shape
        yield name, replace(question, shape=shape), "hash"
    few = replace(question, draws=min(question.draws, _FEW_DRAWS))
    for pairs in (question.queue_pairs * more for more in _MORE):
        yield f"{pairs} queue pairs a flow", replace(few, queue_pairs=pairs), "hash"
    yield "all switches hash as one", question, "alike"
    yield "adaptive routing", question, "adaptive"
    yield "packet spraying", few, "spray"
    for placement in ("packed", "spread", "random"):
        if placement != question.placement:
            yield f"placement {placement}", replace(question, placement=placement), "hash"


def _fabric_row(name: str, found: SampledConflicts, is_asked: bool) -> EcmpRow:
    low, middle, high = np.percentile(found.slowest_ratio, [5, 50, 95])
    return EcmpRow(
        name=name,
        slowest_ratio=float(middle),
        low_ratio=float(low),
        high_ratio=float(high),
        mean_ratio=float(found.mean_ratio.mean()),
        held_up_ratio=float(found.held_up_ratio.mean()),
        conflict_probability=float((found.held_up_ratio > 0).mean()),
        is_asked=is_asked,
    )


def _other_split(shape: FabricShape) -> tuple[str, FabricShape] | None:
    """Return a shape with the same uplink capacity: with split ports, more uplinks of the NIC ports' rate;
    else half as many of twice the rate."""
    if shape.kind == "graph" or shape.port_bytes_per_second is None or shape.ports_per_switch is None:
        return None
    whole, ports = shape.port_bytes_per_second, shape.ports_per_switch
    if shape.split == 1:
        changed = {"split": 2, "port_bytes_per_second": 2 * whole, "ports_per_switch": ports // 2}
        return "split 2, half the uplinks", shape.model_copy(update=changed)
    each = whole / shape.split
    changed = {"split": 1, "port_bytes_per_second": each, "ports_per_switch": ports * shape.split}
    return "no split, more uplinks", shape.model_copy(update=changed)


def advice(rows: Sequence[EcmpRow]) -> str:
    """Return a sentence on what helps most."""
    asked = next(row for row in rows if row.is_asked)
    if asked.slowest_ratio >= 1 - _GAIN:
        return f"Little to gain: the slowest flow has {asked.slowest_ratio:.2f} of its rate."
    helps = sorted(
        (row for row in rows if row.slowest_ratio > asked.slowest_ratio + _GAIN),
        key=lambda row: -row.slowest_ratio,
    )
    if not helps:
        return f"The slowest flow has {asked.slowest_ratio:.2f} of its rate, and nothing tried here helps."
    remedies = "; ".join(f"{row.name} {row.slowest_ratio:.2f}" for row in helps)
    return f"The slowest flow has {asked.slowest_ratio:.2f} of its rate. What helps, most first: {remedies}."
