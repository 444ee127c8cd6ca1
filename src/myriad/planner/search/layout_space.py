"""All layouts with which a model can be trained on a number of accelerators, as the runtime accepts them.

    tp            divides the heads, the MLP's width and the sequence
    cp            for sequences of `LONG` positions or more, or where it is given: divides the sequence into
                  parts of `_FEWEST_POSITIONS` or more; in rows of one rank or as many as a node and the heads
                  allow (ulysses)
    pp            any divisor of the rest, up to a stage for each layer, embedding and head
    stages        of a pipeline rank: each number up to 128, above it the fewest for each size of a stage
    dp            the rest; it divides the batch, and replicas are on nodes as comm.hierarchy needs it
    ep, etp       with experts: etp is 1 or tp, or any divisor of a given tp; ep divides the experts and
                  dp x cp x tp / etp
    micro_batch   divides a replica's share of the batch
    schedule      `interleaved` with one stage a rank is 1f1b; on one pipeline rank all schedules of one stage
                  are the same, and several stages differ only under ZeRO 3, which gathers them one at a
                  time (`is_redundant`)
    zero, reduce  with one replica there is nothing to shard
    shard_group   with ZeRO: all replicas, those of a node, or those under a switch
    overlaps      each switch only where it changes the program

`LayoutProblem.fixed` holds the layout keys that the job gives: only layouts with these values are searched.

A `LayoutGrid` is the part with one (tp, pp, cp, ulysses, ep, etp): its other axes are independent of each
other, so its layouts are a grid.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import gcd, isqrt

import numpy as np
import numpy.typing as npt

from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.model.config import ModelConfig
from myriad.planner.cluster_config import Cluster
from myriad.planner.cost.collective_costs import DpCollectives
from myriad.planner.cost.context_costs import ContextGrid
from myriad.planner.cost.expert_ranks import ExpertGrid
from myriad.planner.search.layout_problem import LayoutProblem, Sharding
from myriad.program.config import OverlapConfig, TensorOverlap
from myriad.program.partition import partition_layers
from myriad.program.schedules import check_virtual_stages

__all__ = [
    "LONG",
    "LayoutGrid",
    "divisors",
    "has_layout",
    "is_redundant",
    "layout_grids",
    "parallel_degrees",
    "searches_context",
    "tensor_degrees",
]

_SEARCHED_STAGES = 128
"""Virtual stages up to which each number is searched: all that models of up to 126 blocks can have."""
Switches = tuple[bool, bool]
"""Values of `overlap.data` and `overlap.optimizer`."""


@dataclass(frozen=True)
class LayoutGrid:
    """All layouts of one (tp, pp, cp, ulysses, ep, etp)."""

    problem: LayoutProblem
    tp: int
    pp: int
    dp: int
    micro_batches: tuple[int, ...]
    """Sizes of a micro-batch."""
    schedules: tuple[tuple[str, int], ...]
    """Name and virtual stages of each schedule."""
    ep: int = 1
    etp: int | None = None
    """Tensor-parallel ranks that share the width of each expert; ``None``: all of them."""
    cp: int = 1
    ulysses: int = 1

    @property
    def num_holders(self) -> int:
        """Ranks that hold the same parameters."""
        return self.dp * self.cp

    @property
    def context(self) -> ContextGrid:
        """The ranks that share a sequence."""
        return ContextGrid(self.cp // self.ulysses, self.ulysses, self.tp)

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel ranks that share the width of each expert."""
        return self.etp or self.tp

    @cached_property
    def experts(self) -> ExpertGrid:
        """The ranks of a stage as experts see them."""
        return ExpertGrid.of(
            Layout(
                dp=self.dp,
                tp=self.tp,
                pp=self.pp,
                cp=self.cp,
                ep=self.ep,
                etp=self.etp,
                expert_load=self.problem.expert_load(self.ep),
                expert_dispatch=self.problem.expert_dispatch if self.ep > 1 else "expert",
            ),
            self.tp * self.cp * self.pp,
        )

    def with_etp(self, etp: int) -> "LayoutGrid | None":
        """Return the grid in which so many ranks share the width of each expert; ``None``: none is legal."""
        if etp == self.expert_tp:
            return self
        if self.num_holders * self.tp // etp % self.ep or not _may_share(self.problem, self.tp, self.ep, etp):
            return None
        found = replace(self, etp=None if etp == self.tp else etp)
        return found if found.shards else None

    @cached_property
    def shards(self) -> tuple[Sharding, ...]:
        """Shardings among the data-parallel replicas."""
        problem = self.problem
        several = self.num_holders > 1
        plain = problem.shards if several or "zero" in problem.fixed else (Sharding(0, "last"),)
        if not problem.searches_groups:
            return plain
        given = problem.fixed.get("shard_group")
        groups = [given] if given is not None else []
        if given is None and self.cp == 1 and not self.experts.folds:
            groups = _shard_groups(problem.cluster, self.dp, self.tp * self.pp)
        fits = [size for size in groups if self.num_holders % size == 0 and self._holds_experts(size)]
        grouped = (shard._replace(shard_group=size) for size in fits for shard in plain if shard.zero)
        return (*(plain if given is None else ()), *grouped)

    def _holds_experts(self, size: int) -> bool:
        """Return whether a group of ``size`` ranks that hold the same parameters has every expert equally
        often."""
        return size * self.experts.etp_groups % self.ep == 0

    @property
    def tensors(self) -> tuple[TensorOverlap, ...]:
        """Searched values of overlap.tensor."""
        every = self.problem.tensors
        return every if self.tp > 1 else every[:1]

    @property
    def pipelines(self) -> tuple[bool, ...]:
        """Searched values of overlap.pipeline."""
        if not self.problem.searches_overlap:
            return (self.problem.overlap.pipeline,)
        return (True, False) if self.pp > 1 else (True,)

    @property
    def switches(self) -> tuple[Switches, ...]:
        """Values of overlap.data with overlap.optimizer, which hides gathers that are issued early."""
        if not self.problem.searches_overlap:
            overlap = self.problem.overlap
            return ((overlap.data, overlap.optimizer and overlap.data),)
        every = ((True, True), (True, False), (False, False))
        return every if self.num_holders > 1 else every[:1]

    @cached_property
    def num_layouts(self) -> int:
        """Number of layouts, with each switch counted only where it changes the program."""
        grid = (
            len(self.micro_batches) * len(self.problem.recomputes) * len(self.tensors) * len(self.pipelines)
        )
        return grid * int((~self.redundant * self.num_switches).sum())

    @property
    def num_switches(self) -> npt.NDArray[np.int64]:
        """Number of distinct values of `switches`, by shard."""
        several = self.num_holders > 1 and self.problem.searches_overlap
        return np.array([(3 if zero else 2) if several else 1 for zero, *_ in self.shards])

    @cached_property
    def redundant(self) -> npt.NDArray[np.bool_]:
        """Mask ``[schedule, shard]`` of layouts that equal another one."""
        if "virtual_stages" in self.problem.fixed:
            return np.zeros((len(self.schedules), len(self.shards)), dtype=bool)
        cells = [[is_redundant(self.pp, v, zero) for zero, *_ in self.shards] for _, v in self.schedules]
        return np.array(cells, dtype=bool).reshape(len(self.schedules), len(self.shards))

    @property
    def axes(self) -> tuple[int, ...]:
        """Lengths: micro-batch, schedule, shards, recompute, tensor, pipeline, switches."""
        return (
            len(self.micro_batches),
            len(self.schedules),
            len(self.shards),
            len(self.problem.recomputes),
            len(self.tensors),
            len(self.pipelines),
            len(self.switches),
        )

    def at(self, index: tuple[int, ...]) -> tuple[Layout, OverlapConfig]:
        """Return one layout of the grid."""
        batch, schedule, shard, again, tensor, pipeline, switch = index
        name, virtual_stages = self.schedules[schedule]
        zero, reduce, shard_group = self.shards[shard]
        data, optimizer = self.switches[switch]
        layout = Layout.model_validate(
            {
                "dp": self.dp,
                "tp": self.tp,
                "pp": self.pp,
                "cp": self.cp,
                "ulysses": self.ulysses,
                "ep": self.ep,
                "etp": self.etp,
                "expert_load": self.problem.expert_load(self.ep),
                "expert_dispatch": self.experts.dispatch,
                "virtual_stages": virtual_stages,
                "zero": zero,
                "reduce": reduce,
                "shard_group": shard_group,
                "micro_batch": self.micro_batches[batch],
                "recompute": self.problem.recomputes[again],
                "schedule": name,
                "partition": self.problem.partition,
            }
        )
        switches = {
            "tensor": self.tensors[tensor],
            "pipeline": self.pipelines[pipeline],
            "data": data,
            "optimizer": optimizer,
        }
        return layout, self.problem.overlap.model_copy(update=switches)


