"""Rows of published tables as workloads to predict.

A table is recognised by its columns, so that other rows of the same kind can be compared as well. One rule
fixes the values that a row leaves open (micro-batch, virtual stages): of the legal choices whose memory fits,
the one with the fastest prediction, because the authors will have searched for it too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.model.config import ModelConfig
from myriad.planner.cluster_config import Cluster
from myriad.planner.frameworks import Framework
from myriad.planner.validation.published_systems import (
    LLAMA_3,
    MEGASCALE,
    MEGATRON_2021,
    MEGATRON_2022,
    MEGATRON_2022_SEQUENCE,
    MEGATRON_2023,
    MEGATRON_CORE,
)
from myriad.planner.workload import Recompute, Workload

__all__ = ["TABLE_KINDS", "Clusters", "MeasuredMemory", "PublishedRow", "TableCells", "TableKind"]

Clusters = Callable[[str, int], Cluster]
"""Returns a ready cluster by name, with so many accelerators."""


_MOST = 1e12
"""An upper bound of every number in a table."""


@dataclass(frozen=True)
class TableCells:
    """A row of a file; each cell is checked when it is read. All methods raise `BadInputError`."""

    place: str
    """File and line of the row, for errors."""
    values: Mapping[str, str | None]
    """Text of each cell, by the name of its column."""

    def text(self, column: str) -> str:
        """Return a cell that is not empty."""
        value = self.values.get(column)
        if value is None or not value.strip():
            raise self.refused(column, "needed: the cell is empty or missing")
        return value.strip()

    def one_of(self, column: str, known: Sequence[str]) -> str:
        """Return one of the known words."""
        value = self.text(column)
        if value not in known:
            raise self.refused(column, f"one of {', '.join(known)}")
        return value

    def number(self, column: str) -> float:
        """Return a finite number above 0."""
        try:
            value = float(self.text(column))
        except ValueError:
            raise self.refused(column, "a number above 0") from None
        if not 0 < value <= _MOST:
            raise self.refused(column, f"a number above 0, at most {_MOST:g}")
        return value

    def whole(self, column: str) -> int:
        """Return a whole number of at least 1."""
        value = self.number(column)
        if value != int(value):
            raise self.refused(column, "a whole number of at least 1")
        return int(value)

    def refused(self, column: str, allowed: str) -> BadInputError:
        """Return the error about a cell."""
        value = self.values.get(column)
        shown = value if value is None or len(value) <= _MOST_SHOWN else f"{value[:_MOST_SHOWN]}..."
        return BadInputError(f"{self.place}, column {column!r}", shown, allowed)


_MOST_SHOWN = 60
"""Largest number of characters of a cell that an error shows."""


@dataclass(frozen=True)
class MeasuredMemory:
    """Peak memory of a published row on the rank that its framework reports."""

    allocated_bytes: float | None = None
    """Bytes of tensors; ``None``: not published."""
    reserved_bytes: float | None = None
    """Bytes that the allocator held; ``None``: not published."""
    ran_out: bool = False
    """Whether the row ran out of memory."""


@dataclass(frozen=True)
class PublishedRow:
    """One published iteration with its workload and cluster."""

    name: str
    model: str
    """Group of rows with the same model, which are left out together."""
    works: tuple[Workload, ...]
    """Possible workloads of the row; one where the source states every value."""
    cluster: Cluster
    seconds: float
    """Seconds of an iteration; not a number where the row has only memory."""
    reference_flops: float
    """Model FLOPs of an iteration as its source counts them, for MFU."""
    system: str = ""
    """The system that was measured, where a table compares several."""
    setting: str = ""
    """The values that several systems of a table share: model, GPUs and batch."""
    framework: str = ""
    """Name of the framework whose profile predicts the row."""
    memory: MeasuredMemory | None = None
    """Measured memory; ``None``: the row says nothing of it."""
    model_name: str = ""
    """The model as its source names it; empty: as `model`."""
    source: str = ""
    """Where the row was published, if a table has rows of several sources."""

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        return self.works[0].model.experts is not None

    def mfu(self, seconds: float) -> float:
        """Return the MFU of an iteration that takes so long."""
        peak = self.cluster.world * self.cluster.accelerator.peak_flops_per_second
        return self.reference_flops / (peak * seconds)


@dataclass(frozen=True)
class TableKind:
    """A kind of table, whose rows have the same columns and are read alike."""

    title: str
    """Name of the system and its accelerators, as results print it."""
    source: str
    """Paper and table, or repository."""
    columns: frozenset[str]
    """The columns by which the table is recognised."""
    read: Callable[[TableCells, Clusters], Iterator[PublishedRow]]
    framework: str
    """Name of the framework of rows whose system is not named."""

    def framework_of(self, row: PublishedRow) -> str:
        """Return the name of a row's framework."""
        return "megascale" if row.system == "MegaScale" else self.framework


