"""``python -m myriad.telemetry.loggers NAME RUN``: forward the metrics of a run to an experiment tracker.

    ranks ──► RUN/metrics.jsonl, events.jsonl ──► this process, one for each tool ──► TensorBoard, W&B, MLflow

The process runs beside the ranks: a tracker that hangs or raises blocks this process alone. The files are the
queue, so no line is lost while a tracker is unavailable. RUN/loggers/NAME.json keeps the offset, so a resumed
run forwards no line twice. When its standard input closes (the run ended, or the launcher died), the process
forwards the remaining lines and exits.
"""

import json
import logging
import netrc
import os
import secrets
import sys
import threading
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from myriad.system.jsonl import JsonlTail, Record
from myriad.system.whole_file import read_json, read_text, write_whole

__all__ = ["ForwardedBytes", "MetricForwarder", "Sink", "main", "open_sink", "read_forwarded", "scalars_of"]

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 1.0
_AGAIN_SECONDS, _MOST_AGAIN_SECONDS = 5.0, 60.0
_MOST_OFFSET = 2**63
_NO_CURVE = ("time", "step", "tokens", "event")
_LARGEST = 1e300
_MOST_PARAMETERS = 100
"""Maximum number of parameters that MLflow accepts per call."""


class Sink(Protocol):
    """An experiment tracker. Any call may raise or hang."""

    def write(self, step: int, time: float, scalars: Mapping[str, float]) -> None:
        """Write the metrics of one step; ``time`` is in seconds since the epoch."""

    def flush(self) -> None:
        """Flush the written metrics, as far as the tracker supports it."""

    def close(self) -> None:
        """End the tracker's run."""


def open_sink(name: str, run: Path) -> Sink:
    """Open a tracker for a run, and resume the tracker's run if it exists."""
    sinks: dict[str, Callable[[Path], Sink]] = {
        "tensorboard": _TensorBoard,
        "wandb": _Wandb,
        "mlflow": _MLflow,
    }
    return sinks[name](run)


def scalars_of(record: Record) -> dict[str, float]:
    """Return the numbers to plot; empty if the line does not belong to a step."""
    step, at = record.get("step"), record.get("time")
    is_step = isinstance(step, int) and 0 <= step < 2**53
    if not is_step or not isinstance(at, int | float) or not abs(at) < _LARGEST:
        return {}
    numbers = {key: value for key, value in record.items() if key not in _NO_CURVE} | _layer_norms_of(record)
    own = record.get("user")
    numbers |= {f"user/{name}": value for name, value in own.items()} if isinstance(own, Mapping) else {}
    return {
        key: float(value)
        for key, value in numbers.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST
    }


def _layer_norms_of(record: Record) -> dict[str, object]:
    """Return the norms of layers, each with a name of its own."""
    norms = record.get("layer_norms")
    kinds = norms.items() if isinstance(norms, Mapping) else ()
    return {
        f"{kind}_norm/{layer}": value
        for kind, of_layers in kinds
        if isinstance(of_layers, Mapping)
        for layer, value in of_layers.items()
    }


@dataclass(frozen=True)
class ForwardedBytes:
    """Bytes of each file that were forwarded."""

    metrics: int = 0
    events: int = 0


def read_forwarded(run: Path, name: str) -> ForwardedBytes:
    """Return the offsets at which to resume; 0 if none are stored."""
    found: Any = None
    with suppress(OSError, ValueError):
        found = read_json(run / "loggers" / f"{name}.json")
    known = found if isinstance(found, dict) else {}
    return ForwardedBytes(*(_offset(known.get(what)) for what in ("metrics", "events")))