def layout_grids(problem: LayoutProblem) -> Iterator[LayoutGrid]:
    """Yield every grid of legal layouts that use all accelerators."""
    for tp, pp, dp, cp in parallel_degrees(problem):
        sizes = _micro_batches(problem, dp)
        if not (sizes and _can_be_summed(problem, dp, tp * pp * cp)):
            continue
        rows, experts = _rows(problem, tp, cp), _expert_degrees(problem, dp * cp, tp)
        for schedules, own in _with_sizes(problem, tuple(_schedules(problem, pp)), sizes, dp, pp):
            for (ep, etp), ulysses in product(experts, rows):
                grid = LayoutGrid(problem, tp, pp, dp, own, schedules, ep, etp, cp, ulysses)
                if grid.shards:
                    yield grid


def has_layout(problem: LayoutProblem) -> bool:
    """Return whether there is any legal layout, regardless of memory."""
    return any(
        _micro_batches(problem, dp)
        and _can_be_summed(problem, dp, tp * pp * cp)
        and _expert_degrees(problem, dp * cp, tp)
        and _rows(problem, tp, cp)
        and next(_schedules(problem, pp), None) is not None
        for tp, pp, dp, cp in parallel_degrees(problem)
    )


def parallel_degrees(problem: LayoutProblem) -> Iterator[tuple[int, int, int, int]]:
    """Yield every tp, pp, dp and cp that use all accelerators, regardless of the batch."""
    world, most = problem.cluster.world, problem.model.layers + 2
    for tp in tensor_degrees(problem.model):
        allowed = problem.limits.allows_tensor(tp, problem.model.num_kv_heads)
        if world % tp or not (allowed and problem.allows("tp", tp)):
            continue
        for pp in divisors(world // tp):
            if pp > most or not problem.allows("pp", pp):
                continue
            for cp in _context_degrees(problem, world // (tp * pp)):
                dp = world // (tp * pp * cp)
                if problem.allows("dp", dp):
                    yield tp, pp, dp, cp


LONG, _FEWEST_POSITIONS = 16384, 2048
"""Positions of a sequence from which on ranks that share it are searched, and the fewest of a rank."""


def searches_context(problem: LayoutProblem) -> bool:
    """Return whether numbers of ranks that share a sequence are searched."""
    return "cp" not in problem.fixed and problem.model.sequence >= LONG and problem.searches_context


def _context_degrees(problem: LayoutProblem, ranks: int) -> list[int]:
    """Return the numbers of ranks that may share a sequence, among divisors of ``ranks``."""
    if not searches_context(problem):
        given = problem.fixed.get("cp", 1)
        return [given] if ranks % given == 0 else []
    most = problem.model.sequence // _FEWEST_POSITIONS
    return [cp for cp in divisors(ranks) if cp == 1 or (cp <= most and cp & (cp - 1) == 0)]


def _rows(problem: LayoutProblem, tp: int, cp: int) -> list[int]:
    """Return the numbers of ranks of a row (``layout.ulysses``): one, and the most in a node that the heads
    allow; all of them if one is given."""
    model, room = problem.model, problem.cluster.accelerators_per_node // tp
    heads, kv_heads = model.heads // tp, model.kv_heads_of_rank(tp)
    given = problem.fixed.get("ulysses")
    fits = [
        rows
        for rows in divisors(cp)
        if problem.limits.allows_rows(cp, rows)
        and heads % rows == 0
        and (kv_heads % rows == 0 or rows % kv_heads == 0)
        and model.sequence % Layout(tp=tp, cp=cp, ulysses=rows).sequence_multiple == 0
    ]
    if given is not None:
        return [rows for rows in fits if rows == given]
    return sorted(
        {rows for rows in (1, max((one for one in fits if one <= room), default=1)) if rows in fits}
    )


def _expert_degrees(problem: LayoutProblem, dp: int, tp: int) -> list[tuple[int, int | None]]:
    """Return the numbers of ranks that may share experts, with those that share the width of each (``None``:
    all tensor-parallel ranks). ``dp``: ranks that hold the same parameters."""
    experts = problem.model.experts
    if experts is None:
        return [(1, None)]
    searches_all = problem.fixed.keys() & {"tp", "etp"}
    return [
        (ep, None if etp == tp else etp)
        for etp in (divisors(tp) if searches_all else sorted({1, tp}))[::-1]
        for ep in divisors(gcd(dp * tp // etp, experts))
        if problem.allows("ep", ep)
        and problem.limits.allows_experts(tp, ep, etp)
        and _may_share(problem, tp, ep, etp)
    ]


def _may_share(problem: LayoutProblem, tp: int, ep: int, etp: int) -> bool:
    """Return whether ranks may share experts so. Replicas that train alone share none with others."""
    has_experts, alone = problem.model.experts is not None, problem.comm.sync_every > 1
    return has_experts and problem.allows("etp", etp) and (not alone or ep * etp == tp)


def _shard_groups(cluster: Cluster, dp: int, stride: int) -> list[int]:
    """Return the searched sizes of groups that shard the state: the replicas of a node and, if links between
    switches are slower, those under a switch."""
    places = [cluster.accelerators_per_node]
    if cluster.links.spine is not None and cluster.nodes_per_switch is not None:
        places.append(places[0] * cluster.nodes_per_switch)
    sizes = {place // stride for place in places if place % stride == 0}
    return sorted(size for size in sizes if 1 < size < dp and dp % size == 0)


def is_redundant(pp: int, virtual_stages: int, zero: int) -> bool:
    """Return whether a layout equals the one with a single virtual stage. Stages of one pipeline rank send no
    messages to each other, and only ZeRO 3 handles them one after the other."""
    return pp == 1 and virtual_stages > 1 and zero < 3


def _micro_batches(problem: LayoutProblem, dp: int) -> tuple[int, ...]:
    """Return the micro-batch sizes that divide a replica's sequences; empty where the batch cannot be
    divided."""
    if problem.global_batch % dp:
        return ()
    return tuple(size for size in divisors(problem.global_batch // dp) if problem.allows("micro_batch", size))


_Schedules = tuple[tuple[str, int], ...]


def _with_sizes(
    problem: LayoutProblem, schedules: _Schedules, sizes: tuple[int, ...], dp: int, pp: int
) -> Iterator[tuple[_Schedules, tuple[int, ...]]]:
    """Yield schedules with the micro-batch sizes that they can have: all have all of them, unless the
    framework limits those of interleaved ones."""
    fewer = problem.limits.round_sizes(sizes, problem.global_batch // dp, pp)
    if fewer == sizes:
        yield from [(schedules, sizes)] if schedules else []
        return
    for rounds, own in ((False, sizes), (True, fewer)):
        if own and (chosen := tuple(one for one in schedules if (one[0] == "interleaved") == rounds)):
            yield chosen, own


def tensor_degrees(model: ModelConfig) -> list[int]:
    """Return the tensor-parallel degrees that `Job.check` accepts."""
    shared = (*model.mlp_widths, model.sequence)
    return [tp for tp in model.head_degrees if not any(number % tp for number in shared)]


def divisors(number: int) -> list[int]:
    """Return every divisor in ascending order."""
    low = [one for one in range(1, isqrt(number) + 1) if number % one == 0]
    return sorted({*low, *(number // one for one in low)})


def _schedules(problem: LayoutProblem, pp: int) -> Iterator[tuple[str, int]]:
    for virtual_stages in _virtual_stages(problem, pp):
        allowed = problem.limits.allows_stages(problem.model.layers, pp, virtual_stages)
        if not (allowed and _can_be_cut(problem, pp * virtual_stages)):
            continue
        for name in problem.schedules:
            if not problem.allows("schedule", name):
                continue
            if "schedule" not in problem.fixed and _is_another(name, virtual_stages, pp):
                continue
            try:
                check_virtual_stages(name, virtual_stages)
            except BadInputError:
                continue
            yield name, virtual_stages


def _virtual_stages(problem: LayoutProblem, pp: int) -> list[int]:
    """Return the numbers of stages of a rank, ascending. Above `_SEARCHED_STAGES` only the fewest for each
    size of the largest stage are kept: more stages of that size send more messages and compute no faster."""
    layers = problem.model.layers
    most = (layers + 2) // pp
    if "virtual_stages" in problem.fixed:
        return [given for given in (problem.fixed["virtual_stages"],) if given <= most]
    if problem.gathers_blocks and pp == 1:
        return [layers]
    every = range(1, min(most, _SEARCHED_STAGES) + 1)
    sizes = range(layers // (pp * _SEARCHED_STAGES), 0, -1)
    fewest = (-(-layers // (pp * size)) for size in sizes)
    return [*every, *(stages for stages in fewest if _SEARCHED_STAGES < stages <= most)]


def _is_another(name: str, virtual_stages: int, pp: int) -> bool:
    """Return whether a schedule differs from the others in the list: on one pipeline rank only the stages
    differ."""
    alone = ("1f1b",) if virtual_stages == 1 else ("interleaved", "gpipe")
    return (name, virtual_stages) == ("interleaved", 1) or (pp == 1 and name not in alone)


def _can_be_summed(problem: LayoutProblem, dp: int, stride: int) -> bool:
    try:
        DpCollectives(problem.cluster, problem.comm, dp, stride)
    except BadInputError:
        return False
    return True


def _can_be_cut(problem: LayoutProblem, num_stages: int) -> bool:
    if problem.partition == "uniform":
        return num_stages <= problem.model.layers + 2
    kinds = problem.model.layer_kinds
    try:
        partition_layers(problem.partition, num_stages, kinds, [1.0] * len(kinds))
    except BadInputError:
        return False
    return True
