"""Faults that a rank causes itself, since they cannot be caused from outside: a program error, a hang, memory
use, wrong numbers, slowness. Only for ``myriad faults run``.

MYRIAD_FAULTS, the path of a file that lists the faults, arms them; a rank reads it once at its start.
Without it this module is not imported. The trigger is the rank's row of the progress page, which records
every step and each of its parts: the fault comes at the first moment of the step or part, every time alike.

    MYRIAD_FAULTS = FOLDER/planned.json     [{"number": 0, "kind": "hang", "rank": 1, "step": 12, ...}]
    FOLDER/caused.jsonl                     a line for each fault, written just before it, so it comes once
"""

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from myriad.system.jsonl import JsonlTail, append_line
from myriad.telemetry.progress.operation_counters import Operation
from myriad.telemetry.progress.progress_page import ProgressRow

if TYPE_CHECKING:
    from torch import Tensor

    from myriad.parallel.chunk import Chunk

__all__ = ["ARMED", "CAUSED", "arm"]

ARMED = "MYRIAD_FAULTS"
CAUSED = "caused.jsonl"
_BATCH_KINDS = ("nan-always", "spike-always")
_IN_EVERY_ATTEMPT = ("exception", *_BATCH_KINDS)
_SPIKE_FACTOR = 1000.0
_SPARE_BYTES = 64 * 2**20
"""Memory that remains before the kernel kills the process."""


def arm(planned: str) -> None:
    """Arm the faults of this rank."""
    path, rank = Path(planned), int(os.environ["RANK"])
    log = path.with_name(CAUSED)
    done = {line["number"] for line in JsonlTail(log).poll()}
    for fault in json.loads(path.read_text()):
        if fault["rank"] != rank:
            continue
        if fault["kind"] == "slow" and fault["number"] in done:
            _slow_down(fault)  # keep the rank as slow as in earlier attempts
        elif fault["kind"] in _IN_EVERY_ATTEMPT or fault["number"] not in done:
            _arm_one(fault, log)


def _arm_one(fault: dict[str, Any], log: Path) -> None:
    """Wrap the calls at the beginning of a step and of each of its parts."""
    cause = _CAUSES[fault["kind"]]
    if fault["kind"] == "flip":
        fault["chunks"] = _record_chunks()
    state = fault["state"] = {"step": -1, "done": False}

    def check(moment: str) -> None:
        # the next step counts, too, unless the fault belongs to the batch
        past = state["step"] > fault["step"] and fault["kind"] not in _BATCH_KINDS
        due = state["step"] == fault["step"] or past
        if due and moment == (fault["during"] or "step") and not state["done"]:
            state["done"] = True
            line = {"number": fault["number"], "time": time.time(), "step": state["step"]}
            append_line(log, line | {"pid": os.getpid()})
            cause(fault)

    begin, enter = ProgressRow.step, ProgressRow.enter

    def stepping(self: ProgressRow, step: int) -> None:
        begin(self, step)
        state["step"] = step
        check("step")

    def entering(self: ProgressRow, name: str, operation: Operation | None, now_ns: int) -> bytes:
        check(name)
        return enter(self, name, operation, now_ns)

    ProgressRow.step = stepping  # type: ignore[method-assign]
    ProgressRow.enter = entering  # type: ignore[method-assign]


def _raise(fault: dict[str, Any]) -> NoReturn:
    raise RuntimeError("caused on purpose by `myriad faults run`")


def _hang(fault: dict[str, Any]) -> NoReturn:
    while True:
        time.sleep(60)


def _record_chunks() -> "list[Chunk]":
    """Return a list that will receive the chunks with this rank's parameters."""
    from myriad.parallel.chunk import Chunk

    make, kept = Chunk.__init__, list[Chunk]()

    def making(self: Chunk, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        kept.append(self)

    Chunk.__init__ = making  # type: ignore[method-assign]
    return kept


def _flip(fault: dict[str, Any]) -> None:
    """Flip the highest bit of a parameter's fraction: a wrong but finite value."""
    import torch

    values = fault["chunks"][0].values
    words = values.view(torch.int32 if values.element_size() == 4 else torch.int16)
    words[len(words) // 2] ^= 1 << (22 if values.element_size() == 4 else 6)


def _poison(fault: dict[str, Any]) -> None:
    """Write NaN into the gradients that this rank sends next."""
    _corrupt_gradients(lambda buffer: buffer[:1].fill_(math.nan), lambda: False)


def _spike(fault: dict[str, Any]) -> None:
    """Scale all gradients that this rank sends next: once, or whenever the rank computes the step."""
    state, stays = fault["state"], fault["kind"] in _BATCH_KINDS
    _corrupt_gradients(
        lambda buffer: buffer.mul_(_SPIKE_FACTOR), lambda: stays and state["step"] == fault["step"]
    )


def _corrupt_gradients(spoil: "Callable[[Tensor], object]", again: Callable[[], bool]) -> None:
    """Corrupt the next chunk that is sent, and others as long as ``again`` returns true."""
    from myriad.parallel.chunk import Chunk

    reduce, done = Chunk.start_reduce, False

    def reducing(self: Chunk) -> None:
        nonlocal done
        if done and not again():
            Chunk.start_reduce = reduce  # type: ignore[method-assign]
        else:
            done = True
            self.start_gradients()
            spoil(self.grad_buffer)
        reduce(self)

    Chunk.start_reduce = reducing  # type: ignore[method-assign]


def _slow_down(fault: dict[str, Any]) -> None:
    """Slow down each forward and backward to ``factor`` times its time. The thread sleeps in proportion to
    its processor time, so that waits inside the work do not get longer."""
    from myriad.parallel import compute
    from myriad.parallel.compute import EagerCompute

    def slowed(work: Callable[..., Any]) -> Callable[..., Any]:
        def compute_slowly(*arguments: Any, **keys: Any) -> Any:
            began = time.thread_time()
            result = work(*arguments, **keys)
            time.sleep((fault["factor"] - 1) * (time.thread_time() - began))
            return result

        return compute_slowly

    for owner, name in (
        (EagerCompute, "forward"),
        (EagerCompute, "differentiate"),
        (compute, "apply_deferred"),
    ):
        setattr(owner, name, slowed(getattr(owner, name)))


def _fill_memory(fault: dict[str, Any]) -> NoReturn:
    """Take memory until the kernel kills this process, which has taken the most."""
    group = MemoryLimit(Path(fault["group"]))
    group.set(group.used() + _SPARE_BYTES)
    taken = []
    while True:
        taken.append(bytearray(os.urandom(4096)) * 1024)


_CAUSES: dict[str, Callable[[dict[str, Any]], None]] = {
    "exception": _raise,
    "hang": _hang,
    "host-memory": _fill_memory,
    "flip": _flip,
    "nan-once": _poison,
    "nan-always": _poison,
    "spike": _spike,
    # in no scenario: without an undisturbed run that skips the batch, there is nothing to compare with
    "spike-always": _spike,
    "slow": _slow_down,
}


class MemoryLimit:
    """Memory limit of a control group, of either version."""

    def __init__(self, group: Path) -> None:
        v2 = (group / "memory.max").exists()
        self._limit = group / ("memory.max" if v2 else "memory.limit_in_bytes")
        self._used = group / ("memory.current" if v2 else "memory.usage_in_bytes")
        self._none = "max" if v2 else "-1"

    def used(self) -> int:
        """Return the bytes in use."""
        return int(self._used.read_text())

    def set(self, num_bytes: int | None) -> None:
        """Set the limit; ``None`` removes it."""
        self._limit.write_text(self._none if num_bytes is None else str(num_bytes))