def _gpt(hidden: int, heads: int, layers: int, sequence: int, vocabulary: int) -> ModelConfig:
    return ModelConfig(
        hidden=hidden,
        heads=heads,
        layers=layers,
        sequence=sequence,
        vocabulary=vocabulary,
        position="learned",
        norm="layer",
        bias=True,
    )


def _work(
    model: ModelConfig, layout: Layout, batch: int, system: Framework, recompute: Recompute = "none"
) -> Workload:
    layout = layout.model_copy(update={"recompute": recompute})
    return Workload(model, layout, batch, system.overlap, system.profile)


def _spread(gpus: int, tp: int, pp: int) -> int:
    """Return the number of data-parallel replicas. Raises `BadInputError`."""
    if gpus % (tp * pp):
        raise BadInputError("gpus", gpus, f"a multiple of tp x pp = {tp * pp}")
    return gpus // (tp * pp)


def _open_layouts(layout: Layout, layers: int, batch: int) -> Iterator[Layout]:
    """Yield all legal micro-batches and virtual stages."""
    layout = Layout.model_validate(layout.model_dump())
    if batch % layout.dp:
        raise BadInputError("batch", batch, f"a multiple of the {layout.dp} replicas")
    for micro_batch in (1, 2, 4, 8):
        if batch % (layout.dp * micro_batch):
            continue
        num_micro_batches = batch // (layout.dp * micro_batch)
        for virtual_stages in _virtual_stages(layout.pp, layers, num_micro_batches):
            changes = {"micro_batch": micro_batch, "virtual_stages": virtual_stages}
            yield layout.model_copy(update=changes)


def _virtual_stages(pp: int, layers: int, num_micro_batches: int) -> Iterator[int]:
    """Yield the possible virtual stages. Megatron-LM interleaves only equal stages, and a number of
    micro-batches that forms whole rounds."""
    yield 1
    if pp > 1 and layers % pp == 0 and num_micro_batches % pp == 0:
        own = layers // pp
        yield from (stages for stages in range(2, own + 1) if own % stages == 0)


# MegaScale, arXiv 2402.15627

_175B = _gpt(12288, 128, 96, 2048, 64000)
_530B = _gpt(20480, 160, 105, 2048, 64000)
_WINDOWS = {"window": 512, "window_pattern": (True, False)}
"""Sliding window, not published; chosen so that the FLOPs are the 1.1 % fewer that the published MFU
implies."""
_175B_LAYOUT = {"tp": 8, "pp": 8, "virtual_stages": 6}
_530B_LAYOUT = {"tp": 8, "pp": 35, "virtual_stages": 3}


def _megascale_175b(cells: TableCells, clusters: Clusters) -> Iterator[PublishedRow]:
    yield _megascale_scaling("175B", _175B, _175B_LAYOUT, cells, clusters)


def _megascale_530b(cells: TableCells, clusters: Clusters) -> Iterator[PublishedRow]:
    """Yield the rows of the 530B figure, which gives MFU alone, and a batch of as many sequences as there are
    GPUs."""
    yield _megascale_scaling("530B", _530B, _530B_LAYOUT, cells, clusters)


def _megascale_scaling(
    size: str, model: ModelConfig, axes: Mapping[str, int], cells: TableCells, clusters: Clusters
) -> PublishedRow:
    """Return the row of one system on so many GPUs, measured in seconds or as MFU."""
    gpus, batch = cells.whole("gpus"), cells.whole("batch_sequences")
    system = cells.one_of("system", ("Megatron-LM", "MegaScale"))
    how, zero = MEGATRON_2023, 1
    if system == "MegaScale":
        model, how, zero = model.model_copy(update={"block": "parallel", **_WINDOWS}), MEGASCALE, 2
    workload = _work(model, Layout(dp=_spread(gpus, axes["tp"], axes["pp"]), zero=zero, **axes), batch, how)
    cluster = clusters("megascale-12288xa100", gpus)
    seconds = _seconds(cells, workload.model_flops, cluster)
    name, setting = f"{system} {gpus} GPUs", f"{size}, {gpus:,} GPUs"
    return PublishedRow(name, system, (workload,), cluster, seconds, workload.model_flops, system, setting)


def _seconds(cells: TableCells, model_flops: float, cluster: Cluster) -> float:
    """Return the seconds of an iteration, from its MFU where the source gives only that."""
    if "iteration_seconds" in cells.values:
        return cells.number("iteration_seconds")
    peak = cluster.world * cluster.accelerator.peak_flops_per_second
    return model_flops / (peak * cells.number("mfu_percent") / 100)


