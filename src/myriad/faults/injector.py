"""Cause the faults of a scenario from outside, each at its time, and record the successors of lost processes.

The injector is a thread of the `myriad train` process. Like the node agent, it reads the progress page of the
node, and sends nothing to ranks. Faults that only a rank itself can cause are armed before (`rank_faults`);
the injector only cleans up after them. RUN/faults/caused.jsonl has a line for each fault and each successor.
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

from myriad.faults.fault_kinds import KINDS, SIGNALS, recovery_target
from myriad.faults.namespaces import Namespaces
from myriad.faults.rank_faults import CAUSED, MemoryLimit
from myriad.faults.run_processes import RunProcesses, is_alive
from myriad.faults.scenario import Fault
from myriad.faults.services import Services
from myriad.faults.simulated_devices import DEVICE_FAULTS, SimulatedDevices
from myriad.faults.storage_faults import CORPUS_COPY, committed_steps, fill, flip_a_bit, flip_tokens, free
from myriad.run import Run
from myriad.system.jsonl import JsonlTail, append_line
from myriad.telemetry.progress.progress_page import RowStatus

__all__ = ["Injector", "plan_rank_faults"]

_POLL_SECONDS, _SUCCESSOR_SECONDS = 0.002, 0.02
_SLOW_SECONDS = 0.5, 0.4
"""Period of a slow process in seconds, and the part of it in which the process is stopped."""
_RANKS_NETWORK, _TIMES = 1, 3
"""Index of the network between ranks; number of times that a flapping link goes down."""


@dataclass
class _Gap:
    """A lost process that has no successor yet."""

    number: int
    fault: Fault
    gone: int


def plan_rank_faults(folder: Path, faults: Sequence[Fault], group: Path | None) -> Path:
    """Write the faults that ranks cause themselves to a file; return its path, the value of MYRIAD_FAULTS."""
    folder.mkdir(parents=True)
    planned: list[dict[str, Any]] = [
        {**fault.model_dump(), "number": number, "group": str(group)}
        for number, fault in enumerate(faults)
        if KINDS[fault.kind].inside
    ]
    path = folder / "planned.json"
    path.write_text(json.dumps(planned))
    return path


class Injector(threading.Thread):
    """Causes the faults of one run."""

    def __init__(
        self,
        run: Run,
        world: int,
        faults: Sequence[Fault],
        group: Path | None,
        num_nodes: int = 1,
        hosts: Namespaces | None = None,
        devices: SimulatedDevices | None = None,
        services: Services | None = None,
        companions: Sequence[Callable[[], None]] = (),
    ) -> None:
        """``hosts``: namespaces of the nodes, if they have their own. ``devices``: simulated devices, if
        devices have faults. ``services``: services beside the run. ``companions``: called once ranks
        train."""
        super().__init__(daemon=True)
        self._hosts, self._devices, self._services, self._companions = (
            hosts,
            devices,
            services,
            list(companions),
        )
        self._later: list[tuple[float, Callable[[], None]]] = []
        """Pending actions, with their times."""
        self._cut_off: dict[int, list[int]] = {}
        """Living ranks on the node that a fault has cut off, by number of the fault."""
        self._run, self._world, self._faults = run, world, faults
        self._limit = None if group is None else MemoryLimit(group)
        self._log = run.path / "faults" / CAUSED
        self._processes = RunProcesses(run, num_nodes)
        self._waiting = {number: fault for number, fault in enumerate(faults) if not KINDS[fault.kind].inside}
        self._inside = JsonlTail(self._log)
        self._memory_taker: int | None = None
        self._gaps: list[_Gap] = []
        self._full_until: float | None = None
        self._polled_at, self._began = 0.0, 0.0
        self._best_step = -1
        self._caused_at: dict[int, float] = {}
        """Time at which each fault was caused, by number, on this machine's monotonic clock."""
        self._is_over = threading.Event()
        self._helpers: list[subprocess.Popen[bytes]] = []

    def end(self) -> None:
        """End the injector, because the run is over."""
        self._is_over.set()
        self.join()
        for helper in self._helpers:
            helper.terminate()
            helper.wait()
        if self._limit is not None:
            self._limit.set(None)
        if self._full_until is not None:
            free(self._run.checkpoints_path)

    def run(self) -> None:
        """Cause faults and look at their effects until the end."""
        while not self._is_over.wait(_POLL_SECONDS):
            self._poll()

    def _poll(self) -> None:
        rows = self._processes.rows(self._world)
        self._best_step = max([self._best_step, *(row.step for row in rows if row.pid)])
        if self._best_step > 0 and not self._began:
            self._began = time.monotonic()
            for start in self._companions:
                start()
        for number, fault in list(self._waiting.items()):
            if self._is_time(number, fault, rows) and self._cause(number, fault, rows):
                del self._waiting[number]
        self._follow_up()

    def _is_time(self, number: int, fault: Fault, rows: Sequence[RowStatus]) -> bool:
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

    # Causing faults

    def _cause(self, number: int, fault: Fault, rows: Sequence[RowStatus]) -> bool:
        """Cause a fault; return false if its target does not exist yet."""
        if fault.kind == "disk-full":
            fill(self._run.checkpoints_path)
            self._full_until = time.monotonic() + fault.lasts_seconds
            self._record(number)
            return True
        if fault.kind == "damage":
            return self._damage(number) if fault.where == "checkpoint" else self._damage_corpus(number)
        if fault.kind in DEVICE_FAULTS:
            return self._break_device(number, fault)
        if KINDS[fault.kind].needs_hosts:
            self._take_links_down(number, fault)
            return True
        if fault.where == "node":
            lost = [self._processes.pid(what, node=fault.node) for what in ("keeper", "executor")]
            return self._send(number, fault, lost)
        if fault.kind == "pause":
            self._record(number)
            self._hold(self._processes.all(), fault.lasts_seconds)
            return True
        return self._send(number, fault, [self._processes.pid(fault.where, fault.rank, fault.node)])

    def _send(self, number: int, fault: Fault, pids: Sequence[int | None]) -> bool:
        if not pids or None in pids:
            return False
        self._record(number)
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
            self._later.append(
                (time.monotonic() + fault.lasts_seconds, partial(self._restore_redis, pids[0] or 0))
            )
        if recovery_target(fault.kind, fault.where).seen == "successor":
            self._gaps.append(_Gap(number, fault, pids[-1] or 0))
        return True

    def _hold(self, pids: Sequence[int], seconds: float | None) -> None:
        """Hold the processes for ``seconds``; ``None``: until they end."""
        held = ",".join(map(str, pids))
        self._start_helper("freeze", held, os.getpid(), *([] if seconds is None else [seconds]))

    def _slow_down(self, pid: int, seconds: float) -> None:
        helper = self._start_helper("slow_process", pid, *_SLOW_SECONDS, os.getpid())
        self._later.append((time.monotonic() + seconds, helper.terminate))

    def _start_helper(self, module: str, *arguments: object) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-Pm", f"myriad.faults.{module}", *map(str, arguments)]
        self._helpers.append(subprocess.Popen(command))
        return self._helpers[-1]

    def _restore_redis(self, pid: int) -> None:
        """Resume or restart Redis, as a service manager does."""
        if is_alive(pid):
            os.kill(pid, signal.SIGCONT)
        elif self._services is not None:
            self._services.start_redis()

    def _damage(self, number: int) -> bool:
        """Damage the newest checkpoint, then kill the snapshot server and a rank. The server is killed first,
        because otherwise it would store its memory when the ranks are gone."""
        steps = committed_steps(self._run.checkpoints_path)
        pids = [self._processes.pid("keeper"), self._processes.pid("rank", 0)]
        if len(steps) < 2 or None in pids:
            return False
        flip_a_bit(self._run.checkpoints_path / f"step-{steps[-1]}")
        self._record(number)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid or 0, signal.SIGKILL)
        return True

    def _damage_corpus(self, number: int) -> bool:
        """Damage the copy of the corpus that this run reads."""
        self._record(number)
        flip_tokens(self._run.path / CORPUS_COPY)
        return True

    def _break_device(self, number: int, fault: Fault) -> bool:
        place = self._processes.place(fault.rank or 0)
        if place is None or self._devices is None:
            return False
        self._record(number)
        self._devices.inject(fault.kind, *place)
        return True

    def _take_links_down(self, number: int, fault: Fault) -> None:
        """Take links of a node down, at the switch."""
        hosts, node = self._hosts, fault.node or 0
        assert hosts is not None, "the scenario was checked"
        whole = fault.kind == "partition"
        if whole:
            self._cut_off[number] = self._processes.ranks_on(node, self._world)
        self._record(number)
        for network in range(hosts.networks) if whole else (_RANKS_NETWORK,):
            hosts.set_link(node, up=False, network=network)
        if fault.kind in ("link-flap", "link-flapping"):
            changes = 2 * (1 if fault.kind == "link-flap" else _TIMES) - 1
            now = time.monotonic()
            for change in range(changes):
                do = partial(hosts.set_link, node, up=change % 2 == 0, network=_RANKS_NETWORK)
                self._later.append((now + (change + 1) * fault.lasts_seconds, do))

    # Effects of faults

    def _follow_up(self) -> None:
        now = time.monotonic()
        if now - self._polled_at < _SUCCESSOR_SECONDS:
            return
        self._polled_at = now
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
        """Lift the memory limit for the other ranks as soon as the process that took the memory is gone."""
        for line in self._inside.poll():
            self._memory_taker = line.get("pid", self._memory_taker)
        if self._memory_taker is not None and self._limit is not None and not is_alive(self._memory_taker):
            self._limit.set(None)
            self._memory_taker = None

    def _record(self, number: int) -> None:
        """Record a fault just before it is caused, so that its effects come later."""
        self._caused_at[number] = time.monotonic()
        append_line(self._log, {"number": number, "time": time.time(), "step": self._best_step})
