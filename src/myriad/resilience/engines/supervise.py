"""Sees a run through: its driver, the engine that has its executors, Ctrl-C, and the screen.

    myriad train ─┬─ driver                               restarted when it dies; ranks do not notice
      (screen)    └─ engine ── executors of all nodes     on this machine, or wherever it starts them

A Ctrl-C of the terminal reaches this process alone. It passes it on once (ranks finish their step, save, and
exit with 0); a second one kills. SIGTERM and SIGHUP do the same; `nohup` keeps SIGHUP ignored.
"""

import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Literal

from myriad.errors import RunFailedError
from myriad.job import SPIKE_STEPS_AFTER, SPIKE_STEPS_BEFORE
from myriad.resilience.decide.fewer import Fewer
from myriad.resilience.decide.state import Plan
from myriad.resilience.decide.work import Work
from myriad.resilience.drive.journal import Journal
from myriad.resilience.engines.begin import alarm_options, begin_journal
from myriad.resilience.engines.engine import Engine, Observer, Outcome
from myriad.resilience.engines.expected_traffic import expected_traffic
from myriad.resilience.engines.kept import Kept, of_module
from myriad.resilience.engines.loggers import logged
from myriad.resilience.engines.replica_groups import replica_groups
from myriad.resilience.facts import STOP_ASKED
from myriad.resilience.listen import check_listen
from myriad.resilience.wire import run_secret
from myriad.run import Run

