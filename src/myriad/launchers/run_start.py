"""Begins the journal at a start of a run: in the file, and in Redis under a lease if the job says so.

The lease prevents two machines from driving one run. The lock of RUN does so only on one machine: on a shared
file system, a lost machine may keep the lock for minutes, or the lock may have no effect on other machines.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from myriad.alerts.config import AlertsConfig
from myriad.comm.rendezvous.redis_address import RedisAddress, redis_address
from myriad.errors import BadInputError
from myriad.job import ResilienceConfig
from myriad.run import Run
from myriad.supervise.driver.journal import Journal
from myriad.supervise.policy.run_state import RunPlan
from myriad.system.jsonl import Record
from myriad.wire.run_secret import secret_place

if TYPE_CHECKING:
    from myriad.supervise.driver.redis_lease import RedisLease

__all__ = ["alarm_options", "begin_journal", "check_journal", "driver_options", "link_options", "open_lease"]

_KEY = "resilience.journal"
_POLL_SECONDS = 0.2
T = TypeVar("T")


def check_journal(run: Run, how: ResilienceConfig) -> None:
    """Refuse a journal that cannot be written, and a run that another machine drives. Raises
    `BadInputError`."""
    if how.journal == "file":
        return
    from myriad.supervise.driver.redis_lease import check_server

    answered(lambda: check_server(_address(how)), how)
    if secret_place(run.path / "secret").exists():
        _wait_until_free(run, open_lease(run.path, how), how)


def _address(how: ResilienceConfig) -> RedisAddress:
    address = redis_address(how.journal, _KEY, "file")
    assert address is not None, "asked for with a server alone"
    return address


def open_lease(path: Path, how: ResilienceConfig, owner: str | None = None) -> "RedisLease":
    """Return the lease of a job whose journal is in Redis."""
    from myriad.supervise.driver.redis_lease import RedisLease, lease_seconds, new_owner

    return RedisLease(_address(how), path, owner or new_owner(), lease_seconds(how.timeout_scale))


def answered(ask: Callable[[], T], how: ResilienceConfig) -> T:
    """Return Redis's answer. Raises `BadInputError` if Redis is away."""
    from myriad.supervise.driver.redis_lease import StoreUnavailableError

    try:
        return ask()
    except StoreUnavailableError as error:
        raise BadInputError(_KEY, how.journal, f"must be a Redis server that answers: {error}") from None


def _wait_until_free(run: Run, lease: "RedisLease", how: ResilienceConfig) -> None:
    """Wait until the lease is free, which takes a moment if its driver was just killed."""
    deadline = time.monotonic() + 1.5 * lease.seconds
    while holder := answered(lease.inspect, how)[0]:
        if time.monotonic() > deadline:
            raise _driven(run, holder, lease)
        time.sleep(_POLL_SECONDS)


def _driven(run: Run, owner: str, lease: "RedisLease") -> BadInputError:
    problem = f"is driven by {owner} (the lease in {lease}); `myriad train RUN --standby` waits for it"
    return BadInputError("run", str(run.path), problem)


def begin_journal(run: Run, how: ResilienceConfig, plan: RunPlan) -> list[str]:
    """Write the plan; return options for the driver. Raises `BadInputError`."""
    journal = Journal(run.path / "journal.jsonl")
    if how.journal == "file":
        _begin(journal, plan)
        return []
    lease = open_lease(run.path, how)
    _wait_until_free(run, lease, how)
    taken = answered(lambda: lease.take(1 + journal.last_term(), by_force=True), how)
    if not taken.term:
        raise _driven(run, taken.owner, lease)
    line = _begin(journal, plan, taken.term)
    answered(lambda: lease.append(line), how)
    return driver_options(lease, how)


def _begin(journal: Journal, plan: RunPlan, term: int = 0) -> Record:
    try:
        return journal.begin(plan, term)
    except OSError as error:
        allowed = f"a folder with room: {journal.path.name} cannot be written ({error.strerror})"
        raise BadInputError("run", str(journal.path.parent), allowed) from None


def driver_options(lease: "RedisLease", how: ResilienceConfig) -> list[str]:
    """Return the options with which the drivers of one launcher share its lease."""
    return ["--journal", how.journal, "--owner", lease.owner, "--lease-seconds", str(lease.seconds)]


def link_options(how: ResilienceConfig) -> list[str]:
    """Return the driver's options that encrypt its connections."""
    return ["--encrypt"] if how.encrypt else []


def alarm_options(alerts: AlertsConfig) -> list[str]:
    """Return the driver's options that make it send the alarms of its run."""
    return ["--alarms"] if alerts.has_places else []
