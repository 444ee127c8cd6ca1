"""``python -m myriad.telemetry.loggers NAME RUN``: forward the metrics of a run to an experiment tracker.

    ranks ──► RUN/metrics.jsonl, events.jsonl ──► this process, one for each tool ──► TensorBoard, W&B, MLflow
    launcher ──► standard input: `RunOutcome` at the start and at the end, a line each ──►

The process runs beside the ranks: a tracker that hangs or raises blocks this process alone. The files are the
queue, so no line is lost while a tracker is unavailable. RUN/loggers/NAME.json keeps the offset, so a resumed
run forwards no line twice. When its standard input closes (the run ended, or the launcher died), the process
forwards the remaining lines and the summary, and exits.
"""

import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from myriad.system.jsonl import JsonlTail, Record
from myriad.system.whole_file import read_json, write_whole
from myriad.telemetry.tracker_sinks import RunOutcome, Sink, open_sink

__all__ = ["ForwardedBytes", "MetricForwarder", "main", "outcome_line", "read_forwarded", "scalars_of"]

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 1.0
_AGAIN_SECONDS, _MOST_AGAIN_SECONDS = 5.0, 60.0
_MOST_OFFSET = 2**63
_NO_CURVE = ("time", "step", "tokens", "event")
_LARGEST = 1e300


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
        self.outcome = RunOutcome()
        """What the launcher has reported of the run; another thread sets it."""
        self._described = RunOutcome()

    def follow(self, over: threading.Event) -> None:
        """Forward new lines until ``over`` is set; then the last ones and the summary."""
        wait = _POLL_SECONDS
        while not over.wait(wait):
            wait = self._guarded(self.forward)
        self._guarded(self.forward)
        self._guarded(self._end)

    def _end(self) -> None:
        """Store the summary, and end the tracker's run. A tracker that has received no line gets none."""
        if self._sink is None and not any(asdict(read_forwarded(self._run, self._name)).values()):
            return
        self._opened().close(self.outcome.state)

    def _opened(self) -> Sink:
        """Return the open sink, which knows the newest outcome."""
        if self._sink is None:
            self._sink, self._described = self._open(self._name, self._run), RunOutcome()
        if self._described != (now := self.outcome):
            self._sink.describe(now)
            self._described = now
        return self._sink

    def _guarded(self, do: Callable[[], None]) -> float:
        """Do something, log any error, and return the seconds until the next try."""
        try:
            do()
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
        sink = self._opened()
        for record in [*lines["metrics"], *map(_as_metrics, lines["events"])]:
            if scalars := scalars_of(record):
                sink.write(int(record["step"]), float(record["time"]), scalars)
        sink.flush()
        self.failures = 0
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
    over, forwarder = threading.Event(), MetricForwarder(name, Path(run))
    threading.Thread(target=_listen, args=(sys.stdin.buffer, forwarder, over), daemon=True).start()
    os.nice(10)
    forwarder.follow(over)
    return 0


def outcome_line(outcome: RunOutcome) -> bytes:
    """Return the line by which a launcher reports an outcome."""
    return msgspec.json.encode(outcome) + b"\n"


def _listen(launcher: IO[bytes], forwarder: MetricForwarder, over: threading.Event) -> None:
    """Take over what the launcher reports; set ``over`` when it closes its end of the pipe or dies."""
    for line in launcher:
        with suppress(msgspec.MsgspecError):
            forwarder.outcome = msgspec.json.decode(line, type=RunOutcome)
    over.set()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
