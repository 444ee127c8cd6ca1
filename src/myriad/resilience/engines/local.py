"""Nodes of this machine: their executors are child processes of this one. Usually there is one node; several
are for rehearsals and tests, in which a node is lost, and a spare takes its place.

    myriad train ─┬─ driver
                  ├─ executor of node 0 ── warm parent ─┬─ rank 0     when it dies, its ranks do; all begin
                  │                                     └─ rank 1     again from what keepers have in memory
                  └─ executor of node 1 ── ...

None of them is ever left behind: each asks the kernel to be killed when its parent is (`child.py`), ranks
lead sessions of their own.
"""

import signal
from collections.abc import Callable, Sequence

from myriad.checkpoint.keeper_start import NODE
from myriad.errors import BadInputError
from myriad.job import Job
from myriad.machine import MACHINE, num_cores
from myriad.resilience.engines.engine import Observer, Outcome
from myriad.resilience.engines.kept import Kept, of_module
from myriad.resilience.engines.local_memory import check_local_memory
from myriad.resilience.engines.supervise import see_through
from myriad.resilience.facts import STOP_ASKED
from myriad.resilience.listen import check_listen
from myriad.run import Run

__all__ = ["LocalEngine", "check_cores", "check_local", "run_local"]

_GIVEN_UP_SECONDS = 5.0
"""How long the executor of a dead node stays dead where a spare may take its place: by then the driver has
given the node up. With this machine's other nodes nothing else would ever be lost."""


def check_cores(world: int, *, oversubscribe: bool = False) -> None:
    """Refuses more ranks than cores: they would take turns, and a slow run would look like a broken one."""
    cores = num_cores()
    if world > cores and not oversubscribe:
        allowed = f"at most {cores} on {cores} cores; --oversubscribe lets ranks take turns"
        raise BadInputError("layout (ranks)", world, allowed)


def check_local(job: Job, *, oversubscribe: bool = False) -> None:
    """Refuses what this machine cannot start. Raises `BadInputError`."""
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
    """Has ``world`` ranks train, or run ``command RUN_DIR``, until they are done, however often they must be
    started. Raises `RunFailedError`.

    ``threads`` of each rank; 0: the cores divided among them. After a Ctrl-C they get as long as they need.
    """
    how = run.job().resilience
    threads = threads or max(1, num_cores() // world)
    engine = LocalEngine(run, how.nodes, how.spares, threads, command, how.patience)
    return see_through(run, world, engine, observer)


class LocalEngine:
    """A child process for each node."""

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
        """``where``: what the command of a node's executor begins with."""
        several = nodes + spares > 1
        self._executors = [
            Kept(
                run,
                f"executor-{node}",
                [*where(node), *of_module("node.executor_process", run.path, node, threads, *command)],
                {MACHINE: ""} | ({NODE: str(node)} if several else {}),
            )
            for node in range(nodes + spares)
        ]
        self._has_spares = spares > 0
        self._given_up_seconds = _GIVEN_UP_SECONDS * max(1.0, patience) if spares else 0.0

    def start(self) -> None:
        """All."""
        for executor in self._executors:
            executor.start()

    def poll(self) -> None:
        """One that is stopped is ended; one that is dead follows another, where there are spares not before
        the driver knows that it is."""
        for executor in self._executors:
            executor.end_if_stopped()
            executor.revive(for_ever=self._has_spares, after_seconds=self._given_up_seconds)

    def replace(self, node: int) -> None:
        """Its executor is silent, or the node was found to be bad: another."""
        if node < len(self._executors):
            self._executors[node].replace()

    def ask_to_stop(self) -> None:
        """An executor that is not yet able to hear it, and dies, has a follower that knows."""
        for executor in self._executors:
            executor.environment[STOP_ASKED] = "1"
            executor.send_signal(signal.SIGINT)

    def wait(self, seconds: float) -> None:
        """Until they have ended."""
        for executor in self._executors:
            executor.wait(seconds)

    def close(self) -> None:
        """SIGTERM lets an executor end what ranks have started too."""
        for executor in self._executors:
            executor.send_signal(signal.SIGTERM)
        for executor in self._executors:
            executor.end(signal.SIGTERM)
