"""Active checks of ranks during training, in gaps of the program, for at most a thousandth of the time.

    step N         by rank 0's clock a gap comes (checkpoint, validation, or hours have passed), and there is
                   time for a check: its signal says so, and all ranks receive it with the sum of step N
    after step N   all ranks together: the next checks in turn, as many as there is time for; collectives use
                   the connections of the training
    bubbles        a pipeline on CPUs: products and memory are checked while the rank waits for a tensor whose
                   last wait was twice as long as the check takes; a check that finds no bubble before its
                   next turn runs in that gap

Values are whole numbers whose products and sums are exact in any order. Every result is known beforehand, so
no baseline is needed, and one wrong bit shows. The checks read and write nothing of the training (own
tensors, no random numbers), so losses stay the same bits. No check runs in the first steps of an attempt,
after the last step, or when ranks are to end, so no recovery waits for a check.

A failed check is shown on the rank's row of the progress page (`TRAINING_CHECKS`). The node agent reports it
like any other device fault; a rank that computes wrong bits is a reason to replace its node with a spare.

**The bound.** The limit is `RATIO` of the time since the attempt's first step. A check begins only if the sum
of two costs is below it. One is the cost of all checks of this attempt, waits for other ranks included. The
other is twice the largest cost of this check in its last three turns. A check that takes longer than expected
delays the next one.
"""

import time
from collections import deque
from collections.abc import Callable, Hashable

import torch
import torch.distributed as dist

from myriad.comm.collectives import all_reduce, start_all_to_all
from myriad.comm.groups import Group, Groups
from myriad.job import Job
from myriad.telemetry.progress.progress_page import TRAINING_CHECKS, ProgressRow
from myriad.telemetry.spans import Recorder

__all__ = ["RATIO", "TrainingChecks"]

RATIO = 1e-3
"""Largest share of the training time for checks."""
_FIRST_SECONDS = 0.01
"""Expected seconds of a check before its first run."""
_MARGIN = 2.0
"""Factor on a check's expected cost, because other work on the machine makes it slow."""
_LEAST_STEPS = 3
"""Steps of an attempt before its first check, so that recovery does not wait for one."""
_PRODUCT, _MEMORY_BYTES, _COLLECTIVE_BYTES = 256, 2**20, 2**16
_ODD = 0x1E3779B97F4A7C15
"""An odd multiplier: the products with a count set and clear every bit."""
_MOST_EXCHANGING = 8
"""Largest world for the all-to-all check; on gloo its ranks are connected anyway."""
_BUBBLE_RATIO = 0.5
"""Largest share of an earlier wait for the same tensor that a check in a bubble may take."""

_Check = Callable[[], bool]


