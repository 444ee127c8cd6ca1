"""Published iteration times, each row as what has to be predicted.

A table is recognised by its columns, so that other rows of the same kind can be put to the model. What a row
leaves open (micro-batch, virtual stages) is fixed by one rule for all: of the choices that are legal and
whose memory fits, the one that is predicted to be the quickest, as its authors will have searched for it too.
"""

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.model.config import ModelConfig
from myriad.planner.cluster import Cluster
from myriad.planner.systems import (
    LLAMA_3,
    MEGASCALE,
    MEGATRON_2021,
    MEGATRON_2022,
    MEGATRON_2022_SEQUENCE,
    MEGATRON_2023,
    MEGATRON_CORE,
    System,
)
from myriad.planner.work import Recompute, Work

__all__ = ["Clusters", "Row", "Table", "read_table", "ready_tables"]

Clusters = Callable[[str, int], Cluster]
"""A ready cluster by name, with so many accelerators."""
_Cells = Mapping[str, str]


@dataclass(frozen=True)
class Row:
    """One published iteration."""

    name: str
    model: str
    """Which rows are of one model, for leaving it out."""
    works: tuple[Work, ...]
    """What it may have been; one where the source says it all."""
    cluster: Cluster
    seconds: float
    reference_flops: float
    """Model FLOPs of an iteration as its source counts them, for MFU."""

    def mfu(self, seconds: float) -> float:
        """Of an iteration that takes so long."""
        peak = self.cluster.world * self.cluster.accelerator.peak_flops_per_second
        return self.reference_flops / (peak * seconds)


@dataclass(frozen=True)
class Table:
    """A file's rows."""

    name: str
    title: str
    source: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class _Kind:
    title: str
    source: str
    columns: frozenset[str]
    """By which it is recognised."""
    read: Callable[[_Cells, Clusters], Iterator[Row]]


def ready_tables() -> list[str]:
    """Files that come with the project and hold iterations."""
    folder = resources.files("myriad.planner") / "tables"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".csv"))
    return [name for name in names if _kind_of(_header((folder / name).read_text())) is not None]


def read_table(name_or_path: str, clusters: Clusters) -> Table:
    """A table that comes with the project, or a file with the same columns. Raises `BadInputError`."""
    text = _text(name_or_path)
    kind = _kind_of(_header(text))
    if kind is None:
        allowed = "; ".join(f"{known.title}: {', '.join(sorted(known.columns))}" for known in _KINDS)
        raise BadInputError("TABLE", name_or_path, f"columns of one of these are needed: {allowed}")
    rows: list[Row] = []
    for number, cells in enumerate(csv.DictReader(text.splitlines()), 2):
        try:
            rows += kind.read(cells, clusters)
        except (KeyError, ValueError, TypeError, ZeroDivisionError) as error:
            raise BadInputError("TABLE", f"{name_or_path}:{number}", f"cannot be read: {error}") from None
    if not rows:
        raise BadInputError("TABLE", name_or_path, "has no rows")
    return Table(Path(name_or_path).stem, kind.title, kind.source, tuple(rows))


def _text(name_or_path: str) -> str:
    ready = resources.files("myriad.planner") / "tables" / name_or_path
    if "/" not in name_or_path and ready.is_file():
        return ready.read_text(encoding="utf-8")
    try:
        return Path(name_or_path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError("TABLE", name_or_path, f"cannot be read: {error}") from None


def _header(text: str) -> frozenset[str]:
    first = next(csv.reader(text.splitlines()[:1]), [])
    return frozenset(first)


def _kind_of(header: frozenset[str]) -> _Kind | None:
    return next((kind for kind in _KINDS if kind.columns <= header), None)


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
    model: ModelConfig, layout: Layout, batch: int, system: System, recompute: Recompute = "none"
) -> Work:
    layout = layout.model_copy(update={"recompute": recompute})
    return Work(model, layout, batch, system.overlap, system.practice)


def _open_layouts(layout: Layout, layers: int, batch: int) -> Iterator[Layout]:
    """All legal micro-batches and virtual stages."""
    for micro_batch in (1, 2, 4, 8):
        if batch % (layout.dp * micro_batch):
            continue
        num_micro_batches = batch // (layout.dp * micro_batch)
        for virtual_stages in _virtual_stages(layout.pp, layers, num_micro_batches):
            changes = {"micro_batch": micro_batch, "virtual_stages": virtual_stages}
            yield layout.model_copy(update=changes)


def _virtual_stages(pp: int, layers: int, num_micro_batches: int) -> Iterator[int]:
    """Megatron-LM interleaves equal stages only, and as many micro-batches as make whole rounds."""
    yield 1
    if pp > 1 and layers % pp == 0 and num_micro_batches % pp == 0:
        own = layers // pp
        yield from (stages for stages in range(2, own + 1) if own % stages == 0)


