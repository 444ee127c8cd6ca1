"""Run one scenario: train undisturbed, train again with the faults, and grade the second run.

FOLDER/undisturbed/KEY/     one for each job and version of this program; reused
FOLDER/NAME-1, NAME-2 ...   one run each, as `myriad train` leaves it, with faults/ and report.json beside

With ``hosts`` each node and the driver have network namespaces of their own (`namespaces`). So links can go
down, and nodes can be cut off, as between machines:

    host 0 ... n - 1    a node each; it reaches the driver by eth0, its ranks communicate by eth1
    host n              the driver

A machine that is cut off cannot be ended from outside: its node agent detects the loss by itself, and joins
again when it can.
"""

import hashlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from importlib import metadata, resources
from pathlib import Path

from myriad.doctor.devices import DEVICES
from myriad.errors import BadInputError, RunFailedError
from myriad.faults.fault_grades import OVERDUE, Evidence, Report, grade_end, grade_run
from myriad.faults.fault_kinds import recovery_target
from myriad.faults.injector import Injector, plan_rank_faults
from myriad.faults.namespaces import Namespaces, why_unavailable
from myriad.faults.rank_faults import ARMED, CAUSED
from myriad.faults.run_processes import RunProcesses
from myriad.faults.scenario import Fault, FaultScenario, planned_faults
from myriad.faults.services import Services
from myriad.faults.simulated_devices import DEVICE_FAULTS, SimulatedDevices
from myriad.faults.storage_faults import CORPUS_COPY, corpus_folder, memory_group, small_disk
from myriad.job import Job, dump_toml
from myriad.launchers.launcher import Observer, Outcome
from myriad.launchers.local import LocalLauncher, run_local
from myriad.launchers.supervised_run import supervise_run
from myriad.run import Run
from myriad.run.run_lines import StepLines
from myriad.supervise.accounting.accounting import account_of
from myriad.supervise.accounting.ledger import in_order
from myriad.system.jsonl import JsonlTail, late_events
from myriad.system.machine import num_cores

__all__ = ["Follow", "try_scenario"]

ReportProgress = Callable[[str], None]
Follow = Callable[[str, Run, int], None]
"""Called when each of a scenario's two runs starts, with its title, the run, and its number of steps."""
_MEASURED = ("profile.json", "hierarchy.json", "tensor_overlap.json")
"""Measurements that a run takes once; the way it computes may depend on them."""
_LEAST_SECONDS, _TIMES_LONGER, _GRACE_SECONDS = 300.0, 10.0, 20.0
"""Time limit of the run with faults: at least this long, and this multiple of the undisturbed run."""
_ACCOUNT_SECONDS = 0.05
_NEAR = 1e-3
"""Relative tolerance for losses when sums were taken in another order."""


def try_scenario(
    name: str,
    scenario: FaultScenario,
    folder: Path,
    report_progress: ReportProgress,
    follow: Follow = lambda which, run, steps: None,
) -> Report:
    """Train undisturbed, train again with the faults, and grade the result.

    An undisturbed run of the same job and program that is in ``folder`` is reused. Raises `BadInputError` if
    this machine cannot cause a fault, before anything starts.
    """
    job = scenario.resolved_job()
    faults = planned_faults(scenario, job)
    run = Run(_new_folder(folder, name))
    with ExitStack() as stack:
        services = Services(run.path / "faults")
        stack.callback(services.end)
        group = _prepare(run, _with_redis(scenario, job, services), faults, stack)
        num_nodes = job.resilience.nodes + job.resilience.spares
        hosts = stack.enter_context(make_hosts(num_nodes)) if scenario.hosts else None
        undisturbed = _undisturbed(job, folder, report_progress, follow)
        for measured in _MEASURED:
            if (undisturbed.path / measured).exists():
                shutil.copyfile(undisturbed.path / measured, run.path / measured)
        report_progress(f"{name}: {len(faults)} fault{'s' if len(faults) != 1 else ''} in {run.path}")
        limit = _LEAST_SECONDS + _TIMES_LONGER * _seconds(undisturbed) + _soaks(scenario)
        companions = _companions(scenario, run, services)
        follow("run with faults", run, job.train.steps)
        outcome = _run_with_faults(run, job, faults, group, hosts, limit, services, companions)
        left = _left_over(RunProcesses(run, num_nodes)) if scenario.only_end else []
        exact = all(recovery_target(fault.kind, fault.where).same_bits for fault in faults) and not _shrank(
            run
        )
        compare = _are_equal if exact else _are_near
        equal = compare(run, undisturbed, job.train.steps) if outcome == "finished" else None
    caused = JsonlTail(run.path / "faults" / CAUSED).poll()
    evidence = Evidence(
        caused=caused,
        events=run.read_events(),
        metrics=undisturbed.read_metrics(),
        outcome=outcome,
        equal=equal,
        verify_every=job.resilience.verify_every,
    )
    report = grade_run(name, faults, evidence)
    if scenario.only_end:
        steps = job.train.steps if outcome == "finished" else None
        report = grade_end(report, [*left, *_account_problems(run, steps)])
    report.folder = str(run.path)
    (run.path / "faults" / "report.json").write_text(json.dumps(asdict(report), indent=1))
    return report


