"""One rank of `checkpoint.py`: trains and saves, loads, trains with a full disk, comes back after a kill.

    step      products ... | agree | before_update | update | save every so often
    a cycle   save, steps until every rank is durable (one at least), quiet steps

"agree" is an all-reduce of one number, as training has its gradients'. A step's own time is that of its
products and its update: what saving costs there is slowdown. What `save` and `before_update` take is stall.
What a save costs in all is the time from its call until all are durable, less that many quiet steps.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from checkpoint_state import Contender, Place, State, digest, make_state, update
from checkpoint_storage import drop_caches, remove, size_of

__all__ = ["Loaded", "Plan", "Trained", "load", "train", "train_on_full", "write_alone"]

Make = Callable[[Place], Contender]
_SIDE = 384
_CALIBRATIONS = 20
_STEPS_ON_FULL = 20
_OBJECTS = 4
_NOTHING = "no error: it is said to be durable"


@dataclass(frozen=True)
class Plan:
    """How a rank trains."""

    megabytes: float
    sharing: str
    saves: int
    """Measured ones; one more goes before."""
    step_seconds: float
    quiet_steps: int


@dataclass
class Trained:
    """What one rank saw."""

    stalls: list[float] = field(default_factory=list)
    """Seconds; the first is that of the save before the measured ones."""
    durable: list[float] = field(default_factory=list)
    busy_steps: list[float] = field(default_factory=list)
    quiet_steps: list[float] = field(default_factory=list)
    cycles: list[tuple[float, int]] = field(default_factory=list)
    """Seconds from each save's call until all were durable, and the steps made in them."""
    quiet_walls: list[float] = field(default_factory=list)
    full_bytes: int = 0
    written_bytes: int = 0
    last_step: int = 0
    last_digest: str = ""


class Trainer:
    """The training process of one rank."""

    def __init__(self, contender: Contender, state: State, plan: Plan) -> None:
        self.contender, self.state, self.step = contender, state, 0
        self.all_done = False
        self._factor, self._product = torch.rand(_SIDE, _SIDE), torch.empty(_SIDE, _SIDE)
        self._num_products = self._calibrate(plan.step_seconds)

    def _calibrate(self, seconds: float) -> int:
        """Products that take about ``seconds``, while all ranks compute: as many twice in a row, since what
        a contender does when it starts (memory is touched, processes begin) slows the first ones down."""
        found = [self._count_products(seconds)]
        while len(found) < _CALIBRATIONS:
            found.append(self._count_products(seconds))
            if abs(found[-1] / found[-2] - 1) < 0.05:
                break
        return max(1, int(found[-1]))

    def _count_products(self, seconds: float) -> float:
        dist.barrier()
        start, count = time.monotonic(), 0
        while time.monotonic() - start < min(0.5, seconds):
            torch.mm(self._factor, self._factor, out=self._product)
            count += 1
        mean = torch.tensor(count * seconds / min(0.5, seconds))
        dist.all_reduce(mean)
        return float(mean.item()) / dist.get_world_size()

    def run_step(self, done: bool) -> tuple[float, float]:
        """Seconds of its own and of stall; afterwards `all_done` is whether every rank said ``done``."""
        start = time.monotonic()
        for _ in range(self._num_products):
            torch.mm(self._factor, self._factor, out=self._product)
        own = time.monotonic() - start
        self.all_done = agree(done)
        start = time.monotonic()
        self.contender.before_update()
        updating = time.monotonic()
        update(self.state)
        self.step += 1
        return own + time.monotonic() - updating, updating - start

    def cycle(self, seen: Trained) -> None:
        """A save and the steps until all are durable."""
        dist.barrier()
        start = time.monotonic()
        self.contender.save(self.step)
        stall, steps, self.all_done = time.monotonic() - start, 0, False
        while not self.all_done:
            own, stalled = self.run_step(self.contender.is_durable())
            stall, steps = stall + stalled, steps + 1
            seen.busy_steps.append(own)
        seen.cycles.append((time.monotonic() - start, steps))
        seen.stalls.append(stall)
        seen.durable.append(self.contender.wait_durable() - start)

    def rest(self, seen: Trained, num_steps: int) -> None:
        """Steps with no save under way."""
        for _ in range(num_steps):
            start = time.monotonic()
            own, _ = self.run_step(True)
            seen.quiet_steps.append(own)
            seen.quiet_walls.append(time.monotonic() - start)


def agree(done: bool) -> bool:
    """Whether every rank says so."""
    flag = torch.tensor(float(done))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def train(make: Make, plan: Plan, place: Place) -> Trained:
    """All of one contender's saves on this rank; the last checkpoint stays."""
    seen = Trained()
    state = make_state(plan.megabytes, plan.sharing, place)
    contender = make(place)
    contender.setup(state)
    trainer = Trainer(contender, state, plan)
    trainer.rest(Trained(), 2)
    for number in range(plan.saves + 1):
        if number == 1:
            seen.busy_steps.clear()
        trainer.rest(seen, plan.quiet_steps)
        if number == plan.saves:
            seen.last_digest = digest(state)
        earlier, seen.last_step = seen.last_step, trainer.step
        trainer.cycle(seen)
        if place.rank == 0:
            seen.written_bytes = size_of(place.of_step(seen.last_step))
            remove(place.of_step(earlier))
    seen.full_bytes = state.full_bytes
    contender.close()
    dist.barrier()
    return seen