class TrainingChecks:
    """The active checks of one rank."""

    def __init__(
        self,
        job: Job,
        groups: Groups,
        device: torch.device,
        row: ProgressRow,
        recorder: Recorder,
        event: Callable[..., None],
    ) -> None:
        """``event`` writes an event of the run; it is called on every rank."""
        self._hours, self._device = job.resilience.check_hours, device
        self._train, self._checkpoint = job.train, job.checkpoint
        self._groups, self._row, self._recorder, self._event = groups, row, recorder, event
        self._began: float | None = None
        """Time at which the first step of this attempt ended."""
        self._last = 0.0
        self._steps, self._turn, self._spent, self._hidden = 0, 0, 0.0, 0.0
        local: dict[str, _Check] = {"product": self._product, "memory": self._memory}
        if device.type == "cuda":
            local["copy"] = self._copy
        self._local = local
        self._alone = job.comm.sync_every > 1  # replicas synchronize only every few steps
        exchange = {} if self._exchange_group() is None else {"all-to-all": self._all_to_all}
        together: dict[str, _Check] = {} if self._alone else {"all-reduce": self._all_reduce, **exchange}
        self._checks = local | together
        self._costs = {name: deque([_FIRST_SECONDS], maxlen=3) for name in self._checks}
        self.uses_bubbles = self._hours is not None and job.layout.pp > 1 and device.type == "cpu"
        """Whether `wait` must be called where the rank waits for a tensor of the pipeline."""
        self._pending: list[str] = []
        """Checks that wait for a bubble."""
        self._waits: dict[Hashable, float] = {}
        self._failed = set[str]()

    def is_due(self, step: int, *, save_due: bool) -> bool:
        """Return whether checks follow ``step``, by this rank's clock. Only rank 0 calls it. ``save_due``:
        whether a time-based checkpoint follows."""
        if self._hours is None or self._began is None or self._steps < _LEAST_STEPS:
            return False
        if step >= self._train.steps:
            return False
        periods = (self._train.validate_every, self._checkpoint.every)
        gap = save_due or any(period and step % period == 0 for period in periods)
        late = self._hours > 0 and time.monotonic() - self._last >= 3600 * self._hours
        return (gap or late) and self._fitting() > 0

    def _fitting(self) -> int:
        """Return how many of the next checks there is time for."""
        left = RATIO * (time.monotonic() - (self._began or 0.0)) - self._spent
        for count, name in enumerate(self._next(len(self._checks))):
            left -= _MARGIN * max(self._costs[name])
            if left < 0:
                return count
        return len(self._checks)

    def _next(self, count: int) -> list[str]:
        names = list(self._checks)
        return [names[(self._turn + place) % len(names)] for place in range(count)]

    def after_step(self, step: int, *, due: bool) -> None:
        """Run the checks if ``due``. Every rank calls this at the end of each step, with the same ``due``."""
        if self._began is None:
            self._began = self._last = time.monotonic()
        self._steps += 1
        if not due or self._hours is None:
            return
        began = time.monotonic()
        with self._recorder.span("check"):
            names = self._next(self._agreed_count())
            for name in names:
                self._take_turn(name)
        self._last = time.monotonic()
        self._spent += self._last - began
        self._show()
        self._event(
            "check",
            step=step,
            seconds=self._last - began,
            hidden_seconds=self._hidden,
            ratio=self._spent / max(1e-9, self._last - self._began),
            checks=names,
            **({"failed": sorted(self._failed)} if self._failed else {}),
        )
        self._hidden = 0.0

    def _agreed_count(self) -> int:
        """Return the number of checks that rank 0 has time for, at least one."""
        if self._alone:
            return 1
        own = float(max(1, self._fitting())) if self._rank() == 0 else 0.0
        return int(all_reduce(torch.tensor([own], device=self._device), self._groups.world))

    def _take_turn(self, name: str) -> None:
        """Run a check now, or postpone it to the next bubbles."""
        self._turn += 1
        is_known = len(self._costs[name]) > 1 or self._costs[name][0] != _FIRST_SECONDS
        if self.uses_bubbles and name in self._local and is_known and name not in self._pending:
            self._pending.append(name)
            return
        if name in self._pending:
            self._pending.remove(name)
        self._costs[name].append(self._run(name))

    def _run(self, name: str) -> float:
        """Run a check, and return its seconds."""
        began = time.perf_counter()
        if not self._checks[name]():
            self._failed.add(name)
        return time.perf_counter() - began

    def _show(self) -> None:
        failed = sum(1 << TRAINING_CHECKS.index(name) for name in self._failed)
        self._row.checked(failed, self._turn, int(1e9 * self._spent))

    # Bubbles

    def wait(self, key: Hashable, wait: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Wait for a tensor of the pipeline, and run a check meanwhile if earlier waits for the tensor were
        long enough.

        The part of a check that exceeds the wait counts as its cost.
        """
        began, took = time.perf_counter(), 0.0
        if self._pending and max(self._costs[self._pending[0]]) < _BUBBLE_RATIO * self._waits.get(key, 0.0):
            took = self._run(self._pending.pop(0))
            self._show()
        result = wait()
        waited = time.perf_counter() - began
        if not took:
            self._waits[key] = waited
            return result
        hidden = min(took, waited - took)  # if no wait remained, the check may have delayed the rank
        self._hidden += hidden
        self._spent += took - hidden
        return result

    # Checks: each returns whether the result is right

    def _product(self) -> bool:
        """Multiply small whole numbers, and compare with the product by a vector in float64 (Freivalds'
        check).

        Each sum is below 2^24, so that it is exact in float32 in any order.
        """
        n = _PRODUCT
        i = torch.arange(n, device=self._device)
        a = ((i[:, None] * 3 + i[None, :] * 5 + self._turn) % 15 - 7).float()
        b = ((i[:, None] * 7 + i[None, :] * 2 + self._turn) % 13 - 6).float()
        v = (i % 5 + 1).double()  # no zeros: each wrong value shows
        return bool(((a @ b).double() @ v == a.double() @ (b.double() @ v)).all())

    def _memory(self) -> bool:
        """Write a pattern and its complement to newly allocated memory."""
        right = torch.arange(_MEMORY_BYTES // 8, dtype=torch.int64, device=self._device)
        words = right * _ODD
        words.bitwise_not_()
        return bool((~words == right * _ODD).all())

    def _copy(self) -> bool:
        """Copy known values to the device and back, through pinned memory."""
        host = torch.arange(_MEMORY_BYTES // 8, dtype=torch.int64).pin_memory()
        back = torch.empty_like(host, pin_memory=True)
        back.copy_(host.to(self._device, non_blocking=True), non_blocking=True)
        torch.cuda.synchronize(self._device)
        return bool((back == host).all())

    def _all_reduce(self) -> bool:
        group = self._groups.world
        world = 1 if group is None else dist.get_world_size(group)
        x = torch.full((_COLLECTIVE_BYTES // 4,), float(self._rank() % 64 + 1), device=self._device)
        expected = sum(rank % 64 + 1 for rank in range(world))
        return bool((all_reduce(x, group) == expected).all())

    def _all_to_all(self) -> bool:
        group = self._exchange_group()
        assert group is not None, "asked before"
        size, mine = dist.get_world_size(group), dist.get_rank(group)
        piece = _COLLECTIVE_BYTES // 4 // size
        x = torch.full((piece * size,), float(mine), device=self._device)
        out = torch.empty_like(x)
        start_all_to_all(out, x, group).wait()
        return bool((out.view(size, piece) == torch.arange(size, device=self._device)[:, None]).all())

    def _exchange_group(self) -> Group | None:
        """Return the group of all ranks if they are few and on CPUs, else ``None``. NCCL would open
        connections that the training does not need."""
        world = self._groups.world
        if world is None or self._device.type != "cpu" or dist.get_world_size(world) > _MOST_EXCHANGING:
            return None
        return world

    def _rank(self) -> int:
        return 0 if self._groups.world is None else dist.get_rank(self._groups.world)
