"""Causes the faults of a scenario, from outside, each when its time has come; sees who takes a place that
became empty.

A thread of the process that `myriad train` is: it reads the progress page of the node, as its executor does,
and asks no rank. What only a rank can do to itself is armed before (`myriad.resilience.faults.inside`), and
here is merely cleared up. Everything caused is a line of RUN/faults/caused.jsonl, and so is a successor.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from myriad.jsonl import JsonlTail, append_line
from myriad.resilience.faults.inside import CAUSED, MemoryLimit
from myriad.resilience.faults.kinds import KINDS, SIGNALS, aim_of
from myriad.resilience.faults.namespaces import Namespaces
from myriad.resilience.faults.processes import Processes, is_alive
from myriad.resilience.faults.scenario import Fault
from myriad.resilience.faults.services import Services
from myriad.resilience.faults.stand_in import BROKEN, StandIn
from myriad.resilience.faults.storage import CORPUS_COPY, committed_steps, fill, flip_a_bit, flip_tokens, free
from myriad.run import Run
from myriad.telemetry.progress_page import Seen

__all__ = ["Injector", "plan_inside"]

_LOOK_SECONDS, _SUCCESSOR_SECONDS = 0.002, 0.02
_SLOW_SECONDS = 0.5, 0.4
"""A period of a slow process, and for how long of it the process is stopped."""
_RANKS_NETWORK, _TIMES = 1, 3
"""By which ranks talk; how often a link goes down that keeps doing so."""


@dataclass
class _Gap:
    """A process that is gone, and whose successor is looked for."""

    number: int
    fault: Fault
    gone: int


def plan_inside(folder: Path, faults: Sequence[Fault], group: Path | None) -> Path:
    """Writes down what ranks are to cause themselves; the value of MYRIAD_FAULTS."""
    folder.mkdir(parents=True)
    told: list[dict[str, Any]] = [
        {**fault.model_dump(), "number": number, "group": str(group)}
        for number, fault in enumerate(faults)
        if KINDS[fault.kind].inside
    ]
    path = folder / "planned.json"
    path.write_text(json.dumps(told))
    return path


class Injector(threading.Thread):
    """Of one run."""

    def __init__(
        self,
        run: Run,
        world: int,
        faults: Sequence[Fault],
        group: Path | None,
        num_nodes: int = 1,
        hosts: Namespaces | None = None,
        devices: StandIn | None = None,
        services: Services | None = None,
        beside: Sequence[Callable[[], None]] = (),
    ) -> None:
        """``hosts``: where the nodes are, if they are machines of their own; ``devices``: where faults are
        done to any; ``services``: what the scenario has beside the run; ``beside``: what is to be started
        once ranks train."""
        super().__init__(daemon=True)
        self._hosts, self._devices, self._services, self._beside = hosts, devices, services, list(beside)
        self._later: list[tuple[float, Callable[[], None]]] = []
        """What is still to be done, and when."""
        self._cut_off: dict[int, list[int]] = {}
        """Number of the fault to the ranks that its node had, and still has."""
        self._run, self._world, self._faults = run, world, faults
        self._limit = None if group is None else MemoryLimit(group)
        self._log = run.path / "faults" / CAUSED
        self._processes = Processes(run, num_nodes)
        self._waiting = {number: fault for number, fault in enumerate(faults) if not KINDS[fault.kind].inside}
        self._inside = JsonlTail(self._log)
        self._taker: int | None = None
        self._gaps: list[_Gap] = []
        self._full_until: float | None = None
        self._looked_at, self._began = 0.0, 0.0
        self._best_step = -1
        self._caused_at: dict[int, float] = {}
        """By number; on this machine's monotonic clock."""
        self._over = threading.Event()
        self._helpers: list[subprocess.Popen[bytes]] = []

    def end(self) -> None:
        """The run is over."""
        self._over.set()
        self.join()
        for helper in self._helpers:
            helper.terminate()
            helper.wait()
        if self._limit is not None:
            self._limit.set(None)
        if self._full_until is not None:
            free(self._run.checkpoints_path)

    def run(self) -> None:
        """Looks and acts until the end."""
        while not self._over.wait(_LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        rows = self._processes.rows(self._world)
        self._best_step = max([self._best_step, *(row.step for row in rows if row.pid)])
        if self._best_step > 0 and not self._began:
            self._began = time.monotonic()
            for start in self._beside:
                start()
        for number, fault in list(self._waiting.items()):
            if self._is_time(number, fault, rows) and self._cause(number, fault, rows):
                del self._waiting[number]
        self._look_after()

    def _is_time(self, number: int, fault: Fault, rows: Sequence[Seen]) -> bool:
        if not self._began:
            return False
        if fault.after_seconds is not None:
            before = self._caused_at.get(number - 1)
            if before is None or time.monotonic() - before < fault.after_seconds:
                return False
        if fault.seconds is not None and time.monotonic() - self._began < fault.seconds:
            return False
        if fault.step is not None and self._best_step < fault.step:
            return False
        watched = rows if fault.rank is None else rows[fault.rank : fault.rank + 1]
        moments = {word for row in watched if row.pid for word in (row.phase, row.activity)}
        return fault.during is None or fault.during in moments

    # What is done

    def _cause(self, number: int, fault: Fault, rows: Sequence[Seen]) -> bool:
        """False: what it is to be done to is not there yet."""
        if fault.kind == "disk-full":
            fill(self._run.checkpoints_path)
            self._full_until = time.monotonic() + fault.lasts_seconds
            self._note(number)
            return True
        if fault.kind == "damage":
            return self._damage(number) if fault.where == "checkpoint" else self._damage_corpus(number)
        if fault.kind in BROKEN:
            return self._break_device(number, fault)
        if KINDS[fault.kind].needs_hosts:
            self._unplug(number, fault)
            return True
        if fault.where == "node":
            lost = [self._processes.pid(what, node=fault.node) for what in ("keeper", "executor")]
            return self._send(number, fault, lost)
        if fault.kind == "pause":
            self._note(number)
            self._hold(self._processes.all(), fault.lasts_seconds)
            return True
        return self._send(number, fault, [self._processes.pid(fault.where, fault.rank, fault.node)])

    def _send(self, number: int, fault: Fault, pids: Sequence[int | None]) -> bool:
        if not pids or None in pids:
            return False
        self._note(number)
        for pid in pids:
            if fault.kind == "freeze":
                self._hold([pid or 0], fault.lasts_seconds if fault.where == "redis" else None)
                continue
            if fault.kind == "slow-process":
                self._slow_down(pid or 0, fault.lasts_seconds)
                continue
            with suppress(ProcessLookupError):
                os.kill(pid or 0, SIGNALS[fault.kind])
        if fault.where == "redis" and fault.kind in ("kill", "stop"):
            self._later.append((time.monotonic() + fault.lasts_seconds, partial(self._heal, pids[0] or 0)))
        if aim_of(fault.kind, fault.where).seen == "successor":
            self._gaps.append(_Gap(number, fault, pids[-1] or 0))
        return True

    def _hold(self, pids: Sequence[int], seconds: float | None) -> None:
        """Nothing of these processes runs, for so long; ``None``: until they end."""
        held = ",".join(map(str, pids))
        self._help("freeze", held, os.getpid(), *([] if seconds is None else [seconds]))

    def _slow_down(self, pid: int, seconds: float) -> None:
        helper = self._help("slow", pid, *_SLOW_SECONDS, os.getpid())
        self._later.append((time.monotonic() + seconds, helper.terminate))

    def _help(self, module: str, *arguments: object) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", f"myriad.resilience.faults.{module}", *map(str, arguments)]
        self._helpers.append(subprocess.Popen(command))
        return self._helpers[-1]

    def _heal(self, pid: int) -> None:
        """As whoever looks after Redis does."""
        if is_alive(pid):
            os.kill(pid, signal.SIGCONT)
        elif self._services is not None:
            self._services.start_redis()

    def _damage(self, number: int) -> bool:
        """The keeper goes first: it would store what is in memory when the ranks are gone."""
        steps = committed_steps(self._run.checkpoints_path)
        pids = [self._processes.pid("keeper"), self._processes.pid("rank", 0)]
        if len(steps) < 2 or None in pids:
            return False
        flip_a_bit(self._run.checkpoints_path / f"step-{steps[-1]}")
        self._note(number)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid or 0, signal.SIGKILL)
        return True

    def _damage_corpus(self, number: int) -> bool:
        """The copy that this run reads."""
        self._note(number)
        flip_tokens(self._run.path / CORPUS_COPY)
        return True

    def _break_device(self, number: int, fault: Fault) -> bool:
        place = self._processes.place(fault.rank or 0)
        if place is None or self._devices is None:
            return False
        self._note(number)
        self._devices.break_one(fault.kind, *place)
        return True

    def _unplug(self, number: int, fault: Fault) -> None:
        """Cables of a node, at the switch."""
        hosts, node = self._hosts, fault.node or 0
        assert hosts is not None, "the scenario was checked"
        whole = fault.kind == "partition"
        if whole:
            self._cut_off[number] = self._processes.ranks_on(node, self._world)
        self._note(number)
        for network in range(hosts.networks) if whole else (_RANKS_NETWORK,):
            hosts.set_link(node, up=False, network=network)
        if fault.kind in ("link-flap", "link-flapping"):
            changes = 2 * (1 if fault.kind == "link-flap" else _TIMES) - 1
            now = time.monotonic()
            for change in range(changes):
                do = partial(hosts.set_link, node, up=change % 2 == 0, network=_RANKS_NETWORK)
                self._later.append((now + (change + 1) * fault.lasts_seconds, do))

    # What follows

    def _look_after(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < _SUCCESSOR_SECONDS:
            return
        self._looked_at = now
        self._lift_limit()
        for at, do in list(self._later):
            if now >= at:
                self._later.remove((at, do))
                do()
        for number, pids in list(self._cut_off.items()):
            if not any(map(is_alive, pids)):
                del self._cut_off[number]
                append_line(self._log, {"number": number, "fenced": time.time()})
        for gap in list(self._gaps):
            pid = self._processes.pid(gap.fault.where, node=gap.fault.node)
            if pid is not None and pid != gap.gone:
                append_line(self._log, {"number": gap.number, "successor": time.time()})
                self._gaps.remove(gap)
        if self._full_until is not None and now > self._full_until:
            self._full_until = None
            free(self._run.checkpoints_path)

    def _lift_limit(self) -> None:
        """As soon as whoever took the memory is gone: others are to have it."""
        for line in self._inside.poll():
            self._taker = line.get("pid", self._taker)
        if self._taker is not None and self._limit is not None and not is_alive(self._taker):
            self._limit.set(None)
            self._taker = None

    def _note(self, number: int) -> None:
        """Before it is done: what is seen of it comes later."""
        self._caused_at[number] = time.monotonic()
        append_line(self._log, {"number": number, "time": time.time(), "step": self._best_step})
