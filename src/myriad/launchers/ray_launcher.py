"""Nodes on Ray: one task on each machine runs a node agent until the run is over.

    myriad train ─┬─ driver
      (launcher)  └─ Ray ─┬─ task of node 0 ── agent ── ranks
                          ├─ task of node 1 ── agent ── ranks
                          └─ task of a spare ── agent

When a machine dies, Ray ends its task and moves its bundle; the task is requested again, as a spare. By then
the driver, which receives the agents' heartbeats, has given the ranks to another spare. If Ray considers a
machine healthy but the driver has given it up, the task moves to another machine if one has room within ten
seconds. When the launcher dies, Ray ends its tasks, and the kernel kills the agents with them.

Reservations are bundles of placement groups, never two of a run on one machine. The bundles of the nodes are
one group, placed together or not at all. Each other bundle (a spare, or a node that has left its machine) is
a group of its own, kept off machines by their labels.
"""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib import import_module
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from myriad.checkpoint.snapshots.server_start import NODE
from myriad.errors import BadInputError
from myriad.job import Job
from myriad.launchers.background_launcher import BackgroundLauncher
from myriad.launchers.launcher import Observer, Outcome
from myriad.launchers.supervised_run import supervise_run
from myriad.run import Run
from myriad.supervise.driver_address import check_listen, split_listen
from myriad.system.processes import open_log

__all__ = ["Needs", "RayLauncher", "RayReservations"]

_MACHINE_LABEL = "ray.io/node-id"


@dataclass(frozen=True)
class Needs:
    """Resources of a node."""

    cores: int
    gpus: int

    def as_bundle(self) -> dict[str, float]:
        """Return the resources as a Ray bundle."""
        return {"CPU": float(self.cores)} | ({"GPU": float(self.gpus)} if self.gpus else {})


@dataclass(frozen=True)
class Bundle:
    """A bundle of a placement group."""

    group: Any
    index: int
    own: bool
    """Whether the group has no other bundle."""


class RayReservations:
    """The placement groups that a run has reserved."""

    def __init__(self, needs: Needs) -> None:
        self.needs = needs
        self._ray: Any = import_module("ray")
        self._groups: list[Any] = []

    def reserve(self, count: int) -> list[Bundle]:
        """Request bundles on ``count`` different machines, all at once; Ray places them when there is
        room."""
        group = self._make(count, None)
        return [Bundle(group, index, own=False) for index in range(count)]

    def reserve_elsewhere(self, machines: Collection[str]) -> Bundle:
        """Request a bundle on none of these machines; Ray places it when there is room."""
        return Bundle(self._make(1, {_MACHINE_LABEL: f"!in({','.join(sorted(machines))})"}), 0, own=True)

    def _make(self, count: int, labels: dict[str, str] | None) -> Any:
        group = self._ray.util.placement_group(
            [self.needs.as_bundle()] * count,
            strategy="STRICT_SPREAD",
            bundle_label_selector=None if labels is None else [labels] * count,
        )
        self._groups.append(group)
        return group

    def living(self) -> set[str]:
        """Return the machines that Ray considers alive."""
        return {machine["NodeID"] for machine in self._ray.nodes() if machine["Alive"]}

    def machine_of(self, bundle: Bundle) -> str | None:
        """Return the machine of a bundle; ``None``: it has no machine yet or any more."""
        table = self._ray.util.placement_group_table(bundle.group)
        machine = table.get("bundles_to_node_id", {}).get(bundle.index)
        return machine if machine in self.living() else None

    def scheduling(self, bundle: Bundle) -> dict[str, Any]:
        """Return the options of a task that runs in the bundle."""
        strategies = import_module("ray.util.scheduling_strategies")
        strategy = strategies.PlacementGroupSchedulingStrategy(bundle.group, bundle.index)
        return {"num_cpus": self.needs.cores, "num_gpus": self.needs.gpus, "scheduling_strategy": strategy}

    def release(self, bundle: Bundle) -> None:
        """Release a bundle if its group has no other bundle."""
        if bundle.own and bundle.group in self._groups:
            self._groups.remove(bundle.group)
            self._ray.util.remove_placement_group(bundle.group)

    def close(self) -> None:
        """Release the placement groups of all nodes."""
        for group in self._groups:
            self._ray.util.remove_placement_group(group)
        self._groups = []


