"""One scenario on a real run in a fresh folder: broken, and graded beside the run that nothing happened to.

FOLDER/undisturbed/KEY/     kept: one for each job, and for each change of this program
FOLDER/NAME-1, NAME-2 ...   a run each, as `myriad train` leaves it, with faults/ and report.json beside
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

from myriad.errors import RunFailedError
from myriad.job import Job, dump_toml
from myriad.jsonl import JsonlTail, late_events
from myriad.resilience.account.accounting import account_of
from myriad.resilience.account.moments import in_order
from myriad.resilience.doctor.devices import DEVICES
from myriad.resilience.engines.local import run_local
from myriad.resilience.faults.grade import OVERDUE, Evidence, Report, grade_end, grade_run
from myriad.resilience.faults.injector import Injector, plan_inside
from myriad.resilience.faults.inside import ARMED, CAUSED
from myriad.resilience.faults.kinds import aim_of
from myriad.resilience.faults.namespaces import Namespaces
from myriad.resilience.faults.on_hosts import made_hosts, run_on_hosts
from myriad.resilience.faults.processes import Processes
from myriad.resilience.faults.scenario import Fault, Scenario, planned_faults
from myriad.resilience.faults.services import Services
from myriad.resilience.faults.stand_in import BROKEN, StandIn
from myriad.resilience.faults.storage import CORPUS_COPY, corpus_folder, memory_group, small_disk
from myriad.run import Run
from myriad.run_lines import StepLines

__all__ = ["Follow", "try_scenario"]

Tell = Callable[[str], None]
Follow = Callable[[str, Run, int], None]
"""Called as each of a scenario's two runs starts: which one, its run, and its steps."""
_MEASURED = ("profile.json", "hierarchy.json", "tensor_overlap.json")
"""What a run measures once, and how it computes may depend on it."""
_LEAST_SECONDS, _TIMES_LONGER, _GRACE_SECONDS = 300.0, 10.0, 20.0
"""A run that is broken may take so long, and so many times what it takes undisturbed."""
_ACCOUNT_SECONDS = 0.05
_NEAR = 1e-3
"""Of losses whose sums were taken in another order."""


def try_scenario(
    name: str,
    scenario: Scenario,
    folder: Path,
    tell: Tell,
    follow: Follow = lambda which, run, steps: None,
) -> Report:
    """Train undisturbed, train again with the faults, and grade what was made of them.

    An undisturbed run of the same job and program that is in ``folder`` already is not repeated. Raises
    `BadInputError` when this machine cannot cause a fault, before anything has started.
    """
    job = scenario.resolved_job()
    faults = planned_faults(scenario, job)
    run = Run(_fresh(folder, name))
    with ExitStack() as stack:
        services = Services(run.path / "faults")
        stack.callback(services.end)
        group = _prepare(run, _with_redis(scenario, job, services), faults, stack)
        num_nodes = job.resilience.nodes + job.resilience.spares
        hosts = stack.enter_context(made_hosts(num_nodes)) if scenario.hosts else None
        undisturbed = _undisturbed(job, folder, tell, follow)
        for measured in _MEASURED:
            if (undisturbed.path / measured).exists():
                shutil.copyfile(undisturbed.path / measured, run.path / measured)
        tell(f"{name}: {len(faults)} fault{'s' if len(faults) != 1 else ''} in {run.path}")
        limit = _LEAST_SECONDS + _TIMES_LONGER * _seconds(undisturbed) + _soaks(scenario)
        beside = _beside(scenario, run, services)
        follow("run with faults", run, job.train.steps)
        outcome = _break(run, job, faults, group, hosts, limit, services, beside)
        left = _left_over(Processes(run, num_nodes)) if scenario.only_end else []
        exact = all(aim_of(fault.kind, fault.where).same_bits for fault in faults) and not _shrank(run)
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


def _fresh(folder: Path, name: str) -> Path:
    """One that is not there yet."""
    number = 1
    while (folder / f"{name}-{number}").exists():
        number += 1
    return folder / f"{name}-{number}"


def _prepare(run: Run, job: Job, faults: Sequence[Fault], stack: ExitStack) -> Path | None:
    """What some kinds need of the machine; gives the control group."""
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


def _soaks(scenario: Scenario) -> float:
    return 0.0 if scenario.soak is None else 60 * scenario.soak.minutes


def _with_redis(scenario: Scenario, job: Job, services: Services) -> Job:
    """The job, with a Redis server of its own where the scenario has one."""
    if not scenario.redis:
        return job
    services.start_redis()
    url, how = services.redis_url, job.resilience
    how = how.model_copy(update={"journal": url, "engine": "join" if scenario.standby else how.engine})
    return job.model_copy(update={"comm": job.comm.model_copy(update={"store": url}), "resilience": how})


def _beside(scenario: Scenario, run: Run, services: Services) -> list[Callable[[], None]]:
    """What is started once ranks train."""
    standby = [partial(services.start_standby, run.path)] if scenario.standby else []
    return [*standby, *([partial(services.start_watch, run.path)] if scenario.watch else [])]


