"""Published iteration times, each row as what has to be predicted.

A table is recognised by its columns, so that other rows of the same kind can be put to the model. What a row
leaves open (micro-batch, virtual stages) is fixed by one rule for all: of the choices that are legal and
whose memory fits, the one that is predicted to be the quickest, as its authors will have searched for it too.
"""

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from pydantic import ValidationError

from myriad.comm.layout import Layout, check_layout
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
from myriad.whole_file import read_regular

__all__ = ["Clusters", "Row", "Table", "read_table", "ready_tables"]

Clusters = Callable[[str, int], Cluster]
"""A ready cluster by name, with so many accelerators."""


_MOST_BYTES = 2**28
_MOST = 1e12
"""Above any number in a table."""


@dataclass(frozen=True)
class Cells:
    """A row of a file; each cell is checked where it is read. All methods raise `BadInputError`."""

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
        """Return one of a few words."""
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
        """The error about a cell."""
        value = self.values.get(column)
        shown = value if value is None or len(value) <= _MOST_SHOWN else f"{value[:_MOST_SHOWN]}..."
        return BadInputError(f"{self.place}, column {column!r}", shown, allowed)


_MOST_SHOWN = 60
"""Characters of a cell in an error."""


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
    system: str = ""
    """The system that was measured, where a table compares several."""
    setting: str = ""
    """What several systems of a table were given alike: model, GPUs and batch."""

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
    read: Callable[[Cells, Clusters], Iterator[Row]]


def ready_tables() -> list[str]:
    """Files that come with the project and hold iterations."""
    folder = resources.files("myriad.planner") / "tables"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".csv"))
    return [
        name
        for name in names
        if _kind_of(frozenset(_columns((folder / name).read_text(encoding="utf-8")))) is not None
    ]


def read_table(name_or_path: str, clusters: Clusters) -> Table:
    """A table that comes with the project, or a file with the same columns. Raises `BadInputError`."""
    text = _text(name_or_path)
    columns = _columns(text)
    kind = _kind_of(frozenset(columns))
    twice = sorted(column for column, count in Counter(columns).items() if count > 1)
    if kind is not None and twice:
        raise BadInputError("TABLE", name_or_path, f"each column once: {', '.join(twice)} is there twice")
    if kind is None and any(len(columns) == 1 and mark in columns[0] for mark in ";\t"):
        raise BadInputError("TABLE", name_or_path, "columns that commas separate: not ; nor tabs")
    if kind is None:
        allowed = "; ".join(f"{known.title}: {', '.join(sorted(known.columns))}" for known in _KINDS)
        raise BadInputError("TABLE", name_or_path, f"columns of one of these are needed: {allowed}")
    rows: list[Row] = []
    for place, values in _lines(name_or_path, text):
        rows += _rows_of(kind, Cells(place, values), clusters)
    if not rows:
        raise BadInputError("TABLE", name_or_path, "has no rows")
    return Table(Path(name_or_path).stem, kind.title, kind.source, tuple(rows))


def _lines(name: str, text: str) -> Iterator[tuple[str, dict[str, str | None]]]:
    """Place and cells of each line."""
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        for values in reader:
            place = f"{name}, line {reader.line_num}"
            if None in values:
                raise BadInputError(place, values[None], "more cells than the header has columns")
            yield place, values
    except csv.Error as error:
        raise BadInputError("TABLE", name, f"not CSV at line {reader.line_num}: {error}") from None


def _rows_of(kind: _Kind, cells: Cells, clusters: Clusters) -> list[Row]:
    """What a line says, as far as it can be planned. Raises `BadInputError` with its place."""
    try:
        rows = list(kind.read(cells, clusters))
        for row in rows:
            _check(row)
    except ValidationError as error:
        one = error.errors()[0]
        key, allowed = ".".join(map(str, one["loc"])), one["msg"][0].lower() + one["msg"][1:]
        raise BadInputError(cells.place, f"{key} = {one['input']}", allowed) from None
    except BadInputError as error:
        if error.key.startswith(cells.place):
            raise
        raise BadInputError(cells.place, f"{error.key} = {error.value}", error.allowed) from None
    return rows


def _check(row: Row) -> None:
    """Whether a row's works can be. Raises `BadInputError`."""
    for work in row.works:
        model, layout, world = work.model, work.layout, row.cluster.world
        check_layout(layout)
        layout.shares_of(work.global_batch, "batch")
        if layout.world != world:
            raise BadInputError("dp x tp x pp", layout.world, f"the {world} GPUs of the row")
        if layout.num_stages > model.layers + 2:
            raise BadInputError("stages", layout.num_stages, f"at most {model.layers + 2} for these layers")
        if model.hidden % model.heads or model.heads % layout.tp:
            allowed = f"heads that divide hidden = {model.hidden} and that tp = {layout.tp} divides"
            raise BadInputError("heads", model.heads, allowed)
        if work.global_batch > _MOST_BATCH or work.num_micro_batches > _MOST_MICRO_BATCHES:
            allowed = f"at most {_MOST_BATCH:,} sequences, {_MOST_MICRO_BATCHES:,} micro-batches of a replica"
            raise BadInputError("batch", work.global_batch, allowed)