def _offset(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < _MOST_OFFSET else 0


class MetricForwarder:
    """Forwards one run's metrics to one tracker."""

    def __init__(self, name: str, run: Path, open_it: Callable[[str, Path], Sink] = open_sink) -> None:
        self._name, self._run, self._open = name, run, open_it
        self._sink: Sink | None = None
        self._forwarded: ForwardedBytes | None = None
        """Offsets in memory, which hold even if their file cannot be written."""
        self.failures = 0

    def follow(self, over: threading.Event) -> None:
        """Forward new lines until ``over`` is set, and once more after it."""
        wait = _POLL_SECONDS
        while not over.wait(wait):
            wait = self._forward_guarded()
        self._forward_guarded()
        if self._sink is not None:
            self._sink.close()

    def _forward_guarded(self) -> float:
        """Forward new lines, log any error, and return the seconds until the next try."""
        try:
            self.forward()
            self.failures = 0
        except Exception as error:  # a tracker may raise anything
            self.failures += 1
            _LOG.warning("%s: %s: %s", self._name, type(error).__name__, error)
            self._sink = None
            return min(_MOST_AGAIN_SECONDS, _AGAIN_SECONDS * self.failures)
        return _POLL_SECONDS

    def forward(self) -> None:
        """Forward all new lines."""
        start_at = self._forwarded or read_forwarded(self._run, self._name)
        tails = {
            what: JsonlTail(self._run / f"{what}.jsonl", offset=start)
            for what, start in asdict(start_at).items()
        }
        lines = {what: tail.poll() for what, tail in tails.items()}
        if not any(lines.values()):
            return
        if self._sink is None:
            self._sink = self._open(self._name, self._run)
        for record in [*lines["metrics"], *map(_as_metrics, lines["events"])]:
            if scalars := scalars_of(record):
                self._sink.write(int(record["step"]), float(record["time"]), scalars)
        self._sink.flush()
        self._forwarded = ForwardedBytes(**{what: tail.offset for what, tail in tails.items()})
        try:
            (self._run / "loggers").mkdir(exist_ok=True)
            write_whole(self._run / "loggers" / f"{self._name}.json", json.dumps(asdict(self._forwarded)))
        except OSError as error:
            _LOG.warning("%s: the offsets cannot be stored: %s", self._name, error)


def _as_metrics(event: Record) -> Record:
    """Return the metrics in an event. Only those of validations and evaluations have any."""
    found: Record = {}
    if event.get("event") in ("validation", "validation_set"):
        of_set = f"/{event.get('name')}" if event.get("event") == "validation_set" else ""
        keys = ("loss", "bits_per_byte", "ema_loss", "ema_bits_per_byte")
        found = {f"validation_{key}{of_set}": event[key] for key in keys if key in event}
    elif event.get("event") == "evaluation" and isinstance(event.get("scores"), dict):
        found = {f"evaluation/{name}": value for name, value in event["scores"].items()}
    if not found:
        return {}
    return {"time": event.get("time"), "step": event.get("step"), **found}


def main(arguments: list[str]) -> int:
    """Forward the metrics of the run in ``arguments`` to its tracker. Returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    name, run = arguments
    over = threading.Event()
    threading.Thread(target=_wait_for_end, args=(over,), daemon=True).start()
    os.nice(10)
    MetricForwarder(name, Path(run)).follow(over)
    return 0


def _wait_for_end(over: threading.Event) -> None:
    """Set ``over`` when the launcher closes its end of the pipe or dies."""
    while os.read(0, 1):
        pass
    over.set()


class _TensorBoard:
    """Writes RUN/tensorboard with TensorBoard's own writer, without torch and TensorFlow."""

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
    """Writes to W&B, with project and account from W&B's environment variables.

    Without an API key it writes to RUN/wandb only; ``wandb sync`` uploads that later.
    """

    def __init__(self, run: Path) -> None:
        import wandb

        number = _stored_id(run / "loggers" / "wandb-id", lambda: secrets.token_hex(4))
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
        """Do nothing: threads of W&B flush the metrics."""

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
    """Writes to an MLflow server, or to RUN/mlflow.db."""

    def __init__(self, run: Path) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(run / 'mlflow.db').resolve()}"
        self._client = MlflowClient(tracking_uri=address)
        self._number = _stored_id(run / "loggers" / "mlflow-id", lambda: self._begin(run.name))
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
        """Do nothing: each write is a call of the server."""

    def close(self) -> None:
        self._client.set_terminated(self._number)


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