def _new_folder(folder: Path, name: str) -> Path:
    """Return a run folder that does not exist yet."""
    number = 1
    while (folder / f"{name}-{number}").exists():
        number += 1
    return folder / f"{name}-{number}"


def _prepare(run: Run, job: Job, faults: Sequence[Fault], stack: ExitStack) -> Path | None:
    """Prepare the run and what some kinds need from the machine; return the control group."""
    kinds = {fault.kind for fault in faults}
    group = stack.enter_context(memory_group()) if "host-memory" in kinds else None
    if any(fault.where == "corpus" for fault in faults):
        source, copy = corpus_folder(job.data), run.path.absolute() / CORPUS_COPY
        data = job.data.model_copy(update={"corpus": str(copy)})
        run.create_or_resume(job.model_copy(update={"data": data}))
        shutil.copytree(source, copy)
    else:
        run.create_or_resume(job)
    if "disk-full" in kinds:
        stack.enter_context(small_disk(run.checkpoints_path))
    return group


def _seconds(run: Run) -> float:
    return sum(line["step_seconds"] for line in run.read_metrics())


def _soaks(scenario: FaultScenario) -> float:
    return 0.0 if scenario.soak is None else 60 * scenario.soak.minutes


def _with_redis(scenario: FaultScenario, job: Job, services: Services) -> Job:
    """Return the job, with a Redis server of its own if the scenario has one."""
    if not scenario.redis:
        return job
    services.start_redis()
    url, how = services.redis_url, job.resilience
    how = how.model_copy(update={"journal": url, "engine": "join" if scenario.standby else how.engine})
    return job.model_copy(update={"comm": job.comm.model_copy(update={"store": url}), "resilience": how})


def _companions(scenario: FaultScenario, run: Run, services: Services) -> list[Callable[[], None]]:
    """Return what starts once ranks train."""
    standby = [partial(services.start_standby, run.path)] if scenario.standby else []
    return [*standby, *([partial(services.start_watch, run.path)] if scenario.watch else [])]


