"""``python -m myriad.telemetry.loggers NAME RUN``: hands the lines of a run to another tool.

    ranks ──► RUN/metrics.jsonl, events.jsonl ──► this process, one for each tool ──► TensorBoard, W&B, MLflow

Beside the run, never in it: a tool that hangs or raises holds up this process alone. The files are the
queue: nothing is lost while a tool is away, and where it stopped is kept in RUN/loggers/NAME.json, so that a
run that goes on is not told twice. It takes what is left and ends when its input does: the run is over, or
the launcher gone.
"""

import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from myriad.jsonl import JsonlTail, Record
from myriad.telemetry.sinks import Sink, open_sink, scalars_of
from myriad.whole_file import read_json, write_whole

__all__ = ["Follower", "Place", "main", "read_place"]

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 1.0
_AGAIN_SECONDS, _MOST_AGAIN_SECONDS = 5.0, 60.0
_MOST_OFFSET = 2**63


@dataclass(frozen=True)
class Place:
    """How far a tool has been told, in bytes."""

    metrics: int = 0
    events: int = 0


def read_place(run: Path, name: str) -> Place:
    """From where to go on."""
    found: Any = None
    with suppress(OSError, ValueError):
        found = read_json(run / "loggers" / f"{name}.json")
    known = found if isinstance(found, dict) else {}
    return Place(*(_offset(known.get(what)) for what in ("metrics", "events")))


def _offset(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < _MOST_OFFSET else 0


class Follower:
    """Tells one tool of one run."""

    def __init__(self, name: str, run: Path, open_it: Callable[[str, Path], Sink] = open_sink) -> None:
        self._name, self._run, self._open = name, run, open_it
        self._sink: Sink | None = None
        self._told: Place | None = None
        """Also where its file cannot be written."""
        self.failures = 0

    def follow(self, over: threading.Event) -> None:
        """Until then, and what is there at that moment."""
        wait = _POLL_SECONDS
        while not over.wait(wait):
            wait = self._tell_guarded()
        self._tell_guarded()
        if self._sink is not None:
            self._sink.close()

    def _tell_guarded(self) -> float:
        """Seconds until the next time."""
        try:
            self.tell()
            self.failures = 0
        except Exception as error:  # whatever a tool raises
            self.failures += 1
            _LOG.warning("%s: %s: %s", self._name, type(error).__name__, error)
            self._sink = None
            return min(_MOST_AGAIN_SECONDS, _AGAIN_SECONDS * self.failures)
        return _POLL_SECONDS

    def tell(self) -> None:
        """All that is new."""
        place = self._told or read_place(self._run, self._name)
        tails = {
            what: JsonlTail(self._run / f"{what}.jsonl", offset=start)
            for what, start in asdict(place).items()
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
        self._told = Place(**{what: tail.offset for what, tail in tails.items()})
        try:
            (self._run / "loggers").mkdir(exist_ok=True)
            write_whole(self._run / "loggers" / f"{self._name}.json", json.dumps(asdict(self._told)))
        except OSError as error:
            _LOG.warning("%s: where it stopped is not kept: %s", self._name, error)


def _as_metrics(event: Record) -> Record:
    """What an event has for a curve: nothing but an evaluation does."""
    if event.get("event") != "validation":
        return {}
    names = {"loss": "validation_loss", "bits_per_byte": "validation_bits_per_byte"}
    found = {name: event[key] for key, name in names.items() if key in event}
    return {"time": event.get("time"), "step": event.get("step"), **found}


def main(arguments: list[str]) -> int:
    """One tool."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    name, run = arguments
    over = threading.Event()
    threading.Thread(target=_wait_for_end, args=(over,), daemon=True).start()
    os.nice(10)
    Follower(name, Path(run)).follow(over)
    return 0


def _wait_for_end(over: threading.Event) -> None:
    """The launcher has closed its end of the pipe, or has died."""
    while os.read(0, 1):
        pass
    over.set()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