_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.5
_AGAIN_SECONDS, _MOST_SECONDS = 1.0, 30.0
"""Least and most seconds between the end of a task and the next one in its place; they double after each
short task."""
_SOON_SECONDS = 10.0
_YOUNG_SECONDS = 4.0
"""A task younger than this, times the timeout scale, started after the driver had given the node up."""
_ELSEWHERE_SECONDS = 10.0


@dataclass
class _Seat:
    """A node: its bundles, and the task that runs in one of them."""

    node: int
    home: Bundle | None = None
    other: Bundle | None = None
    """Bundle on another machine, since the node has left its own."""
    left: str | None = None
    left_at: float = 0.0
    taken: Bundle | None = None
    task: Any = None
    began_at: float = 0.0
    again_at: float = 0.0
    deaths: int = 0


class RayLauncher:
    """Runs the agent of each node in a Ray task."""

    def __init__(
        self, run: Run, room: RayReservations, nodes: int, spares: int, threads: int, patience: float = 1.0
    ) -> None:
        self._ray: Any = import_module("ray")
        self._run, self._room, self._threads, self._nodes = run, room, threads, nodes
        self._execute = self._ray.remote(max_retries=0)(execute)
        self._seats = [_Seat(node) for node in range(nodes + spares)]
        self._look_at = 0.0
        self._young_seconds = _YOUNG_SECONDS * max(1.0, patience)

    def start(self) -> None:
        """Request bundles for all nodes at once; `poll` starts the tasks."""
        for seat, bundle in zip(self._seats, self._room.reserve(self._nodes), strict=False):
            seat.home = bundle

    def poll(self) -> None:
        """Look twice a second for tasks that ended, tasks that can start, and room for another spare."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _POLL_SECONDS
        self._note_ended(now)
        for seat in self._seats:
            if seat.task is None and now >= seat.again_at:
                self._begin(seat, now)
        self._reserve_for_spare()

    def _note_ended(self, now: float) -> None:
        seat_of = {seat.task: seat for seat in self._seats if seat.task is not None}
        ended, _ = self._ray.wait(list(seat_of), num_returns=len(seat_of), timeout=0) if seat_of else ([], [])
        for task in ended:
            seat = seat_of[task]
            seat.task, seat.taken = None, None
            seat.deaths = seat.deaths + 1 if now - seat.began_at < _SOON_SECONDS else 0
            seat.again_at = now + min(_MOST_SECONDS, _AGAIN_SECONDS * 2**seat.deaths)
            _LOG.info("node %d: %s; another try follows", seat.node, self._how(task))

    def _how(self, task: Any) -> str:
        try:
            return f"its executor has ended with {self._ray.get(task)}"
        except self._ray.exceptions.RayError as error:
            return f"its task has ended ({type(error).__name__})"

    def _begin(self, seat: _Seat, now: float) -> None:
        bundle = self._choose(seat, now)
        if bundle is None:
            return
        options = self._room.scheduling(bundle)
        path = str(self._run.path.resolve())
        seat.taken, seat.began_at = bundle, now
        seat.task = self._execute.options(**options).remote(path, seat.node, os.getcwd(), self._threads, ())

    def _choose(self, seat: _Seat, now: float) -> Bundle | None:
        """Choose a placed bundle, not on the machine that the node has left unless there is no other."""
        if seat.other is not None and self._room.machine_of(seat.other) is not None:
            return seat.other
        machine = None if seat.home is None else self._room.machine_of(seat.home)
        if machine is None or machine in self._machines(other_than=seat):
            return None
        if machine == seat.left and now - seat.left_at < _ELSEWHERE_SECONDS:
            return None
        if seat.other is not None:
            self._room.release(seat.other)
            seat.other = None
        return seat.home

    def _machines(self, other_than: _Seat | None = None) -> set[str]:
        """Return the machines with a task."""
        taken = [seat.taken for seat in self._seats if seat is not other_than and seat.taken is not None]
        return {machine for bundle in taken if (machine := self._room.machine_of(bundle)) is not None}

    def _reserve_for_spare(self) -> None:
        """Request bundles for spares one after the other: a bundle must avoid the machines of those before
        it."""
        for seat in self._seats:
            if seat.home is None:
                seat.home = self._room.reserve_elsewhere(self._machines())
                return
            if seat.taken is None:
                return

    def replace(self, node: int) -> None:
        """Move the node to another machine, because the driver has given it up. If Ray has already ended its
        task, a new task is on its way."""
        now = time.monotonic()
        seat = self._seats[node] if node < len(self._seats) else None
        if seat is None or seat.task is None or now - seat.began_at < self._young_seconds:
            return
        assert seat.taken is not None
        machine = self._room.machine_of(seat.taken)
        self._ray.cancel(seat.task, force=True)
        if seat.other is not None:
            self._room.release(seat.other)
            seat.other = None
        seat.task, seat.taken, seat.again_at = None, None, now
        if machine is not None:
            seat.left, seat.left_at = machine, now
            seat.other = self._room.reserve_elsewhere(self._machines() | {machine})

    def ask_to_stop(self) -> None:
        """Do nothing: the driver notifies the agents."""

    def wait(self, seconds: float) -> None:
        """Wait for all tasks to end, ``seconds`` at most."""
        tasks = [seat.task for seat in self._seats if seat.task is not None]
        if tasks:
            self._ray.wait(tasks, num_returns=len(tasks), timeout=seconds)

    def close(self) -> None:
        """Cancel all tasks; Ray ends their processes, and the agents end with those."""
        for seat in self._seats:
            if seat.task is not None:
                self._ray.cancel(seat.task, force=True)
        self._room.close()


def execute(run: str, node: int, folder: str, threads: int, command: Sequence[str]) -> int:
    """Run a node agent; return its exit code. The agent dies with this process, and this process with its
    machine or the launcher.

    ``folder``: working folder of the launcher, from which relative paths in the job start.
    """
    words = ["myriad.supervise.agent.agent_process", run, str(node), str(threads), *command]
    log = Run(run).logs_path / f"executor-{node}.log"
    with open(open_log(log), "ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-Pm", *words],
            env=os.environ | {"MYRIAD_ENGINE_PID": str(os.getpid()), NODE: str(node)},
            cwd=folder if Path(folder).is_dir() else None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=output,
            start_new_session=True,
        )
    return process.wait()


_GATHER_SECONDS = 600.0
"""How long to wait for nodes, because a cluster may have to grow first."""


def check_ray(job: Job, *, oversubscribe: bool = False) -> None:
    """Refuse a job if there is no Ray cluster, or if its machines could not reach the driver. Raises
    `BadInputError`."""
    ray = _connect()
    check_listen(job.resilience.listen)
    own = ray.util.get_node_ip_address()
    others = {machine["NodeManagerAddress"] for machine in ray.nodes() if machine["Alive"]} - {own}
    if others and _is_loopback(job.resilience.listen):
        allowed = f"an address of this machine at which Ray's others reach it, such as {own}"
        raise BadInputError("resilience.listen", job.resilience.listen, allowed)


def _is_loopback(listen: str) -> bool:
    host, _ = split_listen(listen)
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def run_ray(run: Run, world: int, *, threads: int = 0, observer: Observer | None = None) -> Outcome:
    """Train ``world`` ranks on machines of a Ray cluster. Raises `RunFailedError`."""
    ray = _connect()
    job = run.job()
    needs = needs_of(job, ray.cluster_resources().get("GPU", 0) > 0)
    how = job.resilience
    engine = RayLauncher(run, RayReservations(needs), how.nodes, how.spares, threads or 1, how.timeout_scale)
    return supervise_run(run, world, BackgroundLauncher(engine), observer, gather_seconds=_GATHER_SECONDS)


def needs_of(job: Job, has_gpus: bool) -> Needs:
    """Return the needs of a node: a core for each thread of its ranks, and an accelerator for each rank if
    any are used."""
    each = job.layout.world // job.resilience.nodes
    uses = job.train.device == "cuda" or (job.train.device == "auto" and has_gpus)
    return Needs(cores=each * max(1, job.train.threads), gpus=each if uses else 0)


def _connect() -> Any:
    """Connect to the Ray cluster that ``RAY_ADDRESS`` names, by default the one of this machine."""
    key = "resilience.engine"
    # otherwise Ray writes log lines of its workers into this output
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".*")
    try:
        ray: Any = import_module("ray")
    except ModuleNotFoundError:
        raise BadInputError(key, "ray", "needs Ray: pip install 'myriad-train[ray]'") from None
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError) as error:
            why = str(error).strip().partition("\n")[0]
            allowed = f"needs a Ray cluster: `ray start` on its machines, or RAY_ADDRESS ({why})"
            raise BadInputError(key, "ray", allowed) from None
    return ray
