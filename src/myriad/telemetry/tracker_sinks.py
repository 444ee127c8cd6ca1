"""TensorBoard, W&B and MLflow as sinks of a run: its job, metrics, summary, and the paths of its artifacts.

                 job by key          metrics    summary                     paths of artifacts
    TensorBoard  text job, hparams   scalars    text summary                text artifacts
    W&B          config              history    run summary                 run summary: artifacts/NAME
    MLflow       parameters          metrics    metrics, tags summary/NAME  tags artifacts/NAME

The summary comes when the run ends, with the state in which it ended. Files are named, never sent. A
tracker's package is imported when its sink opens. Any call may raise or hang.
"""

import json
import netrc
import os
import secrets
import time
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from myriad.system.whole_file import read_text, write_whole

__all__ = ["RunOutcome", "Sink", "open_sink"]

_MOST_PARAMETERS = 100
"""Maximum number of parameters that MLflow accepts per call."""
_MOST_CHARACTERS = 500
"""Length of the longest parameter that every version of MLflow accepts."""


@dataclass(frozen=True)
class RunOutcome:
    """What a launcher reports to a sink of its run, beside the metrics: at the start and at the end."""

    state: str = ""
    """State in which the run ended; "": it trains, or its launcher died."""
    step: int = 0
    """Number of training steps that the run has completed."""
    summary: Mapping[str, int | float | str] = field(default_factory=dict)
    """Figures of the whole run by name; empty until it ends."""
    artifacts: Mapping[str, str] = field(default_factory=dict)
    """Paths and URLs by name."""


class Sink(Protocol):
    """An experiment tracker. Any call may raise or hang."""

    def write(self, step: int, time: float, scalars: Mapping[str, float]) -> None:
        """Write the metrics of one step; ``time`` is in seconds since the epoch."""

    def describe(self, outcome: RunOutcome) -> None:
        """Store the summary and the paths; a later call replaces an earlier one."""

    def flush(self) -> None:
        """Flush the written metrics, as far as the tracker supports it."""

    def close(self, state: str) -> None:
        """End the tracker's run, in the state of `RunOutcome`."""


def open_sink(name: str, run: Path) -> Sink:
    """Open a tracker for a run, store the job, and resume the tracker's run if it exists."""
    sinks: dict[str, Callable[[Path], Sink]] = {
        "tensorboard": _TensorBoard,
        "wandb": _Wandb,
        "mlflow": _MLflow,
    }
    return sinks[name](run)


class _TensorBoard:
    """Writes RUN/tensorboard with TensorBoard's own writer, without torch and TensorFlow."""

    def __init__(self, run: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import summary_v2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(run / "tensorboard"))
        job = _job(run)
        self._add(0, time.time(), summary_v2.hparams_pb(job, trial_id=run.resolve().name))
        self._write_table("job", job, 0)

    def write(self, step: int, time: float, scalars: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._add(step, time, self._summary(value=values))

    def describe(self, outcome: RunOutcome) -> None:
        for tag, values in (("summary", outcome.summary), ("artifacts", outcome.artifacts)):
            if values:
                self._write_table(tag, values, outcome.step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, state: str) -> None:
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

        status = {"finished": api_pb2.STATUS_SUCCESS, "failed": api_pb2.STATUS_FAILURE}
        info = plugin_data_pb2.SessionEndInfo(
            status=status.get(state, api_pb2.STATUS_UNKNOWN), end_time_secs=time.time()
        )
        content = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(session_end_info=info))
        summary = self._summary()
        summary.value.add(tag=metadata.SESSION_END_INFO_TAG, metadata=content, tensor=metadata.NULL_TENSOR)
        self._add(0, time.time(), summary)
        self._writer.close()

    def _write_table(self, tag: str, values: Mapping[str, Any], step: int) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        rows = [f"| {_in_cell(key)} | {_in_cell(value)} |" for key, value in values.items()]
        self._add(step, time.time(), text_pb(tag, "\n".join(["| name | value |", "|---|---|", *rows])))

    def _add(self, step: int, at: float, summary: Any) -> None:
        self._writer.add_event(self._event(wall_time=at, step=step, summary=summary))


def _in_cell(value: object) -> str:
    """Return the text of a cell of a Markdown table."""
    return " ".join(str(value).replace("|", "\\|").split())


