"""A run whose nodes, and its driver, are each in a network namespace of their own: so that links go down, and
nodes are cut off, as between machines.

    host 0 ... n - 1    a node each: the driver is reached by eth0, ranks talk by eth1
    host n              the driver

Nobody reaches a machine that is cut off, so a node that was given up is not ended from outside: its executor
finds out by itself, and joins again when it can.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from myriad.errors import BadInputError
from myriad.machine import num_cores
from myriad.resilience.engines.engine import Observer, Outcome
from myriad.resilience.engines.local import LocalEngine
from myriad.resilience.engines.supervise import see_through
from myriad.resilience.faults.namespaces import Namespaces, missing
from myriad.run import Run

__all__ = ["made_hosts", "run_on_hosts"]

_RANKS_GO_BY = "eth1"


@contextmanager
def made_hosts(num_nodes: int) -> Iterator[Namespaces]:
    """Of nodes and the driver. Raises `BadInputError` where there can be none."""
    if problem := missing():
        raise BadInputError("hosts", True, f"false here: {problem}")
    with Namespaces(num_nodes + 1, networks=2) as hosts:
        yield hosts


def run_on_hosts(
    run: Run, world: int, hosts: Namespaces, *, threads: int = 0, observer: Observer | None = None
) -> Outcome:
    """As `run_local`. Raises `RunFailedError`."""
    how, driver = run.job().resilience, hosts.num_hosts - 1
    threads = threads or max(1, num_cores() // world)

    def where(node: int) -> list[str]:
        return ["env", f"GLOO_SOCKET_IFNAME={_RANKS_GO_BY}", *hosts.entering(node)]

    engine = _HostsEngine(run, how.nodes, how.spares, threads, (), how.patience, where)
    with hosts.network_of(driver):
        return see_through(run, world, engine, observer, listen=hosts.address(driver))


class _HostsEngine(LocalEngine):
    def replace(self, node: int) -> None:
        """It may be back, and joins again as a spare."""
