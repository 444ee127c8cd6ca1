"""Faults that a rank causes itself, because nobody outside could: an error of its program, a hang, memory
that it takes, wrong numbers, slowness. For ``myriad faults run`` alone.

It is armed by MYRIAD_FAULTS, the path of a file that lists them, read once at the start of a rank; without
that this module is not even imported. Then the rank's row of the progress page, which hears of every step
and every part of it, is what triggers: at the first moment of the step, or of a part of it, every time alike.

    MYRIAD_FAULTS = FOLDER/planned.json     [{"number": 0, "kind": "hang", "rank": 1, "step": 12, ...}]
    FOLDER/caused.jsonl                     a line for what was caused, before it was: it comes once
"""

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from myriad.jsonl import JsonlTail, append_line
from myriad.telemetry.progress_page import ProgressRow

if TYPE_CHECKING:
    from torch import Tensor

    from myriad.parallel.chunk import Chunk

__all__ = ["ARMED", "CAUSED", "arm"]

ARMED = "MYRIAD_FAULTS"
CAUSED = "caused.jsonl"
_OF_THE_BATCH = ("nan-always", "spike-always")
_IN_EVERY_ATTEMPT = ("exception", *_OF_THE_BATCH)
_SPIKE_FACTOR = 1000.0
_SPARE_BYTES = 64 * 2**20
"""Of memory that is left to take before the kernel kills."""


def arm(planned: str) -> None:
    """This rank causes what it is to cause."""
    path, rank = Path(planned), int(os.environ["RANK"])
    log = path.with_name(CAUSED)
    done = {line["number"] for line in JsonlTail(log).poll()}
    for fault in json.loads(path.read_text()):
        if fault["rank"] != rank:
            continue
        if fault["kind"] == "slow" and fault["number"] in done:
            _slow_down(fault)  # as slow as in the attempts before
        elif fault["kind"] in _IN_EVERY_ATTEMPT or fault["number"] not in done:
            _arm_one(fault, log)


def _arm_one(fault: dict[str, Any], log: Path) -> None:
    """Wraps what the rank calls at the beginning of a step and of each of its parts."""
    cause = _CAUSES[fault["kind"]]
    if fault["kind"] == "flip":
        fault["chunks"] = _coming_chunks()
    state = fault["state"] = {"step": -1, "done": False}

    def look(moment: str) -> None:
        past = state["step"] > fault["step"] and fault["kind"] not in _OF_THE_BATCH  # which come with it
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
        look("step")

    def entering(self: ProgressRow, name: str, communicates: bool, now_ns: int) -> bytes:
        look(name)
        return enter(self, name, communicates, now_ns)

    ProgressRow.step = stepping  # type: ignore[method-assign]
    ProgressRow.enter = entering  # type: ignore[method-assign]


def _raise(fault: dict[str, Any]) -> NoReturn:
    raise RuntimeError("caused on purpose by `myriad faults run`")


def _hang(fault: dict[str, Any]) -> NoReturn:
    while True:
        time.sleep(60)


def _coming_chunks() -> "list[Chunk]":
    """Will hold the parameters of this rank."""
    from myriad.parallel.chunk import Chunk

    make, kept = Chunk.__init__, list[Chunk]()

    def making(self: Chunk, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        kept.append(self)

    Chunk.__init__ = making  # type: ignore[method-assign]
    return kept


def _flip(fault: dict[str, Any]) -> None:
    """The highest bit of a parameter's fraction: wrong, and no less a number than before."""
    import torch

    values = fault["chunks"][0].values
    words = values.view(torch.int32 if values.element_size() == 4 else torch.int16)
    words[len(words) // 2] ^= 1 << (22 if values.element_size() == 4 else 6)


def _poison(fault: dict[str, Any]) -> None:
    """A number of the gradients that this rank is about to send."""
    _spoil_gradients(lambda sums: sums[:1].fill_(math.nan), lambda: False)


def _spike(fault: dict[str, Any]) -> None:
    """All gradients that this rank is about to send: once, or whenever it computes the step."""
    state, stays = fault["state"], fault["kind"] in _OF_THE_BATCH
    _spoil_gradients(lambda sums: sums.mul_(_SPIKE_FACTOR), lambda: stays and state["step"] == fault["step"])


def _spoil_gradients(spoil: "Callable[[Tensor], object]", again: Callable[[], bool]) -> None:
    """Of the next chunk that is sent, and of others as long as asked for ``again``."""
    from myriad.parallel.chunk import Chunk

    reduce, done = Chunk.start_reduce, False

    def reducing(self: Chunk) -> None:
        nonlocal done
        if done and not again():
            Chunk.start_reduce = reduce  # type: ignore[method-assign]
        else:
            done = True
            self.start_gradients()
            spoil(self.sums)
        reduce(self)

    Chunk.start_reduce = reducing  # type: ignore[method-assign]


def _slow_down(fault: dict[str, Any]) -> None:
    """From now on each forward and backward takes ``factor`` times what it would: the processor's time that
    its thread takes is slept in addition, so that what waits inside it is not made longer."""
    from myriad.parallel import runtime
    from myriad.parallel.compute import Eager

    def slowed(compute: Callable[..., Any]) -> Callable[..., Any]:
        def compute_slowly(*arguments: Any, **keys: Any) -> Any:
            began = time.thread_time()
            result = compute(*arguments, **keys)
            time.sleep((fault["factor"] - 1) * (time.thread_time() - began))
            return result

        return compute_slowly

    for owner, name in (
        (Eager, "forward"),
        (Eager, "backward"),
        (runtime, "apply_deferred"),
    ):
        setattr(owner, name, slowed(getattr(owner, name)))


def _fill_memory(fault: dict[str, Any]) -> NoReturn:
    """Until the kernel kills somebody: this process has taken the most."""
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
    "spike-always": _spike,  # in no scenario: a run that skips a batch has no undisturbed one to be equal to
    "slow": _slow_down,
}


class MemoryLimit:
    """Of a control group, of either version."""

    def __init__(self, group: Path) -> None:
        v2 = (group / "memory.max").exists()
        self._limit = group / ("memory.max" if v2 else "memory.limit_in_bytes")
        self._used = group / ("memory.current" if v2 else "memory.usage_in_bytes")
        self._none = "max" if v2 else "-1"

    def used(self) -> int:
        """Bytes."""
        return int(self._used.read_text())

    def set(self, num_bytes: int | None) -> None:
        """``None``: there is no limit."""
        self._limit.write_text(self._none if num_bytes is None else str(num_bytes))
