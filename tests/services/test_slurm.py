"""Runs under a real Slurm whose nodes can be lost. If these fail, a lost node ends a job, stays where the
next job gets it, or costs more than it must."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from same_run import assert_same_run, slow_steps, train_undisturbed
from slurm_cluster import SlurmCluster, missing

from myriad.job import load_job
from myriad.run import Run
from myriad.system.jsonl import JsonlTail

LAST = 80
KEYS = (
    "model.layers=2",
    "model.hidden=32",
    "model.sequence=32",
    "train.threads=1",
    f"train.steps={LAST}",
    "train.sample_prompt=off",
    "layout.dp=2",
    "layout.zero=3",
    "layout.micro_batch=2",
    "comm.hierarchy=flat",
    "checkpoint.copies_every=5",
    "checkpoint.memory_seconds=0",
    "checkpoint.linger_seconds=20",
    "resilience.nodes=2",
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[[int], SlurmCluster]]:
    """``cluster(3)`` has three nodes."""
    if problem := missing():
        pytest.skip(f"no Slurm here: {problem}")
    made: list[SlurmCluster] = []

    def start(num_nodes: int) -> SlurmCluster:
        made.append(SlurmCluster(tmp_path / f"slurm-{len(made)}", num_nodes))
        return made[-1].start()

    try:
        yield start
    finally:
        for one in made:
            one.stop()


def make_run(path: Path, corpus: Path, *more: str) -> Run:
    run = Run(path)
    run.create_or_resume(load_job("tiny", [f"data.corpus={corpus}", *KEYS, *more]))
    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Run:
    if problem := missing():
        pytest.skip(f"no Slurm here: {problem}")
    return train_undisturbed(make_run(tmp_path_factory.mktemp("undisturbed") / "run", corpus))


def myriad(made: SlurmCluster | None, *arguments: object, **environment: str) -> tuple[int, str, str]:
    """Exit code and output of a command, where Slurm's own work."""
    around = {**os.environ, **({} if made is None else made.environment), **environment}
    command = [sys.executable, "-m", "myriad.cli.main", *map(str, arguments)]
    ended = subprocess.run(command, env=around, capture_output=True, text=True, timeout=120)
    return ended.returncode, ended.stdout, ended.stderr


def submit(made: SlurmCluster, run: Run) -> str:
    """The job's number. It is not to end before all that a test does to it has happened."""
    slow = slow_steps(run.path.with_name("faults"), 8.0)
    code, out, error = myriad(made, "train", run.path, "--engine", "slurm", "--submit", "--json", **slow)
    assert (code, error) == (0, "")
    return str(json.loads(out)["job"])


def events(run: Run, name: str) -> list[dict[str, Any]]:
    return [event for event in run.read_events() if event["event"] == name]


def steps_done(run: Run) -> int:
    lines = run.read_metrics()
    return lines[-1]["step"] if lines else 0