__all__ = ["see_through", "supervise"]

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.25
_END_SECONDS = 5.0
_LATE_SECONDS = 3.0
_SILENT_SECONDS = 3.5
"""How long a driver may say nothing."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAME_SECONDS = 0.02
"""Signals so close are one request: `timeout` and others signal a process and then its whole group."""


def see_through(
    run: Run,
    world: int,
    engine: Engine,
    observer: Observer | None = None,
    *,
    gather_seconds: float = 300.0,
    listen: str | None = None,
) -> Outcome:
    """Until ``world`` ranks are done, however often they must be started. ``gather_seconds``: how long nodes
    are waited for; ``listen``: where the driver listens, if not where the job says. Raises `RunFailedError`,
    and `BadInputError` before anything is started."""
    job = run.job()
    how = job.resilience
    listen = listen or how.listen
    check_listen(listen)
    journal = Journal(run.path / "journal.jsonl")
    left = journal.left_over(run.read_events(), was_driven=(run.logs_path / "driver.log").exists())
    if left.problem:
        run.append_event("journal", problem=left.text(), skipped_steps=list(left.skipped_steps))
    fewer = Fewer.of(job) if world == job.layout.world else None
    plan = Plan(
        world=world,
        nodes=how.nodes,
        first_epoch=run.next_attempt(),
        patience=how.patience,
        restarts=how.restarts,
        saving_seconds=job.checkpoint.timeout_seconds + 60,
        gather_seconds=gather_seconds + (0.0 if fewer is None else how.wait_seconds),
        late_seconds=_LATE_SECONDS,
        listen=listen,
        replicas=replica_groups(job),
        doctor=how.doctor,
        on_nan=how.on_nan,
        spike_steps=(SPIKE_STEPS_BEFORE, SPIKE_STEPS_AFTER),
        skipped_steps=left.skipped_steps,
        newest_step=left.newest_step,
        work=Work.of(job, how.nodes) if world == job.layout.world else None,
        dp=job.layout.dp,
        traffic=expected_traffic(job, how.nodes) if world == job.layout.world else (),
        fewer=fewer,
    )
    run_secret(run.path / "secret")
    options = [*begin_journal(run, how, plan), *alarm_options(job.alerts)]
    (run.path / "driver.json").unlink(missing_ok=True)
    with logged(run, job.telemetry.loggers):
        ended = supervise(run, engine, how.patience, options, observer)
    return "finished" if ended == "finished" else "interrupted"


def supervise(
    run: Run,
    engine: Engine,
    patience: float,
    driver_options: Sequence[str] = (),
    observer: Observer | None = None,
    name: str = "driver",
    *,
    on_drive: Callable[[], None] = lambda: None,
) -> Outcome | Literal["left"]:
    """A driver and an engine, until the run is over, or until a person wants no more of a driver that only
    waits: ``left``. ``name``: of the driver's log; ``on_drive``: called when one that waited for a lease has
    it. Raises `RunFailedError`."""
    driver = Kept(run, name, [*of_module("drive.driver", run.path), *driver_options])
    silent = _SILENT_SECONDS * max(1.0, patience)
    with _catch_signals() as caught, _Supervision(run, engine, driver, silent) as supervision:
        return _watch(supervision, caught, _Guarded(observer), on_drive)


@dataclass
class _Caught:
    """Signals that the launcher received."""

    count: int = 0
    _last: float = -1.0

    def note(self, number: int, frame: FrameType | None) -> None:
        """Count a request to stop."""
        now = time.monotonic()
        self.count += now - self._last > _SAME_SECONDS
        self._last = now


@contextlib.contextmanager
def _catch_signals() -> Iterator[_Caught]:
    caught = _Caught()
    wanted = [one for one in _STOP_SIGNALS if one == signal.SIGINT or signal.getsignal(one) != signal.SIG_IGN]
    previous = {number: signal.signal(number, caught.note) for number in wanted}
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Supervision:
    """The driver, and the engine: kept alive."""

    def __init__(self, run: Run, engine: Engine, driver: Kept, silent_seconds: float) -> None:
        self._run, self.engine, self._silent_seconds = run, engine, silent_seconds
        self._driver = driver

    def __enter__(self) -> "_Supervision":
        try:
            self.engine.start()  # what executors import takes longest
            self._driver.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The driver first, which would have ranks started."""
        self._driver.end(signal.SIGKILL)
        self.engine.close()

    def messages(self) -> list[dict[str, Any]]:
        """What the driver has said; waits a moment for it. Whoever has died is started again."""
        found = self._driver.read(_POLL_SECONDS)
        if not any("end" in message for message in found):
            has_driven = (self._run.path / "driver.json").exists()
            self._driver.end_if_silent(self._silent_seconds)
            self._driver.end_if_stopped()
            self._driver.revive(for_ever=has_driven)
            self.engine.poll()
        return found

    def wait(self) -> None:
        """The run is over: executors leave, and then the driver, which has told them."""
        self.engine.wait(_END_SECONDS)
        self._driver.wait(_END_SECONDS)

    def ask_to_stop(self) -> None:
        """All ranks save and stop. The driver tells those that the engine does not reach; if it dies before,
        its follower knows."""
        self.engine.ask_to_stop()
        self._driver.environment[STOP_ASKED] = "1"
        self._driver.send_signal(signal.SIGINT)


def _watch(
    supervision: _Supervision, caught: _Caught, observer: "_Guarded", on_drive: Callable[[], None]
) -> Outcome | Literal["left"]:
    asked = False
    while True:
        for message in supervision.messages():
            if "drives" in message:
                on_drive()
            if "replace" in message:
                supervision.engine.replace(message["replace"])
            if "end" in message:
                supervision.wait()
                observer.tick()
                if message["end"] == "failed":
                    raise RunFailedError(message["reason"])
                ended: Outcome | Literal["left"] = message["end"]
                return ended
        if caught.count and not asked:
            asked = True
            supervision.ask_to_stop()
            observer.stopping()
        if caught.count > 1:  # the ranks are ended without a checkpoint
            return "interrupted"
        observer.tick()


class _Guarded:
    """Keeps a run safe from its observer: the first exception is logged, then nobody watches."""

    def __init__(self, observer: Observer | None) -> None:
        self._observer = observer

    def _call(self, call: Callable[[Observer], None]) -> None:
        if self._observer is None:
            return
        try:
            call(self._observer)
        except Exception:
            self._observer = None
            _LOG.warning("the run goes on, but its screen failed", exc_info=True)

    def tick(self) -> None:
        self._call(lambda observer: observer.tick())

    def stopping(self) -> None:
        self._call(lambda observer: observer.stopping())
