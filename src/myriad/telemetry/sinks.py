"""TensorBoard, W&B and MLflow, as far as a run needs them: numbers of a step."""

import json
import netrc
import os
import secrets
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from myriad.jsonl import Record
from myriad.whole_file import read_text, write_whole

__all__ = ["Sink", "open_sink", "scalars_of"]

_NO_CURVE = ("time", "step", "tokens", "event")
_LARGEST = 1e300
_MOST_PARAMETERS = 100
"""That MLflow takes at once."""


class Sink(Protocol):
    """One of them; any call may raise, or hang."""

    def write(self, step: int, time: float, scalars: Mapping[str, float]) -> None:
        """Of one step; ``time`` in seconds since the epoch."""

    def flush(self) -> None:
        """What was written is there when this returns, as far as the tool says so."""

    def close(self) -> None:
        """For good."""


def open_sink(name: str, run: Path) -> Sink:
    """Of this run, which goes on there if it was there before."""
    sinks: dict[str, Callable[[Path], Sink]] = {
        "tensorboard": _TensorBoard,
        "wandb": _Wandb,
        "mlflow": _MLflow,
    }
    return sinks[name](run)


def scalars_of(record: Record) -> dict[str, float]:
    """What there is to draw; none for a line that is not of a step."""
    step, at = record.get("step"), record.get("time")
    is_step = isinstance(step, int) and 0 <= step < 2**53
    if not is_step or not isinstance(at, int | float) or not abs(at) < _LARGEST:
        return {}
    numbers = {key: value for key, value in record.items() if key not in _NO_CURVE}
    return {
        key: float(value)
        for key, value in numbers.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST
    }


class _TensorBoard:
    """RUN/tensorboard, by its own writer: without torch and TensorFlow."""

    def __init__(self, run: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(run / "tensorboard"))

    def write(self, step: int, time: float, scalars: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        event = self._event(wall_time=time, step=step, summary=self._summary(value=values))
        self._writer.add_event(event)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A project and an account are those of its own environment; without a key it writes to RUN/wandb alone,
    and ``wandb sync`` sends that later."""

    def __init__(self, run: Path) -> None:
        import wandb

        number = _kept_number(run / "loggers" / "wandb-id", lambda: secrets.token_hex(4))
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "myriad"),
            name=run.name,
            id=number,
            resume="allow",
            dir=str(run),
            config=_job(run),
            mode=os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline"),
        )
        self._run.define_metric("*", step_metric="train/step")

    def write(self, step: int, time: float, scalars: Mapping[str, float]) -> None:
        self._run.log({**scalars, "train/step": step, "train/time": time})

    def flush(self) -> None:
        """It has threads of its own for that."""

    def close(self) -> None:
        self._run.finish()


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False


class _MLflow:
    """Its server, or RUN/mlflow.db."""

    def __init__(self, run: Path) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(run / 'mlflow.db').resolve()}"
        self._client = MlflowClient(tracking_uri=address)
        self._number = _kept_number(run / "loggers" / "mlflow-id", lambda: self._begin(run.name))
        job = [Param(key, str(value)[:500]) for key, value in _job(run).items()]
        for first in range(0, len(job), _MOST_PARAMETERS):
            self._client.log_batch(self._number, params=job[first : first + _MOST_PARAMETERS])

    def _begin(self, name: str) -> str:
        wanted = os.environ.get("MLFLOW_EXPERIMENT_NAME", "myriad")
        known = self._client.get_experiment_by_name(wanted)
        number = self._client.create_experiment(wanted) if known is None else known.experiment_id
        return str(self._client.create_run(number, run_name=name).info.run_id)

    def write(self, step: int, time: float, scalars: Mapping[str, float]) -> None:
        at = int(time * 1000)
        self._client.log_batch(
            self._number, metrics=[self._metric(name, value, at, step) for name, value in scalars.items()]
        )

    def flush(self) -> None:
        """Each call is one of the server."""

    def close(self) -> None:
        self._client.set_terminated(self._number)


def _kept_number(path: Path, make: Any) -> str:
    """By which the tool knows the run, also when it is gone on with."""
    with suppress(OSError):
        if kept := read_text(path).strip():
            return kept
    number = str(make())
    path.parent.mkdir(exist_ok=True)
    write_whole(path, number)
    return number


def _job(run: Path) -> dict[str, Any]:
    """Its keys, dotted."""
    found: dict[str, Any] = {}

    def walk(tree: Mapping[str, Any], prefix: str) -> None:
        for key, value in tree.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{key}.")
            else:
                found[prefix + key] = json.dumps(value) if isinstance(value, list) else value

    walk(tomllib.loads((run / "job.toml").read_text()), "")
    return found
