"""Runs a job under supervision: starts its driver and its node agents, and handles Ctrl-C and the screen.

    launcher ──starts, restarts──► driver ──{"replace": NODE}, {"end": OUTCOME}──► launcher
             ──starts, restarts──► node agents

It also computes the bytes that each node exchanges with other nodes in a step, by which the driver judges
links. They are those of the simulated program (`myriad.planner.fabric.job_flows`): activations and gradients
between stages, gathers and reductions among replicas, tensor parallelism. They are part of the plan, so that
the driver does not import the planner, and numpy only when it first compares ranks.
"""

import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal

from myriad.checkpoint.snapshots.server_start import leave_taken_names
from myriad.comm.grid import RankGrid
from myriad.doctor.devices import has_driver
from myriad.errors import RunFailedError
from myriad.job import SPIKE_STEPS_AFTER, SPIKE_STEPS_BEFORE, Job
from myriad.job.job_steps import JobSteps
from myriad.launchers.launcher import Launcher, Observer, Outcome
from myriad.launchers.metric_loggers import logged
from myriad.launchers.run_start import alarm_options, begin_journal, link_options
from myriad.launchers.supervised_process import SupervisedProcess, of_module
from myriad.run import Run
from myriad.supervise.driver.journal import Journal
from myriad.supervise.driver_address import check_listen
from myriad.supervise.messages import STOP_ASKED
from myriad.supervise.policy.elastic import ElasticLayouts
from myriad.supervise.policy.run_state import RunPlan
from myriad.supervise.policy.step_work import StepWork
from myriad.wire.run_secret import run_secret

if TYPE_CHECKING:
    from myriad.job import Job

__all__ = ["supervise", "supervise_run"]

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.25
_END_SECONDS = 5.0
_STOP_SECONDS = 30.0
"""How long a driver may take to report that the run was stopped, beyond the time for saving."""
_LATE_SECONDS = 3.0
_SILENT_SECONDS = 3.5
"""How long a driver may be silent."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAME_SECONDS = 0.02
"""Signals this close together are one request: `timeout` and others signal a process and then its whole
group."""


def supervise_run(
    run: Run,
    world: int,
    engine: Launcher,
    observer: Observer | None = None,
    *,
    gather_seconds: float = 300.0,
    listen: str | None = None,
) -> Outcome:
    """Supervise a run until ``world`` ranks are done, restarting them as often as needed. ``gather_seconds``:
    how long to wait for nodes. ``listen``: address of the driver, if it differs from the job's. Raises
    `RunFailedError`, and `BadInputError` before any process is started."""
    job = run.job()
    how = job.resilience
    listen = listen or how.listen
    check_listen(listen)
    journal = Journal(run.path / "journal.jsonl")
    left = journal.left_over(run.read_events(), was_driven=(run.logs_path / "driver.log").exists())
    if left.problem:
        run.append_event("journal", problem=left.text(), skipped_steps=list(left.skipped_steps))
    fewer = ElasticLayouts.of(job) if world == job.layout.world else None
    plan = RunPlan(
        world=world,
        nodes=how.nodes,
        first_epoch=run.next_attempt(),
        patience=how.timeout_scale,
        restarts=how.restarts,
        saving_seconds=saving_seconds(job),
        gather_seconds=gather_seconds + (0.0 if fewer is None else how.wait_seconds),
        late_seconds=_LATE_SECONDS,
        listen=listen,
        replicas=replica_groups(job),
        expert_replicas=expert_replica_groups(job),
        doctor=how.doctor,
        on_nan=how.on_nan,
        spike_steps=(SPIKE_STEPS_BEFORE, SPIKE_STEPS_AFTER),
        skipped_steps=left.skipped_steps,
        newest_step=left.newest_step,
        work=StepWork.of(job, how.nodes) if world == job.layout.world else None,
        dp=job.layout.dp,
        traffic=expected_traffic(job, how.nodes) if world == job.layout.world else (),
        longer_steps=JobSteps(job).longer_steps,
        fewer=fewer,
    )
    run_secret(run.path / "secret")
    leave_taken_names(run.path)
    options = [*begin_journal(run, how, plan), *link_options(how), *alarm_options(job.alerts)]
    (run.path / "driver.json").unlink(missing_ok=True)
    with logged(run, job.telemetry.loggers):
        ended = supervise(run, engine, how.timeout_scale, options, observer)
    return "finished" if ended == "finished" else "interrupted"


def supervise(
    run: Run,
    engine: Launcher,
    patience: float,
    driver_options: Sequence[str] = (),
    observer: Observer | None = None,
    name: str = "driver",
    *,
    on_drive: Callable[[], None] = lambda: None,
) -> Outcome | Literal["left"]:
    """Supervise a driver and a launcher until the run is over. Return ``left`` if a person stops a driver
    that only waits. ``name``: name of the driver's log. ``on_drive``: called when a standby obtains the
    lease. Raises `RunFailedError`."""
    driver = SupervisedProcess(
        run, name, [*of_module("myriad.supervise.driver.driver", run.path), *driver_options]
    )
    silent = _SILENT_SECONDS * max(1.0, patience)
    stop_seconds = saving_seconds(run.job()) + _STOP_SECONDS
    with _catch_signals() as caught, _Supervision(run, engine, driver, silent) as supervision:
        return _watch(supervision, caught, _Guarded(observer), on_drive, stop_seconds)


def saving_seconds(job: Job) -> float:
    """Return how long ranks that were asked to stop may take until their state is stored."""
    return job.checkpoint.timeout_seconds + 60.0


@dataclass
class _Caught:
    """Counts the requests to stop that the launcher received as signals."""

    count: int = 0
    _last: float = -1.0

    def note(self, number: int, frame: FrameType | None) -> None:
        """Count a signal, unless it belongs to the last request."""
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
    """Keeps the driver and the launcher's agents alive."""

    def __init__(self, run: Run, engine: Launcher, driver: SupervisedProcess, silent_seconds: float) -> None:
        self._run, self.engine, self._silent_seconds = run, engine, silent_seconds
        self._driver = driver

    def __enter__(self) -> "_Supervision":
        try:
            self.engine.start()  # the imports of the agents take longest
            self._driver.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the driver first, because it could start ranks again."""
        self._driver.end(signal.SIGKILL)
        self.engine.close()

    def messages(self) -> list[dict[str, Any]]:
        """Return the driver's messages; wait a moment for them. Restart processes that died."""
        found = self._driver.read(_POLL_SECONDS)
        if not any("end" in message for message in found):
            has_driven = (self._run.path / "driver.json").exists()
            self._driver.end_if_silent(self._silent_seconds)
            self._driver.end_if_stopped()
            self._driver.revive(for_ever=has_driven)
            self.engine.poll()
        return found

    def wait(self) -> None:
        """Wait for the end of the agents, and then of the driver, which notifies them."""
        self.engine.wait(_END_SECONDS)
        self._driver.wait(_END_SECONDS)

    def ask_to_stop(self) -> None:
        """Ask all ranks to save and stop. The driver notifies agents that the launcher does not reach; if the
        driver dies before, its successor is started with the request."""
        self.engine.ask_to_stop()
        self._driver.environment[STOP_ASKED] = "1"
        self._driver.send_signal(signal.SIGINT)