def _left_over(processes: Processes) -> list[str]:
    """Processes of the run that are still there some time after its end."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while left := processes.left_over():
        if time.monotonic() > deadline:
            return [f"{len(left)} processes of the run are left behind: {left}"]
        time.sleep(0.1)
    return []


def _account_problems(run: Run, steps: int | None) -> list[str]:
    """What does not add up in the account of the run's time; ``steps``: that it has finished."""
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


def _break(
    run: Run,
    job: Job,
    faults: Sequence[Fault],
    group: Path | None,
    hosts: Namespaces | None,
    limit: float,
    services: Services | None = None,
    beside: Sequence[Callable[[], None]] = (),
) -> str:
    """Trains; how it ended. Raises ``KeyboardInterrupt`` when a person ends it."""
    told, world = {ARMED: str(plan_inside(run.path / "faults", faults, group))}, job.layout.world
    devices = _stand_in(run, job) if any(fault.kind in BROKEN for fault in faults) else None
    if devices is not None:
        told[DEVICES] = str(devices.folder)
    threads, num_nodes = job.train.threads, job.resilience.nodes + job.resilience.spares
    injector, person = (
        Injector(run, world, faults, group, num_nodes, hosts, devices, services, beside),
        _Person(),
    )
    injector.start()
    try:
        with run.lock(), _environment(told), _ended_after(limit) as overdue:
            if hosts is None:
                outcome: str = run_local(run, world, threads=threads, observer=person)
            else:
                outcome = run_on_hosts(run, world, hosts, threads=threads, observer=person)
    except RunFailedError as error:
        outcome = str(error)
    finally:
        injector.end()
    if overdue.is_set():
        return f"{OVERDUE} {limit:.0f} s"
    if person.wants_the_end or outcome == "interrupted":
        raise KeyboardInterrupt
    return outcome


class _Person:
    """Who sits before it, as an observer of the run: a Ctrl-C ends it all, however the run takes it."""

    wants_the_end = False

    def tick(self) -> None:
        """Nothing."""

    def stopping(self) -> None:
        """A Ctrl-C."""
        self.wants_the_end = True


def _stand_in(run: Run, job: Job) -> StandIn:
    how = job.resilience
    each = job.layout.world // how.nodes
    return StandIn(run.path / "faults" / "devices", how.nodes + how.spares, each)


@contextmanager
def _ended_after(seconds: float) -> Iterator[threading.Event]:
    """As by a person who has lost patience: two Ctrl-C. A matrix goes on with the next scenario."""
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
def _environment(told: Mapping[str, str]) -> Iterator[None]:
    os.environ |= told
    try:
        yield
    finally:
        for name in told:
            del os.environ[name]


def _undisturbed(job: Job, folder: Path, tell: Tell, follow: Follow) -> Run:
    """Of the same job, whose work stays where it is; made where there is none yet."""
    still = job.resilience.model_copy(update={"on_slow": "tell"})
    job = job.model_copy(update={"resilience": still})
    run = Run(folder / "undisturbed" / _key(job))
    if not (run.checkpoints_path / f"step-{job.train.steps}" / "manifest.json").exists():
        tell(f"the undisturbed run: {job.train.steps} steps of {job.name} in {run.path}")
        follow("undisturbed run", run, job.train.steps)
        with run.lock():
            run.create_or_resume(job)
            if run_local(run, job.layout.world, threads=job.train.threads) == "interrupted":
                raise KeyboardInterrupt
    return run


def _key(job: Job) -> str:
    """Of all that decides about the bits of a run: the job, this program, torch."""
    digest = hashlib.blake2s(digest_size=8)
    digest.update(dump_toml(job).encode())
    digest.update(metadata.version("torch").encode())
    for path in sorted(Path(str(resources.files("myriad"))).rglob("*.py")):
        digest.update(path.read_bytes())
    return f"{job.name}-{digest.hexdigest()}"


def _shrank(run: Run) -> bool:
    """An attempt had fewer replicas."""
    return any(event["event"] == "restart" and "dp" in event for event in run.read_events())


def _are_near(run: Run, other: Run, steps: int) -> bool:
    """Every loss, up to the order in which sums were taken: rounding grows from step to step."""
    losses = [[line["loss"] for line in one.read_metrics()] for one in (run, other)]
    if [len(one) for one in losses] != [steps, steps]:
        return False
    return all(abs(a - b) <= _NEAR * abs(b) for a, b in zip(*losses, strict=True))


def _are_equal(run: Run, other: Run, steps: int) -> bool:
    """Bit for bit: every loss, every tensor at the end, the optimizer's too."""
    import torch

    from myriad.checkpoint.store import load_model

    try:
        ours, theirs = (load_model(one.checkpoints_path / f"step-{steps}", "") for one in (run, other))
    except RunFailedError:
        return False
    losses = [[line["loss"] for line in one.read_metrics()] for one in (run, other)]
    same = ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    return same and len(losses[0]) == steps and losses[0] == losses[1]
