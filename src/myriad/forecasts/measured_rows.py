"""Training logs of other systems and runs of Myriad as a table of the general form."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from myriad.errors import BadInputError
from myriad.job import Job
from myriad.planner import log_cells
from myriad.planner.validation.log_rows import LOG_COLUMNS
from myriad.run.run_folder import Run
from myriad.run.run_speed import Peaks, run_speed
from myriad.system.jsonl import Record
from myriad.system.whole_file import read_regular, refuse_gzip

__all__ = ["TABLE_HEAD", "measured_table", "run_cells"]

TABLE_HEAD = ",".join(LOG_COLUMNS)
"""First line of a table of logs and runs."""

_MOST_BYTES = 2**28
"""Largest size of a log."""


def measured_table(paths: Sequence[str]) -> str:
    """Return the CSV text of a table with a row for each log and run folder. Raises `BadInputError`."""
    rows = [run_cells(Run(one)) if Path(one).is_dir() else log_cells(one, _log_text(one)) for one in paths]
    text = io.StringIO()
    table = csv.DictWriter(text, LOG_COLUMNS, restval="", lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def _log_text(path: str) -> str:
    try:
        data = read_regular(Path(path), _MOST_BYTES)
    except OSError as error:
        allowed = f"a log or a run folder: it cannot be read ({error.strerror})"
        raise BadInputError("--from-log", path, allowed) from None
    refuse_gzip("--from-log", path, data)
    return data.decode("utf-8", errors="replace")


def run_cells(run: Run) -> Mapping[str, str]:
    """Return the row of a run: its newest attempt, past its first steps. Raises `BadInputError`."""
    job, events = run.job(), run.read_events()
    speed = run_speed(run.read_metrics(), Peaks(events))
    if speed is None:
        raise BadInputError("--from-log", str(run.path), "a run with at least one complete step")
    layout, train = job.layout, job.train
    cells: dict[str, object] = {
        "source": str(run.path),
        "framework": "myriad",
        **_model_cells(job),
        "global_batch": train.global_batch,
        "gpus": layout.world,
        **{key: getattr(layout, key) for key in ("tp", "pp", "dp", "cp", "ep", "zero", "recompute")},
        "etp": layout.etp,
        "vpp": layout.virtual_stages,
        "schedule": layout.schedule_name if layout.pp > 1 else None,
        "shard_group": layout.shard_group,
        "micro_batch": layout.micro_batch,
        "dtype": _dtype(job, events),
        "iteration_s": f"{speed.step_seconds:.6g}",
        "notes": f"mean of steps {speed.first_step} to {speed.last_step}",
    }
    return {column: str(value) for column, value in cells.items() if value is not None}


def _dtype(job: Job, events: Sequence[Record]) -> str | None:
    """Return the type in which the newest attempt computed."""
    if job.train.precision.startswith("float8"):
        return _DTYPES[job.train.precision]
    computed = [str(one.get("precision")) for one in events if one.get("event") == "start"]
    return _DTYPES.get(computed[-1] if computed else job.train.precision)


_DTYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float8": "fp8",
    "float8-blocks": "fp8-blocks",
}


def _model_cells(job: Job) -> dict[str, object]:
    model = job.model
    family = "gpt" if model.norm == "layer" else "llama"
    cells: dict[str, object] = {
        "model": f"{family}-{model.layers}x{model.hidden}",
        "layers": model.layers,
        "hidden": model.hidden,
        "ffn": model.ffn_width,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "vocab": model.vocabulary,
        "seq": model.sequence,
        "activation": model.activation,
    }
    if model.experts is not None:
        cells |= {"experts": model.experts, "experts_per_token": model.experts_per_token}
        cells |= {"expert_ffn": model.expert_width, "shared_experts": model.shared_experts or None}
    return cells