@dataclass(frozen=True)
class Loaded:
    """What one rank loaded."""

    cold_seconds: float | None
    """None where caches cannot be dropped."""
    warm_seconds: float
    digest: str


def load(make: Make, plan: Plan, step: int, place: Place) -> Loaded:
    """Into a state of zeros, in a process that never saw the values."""
    contender, cold = make(place), None
    contender.load(make_state(plan.megabytes, plan.sharing, place, empty=True), step)  # imports as it goes
    state = make_state(plan.megabytes, plan.sharing, place, empty=True)
    if "://" not in place.root and os.geteuid() == 0:
        dist.barrier()
        if place.rank == 0:
            drop_caches()
        cold = _seconds(partial(contender.load, state, step))
        state = make_state(plan.megabytes, plan.sharing, place, empty=True)
    warm = _seconds(partial(contender.load, state, step))
    return Loaded(cold, warm, digest(state))


def _seconds(action: Callable[[], Any]) -> float:
    dist.barrier()
    start = time.monotonic()
    action()
    return time.monotonic() - start


def write_alone(plan: Plan, place: Place) -> float:
    """Seconds that this rank's share of the bytes takes with nothing else to do, made durable."""
    state = make_state(plan.megabytes, plan.sharing, place)
    share = state.full_bytes // place.world
    path = f"{place.root}/alone/{place.rank}"
    seconds = [_seconds(partial(_write, state, share, path)) for _ in range(2)]
    dist.barrier()
    if place.rank == 0:
        remove(f"{place.root}/alone")
    return min(seconds)


def _write(state: State, num_bytes: int, path: str) -> None:
    """The first so many bytes, as one file or several objects at a time."""
    pieces: list[list[memoryview]] = [[] for _ in range(_OBJECTS if "://" in path else 1)]
    for number, tensor in enumerate(state.tensors.values()):
        piece = tensor.view(-1).numpy().view("uint8")[:num_bytes]
        pieces[number % len(pieces)].append(piece.data)
        num_bytes -= len(piece)
    with ThreadPoolExecutor(len(pieces)) as pool:
        list(pool.map(_write_one, (f"{path}-{number}" for number in range(len(pieces))), pieces))


def _write_one(path: str, pieces: Sequence[memoryview]) -> None:
    import fsspec  # starts threads: only in ranks

    with fsspec.open(path, "wb", **({} if "://" in path else {"auto_mkdir": True})) as stream:
        for piece in pieces:
            stream.write(piece)
        if "://" not in path:
            stream.flush()
            os.fsync(stream.fileno())


def train_on_full(make: Make, plan: Plan, room: Callable[[], None], place: Place) -> dict[str, Any]:
    """A save that does not fit, the steps after it, then ``room`` is made and the next save tried."""
    state = make_state(plan.megabytes, plan.sharing, place)
    contender = make(place)
    contender.setup(state)
    trainer = Trainer(contender, state, plan)
    trainer.rest(Trained(), 1)
    told, steps = _attempt(contender, trainer)
    dist.barrier()
    if place.rank == 0:
        room()
    dist.barrier()
    step, expected = trainer.step, digest(state)
    again, _ = _attempt(contender, trainer)
    return {"told": told, "steps": steps, "again": again, "step": step, "digest": expected}


def _attempt(contender: Contender, trainer: Trainer) -> tuple[str, int]:
    """What training was told first, and the steps it made meanwhile."""
    told: list[str] = []
    _note(told, "save", partial(contender.save, trainer.step))
    first = trainer.step
    for _ in range(_STEPS_ON_FULL):
        _note(told, "before_update", lambda: trainer.run_step(bool(told) or contender.is_durable()))
        if trainer.all_done:
            break
    if not told:
        _note(told, "wait_durable", contender.wait_durable)
    return (told or [_NOTHING])[0], trainer.step - first


def _note(told: list[str], where: str, action: Callable[[], Any]) -> None:
    try:
        action()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # DCP's CheckpointException is no Exception
        told.append(_story(where, error))


def _story(where: str, error: BaseException) -> str:
    failures = getattr(error, "failures", None)  # of DCP's CheckpointException, by rank
    cause = next(iter(failures.values()))[0] if failures else error
    kind = type(error).__name__ + ("" if isinstance(error, Exception) else " (no Exception, a BaseException)")
    return f"{where} raised {kind}: {(str(cause).strip() or type(cause).__name__).splitlines()[-1]}"
