"""Training logs of other systems as rows of the general form.

    Megatron-LM, Megatron Bridge   iteration 20/ 100 | ... elapsed time per iteration (ms): 5444.9 | ...
    NeMo                           Training epoch 0, iteration 20/99 | ... train_step_timing in s: 5.99
    nanotron                       iteration: 20 / 100 | ... time_per_iteration_ms: 1.2K | ...
    torchtitan                     step: 20  loss: ...  tps: 6,543  tflops: 380.10  mfu: 38.43%

The kind of a log is that of the line it has. Times are the median of the second half of these lines, past the
start and, with a batch-size ramp, near its end. Peak memory is the largest that a line of the system's own
reports, of any rank. Everything else is from the configuration that the log prints
before: a name and a value in any of ``name ..... value``, ``name: value``, ``name=value`` and JSON, in the
names of that system; the first one counts.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from myriad.errors import BadInputError

__all__ = ["LOG_COLUMNS", "log_cells"]

Cells = dict[str, str]
"""Text of each cell that is not empty, by its column of the general form."""
_Names = Mapping[str, Sequence[str]]

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_OFF = frozenset({"None", "null", "False", "false", "0", ""})


@dataclass(frozen=True)
class _Kind:
    """How the log of one system is read."""

    framework: str
    """Name of the system's framework file."""
    line: re.Pattern[str]
    """A line of an iteration; the first group is what it measured."""
    measure: str
    """Column of what is measured."""
    scale: float
    """Factor from the line's unit to the column's."""
    names: _Names
    """Names of whole numbers of the configuration by column; the first that the log has counts."""
    complete: Callable[["_Log", Cells], None]
    """Fills cells that follow from several values."""
    memory: Mapping[str, "_MemoryLine"] = field(default_factory=dict)
    """Lines of peak memory by column."""


@dataclass(frozen=True)
class _MemoryLine:
    """A line of peak memory."""

    line: re.Pattern[str]
    """The first group is a number of ``unit``."""
    unit: str


@dataclass(frozen=True)
class _Log:
    """The text of a log, without colours."""

    text: str
    found: dict[str, str] = field(default_factory=dict)

    def value(self, name: str) -> str | None:
        """Return the first value of a name of the configuration; ``None``: the log has none."""
        pattern = (
            rf"""(?<![\w.])["']?{re.escape(name)}["']?(?:[ ]\.{{2,}}[ ]?|[ \t]*[:=][ \t]*)["']?([\w.+-]+)"""
        )
        if name not in self.found and (one := re.search(pattern, self.text)):
            self.found[name] = one[1]
        return self.found.get(name)

    def has(self, name: str) -> bool:
        """Return whether a switch of the configuration is on."""
        return self.value(name) not in _OFF | {None}

    def match(self, pattern: str) -> str | None:
        """Return the first group of the first match."""
        found = re.search(pattern, self.text)
        return found[1] if found else None


def log_cells(name: str, text: str) -> Cells:
    """Return the row of a log. ``name``: the file, for errors. Raises `BadInputError`."""
    log = _Log(_COLOURS.sub("", text))
    for kind in _KINDS:
        if measured := kind.line.findall(log.text):
            return _cells_of(name, kind, log, measured)
    allowed = "a log of Megatron-LM, NeMo, nanotron or torchtitan: it has no line of an iteration's time"
    raise BadInputError("--from-log", name, allowed)


