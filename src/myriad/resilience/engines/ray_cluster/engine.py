"""Nodes that Ray starts: one task on each machine, which runs an executor until the run is over.

    myriad train ─┬─ driver
      (engine)    └─ Ray ─┬─ task of node 0 ── executor ── ranks
                          ├─ task of node 1 ── executor ── ranks
                          └─ task of a spare ── executor

A machine that dies: Ray ends its task and moves its bundle; the task is asked for again, and is a spare. The
driver, which hears the executors itself, has by then let another spare take the ranks. A machine that Ray
believes to be well and the driver has given up is left for another one, if there is one with room within ten
seconds. When the engine dies Ray ends its tasks, and executors ask the kernel to be killed with them.
"""

import logging
import os
import time
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from myriad.resilience.engines.ray_cluster.room import Bundle, Room
from myriad.resilience.engines.ray_cluster.task import execute
from myriad.run import Run

__all__ = ["RayEngine"]

_LOG = logging.getLogger(__name__)
_LOOK_SECONDS = 0.5
_AGAIN_SECONDS, _MOST_SECONDS = 1.0, 30.0
"""Between the end of a task and the next in its place; more each time that one ends soon."""
_SOON_SECONDS = 10.0
_YOUNG_SECONDS = 4.0
"""What began later than that, times the run's patience, is not what the driver has given up."""
_ELSEWHERE_SECONDS = 10.0


@dataclass
class _Seat:
    """A node: where it may run, and what runs there."""

    node: int
    home: Bundle | None = None
    other: Bundle | None = None
    """Elsewhere, since it has left its machine."""
    left: str | None = None
    left_at: float = 0.0
    taken: Bundle | None = None
    task: Any = None
    began_at: float = 0.0
    again_at: float = 0.0
    deaths: int = 0


class RayEngine:
    """A task for each node."""

    def __init__(
        self, run: Run, room: Room, nodes: int, spares: int, threads: int, patience: float = 1.0
    ) -> None:
        self._ray: Any = import_module("ray")
        self._run, self._room, self._threads, self._nodes = run, room, threads, nodes
        self._execute = self._ray.remote(max_retries=0)(execute)
        self._seats = [_Seat(node) for node in range(nodes + spares)]
        self._look_at = 0.0
        self._young_seconds = _YOUNG_SECONDS * max(1.0, patience)

    def start(self) -> None:
        """Room for all nodes at once; the rest follows."""
        for seat, bundle in zip(self._seats, self._room.reserve(self._nodes), strict=False):
            seat.home = bundle

    def poll(self) -> None:
        """Twice a second: who has ended, who can begin, and room for another spare."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_SECONDS
        self._note_ended(now)
        for seat in self._seats:
            if seat.task is None and now >= seat.again_at:
                self._begin(seat, now)
        self._reserve_for_spare()

    def _note_ended(self, now: float) -> None:
        seat_of = {seat.task: seat for seat in self._seats if seat.task is not None}
        ended, _ = self._ray.wait(list(seat_of), num_returns=len(seat_of), timeout=0) if seat_of else ([], [])
        for task in ended:
            seat = seat_of[task]
            seat.task, seat.taken = None, None
            seat.deaths = seat.deaths + 1 if now - seat.began_at < _SOON_SECONDS else 0
            seat.again_at = now + min(_MOST_SECONDS, _AGAIN_SECONDS * 2**seat.deaths)
            _LOG.info("node %d: %s; another try follows", seat.node, self._how(task))

    def _how(self, task: Any) -> str:
        try:
            return f"its executor has ended with {self._ray.get(task)}"
        except self._ray.exceptions.RayError as error:
            return f"its task has ended ({type(error).__name__})"

    def _begin(self, seat: _Seat, now: float) -> None:
        bundle = self._choose(seat, now)
        if bundle is None:
            return
        options = self._room.scheduling(bundle)
        path = str(self._run.path.resolve())
        seat.taken, seat.began_at = bundle, now
        seat.task = self._execute.options(**options).remote(path, seat.node, os.getcwd(), self._threads, ())

    def _choose(self, seat: _Seat, now: float) -> Bundle | None:
        """Of its bundles one that is somewhere, and not where it has left, unless nothing else comes."""
        if seat.other is not None and self._room.machine_of(seat.other) is not None:
            return seat.other
        machine = None if seat.home is None else self._room.machine_of(seat.home)
        if machine is None or machine in self._machines(other_than=seat):
            return None
        if machine == seat.left and now - seat.left_at < _ELSEWHERE_SECONDS:
            return None
        if seat.other is not None:
            self._room.release(seat.other)
            seat.other = None
        return seat.home

    def _machines(self, other_than: _Seat | None = None) -> set[str]:
        """On which somebody is."""
        taken = [seat.taken for seat in self._seats if seat is not other_than and seat.taken is not None]
        return {machine for bundle in taken if (machine := self._room.machine_of(bundle)) is not None}

    def _reserve_for_spare(self) -> None:
        """One after the other: where the next may not be is known when the one before is somewhere."""
        for seat in self._seats:
            if seat.home is None:
                seat.home = self._room.reserve_elsewhere(self._machines())
                return
            if seat.taken is None:
                return

    def replace(self, node: int) -> None:
        """The driver has given it up. Where Ray has seen the same, it is on its way already."""
        now = time.monotonic()
        seat = self._seats[node] if node < len(self._seats) else None
        if seat is None or seat.task is None or now - seat.began_at < self._young_seconds:
            return
        assert seat.taken is not None
        machine = self._room.machine_of(seat.taken)
        self._ray.cancel(seat.task, force=True)
        if seat.other is not None:
            self._room.release(seat.other)
            seat.other = None
        seat.task, seat.taken, seat.again_at = None, None, now
        if machine is not None:
            seat.left, seat.left_at = machine, now
            seat.other = self._room.reserve_elsewhere(self._machines() | {machine})

    def ask_to_stop(self) -> None:
        """The driver tells them."""

    def wait(self, seconds: float) -> None:
        """Until they have ended."""
        tasks = [seat.task for seat in self._seats if seat.task is not None]
        if tasks:
            self._ray.wait(tasks, num_returns=len(tasks), timeout=seconds)

    def close(self) -> None:
        """Ray ends their processes, and executors end with those."""
        for seat in self._seats:
            if seat.task is not None:
                self._ray.cancel(seat.task, force=True)
        self._room.close()