_MOST_BATCH, _MOST_MICRO_BATCHES = 2**24, 100_000


def _text(name_or_path: str) -> str:
    ready = resources.files("myriad.planner") / "tables" / name_or_path
    if "/" not in name_or_path and ready.is_file():
        return ready.read_text(encoding="utf-8")
    try:
        return read_regular(Path(name_or_path), _MOST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadInputError("TABLE", name_or_path, "not UTF-8") from None
    except OSError as error:
        raise BadInputError("TABLE", name_or_path, f"cannot be read: {error.strerror}") from None


def _columns(text: str) -> list[str]:
    """The names in the first line."""
    return next(csv.reader(text.splitlines()[:1]), [])


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


def _spread(gpus: int, tp: int, pp: int) -> int:
    """Return the number of data-parallel replicas. Raises `BadInputError`."""
    if gpus % (tp * pp):
        raise BadInputError("gpus", gpus, f"a multiple of tp x pp = {tp * pp}")
    return gpus // (tp * pp)


def _open_layouts(layout: Layout, layers: int, batch: int) -> Iterator[Layout]:
    """All legal micro-batches and virtual stages."""
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
    """Megatron-LM interleaves equal stages only, and as many micro-batches as make whole rounds."""
    yield 1
    if pp > 1 and layers % pp == 0 and num_micro_batches % pp == 0:
        own = layers // pp
        yield from (stages for stages in range(2, own + 1) if own % stages == 0)


# MegaScale, arXiv 2402.15627

_175B = _gpt(12288, 128, 96, 2048, 64000)
_530B = _gpt(20480, 160, 105, 2048, 64000)
_WINDOWS = {"window": 512, "window_pattern": (True, False)}
"""Not published; chosen so that the FLOPs are the 1.1 % fewer that the published MFU implies."""
_175B_LAYOUT = {"tp": 8, "pp": 8, "virtual_stages": 6}
_530B_LAYOUT = {"tp": 8, "pp": 35, "virtual_stages": 3}


def _megascale_175b(cells: Cells, clusters: Clusters) -> Iterator[Row]:
    yield _megascale_scaling("175B", _175B, _175B_LAYOUT, cells, clusters)


def _megascale_530b(cells: Cells, clusters: Clusters) -> Iterator[Row]:
    """The figure gives MFU alone, and a batch of as many sequences as there are GPUs."""
    yield _megascale_scaling("530B", _530B, _530B_LAYOUT, cells, clusters)


def _megascale_scaling(
    size: str, model: ModelConfig, axes: Mapping[str, int], cells: Cells, clusters: Clusters
) -> Row:
    """One system on so many GPUs, measured in seconds or as MFU."""
    gpus, batch = cells.whole("gpus"), cells.whole("batch_sequences")
    system = cells.one_of("system", ("Megatron-LM", "MegaScale"))
    how, zero = MEGATRON_2023, 1
    if system == "MegaScale":
        model, how, zero = model.model_copy(update={"block": "parallel", **_WINDOWS}), MEGASCALE, 2
    work = _work(model, Layout(dp=_spread(gpus, axes["tp"], axes["pp"]), zero=zero, **axes), batch, how)
    cluster = clusters("megascale-12288xa100", gpus)
    seconds = _seconds(cells, work.model_flops, cluster)
    name, setting = f"{system} {gpus} GPUs", f"{size}, {gpus:,} GPUs"
    return Row(name, system, (work,), cluster, seconds, work.model_flops, system, setting)


def _seconds(cells: Cells, model_flops: float, cluster: Cluster) -> float:
    """Seconds of an iteration, from its MFU where the source gives only that."""
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


def _megascale_step(cells: Cells, clusters: Clusters) -> Iterator[Row]:
    step = _ABLATION.index(cells.one_of("step", _ABLATION))
    model = _175B
    if step >= 1:
        model = model.model_copy(update={"block": "parallel", **(_WINDOWS if step >= 2 else {})})
    overlap = MEGATRON_2023.overlap.model_copy(
        update={"tensor": "turns" if step >= 3 else None, "pipeline": step >= 4, "data": step >= 5}
    )
    practice = MEGASCALE.practice if step >= 6 else MEGATRON_2023.practice
    practice = replace(practice, tensor_parts=MEGASCALE.practice.tensor_parts)
    if step == 6:
        practice = replace(practice, host_seconds=MEGATRON_2023.practice.host_seconds)
    layout = Layout(dp=4, zero=2 if step >= 5 else 1, **_175B_LAYOUT)
    batch = 768 if step >= 8 else 256
    work = Work(model, layout, batch, overlap, practice, optimizer="lamb" if step >= 8 else "adamw")
    cluster = clusters("megascale-12288xa100", 256)
    seconds = _seconds(cells, work.model_flops, cluster)
    yield Row(cells.text("step"), cells.text("step"), (work,), cluster, seconds, work.model_flops)


# Megatron-LM


def _megatron_2021(cells: Cells, clusters: Clusters) -> Iterator[Row]:
    """Its FLOPs are those of full recomputation: 96 B s L h^2 (1 + s/6h + V/16Lh)."""
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
    yield Row(name, name, works, clusters("selene-2520xa100", gpus), seconds, works[0].model_flops)


def _recomputation(cells: Cells, clusters: Clusters) -> Iterator[Row]:
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
    ways: tuple[tuple[str, str, System, Recompute], ...] = (
        ("full recomputation", "full_recompute_s", MEGATRON_2022, "full"),
        ("sequence parallel, selective", "seqpar_selective_s", MEGATRON_2022_SEQUENCE, "selective"),
    )
    for way, column, system, recompute in ways:
        work = _work(model, layout, batch, system, recompute)
        name = f"{cells.text('model')} {way}"
        yield Row(name, cells.text("model"), (work,), cluster, cells.number(column), work.model_flops)


def _megatron_core(cells: Cells, clusters: Clusters) -> Iterator[Row]:
    sequence, layers = cells.whole("seq"), cells.whole("layers")
    model = _gpt(cells.whole("hidden"), cells.whole("heads"), layers, sequence, cells.whole("vocab"))
    gpus, batch, dp = cells.whole("gpus"), cells.whole("batch"), cells.whole("dp")
    layout = Layout(dp=dp, tp=cells.whole("tp"), pp=cells.whole("pp"), zero=1)
    works = tuple(_work(model, one, batch, MEGATRON_CORE) for one in _open_layouts(layout, layers, batch))
    flops, name = works[0].model_flops, f"{cells.text('params_B')}B"
    seconds = flops / (gpus * cells.number("tflops_per_gpu") * 1e12)
    yield Row(name, name, works, clusters("eos-3072xh100", gpus), seconds, flops)


def _llama(cells: Cells, clusters: Clusters) -> Iterator[Row]:
    """Llama 3 405B; rows with context parallelism are left out, as Myriad has none."""
    if cells.whole("cp") != 1:
        return
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
    layout = Layout(dp=dp, tp=cells.whole("tp"), pp=cells.whole("pp"), zero=2)
    stages = [stages for stages in range(1, 9) if layout.pp * stages <= 126 + 2]
    works = tuple(
        _work(model, layout.model_copy(update={"virtual_stages": one}), dp * batch, LLAMA_3) for one in stages
    )
    cluster = clusters("llama3-8192xh100", gpus)
    flops = works[0].model_flops
    seconds = flops / (gpus * cluster.accelerator.peak_flops_per_second * cells.number("bf16_mfu_pct") / 100)
    yield Row(f"405B, {gpus} GPUs", "405B", works, cluster, seconds, flops)


def _vtrain(cells: Cells, clusters: Clusters) -> Iterator[Row]:
    names = ("hidden size", "attention heads", "# layers", "sequence length", "global batch", "micro batch")
    hidden, heads, layers, sequence, batch, micro_batch = (cells.whole(name) for name in names)
    axes = ("tensor parallelism", "data parallelism", "pipeline parallelism")
    tp, dp, pp = (cells.whole(name) for name in axes)
    model = _gpt(hidden, heads, layers, sequence, 51200)
    work = _work(model, Layout(dp=dp, tp=tp, pp=pp, micro_batch=micro_batch), batch, MEGATRON_2021, "full")
    size, seconds = cells.text("Parameters (billion)"), cells.number("iteration time (ms)") / 1e3
    name = f"{size}B dp{dp} tp{tp} pp{pp} mb{micro_batch}"
    yield Row(
        name, size, (work,), clusters("vtrain-512xa100", cells.whole("# GPUs")), seconds, work.model_flops
    )


_KINDS = (
    _Kind(
        "MegaScale, 175B",
        "arXiv 2402.15627, table 2",
        frozenset({"system", "gpus", "batch_sequences", "iteration_seconds"}),
        _megascale_175b,
    ),
    _Kind(
        "MegaScale, 530B",
        "arXiv 2402.15627, figure 9",
        frozenset({"system", "gpus", "batch_sequences", "mfu_percent"}),
        _megascale_530b,
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