def _left_over(processes: RunProcesses) -> list[str]:
    """Return processes of the run that are still alive some time after its end."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while left := processes.left_over():
        if time.monotonic() > deadline:
            return [f"{len(left)} processes of the run are left behind: {left}"]
        time.sleep(0.1)
    return []


def _account_problems(run: Run, steps: int | None) -> list[str]:
    """Return the errors in the account of the run's time; ``steps`` is the number of steps if the run
    finished."""
    journal = JsonlTail(run.path / "journal.jsonl").poll()
    account = account_of(
        in_order(late_events(run.read_events()), StepLines(run.metrics_path).poll(), journal)
    )
    total, wall = sum(account.ledger.seconds().values()), account.ledger.wall_seconds
    found = []
    if abs(total - wall) > _ACCOUNT_SECONDS:
        found.append(f"the classes of the account sum to {total:.2f} s, the wall time is {wall:.2f} s")
    if account.running:
        found.append("the account takes the run for one that is at work")
    if steps is not None and (account.steps, account.steps_without_line) != (steps, 0):
        lines = f"{account.steps_without_line} without a line"
        found.append(f"the account has {account.steps} steps, {lines}, of {steps}")
    return found


def _run_with_faults(
    run: Run,
    job: Job,
    faults: Sequence[Fault],
    group: Path | None,
    hosts: Namespaces | None,
    limit: float,
    services: Services | None = None,
    companions: Sequence[Callable[[], None]] = (),
) -> str:
    """Train with the faults and return the outcome. Raises ``KeyboardInterrupt`` if a person interrupts."""
    environment, world = {ARMED: str(plan_rank_faults(run.path / "faults", faults, group))}, job.layout.world
    devices = _simulated_devices(run, job) if any(fault.kind in DEVICE_FAULTS for fault in faults) else None
    if devices is not None:
        environment[DEVICES] = str(devices.folder)
    threads, num_nodes = job.train.threads, job.resilience.nodes + job.resilience.spares
    injector, observer = (
        Injector(run, world, faults, group, num_nodes, hosts, devices, services, companions),
        _InterruptObserver(),
    )
    injector.start()
    try:
        with run.lock(), _environment(environment), _time_limit(limit) as overdue:
            if hosts is None:
                outcome: str = run_local(run, world, threads=threads, observer=observer)
            else:
                outcome = run_on_hosts(run, world, hosts, threads=threads, observer=observer)
    except RunFailedError as error:
        outcome = str(error)
    finally:
        injector.end()
    if overdue.is_set():
        return f"{OVERDUE} {limit:.0f} s"
    if observer.is_interrupted or outcome == "interrupted":
        raise KeyboardInterrupt
    return outcome


class _InterruptObserver:
    """Records a Ctrl-C, which ends the whole trial, however the run reacts to it."""

    is_interrupted = False

    def tick(self) -> None:
        """Do nothing: only a Ctrl-C matters."""

    def stopping(self) -> None:
        """Record that a Ctrl-C was pressed."""
        self.is_interrupted = True


def _simulated_devices(run: Run, job: Job) -> SimulatedDevices:
    how = job.resilience
    each = job.layout.world // how.nodes
    return SimulatedDevices(run.path / "faults" / "devices", how.nodes + how.spares, each)


@contextmanager
def _time_limit(seconds: float) -> Iterator[threading.Event]:
    """End the block after ``seconds`` by two Ctrl-C, so that a matrix continues with the next scenario."""
    overdue, over = threading.Event(), threading.Event()

    def wait() -> None:
        if not over.wait(seconds):
            overdue.set()
            os.kill(os.getpid(), signal.SIGINT)
            if not over.wait(_GRACE_SECONDS):
                os.kill(os.getpid(), signal.SIGINT)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    try:
        yield overdue
    finally:
        over.set()
        waiting.join()


@contextmanager
def _environment(environment: Mapping[str, str]) -> Iterator[None]:
    os.environ |= environment
    try:
        yield
    finally:
        for name in environment:
            del os.environ[name]


def _undisturbed(job: Job, folder: Path, report_progress: ReportProgress, follow: Follow) -> Run:
    """Return an undisturbed run of the same job with a fixed distribution of work and without spares, which
    change no bit; train it if there is none."""
    still = job.resilience.model_copy(update={"on_slow": "report", "spares": 0})
    job = job.model_copy(update={"resilience": still})
    run = Run(folder / "undisturbed" / _key(job))
    if not (run.checkpoints_path / f"step-{job.train.steps}" / "manifest.json").exists():
        report_progress(f"the undisturbed run: {job.train.steps} steps of {job.name} in {run.path}")
        follow("undisturbed run", run, job.train.steps)
        with run.lock():
            run.create_or_resume(job)
            if run_local(run, job.layout.world, threads=job.train.threads) == "interrupted":
                raise KeyboardInterrupt
    return run


def _key(job: Job) -> str:
    """Hash everything that determines the bits of a run: the job, this program, torch."""
    digest = hashlib.blake2s(digest_size=8)
    digest.update(dump_toml(job).encode())
    digest.update(metadata.version("torch").encode())
    for path in sorted(Path(str(resources.files("myriad"))).rglob("*.py")):
        digest.update(path.read_bytes())
    return f"{job.name}-{digest.hexdigest()}"


def _shrank(run: Run) -> bool:
    """Return whether an attempt had fewer replicas."""
    return any(event["event"] == "restart" and "dp" in event for event in run.read_events())


def _are_near(run: Run, other: Run, steps: int) -> bool:
    """Compare every loss up to the order of sums: rounding errors grow from step to step."""
    losses = [[line["loss"] for line in one.read_metrics()] for one in (run, other)]
    if [len(one) for one in losses] != [steps, steps]:
        return False
    return all(abs(a - b) <= _NEAR * abs(b) for a, b in zip(*losses, strict=True))


def _are_equal(run: Run, other: Run, steps: int) -> bool:
    """Compare bit for bit: every loss, and every tensor at the end, those of the optimizer included."""
    import torch

    from myriad.checkpoint.checkpoint_files import load_model

    try:
        ours, theirs = (load_model(one.checkpoints_path / f"step-{steps}", "") for one in (run, other))
    except RunFailedError:
        return False
    losses = [[line["loss"] for line in one.read_metrics()] for one in (run, other)]
    same = ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    return same and len(losses[0]) == steps and losses[0] == losses[1]


_RANKS_INTERFACE = "eth1"


@contextmanager
def make_hosts(num_nodes: int) -> Iterator[Namespaces]:
    """Create namespaces for the nodes and the driver. Raises `BadInputError` if this machine cannot."""
    if problem := why_unavailable():
        raise BadInputError("hosts", True, f"false here: {problem}")
    with Namespaces(num_nodes + 1, networks=2) as hosts:
        yield hosts


def run_on_hosts(
    run: Run, world: int, hosts: Namespaces, *, threads: int = 0, observer: Observer | None = None
) -> Outcome:
    """Run ranks like `run_local`, with each node on its own host. Raises `RunFailedError`."""
    how, driver = run.job().resilience, hosts.num_hosts - 1
    threads = threads or max(1, num_cores() // world)

    def where(node: int) -> list[str]:
        return ["env", f"GLOO_SOCKET_IFNAME={_RANKS_INTERFACE}", *hosts.entering(node)]

    engine = _HostsLauncher(run, how.nodes, how.spares, threads, (), how.timeout_scale, where)
    with hosts.network_of(driver):
        return supervise_run(run, world, engine, observer, listen=hosts.address(driver))


class _HostsLauncher(LocalLauncher):
    def replace(self, node: int) -> None:
        """Do nothing: the node may come back, and then joins again as a spare."""
