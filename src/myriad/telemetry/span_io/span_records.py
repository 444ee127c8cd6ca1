"""Define the 32-byte record of a span, which is the same in a rank's ring, in a batch and in a reader.

    start_ns | duration_ns | step | rank | name | stage | micro_batch | chunk
    int64      int64         int32  int32  int16  int16   int16         int16

``name`` is an index into a list of names that is stored beside the records. In the other int16 fields, -1
means not applicable. ``chunk`` is the stage whose parameters or gradients are communicated; the parameters
that the first and the last stage share have the number after the last stage's. In the spans of a ring
(`RING_SPANS`) it is the ring's step. ``start_ns`` counts from the
epoch (in a ring: by the machine's monotonic clock)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "CLASSES",
    "PHASES",
    "RECORD",
    "RECORD_BYTES",
    "RING_SPANS",
    "Records",
    "chunk_word",
    "class_of",
    "evaluated",
    "phase_of",
]

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
"""A one-dimensional array of dtype `RECORD`."""

_OF_A_STEP = {
    # span's name: its phase, its class
    "load": ("data", "data"),
    "forward": ("forward", "compute"),
    "backward": ("backward", "compute"),
    "backward_input": ("backward", "compute"),
    "backward_weight": ("weight gradient", "compute"),
    "paired_forward": ("forward and backward", "compute"),
    "paired_backward": ("forward and backward", "compute"),
    "send": ("send", "pp"),
    "receive": ("receive wait", "pp"),
    "exchange": ("receive wait", "pp"),
    "wait": ("receive wait", "pp"),
    "tensor_comm": ("tensor", "tp"),
    "expert_comm": ("experts", "ep"),
    "context_comm": ("context", "cp"),
    "ring_attention": ("ring attention", "compute"),
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
    "reduce_across": ("reduce", "dp"),
    "start_across": ("reduce", "dp"),
    "await_across": ("reduce", "dp"),
    "clip": ("optimizer", "optimizer"),
    "start_momentum": ("gather", "dp"),
    "await_momentum": ("gather", "dp"),
    "orthogonalize": ("optimizer", "optimizer"),
    "start_scatter": ("gather", "dp"),
    "await_scatter": ("gather", "dp"),
    "update": ("optimizer", "optimizer"),
    "step": ("optimizer", "optimizer"),
    "start_offload": ("host copy", "offload"),
    "await_offload": ("host copy", "offload"),
    "start_fetch": ("host copy", "offload"),
    "await_fetch": ("host copy", "offload"),
    "start_state_in": ("host copy", "offload"),
    "await_state_in": ("host copy", "offload"),
    "start_state_out": ("host copy", "offload"),
    "await_state_out": ("host copy", "offload"),
    "checkpoint_copy": ("checkpoint copy", "checkpoint"),
    "collect_garbage": ("garbage collection", "garbage"),
    "check": ("check in a gap", "other"),
}
_EVALUATE = ("evaluate", "other")


def evaluated(name: str) -> str:
    """Return the name of a span during an evaluation, whose forwards must not count as a step's."""
    return f"evaluate_{name}"


PHASES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {**_OF_A_STEP, "evaluate": _EVALUATE} | {evaluated(name): _EVALUATE for name in _OF_A_STEP}
)
"""Phase and class of each span that Myriad records. The phase is shown; the class is one of `CLASSES`."""

CLASSES = (
    "compute",
    "tp",
    "ep",
    "cp",
    "pp",
    "dp",
    "optimizer",
    "data",
    "offload",
    "checkpoint",
    "garbage",
    "other",
)


RING_SPANS = frozenset({"context_comm", "ring_attention"})
"""Spans of context parallelism, whose ``chunk`` is a step of the ring: the keys of the rank so many places
before."""


def chunk_word(name: str) -> str:
    """Return what the field ``chunk`` is called in spans of this name."""
    return "ring_step" if name in RING_SPANS else "chunk"


def phase_of(name: str) -> str:
    """Return the phase of a span. For spans that a job added it is their name."""
    return PHASES[name][0] if name in PHASES else name


def class_of(name: str) -> str:
    """Return the class of a span, one of `CLASSES`."""
    return PHASES[name][1] if name in PHASES else "other"
