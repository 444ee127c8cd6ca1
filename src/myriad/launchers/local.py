"""Nodes on this machine: each node agent is a child process of the launcher.

There is usually one node. Several nodes are for rehearsals and tests, in which a node is lost and a spare
takes its place.

Before anything starts, `check_local_memory` refuses a job that cannot fit: otherwise the kernel kills a rank
after the machine has swapped for minutes. It counts only what is certain: parameters, gradients and optimizer
states of all ranks by the formula of `docs/concepts/memory.md` (`myriad.planner.memory.rank_memory`), against
all memory of the machine, because ranks of this run may still use some of it. If GPUs may hold the states,
the snapshots in host memory are counted instead.
"""

import signal
from collections.abc import Callable, Sequence

from myriad.checkpoint.config import num_slots
from myriad.checkpoint.snapshots.server_start import NODE
from myriad.errors import BadInputError
from myriad.job import Job, work_of
from myriad.launchers.launcher import Observer, Outcome, uses_gpus
from myriad.launchers.supervised_process import SupervisedProcess, end_all, of_module, wait_all
from myriad.launchers.supervised_run import supervise_run
from myriad.planner import memory_of_ranks
from myriad.run import Run
from myriad.supervise.driver_address import check_listen
from myriad.supervise.messages import STOP_ASKED
from myriad.system.machine import MACHINE, memory_bytes, num_cores
from myriad.units import format_bytes

__all__ = ["LocalLauncher", "check_cores", "check_local", "run_local"]

_GIVEN_UP_SECONDS = 5.0
"""How long a dead agent is not restarted if there are spares, so that the driver gives its node up first.
Otherwise a rehearsal on one machine could never lose a node."""


def check_cores(world: int, *, oversubscribe: bool = False) -> None:
    """Refuse more ranks than cores: they would share cores, and a slow run would look like a broken one."""
    cores = num_cores()
    if world > cores and not oversubscribe:
        allowed = f"at most {cores} on {cores} cores; --oversubscribe lets ranks take turns"
        raise BadInputError("layout (ranks)", world, allowed)


def check_local(job: Job, *, oversubscribe: bool = False) -> None:
    """Refuse a job that this machine cannot start. Raises `BadInputError`."""
    check_local_memory(job)
    check_cores(job.layout.world, oversubscribe=oversubscribe)
    check_listen(job.resilience.listen)


def run_local(
    run: Run,
    world: int,
    *,
    threads: int = 0,
    observer: Observer | None = None,
    command: Sequence[str] = (),
) -> Outcome:
    """Train ``world`` ranks on this machine, or run ``command RUN_DIR`` as ranks, until they are done,
    restarting them as often as needed. Raises `RunFailedError`.

    ``threads``: threads of each rank; 0: the cores divided among the ranks. A Ctrl-C has no time limit.
    """
    how = run.job().resilience
    threads = threads or max(1, num_cores() // world)
    engine = LocalLauncher(run, how.nodes, how.spares, threads, command, how.timeout_scale)
    return supervise_run(run, world, engine, observer)


class LocalLauncher:
    """Runs the agent of each node as a child process."""

    def __init__(
        self,
        run: Run,
        nodes: int,
        spares: int,
        threads: int,
        command: Sequence[str],
        patience: float,
        where: Callable[[int], Sequence[str]] = lambda node: (),
    ) -> None:
        """``where``: words before the command of a node's agent."""
        several = nodes + spares > 1
        self._executors = [
            SupervisedProcess(
                run,
                f"executor-{node}",
                [
                    *where(node),
                    *of_module("myriad.supervise.agent.agent_process", run.path, node, threads, *command),
                ],
                {MACHINE: ""} | ({NODE: str(node)} if several else {}),
            )
            for node in range(nodes + spares)
        ]
        self._has_spares = spares > 0
        self._given_up_seconds = _GIVEN_UP_SECONDS * max(1.0, patience) if spares else 0.0

    def start(self) -> None:
        """Start the node agents of all nodes on this machine."""
        for executor in self._executors:
            executor.start()

    def poll(self) -> None:
        """Kill stopped agents and restart dead ones; with spares, only after the driver has given the node
        up."""
        for executor in self._executors:
            executor.end_if_stopped()
            executor.revive(for_ever=self._has_spares, after_seconds=self._given_up_seconds)

    def replace(self, node: int) -> None:
        """Kill the agent, which is silent or on a bad node, and start another one."""
        if node < len(self._executors):
            self._executors[node].replace()

    def ask_to_stop(self) -> None:
        """Ask all agents to stop. An agent that dies before it handles the signal is restarted with the
        request."""
        for executor in self._executors:
            executor.environment[STOP_ASKED] = "1"
            executor.send_signal(signal.SIGINT)

    def wait(self, seconds: float) -> None:
        """Wait for all agents to end, ``seconds`` at most."""
        wait_all(self._executors, seconds)

    def close(self) -> None:
        """End all agents. SIGTERM lets an agent end its ranks and their child processes, too."""
        end_all(self._executors, signal.SIGTERM)


_BYTES_OF_A_PARAMETER = 12
"""Least bytes of a parameter among all ranks: its float32 master value and two optimizer moments."""


def check_local_memory(job: Job, machine_bytes: float | None = None) -> None:
    """Refuse a job whose ranks need more than ``machine_bytes``, by default the memory of this machine.
    Raises `BadInputError`."""
    there = machine_bytes or float(memory_bytes())
    needed = float(_BYTES_OF_A_PARAMETER * job.model.num_parameters())
    if uses_gpus(job):
        _check_snapshots(job, needed, there)
        return
    # otherwise the formula, which may take a minute for a million layers, would only confirm the refusal
    if needed <= there:
        needed = _states_bytes(job)
    if needed > there:
        key = f"memory for {job.name}'s parameters and their states"
        most = format_bytes(int(there))
        allowed = f"at most {most}, all that this machine has; `myriad plan` says where it fits"
        raise BadInputError(key, format_bytes(int(needed)), allowed)


def _check_snapshots(job: Job, state_bytes: float, there: float) -> None:
    """Refuse snapshots that exceed the memory. It is touched and pinned at the start, so the kernel would
    kill a rank."""
    slots = num_slots(job.checkpoint, sends_copies=False, compares=job.compares_replicas)
    if slots * state_bytes > there:
        key = f"memory for {slots} snapshots of {job.name}'s parameters and their states"
        fewer = (
            "; checkpoint.memory_every = 0 needs two snapshots less" if job.checkpoint.memory_every else ""
        )
        allowed = f"at most {format_bytes(int(there))}, all that this machine has{fewer}"
        raise BadInputError(key, format_bytes(int(slots * state_bytes)), allowed)


def _states_bytes(job: Job) -> float:
    """Return the bytes of all ranks, in the narrowest type that the job's precision allows."""
    value_bytes = 4 if job.train.precision == "float32" else 2
    ranks = memory_of_ranks(work_of(job, value_bytes), on_cpu=True)
    each = sum(float(one.weights + one.gradients + one.optimizer) for one in ranks)
    return each * job.layout.world / len(ranks)