def wait_until(condition: Callable[[], Any], what: Callable[[], object], seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it does not happen: {what()}"
        time.sleep(0.05)


def wait_for_end(made: SlurmCluster, run: Run) -> None:
    def logs() -> str:
        told = [path.read_text()[-2000:] for path in run.logs_path.glob("[sde]*.log")]
        return "\n".join([made.run("squeue"), str(made.states()), *told])

    wait_until(lambda: events(run, "finish"), logs)


def placements(run: Run) -> list[list[int]]:
    """Nodes of each attempt, by their ranks."""
    records = JsonlTail(run.path / "journal.jsonl").poll()
    found = [
        one["placement"] for record in records for one in record.get("actions", ()) if "placement" in one
    ]
    return [sorted(map(int, one), key=lambda node: one[str(node)]) for one in found]


def hosts_of(made: SlurmCluster, job: str) -> list[str]:
    """Where a job runs now."""
    allocated = made.run("squeue", "--noheader", "--format=%N", "--jobs", job).strip()
    return made.run("scontrol", "show", "hostnames", allocated).split()


def test_a_spare_takes_the_place_of_a_lost_node_and_the_job_queues_again_when_the_drivers_is_lost(
    cluster: Callable[[int], SlurmCluster], tmp_path: Path, corpus: Path, undisturbed: Run
) -> None:
    """The lost node is drained. For the driver's there is no spare: a node that is left requeues the job."""
    made, run = cluster(5), make_run(tmp_path / "run", corpus, "resilience.spares=1", "checkpoint.every=20")
    job = submit(made, run)
    wait_until(lambda: steps_done(run) >= 12, lambda: made.run("squeue"))
    made.lose_node("n1")
    wait_until(
        lambda: events(run, "resume") and len(events(run, "checkpoint")) >= 2 and events(run, "drain"),
        lambda: made.run("squeue"),
    )
    (fault,), (drain,), (resume,) = (events(run, name) for name in ("fault", "drain", "resume"))
    assert (fault["cause"], fault["node"]) == ("node", 1)
    assert drain["host"] == "n1" and "problem" not in drain
    assert resume["source"] == "memory"
    assert placements(run) == [[0, 1], [0, 2]]
    assert made.states()["n1"].startswith(("drain", "down"))
    assert "given up by the driver" in made.run("scontrol", "show", "node", "n1")

    made.lose_node("n0")
    wait_for_end(made, run)
    assert len(events(run, "start")) == 3 and len(events(run, "resume")) == 2
    wait_until(lambda: job not in made.run("squeue", "--noheader", "--format=%A"), lambda: made.run("squeue"))
    assert_same_run(run, undisturbed)


def test_a_job_that_is_to_make_room_saves_and_queues_again_and_so_does_one_that_loses_a_node(
    cluster: Callable[[int], SlurmCluster], tmp_path: Path, corpus: Path, undisturbed: Run
) -> None:
    """First what Slurm sends to the script some minutes before the time is over; then a node without a
    spare."""
    made, run = cluster(3), make_run(tmp_path / "run", corpus, "checkpoint.every=20")
    job = submit(made, run)
    wait_until(lambda: steps_done(run) >= 12, lambda: made.run("squeue"))
    made.run("scancel", "--signal=TERM", "--batch", job)
    wait_until(lambda: events(run, "resume"), lambda: made.run("squeue"))
    (saved, *_), (resume,) = events(run, "checkpoint"), events(run, "resume")
    assert saved["step"] == resume["step"] < 20 and events(run, "requeue") == []

    wait_until(lambda: len(events(run, "checkpoint")) >= 2, lambda: made.run("squeue"))
    lost = hosts_of(made, job)[1]
    made.lose_node(lost)
    wait_for_end(made, run)
    (requeue,) = events(run, "requeue")
    assert (requeue["node"], requeue["host"]) == (1, lost)
    assert len(events(run, "start")) == 3 and len(events(run, "resume")) == 2
    assert_same_run(run, undisturbed)


def processes_of(run: Run) -> list[int]:
    """Processes that name the run, but for snapshot servers, which outlive it for a while on purpose, and the
    batch script, which Slurm ends."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (path / "cmdline").read_text().split("\0")
            if str(run.path) in words and not any("snapshot_server" in word for word in words):
                found.append(int(path.name))
    return found


@pytest.mark.parametrize("daemon", ["slurmctld", "slurmd"])
def test_a_run_ends_on_sigterm_though_slurm_never_answers(
    cluster: Callable[[int], SlurmCluster], tmp_path: Path, corpus: Path, daemon: str
) -> None:
    saving = ("checkpoint.timeout_seconds=1", "checkpoint.linger_seconds=1")
    made, run = cluster(2), make_run(tmp_path / "run", corpus, "train.steps=100000", *saving)
    submit(made, run)
    wait_until(lambda: steps_done(run) >= 12, lambda: made.run("squeue"))
    (launcher,) = [
        pid for pid in processes_of(run) if b"myriad.cli.main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(processes_of(run)) >= 7, "launcher, driver, and on both nodes srun, agent and rank"
    made.silence(daemon)
    os.kill(launcher, signal.SIGTERM)
    wait_until(lambda: not processes_of(run), lambda: processes_of(run), 1.0 + 90.0)


def test_outside_a_job_a_script_is_written_and_named(
    cluster: Callable[[int], SlurmCluster], tmp_path: Path, corpus: Path
) -> None:
    made, run = cluster(1), make_run(tmp_path / "run", corpus, "resilience.spares=3")
    code, out, error = myriad(made, "train", run.path, "--engine", "slurm")
    assert (code, error, out.strip()) == (0, "", f"sbatch {run.path / 'slurm.sh'}")
    script = (run.path / "slurm.sh").read_text()
    assert "--nodes=5\n" in script and "--no-kill\n" in script and "--requeue\n" in script
    assert subprocess.run(["bash", "-n", run.path / "slurm.sh"]).returncode == 0
    assert made.run("squeue", "--noheader") == ""


def test_where_there_is_no_slurm_it_is_refused_in_a_line(tmp_path: Path) -> None:
    code, _, error = myriad(
        None, "train", "tiny", "--run", tmp_path / "run", "--engine", "slurm", PATH="/none"
    )
    assert (code, error.count("\n")) == (2, 1) and "Slurm is not installed here" in error
    assert not (tmp_path / "run").exists()


def test_an_allocation_that_is_too_small_is_refused_in_a_line(
    cluster: Callable[[int], SlurmCluster], tmp_path: Path
) -> None:
    made, job = cluster(1), {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[0-1]"}
    keys = ["--engine", "slurm", "--layout.dp", 2, "--resilience.nodes", 2, "--resilience.spares", 1]
    code, _, error = myriad(made, "train", "tiny", "--run", tmp_path / "run", *keys, **job)
    assert (code, error.count("\n")) == (2, 1) and "resilience.spares = 1" in error and "has 2 nodes" in error
    code, _, error = myriad(made, "train", "tiny", "--run", tmp_path / "run", *keys[:2], "--submit", **job)
    assert (code, error.count("\n")) == (2, 1) and "--submit" in error
    assert not (tmp_path / "run").exists()