# MegaScale, arXiv 2402.15627

_175B = _gpt(12288, 128, 96, 2048, 64000)
_WINDOWS = {"window": 512, "window_pattern": (True, False)}
"""Not published; chosen so that the FLOPs are the 1.1 % fewer that the published MFU implies."""
_MEGASCALE_LAYOUT = {"tp": 8, "pp": 8, "virtual_stages": 6}


def _megascale_scaling(cells: _Cells, clusters: Clusters) -> Iterator[Row]:
    gpus, batch, system = int(cells["gpus"]), int(cells["batch_sequences"]), cells["system"]
    model, how, zero = _175B, MEGATRON_2023, 1
    if system == "MegaScale":
        model, how, zero = _175B.model_copy(update={"block": "parallel", **_WINDOWS}), MEGASCALE, 2
    work = _work(model, Layout(dp=gpus // 64, zero=zero, **_MEGASCALE_LAYOUT), batch, how)
    cluster, seconds = clusters("megascale-12288xa100", gpus), float(cells["iteration_seconds"])
    yield Row(f"{system} {gpus} GPUs", system, (work,), cluster, seconds, work.model_flops)


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


def _megascale_step(cells: _Cells, clusters: Clusters) -> Iterator[Row]:
    step = _ABLATION.index(cells["step"])
    model = _175B
    if step >= 1:
        model = model.model_copy(update={"block": "parallel", **(_WINDOWS if step >= 2 else {})})
    overlap = MEGATRON_2023.overlap.model_copy(
        update={"tensor": step >= 3, "pipeline": step >= 4, "data": step >= 5}
    )
    practice = MEGASCALE.practice if step >= 6 else MEGATRON_2023.practice
    practice = replace(practice, tensor_parts=MEGASCALE.practice.tensor_parts)
    if step == 6:
        practice = replace(practice, host_seconds=MEGATRON_2023.practice.host_seconds)
    layout = Layout(dp=4, zero=2 if step >= 5 else 1, **_MEGASCALE_LAYOUT)
    batch = 768 if step >= 8 else 256
    work = Work(model, layout, batch, overlap, practice, optimizer="lamb" if step >= 8 else "adamw")
    cluster = clusters("megascale-12288xa100", 256)
    peak = cluster.world * cluster.accelerator.peak_flops_per_second
    seconds = work.model_flops / (peak * float(cells["mfu_percent"]) / 100)
    yield Row(cells["step"], cells["step"], (work,), cluster, seconds, work.model_flops)


# Megatron-LM


def _megatron_2021(cells: _Cells, clusters: Clusters) -> Iterator[Row]:
    """Its FLOPs are those of full recomputation: 96 B s L h^2 (1 + s/6h + V/16Lh)."""
    sequence, vocabulary = int(cells["seq"]), int(cells["vocab"])
    hidden, layers = int(cells["hidden"]), int(cells["layers"])
    model = _gpt(hidden, int(cells["heads"]), layers, sequence, vocabulary)
    gpus, batch, tp, pp = (int(cells[key]) for key in ("gpus", "batch", "tp", "pp"))
    layout = Layout(dp=gpus // (tp * pp), tp=tp, pp=pp)
    per_layer = 1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden)
    flops = 96.0 * batch * sequence * layers * hidden**2 * per_layer
    seconds = flops / (gpus * float(cells["tflops_per_gpu"]) * 1e12)
    works = tuple(
        _work(model, one, batch, MEGATRON_2021, "full") for one in _open_layouts(layout, layers, batch)
    )
    name = f"{cells['params_B']}B"
    yield Row(name, name, works, clusters("selene-2520xa100", gpus), seconds, works[0].model_flops)


def _recomputation(cells: _Cells, clusters: Clusters) -> Iterator[Row]:
    hidden, layers, gpus = int(cells["hidden"]), int(cells["layers"]), int(cells["gpus"])
    model = _gpt(hidden, int(cells["heads"]), layers, 2048, 51200)
    tp, pp = int(cells["tp"]), int(cells["pp"])
    layout = Layout(
        dp=gpus // (tp * pp),
        tp=tp,
        pp=pp,
        virtual_stages=int(cells["interleave"]),
        micro_batch=int(cells["mbs"]),
    )
    cluster, batch = clusters("selene-2520xa100", gpus), int(cells["gbs"])
    ways: tuple[tuple[str, str, System, Recompute], ...] = (
        ("full recomputation", "full_recompute_s", MEGATRON_2022, "full"),
        ("sequence parallel, selective", "seqpar_selective_s", MEGATRON_2022_SEQUENCE, "selective"),
    )
    for way, column, system, recompute in ways:
        work = _work(model, layout, batch, system, recompute)
        name = f"{cells['model']} {way}"
        yield Row(name, cells["model"], (work,), cluster, float(cells[column]), work.model_flops)


def _megatron_core(cells: _Cells, clusters: Clusters) -> Iterator[Row]:
    sequence, layers = int(cells["seq"]), int(cells["layers"])
    model = _gpt(int(cells["hidden"]), int(cells["heads"]), layers, sequence, int(cells["vocab"]))
    gpus, batch, dp = int(cells["gpus"]), int(cells["batch"]), int(cells["dp"])
    layout = Layout(dp=dp, tp=int(cells["tp"]), pp=int(cells["pp"]), zero=1)
    works = tuple(_work(model, one, batch, MEGATRON_CORE) for one in _open_layouts(layout, layers, batch))
    flops, name = works[0].model_flops, f"{cells['params_B']}B"
    seconds = flops / (gpus * float(cells["tflops_per_gpu"]) * 1e12)
    yield Row(name, name, works, clusters("eos-3072xh100", gpus), seconds, flops)


def _llama(cells: _Cells, clusters: Clusters) -> Iterator[Row]:
    """Llama 3 405B; rows with context parallelism are left out, as Myriad has none."""
    if int(cells["cp"]) != 1:
        return
    gpus, dp, batch = int(cells["gpus"]), int(cells["dp"]), int(cells["batch_per_dp"])
    model = ModelConfig(
        layers=126,
        hidden=16384,
        heads=128,
        kv_heads=8,
        ffn_hidden=53248,
        vocabulary=128256,
        sequence=int(cells["seq"]),
        activation="swiglu",
        tied=False,
    )
    layout = Layout(dp=dp, tp=int(cells["tp"]), pp=int(cells["pp"]), zero=2)
    stages = [stages for stages in range(1, 9) if layout.pp * stages <= 126 + 2]
    works = tuple(
        _work(model, layout.model_copy(update={"virtual_stages": one}), dp * batch, LLAMA_3) for one in stages
    )
    cluster = clusters("llama3-8192xh100", gpus)
    flops = works[0].model_flops
    seconds = flops / (gpus * cluster.accelerator.peak_flops_per_second * float(cells["bf16_mfu_pct"]) / 100)
    yield Row(f"405B, {gpus} GPUs", "405B", works, cluster, seconds, flops)


def _vtrain(cells: _Cells, clusters: Clusters) -> Iterator[Row]:
    names = ("hidden size", "attention heads", "# layers", "sequence length", "global batch", "micro batch")
    hidden, heads, layers, sequence, batch, micro_batch = (int(cells[name]) for name in names)
    axes = ("tensor parallelism", "data parallelism", "pipeline parallelism")
    tp, dp, pp = (int(cells[name]) for name in axes)
    model = _gpt(hidden, heads, layers, sequence, 51200)
    work = _work(model, Layout(dp=dp, tp=tp, pp=pp, micro_batch=micro_batch), batch, MEGATRON_2021, "full")
    size, seconds = cells["Parameters (billion)"], float(cells["iteration time (ms)"]) / 1e3
    name = f"{size}B dp{dp} tp{tp} pp{pp} mb{micro_batch}"
    yield Row(
        name, size, (work,), clusters("vtrain-512xa100", int(cells["# GPUs"])), seconds, work.model_flops
    )


_KINDS = (
    _Kind(
        "MegaScale, scaling",
        "arXiv 2402.15627, table 2",
        frozenset({"system", "gpus", "batch_sequences", "iteration_seconds"}),
        _megascale_scaling,
    ),
    _Kind(
        "MegaScale, ablation",
        "arXiv 2402.15627, table 3",
        frozenset({"step", "mfu_percent"}),
        _megascale_step,
    ),
    _Kind(
        "Megatron-LM, A100",
        "arXiv 2104.04473, table 1",
        frozenset(
            {"params_B", "heads", "hidden", "layers", "tp", "pp", "gpus", "batch", "pct_peak", "recompute"}
        ),
        _megatron_2021,
    ),
    _Kind(
        "Recomputation, A100",
        "arXiv 2205.05198, table 5",
        frozenset({"full_recompute_s", "seqpar_selective_s"}),
        _recomputation,
    ),
    _Kind(
        "Megatron-Core, H100",
        "README of Megatron-LM r0.8.0",
        frozenset({"params_B", "heads", "hidden", "layers", "tp", "pp", "dp", "tflops_per_gpu", "mfu_pct"}),
        _megatron_core,
    ),
    _Kind(
        "Llama 3 405B, H100",
        "arXiv 2407.21783, table 4",
        frozenset({"gpus", "tp", "cp", "pp", "dp", "seq", "batch_per_dp"}),
        _llama,
    ),
    _Kind(
        "vTrain, A100",
        "github.com/VIA-Research/vTrain (MIT licence)",
        frozenset({"Parameters (billion)", "iteration time (ms)"}),
        _vtrain,
    ),
)