_ABLATION = (
    "baseline Megatron-LM",
    "parallel transformer block",
    "sliding window attention",
    "TP overlap",
    "PP overlap",
    "DP overlap",
    "efficient operators",
    "data pipeline and removal of problematic code",
    "LAMB with batch x3",
)


def _megascale_step(cells: TableCells, clusters: Clusters) -> Iterator[PublishedRow]:
    step = _ABLATION.index(cells.one_of("step", _ABLATION))
    model = _175B
    if step >= 1:
        model = model.model_copy(update={"block": "parallel", **(_WINDOWS if step >= 2 else {})})
    overlap = MEGATRON_2023.overlap.model_copy(
        update={"tensor": "turns" if step >= 3 else None, "pipeline": step >= 4, "data": step >= 5}
    )
    profile = MEGASCALE.profile if step >= 6 else MEGATRON_2023.profile
    profile = replace(profile, tensor_parts=MEGASCALE.profile.tensor_parts)
    if step == 6:
        profile = replace(profile, host_seconds=MEGATRON_2023.profile.host_seconds)
    layout = Layout(dp=4, zero=2 if step >= 5 else 1, **_175B_LAYOUT)
    batch = 768 if step >= 8 else 256
    workload = Workload(model, layout, batch, overlap, profile, optimizer="lamb" if step >= 8 else "adamw")
    cluster = clusters("megascale-12288xa100", 256)
    seconds = _seconds(cells, workload.model_flops, cluster)
    yield PublishedRow(
        cells.text("step"), cells.text("step"), (workload,), cluster, seconds, workload.model_flops
    )


# Megatron-LM


def _megatron_2021(cells: TableCells, clusters: Clusters) -> Iterator[PublishedRow]:
    """Yield the rows of Megatron-LM 2021. Its FLOPs are those of full recomputation: 96 B s L h^2 (1 + s/6h +
    V/16Lh)."""
    sequence, vocabulary = cells.whole("seq"), cells.whole("vocab")
    hidden, layers = cells.whole("hidden"), cells.whole("layers")
    model = _gpt(hidden, cells.whole("heads"), layers, sequence, vocabulary)
    gpus, batch, tp, pp = (cells.whole(key) for key in ("gpus", "batch", "tp", "pp"))
    layout = Layout(dp=_spread(gpus, tp, pp), tp=tp, pp=pp)
    per_layer = 1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden)
    flops = 96.0 * batch * sequence * layers * hidden**2 * per_layer
    seconds = flops / (gpus * cells.number("tflops_per_gpu") * 1e12)
    works = tuple(
        _work(model, one, batch, MEGATRON_2021, "full") for one in _open_layouts(layout, layers, batch)
    )
    name = f"{cells.text('params_B')}B"
    yield PublishedRow(name, name, works, clusters("selene-2520xa100", gpus), seconds, works[0].model_flops)


def _recomputation(cells: TableCells, clusters: Clusters) -> Iterator[PublishedRow]:
    hidden, layers, gpus = cells.whole("hidden"), cells.whole("layers"), cells.whole("gpus")
    model = _gpt(hidden, cells.whole("heads"), layers, 2048, 51200)
    tp, pp = cells.whole("tp"), cells.whole("pp")
    layout = Layout(
        dp=_spread(gpus, tp, pp),
        tp=tp,
        pp=pp,
        virtual_stages=cells.whole("interleave"),
        micro_batch=cells.whole("mbs"),
    )
    cluster, batch = clusters("selene-2520xa100", gpus), cells.whole("gbs")
    ways: tuple[tuple[str, str, Framework, Recompute], ...] = (
        ("full recomputation", "full_recompute_s", MEGATRON_2022, "full"),
        ("sequence parallel, selective", "seqpar_selective_s", MEGATRON_2022_SEQUENCE, "selective"),
    )
    for way, column, system, recompute in ways:
        workload = _work(model, layout, batch, system, recompute)
        name = f"{cells.text('model')} {way}"
        yield PublishedRow(
            name, cells.text("model"), (workload,), cluster, cells.number(column), workload.model_flops
        )


def _megatron_core(cells: TableCells, clusters: Clusters) -> Iterator[PublishedRow]:
    sequence, layers = cells.whole("seq"), cells.whole("layers")
    model = _gpt(cells.whole("hidden"), cells.whole("heads"), layers, sequence, cells.whole("vocab"))
    gpus, batch, dp = cells.whole("gpus"), cells.whole("batch"), cells.whole("dp")
    layout = Layout(dp=dp, tp=cells.whole("tp"), pp=cells.whole("pp"), zero=1)
    works = tuple(_work(model, one, batch, MEGATRON_CORE) for one in _open_layouts(layout, layers, batch))
    flops, name = works[0].model_flops, f"{cells.text('params_B')}B"
    seconds = flops / (gpus * cells.number("tflops_per_gpu") * 1e12)
    yield PublishedRow(name, name, works, clusters("eos-3072xh100", gpus), seconds, flops)


