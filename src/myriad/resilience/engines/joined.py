"""Nodes that somebody else starts: a person, or a manager of machines that Myriad does not know, starts
`myriad join RUN` on each. The run begins when enough have joined; any more are spares.

    machine A    myriad train JOB --resilience.engine join --resilience.nodes 2 --resilience.listen A
    machines     myriad join RUN                                       RUN is in a file system that all have
"""

from myriad.errors import BadInputError
from myriad.job import Job
from myriad.resilience.engines.engine import Observer, Outcome
from myriad.resilience.engines.supervise import see_through
from myriad.resilience.listen import check_listen
from myriad.run import Run

__all__ = ["Joined", "check_joined", "run_joined"]

_GATHER_SECONDS = 3600.0
"""Nodes come as people start them."""


class Joined:
    """Nothing to start, nothing to end: executors leave when the driver says that the run is over."""

    def start(self) -> None:
        """They come by themselves."""

    def poll(self) -> None:
        """Whoever started one looks after it."""

    def replace(self, node: int) -> None:
        """The driver has closed its connection; it may join again, as a spare, if it was only lost."""

    def ask_to_stop(self) -> None:
        """The driver tells them."""

    def wait(self, seconds: float) -> None:
        """They were told."""

    def close(self) -> None:
        """They were told, or go when they find no driver."""


def check_joined(job: Job, *, oversubscribe: bool = False) -> None:
    """Refuses what cannot be joined. Raises `BadInputError`."""
    if job.resilience.spares:
        allowed = "0 with the engine join: whoever joins beyond resilience.nodes is a spare"
        raise BadInputError("resilience.spares", job.resilience.spares, allowed)
    check_listen(job.resilience.listen)


def run_joined(run: Run, world: int, *, threads: int = 0, observer: Observer | None = None) -> Outcome:
    """Has ``world`` ranks train on nodes that join. Raises `RunFailedError`."""
    return see_through(run, world, Joined(), observer, gather_seconds=_GATHER_SECONDS)