class _Wandb:
    """Writes to W&B, with project and account from W&B's environment variables.

    Without an API key it writes to RUN/wandb only; ``wandb sync`` uploads that later.
    """

    def __init__(self, run: Path) -> None:
        import wandb

        number = _stored_id(run / "loggers" / "wandb-id", lambda: secrets.token_hex(4))
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "myriad"),
            name=run.resolve().name,
            id=number,
            resume="allow",
            dir=str(run),
            mode=os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline"),
        )
        self._run.config.update(_job(run), allow_val_change=True)  # a resume may change keys
        self._run.define_metric("*", step_metric="train/step")

    def write(self, step: int, time: float, scalars: Mapping[str, float]) -> None:
        self._run.log({**scalars, "train/step": step, "train/time": time})

    def describe(self, outcome: RunOutcome) -> None:
        paths = {f"artifacts/{name}": path for name, path in outcome.artifacts.items()}
        figures = {f"summary/{name}": value for name, value in outcome.summary.items()}
        self._run.summary.update({**figures, **paths})

    def flush(self) -> None:
        """Do nothing: threads of W&B flush the metrics."""

    def close(self, state: str) -> None:
        self._run.finish(exit_code=0 if state in ("finished", "interrupted") else 1)


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False


class _MLflow:
    """Writes to an MLflow server, or to RUN/mlflow.db."""

    def __init__(self, run: Path) -> None:
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.tracking import MlflowClient

        self._metric, self._tag = Metric, RunTag
        address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(run / 'mlflow.db').resolve()}"
        self._client = MlflowClient(tracking_uri=address)
        self._number = _stored_id(run / "loggers" / "mlflow-id", lambda: self._begin(run.resolve().name))
        self._client.update_run(self._number, status="RUNNING")
        job = {key: str(value)[:_MOST_CHARACTERS] for key, value in _job(run).items()}
        known = self._client.get_run(self._number).data.params
        new = [Param(key, value) for key, value in job.items() if key not in known]
        for first in range(0, len(new), _MOST_PARAMETERS):
            self._client.log_batch(self._number, params=new[first : first + _MOST_PARAMETERS])
        # MLflow refuses another value of a parameter, as a resume may bring.
        changed = {key: value for key, value in job.items() if known.get(key, value) != value}
        self._write_tags({f"changed/{key}": value for key, value in changed.items()})

    def _begin(self, name: str) -> str:
        wanted = os.environ.get("MLFLOW_EXPERIMENT_NAME", "myriad")
        known = self._client.get_experiment_by_name(wanted)
        number = self._client.create_experiment(wanted) if known is None else known.experiment_id
        return str(self._client.create_run(number, run_name=name).info.run_id)

    def write(self, step: int, time: float, scalars: Mapping[str, float]) -> None:
        at = int(time * 1000)
        metrics = [self._metric(name, value, at, step) for name, value in scalars.items()]
        self._client.log_batch(self._number, metrics=metrics)

    def describe(self, outcome: RunOutcome) -> None:
        figures = {f"summary/{name}": value for name, value in outcome.summary.items()}
        numbers = {name: value for name, value in figures.items() if not isinstance(value, str)}
        texts = {name: value for name, value in figures.items() if isinstance(value, str)}
        if numbers:
            self.write(outcome.step, time.time(), numbers)
        self._write_tags(texts | {f"artifacts/{name}": path for name, path in outcome.artifacts.items()})

    def flush(self) -> None:
        """Do nothing: each write is a call of the server."""

    def close(self, state: str) -> None:
        status = {"finished": "FINISHED", "failed": "FAILED"}
        self._client.set_terminated(self._number, status.get(state, "KILLED"))

    def _write_tags(self, values: Mapping[str, str]) -> None:
        tags = [self._tag(name, value[:_MOST_CHARACTERS]) for name, value in values.items()]
        for first in range(0, len(tags), _MOST_PARAMETERS):
            self._client.log_batch(self._number, tags=tags[first : first + _MOST_PARAMETERS])


def _stored_id(path: Path, make: Any) -> str:
    """Return the tracker's id of the run. The file keeps it, so that a resumed run has the same id."""
    with suppress(OSError):
        if kept := read_text(path).strip():
            return kept
    number = str(make())
    path.parent.mkdir(exist_ok=True)
    write_whole(path, number)
    return number


def _job(run: Path) -> dict[str, Any]:
    """Return the job's values by dotted key."""
    found: dict[str, Any] = {}

    def walk(tree: Mapping[str, Any], prefix: str) -> None:
        for key, value in tree.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{key}.")
            else:
                found[prefix + key] = json.dumps(value) if isinstance(value, list) else value

    walk(tomllib.loads((run / "job.toml").read_text()), "")
    return found