def _llama(cells: TableCells, clusters: Clusters) -> Iterator[PublishedRow]:
    """Yield the rows of Llama 3 405B."""
    gpus, dp, batch = cells.whole("gpus"), cells.whole("dp"), cells.whole("batch_per_dp")
    model = ModelConfig(
        layers=126,
        hidden=16384,
        heads=128,
        kv_heads=8,
        ffn_hidden=53248,
        vocabulary=128256,
        sequence=cells.whole("seq"),
        activation="swiglu",
        tied=False,
    )
    layout = Layout(dp=dp, tp=cells.whole("tp"), pp=cells.whole("pp"), cp=cells.whole("cp"), zero=2)
    stages = [stages for stages in range(1, 9) if layout.pp * stages <= 126 + 2]
    works = tuple(
        _work(model, layout.model_copy(update={"virtual_stages": one}), dp * batch, LLAMA_3) for one in stages
    )
    cluster = clusters("llama3-8192xh100" if gpus <= 8192 else "llama3-24576xh100", gpus)
    flops = works[0].model_flops
    seconds = flops / (gpus * cluster.accelerator.peak_flops_per_second * cells.number("bf16_mfu_pct") / 100)
    yield PublishedRow(f"405B, {gpus} GPUs", "405B", works, cluster, seconds, flops)


def _vtrain(cells: TableCells, clusters: Clusters) -> Iterator[PublishedRow]:
    names = ("hidden size", "attention heads", "# layers", "sequence length", "global batch", "micro batch")
    hidden, heads, layers, sequence, batch, micro_batch = (cells.whole(name) for name in names)
    axes = ("tensor parallelism", "data parallelism", "pipeline parallelism")
    tp, dp, pp = (cells.whole(name) for name in axes)
    model = _gpt(hidden, heads, layers, sequence, 51200)
    workload = _work(
        model, Layout(dp=dp, tp=tp, pp=pp, micro_batch=micro_batch), batch, MEGATRON_2021, "full"
    )
    size, seconds = cells.text("Parameters (billion)"), cells.number("iteration time (ms)") / 1e3
    name = f"{size}B dp{dp} tp{tp} pp{pp} mb{micro_batch}"
    yield PublishedRow(
        name,
        size,
        (workload,),
        clusters("vtrain-512xa100", cells.whole("# GPUs")),
        seconds,
        workload.model_flops,
    )


TABLE_KINDS = (
    TableKind(
        "MegaScale, 175B",
        "arXiv 2402.15627, table 2",
        frozenset({"system", "gpus", "batch_sequences", "iteration_seconds"}),
        _megascale_175b,
        "megatron-lm-2023",
    ),
    TableKind(
        "MegaScale, 530B",
        "arXiv 2402.15627, figure 9",
        frozenset({"system", "gpus", "batch_sequences", "mfu_percent"}),
        _megascale_530b,
        "megatron-lm-2023",
    ),
    TableKind(
        "MegaScale, ablation",
        "arXiv 2402.15627, table 3",
        frozenset({"step", "mfu_percent"}),
        _megascale_step,
        "megascale",
    ),
    TableKind(
        "Megatron-LM, A100",
        "arXiv 2104.04473, table 1",
        frozenset(
            {"params_B", "heads", "hidden", "layers", "tp", "pp", "gpus", "batch", "pct_peak", "recompute"}
        ),
        _megatron_2021,
        "megatron-lm-2021",
    ),
    TableKind(
        "Recomputation, A100",
        "arXiv 2205.05198, table 5",
        frozenset({"full_recompute_s", "seqpar_selective_s"}),
        _recomputation,
        "megatron-lm-2022",
    ),
    TableKind(
        "Megatron-Core, H100",
        "README of Megatron-LM r0.8.0",
        frozenset({"params_B", "heads", "hidden", "layers", "tp", "pp", "dp", "tflops_per_gpu", "mfu_pct"}),
        _megatron_core,
        "megatron-core-0.8",
    ),
    TableKind(
        "Llama 3 405B, H100",
        "arXiv 2407.21783, table 4",
        frozenset({"gpus", "tp", "cp", "pp", "dp", "seq", "batch_per_dp"}),
        _llama,
        "llama-3",
    ),
    TableKind(
        "vTrain, A100",
        "github.com/VIA-Research/vTrain (MIT licence)",
        frozenset({"Parameters (billion)", "iteration time (ms)"}),
        _vtrain,
        "megatron-lm-2021",
    ),
)
