"""Nodes of a Slurm allocation: `myriad join` in a step of one task on each, and the batch script of such a
run.

    batch host   myriad train ─┬─ driver
                               ├─ srun, node 0 ── agent ── ranks      a step each, so that one can be ended
                               └─ srun, node 1 ── ...                 while others continue

The allocation must survive the loss of a node (``--no-kill``, as in the script that is written here). A node
that the driver has given up is drained, so that no other job gets it. A spare of the allocation takes its
place. Without a spare the job is requeued and resumes from its checkpoint elsewhere.

The batch script requests the nodes of the run and its spares; partition, account and time are set as for any
job (SBATCH_PARTITION, ...). When the time is nearly over, or the job is preempted, Slurm sends
SIGTERM: the run saves and stops, and the job is queued again. However it ends, the same script resumes the
same run folder.
"""

import logging
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from myriad.errors import BadInputError, RunFailedError
from myriad.job import Job, ResilienceConfig
from myriad.launchers.launcher import Observer, Outcome
from myriad.launchers.supervised_process import SupervisedProcess, end_all, wait_all
from myriad.launchers.supervised_run import supervise_run
from myriad.run import Run
from myriad.supervise.driver_address import check_listen
from myriad.system import child_process
from myriad.system.whole_file import write_whole

__all__ = ["SlurmLauncher", "check_slurm", "in_allocation", "run_slurm", "slurm", "submit", "write_script"]

_LOG = logging.getLogger(__name__)
_JOB = "SLURM_JOB_ID"
_TOOLS = ("srun", "sbatch", "scontrol")
_COMMAND_SECONDS = 15.0
_GIVEN_UP_SECONDS = 5.0
"""How long a step that ended by itself is not restarted if there are spares, so that the driver gives a lost
node up first."""


def slurm(*command: str) -> str:
    """Run a command of Slurm and return its output. Raises ``OSError`` with its error message."""
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMMAND_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{command[0]} did not answer in {_COMMAND_SECONDS:g} s") from None
    if ended.returncode:
        raise OSError(ended.stderr.strip().split("\n")[-1] or f"{command[0]} failed")
    return ended.stdout


def in_allocation() -> bool:
    """Return whether this process runs in a Slurm allocation."""
    return _JOB in os.environ


def check_slurm(job: Job, *, oversubscribe: bool = False) -> None:
    """Refuse a job that cannot be started under this Slurm, or in this allocation. Raises `BadInputError`."""
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent:
        allowed = f"Slurm is not installed here (no {', '.join(absent)}); local or join"
        raise BadInputError("resilience.engine", "slurm", allowed)
    if in_allocation():
        how = job.resilience
        _check_hosts(how, _hosts())
        if not _is_default(how):
            check_listen(how.listen)


def _check_hosts(how: ResilienceConfig, hosts: Sequence[str]) -> None:
    key, value = ("nodes", how.nodes) if how.nodes > len(hosts) else ("spares", how.spares)
    if how.nodes + how.spares > len(hosts):
        allowed = f"this allocation has {len(hosts)} nodes; resilience.nodes and resilience.spares together"
        raise BadInputError(f"resilience.{key}", value, allowed)


def _hosts() -> list[str]:
    """Return the hosts of the allocation. Raises `BadInputError` when it has ended."""
    try:
        return slurm("scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")).split()
    except OSError as error:
        raise BadInputError(_JOB, os.environ[_JOB], f"the nodes of this job are not known: {error}") from None


def run_slurm(run: Run, world: int, *, threads: int = 0, observer: Observer | None = None) -> Outcome:
    """Train ``world`` ranks on the nodes of this allocation. Raises `RunFailedError`."""
    how, hosts = run.job().resilience, _hosts()
    listen = _own_address(hosts) if _is_default(how) else how.listen
    engine = SlurmLauncher(run, how.nodes, hosts, how.timeout_scale)
    return supervise_run(run, world, engine, observer, listen=listen)


def _is_default(how: ResilienceConfig) -> bool:
    return "listen" not in how.model_fields_set or how.listen == ResilienceConfig().listen


def _own_address(hosts: Sequence[str]) -> str:
    """Return the address by which the other nodes reach this machine, from the route to the last of them."""
    host = hosts[-1]
    try:
        words = slurm("scontrol", "show", "node", host).split()
        fields = dict(word.partition("=")[::2] for word in words if "=" in word)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((fields.get("NodeAddr", host), 1))
            address: str = probe.getsockname()[0]
            return address
    except OSError as error:
        problem = f"no address of this machine leads to node {host} ({error}); resilience.listen names one"
        raise RunFailedError(problem) from None