def _cells_of(name: str, kind: _Kind, log: _Log, measured: Sequence[str]) -> Cells:
    values = [_number(one) * kind.scale for one in measured]
    cells = {"source": name, "framework": kind.framework}
    for column, names in kind.names.items():
        given = (log.value(one) for one in names)
        if said := next((one for one in given if one and _WHOLE.fullmatch(one)), None):
            cells[column] = said
    kind.complete(log, cells)
    for column, one in kind.memory.items():
        if sizes := one.line.findall(log.text):
            cells[column] = f"{max(map(float, sizes)):.12g} {one.unit}"
    missing = [column for column in ("gpus", "global_batch") if column not in cells]
    if missing:
        allowed = f"a log with the configuration at its start: {', '.join(missing)} is not in it"
        raise BadInputError("--from-log", name, allowed)
    steady = values[len(values) // 2 :]
    return cells | {kind.measure: f"{median(steady):.6g}", "notes": f"median of {len(steady)} lines"}


_WHOLE = re.compile(r"[1-9]\d{0,11}")
_UNITS = {"K": 1e3, "M": 1e6, "G": 1e9}


def _number(text: str) -> float:
    """Return a number with thousands separators, or one of nanotron's, such as 11.5K."""
    return float(text.rstrip("KMG").replace(",", "")) * _UNITS.get(text[-1], 1.0)


def _product(cells: Cells, *columns: str) -> int:
    found = 1
    for column in columns:
        found *= int(cells.get(column, "1"))
    return found


# Megatron-LM, Megatron Bridge and NeMo

_MEGATRON: _Names = {
    "layers": ("num_layers",),
    "hidden": ("hidden_size",),
    "ffn": ("ffn_hidden_size",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_query_groups",),
    "vocab": ("padded_vocab_size", "vocab_size"),
    "seq": ("seq_length", "encoder_seq_length", "seq_len"),
    "experts": ("num_experts", "num_moe_experts"),
    "experts_per_token": ("moe_router_topk",),
    "expert_ffn": ("moe_ffn_hidden_size",),
    "etp": ("expert_tensor_parallel_size",),
    "gpus": ("world_size",),
    "nodes": ("num_nodes",),
    "devices": ("devices",),
    "tp": ("tensor_model_parallel_size",),
    "pp": ("pipeline_model_parallel_size",),
    "cp": ("context_parallel_size",),
    "ep": ("expert_model_parallel_size",),
    "vpp": ("virtual_pipeline_model_parallel_size",),
    "micro_batch": ("micro_batch_size",),
    "global_batch": ("global_batch_size",),
}


def _megatron(log: _Log, cells: Cells) -> None:
    if batches := re.findall(r"global[ _]batch[ _]size:\s+(\d+)", log.text):
        cells["global_batch"] = batches[-1]
    started = log.match(r"Starting with (\d+) processes")
    nodes = [cells.pop(one, "") for one in ("nodes", "devices")]
    if "gpus" not in cells and started:
        cells["gpus"] = started
    elif "gpus" not in cells and all(nodes):
        cells["gpus"] = str(int(nodes[0]) * int(nodes[1]))
    if log.value("group_query_attention") in ("False", "false"):
        cells.pop("kv_heads", None)
    gated = log.has("swiglu") or log.has("gated_linear_unit")
    plain = not gated and log.value("normalization") not in ("RMSNorm",)
    cells["model"] = f"{'gpt' if plain else 'llama'}-{cells.get('layers')}x{cells.get('hidden')}"
    cells["activation"] = "swiglu" if gated else "gelu"
    if "experts" not in cells:
        for column in ("experts_per_token", "expert_ffn", "etp"):
            cells.pop(column, None)
    cells["zero"] = "1" if log.has("use_distributed_optimizer") else "0"
    again = log.value("recompute_granularity")
    cells["recompute"] = again if again in ("full", "selective") else "none"
    cells["dtype"] = _megatron_type(log)


def _megatron_type(log: _Log) -> str:
    if log.has("fp8"):
        return "fp8-blocks" if log.value("fp8_recipe") in ("blockwise", "mxfp8") else "fp8"
    return "bf16" if log.has("bf16") or not log.has("fp16") else "fp16"


# nanotron

_NANOTRON: _Names = {
    "layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "ffn": ("intermediate_size",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "vocab": ("vocab_size",),
    "seq": ("sequence_length",),
    "dp": ("dp",),
    "tp": ("tp",),
    "pp": ("pp",),
    "cp": ("context_parallel_size",),
    "micro_batch": ("micro_batch_size",),
    "accumulated": ("batch_accumulation_per_replica",),
}


def _nanotron(log: _Log, cells: Cells) -> None:
    cells["model"] = f"llama-{cells.get('layers')}x{cells.get('hidden')}"
    cells["recompute"] = "full" if log.has("recompute_layer") else "none"
    cells["zero"] = "1" if log.value("zero_stage") == "1" else "0"
    if "dp" in cells:
        cells["gpus"] = str(_product(cells, "dp", "tp", "pp", "cp"))
        cells["global_batch"] = str(_product(cells, "dp", "micro_batch", "accumulated"))
    cells.pop("accumulated", None)


# torchtitan

_TORCHTITAN: _Names = {
    "layers": ("n_layers",),
    "hidden": ("dim",),
    "heads": ("n_heads",),
    "kv_heads": ("n_kv_heads",),
    "vocab": ("vocab_size",),
    "seq": ("seq_len", "max_context_length"),
    "micro_batch": ("local_batch_size",),
}
_MESH = {"pp": "pp", "cp": "cp", "tp": "tp", "ep": "ep"}


def _torchtitan(log: _Log, cells: Cells) -> None:
    built = re.search(r"Building (?!device|\d-D)([\w.-]+) (\S+)(?= with| on|\n|$)", log.text)
    if built:
        cells["model"] = f"{built[1]}-{built[2]}".lower()
    if length := log.match(r"(?:sequence|maximum context) length (\d+)"):
        cells["seq"] = length
    if local := log.match(r"local batch size (\d+)"):
        cells["micro_batch"] = local
    mesh = _mesh(log)
    cells |= {column: mesh[axis] for axis, column in _MESH.items() if mesh.get(axis, "1") != "1"}
    shards, copies = mesh.get("dp_shard", "1"), mesh.get("dp_replicate", "1")
    cells["zero"] = "3" if shards != "1" else "0"
    if shards != "1" and copies != "1":
        cells["shard_group"] = shards
    if mesh:
        cells["gpus"] = str(_product(mesh, "pp", "dp_replicate", "dp_shard", "cp", "tp"))
    if whole := log.match(r"global batch size (\d+)"):
        cells["global_batch"] = whole
    elif (tokens := log.match(r"(\d+) tokens per train step")) and int(cells.get("seq", 0)):
        cells["global_batch"] = str(int(tokens) // int(cells["seq"]))
    cells["recompute"] = log.match(r"Applied (selective|full) activation checkpointing") or "none"
    if device := log.match(r"(?:CUDA|GPU) capacity: (?:NVIDIA |AMD )?(?:Instinct )?(\w+)"):
        cells["gpu_type"] = device
    if log.match(r"(?i)(float8|mxfp8) training active|(?:Swapped|Converted) to (\w*Float8|MX)\w*Linear"):
        cells["dtype"] = "fp8-blocks" if re.search(r"(?i)mxfp8 training active", log.text) else "fp8"


def _mesh(log: _Log) -> Cells:
    """Return the degrees of the device mesh: ``pp=1, dp_shard=8``, or ``['dp_shard', 'tp'], [4, 2]``."""
    if pairs := log.match(r"Building device mesh with parallelism: ([^\n]+)"):
        return dict(re.findall(r"(\w+)=(\d+)", pairs))
    both = re.search(r"Building \d-D device mesh with \[([^\]]+)\], \[([^\]]+)\]", log.text)
    if both is None:
        return {}
    names = re.findall(r"\w+", both[1])
    return dict(zip(names, re.findall(r"\d+", both[2]), strict=False))


_SIZE = r"(\d+(?:\.\d+)?)"
_KINDS = (
    _Kind(
        "megatron-core",
        re.compile(r"elapsed time per iteration \(ms\): (\d+(?:\.\d+)?)"),
        "iteration_s",
        1e-3,
        _MEGATRON,
        _megatron,
        {
            "allocated_bytes": _MemoryLine(re.compile(rf"\| max allocated: {_SIZE}"), "MiB"),
            "reserved_bytes": _MemoryLine(re.compile(rf"\| max reserved: {_SIZE}"), "MiB"),
        },
    ),
    _Kind(
        "megatron-core",
        re.compile(r"train_step_timing in s: (\d+(?:\.\d+)?)"),
        "iteration_s",
        1.0,
        _MEGATRON,
        _megatron,
    ),
    _Kind(
        "nanotron",
        re.compile(r"\b(?:elapsed_)?time_per_iteration_ms: (\d+(?:\.\d+)?[KMG]?)"),
        "iteration_s",
        1e-3,
        _NANOTRON,
        _nanotron,
        # "Peak allocated" is of another moment than in its tables (`FrameworkMemory.reports`).
        {"reserved_bytes": _MemoryLine(re.compile(rf"Peak reserved: {_SIZE}MiB"), "MiB")},
    ),
    _Kind(
        "torchtitan",
        re.compile(r"\bstep: +\d+ .*?\btps: (\d[\d,]*)"),
        "tokens_per_s_per_gpu",
        1.0,
        _TORCHTITAN,
        _torchtitan,
        {"reserved_bytes": _MemoryLine(re.compile(rf"\bmemory: +{_SIZE}GiB"), "GiB")},
    ),
)
LOG_COLUMNS = (
    "source", "framework", "model", "layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "seq",
    "experts", "experts_per_token", "expert_ffn", "shared_experts", "activation", "global_batch", "gpus",
    "gpu_type", "tp", "pp", "dp", "cp", "ep", "etp", "vpp", "zero", "shard_group", "schedule", "micro_batch",
    "recompute", "dtype", "iteration_s", "tokens_per_s_per_gpu", "allocated_bytes", "reserved_bytes", "notes",
)  # fmt: skip
"""Columns that a log or a run may fill, in the order in which a table has them."""
