"""The columns of the general form (`general_form`), and the cells of a row; its notes fill empty ones.

What a source writes in its notes is read by a few phrases (`_PHRASES`), and a column of its own wins.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from myriad.config import parse_override
from myriad.errors import BadInputError
from myriad.planner.validation.published_rows import TableCells

__all__ = ["GENERAL_COLUMNS", "MEASURES", "MODEL_KEY", "GeneralCells", "is_general_column", "missing_columns"]

GENERAL_COLUMNS = [
    "source", "table", "model", "params_B", "layers", "hidden", "ffn", "heads", "kv_heads", "vocab",
    "seq", "experts", "experts_per_token", "expert_ffn", "shared_experts", "activation",
    "global_batch", "gpus", "gpu_type", "interconnect", "gpus_per_node", "tp", "pp", "dp", "cp",
    "ulysses", "ep", "etp", "vpp", "zero", "shard_group", "schedule", "micro_batch", "recompute", "dtype",
    "expert_dispatch", "expert_overlap", "fused_experts", "cuda_graphs", "iteration_s",
    "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "flops", "allocated_bytes", "reserved_bytes",
    "out_of_memory", "framework", "notes",
]  # fmt: skip
"""Names of all columns but those of further keys of the model; ``--columns`` maps others to them."""
MODEL_KEY = "model."
"""Prefix of the columns of further keys of the model."""
_NEEDED = frozenset({"model", "gpus", "gpu_type"})
MEASURES = frozenset({"iteration_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu"})
"""Columns that give the seconds of an iteration."""
_MEMORY = frozenset({"allocated_bytes", "reserved_bytes", "out_of_memory"})


def missing_columns(columns: frozenset[str]) -> list[str]:
    """Return what a table lacks of the general form: names of columns, and the measures of which it needs
    one."""
    missing = sorted(_NEEDED - columns)
    if columns & (MEASURES | _MEMORY):
        return missing
    measures = (column for column in GENERAL_COLUMNS if column in MEASURES | _MEMORY)
    return [*missing, f"one of {', '.join(measures)}"]


def is_general_column(column: str) -> bool:
    """Return whether a column is part of the general form."""
    return column in GENERAL_COLUMNS or column.startswith(MODEL_KEY)


_PHRASES: Mapping[str, tuple[str, ...]] = {
    "zero": (r"ZeRO[- ]?([0-3])\b", r"(FULL_SHARD|HYBRID_SHARD|HSDP)", r"(FSDP)(?! column)"),
    "shard_group": (r"ZeRO-[123] over (\d+)\b", r"\b(HSDP|HYBRID_SHARD)\b"),
    "schedule": (r"schedule ([\w-]+)",),
    "experts": (r"(\d+) experts",),
    "experts_per_token": (r"top-(\d+)",),
    "expert_ffn": (r"experts of (\d+)",),
    "shared_width": (r"shared (\d+)",),
    "expert_dispatch": (r"(DeepEP|HybridEP)", r"dispatcher (A2A)"),
    "expert_overlap": (r"all-to-all (overlap)",),
    "fused_experts": (r"(cuteDSL) fused grouped MLP",),
    "cuda_graphs": (r"CUDA graphs (?:of |transformer_engine )?(full|attn)",),
    "etp": (r"ETP (\d+)",),
    "micro_batch": (r"micro-batch (\d+)",),
    "grad_accum": (r"grad accum (\d+)",),
    "num_micro_batches": (r"(\d+) micro-batches",),
    "allocated_bytes": (r"(?:real|peak) memory ([\d.]+ Gi?B)",),
}
"""Phrases of the notes that fill a cell that is empty or has no column; the first that is found counts."""
_YES, _NO = ("yes", "true", "on", "1"), ("no", "false", "off", "none", "0")


@dataclass(frozen=True)
class GeneralCells:
    """A row, whose empty cells are filled from its notes."""

    cells: TableCells

    def word(self, column: str, default: str = "") -> str:
        """Return the text of a cell or of its phrase, or the default."""
        value = (self.cells.values.get(column) or "").strip()
        if value or column not in _PHRASES:
            return value or default
        notes = f"{self.cells.values.get('notes') or ''}; {self.cells.values.get('table') or ''}"
        found = (re.search(pattern, notes) for pattern in _PHRASES[column])
        return next((one.group(1) for one in found if one), default)

    def has(self, column: str) -> bool:
        """Return whether a cell, or its phrase, says something."""
        return bool(self.word(column))

    def whole(self, column: str, default: int | None = None) -> int:
        """Return a whole number of at least 1."""
        return int(self._number(column, default, whole=True))

    def number(self, column: str) -> float:
        """Return a number above 0."""
        return self._number(column, None, whole=False)

    def switch(self, column: str) -> bool | None:
        """Return whether a cell says yes, or notes have its phrase; ``None``: neither."""
        said = (self.cells.values.get(column) or "").strip().lower()
        if said not in ("", *_YES, *_NO):
            raise self.refused(column, "yes or no")
        return said in _YES if said else self.has(column) or None

    def model_keys(self) -> dict[str, Any]:
        """Return the keys of the model that columns of their own give."""
        said = ((name, (text or "").strip()) for name, text in self.cells.values.items())
        own = [(name, text) for name, text in said if name.startswith(MODEL_KEY) and text]
        return {name.removeprefix(MODEL_KEY): parse_override(f"{name}={text}")[1] for name, text in own}

    def refused(self, column: str, allowed: str) -> BadInputError:
        """Return the error about a cell, or the phrase that fills it."""
        shown = self.word(column) or self.cells.values.get(column)
        return TableCells(self.cells.place, {column: shown}).refused(column, allowed)

    def _number(self, column: str, default: int | None, *, whole: bool) -> float:
        text = self.word(column)
        if not text and default is not None:
            return default
        filled = TableCells(self.cells.place, {column: text})
        return filled.whole(column) if whole else filled.number(column)
