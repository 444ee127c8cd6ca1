"""All layouts that a model can be trained with on a number of accelerators, as the runtime accepts them.

    tp            divides key/value heads, the MLP's width, the sequence and the padding of the vocabulary
    pp            any divisor of what is left, up to a stage for each layer, embedding and head
    stages        of a pipeline rank: each number up to 128, above it the fewest for each size of a stage
    dp            the rest; it divides the batch, and replicas stand on nodes as comm.hierarchy needs it
    micro_batch   divides what a replica gets of the batch
    schedule      `interleaved` with one stage a rank is 1f1b; on one pipeline rank those of one stage are all
                  the same, and several stages change something only under ZeRO 3, which gathers them one at a
                  time (`is_redundant`)
    zero, reduce  with one replica there is nothing to cut
    overlaps      each switch only where it changes the program

`Problem.fixed` holds the keys of a layout that were given: only layouts with these values are searched.

A `Plot` is the piece of one (tp, pp): its other axes are free of each other, so its layouts are a grid.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isqrt
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from myriad.comm.config import CommConfig
from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.model.config import ModelConfig
from myriad.planner.activations import RECOMPUTE
from myriad.planner.cluster import Cluster
from myriad.planner.data_sums import DataSums
from myriad.planner.saving import Saves
from myriad.planner.work import Practice, Recompute, Work
from myriad.program.config import OverlapConfig, TensorOverlap
from myriad.program.partition import partition_layers
from myriad.program.schedules import SCHEDULES, check_virtual_stages

__all__ = [
    "Candidate",
    "Plot",
    "Problem",
    "Shards",
    "divisors",
    "grids",
    "has_layout",
    "is_redundant",
    "plots",
    "tensor_degrees",
    "tensor_overlaps",
]

Shards = tuple[int, Literal["last", "each"]]
"""`zero` and `reduce`."""
_SHARDS: tuple[Shards, ...] = ((0, "last"), (1, "last"), (2, "last"), (2, "each"), (3, "last"), (3, "each"))
_EVERY = 128
"""Virtual stages up to which each number is searched: all that models of up to 126 blocks can have."""
Switches = tuple[bool, bool]
"""`overlap.data` and `overlap.optimizer`."""


@dataclass(frozen=True)
class Problem:
    """What is to be spread, and over what."""

    model: ModelConfig
    global_batch: int
    cluster: Cluster
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    """Of what is not searched: chunk counts, message sizes, how early receives are posted."""
    practice: Practice = field(default_factory=Practice)
    comm: CommConfig = field(default_factory=CommConfig)
    saves: Saves = field(default_factory=Saves)
    optimizer: Literal["adamw", "lamb"] = "adamw"
    value_bytes: int = 2
    partition: str = "uniform"
    shards: tuple[Shards, ...] = _SHARDS
    """Those that the rest of the job allows."""
    recomputes: tuple[Recompute, ...] = RECOMPUTE
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the layout that are given: `tp`, `pp`, `dp`, `micro_batch`, `schedule`, `virtual_stages`,
    `zero`."""

    def allows(self, key: str, value: object) -> bool:
        """Whether a key of the layout may have this value."""
        return bool(self.fixed.get(key, value) == value)

    def with_cluster(self, cluster: Cluster) -> "Problem":
        """The same on another cluster."""
        return replace(self, cluster=cluster)


@dataclass(frozen=True)
class Candidate:
    """A layout, and what the closed form says of it."""

    layout: Layout
    overlap: OverlapConfig
    seconds: float
    """Of an iteration."""
    memory_bytes: float
    """Of the fullest accelerator."""
    fits: float
    """Probability of not running out of memory."""

    def work(self, problem: Problem) -> Work:
        """As the cost model wants it."""
        return Work(
            model=problem.model,
            layout=self.layout,
            global_batch=problem.global_batch,
            overlap=self.overlap,
            practice=problem.practice,
            comm=problem.comm,
            saves=problem.saves,
            optimizer=problem.optimizer,
            value_bytes=problem.value_bytes,
        )


