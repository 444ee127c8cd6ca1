"""Nodes of a Slurm allocation: a step of one task on each, which is `myriad join`.

    batch host   myriad train ─┬─ driver
                               ├─ srun, node 0 ── executor ── ranks      a step each, so that one can be ended
                               └─ srun, node 1 ── ...                    while others go on

The allocation must survive that a node is lost (``--no-kill``, as in the script that `slurm_batch` writes).
A node that the driver has given up is drained, so that no other job gets it, and a spare of the allocation
takes its place; when there is none left, the job is requeued, and goes on from its checkpoint elsewhere.
"""

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

from myriad.errors import BadInputError, RunFailedError
from myriad.job import Job, ResilienceConfig
from myriad.resilience.engines import child
from myriad.resilience.engines.engine import Observer, Outcome
from myriad.resilience.engines.kept import Kept
from myriad.resilience.engines.supervise import see_through
from myriad.resilience.listen import check_listen
from myriad.run import Run

__all__ = ["SlurmEngine", "check_slurm", "in_allocation", "run_slurm", "slurm"]

_LOG = logging.getLogger(__name__)
_JOB = "SLURM_JOB_ID"
_TOOLS = ("srun", "sbatch", "scontrol")
_COMMAND_SECONDS = 15.0
_GIVEN_UP_SECONDS = 5.0
"""How long a step that ended by itself is not begun again where there are spares: by then the driver has
given the node up, if it is that."""


def slurm(*command: str) -> str:
    """What a command of Slurm prints. Raises ``OSError`` with what it says when it fails."""
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
    """Whether Slurm has given this process nodes."""
    return _JOB in os.environ


def check_slurm(job: Job, *, oversubscribe: bool = False) -> None:
    """Refuses what cannot be started under this Slurm, or in this allocation. Raises `BadInputError`."""
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
    """Of the allocation. Raises `BadInputError` when there is none any more."""
    try:
        return slurm("scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")).split()
    except OSError as error:
        raise BadInputError(_JOB, os.environ[_JOB], f"the nodes of this job are not known: {error}") from None


def run_slurm(run: Run, world: int, *, threads: int = 0, observer: Observer | None = None) -> Outcome:
    """Has ``world`` ranks train on the nodes of this allocation. Raises `RunFailedError`."""
    how, hosts = run.job().resilience, _hosts()
    listen = _own_address(hosts) if _is_default(how) else how.listen
    engine = SlurmEngine(run, how.nodes, hosts, how.patience)
    return see_through(run, world, engine, observer, listen=listen)


def _is_default(how: ResilienceConfig) -> bool:
    return "listen" not in how.model_fields_set or how.listen == ResilienceConfig().listen


def _own_address(hosts: Sequence[str]) -> str:
    """By which the other nodes reach this machine: that of the way to the last of them."""
    host = hosts[-1]
    try:
        words = slurm("scontrol", "show", "node", host).split()
        fields = dict(word.partition("=")[::2] for word in words if "=" in word)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((fields.get("NodeAddr", host), 1))
            address: str = probe.getsockname()[0]
            return address
    except OSError as error:
        told = f"no address of this machine leads to node {host} ({error}); resilience.listen names one"
        raise RunFailedError(told) from None


class SlurmEngine:
    """A step for each node."""

    def __init__(self, run: Run, nodes: int, hosts: Sequence[str], patience: float) -> None:
        self._run, self._nodes, self._hosts = run, nodes, hosts
        self._steps = {
            node: Kept(run, f"executor-{node}", self._command(node, host)) for node, host in enumerate(hosts)
        }
        self._given_up_seconds = _GIVEN_UP_SECONDS * max(1.0, patience)

    def _command(self, node: int, host: str) -> list[str]:
        """All of the node for one task, beside whatever else this job runs there."""
        srun = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--mem=0", "--no-kill"]
        srun += ["--cpu-bind=none", "--input=none", "--export=ALL", f"--job-name=node-{node}"]
        executor = "myriad.resilience.engines.slurm_node"
        watched = [sys.executable, "-S", child.__file__, str(os.getpid())]
        return [*watched, *srun, sys.executable, "-m", executor, str(self._run.path.resolve()), str(node)]

    def start(self) -> None:
        """All."""
        for step in self._steps.values():
            step.start()

    def poll(self) -> None:
        """A step that has ended is begun again, but not where a spare may take its place before."""
        wait = self._given_up_seconds if len(self._steps) > self._nodes else 0.0
        for step in self._steps.values():
            step.revive(for_ever=True, after_seconds=wait)

    def replace(self, node: int) -> None:
        """The node is lost to this job."""
        step = self._steps.pop(node, None)
        if step is None:
            return
        step.end(signal.SIGTERM)
        self._drain(node)
        if len(self._steps) < self._nodes:
            self._requeue(node)

    def _drain(self, node: int) -> None:
        """So that no other job gets it before somebody has looked at it."""
        host, reason = self._hosts[node], f"myriad: given up by the driver of {self._run.path.name}"
        try:
            slurm("scontrol", "update", f"NodeName={host}", "State=DRAIN", f"Reason={reason}")
            self._run.append_event("drain", node=node, host=host)
        except OSError as error:
            self._run.append_event("drain", node=node, host=host, problem=f"not drained: {error}")

    def _requeue(self, node: int) -> None:
        """Raises `RunFailedError` where that cannot be."""
        job, host = os.environ[_JOB], self._hosts[node]
        try:
            slurm("scontrol", "requeue", job)
            self._run.append_event("requeue", node=node, host=host, job=job)
        except OSError as error:
            told = f"node {host} was lost, no spare is left, and job {job} cannot be requeued: {error}"
            raise RunFailedError(told) from None

    def ask_to_stop(self) -> None:
        """The driver tells them."""

    def wait(self, seconds: float) -> None:
        """Until they have ended."""
        for step in self._steps.values():
            step.wait(seconds)

    def close(self) -> None:
        """srun ends its step."""
        for step in self._steps.values():
            step.send_signal(signal.SIGTERM)
        for step in self._steps.values():
            step.end(signal.SIGTERM)
