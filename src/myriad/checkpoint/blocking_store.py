"""Store a step while the ranks wait: the last one of a run, and every one without overlap.

A failed store of the last step is retried at growing intervals until ``checkpoint.timeout_seconds`` have
passed. If a snapshot server dies meanwhile, the ranks take the snapshot again, because their state has not
changed. If the last step cannot be stored at all, the snapshot servers hold it in memory after the ranks
exit.
"""

import socket
import time
from collections.abc import Callable
from contextlib import suppress

from myriad.checkpoint.checkpoint_world import CheckpointWorld
from myriad.checkpoint.snapshots.checkpoint_writer import StoreOutcome
from myriad.checkpoint.snapshots.snapshot_client import SnapshotClient
from myriad.checkpoint.snapshots.snapshot_taker import SnapshotPurpose, SnapshotTaker
from myriad.system.jsonl import LineFile
from myriad.wire.socket_channel import Closed

__all__ = ["BlockingStore"]

_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.5, 30.0
"""First and longest pause between attempts to store the last step."""
_TRIES, _POLL_SECONDS = 4, 0.5
"""Tries of a step if snapshot servers die, and the interval at which ranks check for that."""


class BlockingStore:
    """Waits, on every rank, until a step is durable. All calls are collective."""

    def __init__(
        self, client: SnapshotClient, world: CheckpointWorld, events: LineFile, timeout_seconds: float
    ) -> None:
        self._client, self._world, self._events = client, world, events
        self._timeout_seconds = timeout_seconds

    def finish(
        self,
        step: int,
        snapshots: SnapshotTaker,
        write_progress: Callable[[], None],
        *,
        retry: bool,
    ) -> str | None:
        """Wait until a step is durable. Return ``None``, or the reason for failure, on all ranks.

        ``write_progress``: as for `SnapshotTaker.take`, to take the snapshot again. ``retry``: retry a failed
        store."""
        deadline = time.monotonic() + self._timeout_seconds
        retries = _Retries(self._client, step, deadline, self._report_retry) if retry else None
        lost = 0
        while lost < _TRIES:
            snapshots.await_reported()
            own = self._outcome_by(step, deadline, retries) if self._world.rank == 0 else None
            outcome = self._world.from_first(own, StoreOutcome | None)
            # Checked after the outcome: the death of the server may be the cause of a failed outcome.
            is_gone = snapshots.lost_step == step or not self._client.is_alive()
            if any(self._world.gather(is_gone, bool)):
                lost += 1
                snapshots.take(step, SnapshotPurpose(durable=True, last=True), write_progress)
            elif outcome is not None:
                return outcome.problem
        return f"the snapshot server died {lost} times while step {step} was stored"

    def _outcome_by(self, step: int, deadline: float, retries: "_Retries | None") -> StoreOutcome | None:
        """Wait briefly for the storage outcome of a step; ``None``: ask again."""
        with suppress(Closed):
            outcome = self._client.wait_stored(step, _POLL_SECONDS)
            if outcome is not None and retries is not None and retries.should_retry(outcome):
                return None
            if outcome is None and time.monotonic() > deadline:
                return StoreOutcome(f"not stored after {self._timeout_seconds:g} s", time.monotonic())
            return outcome
        return None

    def _report_retry(self, step: int, problem: str, seconds: float) -> None:
        line = {"time": time.time(), "event": "retry", "step": step, "problem": problem, "seconds": seconds}
        self._events.append(line)

    def hold(self, step: int, problem: str) -> None:
        """Have all snapshot servers keep a last step that could not be stored after the ranks exit.

        Writes a `held` event that lists the nodes, hosts and process ids of the servers."""
        pid: int | None = None
        is_first = self._world.rank == self._world.ranks_of_node[self._world.node][0]
        if is_first:
            with suppress(OSError):
                pid = self._client.hold(step)
        own = (socket.gethostname(), pid, self._world.node) if is_first else None
        servers = [
            {"node": node, "host": host, "pid": pid}
            for host, pid, node in filter(None, self._world.gather(own, tuple[str, int | None, int] | None))
        ]
        if self._world.rank == 0:
            line = {"time": time.time(), "event": "held", "step": step, "problem": problem}
            self._events.append(line | {"servers": servers})


class _Retries:
    """Retries storing the last step at growing intervals until the deadline."""

    def __init__(
        self,
        client: SnapshotClient,
        step: int,
        deadline: float,
        report: Callable[[int, str, float], None],
    ) -> None:
        """``report(step, problem, seconds)`` reports the problem and the remaining retry time once."""
        self._client, self._step, self._deadline, self._report = client, step, deadline, report
        self._is_reported = False
        self._pause, self._next = _FIRST_RETRY_SECONDS, 0.0

    def should_retry(self, outcome: StoreOutcome) -> bool:
        """Whether the step is being retried or will be, so that ``outcome`` is not final."""
        now = time.monotonic()
        if outcome.problem is None or outcome.is_final or now >= self._deadline:
            return False
        if not self._is_reported:
            self._is_reported = True
            with suppress(OSError):
                self._report(self._step, outcome.problem, self._deadline - now)
        if not self._next:
            self._next, self._pause = now + self._pause, min(2 * self._pause, _LAST_RETRY_SECONDS)
        if now >= self._next:
            self._next = 0.0
            self._client.retry_store(self._step)
        else:
            time.sleep(min(_POLL_SECONDS, self._next - now, self._deadline - now))
        return True