@dataclass(frozen=True)
class Plot:
    """All layouts of one (tp, pp)."""

    problem: Problem
    tp: int
    pp: int
    dp: int
    micro_batches: tuple[int, ...]
    """Sizes."""
    schedules: tuple[tuple[str, int], ...]
    """Name and virtual stages."""

    @property
    def shards(self) -> tuple[Shards, ...]:
        """Of data parallelism."""
        return self.problem.shards if self.dp > 1 or "zero" in self.problem.fixed else ((0, "last"),)

    @property
    def tensors(self) -> tuple[TensorOverlap, ...]:
        """Values of overlap.tensor."""
        every = tensor_overlaps(self.problem.overlap)
        return every if self.tp > 1 else every[:1]

    @property
    def pipelines(self) -> tuple[bool, ...]:
        """Values of overlap.pipeline."""
        return (True, False) if self.pp > 1 else (True,)

    @property
    def switches(self) -> tuple[Switches, ...]:
        """Values of overlap.data with overlap.optimizer, which hides gathers that are posted early."""
        return ((True, True), (True, False), (False, False)) if self.dp > 1 else ((True, True),)

    @cached_property
    def num_layouts(self) -> int:
        """With each switch counted only where it changes something."""
        grid = (
            len(self.micro_batches) * len(self.problem.recomputes) * len(self.tensors) * len(self.pipelines)
        )
        return grid * int((~self.redundant * self.num_switches).sum())

    @property
    def num_switches(self) -> npt.NDArray[np.int64]:
        """By shard: values of `switches` that differ from each other."""
        return np.array([(3 if zero else 2) if self.dp > 1 else 1 for zero, _ in self.shards])

    @cached_property
    def redundant(self) -> npt.NDArray[np.bool_]:
        """Which ``[schedule, shard]`` are another layout written differently."""
        if "virtual_stages" in self.problem.fixed:
            return np.zeros((len(self.schedules), len(self.shards)), dtype=bool)
        cells = [[is_redundant(self.pp, v, zero) for zero, _ in self.shards] for _, v in self.schedules]
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
        """One layout of the grid."""
        batch, schedule, shard, again, tensor, pipeline, switch = index
        name, virtual_stages = self.schedules[schedule]
        zero, reduce = self.shards[shard]
        data, optimizer = self.switches[switch]
        layout = Layout.model_validate(
            {
                "dp": self.dp,
                "tp": self.tp,
                "pp": self.pp,
                "virtual_stages": virtual_stages,
                "zero": zero,
                "reduce": reduce,
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


def plots(problem: Problem) -> Iterator[Plot]:
    """Every legal layout that uses all accelerators."""
    for tp, pp, dp in grids(problem):
        sizes = _micro_batches(problem, dp)
        if sizes and _can_be_summed(problem, dp, tp * pp):
            schedules = tuple(_schedules(problem, pp))
            if schedules:
                yield Plot(problem, tp, pp, dp, sizes, schedules)


def has_layout(problem: Problem) -> bool:
    """Whether there is any legal layout, which says nothing about memory."""
    return any(
        _micro_batches(problem, dp)
        and _can_be_summed(problem, dp, tp * pp)
        and next(_schedules(problem, pp), None) is not None
        for tp, pp, dp in grids(problem)
    )


def grids(problem: Problem) -> Iterator[tuple[int, int, int]]:
    """Every tp, pp and dp that use all accelerators, whatever the batch is."""
    world, most = problem.cluster.world, problem.model.layers + 2
    for tp in tensor_degrees(problem.model):
        if world % tp or not problem.allows("tp", tp):
            continue
        for pp in divisors(world // tp):
            dp = world // (tp * pp)
            if pp <= most and problem.allows("pp", pp) and problem.allows("dp", dp):
                yield tp, pp, dp


def is_redundant(pp: int, virtual_stages: int, zero: int) -> bool:
    """Whether a layout equals the one with a single virtual stage: nothing is sent between the stages of one
    pipeline rank, and only ZeRO 3 handles them one after the other."""
    return pp == 1 and virtual_stages > 1 and zero < 3


def _micro_batches(problem: Problem, dp: int) -> tuple[int, ...]:
    """Sizes that a replica can cut its sequences into; none where the batch cannot be divided."""
    if problem.global_batch % dp:
        return ()
    return tuple(size for size in divisors(problem.global_batch // dp) if problem.allows("micro_batch", size))


def tensor_overlaps(overlap: OverlapConfig) -> tuple[TensorOverlap, ...]:
    """Values of overlap.tensor that are searched: the one asked for, else turns; and off."""
    return (overlap.tensor or "turns", None)


def tensor_degrees(model: ModelConfig) -> list[int]:
    """That `Job.check` accepts."""
    shared = (model.num_kv_heads, model.ffn_width, model.sequence, model.vocabulary_multiple)
    return [tp for tp in divisors(model.num_kv_heads) if not any(number % tp for number in shared)]


def divisors(number: int) -> list[int]:
    """Return every divisor, in order."""
    low = [one for one in range(1, isqrt(number) + 1) if number % one == 0]
    return sorted({*low, *(number // one for one in low)})


def _schedules(problem: Problem, pp: int) -> Iterator[tuple[str, int]]:
    for virtual_stages in _virtual_stages(problem, pp):
        if not _can_be_cut(problem, pp * virtual_stages):
            continue
        for name in SCHEDULES:
            if not problem.allows("schedule", name):
                continue
            if "schedule" not in problem.fixed and _is_another(name, virtual_stages, pp):
                continue
            try:
                check_virtual_stages(name, virtual_stages)
            except BadInputError:
                continue
            yield name, virtual_stages


def _virtual_stages(problem: Problem, pp: int) -> list[int]:
    """Numbers of stages of a rank, in order. Of those above `_EVERY` the fewest for each size of the largest
    stage: more stages of that size send more messages and compute no sooner."""
    layers = problem.model.layers
    most = (layers + 2) // pp
    if "virtual_stages" in problem.fixed:
        return [given for given in (problem.fixed["virtual_stages"],) if given <= most]
    every = range(1, min(most, _EVERY) + 1)
    sizes = range(layers // (pp * _EVERY), 0, -1)
    fewest = (-(-layers // (pp * size)) for size in sizes)
    return [*every, *(stages for stages in fewest if _EVERY < stages <= most)]


def _is_another(name: str, virtual_stages: int, pp: int) -> bool:
    """Whether a schedule is another one of the list: on one pipeline rank only the stages differ."""
    alone = ("1f1b",) if virtual_stages == 1 else ("interleaved", "gpipe")
    return (name, virtual_stages) == ("interleaved", 1) or (pp == 1 and name not in alone)


def _can_be_summed(problem: Problem, dp: int, stride: int) -> bool:
    try:
        DataSums(problem.cluster, problem.comm, dp, stride)
    except BadInputError:
        return False
    return True


def _can_be_cut(problem: Problem, num_stages: int) -> bool:
    if problem.partition == "uniform":
        return num_stages <= problem.model.layers + 2
    kinds = ("Embedding", *("Block" for _ in range(problem.model.layers)), "Head")
    try:
        partition_layers(problem.partition, num_stages, kinds, [1.0] * len(kinds))
    except BadInputError:
        return False
    return True
