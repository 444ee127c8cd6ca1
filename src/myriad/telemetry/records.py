"""One span as 32 bytes, the same in a rank's ring, in a batch on its way, and in a reader's memory.

    start_ns | duration_ns | step | rank | name | stage | micro_batch | chunk
    int64      int64         int32  int32  int16  int16   int16         int16

``name`` is an index into a list of names that travels beside the records; -1 in the others: has no meaning.
``chunk``: whose parameters or gradients move, by the number of their stage; those that the first and the last
stage share have the number after the last stage's.
``start_ns`` counts from the epoch (in a ring: by the machine's monotonic clock).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["CLASSES", "PHASES", "RECORD", "RECORD_BYTES", "Records", "class_of", "evaluated", "phase_of"]

RECORD = np.dtype(
    [
        ("start_ns", "<i8"),
        ("duration_ns", "<i8"),
        ("step", "<i4"),
        ("rank", "<i4"),
        ("name", "<i2"),
        ("stage", "<i2"),
        ("micro_batch", "<i2"),
        ("chunk", "<i2"),
    ]
)
RECORD_BYTES = RECORD.itemsize
Records = npt.NDArray[Any]
"""Of dtype `RECORD`, one dimension."""

_OF_A_STEP = {
    # span's name: its phase, its class
    "load": ("data", "data"),
    "forward": ("forward", "compute"),
    "backward": ("backward", "compute"),
    "backward_input": ("backward", "compute"),
    "backward_weight": ("weight gradient", "compute"),
    "send": ("send", "pp"),
    "receive": ("receive wait", "pp"),
    "exchange": ("receive wait", "pp"),
    "wait": ("receive wait", "pp"),
    "tensor_comm": ("tensor", "tp"),
    "gather": ("gather", "dp"),
    "start_gather": ("gather", "dp"),
    "await_gather": ("gather", "dp"),
    "release": ("gather", "dp"),
    "gather_tied": ("gather", "dp"),
    "reduce_tied": ("reduce", "dp"),
    "sync_tied": ("reduce", "dp"),
    "reduce": ("reduce", "dp"),
    "start_reduce": ("reduce", "dp"),
    "await_reduce": ("reduce", "dp"),
    "clip": ("optimizer", "optimizer"),
    "update": ("optimizer", "optimizer"),
    "step": ("optimizer", "optimizer"),
    "checkpoint_copy": ("checkpoint copy", "checkpoint"),
    "collect_garbage": ("garbage collection", "garbage"),
    "check": ("check in a gap", "other"),
}
_EVALUATE = ("evaluate", "other")


def evaluated(name: str) -> str:
    """What a span is called in a program that trains nothing: its forwards are no forwards of a step."""
    return f"evaluate_{name}"


PHASES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {**_OF_A_STEP, "evaluate": _EVALUATE} | {evaluated(name): _EVALUATE for name in _OF_A_STEP}
)
"""Of the spans that a rank makes by itself: what people call it, and what kind of loss or gain it is."""

CLASSES = ("compute", "tp", "pp", "dp", "optimizer", "data", "checkpoint", "garbage", "other")


def phase_of(name: str) -> str:
    """A span that a job added is a phase of its own."""
    return PHASES[name][0] if name in PHASES else name


def class_of(name: str) -> str:
    """One of `CLASSES`."""
    return PHASES[name][1] if name in PHASES else "other"