class SlurmLauncher:
    """Runs the agent of each node in a step of its own."""

    def __init__(self, run: Run, nodes: int, hosts: Sequence[str], patience: float) -> None:
        self._run, self._nodes, self._hosts = run, nodes, hosts
        self._steps = {
            node: SupervisedProcess(run, f"executor-{node}", self._command(node, host))
            for node, host in enumerate(hosts)
        }
        self._given_up_seconds = _GIVEN_UP_SECONDS * max(1.0, patience)

    def _command(self, node: int, host: str) -> list[str]:
        """Return the srun command: the whole node for one task, beside this job's other steps."""
        srun = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--mem=0", "--no-kill"]
        srun += ["--cpu-bind=none", "--input=none", "--export=ALL", f"--job-name=node-{node}"]
        executor = "myriad.launchers.slurm_node"
        watched = [sys.executable, "-S", child_process.__file__, str(os.getpid())]
        return [*watched, *srun, sys.executable, "-Pm", executor, str(self._run.path.resolve()), str(node)]

    def start(self) -> None:
        """Start a node agent on each node of the allocation with srun."""
        for step in self._steps.values():
            step.start()

    def poll(self) -> None:
        """Restart ended steps; with spares, only after the driver has given the node up."""
        wait = self._given_up_seconds if len(self._steps) > self._nodes else 0.0
        for step in self._steps.values():
            step.revive(for_ever=True, after_seconds=wait)

    def replace(self, node: int) -> None:
        """Drain the node and continue without it; requeue the job if too few nodes are left."""
        step = self._steps.pop(node, None)
        if step is None:
            return
        step.end(signal.SIGTERM)
        self._drain(node)
        if len(self._steps) < self._nodes:
            self._requeue(node)

    def _drain(self, node: int) -> None:
        """Drain the node, so that no other job gets it before a person has looked at it."""
        host, reason = self._hosts[node], f"myriad: given up by the driver of {self._run.path.name}"
        try:
            slurm("scontrol", "update", f"NodeName={host}", "State=DRAIN", f"Reason={reason}")
            self._run.append_event("drain", node=node, host=host)
        except OSError as error:
            self._run.append_event("drain", node=node, host=host, problem=f"not drained: {error}")

    def _requeue(self, node: int) -> None:
        """Requeue the job. Raises `RunFailedError` if Slurm refuses."""
        job, host = os.environ[_JOB], self._hosts[node]
        try:
            slurm("scontrol", "requeue", job)
            self._run.append_event("requeue", node=node, host=host, job=job)
        except OSError as error:
            problem = f"node {host} was lost, no spare is left, and job {job} cannot be requeued: {error}"
            raise RunFailedError(problem) from None

    def ask_to_stop(self) -> None:
        """Do nothing: the driver notifies the agents."""

    def wait(self, seconds: float) -> None:
        """Wait for all steps to end, ``seconds`` at most."""
        wait_all(self._steps.values(), seconds)

    def close(self) -> None:
        """End all steps, by ending their srun."""
        end_all(self._steps.values(), signal.SIGTERM)


_NOTICE_SECONDS = 180
_SCRIPT = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --signal=B:TERM@{notice_seconds}
#SBATCH --open-mode=append
#SBATCH --output={log}

cd {folder} || exit 1
asked=
trap 'asked=1; kill -TERM $pid' TERM
{program} train {run} &
pid=$!
wait $pid
code=$?
while kill -0 $pid 2>/dev/null; do wait $pid; code=$?; done
if [ -n "$asked" ] && {{ [ $code -eq 130 ] || [ $code -eq 143 ]; }}; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
"""


def write_script(run: Run, job: Job) -> Path:
    """Write the batch script RUN/slurm.sh, for ``sbatch``; return its path."""
    path = run.path.resolve()
    script = _SCRIPT.format(
        name=job.name,
        nodes=job.resilience.nodes + job.resilience.spares,
        notice_seconds=_NOTICE_SECONDS,
        log=run.logs_path.resolve() / "slurm-%j.log",
        folder=shlex.quote(str(Path.cwd())),
        program=f"{shlex.quote(sys.executable)} -Pm myriad.cli.main",
        run=shlex.quote(str(path)),
    )
    write_whole(path / "slurm.sh", script)
    return path / "slurm.sh"


def submit(script: Path) -> str:
    """Submit a batch script; return the number of the job. Raises `RunFailedError` if Slurm refuses it."""
    try:
        return slurm("sbatch", "--parsable", str(script)).strip().partition(";")[0]
    except OSError as error:
        raise RunFailedError(f"sbatch {script}: {error}") from None
