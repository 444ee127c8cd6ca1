"""The general form of a table of iterations: any framework's runs, one a row, in the same columns.

    model, layers, hidden, ffn, heads, kv_heads, vocab, seq       the model; empty where its name says it
    experts, experts_per_token, expert_ffn, shared_experts        a mixture of experts
    model.KEY                                                     any other key of the model
    global_batch (sequences), gpus, gpu_type, interconnect        the job and its cluster
    tp, pp, dp, cp, ulysses, ep, etp, vpp, zero, micro_batch, recompute      the layout
    dtype                                                         bf16, fp16, fp32, fp8, fp8-blocks
    iteration_s, tokens_per_s_per_gpu, tflops_per_gpu, mfu        what was measured: the first that is given
    flops                                                         what TFLOP/s and MFU count: `FLOP_COUNTS`
    allocated_bytes, reserved_bytes, out_of_memory                peak memory: "25.07 GiB"; yes: it ran out
    framework, source, table, notes                               who measured, and with what

A cell may be empty where the rest of the row says it: ``dp`` follows from the GPUs, the framework from the
source, other cells from the notes (`general_cells`). A row needs a time, or memory. What is open after that
(micro-batch, virtual stages, recomputation) is the choice that is predicted to be the fastest of those that
fit, as in other tables.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import nan
from typing import Any, Protocol, get_args

from myriad.comm.layout import ExpertDispatch, Layout, ScheduleName
from myriad.errors import BadInputError
from myriad.model.config import ModelConfig
from myriad.planner.cluster_config import Accelerator, Cluster
from myriad.planner.frameworks import FlopCount, Framework, LayoutHabits
from myriad.planner.validation.general_cells import MEASURES, GeneralCells
from myriad.planner.validation.general_clusters import cluster_of
from myriad.planner.validation.general_models import model_of
from myriad.planner.validation.habitual_partition import habitual_partition
from myriad.planner.validation.published_rows import MeasuredMemory, PublishedRow, TableCells
from myriad.planner.validation.row_profile import profile_of, value_bytes_of
from myriad.planner.workload import Recompute, Workload
from myriad.units import parse_bytes

__all__ = ["FLOP_COUNTS", "Recipes", "general_row"]

FLOP_COUNTS: tuple[FlopCount, ...] = get_args(FlopCount)
"""Values of the column flops."""


class Recipes(Protocol):
    """Ready-made data that a row names. All methods raise `BadInputError`."""

    def cluster(self, name: str, accelerators: int) -> Cluster:
        """Return a cluster with so many accelerators."""

    def accelerator(self, gpu_type: str, row: str = "") -> tuple[str, Accelerator]:
        """Return the accelerator that a table names, and the name of its recipe. ``row``: what the row says
        besides, which may name it more closely."""

    def model(self, name: str) -> Mapping[str, Any] | None:
        """Return the keys of a model; ``None``: there is no such recipe."""

    def framework(self, name: str) -> Framework:
        """Return a framework."""

    def frameworks(self) -> Sequence[Framework]:
        """Return all frameworks."""


def general_row(
    cells: TableCells, recipes: Recipes, framework: str | None = None, cluster: str | None = None
) -> PublishedRow:
    """Return a row's workloads. ``framework``, ``cluster``: predict it as this one, on this one; off: as the
    row says. Raises `BadInputError`."""
    read = GeneralCells(cells)
    used = recipes.framework(framework) if framework else _framework_of(read, recipes)
    model = model_of(read, recipes.model)
    gpus = read.whole("gpus")
    used_cluster = recipes.cluster(cluster, gpus) if cluster else cluster_of(read, gpus, recipes.accelerator)
    works = tuple(_works(read, model, used_cluster, used))
    memory = _measured_memory(read)
    counted = read.word("flops", used.habits.flops)
    if counted not in FLOP_COUNTS:
        raise read.refused("flops", f"one of {', '.join(FLOP_COUNTS)}")
    seconds = _seconds(read, works[0], used_cluster, counted, needed=memory is None)
    return PublishedRow(
        _row_name(read, model),
        f"{read.word('source')} {read.word('model')}",
        works,
        used_cluster,
        seconds,
        works[0].model_flops,
        framework=used.name,
        memory=memory,
        model_name=read.word("model"),
        source=read.word("source"),
    )


_ZERO_WORDS = dict.fromkeys(("FULL_SHARD", "HYBRID_SHARD", "HSDP", "FSDP"), 3)


def _framework_of(read: GeneralCells, recipes: Recipes) -> Framework:
    """Return the framework that a row names, or whose pattern these columns of it have."""
    if named := read.word("framework"):
        try:
            return recipes.framework(named)
        except BadInputError as error:
            if error.key != "--framework":  # a value in its file
                raise
            raise read.refused("framework", error.allowed) from None
    said = " | ".join(map(read.word, ("source", "table", "model", "gpu_type", "gpus", "notes", "dtype")))
    best: tuple[int, Framework] | None = None
    for one in recipes.frameworks():
        for pattern in one.matches:
            if (found := re.search(pattern, said)) and (best is None or len(found[0]) > best[0]):
                best = len(found[0]), one
    return best[1] if best else recipes.framework("unknown")


# Layout


def _works(
    read: GeneralCells, model: ModelConfig, cluster: Cluster, framework: Framework
) -> Iterator[Workload]:
    """Yield the workloads that a row may have been. Raises `BadInputError`."""
    profile, value_bytes = profile_of(read, framework.profile), value_bytes_of(read)
    found = False
    for layout in _layouts(read, model, cluster, framework):
        batch = _batch(read, layout)
        if batch % (layout.dp * layout.micro_batch):
            continue
        found = True
        yield Workload(model, layout, batch, framework.overlap, profile, value_bytes=value_bytes)
    if not found:
        allowed = "a number of sequences that replicas and micro-batches divide"
        raise read.refused("global_batch", allowed)


def _batch(read: GeneralCells, layout: Layout) -> int:
    """Return the global batch; where it is not given, of so many micro-batches as are stated."""
    if read.has("global_batch"):
        return read.whole("global_batch")
    if not (read.has("grad_accum") or read.has("num_micro_batches")):
        raise read.refused("global_batch", "needed: the cell is empty")
    count = read.whole("grad_accum") if read.has("grad_accum") else read.whole("num_micro_batches")
    return count * layout.dp * layout.micro_batch


def _layouts(
    read: GeneralCells, model: ModelConfig, cluster: Cluster, framework: Framework
) -> Iterator[Layout]:
    """Yield the layouts that a row may have had: those that differ in what it leaves open."""
    degrees, habits = _degrees(read, model, cluster.world, framework.habits), framework.habits
    pp, zero = degrees["pp"], _zero(read, framework.habits, degrees["pp"])
    by_layer = zero == 3 and habits.by_layer and pp == 1
    fixed = degrees | {"zero": zero} | _expert_keys(read, model, degrees, habits)
    if zero == 3 and (habits.reduce_each or by_layer):
        fixed["reduce"] = "each"
    group = _shard_group(read, cluster, degrees["dp"]) or habits.shard_group
    if group and zero and group < degrees["dp"] and degrees["dp"] % group == 0:
        fixed["shard_group"] = group
    stages = [model.layers] if by_layer else _stages(read, model, pp, habits)
    recomputes = _recomputes(read, habits.recompute if model.experts is None else habits.expert_recompute)
    for micro_batch, number, recompute in product(_micro_batches(read), stages, recomputes):
        open_keys = {"micro_batch": micro_batch, "virtual_stages": number, "recompute": recompute}
        schedule = {} if by_layer else _schedule(read, number, habits)
        if pp > 1:
            schedule["partition"] = habitual_partition(habits.partition, model, pp * number)
        yield Layout(**(fixed | open_keys | schedule))


def _degrees(read: GeneralCells, model: ModelConfig, gpus: int, habits: LayoutHabits) -> dict[str, Any]:
    """Return the parallel degrees of a row. Raises `BadInputError` for degrees that the GPUs, the heads or
    the sequence do not allow."""
    tp, pp, cp, ep = (read.whole(axis, 1) for axis in ("tp", "pp", "cp", "ep"))
    if gpus % (tp * pp * cp):
        raise read.refused("gpus", f"a multiple of tp x pp x cp = {tp * pp * cp}")
    dp = gpus // (tp * pp * cp)
    if read.has("dp") and read.whole("dp") != dp:
        raise read.refused("dp", f"gpus / (tp x pp x cp) = {dp}")
    if model.heads % tp:
        raise read.refused("tp", f"a divisor of the model's {model.heads} heads")
    ulysses = read.whole("ulysses", cp if habits.exchanges_heads else 1)
    if cp % ulysses or model.heads // tp % ulysses:
        raise read.refused("ulysses", f"a divisor of cp = {cp} and of {model.heads // tp} heads")
    if model.sequence % Layout(tp=tp, cp=cp, ulysses=ulysses).sequence_multiple:
        column = "cp" if cp > 1 else "tp"
        raise read.refused(column, f"a divisor of the sequence of {model.sequence}, with tp and in halves")
    return {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ulysses": ulysses, "ep": ep}


def _expert_keys(
    read: GeneralCells, model: ModelConfig, degrees: Mapping[str, int], habits: LayoutHabits
) -> dict[str, Any]:
    """Return how ranks share experts, and how tokens travel to them."""
    found: dict[str, Any] = {}
    if model.experts is not None and degrees["tp"] > 1:
        cannot_share = degrees["dp"] * degrees["cp"] % degrees["ep"]
        found["etp"] = read.whole("etp", 1 if habits.whole_experts or cannot_share else degrees["tp"])
    dispatch = _dispatch(read, habits.expert_dispatch)
    if degrees["ep"] > 1:
        found["expert_dispatch"] = dispatch
    return found


_DISPATCHES: Mapping[str, ExpertDispatch] = {
    "DeepEP": "node",
    "HybridEP": "node",
    "A2A": "expert",
    "node": "node",
    "rank": "rank",
    "expert": "expert",
}


def _dispatch(read: GeneralCells, habit: ExpertDispatch) -> ExpertDispatch:
    """Return how tokens travel to their experts."""
    said = read.word("expert_dispatch", habit)
    if said not in _DISPATCHES:
        raise read.refused("expert_dispatch", f"one of {', '.join(_DISPATCHES)}")
    return _DISPATCHES[said]


def _zero(read: GeneralCells, habits: LayoutHabits, pp: int) -> int:
    """Return the degree of ZeRO."""
    said = read.word("zero", str(habits.zero))
    if pp > 1 and habits.pipeline_zero is not None and (said in _ZERO_WORDS or not read.has("zero")):
        return habits.pipeline_zero
    if said in _ZERO_WORDS:
        return _ZERO_WORDS[said]
    if said not in ("0", "1", "2", "3"):
        raise read.refused("zero", "0, 1, 2 or 3")
    return int(said)


def _shard_group(read: GeneralCells, cluster: Cluster, dp: int) -> int | None:
    """Return the replicas over which a row shards state; ``None``: it does not say. HSDP shards in a node."""
    if read.word("shard_group") in ("HSDP", "HYBRID_SHARD"):
        return cluster.accelerators_per_node
    group = read.whole("shard_group") if read.has("shard_group") else None
    if group is not None and dp % group:
        raise read.refused("shard_group", f"a divisor of the {dp} replicas")
    return group


def _micro_batches(read: GeneralCells) -> Sequence[int]:
    return [read.whole("micro_batch")] if read.has("micro_batch") else (1, 2, 4, 8)


def _stages(read: GeneralCells, model: ModelConfig, pp: int, habits: LayoutHabits) -> Sequence[int]:
    """Return the possible virtual stages: those of equal numbers of blocks, or of layers where the framework
    counts embedding and head as a layer each."""
    if habits.virtual_stages is not None and pp > 1 and not read.has("vpp"):
        return [habits.virtual_stages]
    said = read.word("vpp")
    if said == "one layer a chunk":
        return [-(-(model.layers + 2) // pp)]
    if said or pp == 1:
        number = read.whole("vpp", 1)
        return [number] if pp > 1 else [1]
    layers = model.layers
    if layers % pp and habits.partition == "with-ends":
        layers += 2
    if layers % pp:
        return [1]
    own = layers // pp
    return [number for number in range(1, own + 1) if own % number == 0]


def _recomputes(read: GeneralCells, habit: Recompute | None) -> Sequence[Recompute]:
    said = read.word("recompute").lower()
    if said in ("none", "selective", "full"):
        return (said,)  # type: ignore[return-value]
    if not said or "policy" in said:
        return ("none", "selective", "full") if habit is None else (habit,)
    if not {name.strip() for name in said.split(",")} <= _MODULES:
        allowed = f"none, selective, full, a policy, or modules: {', '.join(sorted(_MODULES))}"
        raise read.refused("recompute", allowed)
    return ("selective",)


_MODULES = frozenset(
    {"act", "core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "norm", "shared_experts"}
)
"""Modules that Megatron-Core recomputes (recompute_modules in transformer_config.py), and their short
names."""


_SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved": "interleaved",
    "1f1b-i": "interleaved",
    "zb-1p": "zero-bubble",
    "zbb": "zero-bubble",
    "zb-h1": "zero-bubble",
    "zb-2p": "eager-zero-bubble",
    "zb-h2": "eager-zero-bubble",
    "zbv": "zero-bubble-v",
    "zb-v": "zero-bubble-v",
    "dualpipev": "dualpipe-v",
} | {name: name for name in get_args(ScheduleName)}
"""Schedules of Myriad by their names here and elsewhere."""


def _schedule(read: GeneralCells, stages: int, habits: LayoutHabits) -> dict[str, Any]:
    said = read.word("schedule").lower()
    if not said:
        fits = stages == (habits.virtual_stages or 1)
        return {"schedule": habits.schedule} if habits.schedule and fits else {}
    if said not in _SCHEDULES:
        raise read.refused("schedule", f"one of {', '.join(_SCHEDULES)}")
    return {"schedule": _SCHEDULES[said]}


# Measured


def _measured_memory(read: GeneralCells) -> MeasuredMemory | None:
    """Return the measured memory; ``None``: there is none. Raises `BadInputError`."""
    allocated, reserved = (_size(read, column) for column in ("allocated_bytes", "reserved_bytes"))
    found = MeasuredMemory(allocated, reserved, bool(read.switch("out_of_memory")))
    return None if found == MeasuredMemory() else found


def _size(read: GeneralCells, column: str) -> float | None:
    if not read.has(column):
        return None
    try:
        size = parse_bytes(read.word(column))
    except ValueError:
        size = 0
    if size < 1:
        raise read.refused(column, "a size above 0: a number with B, kB, MB, GB, TB, KiB, MiB, GiB or TiB")
    return float(size)


def _seconds(
    read: GeneralCells, workload: Workload, cluster: Cluster, counted: str, *, needed: bool
) -> float:
    """Return the seconds of an iteration, from the first measure that is given; not a number without one that
    is not ``needed``. ``counted``: what TFLOP/s and MFU count."""
    if read.has("iteration_s"):
        return read.number("iteration_s")
    if read.has("tokens_per_s_per_gpu"):
        tokens = workload.global_batch * workload.model.sequence
        return tokens / (read.number("tokens_per_s_per_gpu") * cluster.world)
    flops = _counted_flops(read, workload, counted)
    if read.has("tflops_per_gpu"):
        return flops / (read.number("tflops_per_gpu") * 1e12 * cluster.world)
    if not read.has("mfu") and not needed:
        return nan
    if not read.has("mfu"):
        raise read.refused("iteration_s", f"needed, or one of {', '.join(sorted(MEASURES))}")
    percent = read.number("mfu")
    return flops / (cluster.world * cluster.accelerator.peak_flops_per_second * percent / 100)


def _counted_flops(read: GeneralCells, workload: Workload, said: str) -> float:
    """Return the FLOPs of an iteration as the row's source counts them."""
    model = workload.model
    tokens = float(workload.global_batch * model.sequence)
    full = workload.model_flops
    attention = 12.0 * model.layers * model.heads * model.head_width * model.sequence * tokens
    counts: dict[str, Callable[[], float]] = {
        "model": lambda: full,
        "causal": lambda: full - attention / 2,
        "6n": lambda: full - attention,
        "hardware": lambda: full * (4 / 3 if workload.recompute == "full" else 1.0),
    }
    return counts[said]()


def _row_name(read: GeneralCells, model: ModelConfig) -> str:
    """Return a name that tells rows of a table apart."""
    axes = " ".join(
        f"{axis}{read.word(axis)}" for axis in ("tp", "pp", "dp", "ep", "vpp") if read.word(axis, "1") != "1"
    )
    parts = [read.word("model"), f"{read.whole('gpus')} GPUs", axes, f"s{model.sequence}"]
    parts += [f"mb{read.word('micro_batch')}" if read.has("micro_batch") else "", read.word("dtype")]
    return " ".join(part for part in parts if part)