def _watch(
    supervision: _Supervision,
    caught: _Caught,
    observer: "_Guarded",
    on_drive: Callable[[], None],
    stop_seconds: float,
) -> Outcome | Literal["left"]:
    asked, end_at = False, float("inf")
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
            asked, end_at = True, time.monotonic() + stop_seconds
            supervision.ask_to_stop()
            observer.stopping()
        # The ranks are killed without a checkpoint; the driver has let them save for as long as they may.
        if caught.count > 1 or time.monotonic() > end_at:
            return "interrupted"
        observer.tick()


class _Guarded:
    """Protects a run from its observer: logs its first exception, then stops calling it."""

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


def expected_traffic(job: "Job", num_nodes: int) -> tuple[tuple[float, float], ...]:
    """Return the bytes sent and received in a step by each block of world / ``num_nodes`` consecutive ranks,
    to and from other blocks. Empty if the job has one node, cannot be simulated, or sends what only its data
    decide (tokens to experts, keys of packed documents): links are then judged by the traffic of their own
    steps."""
    world, on_cpu = job.layout.world, job.train.device == "cpu"
    on_cpu |= job.train.device == "auto" and not has_driver()
    varies = job.layout.ep > 1 or (job.layout.cp > 1 and job.data.documents == "packed")
    if num_nodes < 2 or world % num_nodes or varies or job.comm.sync_every > 1:
        return ()
    try:
        return _counted(job, num_nodes, on_cpu=on_cpu)
    except Exception as error:  # a failure of the simulation must not prevent training
        _LOG.info("the traffic of the job is not known: %s", error)
        return ()


def _counted(job: "Job", num_nodes: int, *, on_cpu: bool) -> tuple[tuple[float, float], ...]:
    import numpy as np

    from myriad.job import work_of
    from myriad.planner import Costs
    from myriad.planner.fabric.job_flows import transfer_phases
    from myriad.recipes.cluster import load_cluster

    size = job.layout.world // num_nodes
    cluster = load_cluster("laptop" if on_cpu else "one-node-8xh100")
    cluster = cluster.model_copy(update={"nodes": num_nodes, "accelerators_per_node": size})
    single = job.train.precision == "float32" or (job.train.precision == "auto" and on_cpu)
    work = work_of(job, 4 if single else 2)
    sent, received = np.zeros(num_nodes), np.zeros(num_nodes)
    for phase in transfer_phases(Costs(work, cluster)):
        exchange, times = phase.exchange, len(phase.start_seconds)
        source, target = exchange.source // size, exchange.target // size
        away = source != target
        sent += np.bincount(source[away], exchange.num_bytes[away], num_nodes) * times
        received += np.bincount(target[away], exchange.num_bytes[away], num_nodes) * times
    order = job.comm.node_order or range(num_nodes)
    placed = {node: place for place, node in enumerate(order)}
    return tuple((float(sent[placed[node]]), float(received[placed[node]])) for node in range(num_nodes))


def replica_groups(job: Job) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that hold the same state, with the same pipeline stage and tensor-parallel
    index. Empty if replicas are not compared: the comparison is off, or no two ranks hold the same state."""
    axis = "dp_replicate" if job.layout.zero == 3 else "dp_cp"
    return tuple(tuple(row) for row in RankGrid(job.layout, 0).rows(axis)) if job.compares_replicas else ()


def expert_replica_groups(job: Job) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that hold the same experts; where no two ranks do, each is a group. Empty if
    replicas are not compared, or if those of `replica_groups` hold the same experts too."""
    layout = job.layout
    if not (layout.folds_experts and job.compares_replicas):
        return ()
    axis = "dp_replicate" if layout.zero == 3 else "expert_dp"
    return tuple(tuple(row) for row in RankGrid(layout, 0).rows(axis))
